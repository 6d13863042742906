"""Runs the requests of many users in turn, and refuses a user's excess requests.

Each user has a bounded number of running and of waiting requests, and waiting requests run in turn
by user. So one user's flood delays each other user by one turn only, and a service's memory is
bounded by the number of users.
"""

import asyncio
import contextlib
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from typing import Any, NamedTuple

from cachetools import LRUCache

Work = Callable[[], Coroutine[Any, Any, None]]

MAX_RUNNING = 256
WAITING_PER_RUNNING = 8
MAX_BYTES = 64 << 20
"""Bound on the waiting and running requests of one user."""
DEFAULT_BOUND = 16
_YIELD_EVERY = 64


class FairQueue:
    """Queued and running requests of many users."""

    def __init__(self, *, max_running: int = MAX_RUNNING) -> None:
        """Start empty."""
        self.bound: Callable[[str], int | None] = lambda _: DEFAULT_BOUND
        """Running requests allowed for a user; None: as many as for all users together."""
        self.num_refused = 0
        """Number of requests refused so far."""
        self._max_running = max_running
        self._waiting: OrderedDict[str, deque[tuple[Work, int]]] = OrderedDict()
        self._running: dict[str, int] = {}
        self._bytes: dict[str, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_submitted = 0

    async def give_way(self) -> None:
        """Let other tasks run at intervals; await it before each `submit`."""
        self._num_submitted += 1
        if self._num_submitted % _YIELD_EVERY == 0:
            await asyncio.sleep(0)

    def submit(self, user: str, work: Work, num_bytes: int = 0) -> bool:
        """Run a user's request in its turn; return False if refused because the user has too many.

        `num_bytes` is the memory that the request holds until it ends.
        """
        waiting, held = self._waiting.get(user), self._bytes.get(user, 0)
        full = waiting is not None and len(waiting) >= WAITING_PER_RUNNING * self._most(user)
        if full or (held and held + num_bytes > MAX_BYTES):
            self.num_refused += 1
            return False
        self._bytes[user] = held + num_bytes
        self._waiting.setdefault(user, deque()).append((work, num_bytes))
        self._start_next()
        return True

    async def settle(self, deadline_s: float) -> None:
        """Drop waiting requests, and give running ones some time to end."""
        self._waiting.clear()
        self._bytes.clear()
        await end_tasks(self._tasks, deadline_s)

    def _most(self, user: str) -> int:
        bound = self.bound(user)
        return self._max_running if bound is None else min(max(bound, 1), self._max_running)

    def _start_next(self) -> None:
        """Start allowed requests; a user whose request starts goes to the end of the queue."""
        for _ in range(len(self._waiting)):
            if len(self._tasks) >= self._max_running:
                return
            user, waiting = self._waiting.popitem(last=False)
            if self._running.get(user, 0) < self._most(user):
                self._start(user, *waiting.popleft())
            if waiting:
                self._waiting[user] = waiting

    def _start(self, user: str, work: Work, num_bytes: int) -> None:
        self._running[user] = self._running.get(user, 0) + 1
        task = asyncio.create_task(work(), name=f"request of {user}")
        self._tasks.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            self._running[user] -= 1
            self._bytes[user] = max(self._bytes.get(user, 0) - num_bytes, 0)
            if not self._running[user]:
                del self._running[user]
            if not self._bytes[user]:
                del self._bytes[user]
            self._start_next()

        task.add_done_callback(ended)


class FairLock:
    """A lock that users acquire in turn.

    For work that occupies the event loop or the broker for long: concurrent requests of one user
    then delay the others by one such operation, not by one for each request.
    """

    def __init__(self) -> None:
        """Start unlocked."""
        self._is_taken = False
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @contextlib.asynccontextmanager
    async def turn(self, user: str) -> AsyncIterator[None]:
        """Hold the lock during the block."""
        if self._is_taken:
            waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(user, deque()).append(waiting)
            try:
                await waiting
            except asyncio.CancelledError:
                if waiting.done() and not waiting.cancelled():
                    self._pass_on()  # it acquired the lock meanwhile
                raise
        self._is_taken = True
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        while self._waiting:
            user, waiting = self._waiting.popitem(last=False)
            following = waiting.popleft()
            if waiting:
                self._waiting[user] = waiting
            if not following.done():
                following.set_result(None)
                return
        self._is_taken = False


# Rate limits of events by key. Pure: the time is an argument.

MAX_KEYS = 10_000


class _Bucket(NamedTuple):
    """A key's remaining burst, the time of that count, and the number of events refused since."""

    left: float
    since: float
    refused: int


class Rates:
    """Allows `burst` events of a key at once, and `per_s` of them in the long run."""

    def __init__(self, per_s: float, burst: int, *, max_keys: int = MAX_KEYS) -> None:
        """Start without keys; beyond `max_keys` the least recently used are forgotten."""
        self._per_s = per_s
        self._burst = burst
        self._buckets: LRUCache[str, _Bucket] = LRUCache(max_keys)

    @property
    def num_keys(self) -> int:
        """Number of remembered keys."""
        return len(self._buckets)

    def take(self, key: str, now: float) -> int | None:
        """Return None for an event over the bound, else the number refused since the last one."""
        left, since, refused = self._buckets.get(key, _Bucket(float(self._burst), now, 0))
        left = min(left + (now - since) * self._per_s, float(self._burst))
        if left < 1:
            self._buckets[key] = _Bucket(left, now, refused + 1)
            return None
        self._buckets[key] = _Bucket(left - 1, now, 0)
        return refused


async def end_tasks(tasks: "Iterable[asyncio.Task[Any]]", grace_s: float | None = None) -> None:
    """Wait some time for tasks to end, cancel the remaining ones, and wait for their end."""
    running = set(tasks)
    if running and grace_s is not None:
        _, running = await asyncio.wait(running, timeout=grace_s)
    for task in running:
        task.cancel()
    if running:
        await asyncio.wait(running)
