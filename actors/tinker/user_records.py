"""What a trainer stores of its users beside states of models: runs, sessions, checkpoints."""

import asyncio
import secrets
import shutil
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ...broker.client.rpc import RequestContext, Service
from ...schemas.config.sections import ADAPTER_FILES
from ...schemas.tinker import sampling
from ...schemas.tinker.checkpoints import (
    ChangeCheckpoint,
    CheckpointExport,
    CheckpointPage,
    ExportCheckpoint,
    FetchFile,
    FilePart,
    ListCheckpoints,
    ListRuns,
    ListSessions,
    Metadata,
    RunPage,
    SessionPage,
    SessionState,
    TellSession,
    TinkerCheckpoint,
    TinkerSession,
    TrainingRun,
)
from ...schemas.tinker.names import CheckpointName, ModelName, session_name
from ...schemas.tinker.operation import AboutCheckpoint, ModelInfo
from ...schemas.wire.errors import MessageError, NotFoundError, SessionOverError
from ...schemas.wire.subjects import JobScope, rpc
from ..storage.tinker_checkpoints import CheckpointFolders, StoredCheckpoint, missing
from .checkpoints import (
    MAX_BYTES,
    CheckpointCatalog,
    Exports,
    InflightWeights,
    read_record,
    write_record,
)
from .models import Models

# -- training runs: models that were made, in memory or not ----------------------------------------

MAX_RUNS = 10_000
"""Of one user: of those beyond, the oldest without checkpoints are forgotten."""
_FILE = "run.json"


@dataclass(frozen=True)
class StoredRun:
    """One training run."""

    info: ModelInfo
    time: float
    user_metadata: Metadata | None


class TrainingRuns:
    """All users' training runs of one trainer."""

    def __init__(self, folder: Path, checkpoints: CheckpointCatalog) -> None:
        """Keep them below `folder`."""
        self._folder = folder
        self._checkpoints = checkpoints
        self._users: dict[str, dict[ModelName, StoredRun]] = {}
        self._lock = threading.Lock()

    def load(self) -> None:
        """Read what is there."""
        for file in sorted(self._folder.glob(f"*/*/{_FILE}")):
            result = read_record(file)
            if result is not None and (run := _run_in(result)) is not None:
                mine = self._users.setdefault(file.parents[1].name, {})
                mine[ModelName.parse(run.info.model)] = run

    def begin(self, user: str, info: ModelInfo, metadata: Metadata | None, time: float) -> None:
        """Note that a model was made; again, it changes nothing. Raises StorageError."""
        name, run = ModelName.parse(info.model), StoredRun(info, time, metadata)
        value = {"info": info.to_map(), "time": time, "user_metadata": metadata}
        write_record(self._place(user, name) / _FILE, value)
        with self._lock:
            mine = self._users.setdefault(user, {})
            mine[name] = run
            over = sorted(mine, key=lambda one: mine[one].time)[: max(0, len(mine) - MAX_RUNS)]
        for old in over:
            self._forget(user, old)

    def of_user(self, user: str, used: dict[ModelName, float]) -> list[TrainingRun]:
        """Return a user's runs, the last used first; `used` has the times of models."""
        with self._lock:
            mine = dict(self._users.get(user, {}))
        newest = self._newest(user)
        matches = [_run_info(user, run, newest, used.get(name, 0.0)) for name, run in mine.items()]
        return sorted(matches, key=lambda run: run.time, reverse=True)

    def owner(self, session: str) -> str | None:
        """Return the user with runs of a session."""
        with self._lock:
            for user, mine in self._users.items():
                if any(name.session == session for name in mine):
                    return user
        return None

    def models_of(self, user: str, session: str) -> list[str]:
        """Return the models of a session, in order."""
        with self._lock:
            mine = [name for name in self._users.get(user, {}) if name.session == session]
        return [str(name) for name in sorted(mine, key=lambda name: name.number)]

    def _newest(self, user: str) -> dict[tuple[str, str], TinkerCheckpoint]:
        """Return the newest checkpoint of each model and kind."""
        collected: dict[tuple[str, str], TinkerCheckpoint] = {}
        for item in self._checkpoints.of_user(user):
            if not item.passing:
                collected.setdefault((str(item.name.model), item.name.kind), item.describe())
        return collected

    def _forget(self, user: str, name: ModelName) -> None:
        if self._checkpoints.of_user(user, name):
            return
        with self._lock:
            self._users[user].pop(name, None)
        (self._place(user, name) / _FILE).unlink(missing_ok=True)
        if not any(self._place(user, name).glob("state")):
            shutil.rmtree(self._place(user, name), ignore_errors=True)

    def _place(self, user: str, name: ModelName) -> Path:
        return self._folder / user / f"{name.session}.train.{name.number}"


def _run_info(
    user: str, run: StoredRun, newest: dict[tuple[str, str], TinkerCheckpoint], used: float
) -> TrainingRun:
    model = run.info.model
    checkpoint = newest.get((model, "weights"))
    sampled = newest.get((model, "sampler_weights"))
    saved = [item.time for item in (checkpoint, sampled) if item is not None]
    return TrainingRun(
        model=model,
        base=run.info.base,
        rank=run.info.rank,
        owner=user,
        time=max(run.time, used, *saved),
        user_metadata=run.user_metadata,
        checkpoint=checkpoint,
        sampler_checkpoint=sampled,
    )


def _run_in(value: dict[str, Any]) -> StoredRun | None:
    try:
        info = ModelInfo.from_map(value["info"])
        return StoredRun(info, float(value["time"]), value["user_metadata"])
    except (KeyError, TypeError, ValueError, MessageError):
        return None


# -- sessions: their owner, what was reported, whether they go on ----------------------------------

MAX_SESSIONS = 10_000
"""Of one user: the oldest is forgotten."""
MAX_SAMPLERS = 256
"""Of one session, the newest ones."""
ABANDONED_S = 86400.0
"""A session without a message for so long is abandoned."""
_FOLDER = "sessions"


class TinkerSessions:
    """All users' sessions reported to one trainer."""

    def __init__(self, folder: Path, runs: TrainingRuns) -> None:
        """Keep them below `folder`."""
        self._folder = folder
        self._runs = runs
        self._users: dict[str, dict[str, TinkerSession]] = {}
        self._owners: dict[str, str] = {}
        self._lock = threading.Lock()
        self._loaded = time.time()

    def load(self) -> None:
        """Read what is there."""
        for file in sorted(self._folder.glob(f"*/{_FOLDER}/*.json")):
            result = read_record(file)
            if result is not None and (session := _session_in(result)) is not None:
                user = file.parents[1].name
                live = session.model_copy(update={"seen": self._loaded})  # as far as is known
                self._users.setdefault(user, {})[session.session] = live
                self._owners[session.session] = user

    def check_owner(self, user: str, session: str) -> None:
        """Raise NotFoundError for another user's session."""
        with self._lock:
            owner = self._owners.get(session)
        if (owner or self._runs.owner(session) or user) != user:
            raise NotFoundError(
                f"there is no session {session}", hint="create_session returns a session's id"
            )

    def record_event(self, user: str, event: TellSession) -> SessionState:
        """Record a report of a session; raises NotFoundError for another user's."""
        self.check_owner(user, session_name(event.session))
        with self._lock:
            known = self._users.get(user, {}).get(event.session)
            if known is None:
                if event.event != "begin" and not self._runs.models_of(user, event.session):
                    return SessionState(state="unknown")
                known = TinkerSession(session=event.session, time=time.time())
            now = _changed(known, event)
            mine = self._users.setdefault(user, {})
            mine[event.session], self._owners[event.session] = now, user
            if now.model_dump(exclude={"seen"}) != known.model_dump(exclude={"seen"}) or (
                event.event == "begin"
            ):
                write_record(self._file(user, event.session), now.to_map())
            for old in list(mine)[: max(0, len(mine) - MAX_SESSIONS)]:
                del mine[old], self._owners[old]
                self._file(user, old).unlink(missing_ok=True)
        return SessionState(state="over" if now.reason else "live")

    def check_open(self, user: str, session: str) -> None:
        """Raise SessionOverError for a session that was finished."""
        with self._lock:
            known = self._users.get(user, {}).get(session)
        if known is not None and known.reason:
            raise SessionOverError(
                f"session {session} is over: {known.reason}",
                hint="begin another one; what was saved of it can be loaded there",
            )

    def is_over(self, user: str, session: str, used: float) -> bool:
        """Whether a session is abandoned.

        It was finished, or nothing was heard of it for a day; `used` is when a model of it was used
        last, by the monotonic clock, 0 if never by this trainer.
        """
        with self._lock:
            known = self._users.get(user, {}).get(session)
        if known is not None and known.reason:
            return True
        heard = self._loaded if known is None else known.seen
        is_idle = not used or time.monotonic() - used > ABANDONED_S
        return is_idle and time.time() - heard > ABANDONED_S

    def page(self, user: str, request: ListSessions) -> SessionPage:
        """Return a part of the list of a user's sessions, or one, with their models."""
        with self._lock:
            mine = list(self._users.get(user, {}).values())
        matches = [item for item in mine if request.session in ("", item.session)]
        matches.sort(key=lambda one: one.time, reverse=True)
        part = matches[request.offset : request.offset + request.limit]
        whole = [
            item.model_copy(update={"models": self._runs.models_of(user, item.session)})
            for item in part
        ]
        return SessionPage(sessions=whole, total=len(matches))

    def _file(self, user: str, session: str) -> Path:
        return self._folder / user / _FOLDER / f"{session}.json"


def _changed(known: TinkerSession, event: TellSession) -> TinkerSession:
    update: dict[str, Any] = {"seen": time.time()}
    if event.event == "begin":
        names = ("user_metadata", "display_name", "sdk_version")
        update |= {name: getattr(event, name) for name in names}
    elif event.event == "finish" and not known.reason:
        update["reason"] = event.reason or "finished"
    elif event.event == "sampler" and event.sampler not in known.samplers:
        update["samplers"] = [*known.samplers, event.sampler][-MAX_SAMPLERS:]
    return known.model_copy(update=update)


def _session_in(value: dict[str, Any]) -> TinkerSession | None:
    try:
        return TinkerSession.from_map(value)
    except MessageError:
        return None


# -- requests of users -----------------------------------------------------------------------------


class CheckpointEndpoints:
    """Answers them; each in a thread, as it reads and writes files."""

    def __init__(
        self,
        folders: CheckpointFolders,
        checkpoints: CheckpointCatalog,
        runs: TrainingRuns,
        sessions: TinkerSessions,
        exports: Exports,
    ) -> None:
        self._folders = folders
        self._checkpoints = checkpoints
        self._runs = runs
        self._sessions = sessions
        self._exports = exports
        self._models = Models()
        self._epoch = time.time() - time.monotonic()

    async def open(self, service: Service, name: str, models: Models) -> None:
        """Answer below the name of a service; `models` are the ones that it trains."""
        self._models = models
        open_ = service.endpoint
        await open_("checkpoint", rpc("*", name, "checkpoint"), AboutCheckpoint, self._about)
        await open_("checkpoints", rpc("*", name, "checkpoints"), ListCheckpoints, self._list)
        await open_("change", rpc("*", name, "change"), ChangeCheckpoint, self._change)
        await open_("export", rpc("*", name, "export"), ExportCheckpoint, self._export)
        await open_("fetch", rpc("*", name, "fetch"), FetchFile, self._fetch)
        await open_("runs", rpc("*", name, "runs"), ListRuns, self._list_runs)
        await open_("session", rpc("*", name, "session"), TellSession, self._tell)
        listed = rpc("*", name, "session-list")
        await open_("session-list", listed, ListSessions, self._list_sessions)

    async def sweep(self) -> int:
        """Remove what has expired."""
        return await asyncio.to_thread(partial(self._checkpoints.sweep, wanted=self._is_wanted))

    async def _about(self, request: AboutCheckpoint, context: RequestContext) -> ModelInfo:
        name = CheckpointName.parse(request.path)
        reply = await asyncio.to_thread(self._folders.find, context.user, name)
        if reply.user == context.user:
            self._checkpoints.note(reply)
        return reply.info

    async def _list(self, request: ListCheckpoints, context: RequestContext) -> CheckpointPage:
        if request.model:
            self._check_run(context.user, ModelName.parse(request.model))
        return await asyncio.to_thread(self._checkpoints.page, context.user, request)

    async def _change(self, request: ChangeCheckpoint, context: RequestContext) -> TinkerCheckpoint:
        change = partial(self._checkpoints.change, wanted=self._is_wanted)
        return await asyncio.to_thread(change, context.user, request)

    async def _export(self, request: ExportCheckpoint, context: RequestContext) -> CheckpointExport:
        return await asyncio.to_thread(self._exports.export, context.user, request.path)

    async def _fetch(self, request: FetchFile) -> FilePart:
        return await asyncio.to_thread(self._exports.fetch, request)

    async def _list_runs(self, request: ListRuns, context: RequestContext) -> RunPage:
        used = {
            model.name: model.used + self._epoch
            for model in self._models
            if model.user == context.user and model.used
        }
        if request.model:
            self._check_run(context.user, ModelName.parse(request.model))
        runs = await asyncio.to_thread(self._runs.of_user, context.user, used)
        runs = [run for run in runs if request.model in ("", run.model)]
        return RunPage(runs=runs[request.offset : request.offset + request.limit], total=len(runs))

    async def _tell(self, event: TellSession, context: RequestContext) -> SessionState:
        return await asyncio.to_thread(self._sessions.record_event, context.user, event)

    async def _list_sessions(self, request: ListSessions, context: RequestContext) -> SessionPage:
        return await asyncio.to_thread(self._sessions.page, context.user, request)

    def _check_run(self, user: str, name: ModelName) -> None:
        """Raise NotFoundError for a run that a user does not have."""
        if str(name) not in self._runs.models_of(user, name.session):
            raise NotFoundError(
                f"there is no training run {name}", hint="list_training_runs lists them"
            )

    def _is_wanted(self, name: CheckpointName) -> bool:
        """Whether an operation that waits is to load a checkpoint."""
        path = str(name).encode()
        return any(
            operation.kind == "load_weights" and path in operation.body
            for model in self._models
            for operation in list(model.waiting.values())
        )


# Requests of samplers. A sampler that shares the trainer's disk reads adapters there (a mark in the
# folder shows that it is the same disk); others fetch the files in parts.

PART_BYTES = 512 << 10
_MARK = ".mark"


def mark_of(folder: Path) -> str:
    """Return the mark of one trainer's folder; empty: it has none."""
    try:
        return (folder / _MARK).read_text(encoding="utf-8")
    except OSError:
        return ""


def find_snapshot(
    folders: CheckpointFolders, user: str, name: CheckpointName, *, moves: bool
) -> StoredCheckpoint:
    """Return what a user's samples are drawn from now; raises NotFoundError."""
    if moves:
        return InflightWeights(folders).newest(user, name)
    return folders.find(user, name)


class SnapshotEndpoints:
    """Answers the samplers of a trainer's job, who say for whom they ask."""

    def __init__(self, folder: Path, *, part_bytes: int = PART_BYTES) -> None:
        """Tell of the checkpoints below `folder`."""
        self._folder = folder
        self._part_bytes = part_bytes
        self._folders = CheckpointFolders(folder)

    async def open(self, service: Service, scope: JobScope) -> None:
        """Answer from now on."""
        await asyncio.to_thread(self._set_mark)
        found, part = scope.snapshot("find"), scope.snapshot("fetch")
        await service.endpoint("snapshot-find", found, sampling.FindSnapshot, self._find)
        await service.endpoint("snapshot-fetch", part, sampling.FetchSnapshot, self._fetch)

    async def _find(self, request: sampling.FindSnapshot) -> sampling.FoundSnapshot:
        return await asyncio.to_thread(self._found, request)

    def _found(self, request: sampling.FindSnapshot) -> sampling.FoundSnapshot:
        mark = mark_of(self._folder)
        if not request.path:
            return sampling.FoundSnapshot(mark=mark)
        name = CheckpointName.parse(request.path)
        stored = find_snapshot(self._folders, request.user, name, moves=request.moves)
        try:
            sizes = {file: (stored.folder / file).stat().st_size for file in ADAPTER_FILES}
        except OSError as error:
            raise missing(name) from error
        return sampling.FoundSnapshot(
            mark=mark, owner=stored.user, path=str(stored.name), seq=stored.seq, files=sizes
        )

    async def _fetch(self, request: sampling.FetchSnapshot) -> sampling.SnapshotPart:
        return await asyncio.to_thread(self._part, request)

    def _part(self, request: sampling.FetchSnapshot) -> sampling.SnapshotPart:
        name = CheckpointName.parse(request.path)
        stored = self._folders.find(request.user, name)
        if stored.seq != request.seq or request.file not in ADAPTER_FILES:
            raise NotFoundError(f"{name} was saved anew", hint="sample again")
        try:
            with (stored.folder / request.file).open("rb") as file:
                file.seek(request.offset)
                return sampling.SnapshotPart(data=file.read(self._part_bytes))
        except OSError as error:  # removed meanwhile
            raise missing(name) from error

    def _set_mark(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        if not mark_of(self._folder):
            (self._folder / _MARK).write_text(secrets.token_hex(8), encoding="utf-8")


class UserRecords:
    """Checkpoints, runs and sessions below one folder, and the calls about them."""

    def __init__(self, folder: Path, *, max_bytes: int = MAX_BYTES) -> None:
        """Keep them below `folder`, of each user's checkpoints at most `max_bytes`."""
        folders = CheckpointFolders(folder)
        self.checkpoints = CheckpointCatalog(folders, max_bytes=max_bytes)
        self.runs = TrainingRuns(folder, self.checkpoints)
        self.sessions = TinkerSessions(folder, self.runs)
        self.inflight = InflightWeights(folders)
        self.snapshots = SnapshotEndpoints(folder)
        exports = Exports(folder, folders)
        self.calls = CheckpointEndpoints(
            folders, self.checkpoints, self.runs, self.sessions, exports
        )

    def load(self) -> None:
        """Read what is there."""
        self.checkpoints.load()
        self.runs.load()
        self.sessions.load()
