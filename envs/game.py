"""The base class of games, with one instance per episode.

The method names follow OpenTinker's, so a game written for it runs here after changing its import.
The values that a game returns are checked once, here; a wrong type is a GameError with the game's
name.
"""

import contextlib
import inspect
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any, ClassVar, Literal, NoReturn, Self, cast

from ..schemas.wire.errors import GameError, MessageError, TinkermqError, root_cause
from ..schemas.wire.foreign import (
    clean_text,
    lines_of,
    plain_text,
    plain_value,
    shown,
    words_of,
)
from ..schemas.wire.message import MAX_CHARS
from .reasoning import behind_reasoning

ChatMessage = dict[str, Any]
"""One chat message: `role` and `content`."""


@dataclass
class StepResult:
    """The game's answer to one action."""

    observation: str
    """What the policy sees next."""
    reward: float
    """Reward of this turn."""
    done: bool
    """The episode has ended."""
    info: dict[str, Any] = field(default_factory=dict[str, Any])
    """Further plain values and arrays, which are sent in messages."""
    role: Literal["user", "tool"] = "user"
    """The speaker of the observation: the user, or a tool that the policy has called."""
    rewards: dict[str, float] = field(default_factory=dict[str, float], repr=False)
    """In a game with roles: further rewards by role; `reward` is the acting role's."""
    tool_results: list[str] = field(default_factory=list[str], repr=False)
    """The result of each call of a turn, in order; `role` is tool.

    The policy sees one message for each, and `observation` is all of them in one text.
    """

    def messages(self) -> list[ChatMessage]:
        """Return the next chat messages of the policy."""
        texts = self.tool_results or [self.observation]
        return [{"role": self.role, "content": text} for text in texts]


class AbstractGame(ABC):
    """A game that a language model plays: `reset`, `step` and the prompts.

    Each episode has an instance of its own. Draw every random number from `self.rng`: the host
    sets it to a generator seeded for this episode before it calls anything but the constructor,
    so that a seed reproduces an episode. Methods run in a worker thread or process, never on the
    host's event loop, and never two at a time for one instance. `reset` and `step` may be written
    with `async def`: all episodes of such a game wait together in one event loop of their own.
    """

    rng: random.Random
    """The episode's own random generator."""
    isolation: ClassVar[Literal["thread", "process"]] = "thread"
    """Where the game runs by default: `process` for a game that may crash, hang or use much memory.
    """
    named_arguments: ClassVar[tuple[str, ...]] = ()
    """Arguments that name objects to import, as `module:name` or a list of these; they are imported
    before the game is made, as its package is.
    """
    takes_rows: ClassVar[bool] = False
    """Whether `reset` gets all columns of a row of data, as a map `row`, and none by its name."""
    roles: tuple[str, ...] = ()
    """Names of the players; empty: a single-player game.

    Each role has its own conversation, prompt and rewards.
    """
    role: str = ""
    """In a game with roles: the role whose turn it is.

    `reset` and `step` set it; their observation, and the prompts, are for this role.
    """

    def __new__(cls, *_args: Any, **_kwargs: Any) -> Self:
        """Make an instance that has an `rng` even if its `__init__` does not call ours."""
        game = super().__new__(cls)
        game.rng = random.Random()  # noqa: S311 - a game's dice, not a secret
        return game

    @abstractmethod
    def reset(self, *args: Any, **kwargs: Any) -> str:
        """Start an episode and return the text of its first state.

        A dataset game gets `ground_truth`, `data_source` and `extra_info` of its row; a game
        that generates its states gets what `generate_initial_state` returned.
        """

    @abstractmethod
    def step(self, action: str) -> StepResult:
        """Play one action of the policy."""

    def get_system_prompt(self) -> str:
        """Return the system prompt; an empty text, or None, means none, as by default."""
        return ""

    def get_initial_user_message(self) -> str:
        """Return the text before the first state, by default none."""
        return ""

    def get_tools(self) -> list[dict[str, Any]]:
        """Return the tools that the policy may call, as OpenAI's function schemas; always the same.

        The model's chat template puts them into the first prompt; the calls come to `step` as the
        model writes them (`schemas/tool_calls.py` reads the form of Hermes and Qwen), and their
        results go back as observations with `role="tool"`.
        """
        return []

    def finish_early(self) -> StepResult:
        """Return the final reward of an episode that a limit on turns or tokens ends early.

        Only its reward and info count. By default the reward is 0: all rewards are those of turns.
        """
        return StepResult("", 0.0, done=True)

    def close(self) -> None:  # noqa: B027 - most games hold nothing
        """Give back what the episode holds: sessions, processes, files; by default nothing.

        Called once, as the last method, however an episode ends: done, failed, or given up; also
        after a `reset` that failed, and of an instance that was made to ask for its name and tools,
        without `reset`. Not async, and within the time limit of the call that ends it.
        """

    def complete_prompt(self, messages: list[ChatMessage], opening: str) -> list[ChatMessage]:
        """Return the prompt of a row of data, completed by the result of `reset`.

        By default it is the row's.
        """
        del opening
        return messages

    def generate_initial_state(self) -> dict[str, Any]:
        """Draw an initial state from `self.rng`: the arguments of `reset`."""
        return {}

    def render_state_for_prompt(self, **state: Any) -> str:
        """Return the text of an initial state; by default, reset to it."""
        return self.reset(**state)

    def get_user_message_with_state(self, **state: Any) -> str:
        """Return the whole first user message; by default, initial message and state."""
        return join_texts(self.get_initial_user_message(), self.render_state_for_prompt(**state))

    def get_state(self) -> dict[str, Any]:
        """Return the present state, for display."""
        return {}

    def get_interaction_name(self) -> str:
        """Return the game's name: the class name in lower case, without "game"."""
        return type(self).__name__.lower().replace("game", "") or "game"

    def parse_action(self, raw: str) -> str:
        """Return the action in a generated text; games call it themselves in `step`.

        By default it is the text after the reasoning.
        """
        return behind_reasoning(raw).strip()


def join_texts(*texts: str) -> str:
    """Join the texts that are not empty with a blank line."""
    return "\n\n".join(text for text in texts if text)


def check_text(game: AbstractGame, method: str, value: Any) -> str:
    """Return the result of `method` of `game` if it is a text that can be sent.

    Raises GameError for anything else.
    """
    if not isinstance(value, str):
        _refuse(game, method, value, "a str")
    with _travelling(game, method):
        return plain_text(value, method)


def check_map(game: AbstractGame, method: str, value: Any) -> dict[str, Any]:
    """Return the result of `method` of `game` if it is a dict, else raise GameError."""
    if not isinstance(value, dict):
        _refuse(game, method, value, "a dict")
    return cast("dict[str, Any]", value)


def check_result(game: AbstractGame, value: Any) -> StepResult:
    """Return the StepResult of a step with exact types, else raise GameError."""
    if not isinstance(value, StepResult):
        _refuse(game, "step", value, "a StepResult(observation, reward, done, info)")
    fields: Any = value  # its fields may hold any values of the game
    observation, reward, done, info = fields.observation, fields.reward, fields.done, fields.info
    observation = check_text(game, "step's observation", observation)
    if type(reward) is not float:
        reward = _number(game, "step's reward", reward)
    if not math.isfinite(reward):
        _refuse(game, "step's reward", reward, "a finite number")
    if type(done) is not bool:
        is_numpys = getattr(done, "dtype", None) == "bool" and done.shape == ()
        if not (isinstance(done, bool) or is_numpys):
            _refuse(game, "step's done", done, "a bool")
        done = bool(cast("bool", done))
    if not isinstance(fields.role, str) or fields.role not in ("user", "tool"):
        _refuse(game, "step's role", fields.role, "user or tool")
    results = _tool_results(game, fields) if fields.tool_results else []
    if results:
        observation = join_texts(*results)
    info = {} if info is None else check_plain_map(game, "step's info", info)
    rewards = {} if fields.rewards is None else _rewards(game, fields.rewards)
    role: Any = fields.role
    several = results if len(results) > 1 else []
    return StepResult(observation, reward, done, info, role, rewards, several)


def check_plain_map(game: AbstractGame, method: str, value: Any) -> dict[str, Any]:
    """Return the result of `method`, as a receiver reads it, if it is a dict that can be sent.

    Raises GameError that names an item that cannot be sent.
    """
    values = check_map(game, method, value)
    with _travelling(game, method):
        return plain_value(values, method) if values else {}


def check_role(game: AbstractGame) -> str:
    """Return the role whose turn it is, else raise GameError."""
    role: Any = game.role
    if not isinstance(role, str) or role not in game.roles:
        _refuse(game, "role", role, f"one of {', '.join(game.roles)}")
    return role


def check_roles(game: AbstractGame) -> list[str]:
    """Return the names of the game's players, else raise GameError."""
    roles: Any = game.roles
    if not isinstance(roles, tuple | list):
        _refuse(game, "roles", roles, "a tuple of texts")
    return [check_text(game, "roles", role) for role in cast("list[Any]", roles)]


def _tool_results(game: AbstractGame, fields: Any) -> list[str]:
    value: Any = fields.tool_results
    if fields.role != "tool" or not isinstance(value, list):
        _refuse(game, "step's tool_results", value, 'a list of texts, role "tool"')
    results = cast("list[Any]", value)
    return [check_text(game, "step's tool_results", result) for result in results]


def _rewards(game: AbstractGame, value: Any) -> dict[str, float]:
    values = check_map(game, "step's rewards", value)
    rewards = {role: _number(game, "step's rewards", reward) for role, reward in values.items()}
    unknown = set(rewards) - set(game.roles)
    if unknown or not all(math.isfinite(reward) for reward in rewards.values()):
        _refuse(game, "step's rewards", value, f"finite numbers by role ({', '.join(game.roles)})")
    return rewards


def _number(game: AbstractGame, what: str, value: Any) -> float:
    if not isinstance(value, Real):  # NumPy's numbers are registered as such
        _refuse(game, what, value, "a number")
    try:
        return float(cast("float", value))
    except OverflowError:
        _refuse(game, what, value, "a number that a float can hold")


@contextlib.contextmanager
def _travelling(game: AbstractGame, what: str) -> Iterator[None]:
    """Raise GameError for a returned value that cannot be sent."""
    try:
        yield
    except MessageError as error:
        raise GameError(
            f"{type(game).__name__}.{what} cannot travel: {error.message}", hint=error.hint
        ) from error


def _refuse(game: AbstractGame, what: str, value: Any, expected: str) -> NoReturn:
    if inspect.iscoroutine(value):  # the coroutine will not be awaited
        value.close()
    raise GameError(
        f"{type(game).__name__}.{what} is {shown(value)} ({type(value).__name__}), it must be "
        f"{expected}",
        hint="correct what the game returns; `tinkermq env check` finds this without a model",
    )


def check_tools(game: AbstractGame) -> list[dict[str, Any]]:
    """Return the game's tools if they are function schemas, else raise GameError."""
    tools: Any = game.get_tools()
    for tool in cast("list[Any]", tools) if isinstance(tools, list) else [tools]:
        match tool:
            case {"function": {"name": str()}}:
                continue
            case _:
                _refuse(game, "get_tools", tool, '{"type": "function", "function": {…}}')
    with _travelling(game, "get_tools"):
        return cast("list[dict[str, Any]]", plain_value(tools, "get_tools"))


def game_failure(name: str, method: str, error: BaseException) -> TinkermqError:
    """Turn an exception of a game into a GameError with the end of its traceback.

    A TinkermqError is returned unchanged, since it has a hint.
    """
    ours = root_cause(error)
    if isinstance(ours, TinkermqError):
        ours.message, ours.hint = _cleaned(ours.message), _cleaned(ours.hint)
        return ours
    return GameError(
        f"{name} raised in {method}: {words_of(error)}\n{lines_of(error, _OUR_FILES)}",
        hint="the traceback is the game's own; "
        + _GIVEN.get(method.partition("(")[0], "`tinkermq env check` plays it without a model"),
    )


_GIVEN = {
    "__init__": "__init__ gets env.kwargs, or the key=value after the game on a command line",
    "reset": "reset gets the keys of generate_initial_state, or ground_truth, data_source and "
    "extra_info of a row: end its arguments with **_",
}
"""What the methods with arguments of the game's own are given."""


def _cleaned(text: object) -> str:
    return clean_text(text, MAX_CHARS)


_OUR_FILES = frozenset(
    str(Path(__file__).parent / name) for name in ("game.py", "prompt.py", "running/episodes.py")
)
