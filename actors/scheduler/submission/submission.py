"""Submit a job: check it, name it, create its streams and its run folder.

Submission is idempotent by the client's request id, and so is each step: an interrupted submission
continues when it is repeated.
"""

import asyncio
import itertools
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import structlog

from ....broker.client.connection import Broker
from ....broker.jetstream.streams import has_batches
from ....broker.jobs import JobStore
from ....schemas.config import sections
from ....schemas.config.agent import runs_programs
from ....schemas.config.job import JobConfig
from ....schemas.config.load_config import check_keys, parse_config, with_changes
from ....schemas.job import ConfigureRequest, JobRecord, SubmitRequest
from ....schemas.tinker.names import is_path
from ....schemas.wire.errors import ConfigError, MessageError, StateError
from ....schemas.wire.message import new_id
from ....schemas.wire.subjects import DEFAULT_USER, JobScope, token
from ...storage.stores import Stores
from ..jobs import states
from ..jobs.secrets import SecretStore
from ..jobs.view import JobsView
from ..reconciler import Reconciler
from . import origins
from .access import FileReads, allowed_config, refuse_second_service, refuse_unregistered_game
from .checks import JobChecks

# -- names: `<env>-<model>-<two words>` for a run, `serve-<run>-<step>` for a server ---------------

_PART_CHARS = 20
_SOURCE_CHARS = 36
_NOT_NAME = re.compile(r"[^a-z0-9]+")
_log: structlog.stdlib.BoundLogger = structlog.get_logger()


_STEM_CHARS = 40
_UNSUCCESSFUL = ("FAILED", "CANCELLED")
_HELPERS = {"infer": "serve", "eval": "eval"}


def names(config: dict[str, Any], kind: str, source: str) -> Iterator[str]:
    """Yield names for a job without one, forever; `source` is the run that it serves."""
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
    """Return a readable name for a run without one."""
    from coolname import generate_slug  # loads word lists, which an idle scheduler does not need

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


class Submission:
    """Creates jobs; a name is reserved as soon as it is chosen."""

    def __init__(
        self,
        broker: Broker,
        jobs: JobStore,
        view: JobsView,
        reconciler: Reconciler,
        secrets: SecretStore,
    ) -> None:
        """Create jobs for `reconciler`, with their secrets in `secrets`."""
        self._broker = broker
        self._jobs = jobs
        self._view = view
        self._secrets = secrets
        self._files = FileReads()
        self.origins = origins.Origins(broker, view)
        """Finds the origins of jobs."""
        self.checks = JobChecks(broker, view, reconciler, self._files)
        """The checks before a job is queued."""
        self._names: set[tuple[str, str]] = set()
        self._making: dict[tuple[str, str], asyncio.Future[JobRecord]] = {}

    async def submit(self, user: str, request: SubmitRequest) -> JobRecord:
        """Create a job, or return the one created earlier by this request id.

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
                f"this pool takes no runs of kind {request.kind!r}",
                hint=f"submit one of kind {' or '.join(states.KINDS)}",
            )
        self._view.check_priority(user, request.priority)

    async def tried(self, user: str, request: SubmitRequest) -> tuple[JobRecord, JobConfig]:
        """Return the record and the configuration that a job would have, without creating it.

        The record has its actors and its run folder. Raises what `submit` raises before it asks
        nodes.
        """
        self._check_kind(user, request)
        parse_config(request.config)
        record, config, _ = await self._planned(await self._blank(user, "tried", request))
        folder = await self._run_dir(user, origins.run_dir_of, config)
        return record.model_copy(update={"run_dir": folder}), config

    async def _run_dir(self, user: str, find: Callable[..., Path], config: JobConfig) -> str:
        """Return the run folder of a user's job, found or created by `find`."""
        owner = "" if user == DEFAULT_USER and not self._view.has_users else user
        return str(
            await self._files.read(user, find, config, owner, self._view.run_folders_of(user))
        )

    async def _make(self, user: str, request: SubmitRequest) -> JobRecord:
        async with self._view.lock(user):
            job = await self._jobs.asked_before(user, request.request_id)
            record = await self._jobs.find_by_id(user, job) if job else None
            return record or await self._create(user, job or new_id(), request)

    async def _blank(self, user: str, job: str, request: SubmitRequest) -> JobRecord:
        """Return the record of a job that waits for its configuration; nothing is stored."""
        self._view.check_room(user, max_jobs=1)
        if request.kind == "tinker":
            refuse_second_service(
                request.config, self._view.offers(), is_admin=self._view.may_administer(user)
            )
        start = await self.origins.start(user, request)
        fork_of, followed = start.fork_of, start.followed
        serves = followed.name if followed else fork_of or ""
        return JobRecord(
            job=job,
            name=await self._free_name(user, job, request.config, request.kind, serves),
            user=user,
            kind=request.kind,
            state="QUEUED",
            reason="waits for its configuration",
            priority=request.priority,
            config=request.config,
            configured=False,
            fork_of=fork_of,
            weights_only=request.weights_only or is_path(fork_of or ""),
            fork_dir=start.fork_dir,
            follow=followed.job if followed else None,
            serves=serves if request.kind == "infer" else "",
            adapters=start.adapters,
            secrets=self._secrets.names(user, request.sealed),
            created=time.time(),
        )

    async def _create(self, user: str, job: str, request: SubmitRequest) -> JobRecord:
        blank = await self._blank(user, job, request)
        self._names.add((user, blank.name))
        try:
            self._view.check_growth(None, blank)
            record = await self._complete(blank, None) if request.configured else blank
            job = await self._jobs.job_of_request(user, request.request_id, job)
            if job != record.job:  # another scheduler created it meanwhile
                await origins.free_origins(blank, Stores(self._broker))
                return await self._jobs.get(user, job)
            if request.sealed:
                await self._secrets.add_sealed(JobScope(user, job), request.sealed)
            await self._rename_failed(user, record)
            return await self._jobs.create(record, f"user {user}")
        finally:
            self._names.discard((user, blank.name))

    async def configure(self, user: str, request: ConfigureRequest) -> JobRecord:
        """Overlay keys on a job's incomplete configuration; start the job if requested.

        Raises StateError if the job has started, and what `submit` raises.
        """
        async with self._view.lock(user):
            record = await self._view.get(user, request.job)
            config = with_changes(record.config, request.config)
            if record.configured:
                return origins.already_configured(record, config)
            if record.state != "QUEUED":
                raise StateError(
                    f"run {record.name} is {record.state}", hint="submit it as a new run"
                )
            check_keys(config)
            refuse_unregistered_game(config)
            name = record.name
            if request.config.get("name") is not None:
                name = await self._free_name(user, record.job, config, record.kind)
            changed = record.model_copy(update={"config": config, "name": name})
            if request.start:
                changed = await self._complete(changed, record)
            self._view.check_growth(record, changed)
            await self._rename_failed(user, changed)
            return await self._jobs.update(record, lambda _: changed)

    async def _complete(self, record: JobRecord, before: JobRecord | None) -> JobRecord:
        """Create the run folder; return a record that can be placed; `before` is the stored one.

        A checkpoint used only for its weights becomes the model of the configuration; a job that
        trains on conversations is of kind `sft`.
        """
        planned, config, models = await self._planned(record)
        async for result in self.checks.run(planned, config):
            if not result.ok:
                raise result.error()
        planned = planned.model_copy(update={"stored_bytes": states.reserved_bytes(config)})
        self._view.check_growth(before, planned)
        run_dir = await self._run_dir(record.user, origins.make_run_dir, config)
        planned = planned.model_copy(update={"run_dir": run_dir})
        stores = Stores(self._broker)
        copies = await origins.copy_origins(planned, config, models.folders, stores)
        fields = {
            "config": copies.config.model_dump(mode="json", exclude_unset=True),
            "configured": True,
            "reason": "waits to be placed",
            "fork_dir": copies.fork_dir,
            "adapters": copies.adapters,
        }
        return planned.model_copy(update=fields)

    async def _planned(self, record: JobRecord) -> tuple[JobRecord, JobConfig, origins.NamedModels]:
        """Return a record with kind and actors, its configuration, and the models in it.

        Raises ConfigError for settings that its owner may not use.
        """
        config = parse_config({**record.config, "name": record.name})
        if record.weights_only:
            config = config.with_model(origins.begins_with(record))
        if record.follow is not None:
            followed = await self._view.get(record.user, record.follow)
            config = origins.with_weights_of(config, followed, self._view.config(followed))
        sections.check_judge_prompt(config.env.reward)
        config, roots = await allowed_config(record, config, self._view, self._files)
        kind = "sft" if record.kind == "train" and config.sft.data else record.kind
        models = await self.origins.named(record, config)
        fields = {
            "kind": kind,
            "actors": states.actors_for(config, kind),
            **self._may_write(record.user, roots),
            "teachers": models.teachers,
            "judge": models.judge,
        }
        return record.model_copy(update=fields), config, models

    async def resumed(self, record: JobRecord, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of an ended job for its next attempt.

        `changes` overlay its configuration and may change its actors.

        Raises StateError, ConfigError, PlacementError, QuotaError.
        """
        config, actors = origins.changed_config(record, changes), record.actors
        changed: dict[str, Any] = {}
        if changes:
            refuse_unregistered_game(config.model_dump(mode="json", exclude_unset=True))
            before = self._view.config(record)
            config, roots = await allowed_config(record, config, self._view, self._files)
            may_write = record.model_copy(update=self._may_write(record.user, roots))
            reader = self.checks.reader(may_write)
            await self.checks.refuse_models(config, reader, trains=record.trains)
            models = await self.origins.named(record, config)
            config = await origins.copy_models(record, config, models.folders, Stores(self._broker))
            needed = states.actors_for(config, record.kind)
            actors = actors if needed == states.actors_for(before, record.kind) else needed
            changed = {
                "config": config.model_dump(mode="json", exclude_unset=True),
                "teachers": models.teachers,
                "judge": models.judge,
            }
        self.checks.refuse_placing(record.user, actors)
        fields: dict[str, Any] = {
            "attempt": record.attempt + 1,
            "stop": "no",
            "stop_complete": False,
            "stopped_by": "",
            "losses": 0,
            "stored_bytes": states.reserved_bytes(config),
            "actors": states.unplaced(actors),
            "own_folders": self._own_folders(record.user),
            **changed,
        }
        self._view.check_growth(record, record.model_copy(update={**fields, "has_streams": True}))
        return fields

    def _may_write(self, user: str, roots: Iterable[Path]) -> dict[str, list[str]]:
        """Return the fields of a record with the folders in which its processes may write."""
        return {
            "output_roots": [str(root) for root in roots],
            "own_folders": self._own_folders(user),
        }

    def _own_folders(self, user: str) -> list[str]:
        """Return the folders in which a user's runs lie."""
        above = {folder.parent for folder in self._view.run_folders_of(user)}
        return sorted(str(folder) for folder in above if folder.name == user)

    def _is_taken(self, user: str, job: str, name: str) -> bool:
        """Return whether another run of the user has the name."""
        return self._view.owner_of(user, name) not in (None, job) or (user, name) in self._names

    async def _never_began(self, user: str, name: str) -> JobRecord | None:
        """Return the run of this name if it failed, or was cancelled, before its first step."""
        record = self._view.find(user, name) or await self._view.archive.find(user, name)
        if record is None or record.state not in _UNSUCCESSFUL or record.removal != "no":
            return None
        if record.started is None:
            return record
        if not record.trains or (record.archived is not None and record.version):
            return None
        return None if await has_batches(self._broker, record.scope) else record

    async def _rename_failed(self, user: str, job: JobRecord) -> None:
        """Give another name to the run that had the name of a new job and never began a step."""
        failed = await self._never_began(user, job.name)
        if failed is None or failed.job == job.job:
            return
        stem = f"{failed.name[:_STEM_CHARS]}-{failed.state.lower()}"
        made = (f"{stem}-{number}" for number in itertools.count(1))
        name = next(name for name in made if not self._is_taken(user, failed.job, name))
        _log.info("run_renamed", job=failed.job, name=failed.name, to=name)
        renamed = await self._jobs.rename(failed, name)
        if renamed.archived is not None:
            self._view.archive.enter(renamed)

    async def _free_name(
        self, user: str, job: str, config: Mapping[str, Any], kind: str, source: str = ""
    ) -> str:
        """Return the configured name, or a new one.

        Raises StateError if another run has the name, unless it never began a step.
        """
        name = config.get("name")
        if name is None:
            made = names(dict(config), kind, source)
            return next(item for item in made if not self._is_taken(user, job, item))
        check_name(name)
        if self._is_taken(user, job, name):
            await self._view.refresh()  # the run with this name may just have been deleted
        if self._is_taken(user, job, name) and await self._never_began(user, name) is None:
            raise StateError(
                f"a run named {name!r} exists already",
                hint=f"resume it (`tinkermq resume {name}`), or choose another name",
            )
        return name
