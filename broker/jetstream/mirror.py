"""A copy of a key-value bucket in memory, kept up to date by the broker.

Every write to the bucket is heard on its subject, without a consumer; what was heard is read again
at the next `refresh`, and everything is read again after a reconnect and now and then. What is
damaged is passed over as if it had not been written.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from nats.aio.msg import Msg

from ...schemas.wire.errors import NotFoundError
from ...schemas.wire.message import Message
from ..client.connection import Broker, Listening
from .kv import Bucket, DamagedEntry, Entry

M = TypeVar("M", bound=Message)

RELIST_S = 600.0
_AT_ONCE = 64


class Mirror(Generic[M]):
    """The entries of a bucket as of the last `refresh`."""

    def __init__(self, broker: Broker, name: str, model: type[M], *, prefix: str = "") -> None:
        """Hold nothing yet; `open` starts listening.

        `prefix` are the leading tokens of the keys that count. A bucket that is not there is empty,
        and when it is deleted what was known of it stays.
        """
        self._prefix = prefix
        self.bucket = Bucket(broker, name, model)
        self.entries: dict[str, Entry[M]] = {}
        self.damaged: dict[str, DamagedEntry] = {}
        """What counts for nothing, by key; of such a key the entry before it stays known."""
        self._broker = broker
        self._stale: set[str] = set()
        self._listed = float("-inf")
        self._closers: list[Callable[[], None]] = []
        self._listening: Listening | None = None
        self._reading = asyncio.Lock()

    async def open(self, on_change: Callable[[], None]) -> None:
        """Listen; `on_change` is called whenever a refresh would find something new."""
        below = f"{self._prefix}." if self._prefix else ""
        bucket = f"$KV.{self.bucket.name}."

        def heard(message: Msg) -> None:
            self._stale.add(message.subject[len(bucket) :])
            on_change()

        def reconnected() -> None:
            self._listed = float("-inf")
            on_change()

        self._listening = await self._broker.listen(f"{bucket}{below}>", heard)
        self._closers.append(self._broker.on_reconnect(reconnected))

    async def close(self) -> None:
        """Stop listening."""
        for close in self._closers:
            close()
        if self._listening is not None:
            await self._listening.stop()

    def put(self, entry: Entry[M]) -> Entry[M]:
        """Enter what was just read or written, if it is the newest; return what is."""
        known = self.entries.get(entry.key)
        if known is None or known.revision < entry.revision:
            self.entries[entry.key] = known = entry
        return known

    def drop(self, key: str) -> None:
        """Forget an entry that was just deleted."""
        self.entries.pop(key, None)

    async def refresh(self) -> set[str]:
        """Read what has changed; return the keys that were read, present or gone.

        Who asks while another reads waits for him: what he is reading is known afterwards.
        """
        async with self._reading:
            return await self._refresh()

    async def _refresh(self) -> set[str]:
        if time.monotonic() - self._listed >= RELIST_S:
            self._stale.clear()
            self._listed = time.monotonic()
            before = set(self.entries)
            with contextlib.suppress(NotFoundError):
                found, damaged = await self.bucket.read_all(self._prefix)
                self.damaged = {error.key: error for error in damaged}
                for key in before - {entry.key for entry in found} - set(self.damaged):
                    del self.entries[key]
                for entry in found:
                    self.put(entry)
            return before | set(self.entries)
        keys, self._stale = sorted(self._stale), set()
        for first in range(0, len(keys), _AT_ONCE):
            await asyncio.gather(*map(self._read, keys[first : first + _AT_ONCE]))
        return set(keys)

    async def _read(self, key: str) -> None:
        try:
            entry = await self.bucket.get(key)
        except DamagedEntry as error:
            self.damaged[key] = error
            return
        except NotFoundError:
            return
        self.damaged.pop(key, None)
        if entry is None:
            self.entries.pop(key, None)
        else:
            self.put(entry)
