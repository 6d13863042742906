"""The episodes that clients of the OpenEnv protocol play on a game of ours.

A session plays one episode at a time; a client acts with the text of a whole turn, or calls one
tool of a game that has tools. What goes over the wire is built here, `openenv_server.py` carries
it. A call becomes the text that a policy would have written, so the game and its rewards are the
same for every trainer.
"""

import asyncio
import base64
import contextlib
import inspect
import json
import math
import re
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeAlias, cast
from uuid import uuid4

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from ..schemas.config.job import EnvConfig
from ..schemas.env import Split
from ..schemas.tool_calls import CLOSE, OPEN
from ..schemas.wire.errors import BusyError, ConfigError, NotFoundError, StateError
from ..schemas.wire.foreign import clean_text, shown
from ..schemas.wire.images import with_data_urls
from .data import HostData
from .dataset import Record
from .game import ChatMessage, StepResult
from .registry import load_game
from .reward_sources import EndpointSource
from .rewards import FunctionSource, Rewards
from .running.episodes import LOOK_S, GameFacts, Opening
from .running.runners import make_runner

MAX_TASKS = 256
"""Tasks in one answer."""
_SPLITS: Mapping[str, Split] = {"train": "train", "validation": "val"}
"""OpenEnv's names of ours."""
_MAX_SEED = 2**53

Answer: TypeAlias = dict[str, Any]
"""What a reset or a step is answered: `observation`, `reward`, `done` and `metadata`."""


class TextAction(BaseModel):
    """What the policy says in one turn, reasoning and tool calls included."""

    model_config = ConfigDict(extra="forbid")

    text: str = Field(
        validation_alias=AliasChoices("text", "action"), description="The policy's whole turn"
    )
    metadata: dict[str, Any] = Field(
        default_factory=dict[str, Any], description="Accepted from typed clients; not used"
    )


class ListToolsAction(BaseModel):
    """Ask for the tools; plays no turn."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["list_tools"]
    metadata: dict[str, Any] = Field(default_factory=dict[str, Any])


class CallToolAction(BaseModel):
    """Call one tool, which is a turn."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["call_tool"]
    tool_name: str = Field(min_length=1, max_length=256)
    arguments: dict[str, Any] = Field(default_factory=dict[str, Any])
    metadata: dict[str, Any] = Field(default_factory=dict[str, Any])


class GameObservation(BaseModel):
    """What the policy sees next."""

    text: str = Field(description="The newest message as text")
    role: Literal["user", "tool"] = Field(description="Who says it")
    messages: list[dict[str, Any]] = Field(
        description="Chat messages to append: after a reset the whole first prompt"
    )
    player: str = Field(default="", description="In a game for several: whose turn it is")
    rewards: dict[str, float] = Field(
        default_factory=dict[str, float],
        description="In a game for several: what each player gets on top",
    )
    done: bool = Field(default=False, description="The episode is over")
    reward: float | None = Field(default=None, description="Reward of the last action")
    metadata: dict[str, Any] = Field(
        default_factory=dict[str, Any], description="The game's info; the task, after a reset"
    )


class EpisodeState(BaseModel):
    """Where a session's episode stands."""

    episode_id: str | None = None
    step_count: int = Field(default=0, ge=0)
    seed: int | None = None
    split: str | None = None
    index: int | None = None
    episode_return: float = Field(default=0.0, description="Sum of the rewards so far")
    done: bool = False


class ResetParameters(BaseModel):
    """What a reset may say; further names are ignored, and named in the answer's metadata."""

    model_config = ConfigDict(extra="allow")

    seed: int | None = Field(default=None, ge=0, le=_MAX_SEED)
    episode_id: str | None = Field(default=None, max_length=255)
    split: str | None = Field(default=None, max_length=64)
    index: int | None = Field(default=None, ge=0)


class CapacityError(BusyError):
    """As many sessions are open as the server may have."""

    num_open: int = 0
    most: int = 0


class ActionError(ConfigError):
    """An action, or parameters of a reset, that do not fit the schema."""

    status: ClassVar[int] = 422
    details: tuple[dict[str, Any], ...] = ()
    """Pydantic's errors, without what was sent."""


class NoTaskError(NotFoundError):
    """A split or a task that the game does not have."""

    status: ClassVar[int] = 400


class NoTasksError(StateError):
    """The game draws its states: it has no tasks to list."""

    status: ClassVar[int] = 501


class ServedGame:
    """A game with its data and rewards, whose episodes run off the event loop."""

    def __init__(self, config: EnvConfig, *, seed: int = 0) -> None:
        """Prepare; `seed` decides which validation rows are used. Raises GameError, DataError."""
        if config.reward.source == "judge":
            raise ConfigError(
                "env.reward.source=judge asks a model of a pool, and a served game has no pool",
                hint="serve the game with its own rewards: env.reward.source=game",
            )
        self.config = config
        self.runner = make_runner(config)
        self.rewards = _rewards(config)
        self.data = HostData(config, seed)
        self.facts = GameFacts("", [], [])
        self.name = ""
        self.description = ""

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run episodes in this context. Raises GameError for a game that cannot be made."""
        try:
            async with self.rewards or contextlib.nullcontext():
                self.facts = await self.runner.start()
                if self.rewards is not None and self.facts.roles:
                    raise ConfigError(
                        "env.reward adds to games for one, and this one has several roles",
                        hint="serve it with its own rewards: env.reward.source=game",
                    )
                self.name, self.description = self._named()
                yield
        finally:
            await self.runner.stop()
            self.data.close()

    def _named(self) -> tuple[str, str]:
        game = self.config.game
        name = re.sub(r"[^\w.-]+", "-", self.facts.name if ":" in game else game) or "game"
        text = f"{name}, a game of tinkermq"
        if self.config.isolation != "process":  # one in processes may not be imported here
            text = (inspect.getdoc(load_game(game)) or text).partition("\n\n")[0]
        return name, text

    @property
    def has_tools(self) -> bool:
        """Whether a policy may call tools."""
        return bool(self.facts.tools or self.facts.environments)

    def tools(self, record: Record | None = None) -> list[dict[str, Any]]:
        """Return the tools of an episode on a row, as MCP names their parts."""
        functions = [tool["function"] for tool in self.facts.tools_of(record)]
        return [
            {
                "name": function["name"],
                "description": function.get("description", ""),
                "input_schema": function.get("parameters") or {"type": "object", "properties": {}},
            }
            for function in functions
        ]

    def schemas(self) -> dict[str, Any]:
        """Return the JSON schemas of actions, observations and states."""
        action = TextAction.model_json_schema()
        if self.has_tools:
            call = CallToolAction.model_json_schema()
            action = {"type": "object", "anyOf": [call, action]}
        observation = GameObservation.model_json_schema()
        return {
            "action": action,
            "observation": observation,
            "state": EpisodeState.model_json_schema(),
            "reset_observation": observation,
        }

    # Rows as tasks. A gold answer stays here: the game judges by it.

    def splits(self) -> list[dict[str, str]]:
        """Return the splits; NoTasksError for a game that draws its states."""
        names = [name for name, split in _SPLITS.items() if self._num_rows(split)]
        if not names:
            raise NoTasksError(
                f"{self.name} has no rows: it draws its states from a seed",
                hint="reset with a seed",
            )
        return [{"name": name, "type": name} for name in names]

    def num_tasks(self, split: str) -> int:
        """Return the number of tasks of a split."""
        known = [one["name"] for one in self.splits()]
        if split not in known:
            raise NoTaskError(
                f"there is no split {shown(split)}", hint=f"the splits are {', '.join(known)}"
            )
        return self._num_rows(_SPLITS[split])

    def task(self, split: str, index: int) -> dict[str, Any]:
        """Return one task; NoTaskError for one that is not there."""
        record = self._record(split, index)
        prompt = with_data_urls(record.messages()) if record.prompt else []
        return {
            "id": f"{split}-{index}",
            "split": split,
            "index": index,
            "data_source": record.data_source or self.facts.name,
            "prompt": prompt,
        }

    def tasks(self, split: str, start: int | None, stop: int | None) -> list[dict[str, Any]]:
        """Return the tasks of a slice; NoTaskError for more than `MAX_TASKS`."""
        numbers = range(*slice(start, stop).indices(self.num_tasks(split)))
        if len(numbers) > MAX_TASKS:
            raise NoTaskError(
                f"{len(numbers):,} tasks were asked for, at most {MAX_TASKS} come at once",
                hint="ask for a smaller range: start and stop",
            )
        return [self.task(split, number) for number in numbers]

    def opening(self, name: str, asked: ResetParameters) -> tuple[Opening, EpisodeState]:
        """Return what a reset starts from, and the state that it leads to."""
        seed = secrets.randbelow(2**31) if asked.seed is None else asked.seed
        split, index = asked.split, asked.index
        if split is None and index is None and not self.data.num_train:
            opening = Opening(name, seed)
            return opening, EpisodeState(episode_id=asked.episode_id or name, seed=seed)
        split = "train" if split is None else split
        index = seed % self.num_tasks(split) if index is None else index
        opening = Opening(name, seed, self._record(split, index), split=_SPLITS[split])
        episode = asked.episode_id or name
        return opening, EpisodeState(episode_id=episode, seed=seed, split=split, index=index)

    def _record(self, split: str, index: int) -> Record:
        num = self.num_tasks(split)
        if not 0 <= index < num:
            raise NoTaskError(
                f"there is no task {index} in {split}", hint=f"tasks are numbered 0 to {num - 1}"
            )
        return cast("Record", self.data.record(_SPLITS[split], index))

    def _num_rows(self, split: Split) -> int:
        if self.data.num_train is None:
            return 0
        return self.data.num_train if split == "train" else self.data.num_val


def _rewards(config: EnvConfig) -> Rewards | None:
    if config.reward.source == "function":
        return Rewards(config.reward, FunctionSource(config.reward, None))
    if config.reward.source == "endpoint":
        return Rewards(config.reward, EndpointSource(config.reward))
    return None


@dataclass
class EnvSession:
    """One client's episodes, one after the other."""

    game: ServedGame
    id: str = field(default_factory=lambda: str(uuid4()))
    state: EpisodeState = field(default_factory=EpisodeState)
    is_attached: bool = False
    """Whether a connection holds it: its end is the session's, no time limit is."""
    touched: float = field(default_factory=time.monotonic)
    """When it was last used."""
    _record: Record | None = None
    """The row of the episode."""
    _episode: str = ""
    """The running episode's name in the runner."""
    _one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The tools of the episode."""
        return self.game.tools(self._record)

    async def reset(self, parameters: Mapping[str, Any]) -> Answer:
        """Start an episode, in place of one that runs; return the first prompt."""
        asked = _checked(TypeAdapter(ResetParameters), parameters)
        async with self._one_at_a_time:
            return await self._reset(asked)

    async def act(self, action: Mapping[str, Any], parameters: Mapping[str, Any]) -> Answer:
        """Play one action. Before any reset, `parameters` start the episode."""
        if self.game.has_tools and action.get("type") == "list_tools":
            _checked(TypeAdapter(ListToolsAction), action)
            return _answer({"tools": self.tools, "metadata": {}}, None, done=False)
        if self.game.has_tools and action.get("type") == "call_tool":
            call = _checked(TypeAdapter(CallToolAction), action)
            return await self.call_tool(call.tool_name, call.arguments, parameters)
        text = _checked(TypeAdapter(TextAction), action).text
        async with self._one_at_a_time:
            result = await self._step(text, parameters)
            return await self._observed(result)

    async def call_tool(
        self, name: str, arguments: dict[str, Any], parameters: Mapping[str, Any]
    ) -> Answer:
        """Call a tool, which is a turn; the answer is that of OpenEnv's `call_tool`."""
        if self.state.episode_id is None:  # which tools there are, the row may say
            await self.reset(parameters)
        known = [tool["name"] for tool in self.tools]
        if name not in known:
            message = f"there is no tool {shown(name)}; the tools are {', '.join(known)}"
            error = {"error_type": "tool_not_found", "message": message}
            observation = {"tool_name": name, "result": None, "error": error, "metadata": {}}
            return _answer(observation, None, self.state.done)
        async with self._one_at_a_time:
            result = await self._step(written_call(name, arguments), parameters)
        metadata = _json_value(result.info)
        observation = {
            "tool_name": name,
            "result": tool_result(result.observation),
            "error": None,
            "metadata": metadata,
        }
        return _answer(observation, result.reward, result.done, metadata)

    def close(self) -> None:
        """End the episode that runs."""
        if self._episode:
            self.game.runner.drop(self._episode)
            if self.game.rewards is not None:
                self.game.rewards.forget(self._episode)
        self._episode = ""

    async def _reset(self, asked: ResetParameters) -> Answer:
        self.close()
        self.state = EpisodeState()
        opening, state = self.game.opening(uuid4().hex, asked)
        self._record = opening.record
        messages = await self.game.runner.reset(opening)
        self._episode, self.state = opening.episode, state
        if self.game.rewards is not None:
            self.game.rewards.begin(opening.episode, opening.record, messages)
        player = ""
        if self.game.facts.roles:
            player, messages = await self.game.runner.turn(opening.episode)
        metadata = state.model_dump(include={"episode_id", "seed", "split", "index"})
        if asked.model_extra:
            metadata["ignored"] = sorted(clean_text(name, 64) for name in asked.model_extra)
        observation = _observation(messages, "user", player)
        return _answer({**observation, "metadata": metadata}, None, done=False, metadata=metadata)

    async def _step(self, text: str, parameters: Mapping[str, Any]) -> StepResult:
        if self.state.done:
            raise StateError("the episode is over", hint="reset the session for another one")
        if self.state.episode_id is None:
            await self._reset(_checked(TypeAdapter(ResetParameters), parameters))
        if not self._episode:
            raise StateError("the episode has failed", hint="reset the session for another one")
        episode, playing = self._episode, self.game.runner.step(self._episode, text)
        if self.game.rewards is not None:
            playing = self.game.rewards.step(episode, text, playing)
        try:
            result = await playing
        except BaseException:
            self.close()
            raise
        self.state.step_count += 1
        self.state.episode_return += result.reward
        self.state.done = result.done
        if result.done:
            self.close()
        return result

    async def _observed(self, result: StepResult) -> Answer:
        messages, player = result.messages(), ""
        if self.game.facts.roles and not result.done:
            player, opening = await self.game.runner.turn(self._episode)
            messages = opening or messages
        observation = _observation(messages, result.role, player, result.rewards)
        metadata = _json_value(result.info)
        observation = {**observation, "text": result.observation, "metadata": metadata}
        return _answer(observation, result.reward, result.done, metadata)


def _checked(adapter: TypeAdapter[Any], value: Mapping[str, Any]) -> Any:
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=False, include_input=False)
        first = details[0]
        place = ".".join(map(str, first["loc"])) or "it"
        refused = ActionError(
            f"{clean_text(place, 100)}: {first['msg']}", hint="GET /schema has the fields"
        )
        refused.details = tuple(cast("list[dict[str, Any]]", details))
        raise refused from error


def written_call(name: str, arguments: dict[str, Any]) -> str:
    """Return the turn of a policy that makes this call; no text in it can end the tag."""
    call = json.dumps({"name": name, "arguments": arguments}).replace("<", "\\u003c")
    return f"{OPEN}{call}{CLOSE}"


def tool_result(text: str) -> dict[str, Any]:
    """Return a tool's answer as MCP's clients take it."""
    return {
        "content": [{"type": "text", "text": text}],
        "structured_content": None,
        "meta": None,
        "data": text,
        "is_error": False,
    }


def _observation(
    messages: list[ChatMessage], role: str, player: str, rewards: Mapping[str, float] | None = None
) -> dict[str, Any]:
    urls = with_data_urls(messages)
    newest = urls[-1]["content"] if urls else ""
    text = newest if isinstance(newest, str) else _texts(cast("list[Any]", newest))
    return {
        "text": text,
        "role": role,
        "messages": urls,
        "player": player,
        "rewards": dict(rewards or {}),
    }


def _texts(parts: list[Any]) -> str:
    """Return the texts of a message with images, which its `messages` have."""
    return "".join(str(part.get("text", "")) for part in parts if part.get("type") == "text")


def _answer(
    observation: dict[str, Any], reward: float | None, done: bool, metadata: Any = None
) -> Answer:
    answer: Answer = {"observation": observation, "reward": reward, "done": done}
    return {**answer, "metadata": metadata} if metadata else answer


def _json_value(value: Any) -> Any:
    """Return a value that travels, as JSON has it: bytes in base64, arrays as lists."""
    if isinstance(value, Mapping):
        items = cast("Mapping[str, Any]", value).items()
        return {str(key): _json_value(item) for key, item in items}
    if isinstance(value, list | tuple):
        return [_json_value(item) for item in cast("list[Any]", value)]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if hasattr(value, "tolist"):  # an array, or a number of NumPy's
        return _json_value(value.tolist())
    return value


class EnvSessions:
    """The open sessions of a served game, at most so many."""

    def __init__(self, game: ServedGame, *, most: int, idle_s: float) -> None:
        """One that no connection holds is closed when it is unused for `idle_s`."""
        self.game = game
        self.most = most
        self.idle_s = idle_s
        self._open: dict[str, EnvSession] = {}

    def __len__(self) -> int:
        """Return how many are open."""
        return len(self._open)

    def open(self) -> EnvSession:
        """Open one; CapacityError where there are as many as there may be."""
        if len(self._open) >= self.most:
            error = CapacityError(
                f"all {self.most} sessions are in use", hint="close one, or come again later"
            )
            error.num_open, error.most = len(self._open), self.most
            raise error
        session = EnvSession(self.game)
        self._open[session.id] = session
        return session

    def find(self, name: str) -> EnvSession:
        """Return an open session; NotFoundError for another."""
        session = self._open.get(name)
        if session is None:
            raise NotFoundError(f"there is no session {shown(name)}", hint="open a new one")
        session.touched = time.monotonic()
        return session

    def attach(self, name: str) -> EnvSession:
        """Give an open session to a connection; StateError if another one has it."""
        session = self.find(name)
        if session.is_attached:
            raise StateError(f"session {session.id} is held by another connection")
        session.is_attached = True
        return session

    def close(self, session: EnvSession) -> None:
        """Close a session, open or not."""
        self._open.pop(session.id, None)
        session.close()

    async def watch(self) -> None:
        """End calls of the game that take too long, and close idle sessions, for ever."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.game.runner.end_overdue()
            now = time.monotonic()
            for session in list(self._open.values()):
                if not session.is_attached and now - session.touched > self.idle_s:
                    self.close(session)
