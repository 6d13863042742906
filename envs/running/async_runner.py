"""Run games that wait: those whose `reset` or `step` is a coroutine, all in one event loop.

The loop has a thread of its own, so that a game that computes where it should wait holds up the
other episodes of its host but never the host. Thousands of episodes may wait at a time. A call
past its limit is cancelled. A loop that does not turn for as long as a step may take is given up
with all its episodes, and another one takes its place, a bounded number of times.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from ...schemas.wire.errors import GameError
from ..game import AbstractGame, ChatMessage, StepResult, game_failure
from .episodes import Episodes, GameFacts, Opening, TimeLimits, hung
from .foreign_loop import ForeignLoop
from .thread_runner import MAX_GIVEN_UP


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
        self._loop: ForeignLoop
        self._episodes: Episodes

    async def start(self) -> GameFacts:
        """Start the loop and make one game as a trial; return what it tells of itself."""
        self._begin()
        probe = self._episodes.probe

        async def made() -> GameFacts:
            return probe()

        return await self._play("__init__", "", made)

    async def reset(self, opening: Opening) -> list[ChatMessage]:
        """Start an episode."""
        episodes = self._episodes
        return await self._play("reset", opening.episode, lambda: episodes.reset_async(opening))

    async def step(self, episode: str, action: str) -> StepResult:
        """Play one action."""
        episodes = self._episodes
        return await self._play("step", episode, lambda: episodes.step_async(episode, action))

    async def turn(self, episode: str) -> tuple[str, list[ChatMessage]]:
        """Say whose turn it is, and what opens that role's conversation."""
        found = self._episodes.turn

        async def asked() -> tuple[str, list[ChatMessage]]:
            return found(episode)

        return await self._play("turn", episode, asked)

    def drop(self, episode: str) -> None:
        """Forget an episode."""
        self._episodes.drop(episode)

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
        await asyncio.to_thread(self._loop.end)

    def _begin(self) -> None:
        self._episodes = Episodes(self._class, self._kwargs)
        self._loop = ForeignLoop("async-games")

    def _blocked(self, outcome: str) -> GameError:
        return GameError(
            f"{self._class.__name__} held up its event loop for {self._longest_s:g} s: {outcome}",
            hint="an async game must await whatever takes long; write one that computes without "
            "async",
        )

    async def _play(self, verb: str, episode: str, call: Callable[[], Awaitable[Any]]) -> Any:
        """Run a call in the games' loop, for as long as it may take."""
        episodes, limit_s = self._episodes, self._limits.of(verb)

        async def limited() -> Any:
            task = asyncio.ensure_future(call())
            await asyncio.wait({task}, timeout=limit_s)
            if task.done() and not task.cancelled():
                return task.result()
            episodes.drop(episode)
            if task.cancelled():  # nobody did here: the game has cancelled its own task
                raise game_failure(self._class.__name__, verb, asyncio.CancelledError())
            task.cancel()
            raise hung(self._class.__name__, verb, limit_s)

        name = self._class.__name__
        return await self._loop.submit(limited, lambda error: game_failure(name, verb, error))
