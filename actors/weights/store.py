"""The versions of a job's weights: manifests, payloads, announcements.

The payload of a version is stored first, by one of three transports: an object in NATS, a file in a
shared folder, or memory of the learner, sent by torch.distributed. Then the manifest is written to
KV as `v<version>` and, if it is the newest, as `latest`; then an announcement wakes receivers. So a
readable manifest names an existing payload, and a lost announcement costs two seconds.

On the learner's machine a whole version is used before it is stored: it is in shared memory, and
its manifest comes with an announcement. If the learner dies before it is stored, its successor
trains the recorded batches again and publishes the same version.

16-bit weights are sent as differences if these are smaller: from the previous version, for
receivers that have it, and from the newest whole version, the anchor, for receivers that missed
versions. Both sides hold these two in memory; a receiver without them fetches the anchor. If the
result of a difference does not have the manifest's digest, the version is rebuilt from the anchor.
With the transport `nccl`, all versions are sent whole.
"""

import asyncio
import contextlib
import hashlib
import re
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Literal, TypeVar

from ...broker.client.connection import Broker, Msg
from ...broker.client.replies import Listening
from ...broker.jetstream.kv import Bucket, DamagedEntry
from ...broker.jetstream.objects import CHUNK_BYTES, DigestMismatch, digest_of
from ...schemas.local.process import finish
from ...schemas.version import VERSION
from ...schemas.weights import (
    LATEST,
    Difference,
    Manifest,
    TensorEntry,
    WeightsAnnouncement,
    manifest_key,
)
from ...schemas.wire.errors import (
    BrokerError,
    ConfigError,
    MessageError,
    ModelError,
    NotFoundError,
    RewoundError,
    StorageError,
)
from ...schemas.wire.subjects import JobScope
from .broadcast import BroadcastReceiver, Sender
from .history import Step, WeightHistory, Whole, joined, make
from .payloads import Payloads, Transport, locations
from .shared_memory import SharedMemory, UnfinishedFile, in_parts, whole_file
from .tensors import (
    CopiedWeights,
    Payload,
    TensorBytes,
    TensorSource,
    check_layout,
    layout,
    tensors_of,
)

# Digests of the model folder's files, to report machines with other files. The learner's manifests
# have them and receivers compare them, since tokenizer, template and an adapter's base are read
# from each machine's folder. A file of more than 2 MiB is identified by its size, beginning and
# end: that takes milliseconds, and detects another model but not a flipped bit.

_PART_BYTES = 1 << 20
_READ = frozenset({".json", ".jinja", ".txt", ".model", ".safetensors", ".bin"})


class SeenFiles:
    """The files of model folders on this machine; names of the hub have none."""

    def __init__(self, folders: Sequence[str]) -> None:
        """Set the folders; files are read when digests are needed."""
        self._folders = [Path(folder) for folder in folders]

    @cached_property
    def digests(self) -> dict[str, str]:
        """Digests by path; reads files. Names that are not folders are left out."""
        by_name: dict[str, str] = {}
        for folder in self._folders:
            for file in sorted(folder.iterdir()) if folder.is_dir() else []:
                if file.suffix in _READ and file.is_file():
                    by_name[str(file)] = _digest(file)
        return by_name

    def check(self, manifest: Manifest) -> None:
        """Raise ModelError for a file that differs on the learner's machine; reads files."""
        own = self.digests
        differing = [
            path for path, digest in manifest.files.items() if own.get(path, digest) != digest
        ]
        if differing:
            raise ModelError(
                f"node {socket.gethostname()} sees another {differing[0]} than {manifest.host}, "
                f"where the learner runs ({len(differing)} of {len(manifest.files)} files differ)",
                hint="copy the model anew to one of them, or name it by URL (model.path)",
            )


def _digest(file: Path) -> str:
    size = file.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with file.open("rb") as opened:
        digest.update(opened.read(_PART_BYTES))
        opened.seek(max(size - _PART_BYTES, 0))
        digest.update(opened.read(_PART_BYTES))
    return digest.hexdigest()[:16]


T = TypeVar("T")
_POLL_S = 2.0
NEWEST = 2
"""Number of versions that are always kept: a receiver may be loading the second newest."""
_EXTRA_SHARE, _EXTRA_BYTES = 0.02, 1 << 20
"""Overhead of chunks and entries relative to the bytes of a version."""
_KEY = re.compile(r"v([0-9]{1,18})")
_NOTHING = WeightHistory(enabled=False, full_snapshot_every=1)


FORMAT = 1
"""Increment it with every change of a payload's bytes or digest, so that two commits of one version
of the package report the difference. A test holds payloads of this format."""


@cache
def software() -> str:
    """Return this version of tinkermq and its format of published weights."""
    return f"{VERSION} (weights format {FORMAT})"


def room_for(num_versions: int, version_bytes: int) -> int:
    """Return the bucket size for this number of whole versions."""
    return num_versions * _stored(version_bytes)


def _stored(num_bytes: int) -> int:
    return int(num_bytes * (1 + _EXTRA_SHARE)) + _EXTRA_BYTES


class WeightStore:
    """Publishes and fetches the versions of a job."""

    def __init__(
        self,
        broker: Broker,
        scope: JobScope,
        transport: Transport = "object",
        *,
        folder: Path | str | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        differences: bool = True,
        full_snapshot_every: int = 16,
        poll_s: float = _POLL_S,
        holder: Sender | None = None,
        receiver: BroadcastReceiver | None = None,
        files: SeenFiles | None = None,
        shared_bytes: int = 0,
        sha256: bool = True,
    ) -> None:
        """`transport` is the job's: versions of another one are ignored and not fetched.

        A machine keeps versions for all its actors in up to `shared_bytes` of its memory. Without
        `sha256`, NATS tools cannot read published objects. `files` are published with each version,
        and compared with those of a fetched version. With `nccl`, a learner publishes through its
        `holder`; others fetch through their `receiver`, and those with one accept `nccl` too.

        With `differences`, 16-bit weights are published as the module describes; every
        `full_snapshot_every`-th version is whole. `wait_newer` looks for a version every `poll_s`,
        in case its announcement is lost.

        Raises ConfigError for the file transport without a folder.
        """
        self.broker = broker
        self.scope = scope
        self._payloads = Payloads(broker, scope, transport, folder, chunk_bytes, sha256=sha256)
        self._manifests = Bucket(broker, scope.bucket_weights, Manifest)
        self._holder = holder
        self._receiver = receiver
        has_history = differences and transport != "nccl"
        self._history = WeightHistory(enabled=has_history, full_snapshot_every=full_snapshot_every)
        self._shared = SharedMemory(scope, shared_bytes)
        self._poll_s = poll_s
        self._files = files or SeenFiles([])
        self._announced = asyncio.Event()
        self._early: Manifest | None = None
        """The newest version in this machine's shared memory that was not stored at its
        announcement."""
        self._listening: Listening | None = None
        self._newest_seen = -1
        """The newest version that `wait_newer` has seen."""

    def draft(self, num_bytes: int) -> UnfinishedFile | None:
        """Return a shared-memory file for one version, for `publish`.

        None if versions are not shared.
        """
        return self._shared.draft(num_bytes) if self._shares else None

    @property
    def _shares(self) -> bool:
        """Whether versions are kept in this machine's shared memory; files are mapped anyway."""
        return self._payloads.transport == "object" and self._holder is None

    async def publish(
        self,
        version: int,
        tensors: Mapping[str, TensorBytes],
        *,
        kind: Literal["full", "lora"] = "full",
    ) -> Manifest:
        """Store a version, then announce it; publishing it again replaces it.

        The tensors' memory must not change until this returns. Raises BrokerError, DeadlineError,
        and StorageError; if storage is full, no part of the version is left.
        """
        entries = layout(tensors)
        await asyncio.to_thread(lambda: self._files.digests)  # reads them, once
        views = [tensor.data.cast("B") for tensor in tensors.values() if tensor.data.nbytes]
        if kind == "full" and self._history.keeps(entries):
            manifest = await self._publish_words(version, entries, views)
        else:
            early = await self._announce_early(version, kind, entries, views)
            known = tensors.fingerprint if isinstance(tensors, CopiedWeights) else ""
            manifest = await self._put_whole(version, kind, entries, views, known=known)
            await self._offered(manifest.digest, views)  # renews its time, to keep it
            del early
        old = await self._manifests.find(manifest_key(version))
        await self._manifests.put(manifest_key(version), manifest)
        await self._advance_latest(manifest)
        await self.broker.publish(
            self.scope.weights, WeightsAnnouncement(version=version).to_bytes()
        )
        if old is not None:
            await self._remove_payload(old.value)
        return manifest

    async def _announce_early(
        self,
        version: int,
        kind: Literal["full", "lora"],
        entries: list[TensorEntry],
        views: list[memoryview],
    ) -> memoryview | None:
        """Announce a version to the receivers of this machine before it is stored.

        It stays in shared memory while the returned view is held; None: it is not in shared memory.
        """
        if not self._shares:
            return None
        digest = await asyncio.to_thread(digest_of, in_parts(views))
        shared = await self._offered(digest, views)
        if shared is not None:
            early = self._manifest(version, kind, entries, digest)
            announcement = WeightsAnnouncement(version=version, early=early)
            await self.broker.publish(self.scope.weights, announcement.to_bytes())
        return shared

    async def _publish_words(
        self, version: int, entries: list[TensorEntry], views: list[memoryview]
    ) -> Manifest:
        """Store a version of 16-bit weights as differences, or whole if that is smaller.

        An anchor is stored whole, and as a difference for receivers with the previous version.
        """
        mapped = whole_file(views)
        payload = await asyncio.to_thread(joined, views) if mapped is None else memoryview(mapped)
        made = await asyncio.to_thread(self._history.encode, version, entries, payload)
        stored: list[Difference] = []
        try:
            for base, text in made:
                stored.append(await self._put_difference(version, base, text))
            if not made or self._history.is_anchor(version):
                return await self._publish_anchor(version, entries, payload, stored)
        except StorageError:
            places = [difference.location for difference in stored]
            await self._payloads.remove(places)
            raise
        digest = await asyncio.to_thread(digest_of, in_parts([payload]))
        payload = await self._offered(digest, [payload]) or payload
        self._history.hold(Whole(version, entries, digest, payload), made[-1][0])
        return self._manifest(version, "delta", entries, digest, differences=stored)

    async def _publish_anchor(
        self,
        version: int,
        entries: list[TensorEntry],
        payload: memoryview,
        differences: list[Difference],
    ) -> Manifest:
        manifest = await self._put_whole(version, "full", entries, [payload], differences)
        payload = await self._offered(manifest.digest, [payload]) or payload
        self._history.restart(Whole(version, entries, manifest.digest, payload))
        return manifest

    async def _offered(self, digest: str, views: Sequence[memoryview]) -> memoryview | None:
        """Put a version into shared memory for this machine's receivers."""
        return await self._shared.offer(digest, views) if self._shares else None

    async def _put_difference(self, version: int, base: Whole, text: bytes) -> Difference:
        views = [memoryview(text)]
        location, digest = await self._payloads.put(version, views, base=base.version)
        return Difference(
            base=base.version,
            base_digest=base.digest,
            num_bytes=len(text),
            digest=digest,
            location=location,
        )

    async def _put_whole(
        self,
        version: int,
        kind: Literal["full", "lora"],
        entries: list[TensorEntry],
        views: list[memoryview],
        differences: Sequence[Difference] = (),
        known: str = "",
    ) -> Manifest:
        if self._holder is not None:
            location, digest = await self._holder.put(version, entries, views, known)
        else:
            parts = in_parts(views)
            location, digest = await self._payloads.put(version, parts, entries=entries)
        return self._manifest(
            version, kind, entries, digest, location=location, differences=differences
        )

    def _manifest(
        self,
        version: int,
        kind: Literal["full", "delta", "lora"],
        entries: list[TensorEntry],
        digest: str,
        *,
        location: str = "",
        differences: Sequence[Difference] = (),
    ) -> Manifest:
        return Manifest(
            version=version,
            kind=kind,
            tensors=entries,
            num_bytes=sum(entry.num_bytes for entry in entries),
            digest=digest,
            transport="nccl" if self._holder is not None else self._payloads.transport,
            location=location,
            differences=list(differences),
            published=time.time(),
            host=socket.gethostname(),
            files=self._files.digests,
            software=software(),
        )

    async def latest(self) -> Manifest | None:
        """Return the manifest of the newest version, or None before the first."""
        return await self._find(LATEST)

    async def manifest(self, version: int) -> Manifest | None:
        """Return the manifest of a version, or None if it does not exist (any more)."""
        return await self._find(manifest_key(version))

    async def _find(self, key: str) -> Manifest | None:
        """Return a manifest; None if there is none of the job's transport."""
        entry = await self._manifests.find(key)
        return None if entry is None or not self._accepts(entry.value) else entry.value

    def _accepts(self, manifest: Manifest) -> bool:
        """Whether a version travels as the job's configuration says.

        Before it was changed, versions may have had another transport.
        """
        is_own = manifest.transport == self._payloads.transport
        return is_own or (manifest.transport == "nccl" and self._receiver is not None)

    async def is_out(self, version: int) -> bool:
        """Return whether a version, or a newer one, was published and can be fetched."""
        latest = await self.latest()
        if latest is None or latest.version < version:
            return False
        if self._holder is None:
            where = locations(latest)
            return bool(where) and await self._payloads.holds(where[-1])
        manifest = await self.manifest(version)
        return manifest is not None and await self._holder.holds(manifest.location)

    async def versions(self) -> list[int]:
        """Return all versions that can be fetched, ascending."""
        matches = (_KEY.fullmatch(key) for key in await self._manifests.keys())
        return sorted(int(match[1]) for match in matches if match)

    async def wait_newer(self, version: int, timeout_s: float) -> Manifest | None:
        """Return the newest manifest once it is newer than `version`; None after `timeout_s`.

        -1 waits for the first version. On the learner's machine it may be of a version that is
        not stored yet: `fetch` takes it from shared memory. Raises RewoundError if the learner has
        retracted a version that was there.
        """
        if self._listening is None:
            self._listening = await self.broker.listen(self.scope.weights, self._note_announcement)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while True:
            self._announced.clear()
            latest = await self.latest()
            await self._refuse_retracted(latest)
            manifests = [item for item in (latest, self._early) if item is not None]
            newest = max(manifests, key=lambda item: item.version, default=None)
            if newest is not None and newest.version > version:
                return newest
            wait_s = min(self._poll_s, deadline - loop.time())
            if wait_s <= 0:
                return None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._announced.wait()

    async def _refuse_retracted(self, latest: Manifest | None) -> None:
        """Raise RewoundError if `latest` is older than a version that was seen."""
        if latest is None:
            return
        if latest.version < self._newest_seen:
            raise RewoundError(
                f"version {self._newest_seen} of the weights of job {self.scope.job} was "
                f"retracted, the newest is {latest.version}: the broker's store was set back"
            )
        self._newest_seen = max(self._newest_seen, latest.version)

    async def fetch(self, manifest: Manifest) -> dict[str, TensorSource]:
        """Return the tensors of a version: views of one buffer, checked against the digest.

        Raises NotFoundError if the version was removed, BrokerError if its digest differs twice,
        ConfigError if it was then published by another version of tinkermq, or has another
        transport than the job, MessageError for a manifest that contradicts itself,
        DeadlineError, StorageError (file transport), and ModelError on a machine whose model files
        differ from the learner's.
        """
        await self._check(manifest)
        try:
            payload = await self._payload(manifest, self._history.step_to)
        except DigestMismatch:
            payload = await self._again(manifest, lambda: self._payload(manifest, _NOTHING.step_to))
        except NotFoundError:
            if manifest is self._early:  # no longer in shared memory: wait until it is stored
                self._early = None
            raise
        return tensors_of(manifest.tensors, payload)

    async def receive(
        self, manifest: Manifest, receive: Callable[[Manifest], Awaitable[object]]
    ) -> None:
        """Receive a version by `nccl` with `receive`, checked and repeated as in `fetch`.

        For engines whose workers receive it, so that this process needs no payload. Raises what
        `fetch` raises.
        """
        await self._check(manifest)
        try:
            await receive(manifest)
        except DigestMismatch:
            await self._again(manifest, lambda: receive(manifest))

    async def _check(self, manifest: Manifest) -> None:
        if not self._accepts(manifest):
            raise ConfigError(
                f"version {manifest.version} travels by {manifest.transport}, and this job's "
                f"versions by {self._payloads.transport}",
                hint="weights.transport of the run's configuration decides; start a server of a "
                "run whose transport was changed again",
            )
        check_layout(manifest)
        await asyncio.to_thread(self._files.check, manifest)

    async def _again(self, manifest: Manifest, fetch: Callable[[], Awaitable[T]]) -> T:
        """Fetch once more, without the held versions."""
        try:
            return await fetch()
        except DigestMismatch as error:
            if manifest.software != (own := software()):
                theirs = (
                    f"tinkermq {manifest.software}" if manifest.software else "an older tinkermq"
                )
                raise ConfigError(
                    f"version {manifest.version} was published by {theirs} and cannot be read by "
                    f"tinkermq {own} of this machine: {error.message}",
                    hint="install the same version on all machines of the pool",
                ) from error
            raise BrokerError(
                f"version {manifest.version} is damaged: {error.message}",
                hint="the learner publishes a new version with its next step; if that is "
                "damaged, too, check the disk of nats-server or the shared folder",
            ) from error

    async def _payload(
        self, manifest: Manifest, step_to: Callable[[Manifest], Step | None]
    ) -> Payload:
        """Return the payload of a version, and hold the bases of later versions."""
        if manifest.transport == "nccl":
            assert self._receiver is not None  # else `_check` refuses it
            return await self._receiver.get(manifest)
        step = step_to(manifest)
        if step is None:
            whole = await self._whole(manifest)
            self._history.hold(whole)
            return whole.payload
        base = step.base or await self._anchor(manifest, step.difference)
        whole = await self._made(manifest, base, step.difference)
        anchor = step.anchor if step.base else base
        self._history.hold(whole, None if manifest.kind == "full" else anchor)
        return whole.payload

    async def _anchor(self, manifest: Manifest, step: Difference) -> Whole:
        anchor = await self.manifest(step.base)
        if anchor is None:
            raise NotFoundError(
                f"version {step.base}, of which version {manifest.version} of job "
                f"{self.scope.job} is made, was removed",
                hint="take the newest version",
            )
        if anchor.digest != step.base_digest or anchor.kind != "full":
            raise DigestMismatch(f"version {step.base} is not what {manifest.version} is made of")
        return await self._whole(anchor)

    async def _made(self, manifest: Manifest, base: Whole, step: Difference) -> Whole:
        async def fill(buffer: memoryview) -> None:
            place, size = step.location, step.num_bytes
            difference = await self._payloads.get(place, size, step.digest)
            await finish(asyncio.to_thread(make, base, difference, manifest, buffer))

        payload = await self._shared.get(manifest.digest, manifest.num_bytes, fill)
        return Whole(manifest.version, manifest.tensors, manifest.digest, payload)

    async def _whole(self, manifest: Manifest) -> Whole:
        place, size, digest = manifest.location, manifest.num_bytes, manifest.digest
        if manifest.transport == "file":
            payload = await self._payloads.get(place, size, digest)
        else:
            fill = partial(self._read_into, place, digest)
            payload = await self._shared.get(digest, size, fill)
        return Whole(manifest.version, manifest.tensors, manifest.digest, payload)

    async def _read_into(self, place: str, digest: str, buffer: memoryview) -> None:
        if not place:
            raise NotFoundError(
                f"weights of job {self.scope.job} are neither stored yet nor in shared memory",
                hint="take the newest version that is stored",
            )
        await self._payloads.get_into(place, digest, buffer)

    async def remove(self, version: int) -> None:
        """Remove a version; harmless if it is gone. `latest` does not change."""
        entry = await self._manifests.find(manifest_key(version))
        if entry is not None:
            await self._manifests.purge(manifest_key(version))
            await self._remove_payload(entry.value)

    async def retract(self, behind: int) -> None:
        """Remove the versions after `behind`, which no recorded step has made.

        They are left when the broker's store was set back. Receivers that have one start again.
        """
        versions = await self.versions()
        for version in versions:
            if version > behind:
                await self.remove(version)
        latest = await self.latest()
        if latest is None or latest.version <= behind:
            return
        held = [version for version in versions if version <= behind]
        newest = await self.manifest(held[-1]) if held else None
        if newest is None:
            await self._manifests.purge(LATEST)
        else:
            await self._manifests.put(LATEST, newest)

    async def keep(self, versions: Set[int], *, newest: int = 0) -> None:
        """Remove all versions except these, the `newest`, and their bases."""
        manifests = {item.value.version: item.value for item in await self._manifests.items()}
        needed = versions | set(sorted(manifests, reverse=True)[:newest])
        anchors = {
            manifests[version].differences[-1].base
            for version in needed & set(manifests)
            if manifests[version].kind == "delta"
        }
        for version in set(manifests) - needed - anchors:
            await self.remove(version)
        if self._holder is not None:
            still_there = versions & set(manifests)
            await self._holder.secure(manifests[version].location for version in still_there)

    async def make_room(self, tensors: Mapping[str, TensorBytes], versions: Set[int]) -> None:
        """Remove unneeded versions, before a version with these tensors is published.

        `versions` stay, and the newest two: a receiver may be loading the older one. If the new
        version does not fit beside both, only the newest is kept; a receiver of the older one then
        loads the newest.
        """
        await self.keep(versions, newest=NEWEST)
        needed = _stored(sum(tensor.data.nbytes for tensor in tensors.values()))
        if self._holder is None and await self._payloads.free_bytes() < needed:
            await self.keep(versions, newest=1)

    async def bound_bytes(self) -> int:
        """Return the bytes for all versions: the bucket's limit, or the room of the disk.

        Raises NotFoundError if the bucket is gone.
        """
        manifests = [entry.value for entry in await self._manifests.items()]
        by_version = {item.version: item.stored_bytes for item in manifests if self._accepts(item)}
        return sum(by_version.values()) + await self._payloads.free_bytes()

    async def sweep(self) -> None:
        """Remove payloads without a manifest, left by a learner that died while publishing."""
        manifests = [entry.value for entry in await self._manifests.items()]
        await self._payloads.remove_others(
            {place for item in manifests if self._accepts(item) for place in locations(item)}
        )

    async def close(self) -> None:
        """Stop listening to announcements."""
        listening, self._listening = self._listening, None
        if listening is not None:
            await listening.stop()

    def _note_announcement(self, message: Msg) -> None:
        with contextlib.suppress(MessageError):  # an unreadable announcement also wakes
            early = WeightsAnnouncement.from_bytes(message.data).early
            is_here = early is not None and early.host == socket.gethostname()
            if early is not None and is_here and self._accepts(early):
                self._early = early
        self._announced.set()

    async def _advance_latest(self, manifest: Manifest) -> None:
        """Set it as the latest unless a newer one is set: no learner can set it back."""

        def newest(known: Manifest | None) -> Manifest:
            return manifest if known is None or known.version <= manifest.version else known

        try:
            await self._manifests.change(LATEST, newest)
        except DamagedEntry:
            await self._manifests.put(LATEST, manifest)

    async def _remove_payload(self, manifest: Manifest) -> None:
        """Remove what is stored for a version; a payload of another transport stays for `sweep`."""
        if self._holder is not None and manifest.transport == "nccl":
            await self._holder.remove(manifest.location)
        elif manifest.transport == self._payloads.transport:
            await self._payloads.remove(locations(manifest))
