"""Answers requests of users and samplers about the catalogue, in threads: it uses files.

A sampler that shares the trainer's disk reads adapters there; a mark in the folder shows that it is
the same disk. Others fetch the files in parts.
"""

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from ...broker.client.rpc import Handler, RequestContext, Service
from ...schemas.tinker import sampling
from ...schemas.tinker.checkpoints import (
    ChangeCheckpoint,
    CheckpointExport,
    ExportCheckpoint,
    FetchFile,
    FilePart,
    ListCheckpoints,
    ListRuns,
    ListSessions,
    RunPage,
    TellSession,
    TinkerCheckpoint,
)
from ...schemas.tinker.names import CheckpointName
from ...schemas.tinker.operation import AboutCheckpoint, ModelInfo
from ...schemas.wire.message import Message
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
        catalogue, name = self._catalogue, f"tinker-{scope.job}"
        endpoints: list[tuple[str, type[Message], Handler]] = [
            ("checkpoint", AboutCheckpoint, self._describe),
            ("checkpoints", ListCheckpoints, _in_thread(catalogue.list_checkpoints)),
            ("change", ChangeCheckpoint, _in_thread(self._change)),
            ("export", ExportCheckpoint, _in_thread(self._export)),
            ("fetch", FetchFile, self._fetch),
            ("runs", ListRuns, self._list_runs),
            ("session", TellSession, _in_thread(catalogue.record_event)),
            ("session-list", ListSessions, _in_thread(catalogue.list_sessions)),
        ]
        for verb, request, handler in endpoints:
            await service.endpoint(verb, rpc("*", name, verb), request, handler)
        find, part = scope.snapshot("find"), scope.snapshot("fetch")
        await service.endpoint("snapshot-find", find, sampling.FindSnapshot, self._find_snapshot)
        await service.endpoint("snapshot-fetch", part, FetchFile, self._fetch)

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
        return stored.info

    def _change(self, user: str, request: ChangeCheckpoint) -> TinkerCheckpoint:
        return self._catalogue.change(user, request, is_wanted=self._is_wanted)

    def _export(self, user: str, request: ExportCheckpoint) -> CheckpointExport:
        return self._exports.export(user, request.path)

    async def _fetch(self, request: FetchFile) -> FilePart:
        return await asyncio.to_thread(self._exports.fetch, request)

    async def _list_runs(self, request: ListRuns, context: RequestContext) -> RunPage:
        models = [model for model in self._models if model.user == context.user and model.used]
        used = {model.name: model.used + self._epoch for model in models}
        return await asyncio.to_thread(self._catalogue.list_runs, context.user, request, used)

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


def _in_thread(answer: Callable[[str, Any], Message]) -> Handler:
    """Return a handler that answers a user's request in a thread."""

    async def handle(request: Message, context: RequestContext) -> Message:
        return await asyncio.to_thread(answer, context.user, request)

    return handle
