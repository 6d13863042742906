"""Check a game and its data without a model: what `tinkermq env check` runs.

Each check answers one question about the game; the ones after a failure that makes them
meaningless are left out.
"""

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from ..schemas.config import EnvConfig
from ..schemas.errors import GameError, TinkermqError
from ..schemas.images import plain_text
from .episodes import Episodes, Opening
from .game import AbstractGame, ChatMessage, StepResult
from .host_data import HostData
from .prompt import open_game
from .record import Record
from .registry import load_game
from .thread_runner import hung

T = TypeVar("T")
NUM_EPISODES = 8
MAX_TURNS = 100
MAX_PROMPT_CHARACTERS = 32_000
FULL_MARKS = 1.0
"""Best return of an episode, unless the class says another as `max_return`."""


@dataclass(frozen=True)
class CheckResult:
    """The answer to one question about a game."""

    name: str
    """What was asked."""
    ok: bool
    """Whether the answer is good."""
    detail: str
    """What was found."""
    hint: str = ""
    """What to do when it is not good."""


@dataclass(frozen=True)
class _Transcript:
    """An episode as a policy sees it."""

    messages: list[ChatMessage]
    results: list[StepResult]

    @property
    def total(self) -> float:
        return sum(result.reward for result in self.results)


class _Checker:
    def __init__(self, config: EnvConfig, game_class: type[AbstractGame], data: HostData) -> None:
        self.config = config
        self.game_class = game_class
        self.data = data

    def opening(self, number: int) -> Opening:
        return Opening(episode=f"check-{number}", seed=number, record=self._record(number))

    def _record(self, number: int) -> Record | None:
        if self.data.num_train is None:
            return None
        return self.data.record("train", number % self.data.num_train)

    def play(self, number: int, actions: list[str]) -> _Transcript:
        """Play given actions until the game is done or they are."""
        episodes = Episodes(self.game_class, self.config.kwargs)
        opening = self.opening(number)
        messages = self._limited("reset", lambda: episodes.reset(opening))
        results: list[StepResult] = []
        for action in actions:
            results.append(self._limited("step", partial(episodes.step, opening.episode, action)))
            if results[-1].done:
                break
        return _Transcript(messages, results)

    def probe(self) -> str:
        """Make one instance; return the game's name."""
        episodes = Episodes(self.game_class, self.config.kwargs)
        return self._limited("__init__", episodes.probe).name

    def _limited(self, verb: str, call: Callable[[], T]) -> T:
        """Call into the game, for as long as an environment host would wait for it."""
        step = verb == "step"
        limit_s = self.config.step_timeout_s if step else self.config.reset_timeout_s
        outcome: Future[T] = Future()
        caller = threading.Thread(target=_settle, args=(outcome, call), daemon=True)
        caller.start()
        try:
            return outcome.result(limit_s)
        except FutureTimeout:
            if outcome.done():
                raise
            raise hung(self.game_class.__name__, verb, limit_s) from None

    def types(self) -> str:
        """Reset and step return what they must."""
        for number in range(NUM_EPISODES):
            self.play(number, ["", "?", "0"])
        return f"{NUM_EPISODES} episodes, empty and senseless actions included"

    def seeds(self) -> str:
        """A seed reproduces an episode."""
        actions = ["0", "1", "2"]
        for number in range(NUM_EPISODES):
            first, second = (self.play(number, actions) for _ in range(2))
            if first != second:
                raise GameError(
                    f"seed {number} gave two different episodes: {_difference(first, second)}",
                    hint="draw every random number from self.rng, and none in __init__",
                )
        return f"{NUM_EPISODES} seeds, each twice"

    def global_generator(self) -> str:
        """The global random generators are left alone."""
        before = _global_states()
        for number in range(NUM_EPISODES):
            self.play(number, ["0", "1", "2"])
        touched = [name for name, state in _global_states().items() if state != before[name]]
        if touched:
            raise GameError(
                f"the game draws from {' and '.join(touched)}, which all episodes share",
                hint="draw from self.rng (random.Random) instead",
            )
        return "neither random nor numpy.random was used"

    def prompts(self) -> str:
        """First prompts are neither empty nor boundless."""
        lengths: list[int] = []
        for number in range(NUM_EPISODES):
            messages = self.play(number, []).messages
            lengths.append(sum(len(plain_text(message["content"])) for message in messages))
        if max(lengths) > MAX_PROMPT_CHARACTERS:
            raise GameError(
                f"a first prompt has {max(lengths):,} characters",
                hint="shorten it, or raise rollout.max_prompt_tokens to match",
            )
        return f"{min(lengths)} to {max(lengths)} characters"

    def gold(self) -> str:
        """Gold answers score full marks."""
        full = FULL_MARKS
        for number in range(NUM_EPISODES):
            total, full, solved = self._play_gold(number)
            if not (abs(total - full) <= 1e-6 if solved is None else solved):
                raise GameError(
                    f"the gold answers of episode {number} score {total:g}, full marks are "
                    f"{full:g}",
                    hint="correct gold_action or step, set max_return on the class, or say success "
                    "in the last step's info",
                )
        return f"{NUM_EPISODES} episodes score {full:g}"

    def _play_gold(self, number: int) -> tuple[float, float, bool | None]:
        """Return what right answers scored, full marks, and whether the game says it is solved."""
        opening = self.opening(number)
        game: Any = self.game_class(**self.config.kwargs)
        open_game(game, seed=opening.seed, record=opening.record, kwargs=opening.kwargs)
        total, full = 0.0, float(getattr(game, "max_return", FULL_MARKS))
        for _ in range(MAX_TURNS):
            result = self._limited("step", lambda: game.step(game.gold_action()))
            total += result.reward
            if result.done:
                return total, full, result.info.get("success")
        raise GameError(
            f"gold answers do not end episode {number} within {MAX_TURNS} turns",
            hint="let step say done",
        )


def check_game(
    config: EnvConfig, *, seed: int = 0, game_class: type[AbstractGame] | None = None
) -> list[CheckResult]:
    """Check the game and the data of a configuration; one result per question."""
    results: list[CheckResult] = []
    with contextlib.suppress(_Stop):
        found = game_class or _ask(results, "the game imports", lambda: load_game(config.game))
        data = _ask(results, "the data can be read", lambda: HostData(config, seed))
        with contextlib.closing(data):
            checker = _Checker(config, found, data)
            _ask(results, "the game can be made", checker.probe)
            for name, question in _questions(checker):
                _ask(results, name, question)
    return [_describe_data(result, config) for result in results]


def _settle(outcome: "Future[T]", call: Callable[[], T]) -> None:
    try:
        outcome.set_result(call())
    except BaseException as error:  # noqa: BLE001 - handed on to the thread that waits
        outcome.set_exception(error)


class _Stop(Exception):
    """What follows makes no sense after this failure."""


_FATAL = ("the game imports", "the data can be read", "the game can be made", "types are right")


def _questions(checker: _Checker) -> Iterator[tuple[str, Callable[[], str]]]:
    yield "types are right", checker.types
    yield "a seed reproduces an episode", checker.seeds
    yield "the global generator is not used", checker.global_generator
    yield "first prompts have a sane length", checker.prompts
    if hasattr(checker.game_class, "gold_action"):
        yield "gold answers score full marks", checker.gold


def _ask(results: list[CheckResult], name: str, question: Callable[[], Any]) -> Any:
    try:
        answer = question()
    except TinkermqError as error:
        results.append(CheckResult(name, ok=False, detail=error.message, hint=error.hint))
        if name in _FATAL:
            raise _Stop from error
        return None
    except Exception as error:  # noqa: BLE001 - the gold play calls the game itself
        results.append(CheckResult(name, ok=False, detail=f"{type(error).__name__}: {error}"))
        return None
    results.append(CheckResult(name, ok=True, detail=_detail(answer)))
    return answer


def _detail(answer: Any) -> str:
    if isinstance(answer, type):
        return f"{answer.__module__}:{answer.__qualname__}"
    return answer if isinstance(answer, str) else ""


def _describe_data(result: CheckResult, config: EnvConfig) -> CheckResult:
    if result.name != "the data can be read" or not result.ok:
        return result
    count = len(config.train_data) + len(config.val_data)
    detail = f"{count} file(s)" if count else "none: the game generates its states"
    return CheckResult(result.name, ok=True, detail=detail)


def _difference(first: _Transcript, second: _Transcript) -> str:
    if first.messages != second.messages:
        one, other = (plain_text(each.messages[-1]["content"]) for each in (first, second))
        return f"first prompts {one!r}, {other!r}"
    for turn, (one, other) in enumerate(zip(first.results, second.results, strict=False)):
        if one != other:
            return f"turn {turn} answered {one}, {other}"
    return "one ended earlier"


def _global_states() -> dict[str, Any]:
    import numpy

    return {
        "random": random.getstate(),
        "numpy.random": repr(numpy.random.get_state(legacy=False)),
    }
