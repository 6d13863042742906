"""Process groups of a learner and its receivers, and their members; most calls block.

The groups are not the default group of torch.distributed, which cannot change: a process may be in
several groups one after another. Members meet through a TCPStore of the learner, which listens on
the address by which the learner's machine reaches the broker. They connect to each other only when
all are present, so a missing member costs a deadline, not an incomplete communicator.
"""

# torch leaves some of its methods untyped, and its stores out of `__all__`.
# pyright: reportUnknownMemberType=false, reportPrivateUsage=false, reportPrivateImportUsage=false

import asyncio
import contextlib
import os
import socket
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing import reductions

from ...broker.jetstream.objects import DigestMismatch
from ...schemas.local.process import in_daemon_thread
from ...schemas.weights import Manifest, Round
from ...schemas.wire.codec import pack, unpack
from ...schemas.wire.errors import BrokerError
from ..addresses import interface_of, own_address
from ..policy.devices import beside_kernels, finish_copies, gpu_of, lent
from .nccl import settings_of_shared_group
from .shared_memory import MEMORY_FOLDER
from .tensors import PART_BYTES, Payload, fingerprint

MEET_S = 20.0
"""Time after which a group without all members is given up."""


class ProcessGroupFailed(BrokerError):
    """A round failed: a member was missing, died, or was too slow."""


Store: TypeAlias = dist.TCPStore
"""Store through which members of a group meet."""


def no_route(who: str, address: str, error: BaseException | str) -> ProcessGroupFailed:
    """Return the error of a member that found the others in the store but cannot connect."""
    first = str(error).partition("\n")[0]
    return ProcessGroupFailed(
        f"{who}, at {address} ({interface_of(address)}), cannot connect to the others: {first}",
        hint="let the machines reach each other on any port of that interface, or set "
        "NCCL_SOCKET_IFNAME for NCCL on the nodes (NCCL_IB_DISABLE=1 without a common InfiniBand "
        "fabric); NCCL_DEBUG=INFO tells more in the actors' logs",
    )


def open_store(address: str) -> Store:
    """Serve a TCPStore on one address of this machine, at a free port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family)
    listener.bind((address, 0))
    listener.listen()
    port = int(listener.getsockname()[1])
    return dist.TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=MEET_S),
        master_listen_fd=listener.detach(),
    )


def reach_store(address: str, port: int, instead: str = "") -> Store:
    """Connect to the learner's TCPStore; ProcessGroupFailed if it cannot be reached.

    `instead` adds an alternative to the hint.
    """
    try:
        socket.create_connection((address, port), MEET_S).close()
        return dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=MEET_S))
    except (OSError, RuntimeError) as error:
        raise ProcessGroupFailed(
            f"the learner is to be met at {address}:{port}, which cannot be reached from here: "
            f"{error}",
            hint="let machines of the pool connect to each other on any port, and start the "
            f"learner's node with the broker's address in that network, not 127.0.0.1{instead}",
        ) from error


BUCKET_BYTES = PART_BYTES
BUCKET_S = 60.0
"""Time after which a bucket, and with it the round, fails."""
FORM_S = 2 * BUCKET_S
"""Limit of `Group.meet`, beyond all deadlines within it, since NCCL has none."""
_POLL_S = 0.001


class _Receiving(ABC):
    """Receives payloads in a group of a learner and its receivers."""

    device: torch.device

    def receive(self, num_bytes: int) -> Tensor:
        """Return uint8[N] from the learner, on this group's device; ProcessGroupFailed."""
        payload = lent(empty_bytes(num_bytes, self.device))
        deque(self._move(buckets_of(payload)), maxlen=0)
        return payload

    def stream(self, num_bytes: int) -> Generator[Tensor, None, None]:
        """Yield uint8[N] from the learner in buckets, for a receiver without room for all.

        Raises ProcessGroupFailed. A receiver that does not read the last bucket leaves the group.
        """
        with contextlib.closing(self._move(empty_buckets(num_bytes, self.device))) as buckets:
            for bucket in buckets:
                yield lent(bucket)

    @abstractmethod
    def _move(self, buckets: Iterable[Tensor]) -> Generator[Tensor, None, None]:
        """Receive the buckets in order."""


class ProcessGroup(_Receiving):
    """A process group of a learner (rank 0) and its receivers."""

    def __init__(self, name: str, device: torch.device, backend: Any) -> None:
        """Wrap a process group; `meet` creates one."""
        self.name = name
        self.device = device
        self._backend = backend

    @classmethod
    def meet(
        cls,
        store: Store,
        name: str,
        rank: int,
        size: int,
        device: torch.device,
        address: str,
        meet_s: float = MEET_S,
    ) -> "ProcessGroup":
        """Form the group of this name with the other members.

        `address` is where this machine listens for them. Raises ProcessGroupFailed if a member is
        missing after `meet_s`, or cannot be reached.
        """
        own = dist.PrefixStore(name, store)
        try:
            wait_for_all(own, rank, size, meet_s)
            if device.type == "cuda":
                return cls(name, device, _nccl(own, rank, size, device))
            return cls(name, device, _gloo(own, rank, size, address))
        except RuntimeError as error:  # torch.distributed raises nothing more specific
            raise no_route(f"member {rank} of group {name}", address, error) from error

    def send(self, payload: Tensor) -> None:
        """Send uint8[N] in host memory to all members; ProcessGroupFailed if one is lost."""
        non_blocking = payload.is_pinned()
        buckets = buckets_of(payload)
        deque(
            self._move(bucket.to(self.device, non_blocking=non_blocking) for bucket in buckets),
            maxlen=0,
        )

    def leave(self) -> None:
        """Close the connections; members waiting in a collective fail soon.

        The only method that does not block.
        """
        backend, self._backend = self._backend, None
        if backend is not None:
            threading.Thread(
                target=_end, args=([backend],), name=f"leave {self.name}", daemon=True
            ).start()

    def _move(self, buckets: Iterable[Tensor]) -> Generator[Tensor, None, None]:
        """Broadcast the buckets in order, two at a time."""
        backend = self._backend
        if backend is None:
            raise ProcessGroupFailed(f"group {self.name} was left", hint=AGAIN)
        flying: deque[tuple[Any, Tensor]] = deque()
        try:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
            remaining = iter(buckets)
            while True:
                # No other code runs in the block: what reads a bucket has a stream of its own.
                with beside_kernels(self.device):
                    if (bucket := next(remaining, None)) is not None:
                        flying.append((_start(backend, bucket), bucket))
                    elif not flying:
                        return
                    is_due = bucket is None or len(flying) > 1
                    arrived = _finish(*flying.popleft()) if is_due else None
                if arrived is not None:
                    yield arrived
        except GeneratorExit:
            self.leave()
            raise
        except (RuntimeError, TimeoutError) as error:
            self.leave()
            # The error would keep these alive, and with them gloo's connections.
            backend = None
            flying.clear()
            raise ProcessGroupFailed(
                f"group {self.name} broke: {error}", hint=AGAIN
            ) from error.with_traceback(None)


AGAIN = "receivers that are still there ask again and form another group"


def _end(last: list[Any]) -> None:
    """End a process group without other references; gloo closes when it is destroyed."""
    last[0].abort()
    last.clear()


def buckets_of(payload: Tensor) -> list[Tensor]:
    """Cut uint8[N] into views."""
    return [payload[at : at + BUCKET_BYTES] for at in range(0, payload.numel(), BUCKET_BYTES)]


def empty_buckets(num_bytes: int, device: torch.device) -> Iterator[Tensor]:
    """Yield memory for the buckets of a payload."""
    for at in range(0, num_bytes, BUCKET_BYTES):
        yield empty_bytes(min(BUCKET_BYTES, num_bytes - at), device)


def empty_bytes(num_bytes: int, device: torch.device) -> Tensor:
    """Return uint8[N] on a device, to be written beside its kernels."""
    with beside_kernels(device):
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def _start(backend: Any, bucket: Tensor) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    return backend.broadcast([bucket], options)


def _finish(work: Any, bucket: Tensor) -> Tensor:
    """Return a bucket once it has arrived; NCCL's own wait has no deadline."""
    _wait(work.is_completed, "a bucket", BUCKET_S)
    work.wait()
    return bucket


def _wait(holds: Callable[[], bool], whom: str, deadline_s: float, poll_s: float = _POLL_S) -> None:
    """Wait until `holds()`; raises TimeoutError that names the missing members."""
    deadline = time.monotonic() + deadline_s
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{whom} took longer than {deadline_s:g} s")
        time.sleep(poll_s)


def wait_for_all(store: dist.PrefixStore, rank: int, size: int, meet_s: float) -> None:
    """Report that this member is present, and wait for the others."""
    store.set(f"here/{rank}", "")
    places = [f"here/{other}" for other in range(size)]
    try:
        _wait(lambda: store.check(places), "a member", meet_s, poll_s=10 * _POLL_S)
    except TimeoutError as error:
        missing = [place for place in places if not store.check([place])]
        raise ProcessGroupFailed(
            f"{len(missing)} of {size} members did not come within {meet_s:g} s", hint=AGAIN
        ) from error


def _gloo(store: dist.PrefixStore, rank: int, size: int, address: str) -> Any:
    kind = cast(Any, dist.ProcessGroupGloo)
    options = kind._Options()
    options._timeout = timedelta(seconds=BUCKET_S)
    options._devices = [kind.create_device(hostname=address)]
    return kind(store, rank, size, options)


def _nccl(store: dist.PrefixStore, rank: int, size: int, device: torch.device) -> Any:
    kind = cast(Any, dist).ProcessGroupNCCL
    torch.cuda.set_device(device)
    with settings_of_shared_group():
        options = kind.Options(is_high_priority_stream=True)
        options._timeout = timedelta(seconds=2 * BUCKET_S)
        backend = kind(store, rank, size, options)
        backend.eager_connect_single_device(device)
        return backend


# -- a buffer on a GPU that the learner and a receiver share ---------------------------------------
# NCCL refuses two ranks on one device. So the learner exports a buffer of two buckets (CUDA IPC),
# the receivers open it, and counters in the TCPStore tell which bucket was written and which was
# read: one is copied out while the next is copied in. Without a GPU the same steps use a file of
# shared memory as the buffer.

_SLOTS = 2
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
"""The last arguments of `rebuild_cuda_tensor`, numbers and bytes; the first describe the tensor."""


def _export_buffer(buffer: Tensor) -> bytes:
    """Return a handle with which another process of this machine can open a GPU buffer once."""
    arguments = cast(Any, reductions).reduce_tensor(buffer)[1]
    return pack(list(arguments[-len(_REBUILT) :]))


def _open_buffer(handle: bytes, num_bytes: int, device: torch.device) -> Tensor:
    """Return the buffer exported by another process, on this process's `device`."""
    arguments = dict(zip(_REBUILT, cast("list[Any]", unpack(handle)), strict=True))
    arguments["storage_device"] = device.index  # device numbers differ between processes
    return cast(Any, reductions).rebuild_cuda_tensor(
        torch.Tensor, (num_bytes,), (1,), 0, torch.UntypedStorage, torch.uint8, **arguments
    )


class SharedBufferGroup(_Receiving):
    """A learner (rank 0) and receivers on its GPU; has the methods of `ProcessGroup`."""

    def __init__(
        self, name: str, store: dist.PrefixStore, rank: int, size: int, buffer: Tensor
    ) -> None:
        """Wrap a buffer of uint8[2 * BUCKET_BYTES]; `meet` creates one."""
        self.name = name
        self.device = buffer.device
        self._store = store
        self._rank = rank
        self._others = range(1, size)
        self._buffer: Tensor | None = buffer
        self._num_moved = 0
        """Number of buckets since the group was formed."""

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
        """Form the group of this name with the other members; ProcessGroupFailed."""
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
                with beside_kernels(device):  # torch lets the stream wait for the learner's
                    buffer = _open(handle, num_bytes, device)
                own.set(f"open/{rank}", "")
        except (RuntimeError, OSError, TimeoutError) as error:
            raise ProcessGroupFailed(f"group {name} did not form: {error}", hint=AGAIN) from error
        return cls(name, own, rank, size, buffer)

    def send(self, payload: Tensor) -> None:
        """Send uint8[N] in host memory to all members; ProcessGroupFailed if one is lost."""
        with _as_failed(self):
            buckets = buckets_of(payload)
            for bucket in buckets:
                self._wait_for_reads(self._num_moved - _SLOTS + 1)
                self._copy(self._slot(bucket.numel()), bucket)
                self._num_moved += 1
                self._store.set("written", str(self._num_moved))
            self._wait_for_reads(self._num_moved)

    def leave(self) -> None:
        """Release the buffer; a member that still waits fails after a bucket's deadline."""
        self._buffer = None

    def _move(self, buckets: Iterable[Tensor]) -> Generator[Tensor, None, None]:
        with _as_failed(self):
            for target in buckets:
                number = self._num_moved + 1
                _wait(
                    lambda n=number: int(self._store.get("written")) >= n, "the learner", BUCKET_S
                )
                self._copy(target, self._slot(target.numel()))
                self._num_moved = number
                self._store.set(f"read/{self._rank}", str(number))
                yield target

    def _wait_for_reads(self, number: int) -> None:
        def have_read() -> bool:
            return all(int(self._store.get(f"read/{rank}")) >= number for rank in self._others)

        if number > 0:
            _wait(have_read, "a receiver", BUCKET_S)

    def _slot(self, num_bytes: int) -> Tensor:
        if self._buffer is None:
            raise ProcessGroupFailed(f"group {self.name} was left", hint=AGAIN)
        start = self._num_moved % _SLOTS * BUCKET_BYTES
        return self._buffer[start : start + num_bytes]

    def _copy(self, target: Tensor, source: Tensor) -> None:
        with beside_kernels(self.device):
            target.copy_(source, non_blocking=True)
        self._settle()

    def _settle(self) -> None:
        """Wait for the end of a copy: the other process reads or writes the slot next."""
        finish_copies(self.device)


@contextlib.contextmanager
def _as_failed(group: SharedBufferGroup) -> Iterator[None]:
    """On any error, leave the group and raise ProcessGroupFailed."""
    try:
        yield
    except BaseException as error:
        group.leave()
        if isinstance(error, (RuntimeError, TimeoutError)):
            message = f"group {group.name} broke: {error}"
            raise ProcessGroupFailed(message, hint=AGAIN) from error
        raise


def _offered(
    store: dist.PrefixStore, num_bytes: int, size: int, device: torch.device, meet_s: float
) -> Tensor:
    """Create a buffer, and wait until the others have opened it."""
    others = range(1, size)
    path = ""
    if device.type == "cuda":
        buffer = empty_bytes(num_bytes, device)
    else:
        file, path = tempfile.mkstemp(prefix="tinkermq-buffer-", dir=MEMORY_FOLDER)
        os.close(file)
        buffer = _mapped(path, num_bytes)
    try:
        for other in others:
            # One export per receiver, since torch counts exports against closed ones.
            with beside_kernels(device):  # which the receivers' streams wait for
                handle = path.encode() if path else _export_buffer(buffer)
            store.set(f"buffer/{other}", handle.hex())
        wait_for_all(store, 0, size, meet_s)
        _wait(lambda: store.check([f"open/{other}" for other in others]), "a member", meet_s)
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
"""A group of the learner and its receivers."""


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
    """Form the group of this name with the other members; blocks.

    Raises ProcessGroupFailed if a member is missing after `meet_s`.
    """
    if route == "ipc":
        return SharedBufferGroup.meet(store, name, rank, size, device, meet_s)
    own = device if route == "cuda" else torch.device("cpu")
    return ProcessGroup.meet(store, name, rank, size, own, address, meet_s)


class Member(Protocol):
    """Joins groups and receives weights for a receiver."""

    device: Literal["cpu", "cuda"]
    """Device for received weights."""
    num_ranks: int
    """Number of places in a group."""
    gpus: list[str]
    """UUIDs of its GPUs."""

    @property
    def group(self) -> str:
        """Name of its group; empty: none."""
        ...

    async def connect(self, address: str, port: int) -> None:
        """Connect to the learner's TCPStore before a place is requested: a member that cannot
        connect would delay the others of a group. Raises ProcessGroupFailed."""
        ...

    async def join(self, place: Round) -> None:
        """Form the group of a place, unless already in it. Raises ProcessGroupFailed."""
        ...

    async def receive(self, manifest: Manifest) -> Payload | None:
        """Receive a version in the group; return its payload, or None if it is already loaded.

        Raises ProcessGroupFailed, DigestMismatch.
        """
        ...

    def leave(self) -> None:
        """Leave the group, without notice."""
        ...


class LocalMember:
    """This process: receives whole payloads into the memory of its device."""

    num_ranks = 1

    def __init__(self, device: torch.device, meet_s: float = MEET_S) -> None:
        """There is no group yet."""
        self.device: Literal["cpu", "cuda"] = "cuda" if device.type == "cuda" else "cpu"
        self.gpus = [gpu] if (gpu := gpu_of(device)) else []
        self._device = device
        self._meet_s = meet_s
        self._store: Store | None = None
        self._group: Group | None = None

    @property
    def group(self) -> str:
        """Name of its group; empty: none."""
        return "" if self._group is None else self._group.name

    async def connect(self, address: str, port: int) -> None:
        """Connect to the learner's TCPStore; see `Member.connect`."""
        reach = partial(reach_store, address, port, INSTEAD)
        self._store = await in_daemon_thread(reach, "weights store")

    async def join(self, place: Round) -> None:
        """Form the group of a place; see `Member.join`."""
        if self.group == place.group:
            return
        self.leave()
        try:
            async with asyncio.timeout(FORM_S):
                self._group = await in_daemon_thread(partial(self._meet, place), "weights group")
        except TimeoutError as error:  # NCCL itself waits forever
            address = own_address(place.address, place.port)
            late = f"nothing came in {FORM_S:g} s"
            who = f"member {place.rank} of group {place.group}"
            raise no_route(who, address, late) from error

    async def receive(self, manifest: Manifest) -> Payload | None:
        """Receive a version; see `Member.receive`."""
        group = self._group
        assert group is not None  # joined before
        payload = await in_daemon_thread(lambda: group.receive(manifest.num_bytes), "weights")
        digest = await in_daemon_thread(lambda: fingerprint(payload), "weights digest")
        if digest != manifest.digest:
            raise DigestMismatch(f"it has digest {digest}, the manifest says {manifest.digest}")
        return payload if payload.is_cuda else payload.numpy().data

    def leave(self) -> None:
        """Leave the group."""
        group, self._group = self._group, None
        if group is not None:
            group.leave()

    def _meet(self, place: Round) -> Group:
        assert self._store is not None  # the learner assigns a place only after `connect`
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
"""Hint with an alternative for an unreachable learner."""
