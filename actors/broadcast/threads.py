"""Threads for what may block for long in C++: nobody waits for them at the end of a process."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


async def off_loop(work: Callable[[], T], name: str, deadline_s: float | None = None) -> T:
    """Run `work` in a thread of its own and return its result, or raise its error.

    Unlike those of `asyncio.to_thread` the thread is a daemon: a wait that was cancelled, or went
    past its deadline (TimeoutError), leaves it behind, and the process can end before it.
    """
    done: Future[T] = Future()

    def run() -> None:
        if not done.set_running_or_notify_cancel():
            return
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001  told to who waits
            done.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    async with asyncio.timeout(deadline_s):
        return await asyncio.wrap_future(done)
