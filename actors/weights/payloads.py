"""Payloads of the transports `object` and `file`: objects in NATS, files in a shared folder."""

import asyncio
import contextlib
import json
import mmap
import os
import shutil
import stat
import struct
import uuid
from collections.abc import Iterable, Sequence, Set
from io import FileIO
from pathlib import Path
from typing import Literal

import numpy as np

from ...broker.client.connection import Broker
from ...broker.jetstream.objects import (
    BucketFullError,
    DigestMismatch,
    ObjectStore,
    digest_of,
    new_digest,
)
from ...schemas.weights import Manifest, TensorEntry, new_location, payload_of, weight_file
from ...schemas.wire.errors import ConfigError, NotFoundError, StorageError
from ...schemas.wire.subjects import JobScope
from .shared_memory import MappedFile

# Files in a folder that learner and generators share.
#
# They have the safetensors layout, which other tools can open; the digest covers the data part,
# which is the payload. A file is written under another name, renamed, and never changed in place,
# so a reader that has mapped it can continue after its removal.

_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_LENGTH = struct.Struct("<Q")
_WRITE_BYTES = 64 * 2**20


def write_file(path: Path, entries: list[TensorEntry], views: Sequence[memoryview]) -> str:
    """Write the file and rename it; return the payload's BLAKE3. Runs in a thread.

    Raises StorageError.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    digest = new_digest()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb", buffering=0) as file:
            file.write(_header(entries))
            for view in views:
                digest.update(view)
                _write_all(file, view)
        temporary.rename(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise StorageError(
            f"the weights cannot be written to {path}: {error}",
            hint="make room, or set weights.folder to a path that can be written",
        ) from error
    return digest.hexdigest()


def read_file(path: Path, num_bytes: int) -> tuple[str, memoryview]:
    """Map the file; return the payload's BLAKE3 and the payload (a private, writable map).

    Runs in a thread. Raises NotFoundError if it was removed, StorageError, also for a link.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise OSError(f"{path.name} is not a regular file")
            mapped = MappedFile(file, 0, access=mmap.ACCESS_COPY)
        finally:
            os.close(file)
    except FileNotFoundError as error:
        raise NotFoundError(
            f"the weights file {path} does not exist",
            hint="it was removed, or this machine does not share weights.folder with the "
            "learner: use weights.transport=object",
        ) from error
    except (OSError, ValueError) as error:
        raise StorageError(f"the weights file {path} cannot be read: {error}") from error
    mapped.path = path
    with contextlib.suppress(AttributeError, OSError):  # only a hint to the kernel
        mapped.madvise(mmap.MADV_WILLNEED)
    payload = memoryview(mapped)[len(mapped) - min(num_bytes, len(mapped)) :]
    return digest_of([payload]), payload


def free_disk_bytes(folder: Path) -> int:
    """Return the free bytes on a folder's disk; the folder need not exist yet."""
    existing = next((path for path in (folder, *folder.parents) if path.is_dir()), Path("/"))
    return shutil.disk_usage(existing).free


def remove_file(path: Path) -> None:
    """Remove the file; readers that have mapped it can continue."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()


def remove_other_files(folder: Path, scope: JobScope, named: Set[str]) -> None:
    """Remove the files of a job except those `named`. Raises StorageError."""
    own = payload_of(scope)
    try:
        for path in folder.iterdir() if folder.is_dir() else ():
            if path.name not in named and own.fullmatch(path.name):
                remove_file(path)
    except OSError as error:
        raise StorageError(
            f"what a learner that died has left in {folder} cannot be removed: {error}",
            hint="set weights.folder to a path that can be read and written",
        ) from error


def _header(entries: list[TensorEntry]) -> bytes:
    header = {
        entry.name: {
            "dtype": _NAMES[entry.dtype],
            "shape": entry.shape,
            "data_offsets": [entry.offset, entry.offset + entry.num_bytes],
        }
        for entry in entries
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return _LENGTH.pack(len(text)) + text


def _write_all(file: FileIO, view: memoryview) -> None:
    start = 0
    while start < len(view):
        start += file.write(view[start : start + _WRITE_BYTES]) or 0


TRANSFER_DEADLINE_S = 600.0
Transport = Literal["object", "file", "nccl"]


class Payloads:
    """Stores, fetches and removes bytes under unique names."""

    def __init__(
        self,
        broker: Broker,
        scope: JobScope,
        transport: Transport,
        folder: Path | str | None,
        chunk_bytes: int,
        *,
        sha256: bool = True,
    ) -> None:
        """Store objects, or files in the folder.

        Without `sha256`, standard NATS tools cannot read the stored objects.

        Raises ConfigError for the file transport without a folder.
        """
        if transport == "file" and folder is None:
            raise ConfigError(
                "weights.transport is 'file' and weights.folder is not set",
                hint="set weights.folder to a path that learner and generators share",
            )
        self.transport: Transport = transport
        self._scope = scope
        self._folder = Path(folder) if folder is not None else None
        self._objects = ObjectStore(
            broker, scope.object_weights, chunk_bytes=chunk_bytes, sha256=sha256
        )

    async def put(
        self,
        version: int,
        views: Sequence[memoryview],
        *,
        entries: list[TensorEntry] | None = None,
        base: int | None = None,
    ) -> tuple[str, str]:
        """Store a version, or its difference from a base; return location and digest.

        `entries` are the layout of a whole version, for the header of a file. Raises BrokerError,
        DeadlineError, and StorageError, with `is_full` if there is no room.
        """
        name = new_location(version, base)
        if (path := self._file(name)) is not None:
            return name, await asyncio.to_thread(write_file, path, entries or [], views)
        try:
            info = await self._objects.put(name, views, deadline_s=TRANSFER_DEADLINE_S)
        except BucketFullError as error:
            full = StorageError(
                f"the bucket of weights of job {self._scope.job} is full: {error.message}",
                hint="room comes when evaluations of older versions end; it was bounded when the "
                "learner started, so `tinkermq resume` after raising max_file_store of nats-server",
            )
            full.is_full = True
            raise full from error
        return name, info.digest

    def _file(self, location: str) -> Path | None:
        """Return the path of a payload; None if payloads are objects."""
        if self._folder is None or self.transport != "file":
            return None
        return self._folder / weight_file(self._scope, location)

    async def free_bytes(self) -> int:
        """Return the free bytes in the bucket, or on the disk of the folder."""
        if self._folder is not None and self.transport == "file":
            return await asyncio.to_thread(free_disk_bytes, self._folder)
        return await self._objects.free_bytes()

    async def get(self, location: str, num_bytes: int, digest: str) -> memoryview:
        """Return bytes, which no one else modifies.

        Raises NotFoundError if they were removed, DigestMismatch, DeadlineError, StorageError.
        """
        if (path := self._file(location)) is not None:
            digest_on_disk, payload = await asyncio.to_thread(read_file, path, num_bytes)
            if digest_on_disk != digest:
                raise DigestMismatch(f"{path} has another digest than its manifest")
            return payload
        buffer = np.empty(num_bytes, np.uint8).data  # not zeroed: it is overwritten anyway
        await self.get_into(location, digest, buffer)
        return buffer

    async def get_into(self, location: str, digest: str, buffer: memoryview) -> None:
        """Read bytes from NATS into a buffer of their size; raises what `get` raises."""
        info = await self._objects.info(location)
        if info is None:
            raise NotFoundError(
                f"weights {location} of job {self._scope.job} were removed",
                hint="take the newest version",
            )
        if info.num_bytes != len(buffer) or info.digest != digest:
            raise DigestMismatch(f"object {info.name} is not the one of its manifest")
        await self._objects.get_into(info, buffer, deadline_s=TRANSFER_DEADLINE_S)

    async def holds(self, location: str) -> bool:
        """Return whether the bytes exist: their bucket may have been deleted and recreated."""
        if (path := self._file(location)) is not None:
            return await asyncio.to_thread(path.is_file)
        return await self._objects.info(location) is not None

    async def remove(self, locations: Iterable[str]) -> None:
        """Remove bytes; harmless if they are gone."""
        for location in locations:
            if (path := self._file(location)) is not None:
                await asyncio.to_thread(remove_file, path)
            else:
                await self._objects.delete(location)

    async def remove_others(self, locations: Iterable[str]) -> None:
        """Remove everything stored by the job, also partial data, except `locations`."""
        named = set(locations)
        files = {path.name for name in named if (path := self._file(name)) is not None}
        objects = named if self.transport == "object" else set[str]()
        if self._folder is not None:  # files of an earlier transport, too
            await asyncio.to_thread(remove_other_files, self._folder, self._scope, files)
        await self._objects.sweep()
        for name in await self._objects.names():
            if name not in objects:
                await self._objects.delete(name)


def locations(manifest: Manifest) -> list[str]:
    """Return the locations of everything stored for a version."""
    places = [manifest.location, *(difference.location for difference in manifest.differences)]
    return [place for place in places if place]
