"""Serve a game as an OpenEnv environment, with the server of the package `openenv`.

A session plays one episode at a time; a client acts with the text of a whole turn, or calls one
tool of a game that has tools. A call becomes the text that a policy would have written, so the game
and its rewards are the same for every trainer.
"""

# pyright: reportMissingImports=false, reportUntypedBaseClass=false
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false

import asyncio
import base64
import contextlib
import functools
import inspect
import json
import math
import re
import secrets
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar, Literal, cast
from urllib.parse import urlsplit
from uuid import uuid4

from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
)

from ..schemas.config.job import EnvConfig
from ..schemas.env import Split
from ..schemas.http_server import listening_socket
from ..schemas.tool_calls import CLOSE, OPEN
from ..schemas.version import VERSION
from ..schemas.wire.errors import (
    ConfigError,
    NotFoundError,
    StateError,
    TinkermqError,
)
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

try:
    import uvicorn
    from openenv.core.env_server import interfaces, mcp_types, types
    from openenv.core.env_server.http_server import create_fastapi_app
    from starlette.requests import Request
    from starlette.responses import JSONResponse
except ImportError as error:
    raise ConfigError(
        f"games are served with the package openenv, which cannot be imported: {error}",
        hint="pip install 'tinkermq[openenv-server]', in an environment of its own: it installs "
        "gradio and fastmcp",
    ) from error

MAX_TASKS = 256
"""Tasks in one answer."""
MAX_MESSAGE_BYTES = 4 << 20
"""Largest message on a WebSocket."""
_SPLITS: Mapping[str, Split] = {"train": "train", "validation": "val"}
"""OpenEnv's names of our splits."""
_MAX_SEED = 2**53
_STOP_S = 1


class TextAction(types.Action):
    """The policy's whole turn, reasoning and tool calls included."""

    text: str = Field(
        validation_alias=AliasChoices("text", "action"), description="The policy's whole turn"
    )


class ToolAction(types.Action):
    """An action in a game with tools: a whole turn, a call, or a request for the tools."""

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Any:
        """Validate an action as one of the three."""
        kinds = {"call_tool": mcp_types.CallToolAction, "list_tools": mcp_types.ListToolsAction}
        return kinds.get(obj.get("type"), TextAction).model_validate(obj, **options)

    @classmethod
    def model_json_schema(cls, *args: Any, **options: Any) -> dict[str, Any]:
        """Return the schemas of a call and of a turn."""
        schemas = (mcp_types.CallToolAction.model_json_schema(), TextAction.model_json_schema())
        return {"type": "object", "anyOf": list(schemas)}


class GameObservation(types.Observation):
    """The next input of the policy."""

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


class EpisodeState(types.State):
    """The state of a session's episode."""

    seed: int | None = None
    split: str | None = None
    index: int | None = None
    episode_return: float = Field(default=0.0, description="Sum of the rewards so far")
    done: bool = False


class ResetParameters(BaseModel):
    """Parameters of a reset; others are ignored and named in the answer's metadata."""

    model_config = ConfigDict(extra="allow")

    seed: int | None = Field(default=None, ge=0, le=_MAX_SEED)
    episode_id: str | None = Field(default=None, max_length=255)
    split: str | None = Field(default=None, max_length=64)
    index: int | None = Field(default=None, ge=0)


class NoTaskError(NotFoundError):
    """A split or a task that the game does not have."""

    status: ClassVar[int] = 400


class ServedGame:
    """A game with its data and rewards, whose episodes run off the event loop."""

    def __init__(self, config: EnvConfig, *, seed: int = 0) -> None:
        """Prepare; `seed` selects the validation rows. Raises GameError, DataError."""
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
        self.loop: asyncio.AbstractEventLoop | None = None
        """The event loop that the episodes run on."""

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run episodes in this context; raises GameError for a game that cannot be made."""
        try:
            async with self.rewards or contextlib.nullcontext():
                self.facts = await self.runner.start()
                if self.rewards is not None and self.facts.roles:
                    raise ConfigError(
                        "env.reward adds to games for one, and this one has several roles",
                        hint="serve it with its own rewards: env.reward.source=game",
                    )
                self.name, self.description = self._named()
                self.loop = asyncio.get_running_loop()
                watching = asyncio.create_task(self._end_overdue(), name="end overdue episodes")
                try:
                    yield
                finally:
                    watching.cancel()
        finally:
            await self.runner.stop()
            self.data.close()

    async def _end_overdue(self) -> None:
        """End calls of the game that take too long; runs until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.runner.end_overdue()

    def _named(self) -> tuple[str, str]:
        game = self.config.game
        name = re.sub(r"[^\w.-]+", "-", self.facts.name if ":" in game else game) or "game"
        text = f"{name}, a game of tinkermq"
        if self.config.isolation != "process":  # a game in processes may not be importable here
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

    # Rows as tasks. Gold answers are not sent: the game itself judges answers.

    def splits(self) -> list[dict[str, str]]:
        """Return the splits; none for a game that generates its states."""
        names = [name for name, split in _SPLITS.items() if self._num_rows(split)]
        return [{"name": name, "type": name} for name in names]

    def num_tasks(self, split: str) -> int:
        """Return the number of tasks of a split."""
        known = [entry["name"] for entry in self.splits()]
        if split not in known:
            hint = f"the splits are {', '.join(known)}" if known else "reset it with a seed"
            raise NoTaskError(f"{self.name} has no split {shown(split)}", hint=hint)
        return self._num_rows(_SPLITS[split])

    def task(self, split: str, index: int) -> dict[str, Any]:
        """Return one task; NoTaskError for one that does not exist."""
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

    def opening(self, name: str, parameters: ResetParameters) -> tuple[Opening, EpisodeState]:
        """Return the opening of an episode and its first state."""
        seed = secrets.randbelow(2**31) if parameters.seed is None else parameters.seed
        split, index = parameters.split, parameters.index
        episode_id = parameters.episode_id or name
        if split is None and index is None and not self.data.num_train:
            return Opening(name, seed), EpisodeState(episode_id=episode_id, seed=seed)
        split = "train" if split is None else split
        index = seed % self.num_tasks(split) if index is None else index
        opening = Opening(name, seed, self._record(split, index), split=_SPLITS[split])
        return opening, EpisodeState(episode_id=episode_id, seed=seed, split=split, index=index)

    def drop(self, episode: str) -> None:
        """End an episode."""
        self.runner.drop(episode)
        if self.rewards is not None:
            self.rewards.forget(episode)

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


class ServedEnvironment(interfaces.Environment):
    """One client's episodes, one after the other."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, game: ServedGame) -> None:
        """Prepare to play episodes of `game`."""
        super().__init__()
        self._game = game
        self._state = EpisodeState()
        self._record: Record | None = None
        """The row of the episode."""
        self._episode = ""
        """The running episode's name in the runner."""
        self._lock = asyncio.Lock()
        if game.has_tools:
            self.mcp_server = _Tools(self)

    @property
    def state(self) -> EpisodeState:
        """The state of the episode."""
        return self._state

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The tools of the episode."""
        return self._game.tools(self._record)

    def list_splits(self) -> list[dict[str, str]]:
        """Return the splits; NotImplementedError for a game without rows."""
        splits = self._game.splits()
        if not splits:
            raise NotImplementedError
        return splits

    def list_tasks(self, split: str) -> list[dict[str, Any]]:
        """Return the first tasks of a split."""
        return self._game.tasks(split, 0, MAX_TASKS)

    def num_tasks(self, split: str) -> int:
        """Return the number of tasks of a split."""
        return self._game.num_tasks(split)

    def get_task(self, split: str, index: int) -> dict[str, Any]:
        """Return one task."""
        return self._game.task(split, index)

    def get_task_range(self, split: str, start: int | None, stop: int | None) -> list[Any]:
        """Return the tasks of a slice."""
        return self._game.tasks(split, start, stop)

    def get_metadata(self) -> Any:
        """Return name and description of the game."""
        return types.EnvironmentMetadata(
            name=self._game.name,
            description=self._game.description,
            version=VERSION,
        )

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any
    ) -> GameObservation:
        """Unused: the server awaits `reset_async`."""
        raise NotImplementedError

    def step(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> GameObservation:
        """Unused: the server awaits `step_async`."""
        raise NotImplementedError

    async def reset_async(
        self, seed: int | None = None, episode_id: str | None = None, **parameters: Any
    ) -> GameObservation:
        """Start an episode, which ends a running one; return the first prompt."""
        async with self._lock:
            return await self._reset({"seed": seed, "episode_id": episode_id, **parameters})

    async def step_async(
        self, action: Any, timeout_s: float | None = None, **parameters: Any
    ) -> Any:
        """Play one action. Before the first reset, `parameters` start the episode."""
        del timeout_s  # the game has limits of its own
        if isinstance(action, mcp_types.ListToolsAction):
            tools = [mcp_types.Tool(**tool) for tool in self.tools]
            return mcp_types.ListToolsObservation(tools=tools)
        async with self._lock:
            if self._state.episode_id is None:  # the tools may depend on the row
                await self._reset(parameters)
            if isinstance(action, mcp_types.CallToolAction):
                return await self._call_tool(action.tool_name, action.arguments)
            return await self._observed(await self._step(action.text))

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Call a tool, which is a turn; return the answer in MCP's form, with the reward."""
        async with self._lock:
            if self._state.episode_id is None:
                await self._reset({})
            called = await self._call_tool(name, arguments)
        meta = {"reward": called.reward, "done": called.done}
        return {**called.result, "isError": False, "meta": meta, "_meta": meta}

    def close(self) -> None:
        """End the episode that runs; called in any thread."""
        episode, self._episode = self._episode, ""
        if episode and self._game.loop is not None:
            self._game.loop.call_soon_threadsafe(self._game.drop, episode)

    async def _reset(self, parameters: Mapping[str, Any]) -> GameObservation:
        chosen = ResetParameters.model_validate(parameters)
        self.close()
        self._state = EpisodeState()
        game = self._game
        opening, state = game.opening(uuid4().hex, chosen)
        self._record = opening.record
        messages = await game.runner.reset(opening)
        self._episode, self._state = opening.episode, state
        if game.rewards is not None:
            game.rewards.begin(opening.episode, opening.record, messages)
        player = ""
        if game.facts.roles:
            player, messages = await game.runner.turn(opening.episode)
        metadata = state.model_dump(include={"episode_id", "seed", "split", "index"})
        if chosen.model_extra:
            metadata["ignored"] = sorted(clean_text(name, 64) for name in chosen.model_extra)
        return _observation(messages, player=player, metadata=metadata)

    async def _step(self, text: str) -> StepResult:
        if self._state.done:
            raise StateError("the episode is over", hint="reset the session for another one")
        if not self._episode:
            raise StateError("the episode has failed", hint="reset the session for another one")
        game, episode = self._game, self._episode
        playing = game.runner.step(episode, text)
        if game.rewards is not None:
            playing = game.rewards.step(episode, text, playing)
        try:
            result = await playing
        except BaseException:
            self.close()
            raise
        self._state.step_count += 1
        self._state.episode_return += result.reward
        self._state.done = result.done
        if result.done:
            self.close()
        return result

    async def _call_tool(self, name: str, arguments: dict[str, Any]) -> Any:
        known = [tool["name"] for tool in self.tools]
        if name not in known:
            message = f"there is no tool {shown(name)}; the tools are {', '.join(known)}"
            error = mcp_types.ToolError(error_type="tool_not_found", message=message)
            return mcp_types.CallToolObservation(tool_name=name, error=error, done=self._state.done)
        result = await self._step(written_call(name, arguments))
        return mcp_types.CallToolObservation(
            tool_name=name,
            result=tool_result(result.observation),
            reward=result.reward,
            done=result.done,
            metadata=_json_value(result.info),
        )

    async def _observed(self, result: StepResult) -> GameObservation:
        messages, player = result.messages(), ""
        if self._game.facts.roles and not result.done:
            player, opening = await self._game.runner.turn(self._episode)
            messages = opening or messages
        observation = _observation(messages, player=player, metadata=_json_value(result.info))
        return observation.model_copy(
            update={
                "text": result.observation,
                "role": result.role,
                "rewards": dict(result.rewards),
                "reward": result.reward,
                "done": result.done,
            }
        )


class _Tools:
    """The tools of an environment, in the form in which OpenEnv reads FastMCP's."""

    def __init__(self, environment: ServedEnvironment) -> None:
        self._environment = environment

    async def get_tools(self) -> dict[str, Any]:
        return {
            tool["name"]: SimpleNamespace(
                name=tool["name"],
                description=tool["description"],
                parameters=tool["input_schema"],
                fn=functools.partial(self._call, tool["name"]),
            )
            for tool in self._environment.tools
        }

    async def _call(self, tool: str, /, **arguments: Any) -> dict[str, Any]:
        return await self._environment.call_tool(tool, arguments)


def written_call(name: str, arguments: dict[str, Any]) -> str:
    """Return the turn of a policy that makes this call; no text in it can end the tag."""
    call = json.dumps({"name": name, "arguments": arguments}).replace("<", "\\u003c")
    return f"{OPEN}{call}{CLOSE}"


def tool_result(text: str) -> dict[str, Any]:
    """Return a tool's answer in the form of MCP's clients."""
    return {
        "content": [{"type": "text", "text": text}],
        "structured_content": None,
        "meta": None,
        "data": text,
        "is_error": False,
    }


def _observation(
    messages: list[ChatMessage], *, player: str, metadata: dict[str, Any]
) -> GameObservation:
    urls = with_data_urls(messages)
    newest = urls[-1]["content"] if urls else ""
    text = newest if isinstance(newest, str) else _texts(cast("list[Any]", newest))
    return GameObservation(text=text, role="user", messages=urls, player=player, metadata=metadata)


def _texts(parts: list[Any]) -> str:
    """Return the texts of a message with images, which its `messages` have."""
    return "".join(str(part.get("text", "")) for part in parts if part.get("type") == "text")


def _json_value(value: Any) -> Any:
    """Return a value as JSON: bytes in base64, arrays as lists."""
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


# -- the server ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ServerBounds:
    """Limits of a served game's clients."""

    max_sessions: int = 64
    """Sessions at once; OpenEnv's `max_concurrent_envs`."""
    idle_s: float = 600.0
    """A session without a connection that is not used for so long is closed."""


class OpenEnvServer:
    """One game, served until stopped."""

    def __init__(
        self, config: EnvConfig, *, seed: int = 0, bounds: ServerBounds | None = None
    ) -> None:
        """Prepare to serve `config.game`. Raises GameError, DataError, ConfigError."""
        self.bounds = bounds or ServerBounds()
        self.game = ServedGame(config, seed=seed)

    @contextlib.asynccontextmanager
    async def listening(self, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[int]:
        """Serve in this context; yield the port. Raises StorageError for one in use."""
        async with self.game.running():
            with contextlib.closing(listening_socket(host, port)) as listening:
                config = uvicorn.Config(
                    self.application(),
                    log_config=None,
                    ws_max_size=MAX_MESSAGE_BYTES,
                    timeout_graceful_shutdown=_STOP_S,
                )
                server = _Server(config)
                serving = asyncio.create_task(server.serve(sockets=[listening]), name="openenv")
                try:
                    yield int(listening.getsockname()[1])
                finally:
                    server.should_exit = True
                    await serving

    def application(self) -> Any:
        """Return the ASGI application; the game must run."""
        app = create_fastapi_app(
            functools.partial(ServedEnvironment, self.game),
            ToolAction if self.game.has_tools else TextAction,
            GameObservation,
            concurrency_config=types.ConcurrencyConfig(
                max_concurrent_envs=self.bounds.max_sessions, session_timeout=self.bounds.idle_s
            ),
            env_name=self.game.name,
            state_cls=EpisodeState,
            mode="simulation",
        )
        for kind in (TinkermqError, ValidationError):
            app.add_exception_handler(kind, _answer_error)
        app.add_middleware(_SameSite)
        return app


class _Server(uvicorn.Server):
    """uvicorn's server, without its signal handlers: the caller has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _SameSite:
    """Refuse requests that a browser sends for a page of another site."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = {name: value.decode("latin-1") for name, value in scope.get("headers", ())}
        origin = headers.get(b"origin")
        if origin is None or urlsplit(origin).netloc == headers.get(b"host"):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            detail = {"detail": "a page of another site may not play here"}
            await JSONResponse(detail, status_code=403)(scope, receive, send)


async def _answer_error(request: Request, error: Exception) -> JSONResponse:
    del request
    if not isinstance(error, TinkermqError):
        return JSONResponse({"detail": str(error)}, status_code=422)
    detail = f"{error.message}: {error.hint}" if error.hint else error.message
    return JSONResponse({"detail": detail}, status_code=error.status)
