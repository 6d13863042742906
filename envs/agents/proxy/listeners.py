"""The sockets of a proxy: uvicorn's HTTP on them, with bounds of its own.

uvicorn waits for ever for the rest of a request and for a reader. Here a connection has deadlines
for the head of a request, for its body by a least rate, and for a reader who takes nothing; heads
are bounded, and so is what comes of a body that was refused.
"""

import asyncio
import contextlib
import json
import math
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, cast

import structlog

from ....schemas.wire.errors import ConfigError, StorageError
from .exchange import Hangup

try:
    from uvicorn.config import Config
    from uvicorn.protocols.http.auto import AutoHTTPProtocol
    from uvicorn.protocols.http.h11_impl import H11Protocol
    from uvicorn.server import ServerState
except ImportError as error:
    raise ConfigError(
        "the package uvicorn is not installed where agent programs run",
        hint="install it there: pip install 'tinkermq[agents]'",
    ) from error

MAX_CONNECTIONS = 4096
BODY_RATE = 16 << 10
MAX_HEAD_BYTES = 128 << 10
MAX_REFUSED_BYTES = 256 << 20
"""Of a request that is answered already: the rest of a body is read and dropped, up to here."""
_LOOK_S = 0.5
_BACKLOG = 1024
_DRAIN_S = 5.0
_LOGGED_S = 60.0
"""Refusals are logged once in so long."""
_log = structlog.get_logger()
_Protocol = cast("type[H11Protocol]", AutoHTTPProtocol)
"""That of httptools where it is installed; both have what is used here."""


@dataclass(frozen=True)
class ConnectionTimes:
    """How long a proxy waits for a connection."""

    head_s: float = 20.0
    """For the head of a request, from its first byte."""
    idle_s: float = 75.0
    """Between requests: longer than the makers' libraries keep a connection."""
    body_s: float = 30.0
    """For a body, and a second more for each `BODY_RATE` bytes that have come."""
    stalled_s: float = 120.0
    """How long a program may take too little of an answer for the buffer to drain."""


class ProxyListeners:
    """The sockets that one application is served on."""

    def __init__(
        self,
        application: Any,
        times: ConnectionTimes | None = None,
        most: int = MAX_CONNECTIONS,
    ) -> None:
        """Serve an ASGI application on `most` connections at a time."""
        self.times = times or ConnectionTimes()
        self._most = most
        self._logged_s = float("-inf")
        self.connections: set[_ProxyConnection] = set()
        self._config = Config(
            application,
            lifespan="off",
            ws="none",
            log_config=None,
            log_level="critical",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=math.ceil(self.times.idle_s),
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        )
        self._state = ServerState()
        self._servers: list[asyncio.Server] = []
        self._watching: asyncio.Task[None] | None = None

    async def listen(self, host: str = "127.0.0.1", port: int = 0) -> int:
        """Listen on an address; return its port. Raises StorageError for one in use."""
        loop = asyncio.get_running_loop()
        try:
            server = await loop.create_server(self._connection, host, port, backlog=_BACKLOG)
        except OSError as error:
            raise StorageError(
                f"the proxy cannot listen on {host}:{port}: {error.strerror}",
                hint="choose a free port",
            ) from error
        self._add(server)
        return int(server.sockets[0].getsockname()[1])

    @contextlib.asynccontextmanager
    async def listen_at(self, listening: socket.socket) -> AsyncIterator[None]:
        """Take connections at a socket that listens already; the context's end closes it."""
        loop = asyncio.get_running_loop()
        server = await loop.create_server(self._connection, sock=listening, backlog=_BACKLOG)
        self._add(server)
        try:
            yield
        finally:
            self._servers.remove(server)
            server.close()

    async def stop(self, drain_s: float = _DRAIN_S) -> None:
        """Take no more requests, give those that run `drain_s` to end, and close."""
        for server in self._servers:
            server.close()
        for connection in list(self.connections):
            connection.shutdown()
        if tasks := set(self._state.tasks):
            _, late = await asyncio.wait(tasks, timeout=drain_s)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)
        for connection in list(self.connections):
            connection.transport.abort()
        if self._watching is not None:
            self._watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watching

    def _add(self, server: asyncio.Server) -> None:
        self._servers.append(server)
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch(), name="close slow programs")

    def enter(self, connection: "_ProxyConnection") -> bool:
        """Count a connection, for which an idle one may have to go; False for one too many."""
        if len(self.connections) >= self._most:
            idle = [one for one in self.connections if one.is_idle]
            if not idle:
                return False
            longest = min(idle, key=lambda one: one.since)
            self.connections.discard(longest)
            longest.shutdown()
        self.connections.add(connection)
        return True

    def refusal(self) -> bytes:
        """Return what is answered on a connection that is one too many."""
        message = f"all {self._most} connections of this proxy are taken"
        if time.monotonic() - self._logged_s > _LOGGED_S:
            self._logged_s = time.monotonic()
            _log.warning("connections_refused", reason=message)
        hint = "close connections on which nothing is asked"
        error = {"message": f"{message}: {hint}", "type": "server_error", "code": "busy"}
        body = json.dumps({"type": "error", "error": {**error, "param": None}})
        head = (
            "HTTP/1.1 503 Service Unavailable\r\nx-should-retry: true\r\nretry-after: 1\r\n"
            "connection: close\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        return (head + body).encode()

    def _connection(self) -> asyncio.Protocol:
        return _ProxyConnection(self, self._config, self._state)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            now = time.monotonic()
            for connection in list(self.connections):
                if connection.is_overdue(now):
                    connection.transport.abort()


class _ProxyConnection(_Protocol):
    """One connection, which knows what it waits for and since when."""

    def __init__(self, listeners: ProxyListeners, config: Config, state: ServerState) -> None:
        self._hangup = Hangup()
        super().__init__(config, state, {Hangup.NAME: self._hangup})
        self._listeners, self._times = listeners, listeners.times
        self.since = time.monotonic()
        self._num_bytes = 0
        self._seen: object = None
        self._stalled_since: float | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        if not self._listeners.enter(self):
            transport.write(self._listeners.refusal())
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._listeners.connections.discard(self)
        super().connection_lost(exc)
        self._hangup.lost()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if not self._is_busy and not self._num_bytes:
            self.since = time.monotonic()
        self._num_bytes += len(data)
        super().data_received(data)
        if self.cycle is not self._seen:
            self._seen, self.since, self._num_bytes = self.cycle, time.monotonic(), len(data)
        elif not self._is_busy and self._num_bytes > (
            MAX_REFUSED_BYTES if self._seen is not None else 2 * MAX_HEAD_BYTES
        ):
            self.transport.abort()

    def on_response_complete(self) -> None:
        if not self.cycle.more_body:
            self.since, self._num_bytes = time.monotonic(), 0
        super().on_response_complete()

    def pause_writing(self) -> None:
        self._stalled_since = time.monotonic()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._stalled_since = None
        super().resume_writing()

    @property
    def _is_busy(self) -> bool:
        cycle = cast("Any", self.cycle)  # None before the first request
        return cycle is not None and not cycle.response_complete

    @property
    def is_idle(self) -> bool:
        """Whether a request was answered on it, and no other one has begun to come."""
        return self._seen is not None and not self._is_busy and not self._num_bytes

    def is_overdue(self, now: float) -> bool:
        """Whether a deadline has passed."""
        if self._stalled_since is not None and now - self._stalled_since > self._times.stalled_s:
            return True
        if not self._is_busy:
            return now - self.since > (
                self._times.head_s if self._num_bytes else self._times.idle_s
            )
        allowed_s = self._times.body_s + self._num_bytes / BODY_RATE
        return bool(
            self.cycle.more_body and not self.flow.read_paused and now - self.since > allowed_s
        )
