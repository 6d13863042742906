"""uvicorn's HTTP with connections that are bounded in number and in time.

uvicorn waits for ever for the rest of a request and for a reader, so a client that sends one byte a
minute holds a connection for as long as it likes. Here a connection has deadlines: for the head of
a request, between requests, for a body by a least rate, and for a reader that takes nothing. Heads
are bounded, and so is what comes of a body whose request was answered already.

A connection belongs to its address, and once a key has come on it and was found good, to that key's
user: many users behind one address do not take each other's. Once connections are scarce each
holder may have an equal share, and one that has more is refused requests until it has not. Beyond a
bound the connection that is idle longest is closed to make room. Where none is idle, a few more may
be accepted for one request each: a light one is answered, all else gets status 503 and the number
of seconds to wait.
"""

import asyncio
import contextlib
import json
import math
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import structlog

from ..broker.client.fair_queue import end_tasks
from ..schemas.wire.errors import BusyError, ConfigError, StorageError

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

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

BODY_RATE = 16 << 10
"""Bytes of a body that have to come in a second, once its first seconds are over."""
MAX_HEAD_BYTES = 128 << 10
MAX_REFUSED_BYTES = 256 << 20
"""Of a request that is answered already: the rest of a body is read and dropped, up to here."""
_LOOK_S = 0.5
_FRESH_S = 1.0
"""A connection on which nothing was asked yet is not taken for idle so long."""
_SHARED = 3 / 4
"""Of all connections: once so many are open a holder may have an equal share of them."""
_RESERVED_HEAD_S = 2.0
_LOGGED_S = 60.0
"""Refusals of one address are logged once in so long, with their number."""
_MAX_LOGGED = 1024
_USER = "user "
_MAX_DROPPED_BYTES = 1 << 20
"""Bytes of a refused request that are read, so that its answer is."""
_BACKLOG = 1024
_DRAIN_S = 5.0
_STATE = "tinkermq_connection"
_CLOSE = (b"connection", b"close")
_Protocol = cast("type[H11Protocol]", AutoHTTPProtocol)
"""That of httptools where it is installed; both have what is used here."""

_log = structlog.get_logger()


@dataclass(frozen=True)
class Deadlines:
    """How long a connection is waited for."""

    head_s: float = 20.0
    """For the head of a request, from its first byte."""
    idle_s: float = 75.0
    """For the next request: longer than the makers' libraries keep a connection."""
    body_s: float = 30.0
    """For a body, and a second more for each `BODY_RATE` bytes that have come."""
    stalled_s: float = 120.0
    """How long a reader may take too little of an answer for the buffer to drain."""


@dataclass(frozen=True)
class ConnectionBounds:
    """How many connections a server has."""

    most: int = 4096
    of_address: int = 4096
    """Of one address that has shown no key; as many as `most`: a proxy's, which is not bounded."""
    of_user: int = 4096
    reserved: int = 0
    """Further ones, for one light request each; half of them at most for one address."""


def _never(scope: Scope) -> bool:
    del scope
    return False


class Connections:
    """All connections of one server."""

    def __init__(
        self,
        name: str,
        *,
        bounds: ConnectionBounds | None = None,
        deadlines: Deadlines | None = None,
        retry_after_s: int = 1,
        is_light: Callable[[Scope], bool] = _never,
    ) -> None:
        """Bound the connections of the server that errors call `name`.

        A refused client is asked to come again in `retry_after_s`; `is_light` says for which
        requests the reserve is.
        """
        self.deadlines = deadlines or Deadlines()
        self.retry_after_s = retry_after_s
        self.is_light = is_light
        self._name = name
        self._bounds = bounds or ConnectionBounds()
        self._open: dict[_Connection, None] = {}
        self._holders: Counter[str] = Counter()
        self._surplus: dict[_Connection, None] = {}
        self._refusals = _Refusals()

    def protocol(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> asyncio.Protocol:
        """Return what speaks HTTP on a new connection; uvicorn calls it."""
        return _Connection(self, config, server_state, app_state, _loop)

    def enter(self, connection: "_Connection") -> bool:
        """Count a connection, for which an idle one may have to go; False for one too many."""
        holder = connection.holder
        while not self._has_room(holder):
            idle = self._longest_idle(holder)
            if idle is None:
                return False
            self.leave(idle)
            idle.shutdown()
        self._open[connection] = None
        self._holders[holder] += 1
        return True

    def enter_reserved(self, connection: "_Connection") -> bool:
        """Count one of those that are one too many; False where there are too many of these."""
        reserved = self._bounds.reserved
        same = sum(other.address == connection.address for other in self._surplus)
        if len(self._surplus) >= reserved or same >= max(1, reserved // 2):
            return False
        self._surplus[connection] = None
        return True

    def leave(self, connection: "_Connection") -> None:
        """Forget a connection that has ended."""
        self._surplus.pop(connection, None)
        if connection in self._open:
            del self._open[connection]
            self._drop(connection.holder)

    def give_to(self, connection: "_Connection", user: str) -> None:
        """Count a connection as one of a user; raises BusyError where these are too many."""
        if connection not in self._open:
            return
        holder = f"{_USER}{user}"
        self._drop(connection.holder)
        connection.holder = holder
        self._holders[holder] += 1
        while self._holders[holder] > self._bound(holder):
            idle = self._longest_idle(holder)
            if idle is None:
                self.count_refusal(connection)
                raise BusyError(
                    f"{self._holders[holder]} connections of yours are open, of "
                    f"{self._bounds.most} that this {self._name} has for all users",
                    hint="send the next request when an answer has come, on the same connection",
                )
            self.leave(idle)
            idle.shutdown()

    def why_refused(self, connection: "_Connection") -> str:
        """Say which bound a connection is beyond."""
        if len(self._open) >= self._bounds.most:
            return f"all {self._bounds.most} connections of this {self._name} are taken"
        holder = connection.holder
        num = self._holders[holder]
        if holder.startswith(_USER):
            return f"{num} connections of {holder} are open, more than one user may have now"
        return (
            f"{num} connections are open from {holder or 'this address'}, as many as one address "
            "may have"
        )

    def count_refusal(self, connection: "_Connection") -> None:
        """Count a refusal; it is logged once for each address and minute."""
        self._refusals.add(connection.holder, self.why_refused(connection))

    def close(self) -> None:
        """Let no connection take another request; one that is answered ends behind its answer."""
        for connection in [*self._open, *self._surplus]:
            connection.shutdown()

    def abort(self) -> None:
        """End all of them."""
        for connection in [*self._open, *self._surplus]:
            connection.transport.abort()

    async def watch(self) -> None:
        """Close those that are past a deadline, for ever."""
        while True:
            await asyncio.sleep(_LOOK_S)
            now = time.monotonic()
            for connection in [*self._open, *self._surplus]:
                why = connection.overdue(now)
                if not why:
                    continue
                if connection.is_surplus and not connection.has_asked:
                    connection.refuse()
                    continue
                if not connection.is_between_requests:
                    _log.warning("connection_closed", address=connection.address, reason=why)
                connection.transport.abort()
            self._refusals.log_new(now)

    def _has_room(self, holder: str) -> bool:
        return len(self._open) < self._bounds.most and self._holders[holder] < self._bound(holder)

    def _bound(self, holder: str) -> int:
        """Return how many connections a holder may have: an equal share once they are scarce."""
        most = self._bounds.most
        is_user = holder.startswith(_USER)
        bound = self._bounds.of_user if is_user else self._bounds.of_address
        is_proxy = not is_user and bound >= most
        shared = int(most * _SHARED)
        if is_proxy or len(self._open) < shared:
            return bound
        num_holders = len(self._holders) + (holder not in self._holders)
        return max(1, min(bound, shared // num_holders))

    def _longest_idle(self, holder: str) -> "_Connection | None":
        """Return which connection to close: the holder's, or if it has room one of the largest
        holder's."""
        if self._holders[holder] < self._bound(holder):
            ((holder, _),) = self._holders.most_common(1)
        now = time.monotonic()
        idle = [other for other in self._open if other.holder == holder and other.is_idle(now)]
        return min(idle, key=lambda other: other.since, default=None)

    def _drop(self, holder: str) -> None:
        self._holders[holder] -= 1
        if not self._holders[holder]:
            del self._holders[holder]


class _Refusals:
    """Logs refusals: the first of a holder at once, further ones by their number each minute."""

    def __init__(self) -> None:
        self._logged: dict[str, tuple[float, int, str]] = {}

    def add(self, holder: str, reason: str) -> None:
        """Count one."""
        logged_s, num, _ = self._logged.get(holder, (0.0, -1, ""))
        if num >= 0:
            self._logged[holder] = logged_s, num + 1, reason
        elif len(self._logged) < _MAX_LOGGED:
            self._logged[holder] = time.monotonic(), 0, reason
            _log.warning("connections_refused", holder=holder, num=1, reason=reason)

    def log_new(self, now: float) -> None:
        """Log what was refused since the last time."""
        for holder, (logged_s, num, reason) in list(self._logged.items()):
            if now - logged_s < _LOGGED_S:
                continue
            del self._logged[holder]
            if num:
                self._logged[holder] = now, 0, reason
                _log.warning("connections_refused", holder=holder, num=num, reason=reason)


def give_connection_to(user: str, scope: Scope) -> None:
    """Count the connection of a request as one of the user whose key came with it.

    Raises BusyError where the user has too many.
    """
    connection = scope.get("state", {}).get(_STATE)
    if isinstance(connection, _Connection):
        try:
            connection.all_of_them.give_to(connection, user)
        except BusyError:
            connection.close_behind_answer()
            raise


class Hangup:
    """Calls back when the connection of a request is lost.

    The server puts it into the scope's state: waiting for ASGI's own message takes a task.
    """

    NAME = "hangup"
    """Its key there."""

    def __init__(self) -> None:
        """Begin with a connection that stands."""
        self.call: Callable[[], object] | None = None
        self._is_lost = False

    def lost(self) -> None:
        """Take note of the loss, and call back."""
        self._is_lost = True
        if self.call is not None:
            self.call()

    def watch(self, call: Callable[[], object]) -> None:
        """Call this at the loss: now, if it is lost already."""
        self.call = call
        if self._is_lost:
            call()


class _Connection(_Protocol):
    """One connection, with what it waits for and since when."""

    def __init__(
        self,
        all_of_them: Connections,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        loop: asyncio.AbstractEventLoop | None,
    ) -> None:
        self._hangup = Hangup()
        state = {**app_state, _STATE: self, Hangup.NAME: self._hangup}
        super().__init__(config, server_state, state, loop)
        self.address = ""
        self.holder = ""
        """Whose connection it is counted as."""
        self.is_surplus = False
        """One too many, which is answered one request."""
        self.all_of_them = all_of_them
        self.since = time.monotonic()
        """When that began for which it waits."""
        self._num_bytes = 0
        """Of the request that is being read."""
        self._seen: object = None
        """The newest request."""
        self._stalled_since: float | None = None
        self._closing_since: float | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Take a connection, or refuse it."""
        super().connection_made(transport)
        self.address = self.holder = self.client[0] if self.client else ""
        if self.all_of_them.enter(self):
            return
        if not self.all_of_them.enter_reserved(self):
            self.refuse()
            return
        self.is_surplus = True
        self.app = cast("Any", _OneRequest(cast("Application", self.app), self))

    def refuse(self) -> None:
        """Say that it is one too many, and close it."""
        body = self.refusal()
        headers = [*self.refusal_headers(len(body)), _CLOSE]
        head = b"".join(b"%b: %b\r\n" % header for header in headers)
        self.transport.write(b"HTTP/1.1 503 Service Unavailable\r\n" + head + b"\r\n" + body)
        self.transport.close()

    def refusal(self) -> bytes:
        """Return the error of a refused connection, in the words of all APIs, and count it."""
        self.all_of_them.count_refusal(self)
        message = self.all_of_them.why_refused(self)
        hint = f"use fewer connections, and come again in {self.all_of_them.retry_after_s} s"
        error = {"code": "busy", "type": "server_error", "message": message, "param": None}
        value = {"type": "error", "error": {**error, "hint": hint}, "detail": f"{message}: {hint}"}
        return json.dumps(value).encode()

    def refusal_headers(self, num_bytes: int) -> list[tuple[bytes, bytes]]:
        """Return the headers of such an error."""
        return [
            (b"content-type", b"application/json"),
            (b"content-length", str(num_bytes).encode()),
            (b"retry-after", str(self.all_of_them.retry_after_s).encode()),
            (b"x-should-retry", b"true"),
        ]

    def close_behind_answer(self) -> None:
        """End the connection with the answer that has not begun yet."""
        cycle = cast("Any", self.cycle)
        cycle.default_headers = [*cycle.default_headers, _CLOSE]

    def handle_websocket_upgrade(self, *args: Any, **kwargs: Any) -> None:
        """Give the connection away: what speaks on it now has bounds of its own."""
        self.all_of_them.leave(self)
        super().handle_websocket_upgrade(*args, **kwargs)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        self.all_of_them.leave(self)
        super().connection_lost(exc)
        self._hangup.lost()

    def data_received(self, data: bytes) -> None:
        """Take what came, unless the connection was refused."""
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

    @property
    def has_asked(self) -> bool:
        """Whether a request has come on it."""
        return self._seen is not None

    @property
    def is_between_requests(self) -> bool:
        """Whether a request was answered on it, and no other one has begun to come."""
        return self.has_asked and not self._is_busy and not self._num_bytes

    @property
    def _is_busy(self) -> bool:
        cycle = cast("Any", self.cycle)  # None before the first request
        return cycle is not None and not cycle.response_complete

    def is_idle(self, now: float) -> bool:
        """Whether it can be closed for another one."""
        is_stale = not self.has_asked and now - self.since > _FRESH_S
        return is_stale or self.is_between_requests

    def on_response_complete(self) -> None:
        """Begin to wait for the next request."""
        if not self.cycle.more_body:
            self.since, self._num_bytes = time.monotonic(), 0
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Note since when the reader takes too little."""
        self._stalled_since = time.monotonic()
        super().pause_writing()

    def resume_writing(self) -> None:
        """The reader has taken what was there."""
        self._stalled_since = None
        super().resume_writing()

    def overdue(self, now: float) -> str:
        """Say which deadline has passed, if one has."""
        deadlines = self.all_of_them.deadlines
        if self.transport.is_closing():
            self._closing_since = self._closing_since or now
            return "it does not end" if now - self._closing_since > deadlines.head_s else ""
        if self._stalled_since is not None and now - self._stalled_since > deadlines.stalled_s:
            return "the reader takes nothing"
        if not self._is_busy:
            allowed_s = deadlines.head_s if self._num_bytes else deadlines.idle_s
            allowed_s = min(allowed_s, _RESERVED_HEAD_S) if self.is_surplus else allowed_s
            return "no request came" if now - self.since > allowed_s else ""
        allowed_s = deadlines.body_s + self._num_bytes / BODY_RATE
        late = self.cycle.more_body and now - self.since > allowed_s
        return "the body comes too slowly" if late and not self.flow.read_paused else ""


class _OneRequest:
    """The application on a connection that is one too many."""

    def __init__(self, app: Application, connection: _Connection) -> None:
        self._app = app
        self._connection = connection

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer what the reserve is for, refuse all else, and end the connection."""
        self._connection.close_behind_answer()
        if self._connection.all_of_them.is_light(scope):
            await self._app(scope, receive, send)
            return
        await _drop(receive)
        body = self._connection.refusal()
        headers = self._connection.refusal_headers(len(body))
        await send({"type": "http.response.start", "status": 503, "headers": headers})
        await send({"type": "http.response.body", "body": body})


async def _drop(receive: Receive) -> None:
    """Read a request to its end, within bounds: a client may not read before it has sent all."""
    num_bytes, more = 0, True
    while more and num_bytes < _MAX_DROPPED_BYTES:
        message = await receive()
        num_bytes += len(message.get("body", b""))
        more = bool(message.get("more_body", False))


class HttpServer:
    """The sockets that one application is served on."""

    def __init__(
        self, application: Any, connections: Connections, *, max_websocket_bytes: int = 0
    ) -> None:
        """Serve an ASGI application, WebSockets with messages of so many bytes included, if any."""
        self._connections = connections
        self._config = Config(
            application,
            lifespan="off",
            ws="websockets-sansio" if max_websocket_bytes else "none",
            ws_max_size=max_websocket_bytes,
            log_config=None,
            log_level="critical",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=math.ceil(connections.deadlines.idle_s),
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        )
        self._state = ServerState()
        self._servers: list[asyncio.Server] = []
        self._watching: asyncio.Task[None] | None = None

    async def listen(self, host: str = "127.0.0.1", port: int = 0) -> int:
        """Listen on an address; return its port. Raises StorageError if it cannot."""
        loop = asyncio.get_running_loop()
        try:
            server = await loop.create_server(self._connection, host, port, backlog=_BACKLOG)
        except (OSError, OverflowError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise StorageError(
                f"cannot listen on {host}:{port}: {reason}",
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
        self._connections.close()
        await end_tasks(self._state.tasks, drain_s)
        self._connections.abort()
        if self._watching is not None:
            self._watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watching

    def _add(self, server: asyncio.Server) -> None:
        self._servers.append(server)
        if self._watching is None:
            self._watching = asyncio.create_task(self._connections.watch(), name="close slow ones")

    def _connection(self) -> asyncio.Protocol:
        return self._connections.protocol(self._config, self._state, {})
