"""What samplers ask the trainer: where an adapter is, and its files where they do not see them.

A sampler that shares the trainer's disk finds there what it wants; the mark in the folder tells
that it is the same disk. Others fetch the files in parts. Nothing is kept for that.
"""

import asyncio
import secrets
from pathlib import Path

from ....broker.client.rpc import Service
from ....schemas.tinker.names import CheckpointName
from ....schemas.tinker.sampling import FetchSnapshot, FindSnapshot, FoundSnapshot, SnapshotPart
from ....schemas.wire.errors import NotFoundError
from ....schemas.wire.subjects import JobScope
from .folders import CheckpointFolders, StoredCheckpoint, missing
from .inflight import InflightWeights

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
