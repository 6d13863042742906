"""What users ask a trainer beside training: checkpoints, runs, sessions, files."""

import asyncio
import time
from functools import partial

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
from ....schemas.wire.errors import NotFoundError
from ....schemas.wire.subjects import rpc
from ..models import Models
from .exports import Exports
from .folders import CheckpointFolders
from .runs import TrainingRuns
from .sessions import TinkerSessions
from .store import KeptCheckpoints


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
        return (await asyncio.to_thread(change, context.user, asked)).told()

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
