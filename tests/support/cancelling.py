"""Cancel a coroutine at each of its awaits in turn, so that a test can look at what it leaves."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.waiting import PATIENCE_S

MOST_AWAITS = 10_000


class _Stepped:
    """Awaits a coroutine, and cancels its task at the `at`-th suspension."""

    def __init__(self, work: Coroutine[Any, Any, Any], at: int, *, is_late: bool) -> None:
        self._work, self._at, self._is_late = work, at, is_late
        self.was_cancelled = False

    def __await__(self) -> Generator[Any, Any, None]:
        steps = self._work.__await__()
        task = asyncio.current_task()
        assert task is not None
        send: Callable[[], Any] = partial(next, steps)
        number = 0
        while True:
            try:
                awaited = send()
            except StopIteration:
                return
            number += 1
            if number == self._at:
                self.was_cancelled = True
                if self._is_late and awaited is not None:
                    awaited.add_done_callback(lambda _: task.cancel())
                else:
                    asyncio.get_running_loop().call_soon(task.cancel)
            try:
                yield awaited
            except BaseException as error:  # noqa: BLE001 - the coroutine gets it
                send = partial(steps.throw, error)
            else:
                send = partial(next, steps)


def _place_of(work: Any) -> str:
    """Return where a coroutine waits: its innermost frames."""
    places: list[str] = []
    while frame := getattr(work, "cr_frame", None) or getattr(work, "ag_frame", None):
        places.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
        work = getattr(work, "cr_await", None) or getattr(work, "ag_await", None)
    return " ← ".join(reversed(places))


async def _cancelled_at(work: Coroutine[Any, Any, Any], at: int, *, is_late: bool) -> bool:
    """Run a coroutine and cancel it at a suspension; return False if it has fewer."""
    stepped = _Stepped(work, at, is_late=is_late)

    async def run() -> None:
        await stepped

    task = asyncio.create_task(run(), name=f"cancelled at await {at}")
    done, _ = await asyncio.wait({task}, timeout=PATIENCE_S)
    assert done, f"cancelled at await {at} ({is_late=}), it hangs: {_place_of(work)}"
    if not stepped.was_cancelled:
        task.result()
    elif not task.cancelled():
        task.exception()  # it may end with another error, or with its result
    return stepped.was_cancelled


async def cancel_everywhere(
    work: Callable[[], Coroutine[Any, Any, Any]], check: Callable[[], Awaitable[None]]
) -> int:
    """Cancel `work()` at its first await, a new one at its second, and so on; return their number.

    Each is cancelled once while it waits and once as the awaited future is done, before it goes on:
    then its result is lost. `check` follows each cancellation. The last `work()` runs to its end.
    """
    for is_late in (False, True):
        for at in range(1, MOST_AWAITS):
            if not await _cancelled_at(work(), at, is_late=is_late):
                break
            await check()
        else:
            raise AssertionError(f"it has more than {MOST_AWAITS} awaits")
    await check()
    return at
