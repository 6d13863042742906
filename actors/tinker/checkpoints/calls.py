"""What users ask a trainer beside training: checkpoints, runs, sessions, files."""

import asyncio
import secrets
import time
from functools import partial
from pathlib import Path

from ....broker.client.rpc import RequestContext, Service
from ....schemas.tinker.checkpoints import (
    ChangeCheckpoint,
    CheckpointExport,
    CheckpointPage,
    ExportCheckpoint,
    FetchFile,
    FilePart,
    ListCheckpoints,
    ListRuns,
    ListSessions,
    RunPage,
    SessionPage,
    SessionState,
    TellSession,
    TinkerCheckpoint,
)
from ....schemas.tinker.names import CheckpointName, ModelName
from ....schemas.tinker.operation import AboutCheckpoint, ModelInfo
from ....schemas.tinker.sampling import (
    FetchSnapshot,
    FindSnapshot,
    FoundSnapshot,
    SnapshotPart,
)
from ....schemas.wire.errors import NotFoundError
from ....schemas.wire.subjects import JobScope, rpc
from ...storage.tinker_checkpoints import CheckpointFolders, StoredCheckpoint, missing
from ..models import Models
from .exports import Exports
from .sessions import TinkerSessions, TrainingRuns
from .store import InflightWeights, KeptCheckpoints


class StoreCalls:
    """Answers them; each in a thread, as it reads and writes files."""

    def __init__(
        self,
        folders: CheckpointFolders,
        checkpoints: KeptCheckpoints,
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

    async def _about(self, asked: AboutCheckpoint, context: RequestContext) -> ModelInfo:
        name = CheckpointName.parse(asked.path)
        found = await asyncio.to_thread(self._folders.find, context.user, name)
        if found.user == context.user:
            self._checkpoints.note(found)
        return found.info

    async def _list(self, asked: ListCheckpoints, context: RequestContext) -> CheckpointPage:
        if asked.model:
            self._check_run(context.user, ModelName.parse(asked.model))
        return await asyncio.to_thread(self._checkpoints.page, context.user, asked)

    async def _change(self, asked: ChangeCheckpoint, context: RequestContext) -> TinkerCheckpoint:
        change = partial(self._checkpoints.change, wanted=self._is_wanted)
        return (await asyncio.to_thread(change, context.user, asked)).describe()

    async def _export(self, asked: ExportCheckpoint, context: RequestContext) -> CheckpointExport:
        return await asyncio.to_thread(self._exports.export, context.user, asked.path)

    async def _fetch(self, asked: FetchFile) -> FilePart:
        return await asyncio.to_thread(self._exports.fetch, asked)

    async def _list_runs(self, asked: ListRuns, context: RequestContext) -> RunPage:
        used = {
            one.name: one.used + self._epoch
            for one in self._models
            if one.user == context.user and one.used
        }
        if asked.model:
            self._check_run(context.user, ModelName.parse(asked.model))
        runs = await asyncio.to_thread(self._runs.of_user, context.user, used)
        runs = [run for run in runs if asked.model in ("", run.model)]
        return RunPage(runs=runs[asked.offset : asked.offset + asked.limit], total=len(runs))

    async def _tell(self, told: TellSession, context: RequestContext) -> SessionState:
        return await asyncio.to_thread(self._sessions.tell, context.user, told)

    async def _list_sessions(self, asked: ListSessions, context: RequestContext) -> SessionPage:
        return await asyncio.to_thread(self._sessions.page, context.user, asked)

    def _check_run(self, user: str, name: ModelName) -> None:
        """Raise NotFoundError for a run that a user does not have."""
        if str(name) not in self._runs.models_of(user, name.session):
            raise NotFoundError(
                f"there is no training run {name}", hint="list_training_runs tells which there are"
            )

    def _is_wanted(self, name: CheckpointName) -> bool:
        """Whether an operation that waits is to load a checkpoint."""
        path = str(name).encode()
        return any(
            operation.kind == "load_weights" and path in operation.body
            for model in self._models
            for operation in list(model.waiting.values())
        )


# What samplers ask the trainer: where an adapter is, and its files where they do not see them.
#
# A sampler that shares the trainer's disk finds there what it wants; the mark in the folder tells
# that it is the same disk. Others fetch the files in parts. Nothing is kept for that.

FILES = ("adapter_config.json", "adapter_model.safetensors")
"""What an adapter is sampled with."""
PART_BYTES = 512 << 10
_MARK = ".mark"


def mark_of(folder: Path) -> str:
    """Return what tells the folder of one trainer from others; empty: it has none."""
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


class SnapshotCalls:
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
        await service.endpoint("snapshot-find", found, FindSnapshot, self._find)
        await service.endpoint("snapshot-fetch", part, FetchSnapshot, self._fetch)

    async def _find(self, asked: FindSnapshot) -> FoundSnapshot:
        return await asyncio.to_thread(self._found, asked)

    def _found(self, asked: FindSnapshot) -> FoundSnapshot:
        mark = mark_of(self._folder)
        if not asked.path:
            return FoundSnapshot(mark=mark)
        name = CheckpointName.parse(asked.path)
        stored = find_snapshot(self._folders, asked.user, name, moves=asked.moves)
        try:
            sizes = {file: (stored.folder / file).stat().st_size for file in FILES}
        except OSError as error:
            raise missing(name) from error
        return FoundSnapshot(
            mark=mark, owner=stored.user, path=str(stored.name), seq=stored.seq, files=sizes
        )

    async def _fetch(self, asked: FetchSnapshot) -> SnapshotPart:
        return await asyncio.to_thread(self._part, asked)

    def _part(self, asked: FetchSnapshot) -> SnapshotPart:
        name = CheckpointName.parse(asked.path)
        stored = self._folders.find(asked.user, name)
        if stored.seq != asked.seq or asked.file not in FILES:
            raise NotFoundError(f"{name} was saved anew", hint="sample again")
        try:
            with (stored.folder / asked.file).open("rb") as file:
                file.seek(asked.offset)
                return SnapshotPart(data=file.read(self._part_bytes))
        except OSError as error:  # removed meanwhile
            raise missing(name) from error

    def _set_mark(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        if not mark_of(self._folder):
            (self._folder / _MARK).write_text(secrets.token_hex(8), encoding="utf-8")
