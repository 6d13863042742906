"""Waits of tests: patient, because a machine may be slow, and said by name when they were in vain.

What a test waits for is signalled, never slept for; so a wait that succeeds takes as long as the
machine needs, and only one that fails takes all of `PATIENCE_S`, which is meant for a machine
several times slower than one of ours, with other work beside the tests. A test that shows that
something does not wait for its own deadline gives it a deadline beyond `PATIENCE_S`.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

PATIENCE_S = 180.0
AFTER_PATIENCE_S = 2 * PATIENCE_S
_POLL_S = 0.02
_SLOWEST_POLL_S = 0.1

T = TypeVar("T")


async def eventually(
    attempt: Callable[[], Awaitable[T | None]], what: str, deadline_s: float = PATIENCE_S
) -> T:
    """Wait until `attempt` returns something true and return it; TimeoutError names `what`."""
    deadline, poll_s = time.monotonic() + deadline_s, _POLL_S
    while not (found := await attempt()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {deadline_s:g} s for {what}")
        await asyncio.sleep(poll_s)
        poll_s = min(1.2 * poll_s, _SLOWEST_POLL_S)
    return found


async def until(condition: Callable[[], bool], what: str) -> None:
    """Wait until a condition holds; TimeoutError names `what`."""

    async def attempt() -> bool:
        return condition()

    await eventually(attempt, what)
