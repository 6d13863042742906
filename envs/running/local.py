"""Play a game in this process, without broker and model: for `env check`, `env play`, tests.

Each call into the game runs in a thread, which is abandoned when it takes longer than an
environment host would wait.
"""

import asyncio
import itertools
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial
from typing import Any, TypeVar

from ...schemas.config.job import EnvConfig
from ...schemas.env import Split
from ...schemas.wire.errors import GameError
from ...schemas.wire.foreign import blaming
from ..data import HostData
from ..game import AbstractGame, ChatMessage, StepResult, check_tools, game_failure
from ..registry import import_needs
from ..tools import ToolGame
from .episodes import Episodes, GameFacts, Opening, TimeLimits, hung, is_async

T = TypeVar("T")
_MARGIN_S = 1.0
FULL_MARKS = 1.0
"""Best return of an episode, unless the game has another `max_return`."""


class TooSlow(GameError):
    """A call of the game took longer than its limit."""


class LocalGame:
    """Starts episodes of a configuration's game, one at a time."""

    def __init__(self, config: EnvConfig, game_class: type[AbstractGame], data: HostData) -> None:
        """Prepare; `game_class` replaces `config.game`, `data` holds its rows."""
        self.config = config
        self.game_class = game_class
        self.data = data
        self._limits = TimeLimits(config.reset_timeout_s, config.step_timeout_s)
        self._numbers = itertools.count()
        self._loop = asyncio.Runner()
        self._left_behind = self._is_imported = False
        self._last: LocalEpisode | None = None

    def close(self) -> None:
        """End the last episode, and the event loop of async games."""
        if not self._left_behind:  # otherwise a thread that cannot be ended still uses it
            self._end_last()
            self._loop.close()

    def probe(self) -> str:
        """Make one instance; return the game's name. Raises GameError."""
        return self.facts().name

    def describe(self) -> dict[str, str]:
        """Return a tool game's description of its environment, by topic. Raises GameError."""

        def describe() -> dict[str, str]:
            blame = blaming(lambda error: game_failure(self.game_class.__name__, "describe", error))
            with Episodes(self.game_class, self.config.kwargs).trial() as game, blame:
                return game.describe() if isinstance(game, ToolGame) else {}

        return self._limited("reset", describe)

    def facts(self) -> GameFacts:
        """Make one instance; return the facts that all episodes share. Raises GameError."""
        self._import()
        return self._limited("__init__", Episodes(self.game_class, self.config.kwargs).probe)

    def start(self, seed: int, *, row: int | None = None, split: Split = "train") -> "LocalEpisode":
        """Start an episode on a row of the data, by default row `seed` modulo the number of rows.

        The one before ends. Raises GameError, DataError, TooSlow.
        """
        if row is None and self.data.num_train is not None and split == "train":
            row = seed % self.data.num_train
        self._import()
        name = f"local-{next(self._numbers)}"
        opening = Opening(name, seed, self.data.record(split, row))
        self._end_last()
        self._last = LocalEpisode(self, opening)
        return self._last

    def _end_last(self) -> None:
        last, self._last = self._last, None
        if last is not None:
            last.end()

    def _import(self) -> None:
        if not self._is_imported:
            self._limited("import", lambda: import_needs(self.game_class, self.config.kwargs))
            self._is_imported = True

    def call(
        self,
        verb: str,
        plain: Callable[[], T],
        waiting: Callable[[], Coroutine[Any, Any, T]],
    ) -> T:
        """Call the game, through `waiting` if it is async, for as long as a host would wait."""
        if not is_async(self.game_class):
            return self._limited(verb, plain)
        bounded = partial(self._bounded, verb, waiting)
        return self._limited(verb, lambda: self._loop.run(bounded()), _MARGIN_S)

    def _limited(self, verb: str, call: Callable[[], T], margin_s: float = 0.0) -> T:
        outcome: Future[T] = Future()
        caller = threading.Thread(target=_settle, args=(outcome, call), daemon=True)
        caller.start()
        try:
            return outcome.result(self._limits.of(verb) + margin_s)
        except FutureTimeout:
            if outcome.done():
                raise
            self._left_behind = True
            raise self._too_slow(verb) from None

    async def _bounded(self, verb: str, waiting: Callable[[], Coroutine[Any, Any, T]]) -> T:
        task = asyncio.create_task(waiting())
        await asyncio.wait({task}, timeout=self._limits.of(verb))
        if task.cancelled():  # not cancelled from here: the game has cancelled its own task
            raise game_failure(self.game_class.__name__, verb, asyncio.CancelledError())
        if task.done():
            return task.result()
        task.cancel()
        raise self._too_slow(verb)

    def _too_slow(self, verb: str) -> TooSlow:
        error = hung(self.game_class.__name__, verb, self._limits.of(verb))
        return TooSlow(error.message, hint=error.hint)


class LocalEpisode:
    """One episode with a player that waits for each answer."""

    def __init__(self, game: LocalGame, opening: Opening) -> None:
        """Start it: see `LocalGame.start`."""
        self._game = game
        self._name = opening.episode
        self._episodes = Episodes(game.game_class, game.config.kwargs)
        self.messages: list[ChatMessage] = game.call(
            "reset",
            lambda: self._episodes.reset(opening),
            lambda: self._episodes.reset_async(opening),
        )
        """Chat messages of the first prompt."""
        begun: Any = self._episodes.running(self._name)
        self.roles: tuple[str, ...] = begun.roles
        """The players of a game with several."""
        with blaming(lambda error: game_failure(type(begun).__name__, "max_return", error)):
            self.max_return = float(getattr(begun, "max_return", FULL_MARKS))
        """The best possible return."""
        self.results: list[StepResult] = []
        """The game's answers so far."""

    def turn(self) -> tuple[str, list[ChatMessage]]:
        """Return the role whose turn it is, and its first prompt if it has had none."""
        return self._episodes.turn(self._name)

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The tools of a running episode."""
        return check_tools(self._episodes.running(self._name))

    @property
    def done(self) -> bool:
        """Whether the game has ended."""
        return bool(self.results) and self.results[-1].done

    def step(self, action: str) -> StepResult:
        """Play one action. Raises GameError, TooSlow."""
        result = self._game.call(
            "step",
            lambda: self._episodes.step(self._name, action),
            lambda: self._episodes.step_async(self._name, action),
        )
        self.results.append(result)
        return result

    def gold_action(self) -> str:
        """Return the right answer now, as the game gives it."""
        return self._episodes.gold_action(self._name)

    def end(self) -> None:
        """End it, if it runs. Raises TooSlow for a game that does not close in time."""

        async def end() -> None:
            self._episodes.drop(self._name)

        if self._name in self._episodes:
            self._game.call("drop", lambda: self._episodes.drop(self._name), end)


def _settle(outcome: "Future[T]", call: Callable[[], T]) -> None:
    try:
        outcome.set_result(call())
    except BaseException as error:  # noqa: BLE001 - raised in the waiting thread
        outcome.set_exception(error)
