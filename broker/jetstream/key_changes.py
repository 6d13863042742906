"""Waiting for keys of a bucket to be written: no consumer, and nobody asks all the time."""

import asyncio
import contextlib
from types import TracebackType
from typing import Self

from nats.aio.msg import Msg

from ..client.connection import Broker, Listening


class KeyChanges:
    """Hears that a key below a prefix is written, while its block runs.

    A message may be heard a moment before it can be read, and none is heard while the connection is
    away: so whoever waits looks again after a reconnect, and after a while in any case.
    """

    def __init__(self, broker: Broker, bucket: str, prefix: str) -> None:
        """`prefix` are the leading tokens of the keys."""
        self._broker = broker
        self._subject = f"$KV.{bucket}.{prefix}.>"
        self._changed = asyncio.Event()
        self._listening: Listening | None = None
        self._forget = contextlib.ExitStack()

    async def __aenter__(self) -> Self:
        self._forget.callback(self._broker.on_reconnect(self._changed.set))
        self._listening = await self._broker.listen(self._subject, self._heard)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._forget.close()
        if self._listening is not None:
            await self._listening.stop()

    async def wait(self, longest_s: float) -> None:
        """Return when something was written since the last call, or after `longest_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(longest_s):
                await self._changed.wait()
        self._changed.clear()

    def _heard(self, _: Msg) -> None:
        self._changed.set()
