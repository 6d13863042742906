"""A job's origin, its run folder, and the configuration changes allowed at a resume.

A job starts from a checkpoint of a run, a `tinker://` checkpoint, or the versions of a live run. A
`tinker://` checkpoint is in the run folder of the service; its path names its owner. It is copied
to the job's own folder before anything reads it.
"""

import asyncio
import contextlib
import itertools
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast
from urllib.parse import quote

from ....broker.client.connection import Broker
from ....broker.feed import ValidationScore, best_of, read_scores
from ....broker.jobs import is_final
from ....schemas.config.algorithm import is_checkpoint, served_job
from ....schemas.config.job import JobConfig
from ....schemas.config.load_config import parse_config, with_changes
from ....schemas.config.sections import is_url
from ....schemas.job import BEST_STEP, LAST_STEP, JobRecord, SubmitRequest
from ....schemas.local.folder import Folder
from ....schemas.tinker.names import CheckpointName, is_path
from ....schemas.wire import errors
from ...storage.access import without_tilde
from ...storage.adapters import base_of, is_adapter
from ...storage.checkpoints import (
    free_copies,
    is_put_away,
    keep_stored,
    store_of,
    stored_checkpoints,
)
from ...storage.run_folders import checkpoint_folders
from ...storage.stores import Stores
from ...storage.tinker_checkpoints import (
    TINKER_FOLDER,
    CheckpointFolders,
    missing,
)
from ..jobs.view import JobsView
from .access import refuse_removed

# -- the run folder, made when the run is accepted -------------------------------------------------

_FORK = "fork"
_ADAPTERS = "adapters"
_MODELS = "models"


def run_dir_of(config: JobConfig, owner: str = "", in_use: Collection[Path] = ()) -> Path:
    """Return the folder of a run; a number follows its name if that is in `in_use`.

    With an `owner` it is in the owner's folder, as names are unique per user only.
    """
    above, name = without_tilde(config.output_dir).resolve() / owner, str(config.name)
    folder = above / name
    for number in itertools.count(2):
        if folder not in in_use:
            break
        folder = above / f"{name}-{number}"
    return folder


def make_run_dir(config: JobConfig, owner: str = "", in_use: Collection[Path] = ()) -> Path:
    """Create the folder of a run.

    Raises StateError if it holds another run, StorageError if it cannot be created.
    """
    folder = run_dir_of(config, owner, in_use)
    try:
        with Folder(folder, make=True) as made:
            inside = {*(entry.name for entry in made.entries()), *made.strange()}
        occupied = not inside <= {_FORK, _ADAPTERS, _MODELS}
    except OSError as error:
        raise errors.StorageError(
            f"cannot create the run folder {folder}: {error.strerror}",
            hint="set output_dir to a folder that the pool can write to",
        ) from error
    if occupied:
        raise errors.StateError(
            f"the run folder {folder} holds another run",
            hint="choose another name, or move the folder away; a run of this pool continues by "
            f"`tinkermq resume {config.name}`",
        )
    return folder


def find_checkpoint(
    origin: JobRecord,
    step: str,
    stores: Stores,
    scores: Mapping[int, ValidationScore] | None = None,
) -> tuple[int, str]:
    """Return step and place of a run's checkpoint: of a step, the `last` or the `best` one.

    `scores` are those of validated versions.

    The place is a URL for a run with a store, else a folder. Raises NotFoundError, StorageError.
    """
    if (store := store_of(origin)) is None:
        there = {step: str(path) for step, path in checkpoint_folders(origin.run_dir).items()}
    else:
        there = {
            number: checkpoint.url
            for number, checkpoint in stored_checkpoints(origin, stores).items()
        }
    if step == BEST_STEP:
        number = best_of(scores or {}, there)
        if number is None:
            raise errors.NotFoundError(
                f"run {origin.name!r} has no validated checkpoint left",
                hint=f"{_where_else(origin, there)}; a run with training.keep_best=true and "
                "training.test_freq keeps the best",
            )
        return number, there[number]
    number = max(there, default=0) if step == LAST_STEP else int(step)
    if number not in there:
        which = "yet" if step == LAST_STEP else f"of step {number}"
        raise errors.NotFoundError(
            f"run {origin.name!r} has no checkpoint {which} ({store or origin.run_dir})",
            hint=_where_else(origin, there),
        )
    return number, there[number]


def _where_else(origin: JobRecord, there: dict[int, str]) -> str:
    """Return the steps with checkpoints, or why there are none."""
    if there:
        return f"it has those of steps {', '.join(map(str, sorted(there)))}"
    if is_put_away(origin) and origin.archived is not None:
        return f"they are archived: restore them (`tinkermq archive {origin.name} --undo`)"
    if is_final(origin):
        return f"it is {origin.state}, and wrote none (training.save_freq)"
    return "wait until it has written one (training.save_freq)"


class Copies(NamedTuple):
    """A job's own copies of its origin and of folders that it reads."""

    config: JobConfig
    """Its configuration with the copies' paths."""
    fork_dir: str
    adapters: dict[str, str]


async def copy_origins(
    record: JobRecord, config: JobConfig, folders: Mapping[str, str], stores: Stores
) -> Copies:
    """Copy a job's origin, and `folders` that it reads, into its run folder or its store.

    An unfinished copy is removed. Raises NotFoundError, StorageError.
    """
    fork_dir = record.fork_dir
    try:
        if fork_dir:
            fork_dir = await asyncio.to_thread(_keep_checkpoint, record, stores)
        adapters = await asyncio.to_thread(_keep_others, record, record.adapters, _ADAPTERS, stores)
        config = await copy_models(record, config, folders, stores)
    except errors.TinkermqError:
        await free_origins(record, stores)
        raise
    if record.weights_only:
        config, fork_dir = config.with_model(fork_dir), ""
    return Copies(config, fork_dir, adapters)


async def copy_models(
    record: JobRecord, config: JobConfig, folders: Mapping[str, str], stores: Stores
) -> JobConfig:
    """Return a configuration with the job's own copies of teachers and reference."""
    if not folders:
        return config
    copies = await asyncio.to_thread(_keep_others, record, folders, _MODELS, stores)
    return config.model_copy(update={"algorithm": config.algorithm.renamed(copies)})


def with_weights_of(config: JobConfig, followed: JobRecord, its_config: JobConfig) -> JobConfig:
    """Return a server's configuration with the transport of the weights of the run it follows."""
    weights = its_config.weights
    if weights.transport == "file" and weights.folder is None:
        folder = str(Path(followed.run_dir) / "weights")
        weights = weights.model_copy(update={"folder": folder})
    return config.model_copy(update={"weights": weights})


async def free_origins(record: JobRecord, stores: Stores) -> None:
    """Remove the copies of a job that is not created."""
    with contextlib.suppress(errors.TinkermqError):  # the store fails: the earlier error counts
        await asyncio.to_thread(free_copies, record, stores)


def _keep_checkpoint(record: JobRecord, stores: Stores) -> str:
    """Copy a job's checkpoint to its store, or to its run folder. Raises as `pin_checkpoint`."""
    if is_url(record.fork_dir):
        only = record.weights_only or not record.trains  # a server needs no optimiser state
        return keep_stored(record.fork_dir, record.scope, stores, weights_only=only)
    fork = Path(record.fork_dir)
    return str(
        pin_checkpoint(
            fork,
            Path(record.run_dir),
            weights_only=record.weights_only,
            link=not is_path(record.fork_of or ""),
        )
    )


def pin_checkpoint(
    checkpoint: Path,
    run_dir: Path,
    *,
    weights_only: bool = False,
    link: bool = True,
    place: str = _FORK,
) -> Path:
    """Copy a checkpoint to the folder of the run that starts from it; return the copy.

    With `weights_only` the state of the other run's learner is left out. The other run may remove
    its checkpoint meanwhile. Files on the same disk are hard links if `link` allows that; writes to
    one then change the other.

    Raises NotFoundError if the checkpoint was removed, StorageError if the disk is full, and for a
    symbolic link in the checkpoint.
    """
    leave_out = ["learner"] if weights_only else []
    try:
        with Folder(run_dir) as run:
            run.remove(place)  # left by an interrupted submission
            try:
                with Folder(checkpoint.parent) as origin:
                    origin.copy(checkpoint.name, run, place, link=link, leave_out=leave_out)
            except BaseException:
                run.remove(place)
                raise
    except FileNotFoundError as error:
        raise errors.NotFoundError(
            f"the checkpoint {checkpoint} was removed meanwhile",
            hint="fork from a newer one, or set training.keep_every in the run that writes them",
        ) from error
    except OSError as error:
        raise errors.StorageError(
            f"cannot keep {checkpoint} in {run_dir / place}: {error}",
            hint="check the folder's permissions, and `df`",
        ) from error
    return run_dir / place


def _keep_others(
    record: JobRecord, sources: Mapping[str, str], folder: str, stores: Stores
) -> dict[str, str]:
    """Copy the weights of further checkpoints, by name, to a folder; raises the same errors."""
    places: dict[str, str] = {}
    for name, source in sources.items():
        if is_url(source):
            place = f"{folder}/{name}"
            places[name] = keep_stored(source, record.scope, stores, place=place, weights_only=True)
            continue
        places[name] = str(
            pin_checkpoint(
                Path(source),
                Path(record.run_dir),
                weights_only=True,
                link=not is_path(name),
                place=f"{folder}/{quote(name, safe='@')}",
            )
        )
    return places


class JobOrigin(NamedTuple):
    """The origin of a job."""

    fork_of: str | None
    """Full name of its checkpoint; None without one."""
    fork_dir: str
    """The checkpoint's folder or URL; empty without one."""
    followed: JobRecord | None
    """The live run whose versions an inference job serves."""
    adapters: dict[str, str]
    """Folders of an inference job's further adapters, by their names."""


class NamedModels(NamedTuple):
    """The other runs and jobs named in a configuration."""

    folders: dict[str, str]
    """Checkpoints of teachers and the reference, by their names `RUN@STEP`."""
    teachers: dict[str, str]
    """Ids of jobs that are teachers, by their names `job:NAME`."""
    judge: str | None
    """Id of the job that judges episodes through the broker."""


class Origins:
    """Finds the runs, jobs and checkpoints that requests name."""

    def __init__(self, broker: Broker, view: JobsView) -> None:
        """Search the jobs of `view`, and the broker's evaluations."""
        self._broker = broker
        self._view = view

    async def start(self, user: str, request: SubmitRequest) -> JobOrigin:
        """Find a job's origin; raises ConfigError, NotFoundError, StateError."""
        fork_of, fork_dir = await self._fork(user, request)
        followed = await self._followed(user, request)
        return JobOrigin(fork_of, fork_dir, followed, await self._adapters(user, request))

    async def _fork(self, user: str, request: SubmitRequest) -> tuple[str | None, str]:
        """Return the name and folder of a job's checkpoint; None and empty without one."""
        if request.fork_of is None:
            if request.weights_only:
                raise errors.ConfigError(
                    "weights_only is for a run that starts from a checkpoint",
                    hint="name it: fork_of=my-run@40",
                )
            return None, ""
        return await self._find(user, request.fork_of)

    async def _adapters(self, user: str, request: SubmitRequest) -> dict[str, str]:
        """Return the further adapters of an inference job by their names, with their folders."""
        if request.adapters and request.kind != "infer":
            raise errors.ConfigError(
                "adapters are for inference runs", hint="begin a training run with fork_of"
            )
        matches = [await self._find(user, source) for source in request.adapters]
        for name, folder in matches:
            if not is_url(folder) and not is_adapter(folder):
                raise errors.ConfigError(
                    f"{name} is not a LoRA checkpoint, so it cannot be served beside another model",
                    hint=f"serve it by itself: `tinkermq serve {name}`",
                )
        return dict(matches)

    async def _followed(self, user: str, request: SubmitRequest) -> JobRecord | None:
        """Return the live run whose versions an inference job serves."""
        if request.follow is None:
            return None
        if request.kind != "infer" or request.fork_of is not None:
            raise errors.ConfigError(
                f"follow={request.follow!r} is for inference runs without fork_of",
                hint="name either a live run or one of its checkpoints",
            )
        record = await self._view.get(user, request.follow)
        if not record.trains or is_final(record):
            raise errors.StateError(
                f"run {record.name} is a run of kind {record.kind} and {record.state}: it has no "
                "new versions",
                hint=f"serve a checkpoint of a run: {record.name}@STEP",
            )
        return record

    async def named(self, record: JobRecord, config: JobConfig) -> NamedModels:
        """Find the teachers, the reference and the judge named in a configuration.

        Raises NotFoundError, ConfigError for a job that serves nothing.
        """
        user, reward, judge = record.user, config.env.reward, None
        if reward.judge is not None and reward.url is None:
            judge = (await self._serving(user, reward.judge, "env.reward.judge")).job
        if not record.trains:
            return NamedModels({}, {}, judge)
        teachers = set(config.algorithm.teachers.values())
        read = {*teachers, config.algorithm.reference.path or ""}
        folders = {
            name: (await self._find(user, name))[1] for name in sorted(read) if is_checkpoint(name)
        }
        jobs = {
            name: (await self._serving(user, job, "algorithm.teacher")).job
            for name in sorted(teachers)
            if (job := served_job(name)) is not None
        }
        return NamedModels(folders, jobs, judge)

    async def _serving(self, user: str, name: str, key: str) -> JobRecord:
        """Return the inference job named by a key; ConfigError for another kind of job."""
        record = await self._view.get(user, name)
        if record.kind != "infer" or is_final(record):
            raise errors.ConfigError(
                f"{key}={name}: run {record.name} is of kind {record.kind} and {record.state}, "
                "which answers no requests",
                hint="serve the model first (`tinkermq serve …`) and name that job",
            )
        return record

    async def _find(self, user: str, source: str) -> tuple[str, str]:
        """Return the full name of a checkpoint, and its folder."""
        if is_path(source):
            return source, await asyncio.to_thread(self._tinker, user, CheckpointName.parse(source))
        run, _, step = source.partition("@")
        if step not in (LAST_STEP, BEST_STEP) and not step.isdecimal():
            raise errors.ConfigError(
                f"fork_of={source!r} does not name a checkpoint",
                hint=f"write run@step, such as my-run@40, run@{LAST_STEP} or run@{BEST_STEP}",
            )
        origin = await self._view.get(user, run)
        if origin.removal == "delete":
            raise errors.StateError(f"run {origin.name} is being deleted", hint="fork another one")
        scores = await read_scores(self._broker, origin.scope) if step == BEST_STEP else {}
        number, folder = await asyncio.to_thread(
            find_checkpoint, origin, step, Stores(self._broker), scores
        )
        return f"{origin.name}@{number}", folder

    def _tinker(self, user: str, name: CheckpointName) -> str:
        """Return the folder of a checkpoint under the Tinker API that a user may read.

        It is the user's own, or its owner has published it. Raises NotFoundError.
        """
        failure = missing(name)
        for record in list(self._view.live.values()):
            if record.kind == "tinker" and record.run_dir:
                try:
                    folders = CheckpointFolders(Path(record.run_dir) / TINKER_FOLDER)
                    return str(folders.find(user, name).folder)
                except errors.NotFoundError as error:
                    failure = error
        raise failure


def begins_with(record: JobRecord) -> str:
    """Return the model folder of a job that starts from a checkpoint's weights only."""
    return base_of(record.fork_dir) if is_path(record.fork_of or "") else record.fork_dir


# -- changes of the configuration at a resume (pure) -----------------------------------------------

_OPTIMIZER = "learner.optimizer"
_KEPT = (
    ("name", "a run keeps its name and its folder"),
    ("output_dir", "a run keeps its name and its folder"),
    ("storage.url", "its checkpoints are there"),
    ("seed", "the order of its tasks depends on it"),
    ("model", "the run continues with the model of its checkpoint"),
    ("lora", "the run continues with the model of its checkpoint"),
    (_OPTIMIZER, "the checkpoint has the state of that optimiser"),
    ("sft.data", "the order of its tasks depends on it"),
    ("training.batch_size", "the number of issued tasks is counted in batches of that size"),
    ("training.curriculum", "the checkpoint has the state of that curriculum"),
)
"""Keys on which the checkpoint and the log of a run depend, with the reason."""


def changed_config(record: JobRecord, changes: Mapping[str, Any]) -> JobConfig:
    """Return the configuration of an ended job, overlaid with changed keys.

    Raises StateError for a job that cannot continue, and ConfigError for an unknown key, or a key
    that cannot change.
    """
    refuse_removed(record)
    if not record.configured:
        raise errors.StateError(f"run {record.name} was never configured", hint="submit a new run")
    before = parse_config({**record.config, "name": record.name})
    known = before.model_dump(mode="json", exclude_unset=True)
    after = parse_config(with_changes(known, changes))
    for key, why in _KEPT:
        if _value(before, key) != _value(after, key):
            instead = f"tinkermq fork {record.name}@last {key}=…"
            if key == _OPTIMIZER:  # a fork keeps its state
                instead = f"tinkermq train CONFIG --from {record.name}"
            raise errors.ConfigError(
                f"{key} of run {record.name} cannot be changed when it is resumed: {why}",
                hint=f"start a new run from its checkpoint: `{instead}`",
            )
    steps = after.training.num_steps
    if steps is not None and steps != before.training.num_steps and steps < record.version:
        raise errors.ConfigError(
            f"training.num_steps={steps} is less than the {record.version} steps that run "
            f"{record.name} has made",
            hint="give more steps, or start a new run from one of its checkpoints: "
            f"`tinkermq fork {record.name}@{steps} training.num_steps=N`",
        )
    return after


def refuse_changes(record: JobRecord, changes: Mapping[str, Any]) -> None:
    """Raise StateError for a change of a live job."""
    if changes:
        raise errors.StateError(
            f"run {record.name} is {record.state}: its configuration changes only when it is "
            "resumed after its end",
            hint=f"stop it first, with a checkpoint: `tinkermq stop {record.name}`",
        )


def describe_changes(changes: Mapping[str, Any]) -> str:
    """Return a description of changed keys for the job's events."""
    return f"resumed with {', '.join(_leaves(changes))}" if changes else "resumed"


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(cast("Mapping[str, Any]", value), f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}={value}"


def _value(config: JobConfig, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def already_configured(record: JobRecord, config: dict[str, Any]) -> JobRecord:
    """Return the record for a repeated `configure` of a started job; raise if it differs."""
    same = {**config, "name": record.name} == {**record.config, "name": record.name}
    if not same:
        raise errors.StateError(
            f"run {record.name} has its configuration already and is {record.state}",
            hint="submit a new run, or fork this one",
        )
    return record
