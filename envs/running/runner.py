"""What the host needs of whatever runs its games: threads, processes, or an event loop."""

import asyncio
import math
from collections.abc import Awaitable
from typing import Protocol, TypeVar

from ...broker.observe.metering import TimeUse
from ...schemas.config.job import EnvConfig
from ...schemas.wire.errors import GameError
from ..game import AbstractGame, ChatMessage, StepResult
from ..registry import load_game
from .async_runner import AsyncRunner
from .episodes import (
    GameFacts,
    GameHung,
    Opening,
    TimeLimits,
    end_of_hung,
    is_async,
    refuse_async,
)
from .process_runner import ProcessRunner
from .thread_runner import ThreadRunner

T = TypeVar("T")


class Runner(Protocol):
    """Plays the games of many episodes off the event loop."""

    async def start(self) -> GameFacts:
        """Get ready, make one game as a trial, return what it tells of itself."""
        ...

    def reset(self, opening: Opening) -> Awaitable[list[ChatMessage]]:
        """Start an episode; GameError when the game fails."""
        ...

    def step(self, episode: str, action: str) -> Awaitable[StepResult]:
        """Play one action; GameError when the game fails, which ends the episode."""
        ...

    def turn(self, episode: str) -> Awaitable[tuple[str, list[ChatMessage]]]:
        """Say whose turn it is in a game with roles, and what opens that role's conversation."""
        ...

    def drop(self, episode: str) -> None:
        """Forget an episode."""
        ...

    def end_overdue(self) -> None:
        """Deal with calls that have run past their limit; called every `LOOK_S`."""
        ...

    async def stop(self) -> None:
        """End whatever plays games."""
        ...


class PlacedRunner(Runner, Protocol):
    """A runner that says how many episodes it runs at the same time."""

    @property
    def places(self) -> int:
        """Episodes at the same time."""
        ...


class TimedRunner:
    """A runner that tells for how long games play, and for how long all its workers do.

    A step that takes too long ends its episode here as the configuration says.
    """

    def __init__(
        self, runner: Runner, config: EnvConfig, num_workers: int, time_use: TimeUse
    ) -> None:
        """`time_use` knows `full` and `play`: a game has been asked and has not answered."""
        self._runner = runner
        self._config = config
        self._time_use = time_use
        self._room = math.inf if isinstance(runner, AsyncRunner) else num_workers
        self._num_asked = 0
        self.start = runner.start
        self.drop = runner.drop
        self.end_overdue = runner.end_overdue
        self.stop = runner.stop

    def reset(self, opening: Opening) -> Awaitable[list[ChatMessage]]:
        """Start an episode; GameError when the game fails."""
        return self._timed(self._runner.reset(opening))

    def step(self, episode: str, action: str) -> Awaitable[StepResult]:
        """Play one action; GameError when the game fails, which ends the episode."""
        return self._timed(self._step(episode, action))

    async def _step(self, episode: str, action: str) -> StepResult:
        try:
            return await self._runner.step(episode, action)
        except GameHung as error:
            return end_of_hung(self._config, error)

    def turn(self, episode: str) -> Awaitable[tuple[str, list[ChatMessage]]]:
        """Say whose turn it is in a game with roles, and what opens that role's conversation."""
        return self._timed(self._runner.turn(episode))

    def _timed(self, answer: Awaitable[T]) -> "asyncio.Future[T]":
        self._num_asked += 1
        self._time_use.begin("play")
        if self._num_asked == self._room:
            self._time_use.begin("full")
        future = asyncio.ensure_future(answer)
        future.add_done_callback(self._played)
        return future

    def _played(self, _: "asyncio.Future[T]") -> None:
        if self._num_asked == self._room:
            self._time_use.end("full")
        self._num_asked -= 1
        self._time_use.end("play")


def make_runner(config: EnvConfig, game_class: type[AbstractGame] | None = None) -> Runner:
    """Return the runner that `config.isolation` asks for, or else the game's class.

    Where steps are expected to hang (`config.on_step_timeout`) that is a process, which can be
    ended, unless the configuration asks for threads.

    `game_class` stands for `config.game` where a client hosts a class of its own. Raises GameError.
    """
    limits = TimeLimits(config.reset_timeout_s, config.step_timeout_s)
    if config.isolation == "process" and game_class is None:
        return _process_runner(config, config.game, limits)
    found = game_class or load_game(config.game)
    isolation = config.isolation or found.isolation
    if is_async(found):
        if isolation == "process":
            refuse_async(found)
        return AsyncRunner(found, config.kwargs, limits=limits)
    if config.on_step_timeout != "retry":
        isolation = config.isolation or "process"
    if isolation == "process":
        target = config.game if game_class is None else _importable(game_class)
        return _process_runner(config, target, limits)
    return ThreadRunner(found, config.kwargs, num_workers=config.workers, limits=limits)


def _process_runner(config: EnvConfig, target: str, limits: TimeLimits) -> ProcessRunner:
    return ProcessRunner(
        target,
        config.kwargs,
        num_workers=config.workers,
        worker_memory_mb=config.worker_memory_mb,
        limits=limits,
    )


def _importable(game_class: type[AbstractGame]) -> str:
    target = f"{game_class.__module__}:{game_class.__qualname__}"
    if game_class.__module__ == "__main__" or "<locals>" in target:
        raise GameError(
            f"{game_class.__qualname__} cannot be imported by a worker process",
            hint="put the class into a module of its own, or set env.isolation=thread",
        )
    return target
