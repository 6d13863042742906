"""Serve ASGI applications with uvicorn, with the bounds that uvicorn lacks.

uvicorn bounds the time between two requests. It waits without end for the head of a request, for
the rest of a body, and for a client that reads nothing. Here each of these has a deadline, heads
are limited in size, and so is the number of requests that run at once.

Connections are not counted by address: this is the task of a reverse proxy in front
(`deploy/nginx/tinkermq.conf`).
"""

import asyncio
import contextlib
import json
import math
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias, cast

import structlog

from .wire.errors import ConfigError, StorageError

try:
    from uvicorn.config import Config
    from uvicorn.protocols.http.auto import AutoHTTPProtocol
    from uvicorn.protocols.http.h11_impl import H11Protocol
    from uvicorn.server import ServerState
except ImportError as error:
    raise ConfigError(
        "the packages starlette and uvicorn are not installed where agent programs run",
        hint="install them there: pip install 'tinkermq[agents]'",
    ) from error

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
Application: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

MAX_HEAD_BYTES = 64 << 10
BODY_RATE = 16 << 10
"""Bytes of a body that must arrive each second, once its first seconds are over."""
MAX_DROPPED_BYTES = 256 << 20
DROPPING_S = 10.0
"""Bytes and seconds for reading the rest of a body after its request was answered."""
_BACKLOG = 1024
_CHECK_S = 0.5
_LOGGED_S = 60.0
"""Seconds between log lines about refusals, each with their number."""
_AROUND_HEADER = len(b": \r\n")
_CLOSE = (b"connection", b"close")
_CONNECTION = "tinkermq.connection"
"""Key of the connection in the state of a request's scope."""
_Protocol = cast("type[H11Protocol]", AutoHTTPProtocol)
"""The protocol of httptools where it is installed; both have the attributes that are used here."""

_log: structlog.stdlib.BoundLogger = structlog.get_logger()


def _never(scope: Scope) -> bool:
    del scope
    return False


@dataclass(frozen=True)
class HttpBounds:
    """Limits for the clients of one server."""

    idle_s: float = 75.0
    """Wait for the next request on a connection (rounded up), and for its whole head."""
    body_s: float = 30.0
    """Wait for a body, plus one second for each `BODY_RATE` bytes received."""
    stalled_s: float = 120.0
    """A client that reads nothing of an answer for so long is disconnected."""
    max_running: int = 4096
    """Requests that run at once; further ones get status 503."""
    is_light: Callable[[Scope], bool] = _never
    """Returns whether a request is short and neither counted nor refused."""
    retry_after_s: int = 1
    """When a refused client should try again."""


# -- connections -----------------------------------------------------------------------------------


class _BoundedConnection(_Protocol):
    """uvicorn's protocol, with bounds on a head's size, and on the time of a head and of a body.

    Of uvicorn's parsers only h11 has a bound on heads.
    """

    is_lost = False
    on_lost: Callable[[], object] | None = None
    """Called when the client has disconnected."""
    _request: object = None
    """The newest request."""
    _since = math.inf
    """When it began, or the head after it; for a new connection, when it was made."""
    _num_bytes = 0
    """Bytes received since then."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self._since = time.monotonic()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the running request."""
        super().connection_lost(exc)
        self.is_lost = True
        self.app_state = {}  # which refers to this connection
        if self.on_lost is not None:
            self.on_lost()

    def data_received(self, data: bytes) -> None:
        """Parse what was received; close the connection if this makes a head too large."""
        request = cast("Any", self.cycle)  # None before the first one
        if request is not None and request.response_complete and not self._num_bytes:
            self._since = time.monotonic()
        reads_body = request is not None and request.more_body and not request.response_complete
        super().data_received(data)
        self._num_bytes += len(data)
        is_large = not reads_body and self._num_bytes > MAX_HEAD_BYTES
        if self.cycle is not self._request:
            self._request, self._since, self._num_bytes = self.cycle, time.monotonic(), 0
            is_large = is_large and self._head_bytes() > MAX_HEAD_BYTES
        if is_large:
            self.transport.abort()

    def _head_bytes(self) -> int:
        """Return the size of the newest request's head, as its client wrote it."""
        scope = cast("Any", self.scope)
        target = len(scope["raw_path"]) + len(scope["query_string"])
        return target + sum(map(len, chain(*self.headers))) + _AROUND_HEADER * len(self.headers)

    def on_response_complete(self) -> None:
        """Begin to wait for the next request."""
        self._num_bytes = 0
        super().on_response_complete()

    def overdue(self, now: float, bounds: HttpBounds) -> str:
        """Return which deadline has passed, if any; uvicorn bounds the time between requests."""
        request = cast("Any", self.cycle)
        if request is None or (request.response_complete and self._num_bytes):
            return "no whole head of a request" if now - self._since > bounds.idle_s else ""
        if request.response_complete or not request.more_body or self.flow.read_paused:
            return ""
        allowed_s = bounds.body_s + self._num_bytes / BODY_RATE
        return "the body arrives too slowly" if now - self._since > allowed_s else ""


class ClientWatch:
    """Notices that the client of a request disconnects; use it as a context manager.

    Waiting for ASGI's own message would take a task for each request. Under another server than
    `HttpServer` it notices nothing.
    """

    def __init__(self, scope: Scope, wake: Callable[[], object]) -> None:
        """Call `wake` when the client disconnects."""
        state: dict[str, Any] = scope.get("state", {})
        self._connection: _BoundedConnection | None = state.get(_CONNECTION)
        self._wake = wake

    @property
    def is_gone(self) -> bool:
        """Whether the client has disconnected."""
        return self._connection is not None and self._connection.is_lost

    def __enter__(self) -> "ClientWatch":
        if self._connection is not None:
            self._connection.on_lost = self._wake
        if self.is_gone:
            self._wake()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._connection is not None:
            self._connection.on_lost = None


# -- requests --------------------------------------------------------------------------------------


class BoundedRequests:
    """ASGI middleware that bounds how many requests run, and what is read after an answer."""

    def __init__(self, app: Application, bounds: HttpBounds, name: str) -> None:
        """Bound the requests of `app`; refusals call it `name`."""
        self._app = app
        self._bounds = bounds
        self._name = name
        self._num_running = 0
        self._num_refused = 0
        self._logged_at = -math.inf

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _BoundedExchange(scope, receive, send)
        if self._bounds.is_light(scope):
            await self._app(scope, exchange.receive, exchange.send)
        elif self._num_running >= self._bounds.max_running:
            await self._refuse(exchange)
        else:
            self._num_running += 1
            try:
                await self._app(scope, exchange.receive, exchange.send)
            finally:
                self._num_running -= 1

    async def _refuse(self, exchange: "_BoundedExchange") -> None:
        """Answer with status 503 and the error fields of all APIs."""
        again_s = self._bounds.retry_after_s
        message = f"{self._num_running} requests run, as many as this {self._name} serves at once"
        hint = f"send fewer requests at once, and try again in {again_s} s"
        error = {"code": "busy", "type": "server_error", "message": message, "param": None}
        value = {"type": "error", "error": {**error, "hint": hint}, "detail": f"{message}: {hint}"}
        body = json.dumps(value).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"retry-after", str(again_s).encode()),
            (b"x-should-retry", b"true"),
        ]
        self._num_refused += 1
        if time.monotonic() - self._logged_at > _LOGGED_S:
            _log.warning("requests_refused", num=self._num_refused, running=self._num_running)
            self._num_refused, self._logged_at = 0, time.monotonic()
        await exchange.send({"type": "http.response.start", "status": 503, "headers": headers})
        await exchange.send({"type": "http.response.body", "body": body})


class _BoundedExchange:
    """One request's body and answer.

    A client that is answered before its whole request was read is still sending. Closing the
    connection then resets it, and the client cannot read the answer (RFC 9112, 9.6). So the answer
    is sent, the rest of the body is dropped as it arrives, within bounds, and only then does the
    answer end, and the connection with it.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._num_bytes = 0
        self._is_read = _has_no_body(scope)

    async def receive(self) -> Message:
        """Return the next message."""
        message = await self._receive()
        self._num_bytes += len(message.get("body", b""))
        self._is_read = message["type"] != "http.request" or not message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        """Send a message of the answer."""
        if not self._is_read:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), _CLOSE]}
            elif not message.get("more_body", False):
                await self._send({**message, "more_body": True})
                await self._drop_rest()
                message = {"type": "http.response.body"}
        await self._send(message)

    async def _drop_rest(self) -> None:
        """Read the rest of the body, within bounds."""
        most = self._num_bytes + MAX_DROPPED_BYTES
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DROPPING_S):
                while not self._is_read and self._num_bytes < most:
                    await self.receive()


def _has_no_body(scope: Scope) -> bool:
    """Return whether the head of a request announces no body."""
    for name, value in scope["headers"]:
        if name == b"transfer-encoding" or (name == b"content-length" and value.strip() != b"0"):
            return False
    return True


# -- the server ------------------------------------------------------------------------------------


def listening_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens on an address; port 0 takes a free one. Raises StorageError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise StorageError(
            f"cannot listen on {host}:{port}: {reason}",
            hint="choose another port: 0 takes a free one",
        ) from error


class HttpServer:
    """The sockets on which one application is served."""

    def __init__(
        self, name: str, application: Any, bounds: HttpBounds | None = None, **settings: Any
    ) -> None:
        """Prepare to serve an ASGI application; `settings` are further ones of uvicorn's."""
        self._bounds = bounds or HttpBounds()
        options: dict[str, Any] = {"ws": "none", **settings}
        self._config = Config(
            cast("Any", BoundedRequests(application, self._bounds, name)),
            lifespan="off",
            log_config=None,
            log_level="critical",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=math.ceil(self._bounds.idle_s),
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
            **options,
        )
        self._config.load()
        self._state = ServerState()
        self._servers: list[asyncio.Server] = []
        self._closing: asyncio.Task[None] | None = None

    async def listen(self, listening: socket.socket) -> asyncio.Server:
        """Serve on a listening socket until it is closed or the server stops."""
        if listening.family in (socket.AF_INET, socket.AF_INET6):
            # accepted sockets inherit it; it also ends connections that are being closed
            stalled_ms = round(self._bounds.stalled_s * 1000)
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, stalled_ms)
        loop = asyncio.get_running_loop()
        server = await loop.create_server(
            self._connection,
            sock=listening,
            ssl=self._config.ssl,
            backlog=_BACKLOG,
            start_serving=False,
        )
        self._servers.append(server)
        try:
            await server.start_serving()
        except BaseException:
            self._end(server)
            raise
        if self._closing is None:
            self._closing = asyncio.create_task(self._close_slow(), name="close slow connections")
        return server

    @contextlib.asynccontextmanager
    async def listening(self, listening: socket.socket) -> AsyncIterator[None]:
        """Serve on a listening socket; the end of the context closes it."""
        server = await self.listen(listening)
        try:
            yield
        finally:
            self._end(server)

    def _end(self, server: asyncio.Server) -> None:
        self._servers.remove(server)
        server.close()

    async def stop(self, drain_s: float = 5.0) -> None:
        """Accept no more requests, let running ones end within `drain_s`, and close."""
        for server in self._servers:
            server.close()
        for connection in list(self._state.connections):
            connection.shutdown()
        if self._state.tasks:
            await asyncio.wait(self._state.tasks, timeout=drain_s)
        running = list(self._state.tasks)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
        for connection in list(self._state.connections):
            connection.transport.abort()
        if self._closing is not None:
            self._closing.cancel()
            self._closing = None

    async def _close_slow(self) -> None:
        """Close connections past a deadline, until cancelled."""
        while True:
            await asyncio.sleep(_CHECK_S)
            now = time.monotonic()
            for connection in cast("list[_BoundedConnection]", list(self._state.connections)):
                if reason := connection.overdue(now, self._bounds):
                    address = connection.client[0] if connection.client else ""
                    _log.warning("connection_closed", address=address, reason=reason)
                    connection.transport.abort()

    def _connection(self) -> asyncio.Protocol:
        connection = _BoundedConnection(self._config, self._state, {})
        connection.app_state = {_CONNECTION: connection}
        return connection
