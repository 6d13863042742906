"""Heartbeats: the running actors, their state, and what they wait for.

An actor writes its `Presence` every two seconds into a bucket whose keys expire after ten; a
missing key is a missing actor. Keys are `<user>.<job>.<actor>`, or `pool.<name>` for actors that
belong to no job.
"""

import asyncio
import contextlib
from collections.abc import Callable

import structlog

from ..schemas.metric import Presence
from ..schemas.wire.errors import TinkermqError
from ..schemas.wire.subjects import BUCKET_ACTORS
from .client.connection import Broker
from .jetstream.kv import Bucket, Entry

INTERVAL_S = 2.0
_DELETE_DEADLINE_S = 2.0

_log = structlog.get_logger()


class PresenceBeat:
    """Writes a heartbeat while its block runs, and removes it at the end.

    If the block fails, the last one stays until it expires, like that of a killed process.
    """

    def __init__(
        self,
        broker: Broker,
        key: str,
        beat: Callable[[], Presence],
        *,
        interval_s: float = INTERVAL_S,
    ) -> None:
        """`beat` returns the current heartbeat; it is called on the event loop."""
        self._bucket = presences(broker)
        self._closing = Bucket(broker, BUCKET_ACTORS, Presence, deadline_s=_DELETE_DEADLINE_S)
        self._key = key
        self._beat = beat
        self._interval_s = interval_s
        self._task: asyncio.Task[None] | None = None
        self._hurry = asyncio.Event()

    def hurry(self) -> None:
        """Write the next heartbeat now."""
        self._hurry.set()

    async def __aenter__(self) -> "PresenceBeat":
        await self._bucket.put(self._key, self._beat())
        self._task = asyncio.create_task(self._run(), name=f"presence of {self._key}")
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait({self._task})
        if kind is not None:  # the node reads the failed actor's progress; the TTL removes it
            return
        with contextlib.suppress(TinkermqError):  # otherwise the TTL removes it
            await self._closing.delete(self._key)

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):
                    await self._hurry.wait()
            self._hurry.clear()
            try:
                await self._bucket.put(self._key, self._beat())
            except TinkermqError as error:
                _log.warning("presence_failed", key=self._key, error=str(error))


def presences(broker: Broker) -> Bucket[Presence]:
    """Return the bucket of heartbeats."""
    return Bucket(broker, BUCKET_ACTORS, Presence)


async def list_presences(broker: Broker, prefix: str = "") -> list[Entry[Presence]]:
    """Return the heartbeats of all actors, or of those below `prefix` (`<user>.<job>`)."""
    return await presences(broker).items(prefix)
