"""What bounds a visitor: connections and their deadlines, bodies, and requests at a time."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

from starlette.types import Scope

from ...envs.http_server import ConnectionBounds, Connections, Deadlines
from ...schemas.wire.errors import BusyError

P = ParamSpec("P")
T = TypeVar("T")

MAX_CONNECTIONS = 1024
MAX_OF_HOLDER = 512
"""Of one address, as long as it has shown no key, or of one user."""
NUM_RESERVED = 64
"""Further ones, for one light request each."""
RETRY_AFTER_S = 5
MAX_INFERENCE_BYTES = 8 << 20
MAX_PROGRAM_BYTES = 1 << 30
"""Of programs with the key of an episode: beyond the bound of their own endpoints, which say so in
the words of the API that was called, a body is dropped as it comes."""
MAX_CONFIG_BYTES = 1 << 20
MAX_FORM_BYTES = 16 << 10
MAX_RUNNING = 256
"""Requests and live streams of one user at a time."""
MAX_HELD_BYTES = 64 << 20
"""Bytes of bodies of one user at a time."""
MAX_THREADS = 2
"""Threads that work for one user at a time; what has to wait does so without a thread."""
_DEADLINES = Deadlines(head_s=10.0, idle_s=10.0, body_s=15.0, stalled_s=30.0)
_BOUNDS = ConnectionBounds(MAX_CONNECTIONS, MAX_OF_HOLDER, MAX_OF_HOLDER, NUM_RESERVED)
_CONFIGS = frozenset({"/submit", "/api/v1/jobs", "/api/v1/check"})
_APIS = ("/v1/", "/tinker/", "/e/")
_TINKER = "/tinker/api/v1/"
_LIGHT = tuple(
    _TINKER + path
    for path in ("session_heartbeat", "healthz", "client/config", "client/dynamic_config")
)


def gateway_connections(
    bounds: ConnectionBounds = _BOUNDS, deadlines: Deadlines = _DEADLINES
) -> Connections:
    """Return what bounds the connections of a gateway."""
    return Connections(
        "gateway",
        bounds=bounds,
        deadlines=deadlines,
        retry_after_s=RETRY_AFTER_S,
        is_light=_is_light,
    )


def _is_light(scope: Scope) -> bool:
    """Whether the reserve is for a request: one of a page, of health, or a heartbeat; no stream."""
    if any(name == b"accept" and b"event-stream" in value for name, value in scope["headers"]):
        return False
    path: str = scope["path"]
    return path in _LIGHT or not path.startswith(_APIS)


def max_body_bytes(path: str) -> int:
    """Return the size of the largest body that is read: conversations may hold images."""
    if path.startswith(("/v1/", "/tinker/")):
        return MAX_INFERENCE_BYTES
    return MAX_CONFIG_BYTES if path in _CONFIGS else MAX_FORM_BYTES


class Share:
    """The running requests of one user."""

    def __init__(
        self, max_running: int = MAX_RUNNING, max_held_bytes: int = MAX_HELD_BYTES
    ) -> None:
        """Bound the number of requests by `max_running`, the bytes of their bodies, too."""
        self.num_running = 0
        self._held_bytes = 0
        self._max_running = max_running
        self._max_held_bytes = max_held_bytes
        self._threads = asyncio.Semaphore(MAX_THREADS)

    @contextlib.contextmanager
    def taken(self, body_bytes: int = 0) -> Iterator[None]:
        """Count a request while the block runs; raises BusyError where it is one too many."""
        if self.num_running >= self._max_running:
            raise BusyError(
                f"{self.num_running} requests of yours are running, as many as one user may have",
                hint="send the next one when an answer has come",
            )
        if body_bytes and self._held_bytes + body_bytes > self._max_held_bytes:
            raise BusyError(
                f"the bodies of your requests have {self._held_bytes:,} bytes already",
                hint=f"have at most {self._max_held_bytes:,} at a time",
            )
        self.num_running += 1
        self._held_bytes += body_bytes
        try:
            yield
        finally:
            self.num_running -= 1
            self._held_bytes -= body_bytes

    async def in_thread(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Do what takes its time in a thread, for each user few at a time."""
        async with self._threads:
            return await asyncio.to_thread(function, *args, **kwargs)
