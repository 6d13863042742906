"""Connections that are bounded in number and in patience.

uvicorn waits for ever for the rest of a request and for a reader, so whoever sends one byte a
minute holds a connection for as long as he likes. Here each connection has deadlines: for the head
of a request, for its body by a least rate, and for a reader who takes nothing.

A connection belongs to its address, and once a key has come on it and was found good, to that key's
user: many users behind one address do not take each other's. Once they are scarce each holder
may have an equal share, and one that has more is refused requests until it has not. Beyond a bound
the connection that is idle longest is closed to make room. Where none is idle, a few more are
accepted for one request each: pages, health and a Tinker session's heartbeat are answered,
all else is told with status 503 in how many seconds to come again.
"""

import asyncio
import json
import time
from collections import Counter
from collections.abc import MutableMapping
from typing import Any, cast

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from ....schemas.wire.errors import BusyError

MAX_CONNECTIONS = 1024
MAX_OF_HOLDER = 512
"""Of one address, as long as it has shown no key, or of one user."""
NUM_RESERVED = 64
"""Further ones, for one request each; half of them at most for one address."""
HEAD_S = 10.0
"""For a request's head, and until the next request, however slowly they come."""
BODY_S = 15.0
"""For a body, and a second more for each `BODY_RATE` bytes that have come."""
BODY_RATE = 16 << 10
STALLED_S = 30.0
"""How long a reader may take too little for the buffer to drain."""
RETRY_AFTER_S = 5
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
_APIS = ("/v1/", "/tinker/", "/e/")
_TINKER = "/tinker/api/v1/"
_LIGHT = tuple(
    _TINKER + path
    for path in ("session_heartbeat", "healthz", "client/config", "client/dynamic_config")
)
_CLOSE = (b"connection", b"close")

_log = structlog.get_logger()


class Connections:
    """All connections of one gateway."""

    def __init__(
        self,
        *,
        most: int = MAX_CONNECTIONS,
        of_address: int = MAX_OF_HOLDER,
        of_user: int = MAX_OF_HOLDER,
        reserved: int = NUM_RESERVED,
        head_s: float = HEAD_S,
        body_s: float = BODY_S,
        stalled_s: float = STALLED_S,
    ) -> None:
        """Allow `most` connections, so many of one holder, `reserved` more, and so many seconds."""
        self.head_s, self.body_s, self.stalled_s = head_s, body_s, stalled_s
        self._most = most
        self._of_address = of_address
        self._of_user = of_user
        self._reserved = reserved
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
        same = sum(one.address == connection.address for one in self._surplus)
        if len(self._surplus) >= self._reserved or same >= max(1, self._reserved // 2):
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
                    f"{self._most} that this gateway has for all users",
                    hint="send the next request when an answer has come, on the same connection",
                )
            self.leave(idle)
            idle.shutdown()

    def why_refused(self, connection: "_Connection") -> str:
        """Say which bound a connection is beyond."""
        if len(self._open) >= self._most:
            return f"all {self._most} connections of this gateway are taken"
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

    def _has_room(self, holder: str) -> bool:
        return len(self._open) < self._most and self._holders[holder] < self._bound(holder)

    def _bound(self, holder: str) -> int:
        """Return how many connections a holder may have: an equal share once they are scarce."""
        is_user = holder.startswith(_USER)
        bound = self._of_user if is_user else self._of_address
        is_proxy = not is_user and bound >= self._most
        shared = int(self._most * _SHARED)
        if is_proxy or len(self._open) < shared:
            return bound
        num_holders = len(self._holders) + (holder not in self._holders)
        return max(1, min(bound, shared // num_holders))

    def _longest_idle(self, holder: str) -> "_Connection | None":
        """Return which connection goes: of the holder, or where that has room of who has most."""
        if self._holders[holder] < self._bound(holder):
            ((holder, _),) = self._holders.most_common(1)
        now = time.monotonic()
        idle = [one for one in self._open if one.holder == holder and one.is_idle(now)]
        return min(idle, key=lambda one: one.idle_since, default=None)

    def _drop(self, holder: str) -> None:
        self._holders[holder] -= 1
        if not self._holders[holder]:
            del self._holders[holder]

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
                _log.warning("connection_closed", address=connection.address, reason=why)
                connection.transport.abort()
            self._refusals.tell(now)


class _Refusals:
    """Logs refusals: the first of a holder at once, further ones by their number each minute."""

    def __init__(self) -> None:
        self._told: dict[str, tuple[float, int, str]] = {}

    def add(self, holder: str, reason: str) -> None:
        told_s, num, _ = self._told.get(holder, (0.0, -1, ""))
        if num >= 0:
            self._told[holder] = told_s, num + 1, reason
        elif len(self._told) < _MAX_LOGGED:
            self._told[holder] = time.monotonic(), 0, reason
            _log.warning("connections_refused", holder=holder, num=1, reason=reason)

    def tell(self, now: float) -> None:
        """Log what was refused since the last time."""
        for holder, (told_s, num, reason) in list(self._told.items()):
            if now - told_s < _LOGGED_S:
                continue
            del self._told[holder]
            if num:
                self._told[holder] = now, 0, reason
                _log.warning("connections_refused", holder=holder, num=num, reason=reason)


def give_connection_to(user: str, scope: MutableMapping[str, Any]) -> None:
    """Count the connection of a request as one of the user whose key came with it.

    Raises BusyError where the user has too many.
    """
    connection = scope.get("state", {}).get(_STATE)
    if isinstance(connection, _Connection):
        try:
            connection.all_of_them.give_to(connection, user)
        except BusyError:
            cast("list[tuple[bytes, bytes]]", scope["headers"]).append(_CLOSE)
            raise


_STATE = "tinkermq_connection"


class _Connection(H11Protocol):
    """One connection, which knows what it waits for and since when."""

    def __init__(
        self,
        all_of_them: Connections,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        loop: asyncio.AbstractEventLoop | None,
    ) -> None:
        super().__init__(config, server_state, {**app_state, _STATE: self}, loop)
        self.address = ""
        self.holder = ""
        """Who is counted for it."""
        self.is_surplus = False
        """One too many, which is answered one request."""
        self.all_of_them = all_of_them
        self.idle_since = self._asked_at = time.monotonic()
        self._asked: object = None
        self._stalled_since: float | None = None
        self._closing_since: float | None = None
        self._num_bytes = 0

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
        app = cast("ASGIApp", self.app)
        self.app = cast("Any", _OneRequest(app, self))

    def refuse(self) -> None:
        """Say that it is one too many, and close it."""
        body = self.refusal()
        head = (
            "HTTP/1.1 503 Service Unavailable\r\n"
            f"retry-after: {RETRY_AFTER_S}\r\nconnection: close\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()

    def refusal(self) -> bytes:
        """Return what it is told, in the words of all APIs, and count it as refused."""
        self.all_of_them.count_refusal(self)
        message = self.all_of_them.why_refused(self)
        hint = f"use fewer connections at a time, and come again in {RETRY_AFTER_S} s"
        error = {"code": "busy", "type": "server_error", "message": message, "hint": hint}
        return json.dumps({"error": error, "detail": f"{message}: {hint}"}).encode()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        self.all_of_them.leave(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take what came, unless the connection was refused."""
        if self.transport.is_closing():
            return
        self._num_bytes += len(data)
        super().data_received(data)
        if self.cycle is not self._asked:
            self._asked, self._asked_at, self._num_bytes = self.cycle, time.monotonic(), len(data)

    @property
    def has_asked(self) -> bool:
        """Whether a request has come on it."""
        return cast("Any", self.cycle) is not None

    def is_idle(self, now: float) -> bool:
        """Whether nothing is being asked on it."""
        cycle = cast("Any", self.cycle)
        if cycle is None:
            return now - self.idle_since > _FRESH_S
        return cycle.response_complete

    def on_response_complete(self) -> None:
        """Begin to wait for the next request."""
        self.idle_since = time.monotonic()
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
        if self.transport.is_closing():
            self._closing_since = self._closing_since or now
            return "it does not end" if now - self._closing_since > self.all_of_them.head_s else ""
        if (
            self._stalled_since is not None
            and now - self._stalled_since > self.all_of_them.stalled_s
        ):
            return "the reader takes nothing"
        cycle = cast("Any", self.cycle)
        if cycle is None or cycle.response_complete:
            head_s = self.all_of_them.head_s
            head_s = min(head_s, _RESERVED_HEAD_S) if self.is_surplus else head_s
            return "no request came" if now - self.idle_since > head_s else ""
        allowed_s = self.all_of_them.body_s + self._num_bytes / BODY_RATE
        late = cycle.more_body and now - self._asked_at > allowed_s
        return "the body comes too slowly" if late and not self.flow.read_paused else ""


class _OneRequest:
    """The application on a connection that is one too many."""

    def __init__(self, app: ASGIApp, connection: _Connection) -> None:
        self._app = app
        self._connection = connection

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer what the reserve is for, refuse all else, and end the connection."""
        scope["headers"].append(_CLOSE)  # uvicorn takes it for the client's wish
        if _is_light(scope):
            await self._app(scope, receive, send)
            return
        await _drop(receive)
        body = self._connection.refusal()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"retry-after", str(RETRY_AFTER_S).encode()),
        ]
        await send({"type": "http.response.start", "status": 503, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def _is_light(scope: Scope) -> bool:
    """Whether the reserve is for a request: one of a page, of health, or a heartbeat; no stream."""
    if any(name == b"accept" and b"event-stream" in value for name, value in scope["headers"]):
        return False
    path: str = scope["path"]
    return path in _LIGHT or not path.startswith(_APIS)


async def _drop(receive: Receive) -> None:
    """Read a request to its end, within bounds: who is answered before may not read the answer."""
    num_bytes, more = 0, True
    while more and num_bytes < _MAX_DROPPED_BYTES:
        message: Message = await receive()
        num_bytes += len(message.get("body", b""))
        more = bool(message.get("more_body", False))
