"""A private event loop in a thread, for the clients that are not async: see `sync_twin`."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")
_CLEANUP_S = 10.0


class LoopThread:
    """An event loop that runs in a daemon thread."""

    def __init__(self, name: str = "tinkermq") -> None:
        """Start the thread."""
        self._loop = asyncio.new_event_loop()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Start a coroutine; `.result()` of the future waits for it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end; an interrupt of the caller cancels it.

        What the coroutine does at its cancellation is waited for, for a moment.
        """
        began, ended = threading.Event(), threading.Event()

        async def whole() -> T:
            began.set()
            try:
                return await work
            finally:
                ended.set()

        future = self.start(whole())
        try:
            return future.result()
        except BaseException:
            future.cancel()
            if began.is_set():
                ended.wait(_CLEANUP_S)
            else:
                work.close()
            raise

    def call(self, callback: Callable[[], object]) -> None:
        """Call a plain function in the loop's thread, soon."""
        self._loop.call_soon_threadsafe(callback)

    def close(self) -> None:
        """Stop the loop and end the thread."""
        self._closing = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        while not self._closing:
            # a task of a user's function may stop the loop, or end it by SystemExit; who awaits
            # that task gets it as well
            with contextlib.suppress(BaseException):
                self._loop.run_forever()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()


@cache
def shared_loop() -> LoopThread:
    """Return the loop that all synchronous clients of this process share."""
    return LoopThread()
