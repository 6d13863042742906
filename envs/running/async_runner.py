"""Run games that wait: those whose `reset` or `step` is a coroutine, all in one event loop.

The loop has a thread of its own, so that a game that computes where it should wait holds up the
other episodes of its host but never the host. Thousands of episodes may wait at a time. A call
past its limit is cancelled. A loop that does not turn for as long as a step may take is given up
with all its episodes, and another one takes its place, a bounded number of times.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

from ...schemas.wire.errors import GameError
from ..game import AbstractGame, ChatMessage, StepResult
from .episodes import Episodes, GameFacts, Opening
from .step_timeout import TimeLimits, hung
from .thread_runner import MAX_GIVEN_UP

_END_S = 5.0


class AsyncRunner:
    """Plays games in one event loop."""

    def __init__(
        self,
        game_class: type[AbstractGame],
        kwargs: dict[str, Any],
        *,
        limits: TimeLimits,
    ) -> None:
        self._class = game_class
        self._kwargs = kwargs
        self._limits = limits
        self._longest_s = max(limits)
        self._num_given_up = 0
        self._loop: _GameLoop

    async def start(self) -> GameFacts:
        """Start the loop and make one game as a trial; return what it tells of itself."""
        self._begin()
        probe = self._loop.episodes.probe

        async def made() -> GameFacts:
            return probe()

        return await self._play("__init__", "", made)

    async def reset(self, opening: Opening) -> list[ChatMessage]:
        """Start an episode."""
        episodes = self._loop.episodes
        return await self._play("reset", opening.episode, lambda: episodes.reset_async(opening))

    async def step(self, episode: str, action: str) -> StepResult:
        """Play one action."""
        episodes = self._loop.episodes
        return await self._play("step", episode, lambda: episodes.step_async(episode, action))

    async def turn(self, episode: str) -> tuple[str, list[ChatMessage]]:
        """Say whose turn it is, and what opens that role's conversation."""
        found = self._loop.episodes.turn

        async def asked() -> tuple[str, list[ChatMessage]]:
            return found(episode)

        return await self._play("turn", episode, asked)

    def drop(self, episode: str) -> None:
        """Forget an episode."""
        self._loop.episodes.drop(episode)

    def end_overdue(self) -> None:
        """Give the loop up if it has not turned for as long as a call may take."""
        if not self._loop.is_stuck(self._longest_s):
            return
        stuck, self._num_given_up = self._loop, self._num_given_up + 1
        if self._num_given_up <= MAX_GIVEN_UP:
            self._begin()
            stuck.give_up(self._blocked("its episodes are lost"))
        else:
            stuck.give_up(self._blocked(f"it was given {MAX_GIVEN_UP} new ones before"))

    async def stop(self) -> None:
        """Cancel what runs and end the loop."""
        await asyncio.to_thread(self._loop.end, _END_S)

    def _begin(self) -> None:
        episodes = Episodes(self._class, self._kwargs)
        self._loop = _GameLoop(episodes, asyncio.get_running_loop())

    def _blocked(self, outcome: str) -> GameError:
        return GameError(
            f"{self._class.__name__} held up its event loop for {self._longest_s:g} s: {outcome}",
            hint="an async game must await whatever takes long; write one that computes without "
            "async",
        )

    async def _play(self, verb: str, episode: str, call: Callable[[], Awaitable[Any]]) -> Any:
        """Run a call in the games' loop, for as long as it may take."""
        loop, limit_s = self._loop, self._limits.of(verb)

        async def limited() -> Any:
            task = asyncio.ensure_future(call())
            await asyncio.wait({task}, timeout=limit_s)
            if task.done():
                return task.result()
            task.cancel()
            loop.episodes.drop(episode)
            raise hung(self._class.__name__, verb, limit_s)

        return await loop.submit(limited)


class _GameLoop:
    """An event loop in a thread of its own, and the episodes that live in it."""

    def __init__(self, episodes: Episodes, home: asyncio.AbstractEventLoop) -> None:
        self.episodes = episodes
        self._home = home
        self._loop = asyncio.new_event_loop()
        self._waiting: set[asyncio.Future[Any]] = set()
        self._running: set[asyncio.Task[None]] = set()
        self._asked: float | None = None
        self._thread = threading.Thread(target=self._turn, name="async-games", daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], Awaitable[Any]]) -> "asyncio.Future[Any]":
        """Run a coroutine in the loop; return a future of the caller's loop."""
        future: asyncio.Future[Any] = self._home.create_future()
        self._waiting.add(future)
        future.add_done_callback(self._waiting.discard)
        self._loop.call_soon_threadsafe(self._start, call, future)
        return future

    def is_stuck(self, limit_s: float) -> bool:
        """Whether the loop has not turned for so long; asked again and again."""
        asked, now = self._asked, time.monotonic()  # the loop's thread may answer meanwhile
        if asked is None:
            self._asked = now
            self._loop.call_soon_threadsafe(self._answer)
        return asked is not None and now - asked >= limit_s

    def give_up(self, error: GameError) -> None:
        """Fail whatever is waited for; the thread ends if the loop ever turns again."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        for future in list(self._waiting):
            if not future.done():
                future.set_exception(error)

    def end(self, deadline_s: float) -> None:
        """Cancel what runs, stop the loop and wait for its thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(deadline_s)

    def _turn(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.get_loop().run_forever()

    def _answer(self) -> None:
        self._asked = None

    def _start(self, call: Callable[[], Awaitable[Any]], future: "asyncio.Future[Any]") -> None:
        task = self._loop.create_task(self._finish(call, future))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _finish(
        self, call: Callable[[], Awaitable[Any]], future: "asyncio.Future[Any]"
    ) -> None:
        outcome: Any = None
        error: BaseException | None = None
        try:
            outcome = await call()
        except BaseException as raised:  # noqa: BLE001 - handed on to the one who asked
            error = raised
        with contextlib.suppress(RuntimeError):  # the caller's loop is closed: nobody waits
            self._home.call_soon_threadsafe(_settle, future, outcome, error)


def _settle(future: "asyncio.Future[Any]", outcome: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(outcome)
    elif isinstance(error, asyncio.CancelledError):
        future.cancel()
    else:
        future.set_exception(error)
