"""Connections that are bounded in number and in patience.

uvicorn waits for ever for the rest of a request and for a reader, so whoever sends one byte a
minute holds a connection for as long as he likes. Here each connection has deadlines: for the head
of a request, for its body by a least rate, and for a reader who takes nothing. Who comes beyond the
bounds of the gateway or of his address is told so at once.
"""

import asyncio
import time
from collections import Counter
from typing import Any, cast

import structlog
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

MAX_CONNECTIONS = 1024
MAX_OF_ADDRESS = 256
HEAD_S = 10.0
"""For a request's head, and until the next request, however slowly they come."""
BODY_S = 15.0
"""For a body, and a second more for each `BODY_RATE` bytes that have come."""
BODY_RATE = 16 << 10
STALLED_S = 30.0
"""How long a reader may take too little for the buffer to drain."""
_LOOK_S = 0.5
_BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 5\r\nconnection: close\r\n"
    b"content-length: 0\r\n\r\n"
)

_log = structlog.get_logger()


class Connections:
    """All connections of one gateway."""

    def __init__(
        self,
        *,
        most: int = MAX_CONNECTIONS,
        of_address: int = MAX_OF_ADDRESS,
        head_s: float = HEAD_S,
        body_s: float = BODY_S,
        stalled_s: float = STALLED_S,
    ) -> None:
        """Allow `most` connections, `of_address` from one address, and so many seconds."""
        self.head_s, self.body_s, self.stalled_s = head_s, body_s, stalled_s
        self._most = most
        self._of_address = of_address
        self._open: set[_Connection] = set()
        self._addresses: Counter[str] = Counter()

    def protocol(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> asyncio.Protocol:
        """Return what speaks HTTP on a new connection; uvicorn calls it."""
        return _Connection(self, config, server_state, app_state, _loop)

    def enter(self, connection: "_Connection", address: str) -> bool:
        """Count a connection; False for one too many."""
        if len(self._open) >= self._most or self._addresses[address] >= self._of_address:
            return False
        self._open.add(connection)
        self._addresses[address] += 1
        return True

    def leave(self, connection: "_Connection", address: str) -> None:
        """Forget a connection that has ended."""
        if connection in self._open:
            self._open.discard(connection)
            self._addresses[address] -= 1
            if not self._addresses[address]:
                del self._addresses[address]

    async def watch(self) -> None:
        """Close those that are past a deadline, for ever."""
        while True:
            await asyncio.sleep(_LOOK_S)
            now = time.monotonic()
            for connection in list(self._open):
                why = connection.overdue(now)
                if why:
                    _log.warning("connection_closed", address=connection.address, reason=why)
                    connection.transport.abort()


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
        super().__init__(config, server_state, app_state, loop)
        self.address = ""
        self._all = all_of_them
        self._idle_since = self._asked_at = time.monotonic()
        self._asked: object = None
        self._stalled_since: float | None = None
        self._closing_since: float | None = None
        self._num_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Take a connection, or refuse it."""
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        if not self._all.enter(self, self.address):
            transport.write(_BUSY)
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        self._all.leave(self, self.address)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take what came, unless the connection was refused."""
        if self.transport.is_closing():
            return
        self._num_bytes += len(data)
        super().data_received(data)
        if self.cycle is not self._asked:
            self._asked, self._asked_at, self._num_bytes = self.cycle, time.monotonic(), len(data)

    def on_response_complete(self) -> None:
        """Begin to wait for the next request."""
        self._idle_since = time.monotonic()
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
            return "it does not end" if now - self._closing_since > self._all.head_s else ""
        if self._stalled_since is not None and now - self._stalled_since > self._all.stalled_s:
            return "the reader takes nothing"
        cycle = cast("Any", self.cycle)
        if cycle is None or cycle.response_complete:
            return "no request came" if now - self._idle_since > self._all.head_s else ""
        allowed_s = self._all.body_s + self._num_bytes / BODY_RATE
        late = cycle.more_body and now - self._asked_at > allowed_s
        return "the body comes too slowly" if late and not self.flow.read_paused else ""
