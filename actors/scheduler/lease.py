"""Which of several schedulers acts.

The holder writes its key anew every second. One that waits watches the key's revision by its own
clock and takes the key over, by compare-and-set, once it has stood still for three seconds: clocks
of different machines are never compared. Each holder has a higher epoch than the one before;
nodes refuse what an older holder still sends.
"""

import asyncio
import os
import secrets
import socket
import time

from ...broker.client.connection import Broker
from ...broker.jetstream.kv import Bucket, DamagedEntry
from ...schemas.node import SchedulerLease
from ...schemas.wire.errors import ConflictError, FencedError
from ...schemas.wire.subjects import BUCKET_LEASES
from .timing import Timing

KEY = "scheduler"
_POLL_S = 0.25


class LeaderLease:
    """The right to schedule; `acquire` it, then keep it by `hold`."""

    def __init__(self, broker: Broker, timing: Timing) -> None:
        """Take no lease yet."""
        self._bucket = Bucket(broker, BUCKET_LEASES, SchedulerLease)
        self._timing = timing
        self._revision = 0
        self._renewed = float("-inf")
        self.holder = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self.epoch = 0

    @property
    def is_fresh(self) -> bool:
        """Whether nobody else can have taken the lease yet."""
        return time.monotonic() - self._renewed < self._timing.stale_s

    async def acquire(self, stopping: asyncio.Event) -> bool:
        """Wait until the lease is ours; False if `stopping` was set before."""
        seen, since = 0, time.monotonic()
        while not stopping.is_set():
            asked = time.monotonic()
            revision, before = await self._look()
            if revision is not None and revision != seen:
                seen, since = revision, asked
            elif (revision is None or asked - since >= self._timing.stale_s) and await self._take(
                revision, before, asked
            ):
                return True
            await asyncio.sleep(_POLL_S)
        return False

    async def _look(self) -> tuple[int | None, int]:
        """Return the revision of the lease, None if nobody has it, and its holder's epoch.

        What is no lease can be taken like one whose holder is silent.
        """
        try:
            entry = await self._bucket.get(KEY)
        except DamagedEntry as error:
            return error.revision, 0
        return (None, 0) if entry is None else (entry.revision, entry.value.epoch)

    async def _take(self, revision: int | None, epoch_before: int, asked: float) -> bool:
        self.epoch = max(int(time.time() * 1000), epoch_before + 1)
        value = SchedulerLease(holder=self.holder, epoch=self.epoch)
        try:
            if revision is None:
                self._revision = await self._bucket.create(KEY, value)
            else:
                self._revision = await self._bucket.update(KEY, value, revision)
        except ConflictError:
            return False
        self._renewed = asked
        return True

    async def hold(self) -> None:
        """Renew the lease for ever; raises FencedError once somebody else has it."""
        beat = 0
        while True:
            await asyncio.sleep(self._timing.renew_s)
            beat += 1
            asked = time.monotonic()
            value = SchedulerLease(holder=self.holder, epoch=self.epoch, beat=beat)
            try:
                self._revision = await self._bucket.update(KEY, value, self._revision)
            except ConflictError as error:
                raise FencedError(
                    "another scheduler has taken over", hint="this one waits for its turn"
                ) from error
            self._renewed = asked

    async def release(self) -> None:
        """Give the lease back so that the next holder need not wait; harmless if it is lost."""
        try:
            await self._bucket.delete(KEY, revision=self._revision)
        except ConflictError:
            return
