"""One process group of a learner and those that receive its weights; almost all of it blocks.

The group is no default group of torch.distributed, of which a process has one that cannot change:
it is made by itself, so that a process is in as many as it likes, one after the other. Its members
meet through a TCPStore on the learner, which listens on the one address by which the learner's
machine reaches the broker; only when all are there do they connect to each other, so one that is
missing costs a deadline and no half-made communicator.
"""

# torch leaves its stores out of `__all__`.
# pyright: reportPrivateImportUsage=false
# torch leaves some of its methods untyped, and its stores out of `__all__`.
# pyright: reportUnknownMemberType=false, reportPrivateUsage=false, reportPrivateImportUsage=false

import asyncio
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, TypeAlias, TypeVar, cast

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from ...broker.client.connection import Broker
from ...schemas.wire.errors import BrokerError, ConfigError
from .tensors import PART_BYTES

MEET_S = 20.0
"""A member that is not there after so long is done without."""


class ProcessGroupFailed(BrokerError):
    """A round that came to nothing: a member was missing, died, or was too slow."""


Store: TypeAlias = dist.TCPStore
"""A place to meet."""


def own_address(host: str, port: int) -> str:
    """Return the address of this machine from which it reaches another; nothing is sent."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str:
    """Return the network interface that has an address of this machine.

    Raises ConfigError where none has it.
    """
    for name, addresses in psutil.net_if_addrs().items():
        if any(candidate.address.partition("%")[0] == address for candidate in addresses):
            return name
    raise ConfigError(
        f"no network interface of this machine has the address {address}",
        hint="start the node with an address of the broker that is not translated on the way",
    )


def no_route(who: str, address: str, error: BaseException | str) -> ProcessGroupFailed:
    """Return the error of a member that met the others at the store and cannot connect to them."""
    first = str(error).partition("\n")[0]
    return ProcessGroupFailed(
        f"{who}, at {address} ({interface_of(address)}), cannot connect to the others: {first}",
        hint="let the machines reach each other on any port of that interface, or set "
        "NCCL_SOCKET_IFNAME for NCCL on the nodes (NCCL_IB_DISABLE=1 without a common InfiniBand "
        "fabric); NCCL_DEBUG=INFO tells more in the actors' logs",
    )


def open_store(address: str) -> Store:
    """Serve a place to meet, on one address of this machine and a port that is free."""
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
    """Connect to the learner's place to meet; ProcessGroupFailed where it cannot be reached.

    `instead`: what else one can do.
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


def server_of(broker: Broker) -> tuple[str, int]:
    """Return host and port of the server that a connection is at; BrokerError where it is down."""
    url = broker.nc.connected_url
    if url is None or url.hostname is None or url.port is None:
        raise BrokerError("the connection to the broker is down", hint="start the learner again")
    return url.hostname, url.port


BUCKET_BYTES = PART_BYTES
BUCKET_S = 60.0
"""A bucket that takes longer is lost, and the round with it."""
FORM_S = 2 * BUCKET_S
"""Bound of `Group.meet`, beyond all deadlines within it: NCCL has none of its own."""
POLL_S = 0.001
_NCCL_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_ABORT_ONLY = "2"
"""A lost member ends the communicator; torch's default ends the process."""


class ProcessGroup:
    """A process group of one learner, rank 0, and its receivers."""

    def __init__(self, name: str, device: torch.device, backend: Any) -> None:
        """Wrap a process group; `meet` makes one."""
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
        """Form a group with the others whose list bears this name.

        `address` is where this machine listens for the others. Raises ProcessGroupFailed when
        somebody does not come within `meet_s`, or comes and cannot be reached.
        """
        own = dist.PrefixStore(name, store)
        try:
            wait_for_all(own, rank, size, meet_s)
            if device.type == "cuda":
                # Or NCCL would choose an interface, which the others may have no route to.
                os.environ.setdefault("NCCL_SOCKET_IFNAME", interface_of(address))
                return cls(name, device, _nccl(own, rank, size, device))
            return cls(name, device, _gloo(own, rank, size, address))
        except RuntimeError as error:  # all that torch.distributed raises
            raise no_route(f"member {rank} of group {name}", address, error) from error

    def send(self, payload: Tensor) -> None:
        """Give uint8[N], in the machine's memory, to all; ProcessGroupFailed if one is lost."""
        non_blocking = payload.is_pinned()
        deque(
            self._move(
                bucket.to(self.device, non_blocking=non_blocking) for bucket in buckets_of(payload)
            ),
            maxlen=0,
        )

    def receive(self, num_bytes: int) -> Tensor:
        """Return uint8[N] from the learner, on this group's device; ProcessGroupFailed."""
        payload = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        deque(self._move(buckets_of(payload)), maxlen=0)
        return payload

    def stream(self, num_bytes: int) -> Generator[Tensor, None, None]:
        """Yield uint8[N] from the learner in buckets, for who has no room for all of it.

        Raises ProcessGroupFailed. Who does not take the last bucket has left the group.
        """
        sizes = [min(BUCKET_BYTES, num_bytes - at) for at in range(0, num_bytes, BUCKET_BYTES)]
        return self._move(
            torch.empty(size, dtype=torch.uint8, device=self.device) for size in sizes
        )

    def leave(self) -> None:
        """Give up the connections; whoever still waits in a collective fails soon.

        The only method that does not block.
        """
        backend, self._backend = self._backend, None
        if backend is not None:
            threading.Thread(
                target=_end, args=([backend],), name=f"leave {self.name}", daemon=True
            ).start()

    def _move(self, buckets: Iterable[Tensor]) -> Generator[Tensor, None, None]:
        """Broadcast one bucket after the other, of which two are on their way at a time."""
        backend = self._backend
        if backend is None:
            raise ProcessGroupFailed(f"group {self.name} was left", hint=AGAIN)
        flying: deque[tuple[Any, Tensor]] = deque()
        try:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
            for bucket in buckets:
                flying.append((_start(backend, bucket), bucket))
                if len(flying) > 1:
                    yield _finish(*flying.popleft())
            while flying:
                yield _finish(*flying.popleft())
        except GeneratorExit:
            self.leave()
            raise
        except (RuntimeError, TimeoutError) as error:
            self.leave()
            # Whoever keeps the error keeps these, and gloo's connections are open as long as they.
            backend = None
            flying.clear()
            raise ProcessGroupFailed(
                f"group {self.name} broke: {error}", hint=AGAIN
            ) from error.with_traceback(None)


AGAIN = "receivers that are still there ask again and form another group"


def _end(last: list[Any]) -> None:
    """End a process group, held by nobody else: gloo's connections close when it is destroyed."""
    last[0].abort()
    last.clear()


def buckets_of(payload: Tensor) -> list[Tensor]:
    """Cut uint8[N] into views."""
    return [payload[at : at + BUCKET_BYTES] for at in range(0, payload.numel(), BUCKET_BYTES)]


def _start(backend: Any, bucket: Tensor) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    return backend.broadcast([bucket], options)


def _finish(work: Any, bucket: Tensor) -> Tensor:
    """Return a bucket once it is there; a wait of NCCL's own would have no deadline."""
    deadline = time.monotonic() + BUCKET_S
    while not work.is_completed():
        if time.monotonic() > deadline:
            raise TimeoutError(f"a bucket took longer than {BUCKET_S:g} s")
        time.sleep(POLL_S)
    work.wait()
    return bucket


def wait_for_all(store: dist.PrefixStore, rank: int, size: int, meet_s: float) -> None:
    """Tell that this member is there, and wait for the others."""
    store.set(f"here/{rank}", "")
    places = [f"here/{other}" for other in range(size)]
    deadline = time.monotonic() + meet_s
    while not store.check(places):
        if time.monotonic() > deadline:
            missing = [place for place in places if not store.check([place])]
            raise ProcessGroupFailed(
                f"{len(missing)} of {size} members did not come within {meet_s:g} s", hint=AGAIN
            )
        time.sleep(10 * POLL_S)


def _gloo(store: dist.PrefixStore, rank: int, size: int, address: str) -> Any:
    kind = cast(Any, dist.ProcessGroupGloo)
    options = kind._Options()
    options._timeout = timedelta(seconds=BUCKET_S)
    options._devices = [kind.create_device(hostname=address)]
    return kind(store, rank, size, options)


def _nccl(store: dist.PrefixStore, rank: int, size: int, device: torch.device) -> Any:
    kind = cast(Any, dist).ProcessGroupNCCL
    torch.cuda.set_device(device)
    before = os.environ.get(_NCCL_ERRORS)
    os.environ[_NCCL_ERRORS] = _ABORT_ONLY
    try:
        options = kind.Options()
        options._timeout = timedelta(seconds=2 * BUCKET_S)
        backend = kind(store, rank, size, options)
        backend.eager_connect_single_device(device)
        return backend
    finally:
        if before is None:
            del os.environ[_NCCL_ERRORS]
        else:
            os.environ[_NCCL_ERRORS] = before


# -- threads that nobody waits for at the end of a process -----------------------------------------

T = TypeVar("T")


async def off_loop(work: Callable[[], T], name: str, deadline_s: float | None = None) -> T:
    """Run `work` in a thread of its own and return its result, or raise its error.

    Unlike those of `asyncio.to_thread` the thread is a daemon: a wait that was cancelled, or went
    past its deadline (TimeoutError), leaves it behind, and the process can end before it.
    """
    done: Future[T] = Future()

    def run() -> None:
        if not done.set_running_or_notify_cancel():
            return
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001  told to who waits
            done.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    async with asyncio.timeout(deadline_s):
        return await asyncio.wrap_future(done)
