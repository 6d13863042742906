"""Follow a run from its first step to its end: metrics, events and the job's states."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeAlias

from ..broker.feed import follow
from ..broker.presence import INTERVAL_S, list_presences
from ..schemas.job import FINAL_STATES, JobRecord
from ..schemas.metric import Event, LogLines, Metric, Presence
from ..schemas.wire.errors import NotFoundError
from .pool import Pool

Crew: TypeAlias = tuple[Presence, ...]
"""The actors of a run, as their heartbeats tell of them."""
Update: TypeAlias = Metric | Event | JobRecord | Crew
POLL_S = 0.5
QUIET_S = 0.5
"""After the end of a run its last metrics are waited for until the feed is quiet this long."""
_QUEUE_LENGTH = 256


async def follow_run(
    pool: Pool, record: JobRecord, *, from_start: bool = True, with_crew: bool = False
) -> AsyncGenerator[Update, None]:
    """Yield metrics and events of a run in order, and its record whenever it has changed.

    `with_crew` also yields its actors every two seconds, while it runs. The last update is the
    record in its final state. A broker that is away is waited for, and told of by the events
    `broker_away` and `broker_back`. Leave it through `contextlib.aclosing`. Raises NotFoundError
    when the job is removed.
    """
    broker = pool.broker
    was_patient = broker.is_patient
    broker.availability.set_patient(True)
    follower = _Follower(pool, record, from_start)
    removals = (broker.on_disconnect(follower.tell_away), broker.on_reconnect(follower.tell_back))
    parts: list[Coroutine[Any, Any, None]] = [follower.pump(), follower.watch()]
    if with_crew:
        parts.append(follower.ask_crew())
    tasks = [asyncio.create_task(follower.guard(part), name="follow_run") for part in parts]
    try:
        while True:
            update = await follower.updates.get()
            if isinstance(update, Exception):
                raise update
            yield update
            if isinstance(update, JobRecord) and update.state in FINAL_STATES:
                return
    finally:
        for remove in removals:
            remove()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        broker.availability.set_patient(was_patient)


class _Follower:
    """The readers of feed, record and heartbeats, and the queue that they fill."""

    def __init__(self, pool: Pool, record: JobRecord, from_start: bool) -> None:
        self.updates: asyncio.Queue[Update | Exception] = asyncio.Queue(_QUEUE_LENGTH)
        self._pool = pool
        self._record = record
        self._from_start = from_start
        self._heard = time.monotonic()
        self._is_away = False

    def tell_away(self) -> None:
        """Tell that the broker is away, once for each time."""
        if self._is_away:
            return
        self._is_away = True
        self._tell("broker_away", "it is waited for; what runs in the pool waits, too")

    def tell_back(self) -> None:
        """Tell that the broker is back."""
        self._is_away = False
        self._tell("broker_back", "the run is followed on")

    def _tell(self, kind: str, message: str) -> None:
        event = Event(kind=kind, source="client", message=message, time=time.time())
        with contextlib.suppress(asyncio.QueueFull):  # whoever reads is far behind anyway
            self.updates.put_nowait(event)

    async def guard(self, part: Coroutine[Any, Any, None]) -> None:
        """Run one reader; what it raises goes to whoever reads the queue."""
        try:
            await part
        except Exception as error:  # noqa: BLE001  handed on to the reader, not swallowed
            await self.updates.put(error)

    async def pump(self) -> None:
        """Read metrics and events, from the moment at which the job's streams are there."""
        while True:
            try:
                await self._read_feed()
            except NotFoundError:
                if self._record.state in FINAL_STATES:
                    return  # its streams are gone; the record tells the rest
                await asyncio.sleep(POLL_S)

    async def _read_feed(self) -> None:
        feed = follow(
            self._pool.broker,
            self._record.scope,
            ("metric", "event"),
            from_start=self._from_start,
        )
        async with aclosing(feed) as messages:
            async for message in messages:
                self._heard = time.monotonic()
                if not isinstance(message, LogLines):
                    await self.updates.put(message)

    async def watch(self) -> None:
        """Read the record now and then; its final state comes after the last metrics."""
        if not self._ended:
            await self.updates.put(self._record)
        while not self._ended:
            await asyncio.sleep(POLL_S)
            newest = await self._pool.find(self._record.job)
            if newest != self._record:
                self._record = newest
                if not self._ended:
                    await self.updates.put(newest)
        self._heard = time.monotonic()
        while (left := self._heard + QUIET_S - time.monotonic()) > 0:  # noqa: ASYNC110  quiet is the absence of events
            await asyncio.sleep(left)
        await self.updates.put(self._record)

    async def ask_crew(self) -> None:
        """Read the heartbeats now and then."""
        while not self._ended:
            found = await list_presences(self._pool.broker, self._record.scope.key)
            await self.updates.put(tuple(entry.value for entry in found))
            await asyncio.sleep(INTERVAL_S)

    @property
    def _ended(self) -> bool:
        return self._record.state in FINAL_STATES
