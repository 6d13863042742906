"""Leader election among schedulers, and the scheduler's intervals.

The leader renews its key every second. A standby watches the key's revision by its own clock and
takes over, by compare-and-set, once it has not changed for three seconds: clocks of different
machines are never compared. Each leader has a higher epoch than its predecessor, so a released
lease is stored without a holder; nodes refuse requests of an older epoch. If the broker loses the
lease, nodes still have the last epoch (`rise`).
"""

import asyncio
import contextlib
import os
import secrets
import socket
import time
from collections import deque
from dataclasses import dataclass

from ...broker.client.connection import Broker
from ...broker.jetstream.kv import Bucket, DamagedEntry
from ...schemas.node import SchedulerLease
from ...schemas.wire.errors import ConflictError, FencedError
from ...schemas.wire.subjects import BUCKET_LEASES

# -- intervals -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timing:
    """A scheduler's clocks, in seconds; tests run them faster."""

    turn_s: float = 0.5
    """Time between two turns over all jobs if no change starts one at once."""
    hurries: bool = True
    """Whether a change starts a turn at once."""
    renew_s: float = 1.0
    """Time between two renewals of the lease."""
    stale_s: float = 3.0
    """Time without renewal after which a lease may be taken over."""
    aging_s: float = 3600.0
    """Waiting time that adds one point of priority."""
    silent_s: float = 10.0
    """Time of silence after which a node has left."""
    sync_s: float = 2.0
    """Time for a node to answer a request."""
    resync_s: float = 5.0
    """Time between two requests to a node that runs the desired actors."""


# -- duration of decisions -------------------------------------------------------------------------

_KEPT = 4096


class DecisionTimes:
    """The durations of the last decisions over the whole queue."""

    def __init__(self) -> None:
        """Start without any times."""
        self._seconds: deque[float] = deque(maxlen=_KEPT)

    def note(self, seconds: float) -> None:
        """Record the duration of a decision in the event loop's thread."""
        self._seconds.append(seconds)

    def numbers(self) -> dict[str, float]:
        """Return figures for the heartbeat: milliseconds, median and 99th percentile."""
        times = sorted(self._seconds)
        if not times:
            return {}
        ranks = {"p50": 0.5, "p99": 0.99}
        return {
            f"decision_ms_{name}": 1000 * times[min(int(rank * len(times)), len(times) - 1)]
            for name, rank in ranks.items()
        }


KEY = "scheduler"
_POLL_S = 0.25


class LeaderLease:
    """The right to schedule; `acquire` it, then keep it by `hold`."""

    def __init__(self, broker: Broker, timing: Timing) -> None:
        """The lease is not held yet."""
        self._bucket = Bucket(broker, BUCKET_LEASES, SchedulerLease)
        self._timing = timing
        self._revision = 0
        self._renewed = float("-inf")
        self.holder = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self.epoch = 0

    @property
    def is_fresh(self) -> bool:
        """Whether no other scheduler can have taken the lease yet."""
        return time.monotonic() - self._renewed < self._timing.stale_s

    async def acquire(self, stopping: asyncio.Event) -> bool:
        """Wait until this scheduler has the lease; return False if `stopping` was set before."""
        seen: int | None = None
        since = time.monotonic()
        while not stopping.is_set():
            asked_at = time.monotonic()
            revision, before, is_free = await self._read_lease()
            is_silent = asked_at - since >= self._timing.stale_s
            if not is_free and revision != seen:
                seen, since = revision, asked_at
            elif (is_free or is_silent) and await self._acquire(revision, before, asked_at):
                return True
            await asyncio.sleep(_POLL_S)
        return False

    def rise(self, epoch: int) -> None:
        """Raise the epoch above one that nodes have; only for the holder of the lease."""
        self.epoch = max(self.epoch, epoch + 1)

    async def _read_lease(self) -> tuple[int | None, int, bool]:
        """Return the lease's revision (None: no lease), its epoch, and whether it is free.

        A damaged record counts as a lease whose holder is silent.
        """
        try:
            entry = await self._bucket.get(KEY)
        except DamagedEntry as error:
            return error.revision, 0, False
        if entry is None:
            return None, 0, True
        return entry.revision, entry.value.epoch, not entry.value.holder

    async def _acquire(self, revision: int | None, epoch_before: int, asked_at: float) -> bool:
        self.epoch = max(int(time.time() * 1000), epoch_before + 1)
        value = SchedulerLease(holder=self.holder, epoch=self.epoch)
        try:
            if revision is None:
                self._revision = await self._bucket.create(KEY, value)
            else:
                self._revision = await self._bucket.update(KEY, value, revision)
        except ConflictError:
            return False
        self._renewed = asked_at
        return True

    async def hold(self) -> None:
        """Renew the lease forever; raises FencedError once another scheduler holds it."""
        beat = 0
        while True:
            await asyncio.sleep(self._timing.renew_s)
            beat += 1
            asked_at = time.monotonic()
            value = SchedulerLease(holder=self.holder, epoch=self.epoch, beat=beat)
            try:
                self._revision = await self._bucket.update(KEY, value, self._revision)
            except ConflictError as error:
                raise FencedError(
                    "another scheduler has taken over", hint="this one waits for its turn"
                ) from error
            self._renewed = asked_at

    async def release(self) -> None:
        """Release the lease, so that the next holder need not wait; harmless if it is lost."""
        free = SchedulerLease(holder="", epoch=self.epoch)
        with contextlib.suppress(ConflictError):
            await self._bucket.update(KEY, free, self._revision)
