"""An HTTP proxy that loses answers: what was asked for is done, its client hears nothing."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

_HEAD_BYTES = 1 << 20


class DroppingProxy:
    """Passes requests on, one connection for each, and loses each third answer to a POST."""

    def __init__(self, port: int) -> None:
        """Pass on to a port of this machine."""
        self._port = port
        self._answers = 0
        self.num_dropped = 0
        self.url = ""

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["DroppingProxy"]:
        """Listen until the block ends."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=_HEAD_BYTES)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                body = await reader.readexactly(_length(head))
                answer = await self._ask(head, body)
                if self._is_lost(head):
                    break
                writer.write(answer)
                await writer.drain()
        writer.close()

    def _is_lost(self, head: bytes) -> bool:
        """Say whether an answer is lost; the SDK asks for its configuration only once."""
        if not head.startswith(b"POST") or b"/client/" in head.split(b"\r\n", 1)[0]:
            return False
        self._answers += 1
        self.num_dropped += self._answers % 3 == 0
        return self._answers % 3 == 0

    async def _ask(self, head: bytes, body: bytes) -> bytes:
        """Return the whole answer to a request."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=_HEAD_BYTES)
        try:
            writer.write(head + body)
            await writer.drain()
            answered = await reader.readuntil(b"\r\n\r\n")
            return answered + await reader.readexactly(_length(answered))
        finally:
            writer.close()


def _length(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length":
            return int(value)
    return 0
