"""What the host needs of whatever runs its games: threads or processes."""

from collections.abc import Awaitable
from typing import Protocol

from ..schemas.config import EnvConfig
from ..schemas.errors import GameError
from .episodes import GameFacts, Opening
from .game import AbstractGame, ChatMessage, StepResult
from .process_runner import ProcessRunner
from .registry import load_game
from .thread_runner import ThreadRunner


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

    def reap(self) -> None:
        """Deal with calls that have run past their limit; called a few times a second."""
        ...

    async def stop(self) -> None:
        """End whatever plays games."""
        ...


def make_runner(config: EnvConfig, game_class: type[AbstractGame] | None = None) -> Runner:
    """Return the runner that `config.isolation` asks for.

    `game_class` stands for `config.game` where a client hosts a class of its own.
    """
    if config.isolation == "process":
        return ProcessRunner(
            _importable(config.game, game_class),
            config.kwargs,
            num_workers=config.workers,
            reset_timeout_s=config.reset_timeout_s,
            step_timeout_s=config.step_timeout_s,
        )
    return ThreadRunner(
        game_class or load_game(config.game),
        config.kwargs,
        num_workers=config.workers,
        reset_timeout_s=config.reset_timeout_s,
        step_timeout_s=config.step_timeout_s,
    )


def _importable(game: str, game_class: type[AbstractGame] | None) -> str:
    if game_class is None:
        return game
    target = f"{game_class.__module__}:{game_class.__qualname__}"
    if game_class.__module__ == "__main__" or "<locals>" in target:
        raise GameError(
            f"{game_class.__qualname__} cannot be imported by a worker process",
            hint="put the class into a module of its own, or set env.isolation=thread",
        )
    return target
