"""Versions of the policy on their way from the learner to generators and evaluators.

The payload is stored first, by one of two transports (through NATS, or a file in a shared folder);
then the manifest goes to KV as `v<version>` and, if it is the newest, as `latest`; then an
announcement wakes whoever waits. So a manifest that can be read names a payload that is there, and
a lost announcement costs two seconds. No torch here: tensors are names, dtypes, shapes and bytes.
"""

import asyncio
import contextlib
import math
import re
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from nats.aio.msg import Msg

from ..schemas.errors import BrokerError, ConfigError, ConflictError, MessageError, NotFoundError
from ..schemas.subjects import JobScope
from ..schemas.weights import Manifest, TensorEntry, WeightsAnnouncement
from .connection import Broker, Listening
from .kv import Bucket
from .objects import CHUNK_BYTES, DigestMismatch, ObjectStore
from .weight_files import read_file, remove_file, write_file

TRANSFER_DEADLINE_S = 600.0
_LOOK_S = 2.0
_LATEST = "latest"
_KEY = re.compile(r"^v(\d{1,18})$")
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class TensorBytes:
    """One tensor as it travels: little endian, row major."""

    dtype: str
    """`float32`, `bfloat16` or `float16`."""
    shape: tuple[int, ...]
    """Shape."""
    data: memoryview
    """Its bytes."""


class WeightStore:
    """Publishes and fetches the versions of one job."""

    def __init__(
        self,
        broker: Broker,
        scope: JobScope,
        transport: Literal["object", "file"] = "object",
        *,
        folder: Path | str | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        look_s: float = _LOOK_S,
    ) -> None:
        """`transport` is how `publish` sends; `fetch` follows each manifest.

        Who waits for a version looks for it every `look_s`, should its announcement be lost.

        Raises ConfigError for the file transport without a folder.
        """
        if transport == "file" and folder is None:
            raise ConfigError(
                "weights.transport is 'file' and there is no folder",
                hint="set weights.folder to a path that learner and generators share",
            )
        self._broker = broker
        self._scope = scope
        self._transport: Literal["object", "file"] = transport
        self._folder = Path(folder) if folder is not None else None
        self._manifests = Bucket(broker, scope.bucket_weights, Manifest)
        self._objects = ObjectStore(broker, scope.object_weights, chunk_bytes=chunk_bytes)
        self._look_s = look_s
        self._announced = asyncio.Event()
        self._listening: Listening | None = None

    async def publish(
        self,
        version: int,
        tensors: Mapping[str, TensorBytes],
        *,
        kind: Literal["full", "delta", "lora"] = "full",
        base: int | None = None,
    ) -> Manifest:
        """Store a version, then tell of it; publishing one again replaces it.

        The tensors' memory must not change until this returns. Raises BrokerError, DeadlineError,
        StorageError (file transport).
        """
        entries = _layout(tensors)
        views = [tensor.data.cast("B") for tensor in tensors.values() if tensor.data.nbytes]
        location, digest = await self._put(version, entries, views)
        manifest = Manifest(
            version=version,
            kind=kind,
            base=base,
            tensors=entries,
            num_bytes=sum(entry.num_bytes for entry in entries),
            digest=digest,
            transport=self._transport,
            location=location,
            published=time.time(),
        )
        old = await self._manifests.get(_key(version))
        await self._manifests.put(_key(version), manifest)
        await self._advance_latest(manifest)
        await self._broker.publish(
            self._scope.weights, WeightsAnnouncement(version=version).to_bytes()
        )
        if old is not None:
            await self._remove_payload(old.value)
        return manifest

    async def latest(self) -> Manifest | None:
        """Return the manifest of the newest version, or None before the first."""
        entry = await self._manifests.get(_LATEST)
        return None if entry is None else entry.value

    async def manifest(self, version: int) -> Manifest | None:
        """Return the manifest of a version, or None if it is not there (any more)."""
        entry = await self._manifests.get(_key(version))
        return None if entry is None else entry.value

    async def versions(self) -> list[int]:
        """Return all versions that can be fetched, ascending."""
        found = (_KEY.match(key) for key in await self._manifests.keys())
        return sorted(int(match[1]) for match in found if match)

    async def wait_newer(self, version: int, timeout_s: float) -> Manifest | None:
        """Return the newest manifest once it is newer than `version`; None after `timeout_s`.

        -1 waits for the first version.
        """
        if self._listening is None:
            self._listening = await self._broker.listen(self._scope.weights, self._hear)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while True:
            self._announced.clear()
            manifest = await self.latest()
            if manifest is not None and manifest.version > version:
                return manifest
            wait_s = min(self._look_s, deadline - loop.time())
            if wait_s <= 0:
                return None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._announced.wait()

    async def fetch(self, manifest: Manifest) -> dict[str, TensorBytes]:
        """Return the tensors of a version: views of one buffer, checked against the digest.

        Raises NotFoundError when the version was removed, BrokerError when its digest does not
        match twice, MessageError for a manifest that contradicts itself, DeadlineError,
        StorageError (file transport).
        """
        _check_layout(manifest)
        try:
            payload = await self._get(manifest)
        except DigestMismatch:
            payload = await self._get_again(manifest)
        return {
            entry.name: TensorBytes(
                entry.dtype,
                tuple(entry.shape),
                payload[entry.offset : entry.offset + entry.num_bytes],
            )
            for entry in manifest.tensors
        }

    async def remove(self, version: int) -> None:
        """Remove a version; harmless if it is gone. `latest` stays as it is."""
        entry = await self._manifests.get(_key(version))
        if entry is not None:
            await self._manifests.delete(_key(version))
            await self._remove_payload(entry.value)

    async def sweep(self) -> None:
        """Remove payloads in NATS that no manifest names: of a learner that died publishing."""
        stored = await self._objects.names()
        named = {entry.value.location for entry in await self._manifests.items()}
        for name in stored:
            if name not in named:
                await self._objects.delete(name)

    async def close(self) -> None:
        """Stop listening to announcements."""
        listening, self._listening = self._listening, None
        if listening is not None:
            await listening.stop()

    def _hear(self, _: Msg) -> None:
        self._announced.set()  # what it says is not needed: the manifests tell

    async def _advance_latest(self, manifest: Manifest) -> None:
        """Make it the latest unless a newer one is; several learners cannot set it back."""
        while True:
            entry = await self._manifests.get(_LATEST)
            if entry is not None and entry.value.version > manifest.version:
                return
            try:
                if entry is None:
                    await self._manifests.create(_LATEST, manifest)
                else:
                    await self._manifests.update(_LATEST, manifest, entry.revision)
            except ConflictError:
                continue
            return

    async def _put(
        self, version: int, entries: list[TensorEntry], views: list[memoryview]
    ) -> tuple[str, str]:
        """Store the payload under a fresh name; return location and digest."""
        name = f"v{version}-{uuid.uuid4().hex[:8]}"
        if self._folder is not None and self._transport == "file":
            path = self._folder / f"{name}.safetensors"
            return str(path), await asyncio.to_thread(write_file, path, entries, views)
        info = await self._objects.put(name, views, deadline_s=TRANSFER_DEADLINE_S)
        return name, info.digest

    async def _get_again(self, manifest: Manifest) -> memoryview:
        try:
            return await self._get(manifest)
        except DigestMismatch as error:
            raise BrokerError(
                f"version {manifest.version} is damaged: {error.message}",
                hint="the learner publishes a new version with its next step; if that is "
                "damaged, too, check the disk of nats-server or the shared folder",
            ) from error

    async def _get(self, manifest: Manifest) -> memoryview:
        if manifest.transport == "file":
            path = Path(manifest.location)
            digest, payload = await asyncio.to_thread(read_file, path, manifest.num_bytes)
            if digest != manifest.digest:
                raise DigestMismatch(f"{path} has digest {digest}, stored was {manifest.digest}")
            return payload
        info = await self._objects.info(manifest.location)
        if info is None:
            raise NotFoundError(
                f"version {manifest.version} of job {self._scope.job} was removed",
                hint="take the newest version",
            )
        if info.num_bytes != manifest.num_bytes or info.digest != manifest.digest:
            raise DigestMismatch(f"object {info.name} is not the one of its manifest")
        buffer = np.empty(info.num_bytes, np.uint8).data  # not zeroed: it is filled anyway
        await self._objects.get_into(info, buffer, deadline_s=TRANSFER_DEADLINE_S)
        return buffer

    async def _remove_payload(self, manifest: Manifest) -> None:
        if manifest.transport == "file":
            await asyncio.to_thread(remove_file, Path(manifest.location))
        else:
            await self._objects.delete(manifest.location)


def _key(version: int) -> str:
    return f"v{version}"


def _layout(tensors: Mapping[str, TensorBytes]) -> list[TensorEntry]:
    entries: list[TensorEntry] = []
    offset = 0
    for name, tensor in tensors.items():
        size = tensor.data.nbytes
        entries.append(
            TensorEntry(
                name=name,
                dtype=tensor.dtype,
                shape=list(tensor.shape),
                offset=offset,
                num_bytes=size,
            )
        )
        offset += size
    for entry in entries:
        _check_entry(entry, offset)
    return entries


def _check_layout(manifest: Manifest) -> None:
    for entry in manifest.tensors:
        _check_entry(entry, manifest.num_bytes)


def _check_entry(entry: TensorEntry, num_bytes: int) -> None:
    size = math.prod(entry.shape) * ITEM_BYTES.get(entry.dtype, 0)
    fits = size == entry.num_bytes and entry.offset + size <= num_bytes
    if not fits or min(entry.shape, default=0) < 0 or entry.dtype not in ITEM_BYTES:
        raise MessageError(
            f"tensor {entry.name} of dtype {entry.dtype} and shape {entry.shape} does not fit "
            f"its {entry.num_bytes} bytes at {entry.offset} of {num_bytes}",
            hint="tensors travel as float32, bfloat16 or float16",
        )
