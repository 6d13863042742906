"""Groups that weights are sent in, and who takes a receiver's places: it, or its engine."""

# torch leaves its stores out of `__all__`, and some of its functions untyped.
# pyright: reportPrivateImportUsage=false, reportUnknownMemberType=false

import contextlib
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing import reductions

from ...broker.jetstream.objects import DigestMismatch
from ...broker.weights.payloads import Payload
from ...schemas.weights import Manifest, Round
from ...schemas.wire.codec import pack, unpack
from ..policy.devices import gpu_of
from .broadcast_group import (
    AGAIN,
    BUCKET_BYTES,
    BUCKET_S,
    FORM_S,
    MEET_S,
    POLL_S,
    ProcessGroup,
    ProcessGroupFailed,
    Store,
    buckets_of,
    no_route,
    off_loop,
    own_address,
    reach_store,
    wait_for_all,
)
from .tensors import fingerprint

# -- a buffer on a GPU that the learner and a receiver share ---------------------------------------
# NCCL refuses two ranks on one device. So the learner exports a buffer of two buckets (CUDA IPC),
# the receivers open it, and both tell each other by counters in their TCPStore which bucket is
# written and which was read: one is copied out while the next is copied in. In main memory the
# buffer is a file of shared memory, for the same steps without a GPU.

_SLOTS = 2
_MEMORY = "/dev/shm"  # noqa: S108  a file system of memory is what is wanted
_REBUILT = (
    "storage_device",
    "storage_handle",
    "storage_size_bytes",
    "storage_offset_bytes",
    "requires_grad",
    "ref_counter_handle",
    "ref_counter_offset",
    "event_handle",
    "event_sync_required",
)
"""The last arguments of `rebuild_cuda_tensor`, numbers and bytes; the first say what it is."""


def _export_buffer(buffer: Tensor) -> bytes:
    """Return what another process of this machine opens a buffer on a GPU with, once."""
    arguments = cast(Any, reductions).reduce_tensor(buffer)[1]
    return pack(list(arguments[-len(_REBUILT) :]))


def _open_buffer(handle: bytes, num_bytes: int, device: torch.device) -> Tensor:
    """Return the buffer that another process has exported, as this one's `device` sees it."""
    given = dict(zip(_REBUILT, cast("list[Any]", unpack(handle)), strict=True))
    given["storage_device"] = device.index  # it may have another number there
    return cast(Any, reductions).rebuild_cuda_tensor(
        torch.Tensor, (num_bytes,), (1,), 0, torch.UntypedStorage, torch.uint8, **given
    )


class SharedBufferGroup:
    """A learner, rank 0, and receivers on its card; has the methods of `ProcessGroup`."""

    def __init__(
        self, name: str, store: dist.PrefixStore, rank: int, size: int, buffer: Tensor
    ) -> None:
        """Wrap a buffer of uint8[2 * BUCKET_BYTES]; `meet` makes one."""
        self.name = name
        self.device = buffer.device
        self._store = store
        self._rank = rank
        self._others = range(1, size)
        self._buffer: Tensor | None = buffer
        self._num_moved = 0
        """Buckets in the life of the group."""

    @classmethod
    def meet(
        cls,
        store: Store,
        name: str,
        rank: int,
        size: int,
        device: torch.device,
        meet_s: float = MEET_S,
    ) -> "SharedBufferGroup":
        """Form a group with the others whose list bears this name; ProcessGroupFailed."""
        own = dist.PrefixStore(name, store)
        num_bytes = _SLOTS * BUCKET_BYTES
        try:
            own.set(f"read/{rank}", "0")
            if rank == 0:
                own.set("written", "0")
                buffer = _offered(own, num_bytes, size, device, meet_s)
            else:
                wait_for_all(own, rank, size, meet_s)
                handle = bytes.fromhex(own.get(f"buffer/{rank}").decode())
                buffer = _open(handle, num_bytes, device)
                own.set(f"open/{rank}", "")
        except (RuntimeError, OSError, TimeoutError) as error:
            raise ProcessGroupFailed(f"group {name} did not form: {error}", hint=AGAIN) from error
        return cls(name, own, rank, size, buffer)

    def send(self, payload: Tensor) -> None:
        """Give uint8[N], in the machine's memory, to all; ProcessGroupFailed if one is lost."""
        with _as_failed(self):
            buckets = buckets_of(payload)
            for bucket in buckets:
                self._wait_for_reads(self._num_moved - _SLOTS + 1)
                self._slot(bucket.numel()).copy_(bucket)
                self._settle()
                self._num_moved += 1
                self._store.set("written", str(self._num_moved))
            self._wait_for_reads(self._num_moved)

    def receive(self, num_bytes: int) -> Tensor:
        """Return uint8[N] from the learner, on this group's device; ProcessGroupFailed."""
        payload = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        deque(self._read(buckets_of(payload)), maxlen=0)
        return payload

    def stream(self, num_bytes: int) -> Generator[Tensor, None, None]:
        """Yield uint8[N] from the learner in buckets; see `ProcessGroup.stream`."""
        bucket = torch.empty(min(num_bytes, BUCKET_BYTES), dtype=torch.uint8, device=self.device)
        sizes = (min(BUCKET_BYTES, num_bytes - at) for at in range(0, num_bytes, BUCKET_BYTES))
        return self._read(bucket[:size] for size in sizes)

    def leave(self) -> None:
        """Give up the buffer; whoever still waits fails after a bucket's deadline."""
        self._buffer = None

    def _read(self, targets: Iterable[Tensor]) -> Generator[Tensor, None, None]:
        with _as_failed(self):
            for target in targets:
                number = self._num_moved + 1
                self._wait(lambda n=number: int(self._store.get("written")) >= n, "the learner")
                target.copy_(self._slot(target.numel()))
                self._settle()
                self._num_moved = number
                self._store.set(f"read/{self._rank}", str(number))
                yield target

    def _wait_for_reads(self, number: int) -> None:
        def have_read() -> bool:
            return all(int(self._store.get(f"read/{one}")) >= number for one in self._others)

        if number > 0:
            self._wait(have_read, "a receiver")

    def _wait(self, is_so: Callable[[], bool], whom: str) -> None:
        _wait(is_so, whom, BUCKET_S)

    def _slot(self, num_bytes: int) -> Tensor:
        if self._buffer is None:
            raise ProcessGroupFailed(f"group {self.name} was left", hint=AGAIN)
        start = self._num_moved % _SLOTS * BUCKET_BYTES
        return self._buffer[start : start + num_bytes]

    def _settle(self) -> None:
        """Wait until a copy is done: the other process reads or writes the slot next."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


@contextlib.contextmanager
def _as_failed(group: SharedBufferGroup) -> Iterator[None]:
    """Leave a group where something fails, and raise ProcessGroupFailed."""
    try:
        yield
    except BaseException as error:
        group.leave()
        if isinstance(error, (RuntimeError, TimeoutError)):
            message = f"group {group.name} broke: {error}"
            raise ProcessGroupFailed(message, hint=AGAIN) from error
        raise


def _wait(is_so: Callable[[], bool], whom: str, most_s: float) -> None:
    deadline = time.monotonic() + most_s
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{whom} took longer than {most_s:g} s")
        time.sleep(POLL_S)


def _offered(
    store: dist.PrefixStore, num_bytes: int, size: int, device: torch.device, meet_s: float
) -> Tensor:
    """Make a buffer, and wait until the others have opened it."""
    others = range(1, size)
    path = ""
    if device.type == "cuda":
        buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    else:
        file, path = tempfile.mkstemp(prefix="tinkermq-buffer-", dir=_MEMORY)
        os.close(file)
        buffer = _mapped(path, num_bytes)
    try:
        for other in others:
            # One export for each: torch counts them against those that are closed.
            handle = path.encode() if path else _export_buffer(buffer)
            store.set(f"buffer/{other}", handle.hex())
        wait_for_all(store, 0, size, meet_s)
        _wait(lambda: store.check([f"open/{one}" for one in others]), "a member", meet_s)
    finally:
        if path:
            Path(path).unlink()
    return buffer


def _open(handle: bytes, num_bytes: int, device: torch.device) -> Tensor:
    if device.type == "cuda":
        return _open_buffer(handle, num_bytes, device)
    return _mapped(handle.decode(), num_bytes)


def _mapped(path: str, num_bytes: int) -> Tensor:
    return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)


# -- groups and members ----------------------------------------------------------------------------

Group: TypeAlias = ProcessGroup | SharedBufferGroup
"""A group of the learner and its receivers, whatever it sends by."""


def meet_group(
    route: Literal["cpu", "cuda", "ipc"],
    store: Store,
    name: str,
    rank: int,
    size: int,
    device: torch.device,
    address: str,
    meet_s: float = MEET_S,
) -> Group:
    """Form a group with the others whose list bears this name; it blocks.

    Raises ProcessGroupFailed when somebody does not come within `meet_s`.
    """
    if route == "ipc":
        return SharedBufferGroup.meet(store, name, rank, size, device, meet_s)
    own = device if route == "cuda" else torch.device("cpu")
    return ProcessGroup.meet(store, name, rank, size, own, address, meet_s)


class Member(Protocol):
    """Takes the places of a receiver."""

    device: Literal["cpu", "cuda"]
    """Where it wants weights."""
    num_ranks: int
    """Places that it takes."""
    gpus: list[str]
    """UUIDs of its GPUs."""

    @property
    def group(self) -> str:
        """The group that it is in; empty: none."""
        ...

    async def connect(self, address: str, port: int) -> None:
        """Connect to the learner's TCPStore, before any place is asked for: who cannot would hold
        up the others of a group. Raises ProcessGroupFailed."""
        ...

    async def join(self, place: Round) -> None:
        """Form the group of a place, unless it is in it. Raises ProcessGroupFailed."""
        ...

    async def receive(self, manifest: Manifest) -> Payload | None:
        """Receive a version in the group; return its payload, or None where it is loaded at once.

        Raises ProcessGroupFailed, DigestMismatch.
        """
        ...

    def leave(self) -> None:
        """Leave the group; nobody need be told."""
        ...


class LocalMember:
    """This process: receives the whole payload into the memory of its device."""

    num_ranks = 1

    def __init__(self, device: torch.device, meet_s: float = MEET_S) -> None:
        """Be in no group."""
        self.device: Literal["cpu", "cuda"] = "cuda" if device.type == "cuda" else "cpu"
        self.gpus = [gpu] if (gpu := gpu_of(device)) else []
        self._device = device
        self._meet_s = meet_s
        self._store: Store | None = None
        self._group: Group | None = None

    @property
    def group(self) -> str:
        """The group that it is in; empty: none."""
        return "" if self._group is None else self._group.name

    async def connect(self, address: str, port: int) -> None:
        """Connect to the learner's TCPStore; see `Member.connect`."""
        reach = partial(reach_store, address, port, INSTEAD)
        self._store = await off_loop(reach, "weights store")

    async def join(self, place: Round) -> None:
        """Form the group of a place; see `Member.join`."""
        if self.group == place.group:
            return
        self.leave()
        try:
            self._group = await off_loop(partial(self._meet, place), "weights group", FORM_S)
        except TimeoutError as error:  # NCCL waits for ever
            address = own_address(place.address, place.port)
            late = f"nothing came in {FORM_S:g} s"
            who = f"member {place.rank} of group {place.group}"
            raise no_route(who, address, late) from error

    async def receive(self, manifest: Manifest) -> Payload | None:
        """Receive a version; see `Member.receive`."""
        group = self._group
        assert group is not None  # it was joined
        payload = await off_loop(lambda: group.receive(manifest.num_bytes), "weights")
        digest = await off_loop(lambda: fingerprint(payload), "weights digest")
        if digest != manifest.digest:
            raise DigestMismatch(f"it has digest {digest}, told was {manifest.digest}")
        return _as_payload(payload)

    def leave(self) -> None:
        """Leave the group."""
        group, self._group = self._group, None
        if group is not None:
            group.leave()

    def _meet(self, place: Round) -> Group:
        assert self._store is not None  # else the learner would not have given a place
        return meet_group(
            place.device,
            self._store,
            place.group,
            place.rank,
            place.size,
            self._device,
            own_address(place.address, place.port),
            self._meet_s,
        )


INSTEAD = "; or set weights.transport=object"
"""What else can be done where the learner cannot be reached."""


def _as_payload(payload: Tensor) -> Payload:
    return cast("Any", payload) if payload.is_cuda else payload.numpy().data
