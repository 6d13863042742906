"""Reading a stream from any sequence on, live, across restarts of the server.

There is no consumer: the position is the reader's own. What is stored is read by direct gets in
batches that are bounded in bytes, one ahead; once there is no more, a plain subscription to the
stream's subjects (of a stream with large messages, to what the server republishes without them)
says when to look again. What is heard there is only a sign: a message counts when it is read from
the stream, so a reader yields every stored message once and in order, whatever was lost on the way,
and needs no right to create anything.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from nats.aio.msg import Msg

from ..client.connection import Broker, Listening
from .direct_get import Batch, BatchInbox, StoredMessage
from .streams import stream_info

FIRST_PAUSE_S = 0.005
LAST_PAUSE_S = 1.0
BATCH_MESSAGES = 250
BATCH_BYTES = 8 * 2**20
_EVERYTHING = ">"
_DEADLINE_S = 60.0


class StreamReader:
    """Yields the messages of a stream in order, and then new ones as they are stored."""

    def __init__(
        self,
        broker: Broker,
        stream: str,
        subjects: list[str],
        *,
        from_seq: int | None = 1,
        sign: str = "",
    ) -> None:
        """`from_seq` is the first sequence to yield; None starts behind the last one.

        Something on the subject `sign` says that there is more; by default the messages do.
        """
        self._broker = broker
        self._stream = stream
        self._subjects = subjects
        self._next_seq = from_seq
        self._inbox = BatchInbox(broker, BATCH_MESSAGES, BATCH_BYTES)
        self._signs = [sign] if sign else subjects
        self._sign = asyncio.Event()
        self._listening: list[Listening] = []

    async def start(self) -> None:
        """Fix the position now, so that what is stored from here on is not missed.

        Raises NotFoundError when the stream is not there, DeadlineError.
        """
        if not self._listening:
            self._listening = [await self._broker.listen(s, self._hear) for s in self._signs]
        if self._next_seq is None:
            state = (await stream_info(self._broker, self._stream))["state"]
            self._next_seq = int(state["last_seq"]) + 1

    async def messages(self) -> AsyncGenerator[StoredMessage, None]:
        """Iterate for ever; leave the loop through `aclose`.

        Raises NotFoundError when the stream is gone, DeadlineError when the server stays away.
        """
        remove = self._broker.on_reconnect(self._sign.set)
        pause_s = FIRST_PAUSE_S
        ahead: asyncio.Task[Batch] | None = None
        try:
            await self.start()
            while True:
                self._sign.clear()
                messages, more = await (ahead or self._read())
                if messages:
                    self._next_seq = messages[-1].seq + 1
                    pause_s = FIRST_PAUSE_S
                ahead = asyncio.create_task(self._read()) if more else None
                for message in messages:
                    if self._is_wanted(message):
                        yield message
                if not more and await self._rest(pause_s):
                    pause_s = FIRST_PAUSE_S
                elif not more:
                    pause_s = min(2 * pause_s, LAST_PAUSE_S)
        finally:
            remove()
            if ahead is not None:
                ahead.cancel()
                await asyncio.wait({ahead})
            await self._close()

    async def _read(self) -> Batch:
        """Return the next messages, and whether there may be more."""
        seq = max(self._next_seq or 1, 1)
        subject = self._subjects[0] if len(self._subjects) == 1 else _EVERYTHING
        return await self._broker.retry(
            lambda: self._inbox.get(self._stream, seq, subject),
            deadline_s=_DEADLINE_S,
            waiting_for=f"stream {self._stream}",
        )

    def _is_wanted(self, message: StoredMessage) -> bool:
        return len(self._subjects) == 1 or message.subject in self._subjects

    async def _rest(self, pause_s: float) -> bool:
        """Wait for a sign, or `pause_s`: the sign may come before the message is stored."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._sign.wait()
        return self._sign.is_set()

    def _hear(self, _: Msg) -> None:
        self._sign.set()

    async def _close(self) -> None:
        listening, self._listening = self._listening, []
        for one in listening:
            await one.stop()
        await self._inbox.close()
