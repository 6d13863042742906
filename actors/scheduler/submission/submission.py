"""Submit a job: check it, name it, create its streams and its run folder.

Submitting is idempotent by the client's request id, and so is each step of it: an interrupted
submission continues where it was when it is sent again.
"""

import asyncio
import contextlib
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

from ....broker.client.connection import Broker
from ....broker.jobs import JobStore, is_final
from ....schemas.config import sections
from ....schemas.config.agent import runs_programs
from ....schemas.config.job import JobConfig
from ....schemas.config.load_config import check_keys, parse_config
from ....schemas.job import ActorPlacement, ConfigureRequest, JobRecord, SubmitRequest
from ....schemas.tinker.names import is_path
from ....schemas.wire.codec import merged
from ....schemas.wire.errors import (
    ConfigError,
    MessageError,
    StateError,
    TinkermqError,
)
from ....schemas.wire.message import new_id
from ....schemas.wire.subjects import DEFAULT_USER, JobScope, token
from ...storage.access import (
    in_default_folder,
    named_by,
    operator_stores,
    output_roots,
    refuse_other_stores,
    with_allowed_folders,
)
from ...storage.checkpoints import free_copies
from ...storage.stores import Stores
from ..jobs import states
from ..jobs.secrets import SecretStore
from ..jobs.view import JobsView, size_of
from ..reconciler import Reconciler
from . import origins
from .access import (
    refuse_code_of_others,
    refuse_endpoints,
    refuse_network,
    refuse_own_algorithms,
    refuse_runs_of_others,
    refuse_second_service,
    refuse_unregistered_game,
    refuse_unshown,
)
from .checks import JobChecks

# -- names: `<env>-<model>-<two words>` for a run, `serve-<run>-<step>` for a server ---------------

_PART_CHARS = 20
_SOURCE_CHARS = 36
_NOT_NAME = re.compile(r"[^a-z0-9]+")


_HELPERS = {"infer": "serve", "eval": "eval"}


def names(config: dict[str, Any], kind: str, source: str) -> Iterator[str]:
    """Yield names for a job that was given none, for ever; `source` is the run that it is for."""
    helps = _HELPERS.get(kind, "")
    if not helps:
        while True:
            yield run_name(config)
    from coolname import generate_slug

    what = _NOT_NAME.sub("-", source.lower()).strip("-")[:_SOURCE_CHARS].strip("-")
    if what:
        yield f"{helps}-{what}"
    while True:
        yield f"{helps}-{what}-{generate_slug(2)}" if what else f"{helps}-{run_name(config)}"[:64]


def run_name(config: dict[str, Any]) -> str:
    """Make a readable name for a run that was given none."""
    from coolname import generate_slug  # loads word lists that an idle scheduler does without

    game = _leaf(config, "env", "game").rsplit(":", 1)[-1].rsplit(".", 1)[-1]
    game = game or ("agent" if runs_programs(config) else "")
    model = _leaf(config, "model", "path").rstrip("/").rsplit("/", 1)[-1]
    parts = [part for part in (_plain(game), _plain(model)) if part]
    return "-".join([*(parts or ["job"]), generate_slug(2)])[:64]


def _leaf(config: dict[str, Any], section: str, key: str) -> str:
    inner = config.get(section)
    value = cast("dict[str, Any]", inner).get(key) if isinstance(inner, dict) else None
    return value if isinstance(value, str) else ""


def _plain(text: str) -> str:
    return _NOT_NAME.sub("-", text.lower()).strip("-")[:_PART_CHARS].strip("-")


def check_name(name: Any) -> None:
    """Raise ConfigError if a run cannot have this name."""
    try:
        token(str(name), what="run name")
    except MessageError as error:
        raise ConfigError(error.message, hint=error.hint) from error


class _Plan(NamedTuple):
    config: JobConfig
    roots: list[Path]
    kind: Literal["train", "infer", "eval", "sft", "tinker"]
    actors: list[ActorPlacement]
    folders: dict[str, str]
    """Of checkpoints that it reads beside its own, by their names."""
    teachers: dict[str, str]

    def apply_to(self, record: JobRecord, **fields: Any) -> JobRecord:
        """Return the record with what is planned, and further fields."""
        planned = {"kind": self.kind, "actors": self.actors}
        planned |= {"output_roots": [str(root) for root in self.roots], **fields}
        return record.model_copy(update=planned)


class Submission:
    """Makes jobs; a name is taken from the moment it is given."""

    def __init__(
        self,
        broker: Broker,
        jobs: JobStore,
        view: JobsView,
        reconciler: Reconciler,
        secrets: SecretStore,
    ) -> None:
        """Make jobs that `reconciler` takes up, with their secrets in `secrets`."""
        self._secrets = secrets
        self._broker = broker
        self.checks = JobChecks(broker, view, reconciler)
        """What a job is checked for before it is queued."""
        self.origins = origins.Origins(broker, view)
        """What jobs begin with."""
        self._jobs = jobs
        self._view = view
        self._names: set[tuple[str, str]] = set()
        self._making: dict[tuple[str, str], asyncio.Future[JobRecord]] = {}

    async def submit(self, user: str, request: SubmitRequest) -> JobRecord:
        """Make a job, or return the one that this request id made before.

        Raises ConfigError, PlacementError, StateError (the name is taken), StorageError.
        """
        self._check_kind(user, request)
        if request.configured:
            parse_config(request.config)
        else:
            check_keys(request.config)
        refuse_unregistered_game(request.config)
        key = (user, request.request_id)
        making = self._making.get(key)
        if making is None:
            making = self._making[key] = asyncio.ensure_future(self._make(user, request))
            making.add_done_callback(lambda _: self._making.pop(key))
        return await asyncio.shield(making)

    def _check_kind(self, user: str, request: SubmitRequest) -> None:
        if request.kind not in states.KINDS:
            raise ConfigError(
                f"this pool does not run jobs of kind {request.kind!r}",
                hint=f"submit one of kind {' or '.join(states.KINDS)}",
            )
        states.check_priority(user, request.priority, self._view.quota(user))

    async def tried(self, user: str, request: SubmitRequest) -> tuple[JobRecord, JobConfig]:
        """Return what a job would be, which is not made: its record and its configuration.

        The record names its actors, and the folder that its run would have.

        Raises what `submit` does before it asks nodes.
        """
        self._check_kind(user, request)
        parse_config(request.config)
        record = await self._blank(user, "tried", request)
        plan = await self._planned(record)
        read_files = self.checks.read_files
        folder = await read_files(user, origins.run_dir_of, plan.config, self._folder_of(user))
        return plan.apply_to(record, run_dir=str(folder)), plan.config

    async def _make(self, user: str, request: SubmitRequest) -> JobRecord:
        async with self.lock(user):
            job = await self._jobs.asked_before(user, request.request_id)
            record = await self._jobs.find_by_id(user, job) if job else None
            return record or await self._create(user, job or new_id(), request)

    def lock(self, user: str) -> asyncio.Lock:
        """Return a lock, so that one request of a user at a time counts and adds to what the user
        holds."""
        return self._view.lock(user)

    async def _blank(self, user: str, job: str, request: SubmitRequest) -> JobRecord:
        """Return the record of a job that waits for its configuration; nothing is stored."""
        states.check_room(user, self._view.quota(user), self._view.held(user), max_jobs=1)
        if request.kind == "tinker":
            is_admin = self._view.is_admin(user) or not self._has_users
            refuse_second_service(request.config, self._view.offers(), is_admin=is_admin)
        fork_of, fork_dir = await self.origins.fork(user, request)
        followed = await self.origins.followed(user, request)
        adapters = await self.origins.adapters(user, request)
        source = followed.name if followed else fork_of or ""
        return JobRecord(
            job=job,
            name=await self._free_name(user, job, request.config, request.kind, source),
            user=user,
            kind=request.kind,
            state="QUEUED",
            reason="waits for its configuration",
            priority=request.priority,
            config=request.config,
            configured=False,
            fork_of=fork_of,
            weights_only=request.weights_only or is_path(fork_of or ""),
            fork_dir=fork_dir,
            follow=followed.job if followed else None,
            serves=followed.name if followed else _served(request, fork_of),
            adapters=adapters,
            secrets=self._secrets.names(user, request.sealed),
            created=time.time(),
        )

    async def _create(self, user: str, job: str, request: SubmitRequest) -> JobRecord:
        blank = await self._blank(user, job, request)
        self._names.add((user, blank.name))
        try:
            self.check_growth(None, blank)
            record = await self._complete(blank, None) if request.configured else blank
            job = await self._jobs.job_of_request(user, request.request_id, job)
            if job != record.job:  # another scheduler has made it meanwhile
                await self._free_copies(blank)
                return await self._jobs.get(user, job)
            if request.sealed:
                await self._secrets.add_sealed(JobScope(user, job), request.sealed)
            return await self._jobs.create(record, f"user {user}")
        finally:
            self._names.discard((user, blank.name))

    async def configure(self, user: str, request: ConfigureRequest) -> JobRecord:
        """Lay keys over those of a job without a complete configuration; maybe start it.

        Raises StateError if the job has started, and what `submit` raises.
        """
        async with self.lock(user):
            record = await self._view.get(user, request.job)
            config = merged(record.config, request.config)
            if record.configured:
                return origins.already_configured(record, config)
            if record.state != "QUEUED":
                raise StateError(
                    f"job {record.name} is {record.state}", hint="submit it as a new job"
                )
            check_keys(config)
            refuse_unregistered_game(config)
            name = record.name
            if request.config.get("name") is not None:
                name = await self._free_name(user, record.job, config, record.kind)
            changed = record.model_copy(update={"config": config, "name": name})
            if request.start:
                changed = await self._complete(changed, record)
            self.check_growth(record, changed)
            return await self._jobs.update(record, lambda _: changed)

    async def _complete(self, record: JobRecord, before: JobRecord | None) -> JobRecord:
        """Return a record that can be placed, with its run folder made; `before` is what is kept.

        A checkpoint of which only the weights count becomes the model of the configuration; a job
        that trains on conversations is one of kind `sft`.
        """
        plan = await self._planned(record)
        config, teachers = plan.config, plan.teachers
        record = plan.apply_to(record, stored_bytes=states.reserved_bytes(config))
        async for result in self.checks.run(record, config):
            if not result.ok:
                raise result.error()
        self.check_growth(before, record)
        run_dir = await self.checks.read_files(
            record.user, origins.make_run_dir, config, self._folder_of(record.user)
        )
        judge = await self._judge(record.user, config.env.reward)
        fork_dir, adapters = await self._kept(record, run_dir)
        try:
            config = await self._with_models(record, config, plan.folders, run_dir)
        except TinkermqError:
            await self._free_copies(record)
            raise
        if record.weights_only:
            config, fork_dir = config.with_model(fork_dir), ""
        fields = {
            "config": config.model_dump(mode="json", exclude_unset=True),
            "configured": True,
            "reason": "waits for a node",
            "run_dir": str(run_dir),
            "fork_dir": fork_dir,
            "adapters": adapters,
            "judge": judge,
            "teachers": teachers,
        }
        return record.model_copy(update=fields)

    async def _with_models(
        self, record: JobRecord, config: JobConfig, folders: Mapping[str, str], run_dir: Path
    ) -> JobConfig:
        """Return a configuration that names the job's own copies of teachers and reference."""
        if not folders:
            return config
        pinned = await asyncio.to_thread(
            origins.pin_models, record, folders, run_dir, Stores(self._broker)
        )
        return config.model_copy(update={"algorithm": config.algorithm.renamed(pinned)})

    async def _planned(self, record: JobRecord) -> _Plan:
        """Return what a job may do, and its actors, as its record says; raises ConfigError."""
        config = parse_config({**record.config, "name": record.name})
        if record.weights_only:
            config = config.with_model(origins.begins_with(record))
        sections.check_judge_prompt(config.env.reward)
        config, roots = await self._allowed(config, record)
        kind = "sft" if record.kind == "train" and config.sft.data else record.kind
        named = await self.origins.teachers(record, config)
        return _Plan(config, roots, kind, states.actors_for(config, kind), *named)

    async def _kept(self, record: JobRecord, run_dir: Path) -> tuple[str, dict[str, str]]:
        """Return the job's own copies of what it begins with; of a half one nothing is left."""
        stores, fork_dir = Stores(self._broker), record.fork_dir
        try:
            if fork_dir:
                fork_dir = await asyncio.to_thread(origins.keep_checkpoint, record, run_dir, stores)
            return fork_dir, await asyncio.to_thread(origins.pin_adapters, record, run_dir, stores)
        except TinkermqError:
            await self._free_copies(record)
            raise

    async def _free_copies(self, record: JobRecord) -> None:
        with contextlib.suppress(TinkermqError):  # the store is away: the earlier error is raised
            await asyncio.to_thread(free_copies, record, Stores(self._broker))

    async def resumed(self, record: JobRecord, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields with which a job that has ended waits for its next attempt.

        `changes` are laid over its configuration; where they ask for other actors, it has those.

        Raises StateError, ConfigError, PlacementError, QuotaError.
        """
        config, actors, teachers = (
            origins.changed_config(record, changes),
            record.actors,
            record.teachers,
        )
        if changes:
            refuse_unregistered_game(config.model_dump(mode="json", exclude_unset=True))
            before = self._view.config(record)
            config, roots = await self._allowed(config, record)
            await self.checks.refuse_long_contexts(config, self.checks.reader(record.user, roots))
            folders, teachers = await self.origins.teachers(record, config)
            config = await self._with_models(record, config, folders, Path(record.run_dir))
            wanted = states.actors_for(config, record.kind)
            actors = actors if wanted == states.actors_for(before, record.kind) else wanted
        self.checks.refuse_placing(record.user, actors)
        fields: dict[str, Any] = {
            "attempt": record.attempt + 1,
            "stop": "no",
            "stop_complete": False,
            "stopped_by": "",
            "losses": 0,
            "stored_bytes": states.reserved_bytes(config),
            "actors": states.unplaced(actors),
        }
        if changes:
            fields["config"] = config.model_dump(mode="json", exclude_unset=True)
            fields["teachers"] = teachers
            fields["judge"] = await self._judge(record.user, config.env.reward)
        self.check_growth(record, record.model_copy(update={**fields, "has_streams": True}))
        return fields

    async def _allowed(self, config: JobConfig, record: JobRecord) -> tuple[JobConfig, list[Path]]:
        """Return what the owner of a job may ask for, and where its processes may write.

        Raises ConfigError, AuthError.
        """
        roots = output_roots(has_users=self._has_users)
        config = in_default_folder(config, roots)
        if self._view.is_admin(record.user):
            return config, []
        config = await self.checks.read_files(record.user, with_allowed_folders, config, roots)
        if self._has_users:
            refuse_code_of_others(config)
            refuse_own_algorithms(config, record.user)
            refuse_network(config, record.user)
            await self.checks.read_files(record.user, refuse_unshown, config, record.user, roots)
            refuse_endpoints(config, record.user)
            refuse_other_stores(config, record.user, operator_stores())
            others = self._view.run_folders_of_others(record.user)
            more = named_by(origins.own_settings(record))
            await self.checks.read_files(record.user, refuse_runs_of_others, config, others, more)
        return config, roots

    def check_growth(self, before: JobRecord | None, after: JobRecord) -> None:
        """Raise QuotaError unless there is room for a record, or for what it grows by."""
        user, new = after.user, size_of(after)
        more = new - (size_of(before) if before is not None else 0)
        if more > 0:
            states.check_record(after, new)
            is_admin = self._view.is_admin(user) or not self._has_users
            states.check_bucket(self._view.record_bytes(), more, is_admin=is_admin)
        states.check_room(
            user,
            self._view.quota(user),
            self._view.held(user),
            max_live_jobs=int(before is None or is_final(before)),
            max_record_bytes=more,
            max_stored_bytes=after.stored_bytes - states.stored_bytes(before),
        )

    @property
    def _has_users(self) -> bool:
        return self._broker.user != DEFAULT_USER

    async def _judge(self, user: str, reward: sections.RewardConfig) -> str | None:
        """Return the job that judges episodes through the broker; ConfigError if it cannot."""
        if reward.judge is None or reward.url is not None:
            return None
        return (await self.origins.serving(user, reward.judge, "env.reward.judge")).job

    def _folder_of(self, user: str) -> str:
        """Return the folder for the runs of a user; a pool without users has one for all."""
        return "" if user == DEFAULT_USER and not self._has_users else user

    def _is_taken(self, user: str, job: str, name: str) -> bool:
        """Whether another run of the user has a name."""
        return self._view.owner_of(user, name) not in (None, job) or (user, name) in self._names

    async def _free_name(
        self, user: str, job: str, config: Mapping[str, Any], kind: str, source: str = ""
    ) -> str:
        """Return the configured name if no other run has it, else a new one."""
        name = config.get("name")
        if name is None:
            made = names(dict(config), kind, source)
            return next(item for item in made if not self._is_taken(user, job, item))
        check_name(name)
        if self._is_taken(user, job, name):
            await self._view.refresh()  # the run that had it may have been deleted just now
        if self._is_taken(user, job, name):
            raise StateError(
                f"there is a run named {name!r} already",
                hint=f"go on with it (`tinkermq resume {name}`), or choose another name",
            )
        return name


def _served(request: SubmitRequest, fork_of: str | None) -> str:
    return fork_of or "" if request.kind == "infer" else ""
