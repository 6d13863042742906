"""Check a game and its data by playing it without a model (see `schemas/checks.py`)."""

import asyncio
import json
import math
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from typing import Any, cast

from ..schemas.checks import Check, CheckResult, CheckSkipped, failed_check, run_checks
from ..schemas.config.job import EnvConfig
from ..schemas.config.sections import check_judge_prompt
from ..schemas.env import Split
from ..schemas.tool_calls import CLOSE, OPEN
from ..schemas.wire.codec import pack
from ..schemas.wire.errors import GameError, TinkermqError, counted
from ..schemas.wire.foreign import clean_text, shown
from ..schemas.wire.images import plain_text
from .data import HostData
from .game import AbstractGame, ChatMessage, StepResult
from .registry import load_game
from .running.local import LocalEpisode, LocalGame, TooSlow
from .tools import ToolGame, example_of

NUM_EPISODES = 8
_NUM_FIRST = 4
"""Number of checks that are always made; the last of them plays."""
MAX_TURNS = 100
MAX_ROWS = 20_000
"""Rows of each split that are read."""
MAX_PROMPT_CHARACTERS = 32_000
SENSELESS = ("", "?", "0")
"""Actions of an untrained policy."""
_NOTABLE_SHARE = 0.1
_SHOWN = 160


@dataclass(frozen=True)
class PlayedEpisode:
    """The messages and tools of a played episode."""

    messages: list[ChatMessage]
    """Chat messages of the first prompt."""
    tools: list[dict[str, Any]]
    """Schemas of the tools that it offers."""
    actions: list[str]
    """The policy's answers, turn by turn."""
    results: list[StepResult]
    """The game's replies."""
    full: float
    """The highest possible return."""


@dataclass(frozen=True)
class Exchange:
    """The part of an episode that a tokenizer renders."""

    messages: list[ChatMessage]
    """Chat messages of the first prompt."""
    tools: list[dict[str, Any]]
    """Schemas of the tools that it offers."""
    actions: list[str]
    """The policy's answers."""
    observations: list[list[ChatMessage]]
    """The game's replies to them; the last one is not shown."""


def transcribe(game: LocalGame, number: int, actions: Sequence[str] | None) -> PlayedEpisode:
    """Play `actions`, or the gold ones, until the game is done or none is left."""
    episode = game.start(number)
    tools = episode.tools
    played: list[str] = []
    for action in _gold_actions(episode) if actions is None else actions:
        played.append(action)
        if episode.step(action).done:
            break
    return PlayedEpisode(episode.messages, tools, played, episode.results, episode.max_return)


def has_gold(game_class: type[AbstractGame]) -> bool:
    """Return whether a game knows the right action in each of its states."""
    return hasattr(game_class, "gold_action")


def _gold_actions(episode: LocalEpisode) -> Iterator[str]:
    for _ in range(MAX_TURNS):
        yield episode.gold_action()


class _Checker:
    """Opens a configuration's game and data, and plays them."""

    def __init__(
        self,
        config: EnvConfig,
        seed: int,
        game_class: type[AbstractGame] | None,
        stack: ExitStack,
        deadline: float,
    ) -> None:
        """Open nothing yet; `stack` closes opened games and data. See `_game_checks`."""
        self._deadline = deadline
        self._config = config
        self._seed = seed
        self._class = game_class
        self._stack = stack

    def imports(self) -> str:
        """The game can be imported."""
        self._class = self._class or load_game(self._config.game)
        return f"{self._class.__module__}:{self._class.__qualname__}"

    def data(self) -> str:
        """The data files can be opened."""
        assert self._class is not None
        data = self._stack.enter_context(closing(HostData(self._config, self._seed)))
        local = LocalGame(self._config, self._class, data)
        self.game = self._stack.enter_context(closing(local))
        count = len(self._config.train_data) + len(self._config.val_data)
        return counted(count, "file") if count else "none: the game generates its states"

    def limits(self) -> str:
        """Reset and step meet their time limits."""
        config = self.game.config
        num_calls, slowest_s = 0, 0.0
        for number in range(NUM_EPISODES):
            if num_calls and time.monotonic() > self._deadline:
                break
            for call in self._timed(number):
                num_calls, slowest_s = num_calls + 1, max(slowest_s, call)
        limit_s = min(config.reset_timeout_s, config.step_timeout_s)
        slow = (
            f"; the slowest took {slowest_s:.1f} s" if slowest_s > _NOTABLE_SHARE * limit_s else ""
        )
        return f"{num_calls} calls, none over {limit_s:g} s{slow}"

    def _timed(self, number: int) -> Iterator[float]:
        """Play an episode and yield the duration of each call; other checks report its errors."""
        try:
            start = time.monotonic()
            episode = self.game.start(number)
            yield time.monotonic() - start
            for action in SENSELESS:
                if not episode.done:
                    start = time.monotonic()
                    episode.step(action)
                    yield time.monotonic() - start
        except TooSlow:
            raise
        except TinkermqError:
            return

    def types(self) -> str:
        """Reset and step return values of the right types."""
        for number in range(NUM_EPISODES):
            transcribe(self.game, number, SENSELESS)
        return f"{NUM_EPISODES} episodes, empty and senseless actions included"

    def seeds(self) -> str:
        """A seed reproduces an episode."""
        for number in range(NUM_EPISODES):
            first, second = (transcribe(self.game, number, ["0", "1", "2"]) for _ in range(2))
            if not _is_same(first, second):
                raise GameError(
                    f"seed {number} gave two different episodes: {_difference(first, second)}",
                    hint="draw every random number from self.rng, and none in __init__",
                )
        return f"{NUM_EPISODES} seeds, each twice"

    def global_generator(self) -> str:
        """The global random generators are not used."""
        before = _global_states()
        for number in range(NUM_EPISODES):
            transcribe(self.game, number, ["0", "1", "2"])
        touched = [name for name, state in _global_states().items() if state != before[name]]
        if touched:
            raise GameError(
                f"the game draws from {' and '.join(touched)}, which all episodes share",
                hint="draw from self.rng (random.Random) instead",
            )
        return "neither random nor numpy.random was used"

    def prompts(self) -> str:
        """First prompts are neither empty nor too long."""
        lengths: list[int] = []
        for number in range(NUM_EPISODES):
            messages = self.game.start(number).messages
            lengths.append(sum(len(plain_text(message["content"])) for message in messages))
        if max(lengths) > MAX_PROMPT_CHARACTERS:
            raise GameError(
                f"a first prompt has {max(lengths):,} characters",
                hint="shorten it, or raise rollout.max_prompt_tokens to match",
            )
        return f"{min(lengths)} to {max(lengths)} characters"

    def tools(self) -> str:
        """The policy's tools are valid."""
        facts = self.game.facts()
        lines = [_signature(tool) for tool in facts.tools]
        for name, tools in facts.environments.items():
            lines += [f"{name}: {_signature(tool)}" for tool in tools]
        return "".join(f"\n       {line}" for line in lines)

    def described(self) -> str:
        """The environment describes its tasks and rewards."""
        topics = self.game.describe()
        source = self.game.config.reward.source
        if source != "game":
            topics["rewards"] = f"env.reward.source={source}; the game's: {topics['rewards']}"
        return "".join(f"\n       {name}: {text}" for name, text in topics.items())

    def scripted(self) -> str:
        """An episode can be played by a policy that calls each tool once and then answers."""
        episode, lines = self.game.start(0), list[str]()
        for tool in episode.tools:
            name, arguments = tool["function"]["name"], example_of(tool["function"]["parameters"])
            call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
            result = episode.step(f"{OPEN}{call}{CLOSE}")
            lines.append(f"{name}({json.dumps(arguments)}): {shown(result.observation)}")
            if result.done:
                break
        if not episode.done:
            lines.append(f"answer {shown(SENSELESS[1])}: {shown(episode.step('?').observation)}")
        total = sum(result.reward for result in episode.results)
        return "".join(f"\n       {line}" for line in [*lines, f"return {total:g}"])

    def rows(self) -> str:
        """The first rows can be read, up to a number of them."""
        data, checked = self.game.data, list[str]()
        counts: list[tuple[Split, int]] = [("train", data.num_train or 0)]
        if self.game.config.val_data:
            counts.append(("val", data.num_val))
        for split, count in counts:
            for number in range(min(count, MAX_ROWS)):
                record = data.record(split, number)
                if record is not None:
                    record.messages()
            some = f"the first {MAX_ROWS:,} of " if count > MAX_ROWS else ""
            checked += [f"{some}{count:,} of {split}"] if count else []
        return ", ".join(checked)

    def reward(self) -> str:
        """The reward function returns a finite number for played episodes."""
        actions = None if has_gold(self.game.game_class) else SENSELESS
        played = [transcribe(self.game, number, actions) for number in range(NUM_EPISODES)]
        with ThreadPoolExecutor(1) as thread:  # the caller may have an event loop
            return thread.submit(lambda: asyncio.run(self._rewarded(played))).result()

    async def _rewarded(self, played: Sequence[PlayedEpisode]) -> str:
        from .rewards import FunctionSource, Rewards

        config = self.game.config.reward
        returns: list[float] = []
        async with Rewards(config, FunctionSource(config, None)) as rewards:
            for number, episode in enumerate(played):
                row = number % self.game.data.num_train if self.game.data.num_train else None
                rewards.begin("tried", self.game.data.record("train", row), episode.messages)
                turns = [
                    await rewards.step("tried", action, _result(result))
                    for action, result in zip(episode.actions, episode.results, strict=True)
                ]
                if not turns or not turns[-1].done:
                    turns.append(await rewards.finish("tried"))
                returns.append(sum(turn.reward for turn in turns))
        return f"{len(played)} episodes earn {min(returns):g} to {max(returns):g}"

    def judge_prompt(self) -> str:
        """The judge's prompt asks for the format in which its score is read."""
        check_judge_prompt(self.game.config.reward)
        return "`Score: N` in its last line"

    def gold(self) -> str:
        """Gold answers score full marks."""
        played = [transcribe(self.game, number, None) for number in range(NUM_EPISODES)]
        for number, episode in enumerate(played):
            if not episode.results[-1].done:
                raise GameError(
                    f"gold answers do not end episode {number} within {MAX_TURNS} turns",
                    hint="let step say done",
                )
            total = sum(result.reward for result in episode.results)
            solved = episode.results[-1].info.get("success")
            if not (abs(total - episode.full) <= 1e-6 if solved is None else solved):
                raise GameError(
                    f"the gold answers of episode {number} score {total:g}, full marks are "
                    f"{episode.full:g}",
                    hint="correct gold_action or step, set max_return on the class, or say success "
                    "in the last step's info",
                )
        return f"{NUM_EPISODES} episodes score {played[-1].full:g}"


def check_game(
    config: EnvConfig,
    *,
    seed: int = 0,
    game_class: type[AbstractGame] | None = None,
    within_s: float = math.inf,
) -> list[CheckResult]:
    """Check the game and the data of a configuration.

    A game is played at least once; no further episode or check begins after `within_s`.
    """
    deadline = time.monotonic() + within_s
    results: list[CheckResult] = []
    with ExitStack() as stack:
        for result in run_checks(_game_checks(config, seed, stack, game_class, deadline)):
            results.append(result)
            if len(results) >= _NUM_FIRST and result.ok and time.monotonic() > deadline:
                late = CheckSkipped(f"not made: {within_s:g} s were over")
                return [*results, failed_check("its other checks", late)]
    return results


def _game_checks(
    config: EnvConfig,
    seed: int,
    stack: ExitStack,
    game_class: type[AbstractGame] | None,
    deadline: float,
) -> Iterator[Check]:
    """Yield the checks of a game; the first two import it and open its data without playing it.

    `stack` closes opened games and data. After `deadline`, by the monotonic clock, the first check
    that plays begins no further episode.
    """
    checker = _Checker(config, seed, game_class, stack, deadline)
    yield Check("the game imports", checker.imports, is_required=True)
    yield Check("the data can be read", checker.data, is_required=True)
    game = checker.game
    yield Check("the game can be made", game.probe, is_required=True)
    yield Check("reset and step are in time", checker.limits, is_required=True)
    yield Check("types are right", checker.types, is_required=True)
    yield Check("a seed reproduces an episode", checker.seeds)
    yield Check("the global generator is not used", checker.global_generator)
    if game.data.num_train is not None:
        yield Check("each row can be read", checker.rows)
    yield Check("first prompts have a sane length", checker.prompts)
    if issubclass(game.game_class, ToolGame):
        yield Check("the tools can be offered", checker.tools)
        yield Check("the environment says what it has", checker.described)
        yield Check("a scripted policy can play", checker.scripted)
    if config.reward.source == "function":
        yield Check("the reward function answers", checker.reward)
    if config.reward.source == "judge":
        yield Check("the judge's prompt demands a score", checker.judge_prompt)
    if has_gold(game.game_class):
        yield Check("gold answers score full marks", checker.gold)


def conversations(config: EnvConfig, *, seed: int = 0) -> list[Exchange]:
    """Play some episodes for a tokenizer, with the gold answers if there are any.

    Raises GameError, DataError.
    """
    game_class = load_game(config.game)
    with (
        closing(HostData(config, seed)) as data,
        closing(LocalGame(config, game_class, data)) as game,
    ):
        actions = None if has_gold(game_class) else SENSELESS
        played = [transcribe(game, number, actions) for number in range(NUM_EPISODES)]
    return [
        Exchange(
            episode.messages,
            episode.tools,
            episode.actions,
            [result.messages() for result in episode.results],
        )
        for episode in played
    ]


async def _result(result: StepResult) -> StepResult:
    """Return the game's answer as an awaitable, as a host does."""
    return result


def _signature(tool: dict[str, Any]) -> str:
    """Return a tool as one line: `add(value: integer, times?: integer)  Add a value.`"""
    function = tool["function"]
    parameters = function["parameters"]
    required = parameters.get("required", ())
    shown_parameters = [
        f"{name}{'' if name in required else '?'}: {_type_name(schema)}"
        for name, schema in parameters.get("properties", {}).items()
    ]
    about = function["description"].partition("\n")[0]
    return clean_text(f"{function['name']}({', '.join(shown_parameters)})  {about}", _SHOWN)


def _type_name(schema: Any) -> str:
    fields = cast("dict[str, Any]", schema) if isinstance(schema, dict) else {}
    if "enum" in fields:
        return "|".join(map(str, fields["enum"]))
    kind: Any = fields.get("type", "any")
    return "|".join(map(str, cast("list[Any]", kind))) if isinstance(kind, list) else str(kind)


def _is_same(first: PlayedEpisode | StepResult, second: PlayedEpisode | StepResult) -> bool:
    """Return whether both have the same bytes, since `==` fails for arrays and NaN."""
    return pack(asdict(first)) == pack(asdict(second))


def _difference(first: PlayedEpisode, second: PlayedEpisode) -> str:
    if first.messages != second.messages:
        prompts = [plain_text(episode.messages[-1]["content"]) for episode in (first, second)]
        return f"first prompts {prompts[0]!r}, {prompts[1]!r}"
    for turn, results in enumerate(zip(first.results, second.results, strict=False)):
        if not _is_same(*results):
            return f"turn {turn} answered {results[0]}, {results[1]}"
    return "one ended earlier"


def _global_states() -> dict[str, Any]:
    import numpy

    return {
        "random": random.getstate(),
        "numpy.random": repr(numpy.random.get_state(legacy=False)),
    }
