"""How many requests an engine with a paged cache works on at once.

A cache of pages can hold more requests than would fit if all of them grew to the longest, and how
many more only shows while they run. So the bound starts at what fits in any case, rises while
requests wait and the cache has room, and is cut when the engine had to throw a request out of its
cache (a preemption: that request is computed again, so too high a bound costs more than too low).
"""

import asyncio
from collections import deque

_ROOM = 0.8
"""Share of the cache up to which there is room for more requests."""
_RISE = 1 / 8
"""Share by which the bound rises at a step."""
_CUT = 0.75
"""What is left of the running requests after a preemption."""


class Concurrency:
    """The bound, told of every step of the engine."""

    def __init__(self, fits: int, most: int) -> None:
        """`fits` requests fit into the cache however long they get; `most` is never exceeded."""
        self._least = max(1, min(fits, most))
        self._most = most
        self.limit = self._least

    def step(self, running: int, *, wanted: bool, cache_share: float, preempted: int) -> None:
        """Adapt to a step with so many running requests and such a share of the cache in use.

        `wanted` says that requests wait for the bound to rise.
        """
        if preempted and cache_share > _ROOM:
            self.limit = max(self._least, min(self.limit, int(_CUT * (running - preempted))))
        elif wanted and not preempted and cache_share < _ROOM and running >= self.limit:
            self.limit = min(self._most, self.limit + max(1, int(_RISE * self.limit)))


class RequestLimit:
    """Lets as many requests in as the bound allows, first come, first served."""

    def __init__(self, concurrency: Concurrency) -> None:
        self.concurrency = concurrency
        self.inside = 0
        """Requests that were let in and have not left."""
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def waiting(self) -> int:
        """Requests outside."""
        return sum(not place.done() for place in self._waiting)

    def ask(self) -> "asyncio.Future[None]":
        """Return what is done once there is a place; give it to `leave` in any case."""
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        self.admit()
        return place

    def leave(self, place: "asyncio.Future[None]") -> None:
        """Give a place back, or stop waiting for it."""
        if place.done() and not place.cancelled():
            self.inside -= 1
            self.admit()
        else:
            place.cancel()

    def admit(self) -> None:
        """Let in whom the bound allows now."""
        while self._waiting and self.inside < self.concurrency.limit:
            place = self._waiting.popleft()
            if not place.done():
                self.inside += 1
                place.set_result(None)
