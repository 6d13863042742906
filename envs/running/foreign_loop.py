"""An event loop, in a thread of its own, for coroutines that users wrote.

What computes there holds up what else waits there, but never the loop of the host. Whatever a
coroutine raises reaches the one who has asked as an error of ours.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

from ...schemas.wire.errors import StateError, TinkermqError
from ...schemas.wire.foreign import Blame

_END_S = 5.0


class ForeignLoop:
    """Runs coroutines for callers on the event loop that made it."""

    def __init__(self, name: str) -> None:
        """Start the thread."""
        self._name = name
        self._home = asyncio.get_running_loop()
        self._loop = asyncio.new_event_loop()
        self._waiting: set[asyncio.Future[Any]] = set()
        self._running: set[asyncio.Task[None]] = set()
        self._asked: float | None = None
        self._ended = False
        self._thread = threading.Thread(target=self._turn, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], Awaitable[Any]], blame: Blame) -> "asyncio.Future[Any]":
        """Run a coroutine in the loop; return a future of the caller's loop.

        To cancel the future cancels the coroutine. Whatever it raises comes back as `blame` says.
        """
        future: asyncio.Future[Any] = self._home.create_future()
        self._waiting.add(future)
        future.add_done_callback(self._waiting.discard)
        self._loop.call_soon_threadsafe(self._start, call, blame, future)
        return future

    def is_stuck(self, limit_s: float) -> bool:
        """Whether the loop has not turned for so long; asked again and again."""
        asked, now = self._asked, time.monotonic()  # the loop's thread may answer meanwhile
        if asked is None:
            self._asked = now
            self._loop.call_soon_threadsafe(self._answer)
        return asked is not None and now - asked >= limit_s

    def give_up(self, error: TinkermqError) -> None:
        """Fail whatever is waited for; the thread ends if the loop ever turns again."""
        self._ended = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        for future in list(self._waiting):
            if not future.done():
                future.set_exception(error)

    def end(self) -> None:
        """Cancel what runs, stop the loop and wait a few seconds for its thread."""
        self._ended = True
        with contextlib.suppress(RuntimeError):  # it is closed already
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_END_S)

    def _turn(self) -> None:
        """Turn until the end, also after a coroutine has stopped the loop, or raised SystemExit.

        Those two asyncio lets through; the task that awaits them gets them as well.
        """
        with (
            contextlib.suppress(BaseException),
            asyncio.Runner(loop_factory=lambda: self._loop) as runner,
        ):
            loop = runner.get_loop()
            while not self._ended and not loop.is_closed():
                with contextlib.suppress(BaseException):
                    loop.run_forever()

    def _answer(self) -> None:
        self._asked = None

    def _start(
        self, call: Callable[[], Awaitable[Any]], blame: Blame, future: "asyncio.Future[Any]"
    ) -> None:
        task = self._loop.create_task(self._finish(call, blame, future))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        self._on_home(self._follow, future, task)

    async def _finish(
        self, call: Callable[[], Awaitable[Any]], blame: Blame, future: "asyncio.Future[Any]"
    ) -> None:
        outcome: Any = None
        error: TinkermqError | None = None
        try:
            outcome = await call()
        except BaseException as raised:  # noqa: BLE001 - handed on to the one who asked
            ended = StateError(f"the event loop {self._name} has ended")
            error = ended if self._ended else blame(raised)
        self._on_home(_settle, future, outcome, error)

    def _follow(self, future: "asyncio.Future[Any]", task: "asyncio.Task[None]") -> None:
        """Cancel the coroutine when nobody waits for it any more."""

        def cancel(waited: "asyncio.Future[Any]") -> None:
            if waited.cancelled():
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    self._loop.call_soon_threadsafe(task.cancel)

        future.add_done_callback(cancel)

    def _on_home(self, function: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the caller's loop is closed: nobody waits
            self._home.call_soon_threadsafe(function, *arguments)


def _settle(future: "asyncio.Future[Any]", outcome: Any, error: TinkermqError | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(outcome)
    else:
        future.set_exception(error)
