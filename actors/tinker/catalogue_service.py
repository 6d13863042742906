"""Answers requests of users and samplers about the catalogue, in threads: it uses files.

A sampler that shares the trainer's disk reads adapters there; a mark in the folder shows that it is
the same disk. Others fetch the files in parts.
"""

import asyncio
import time
from functools import partial

from ...broker.client.rpc import RequestContext, Service
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
    RunPage,
    SessionPage,
    SessionState,
    TellSession,
    TinkerCheckpoint,
)
from ...schemas.tinker.names import CheckpointName
from ...schemas.tinker.operation import AboutCheckpoint, ModelInfo
from ...schemas.wire.subjects import JobScope, rpc
from .catalogue import Catalogue
from .exports import Exports
from .models import Models


class CatalogueService:
    """The endpoints of one trainer's catalogue."""

    def __init__(self, catalogue: Catalogue, models: Models) -> None:
        """`models` are those that the trainer has; their operations may need checkpoints."""
        self._catalogue = catalogue
        self._models = models
        self._exports = Exports(catalogue.folder, catalogue.folders)
        self._epoch = time.time() - time.monotonic()

    async def open(self, service: Service, scope: JobScope) -> None:
        """Answer from now on: users by the name of the job's service, samplers within the job."""
        await asyncio.to_thread(self._catalogue.folders.set_mark)
        name, open_ = f"tinker-{scope.job}", service.endpoint
        await open_("checkpoint", rpc("*", name, "checkpoint"), AboutCheckpoint, self._describe)
        checkpoints = rpc("*", name, "checkpoints")
        await open_("checkpoints", checkpoints, ListCheckpoints, self._list_checkpoints)
        await open_("change", rpc("*", name, "change"), ChangeCheckpoint, self._change)
        await open_("export", rpc("*", name, "export"), ExportCheckpoint, self._export)
        await open_("fetch", rpc("*", name, "fetch"), FetchFile, self._fetch)
        await open_("runs", rpc("*", name, "runs"), ListRuns, self._list_runs)
        await open_("session", rpc("*", name, "session"), TellSession, self._record_event)
        sessions = rpc("*", name, "session-list")
        await open_("session-list", sessions, ListSessions, self._list_sessions)
        snapshot, part = scope.snapshot("find"), scope.snapshot("fetch")
        await open_("snapshot-find", snapshot, sampling.FindSnapshot, self._find_snapshot)
        await open_("snapshot-fetch", part, FetchFile, self._fetch)

    async def sweep(self) -> int:
        """Remove expired checkpoints."""
        sweep = partial(self._catalogue.sweep, is_wanted=self._is_wanted)
        return await asyncio.to_thread(sweep)

    def _is_wanted(self, name: CheckpointName) -> bool:
        """Whether a waiting operation will load a checkpoint."""
        path = str(name).encode()
        return any(
            operation.kind == "load_weights" and path in operation.body
            for model in self._models
            for operation in list(model.waiting.values())
        )

    # -- requests of users -------------------------------------------------------------------------

    async def _describe(self, request: AboutCheckpoint, context: RequestContext) -> ModelInfo:
        name = CheckpointName.parse(request.path)
        stored = await asyncio.to_thread(self._catalogue.folders.find, context.user, name)
        if stored.user == context.user:
            self._catalogue.add(stored)
        return stored.info

    async def _list_checkpoints(
        self, request: ListCheckpoints, context: RequestContext
    ) -> CheckpointPage:
        return await asyncio.to_thread(self._catalogue.list_checkpoints, context.user, request)

    async def _change(self, request: ChangeCheckpoint, context: RequestContext) -> TinkerCheckpoint:
        change = partial(self._catalogue.change, is_wanted=self._is_wanted)
        return await asyncio.to_thread(change, context.user, request)

    async def _export(self, request: ExportCheckpoint, context: RequestContext) -> CheckpointExport:
        return await asyncio.to_thread(self._exports.export, context.user, request.path)

    async def _fetch(self, request: FetchFile) -> FilePart:
        return await asyncio.to_thread(self._exports.fetch, request)

    async def _list_runs(self, request: ListRuns, context: RequestContext) -> RunPage:
        models = [model for model in self._models if model.user == context.user and model.used]
        used = {model.name: model.used + self._epoch for model in models}
        return await asyncio.to_thread(self._catalogue.list_runs, context.user, request, used)

    async def _record_event(self, event: TellSession, context: RequestContext) -> SessionState:
        return await asyncio.to_thread(self._catalogue.record_event, context.user, event)

    async def _list_sessions(self, request: ListSessions, context: RequestContext) -> SessionPage:
        return await asyncio.to_thread(self._catalogue.list_sessions, context.user, request)

    # -- requests of samplers ----------------------------------------------------------------------

    async def _find_snapshot(self, request: sampling.FindSnapshot) -> sampling.FoundSnapshot:
        return await asyncio.to_thread(self._read_snapshot, request)

    def _read_snapshot(self, request: sampling.FindSnapshot) -> sampling.FoundSnapshot:
        folders = self._catalogue.folders
        if not request.path:
            return sampling.FoundSnapshot(mark=folders.mark)
        name = CheckpointName.parse(request.path)
        stored = folders.find_snapshot(request.user, name, moves=request.moves)
        return sampling.FoundSnapshot(
            mark=folders.mark,
            owner=stored.user,
            path=str(stored.name),
            seq=stored.seq,
            export=self._exports.export(request.user, str(stored.name)),
        )
