"""The adapters that a sampler draws with: found on the trainer's disk, or fetched from there."""

import asyncio
import os
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from ....broker.client.connection import Broker
from ....broker.client.rpc import call
from ....schemas.tinker.names import CheckpointName
from ....schemas.tinker.sampling import (
    FetchSnapshot,
    FindSnapshot,
    FoundSnapshot,
    SamplerName,
    SnapshotPart,
)
from ....schemas.wire.errors import ModelError
from ....schemas.wire.subjects import JobScope
from ...storage.tinker_checkpoints import CheckpointFolders
from ..checkpoints.calls import find_snapshot, mark_of

_TIMEOUT_S = 20.0
_PREFIX = "tinkermq-lora-"
_TRAINER = "the trainer of this sampler"


@dataclass(frozen=True)
class Snapshot:
    """One adapter, as it was saved."""

    name: str
    """The engine's name of it; those that move on keep theirs."""
    version: int
    """The operation that saved it."""
    user: str
    """Who samples with it."""
    source: SamplerName
    path: str
    """The checkpoint."""
    folder: Path | None = None
    """Where its files lie; None: elsewhere."""
    files: dict[str, int] = field(default_factory=dict[str, int])
    """Names and bytes of the files that are elsewhere."""


class Snapshots:
    """Finds adapters for users, and has their files where an engine can read them."""

    def __init__(self, broker: Broker, scope: JobScope, folder: Path) -> None:
        """`folder` is the trainer's, if this machine has it."""
        self._broker = broker
        self._scope = scope
        self._folder = folder
        self._folders = CheckpointFolders(folder)
        self._is_here: bool | None = None
        self._fetched: Path | None = None

    @property
    def is_here(self) -> bool:
        """Whether the trainer's disk is known to be this machine's."""
        return bool(self._is_here)

    async def find(self, user: str, source: SamplerName) -> Snapshot:
        """Return what a user's samples are drawn with now.

        Raises NotFoundError, also for what belongs to others; NobodyAnswersError while the trainer
        of the first one is not there.
        """
        if self._is_here is None:
            told = await self._find(FindSnapshot())
            self._is_here = bool(told.mark) and told.mark == mark_of(self._folder)
        name = source.checkpoint
        if self._is_here:
            return await asyncio.to_thread(self._found, user, source, name)
        asked = FindSnapshot(user=user, path=str(name), moves=source.moves)
        told = await self._find(asked)
        engine_name = _engine_name(told.owner, source, told.path, told.seq)
        return Snapshot(engine_name, told.seq, user, source, told.path, None, told.files)

    async def fetch(self, snapshot: Snapshot) -> Path:
        """Return the folder with an adapter's files; raises NotFoundError, ModelError."""
        if snapshot.folder is not None:
            return snapshot.folder
        if self._fetched is None:
            self._fetched = await asyncio.to_thread(_own_folder)
        folder = self._place(snapshot)
        await asyncio.to_thread(folder.mkdir, exist_ok=True)
        for file, size in snapshot.files.items():
            await self._fetch_file(snapshot, file, size, folder / file)
        return folder

    def free(self, snapshot: Snapshot) -> None:
        """Remove what was fetched of an adapter."""
        if snapshot.folder is None and self._fetched is not None:
            shutil.rmtree(self._place(snapshot), ignore_errors=True)

    def close(self) -> None:
        """Remove all that was fetched."""
        if self._fetched is not None:
            shutil.rmtree(self._fetched, ignore_errors=True)

    def _found(self, user: str, source: SamplerName, name: CheckpointName) -> Snapshot:
        stored = find_snapshot(self._folders, user, name, moves=source.moves)
        engine_name = _engine_name(stored.user, source, str(stored.name), stored.seq)
        return Snapshot(
            engine_name, stored.seq, user, source, str(stored.name), folder=stored.folder
        )

    def _place(self, snapshot: Snapshot) -> Path:
        assert self._fetched is not None
        return self._fetched / f"{snapshot.name}@{snapshot.version}".replace("/", "_")

    async def _fetch_file(self, snapshot: Snapshot, file: str, size: int, target: Path) -> None:
        parts: list[bytes] = []
        offset = 0
        while offset < size:
            asked = FetchSnapshot(
                user=snapshot.user,
                path=snapshot.path,
                seq=snapshot.version,
                file=file,
                offset=offset,
            )
            part = await self._part(asked)
            if not part.data:
                raise ModelError(f"{file} of {snapshot.path} is cut off", hint="sample again")
            parts.append(part.data)
            offset += len(part.data)
        await asyncio.to_thread(target.write_bytes, b"".join(parts))

    async def _find(self, asked: FindSnapshot) -> FoundSnapshot:
        return await call(
            self._broker,
            self._scope.snapshot("find"),
            asked,
            FoundSnapshot,
            timeout_s=_TIMEOUT_S,
            waiting_for=_TRAINER,
            idempotent=True,
        )

    async def _part(self, asked: FetchSnapshot) -> SnapshotPart:
        return await call(
            self._broker,
            self._scope.snapshot("fetch"),
            asked,
            SnapshotPart,
            timeout_s=_TIMEOUT_S,
            waiting_for=_TRAINER,
            idempotent=True,
        )


def _own_folder() -> Path:
    """Return a folder of this process, and remove those of processes that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        pid = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if not Path("/proc", pid).is_dir():
            shutil.rmtree(folder, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))


def _engine_name(owner: str, source: SamplerName, path: str, seq: int) -> str:
    if source.moves:
        return f"{owner}/{source.checkpoint.model}/inflight"
    return f"{owner}/{path.removeprefix('tinker://')}/{seq}"
