"""What one user may have this gateway do at a time, so that all the others are served, too."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

from ....schemas.wire.errors import BusyError

P = ParamSpec("P")
T = TypeVar("T")

MAX_RUNNING = 256
"""Requests and live streams of one user at a time."""
MAX_HELD_BYTES = 64 << 20
"""Bytes of bodies of one user at a time."""
MAX_THREADS = 2
"""Threads that work for one user at a time; what has to wait does so without a thread."""


class Share:
    """The running requests of one user."""

    def __init__(
        self, max_running: int = MAX_RUNNING, max_held_bytes: int = MAX_HELD_BYTES
    ) -> None:
        """Bound the number of requests by `max_running`, the bytes of their bodies, too."""
        self.num_running = 0
        self._held_bytes = 0
        self._max_running = max_running
        self._max_held_bytes = max_held_bytes
        self._threads = asyncio.Semaphore(MAX_THREADS)

    @contextlib.contextmanager
    def taken(self, body_bytes: int = 0) -> Iterator[None]:
        """Count a request while the block runs; raises BusyError where it is one too many."""
        if self.num_running >= self._max_running:
            raise BusyError(
                f"{self.num_running} requests of yours are running, as many as one user may have",
                hint="send the next one when an answer has come",
            )
        if body_bytes and self._held_bytes + body_bytes > self._max_held_bytes:
            raise BusyError(
                f"the bodies of your requests have {self._held_bytes:,} bytes already",
                hint=f"have at most {self._max_held_bytes:,} at a time",
            )
        self.num_running += 1
        self._held_bytes += body_bytes
        try:
            yield
        finally:
            self.num_running -= 1
            self._held_bytes -= body_bytes

    async def in_thread(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Do what takes its time in a thread, for each user few at a time."""
        async with self._threads:
            return await asyncio.to_thread(function, *args, **kwargs)
