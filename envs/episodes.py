"""The games of running episodes: made, played and dropped in a worker thread or process.

This is the named boundary at which a game may do anything: whatever it raises becomes a
GameError that carries the end of the game's own traceback.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..schemas.errors import NotFoundError, TinkermqError
from .game import (
    AbstractGame,
    ChatMessage,
    StepResult,
    check_result,
    check_text,
    check_tools,
    game_failure,
)
from .prompt import open_game
from .record import Record


@dataclass(frozen=True)
class Opening:
    """What an episode starts from."""

    episode: str
    """Id of the episode."""
    seed: int
    """Seed of its random generator."""
    record: Record | None = None
    """Row of a dataset game."""
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])
    """Further arguments of the game's `reset`."""


class GameFacts(NamedTuple):
    """What is the same in all episodes of a game."""

    name: str
    """Its name."""
    tools: list[dict[str, Any]]
    """The tools that its policy may call."""


class Episodes:
    """One game instance per running episode."""

    def __init__(self, game_class: type[AbstractGame], kwargs: dict[str, Any]) -> None:
        self._class = game_class
        self._kwargs = kwargs
        self._name = game_class.__name__
        self._games: dict[str, AbstractGame] = {}

    def probe(self) -> GameFacts:
        """Make one instance to see that it can be made; return what all episodes share."""
        game = self._make()
        try:
            name = check_text(game, "get_interaction_name", game.get_interaction_name())
            return GameFacts(name, check_tools(game))
        except (Exception, SystemExit) as error:
            raise game_failure(self._name, "get_interaction_name", error) from error

    def reset(self, opening: Opening) -> list[ChatMessage]:
        """Make a game, reset it, and return the chat messages of its first prompt."""
        game = self._make()
        try:
            messages = open_game(
                game, seed=opening.seed, record=opening.record, kwargs=opening.kwargs
            )
        except (Exception, SystemExit) as error:
            raise self._reset_failure(error, opening) from error
        self._games[opening.episode] = game
        return messages

    def step(self, episode: str, action: str) -> StepResult:
        """Play one action; a game that fails or is done is dropped."""
        game = self._games.get(episode)
        if game is None:
            raise NotFoundError(f"episode {episode!r} has no running game here")
        try:
            result = check_result(game, game.step(action))
        except (Exception, SystemExit) as error:
            self.drop(episode)
            raise game_failure(self._name, "step", error) from error
        if result.done:
            self.drop(episode)
        return result

    def drop(self, episode: str) -> None:
        """Forget an episode, whether it runs or not."""
        self._games.pop(episode, None)

    def __len__(self) -> int:
        """Return the number of running games."""
        return len(self._games)

    def _make(self) -> AbstractGame:
        try:
            return self._class(**self._kwargs)
        except (Exception, SystemExit) as error:
            raise game_failure(self._name, f"__init__(**{self._kwargs!r})", error) from error

    def _reset_failure(self, error: BaseException, opening: Opening) -> TinkermqError:
        failure = game_failure(self._name, "reset", error)
        if isinstance(error, TypeError) and opening.record is None and "argument" in str(error):
            failure.hint = (
                "the episode has no row of a dataset: set env.train_data for a dataset game"
            )
        return failure
