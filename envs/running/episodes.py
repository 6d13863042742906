"""The games of running episodes, in a worker thread or process.

Any exception of a game becomes a GameError with the end of the game's own traceback.
"""

import ast
import contextlib
import inspect
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import structlog

from ...schemas.config.job import EnvConfig
from ...schemas.env import Split
from ...schemas.wire.errors import GameError, NotFoundError, TinkermqError
from ...schemas.wire.foreign import blaming, blaming_awaited, shown
from ..dataset import Record, RowError
from ..game import (
    AbstractGame,
    ChatMessage,
    StepResult,
    check_result,
    check_role,
    check_roles,
    check_text,
    check_tools,
    game_failure,
)
from ..prompt import address, open_async_game, open_game, resolve
from ..tools import ToolGame, checked_tools

if TYPE_CHECKING:
    import asyncio


# Finds calls in a game's source that draw from the process-wide generator of `random`.
#
# The generator's state is no evidence, since other threads of a host change it, too.

DRAWS_HINT = (
    "episodes of one task begin differently by it, and a replay may not find them again: draw from "
    "self.rng; `tinkermq env check` tests it"
)
_OWN_STATE = frozenset({"Random", "SystemRandom", "getstate", "setstate"})
_MOST = 5
_TRIES = 5


def global_draws(game_class: type) -> list[str]:
    """Return where the class's module calls functions of `random`, at most five places.

    Other games of the module do not count. Empty without source code.
    """
    module = sys.modules.get(game_class.__module__)
    try:
        tree = _parsed(inspect.getsource(module or game_class))
    except (OSError, TypeError, SyntaxError):
        return []
    modules, functions = _names(tree)
    draws = [
        f"{ast.unparse(call.func)} in line {call.lineno}"
        for node in tree.body
        if not _is_other_game(getattr(module, getattr(node, "name", ""), None), game_class)
        for call in ast.walk(node)
        if isinstance(call, ast.Call) and _draws(call.func, modules, functions)
    ]
    return draws[:_MOST]


def _is_other_game(value: Any, game_class: type) -> bool:
    is_game = isinstance(value, type) and issubclass(value, AbstractGame)
    return is_game and not issubclass(game_class, value)


def _parsed(source: str) -> ast.Module:
    """Parse, and retry if another thread parses too: CPython 3.11 adds up their depths."""
    for _ in range(_TRIES):
        with contextlib.suppress(SystemError):
            return ast.parse(source)
    return ast.parse(source)


def _draws(called: ast.expr, modules: set[str], functions: set[str]) -> bool:
    match called:
        case ast.Attribute(value=ast.Name(id=name), attr=function):
            return name in modules and function not in _OWN_STATE
        case ast.Name(id=name):
            return name in functions
        case _:
            return False


def _names(tree: ast.Module) -> tuple[set[str], set[str]]:
    """Return the names under which a module has `random` and functions of it."""
    modules = {used for name, used in _imported(tree) if name == "random"}
    functions = {
        used
        for name, used in _imported(tree)
        if name.startswith("random.") and name.removeprefix("random.") not in _OWN_STATE
    }
    return modules, functions


def _imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield each imported object and its name: `random`, or `random.choice`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((name.name, name.asname or name.name) for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from (
                (f"{node.module}.{name.name}", name.asname or name.name) for name in node.names
            )


_log: structlog.stdlib.BoundLogger = structlog.get_logger()


@dataclass(frozen=True)
class Opening:
    """The start of an episode."""

    episode: str
    """Id of the episode."""
    seed: int
    """Seed of its random generator."""
    record: Record | None = None
    """Row of a dataset game."""
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])
    """Further arguments of the game's `reset`."""
    split: Split = "train"
    """The data that contains its task."""


class GameFacts(NamedTuple):
    """Facts that are the same for all episodes of a game."""

    name: str
    """Its name."""
    tools: list[dict[str, Any]]
    """The tools that its policy may call."""
    roles: list[str]
    """The names of its players; empty for a game with one player."""
    rewards_ends: bool = False
    """Whether an episode that a limit ends gets a last reward from `finish_early`."""
    environments: Mapping[str, list[dict[str, Any]]] = MappingProxyType({})
    """Tools by environment, where rows name one in their column `environment`."""

    def tools_of(self, record: Record | None) -> list[dict[str, Any]]:
        """Return the tools of an episode that plays a row."""
        name = record.columns.get("environment") if record is not None else None
        return self.environments.get(str(name), self.tools)


class _Held:
    """The game of one episode, in a block that plays it.

    It is closed after it was dropped, or a block failed, once no block plays it: in the thread of
    the last block, or else of `drop`.
    """

    __slots__ = ("_is_closed", "_is_dropped", "_lock", "_num_calls", "game")

    def __init__(self, game: AbstractGame) -> None:
        self.game = game
        self._num_calls = 0
        self._is_dropped = self._is_closed = False
        self._lock = threading.Lock()

    def __enter__(self) -> AbstractGame:
        with self._lock:
            self._num_calls += 1
        return self.game

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._leave(1, is_last=error is not None)

    def drop(self) -> None:
        """Let no further block play it."""
        self._leave(0, is_last=True)

    def _leave(self, num_calls: int, *, is_last: bool) -> None:
        with self._lock:
            self._num_calls -= num_calls
            self._is_dropped |= is_last
            if self._num_calls or not self._is_dropped or self._is_closed:
                return
            self._is_closed = True
        try:
            self.game.close()
        except Exception as error:  # noqa: BLE001 - a user's method; the episode is over
            failure = game_failure(type(self.game).__name__, "close", error)
            _log.warning("game_close_failed", error=failure.message, hint=failure.hint)


@dataclass
class _Turns:
    """The conversations of the roles of one game."""

    prompt: list[ChatMessage]
    """The first prompt of the first role."""
    addressed: set[str] = field(default_factory=set[str])
    """Roles that have had their first prompt."""
    observation: str = ""
    """The observation after the last action."""


class Episodes:
    """One game instance per running episode."""

    def __init__(self, game_class: type[AbstractGame], kwargs: dict[str, Any]) -> None:
        self._class = game_class
        self._kwargs = kwargs
        self._name = game_class.__name__
        self._games: dict[str, _Held] = {}
        self._turns: dict[str, _Turns] = {}

    def probe(self) -> GameFacts:
        """Make one instance as a trial; return the facts that all episodes share."""
        with self.trial() as game:
            if draws := global_draws(self._class):
                _log.warning(
                    "game_draws_from_random", game=self._name, where=draws, hint=DRAWS_HINT
                )
            with self._blaming("get_interaction_name"):
                name = check_text(game, "get_interaction_name", game.get_interaction_name())
            with self._blaming("get_tools"):
                tools = check_tools(game)
                if isinstance(game, ToolGame):
                    tools = checked_tools(tools, type(game).__name__)
                roles = check_roles(game)
                ends = not roles and type(game).finish_early is not AbstractGame.finish_early
                environments = game.tools_by_environment() if isinstance(game, ToolGame) else {}
                return GameFacts(name, tools, roles, ends, environments)

    @contextlib.contextmanager
    def trial(self) -> Iterator[AbstractGame]:
        """Make a game that plays no episode, for a block; raises GameError."""
        if inspect.iscoroutinefunction(self._class.close):
            raise GameError(
                f"close of {self._name} is async, and nothing awaits it",
                hint="write `def close(self)`, also in an async game",
            )
        held = _Held(self._make())
        try:
            yield held.game
        finally:
            held.drop()

    def reset(self, opening: Opening) -> list[ChatMessage]:
        """Make a game, reset it, and return the chat messages of its first prompt."""
        held = _Held(self._make())
        with held as game, blaming(lambda error: self._reset_failure(error, opening)):
            messages = _whose_turn(game, open_game(game, **_start(opening)))
            return self._begun(opening, held, messages)

    async def reset_async(self, opening: Opening) -> list[ChatMessage]:
        """Do the same with a game that may wait."""
        held = _Held(self._make())
        with held as game, blaming_awaited(lambda error: self._reset_failure(error, opening)):
            messages = _whose_turn(game, await open_async_game(game, **_start(opening)))
            return self._begun(opening, held, messages)

    def step(self, episode: str, action: str) -> StepResult:
        """Play one action; a game that fails or is done is dropped."""
        blame = blaming(lambda error: self._step_failure(error, episode))
        with self._held(episode) as game, blame:
            return self._after(episode, _played(game, game.step(action)))

    async def step_async(self, episode: str, action: str) -> StepResult:
        """Do the same with a game that may wait."""
        blame = blaming_awaited(lambda error: self._step_failure(error, episode))
        with self._held(episode) as game, blame:
            return self._after(episode, _played(game, await resolve(game.step(action))))

    def finish(self, episode: str) -> StepResult:
        """Return the last result of an episode that a limit ends; its game is dropped."""
        with self._held(episode) as game, self._blaming("finish_early"):
            result = check_result(game, game.finish_early())
            return self._after(episode, replace(result, done=True))

    async def finish_async(self, episode: str) -> StepResult:
        """Do the same with a game that may wait."""
        blame = blaming_awaited(lambda error: game_failure(self._name, "finish_early", error))
        with self._held(episode) as game, blame:
            result = check_result(game, await resolve(game.finish_early()))
            return self._after(episode, replace(result, done=True))

    def gold_action(self, episode: str) -> str:
        """Return the right answer to the present state, as the game gives it."""
        game: Any = self.running(episode)
        with self._blaming("gold_action"):
            return check_text(game, "gold_action", game.gold_action())

    def turn(self, episode: str) -> tuple[str, list[ChatMessage]]:
        """Return the role whose turn it is, with its first prompt if it has had none."""
        held, turns = self._games.get(episode), self._turns.get(episode)
        if held is None or turns is None:
            raise NotFoundError(f"episode {episode!r} has no running game with roles here")

        def blame(error: BaseException) -> TinkermqError:
            self.drop(episode)
            return game_failure(self._name, "the prompt of a role", error)

        with held as game, blaming(blame):
            role = check_role(game)
            if role in turns.addressed:
                return role, []
            first = not turns.addressed
            turns.addressed.add(role)
            return role, turns.prompt if first else address(game, turns.observation)

    def drop(self, episode: str) -> None:
        """Forget an episode, whether it runs or not, and close its game once nothing plays it."""
        held = self._games.pop(episode, None)
        self._turns.pop(episode, None)
        if held is not None:
            held.drop()

    def drop_all(self) -> None:
        """Forget all episodes."""
        for episode in list(self._games):
            self.drop(episode)

    def __contains__(self, episode: object) -> bool:
        """Return whether an episode runs."""
        return episode in self._games

    def __len__(self) -> int:
        """Return the number of running games."""
        return len(self._games)

    def running(self, episode: str) -> AbstractGame:
        """Return the game of a running episode; NotFoundError for another."""
        return self._held(episode).game

    def _held(self, episode: str) -> _Held:
        held = self._games.get(episode)
        if held is None:
            raise NotFoundError(f"episode {episode!r} has no running game here")
        return held

    def _begun(
        self, opening: Opening, held: _Held, messages: list[ChatMessage]
    ) -> list[ChatMessage]:
        self._games[opening.episode] = held
        if held.game.roles:
            self._turns[opening.episode] = _Turns(messages)
        return messages

    def _after(self, episode: str, result: StepResult) -> StepResult:
        if result.done:
            self.drop(episode)
        elif episode in self._turns:
            self._turns[episode].observation = result.observation
        return result

    def _blaming(self, method: str) -> AbstractContextManager[None]:
        """Convert an exception of the block, in this method of the game, into a GameError."""
        return blaming(lambda error: game_failure(self._name, method, error))

    def _make(self) -> AbstractGame:
        with self._blaming(f"__init__(**{shown(self._kwargs)})"):
            return self._class(**self._kwargs)

    def _step_failure(self, error: BaseException, episode: str) -> TinkermqError:
        self.drop(episode)
        return game_failure(self._name, "step", error)

    def _plays_rows(self) -> bool:
        """Return whether `reset` needs arguments that the game does not generate itself."""
        if self._class.generate_initial_state is not AbstractGame.generate_initial_state:
            return False
        parameters = list(inspect.signature(self._class.reset).parameters.values())[1:]
        variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        return any(
            parameter.default is parameter.empty and parameter.kind not in variadic
            for parameter in parameters
        )

    def _reset_failure(self, error: BaseException, opening: Opening) -> TinkermqError:
        failure = game_failure(self._name, "reset", error)
        if opening.record is None and isinstance(error, TypeError) and self._plays_rows():
            failure.hint = (
                "the episode has no row of a dataset: set env.train_data for a dataset game"
            )
        where = opening.record.where if opening.record is not None else ""
        if where and not isinstance(error, RowError):
            failure.message = f"{where}: {failure.message}"
        return failure


def is_async(game_class: type[AbstractGame]) -> bool:
    """Return whether a game's `reset` or `step` is a coroutine function."""
    return any(inspect.iscoroutinefunction(m) for m in (game_class.reset, game_class.step))


def refuse_async(game_class: type[AbstractGame]) -> None:
    """Raise GameError for an async game that should run in a process of its own."""
    if is_async(game_class):
        raise GameError(
            f"{game_class.__name__} is async, and isolation is process",
            hint="write reset and step without async, or set env.isolation=thread: the episodes "
            "of an async game share one event loop",
        )


def _played(game: AbstractGame, answer: Any) -> StepResult:
    """Return the result of `step`; GameError if it is malformed."""
    result = check_result(game, answer)
    if game.roles and not result.done:
        check_role(game)
    return result


def _whose_turn(game: AbstractGame, messages: list[ChatMessage]) -> list[ChatMessage]:
    """Return the first prompt; GameError if a game with roles does not name whose turn it is."""
    if game.roles:
        check_role(game)
    return messages


def _start(opening: Opening) -> dict[str, Any]:
    return {"seed": opening.seed, "record": opening.record, "kwargs": opening.kwargs}


# Time limits of a game's calls.
#
# A runner's `end_overdue` is called a few times a second. It abandons and replaces an overdue
# thread, kills a process, cancels a coroutine. The limit counts from the time at which the game
# began the call, not from the queueing.

LOOK_S = 0.1
"""Seconds between two checks for overdue calls."""
_OF_STEPS = frozenset({"step", "turn", "finish", "drop"})


class GameHung(GameError):
    """A call of a game exceeded its time limit."""


@dataclass
class TimedOut(StepResult):
    """The end of an episode whose last action took too long (`env.on_step_timeout`)."""


def end_of_hung(config: EnvConfig, error: GameHung) -> TimedOut:
    """Return the result of an action that hung; raises `error` for `retry`."""
    if config.on_step_timeout == "retry":
        raise error
    is_penalty = config.on_step_timeout == "penalty"
    return TimedOut("", config.step_timeout_reward if is_penalty else 0.0, done=True)


IMPORT_S = 300.0
"""Time limit of an import of a game's module, or of the package that it needs; a package of 300 MB
takes half a minute on a busy machine."""


class TimeLimits(NamedTuple):
    """Seconds that calls of a game may take."""

    reset_s: float
    """For a reset, and for making a game."""
    step_s: float
    """For a step and any other call of an episode."""

    def of(self, verb: str) -> float:
        """Return the limit of a kind of call."""
        if verb == "import":
            return max(IMPORT_S, self.reset_s)
        return self.step_s if verb in _OF_STEPS else self.reset_s


@dataclass
class Call:
    """One call of a game, and the future of its result."""

    verb: str
    episode: str
    limit_s: float
    future: "asyncio.Future[Any]"
    started: float | None = field(default=None, kw_only=True)
    """When the game began it, by the monotonic clock; None: it is queued."""

    @property
    def is_overdue(self) -> bool:
        """Whether it has exceeded its limit."""
        return self.started is not None and time.monotonic() - self.started >= self.limit_s

    def hung(self, game: str) -> GameHung:
        """Return the error that ends it."""
        return hung(game, self.verb, self.limit_s)


def hung(game: str, verb: str, limit_s: float) -> GameHung:
    """Return the error of a game that exceeded its time limit."""
    if verb == "import":
        return GameHung(
            f"the import of {game} did not end within {limit_s:g} s",
            hint="the machine or its disk may be slow, or the module waits for something",
        )
    key = "env.step_timeout_s" if verb in _OF_STEPS else "env.reset_timeout_s"
    return GameHung(
        f"{game} hung in {'__init__' if verb == 'start' else verb} for {limit_s:g} s",
        hint=f"fix the game, or raise {key} if it may take longer",
    )


def retrieve_error(future: "asyncio.Future[Any]") -> None:
    """Retrieve the error of a future that is not awaited, so that asyncio does not log it."""
    if not future.cancelled():
        future.exception()
