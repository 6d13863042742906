"""Environments of OpenEnv servers: a game whose tools, tasks and rewards are the environment's.

An MCP environment's tools are offered unchanged. Any other environment is one tool, `act`, with the
fields of its action, or takes the policy's text if the action is one text. Each episode has a
WebSocket session of its own (`openenv_client.py`). Its seed, and its task if the environment lists
tasks, follow from the seed or the row of the episode. Every reward is that of `step`.
"""

import asyncio
import contextlib
import functools
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import IO, Any, TypeVar, cast
from urllib.parse import quote, urlsplit

import httpx

from ...schemas.local.process import is_killed_from_outside, num_oom_kills
from ...schemas.wire.errors import GameError
from ...schemas.wire.foreign import shown, words_of
from ..game import StepResult
from ..tools import AsyncToolGame, ToolResult, bounded_text, checked_tools
from .openenv_client import (
    MAX_MESSAGE_BYTES,
    PROTOCOL,
    Access,
    ActionRefused,
    HttpRoutes,
    Observation,
    OpenEnvError,
    PooledSession,
    RemoteOpenEnv,
    Schemas,
    ServerAway,
    SessionPool,
    Split,
    needs,
    quoted,
)

TOOL = "act"
"""Name of the tool of an environment without tools of its own."""
_MOST_TASKS = 2**53
_MOST_URLS = 256
_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")
_NAME = re.compile(r"[^\w.-]+")
_MOST_NAME_CHARS = 64
T = TypeVar("T")


@dataclass(frozen=True)
class OpenEnvOptions:
    """`env.kwargs`; `OpenEnvGame` explains them."""

    urls: tuple[str, ...] = ()
    package: str = ""
    python: str = ""
    copies: int = 1
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    key_variable: str = ""
    reset: Mapping[str, Any] = field(default_factory=dict[str, Any])
    split: str = ""
    task_range: tuple[int, int] | None = None
    observation_field: str = ""
    wait_s: float = 25.0
    start_s: float = 25.0
    max_message_bytes: int = MAX_MESSAGE_BYTES


@dataclass(frozen=True)
class Facts:
    """Facts that are the same in all episodes of an environment."""

    name: str
    description: str
    tools: Sequence[dict[str, Any]]
    is_mcp: bool = False
    text_field: str = ""
    """The one field of an action that is a text; else empty."""
    split: str = ""
    """The played split; empty: the environment lists none."""
    tasks: range = range(0)
    """The numbers of its tasks."""


class OpenEnvGame(AsyncToolGame):
    """Play an environment of an OpenEnv server."""

    needs = needs

    def __init__(
        self,
        url: str | Sequence[str] = (),
        *,
        package: str = "",
        python: str = "",
        copies: int = 1,
        variables: Mapping[str, str] | None = None,
        key_variable: str = "",
        reset: Mapping[str, Any] | None = None,
        split: str = "",
        task_range: Sequence[int] | None = None,
        instructions: str = "",
        observation_field: str = "",
        wait_s: float = 25.0,
        start_s: float = 25.0,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        """Name the servers, or how to start them: by `url` or `package`.

        `url` may be a list of servers of the same environment. `package` is `module:app` for the
        interpreter `python`, by default this one. `copies` servers start with the environment
        variables `variables`, each within `start_s`. `key_variable` names the host's environment
        variable with the servers' key.

        `reset` has further arguments of the environment's reset. `split` and `task_range` select
        its tasks. `instructions` precede the first observation, in place of the environment's
        description. `observation_field` is the field of an observation that the policy reads, by
        default all. An episode waits up to `wait_s` for a session.
        """
        self.needs.load()
        options = OpenEnvOptions(
            _checked_urls([url] if isinstance(url, str) and url else url),
            package,
            python,
            copies,
            dict(variables or {}),
            key_variable,
            dict(reset or {}),
            split,
            _checked_range(task_range),
            observation_field,
            wait_s,
            start_s,
            max_message_bytes,
        )
        if bool(options.urls) == bool(package):
            raise GameError(
                "an OpenEnv environment is given by one of url and package",
                hint="set env.kwargs.url to the URL of a running server, for example",
            )
        self._options = options
        self._environment = _environment(options)
        self._instructions = instructions
        self._session: PooledSession | None = None
        self._task: int | None = None

    def generate_initial_state(self) -> dict[str, Any]:
        """Draw a seed, and a task if the environment has any."""
        tasks = self._environment.facts().tasks
        task = self.rng.choice(tasks) if tasks else None
        return {"seed": self.rng.getrandbits(31), "task": task}

    async def reset(  # pyright: ignore[reportIncompatibleMethodOverride]  # the host awaits it
        self,
        *,
        seed: int | None = None,
        task: int | None = None,
        extra_info: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> str:
        """Begin an episode on a session of its own and return the first observation.

        `extra_info` of a row has further arguments of the environment's reset.
        """
        facts = self._environment.facts()
        chosen = {} if task is None else {"split": facts.split, "index": task}
        drawn = self.rng.getrandbits(31) if seed is None else seed
        arguments = {"seed": drawn, **self._options.reset, **chosen, **(extra_info or {})}
        self._task = task
        self._session, opening = await self._environment.pool().open(arguments)
        if opening.done:
            raise GameError(f"{facts.name} was over before the policy's first turn")
        return self._show(opening)

    async def step(self, action: str) -> StepResult:
        """Play the policy's text or the tool calls in it."""
        text_field = self._environment.facts().text_field
        if not text_field:
            return await super().step(action)
        result = await self._play({text_field: self.parse_action(action)})
        info = {"type": self._environment.facts().name}
        return StepResult(result.text, result.reward, result.done, info)

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Call a tool of an MCP environment, or play an action."""
        if self._environment.facts().is_mcp:
            call = {"type": "call_tool", "tool_name": name, "arguments": arguments}
            return await self._play(call)
        return await self._play(arguments)

    def get_tools(self) -> list[dict[str, Any]]:
        """Return the environment's tools; before its first episode a game requests them anew."""
        return list(self._environment.facts(anew=self._session is None).tools)

    def describe(self) -> dict[str, str]:
        """Return the lines of `tinkermq env check` about the environment, by topic."""
        facts, options = self._environment.facts(), self._options
        of_split = f"{len(facts.tasks):,} of the split {quoted(facts.split)}"
        number = len(options.urls) or options.copies
        return {
            "tasks": of_split if facts.tasks else "the server lists none",
            "rewards": "those of the environment's steps",
            "sessions at once": f"as many as max_concurrent_envs of {number} server(s) says",
        }

    def get_initial_user_message(self) -> str:
        """Return the instructions, or else the environment's description."""
        return self._instructions or self._environment.facts().description

    def get_interaction_name(self) -> str:
        """Return the environment's name."""
        return self._environment.facts().name

    def get_state(self) -> dict[str, Any]:
        """Return the environment's name and the task's number."""
        return {"environment": self._environment.facts().name, "task": self._task}

    def close(self) -> None:
        """Give the session back."""
        if self._session is not None:
            self._session.close()

    async def _play(self, action: Mapping[str, Any]) -> ToolResult:
        assert self._session is not None
        try:
            answer = await self._session.step(action)
        except ActionRefused as refusal:
            text = f"Error: {_printable(refusal.reason)}"
            return ToolResult(bounded_text(text, self.max_result_chars))
        info = {"type": self._environment.facts().name}
        return ToolResult(self._show(answer), float(answer.reward or 0.0), answer.done, info)

    def _show(self, answer: Observation) -> str:
        text = text_of(answer.observation, self._options.observation_field)
        return bounded_text(_printable(text), self.max_result_chars)


# -- observations as texts -------------------------------------------------------------------------


def text_of(observation: Mapping[str, Any], name: str = "") -> str:
    """Return the policy's text of an observation: field `name`, a tool's result, or all fields.

    A single field is returned unchanged, several as JSON; metadata are left out.
    """
    if name:
        if name not in observation:
            raise GameError(
                f"the observation has no field {name!r}, it has {shown(list(observation))}",
                hint="correct env.kwargs.observation_field",
            )
        return _plain(observation[name])
    if "tool_name" in observation:
        return _text_of_result(observation)
    fields = {
        key: value
        for key, value in observation.items()
        if key not in ("metadata", "reward", "done") and value is not None
    }
    return _plain(next(iter(fields.values())) if len(fields) == 1 else fields or "")


def _text_of_result(observation: Mapping[str, Any]) -> str:
    match observation:
        case {"error": {"message": str(message)}}:
            return f"Error: {message}"
        case {"error": error} if error:
            return f"Error: {_plain(error)}"
        case {"result": {"content": list(), **result}}:
            text = "\n".join(map(_text_of_part, _list(observation["result"]["content"])))
            return f"Error: {text}" if result.get("is_error") is True else text
        case _:
            return _plain(observation.get("result", ""))


def _text_of_part(part: Any) -> str:
    match part:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": str(kind)}:
            return f"[{kind}]"
        case _:
            return _plain(part)


def _plain(value: Any) -> str:
    value = "" if value is None else value
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _printable(text: str) -> str:
    """Return a text without control characters of terminals."""
    text = text.replace("\r\n", "\n")
    return text if text.isprintable() else _CONTROL.sub("", _ESCAPE.sub("", text))


# -- facts about an environment --------------------------------------------------------------------


class Environment:
    """The servers of a configuration, and their facts."""

    def __init__(self, options: OpenEnvOptions) -> None:
        self._options = options
        self._access = Access(
            _headers(options.key_variable), options.max_message_bytes, is_own=not options.urls
        )
        self._started = _started(options)
        self._servers = [RemoteOpenEnv(url) for url in options.urls] or [
            RemoteOpenEnv(server.name, server.start) for server in self._started
        ]
        self._lock = threading.Lock()
        self._facts: Facts | None = None
        self._pools: dict[asyncio.AbstractEventLoop, SessionPool] = {}
        self._pools_lock = threading.Lock()

    def facts(self, *, anew: bool = False) -> Facts:
        """Return the facts of the servers, requested the first time and if `anew`; may block."""
        with self._lock:
            if self._facts is None or anew:
                self._facts = self._asked()
            return self._facts

    def pool(self) -> SessionPool:
        """Return the sessions of the running event loop."""
        loop = asyncio.get_running_loop()
        with self._pools_lock:
            if loop not in self._pools:
                servers = [RemoteOpenEnv(server.name, server.start) for server in self._servers]
                pool = SessionPool(servers, self._access, self._options.wait_s, self._ended)
                self._pools[loop] = pool
            return self._pools[loop]

    def _ended(self, ended: SessionPool) -> None:
        """End servers that were started here after the last event loop that uses them."""
        with self._pools_lock:
            self._pools = {loop: pool for loop, pool in self._pools.items() if pool is not ended}
            if not self._pools:
                for server in self._started:
                    server.stop()

    def _asked(self) -> Facts:
        """Send a request to the first reachable server."""
        failure: ServerAway | None = None
        for server in self._servers:
            url = server.start() if server.start else server.name
            try:
                return _apart(_read_facts(url, self._access, self._options))
            except ServerAway as error:
                failure = error
        assert failure is not None
        raise failure


_environments: dict[str, Environment] = {}
_environments_lock = threading.Lock()


def _environment(options: OpenEnvOptions) -> Environment:
    """Return the environment of a configuration: one for all episodes of this process."""
    key = json.dumps(asdict(options), sort_keys=True)
    with _environments_lock:
        if key not in _environments:
            _environments[key] = Environment(options)
        return _environments[key]


def _apart(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in a thread, since this one may run an event loop."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


async def _read_facts(url: str, access: Access, options: OpenEnvOptions) -> Facts:
    """Request a server's actions, tools and tasks."""
    async with HttpRoutes(url, access) as routes:
        return await _facts(routes, options)


async def _facts(routes: HttpRoutes, options: OpenEnvOptions) -> Facts:
    action = (await routes.read_as(Schemas, "/schema")).action
    name, description = await _names(routes)
    split, tasks = await _tasks(routes, name, options)
    facts = functools.partial(
        Facts, _NAME.sub("-", name)[:_MOST_NAME_CHARS] or "openenv", description
    )
    properties = {
        key: schema
        for key, schema in _mapping(action.get("properties")).items()
        if key != "metadata"
    }
    listed = await _mcp_tools(routes) if _may_be_mcp(properties) else None
    if listed is not None:
        tools = checked_tools(listed, routes.url)
        if not tools:
            raise OpenEnvError(f"the environment at {routes.url} offers no tool")
        return facts(tools, True, "", split, tasks)
    if len(properties) == 1 and _mapping(next(iter(properties.values()))).get("type") == "string":
        return facts([], False, next(iter(properties)), split, tasks)
    text = _text(action.pop("description", "")) or description
    tool = {"name": TOOL, "description": text, "parameters": {**action, "properties": properties}}
    return facts(checked_tools([tool], routes.url), False, "", split, tasks)


def _may_be_mcp(properties: Mapping[str, Any]) -> bool:
    """Return whether actions may be calls of tools."""
    kind = _mapping(properties.get("type")).get("const")
    return not properties or kind in ("call_tool", "list_tools")


async def _mcp_tools(routes: HttpRoutes) -> list[Any] | None:
    """Return the tools of an MCP environment; None for any other."""
    no_params: dict[str, Any] = {}
    request = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": no_params}
    answer = await routes.read("/mcp", request)
    match answer:
        case {"result": {"tools": list()}}:
            return [_function(tool) for tool in _list(answer["result"]["tools"])]
        case {"error": _}:
            return None
        case _:
            raise OpenEnvError(
                f"{routes.url}/mcp lists no tools: {shown(answer)}",
                hint=f"the versions that are known are {PROTOCOL}",
            )


def _function(tool: Any) -> Any:
    """Return an MCP tool as a function schema, unchecked."""
    fields = _mapping(tool)
    return {
        "name": fields.get("name"),
        "description": fields.get("description"),
        "parameters": fields.get("input_schema", fields.get("inputSchema")),
    }


async def _names(routes: HttpRoutes) -> tuple[str, str]:
    """Return the environment's name and description, or empty texts."""
    status, content = await routes.ask("/metadata")
    about = _mapping(routes.parse("/metadata", content)) if status == 200 else {}
    status, content = await routes.ask("/list_environments")
    listed = _list(routes.parse("/list_environments", content)) if status == 200 else []
    names = [name for name in listed if isinstance(name, str) and name]
    name = names[0] if names else _text(about.get("name"))
    return name, _printable(_text(about.get("description")))


async def _tasks(routes: HttpRoutes, name: str, options: OpenEnvOptions) -> tuple[str, range]:
    """Return the split to play and the numbers of its tasks; none without tasks."""
    status, content = await routes.ask(f"/{quote(name, safe='')}/splits")
    if status != 200:
        if options.split or options.task_range:
            raise GameError(
                f"the environment at {routes.url} lists no tasks (HTTP {status})",
                hint="leave env.kwargs.split and task_range out",
            )
        return "", range(0)
    listed = _list(routes.parse("/splits", content))
    splits = [routes.check(Split, "/splits", entry).name for entry in listed]
    split = options.split or ("train" if "train" in splits else "".join(splits[:1]))
    if split not in splits:
        raise GameError(
            f"the environment at {routes.url} has no split {split!r}, it has {shown(splits)}",
            hint="correct env.kwargs.split",
        )
    answer = await routes.read(f"/{quote(name, safe='')}/num_tasks", {"split": split})
    count = _mapping(answer).get("num_tasks")
    if type(count) is not int or not 0 < count < _MOST_TASKS:
        raise OpenEnvError(f"{routes.url} has {shown(count)} tasks in the split {quoted(split)}")
    tasks = range(count)[slice(*(options.task_range or (0, count)))]
    if not tasks:
        raise GameError(
            f"env.kwargs.task_range={list(options.task_range or ())} holds none of the {count} "
            f"tasks of the split {split!r}",
            hint="give [start, stop] within them",
        )
    return split, tasks


def _mapping(value: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else []


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


# -- arguments -------------------------------------------------------------------------------------


def _checked_urls(urls: Any) -> tuple[str, ...]:
    """Return base URLs with an HTTP scheme and without a last slash."""
    listed = list(cast("Sequence[Any]", urls)) if isinstance(urls, list | tuple) else [None]
    if len(listed) > _MOST_URLS:
        raise GameError(
            f"env.kwargs.url names {len(listed)} servers",
            hint=f"at most {_MOST_URLS} may be named",
        )
    return tuple(map(_checked_url, listed))


def _checked_url(url: Any) -> str:
    text = url if isinstance(url, str) else ""
    with contextlib.suppress(ValueError):  # a port that is not a number
        parts = urlsplit(text)
        scheme = {"ws": "http", "wss": "https"}.get(parts.scheme, parts.scheme)
        has_more = parts.username or parts.password or parts.query or parts.fragment
        if scheme in ("http", "https") and parts.hostname and parts.port != 0 and not has_more:
            return f"{scheme}://{parts.netloc}{parts.path.rstrip('/')}"
    raise GameError(
        f"env.kwargs.url={shown(url)} is not the URL of a server",
        hint="write http://HOST:PORT or https://HOST; a key goes into env.kwargs.key_variable",
    )


def _checked_range(bounds: Sequence[int] | None) -> tuple[int, int] | None:
    if bounds is None:
        return None
    match list(bounds):
        case [int(start), int(stop)] if 0 <= start < stop:
            return start, stop
        case _:
            raise GameError(
                f"env.kwargs.task_range={shown(bounds)} is not a range",
                hint="give [start, stop], the numbers of the first task and of the one behind the "
                "last",
            )


def _headers(key_variable: str) -> dict[str, str]:
    if not key_variable:
        return {}
    key = os.environ.get(key_variable)
    if not key:
        raise GameError(
            f"env.kwargs.key_variable={key_variable} is not set",
            hint="set it in the environment of the environment host",
        )
    return {"Authorization": f"Bearer {key}"}


# -- servers that are started here -----------------------------------------------------------------

_LOOK_S = 0.1
_MOST_LINES, _MOST_BYTES = 20, 1000
"""Characters of a server's output in a message."""
_PASSED = ("PATH", "LD_LIBRARY_PATH", "HOME", "LANG", "TMPDIR", "VIRTUAL_ENV")
_SERVE = """
import os, signal, sys, threading

def end_with_starter():
    os.read(0, 1)  # until the pipe is closed; sys.stdin's lock would be held at the end
    os.killpg(0, signal.SIGKILL)

threading.Thread(target=end_with_starter, daemon=True).start()
import uvicorn
uvicorn.run(sys.argv[1], host="127.0.0.1", port=int(sys.argv[2]), log_level="warning")
"""


@dataclass
class StartedProcess:
    """A running server, which ends when this process closes a pipe."""

    process: "subprocess.Popen[bytes]"
    url: str
    logged: Callable[[], str]
    """Returns the end of its output."""

    def is_there(self) -> bool:
        """Return whether it still runs, even if it answers slowly."""
        if self.process.poll() is not None:
            return False
        address = urlsplit(self.url)
        try:
            with socket.create_connection((address.hostname or "", address.port or 0), _LOOK_S):
                return True
        except ConnectionRefusedError:
            return False
        except OSError:
            return True

    def end(self) -> None:
        """End it, and wait for its end."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


class StartedServer:
    """A server that this process starts; it ends with this process, even a killed one."""

    def __init__(self, name: str, launch: Callable[[], StartedProcess], start_s: float) -> None:
        """Prepare a server, which must answer within `start_s`."""
        self.name = name
        self._launch = launch
        self._start_s = start_s
        self._lock = threading.Lock()
        self._running: StartedProcess | None = None

    def start(self) -> str:
        """Start it unless it runs; return its URL. Raises OpenEnvError."""
        with self._lock:
            deadline = time.monotonic() + self._start_s
            while self._running is None or not self._running.is_there():
                self._end()
                self._running = self._launch()
                self._wait(self._running, deadline)
            return self._running.url

    def stop(self) -> None:
        """End it, if it runs."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._running is not None:
            self._running.end()
            self._running = None

    def _wait(self, running: StartedProcess, deadline: float) -> None:
        """Wait until it answers or is killed from outside."""
        oom_kills = num_oom_kills()
        while running.process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(httpx.HTTPError):
                httpx.get(f"{running.url}/health", timeout=1.0, trust_env=False, verify=False)  # noqa: S501 - it is not TLS
                return
            time.sleep(_LOOK_S)
        if is_killed_from_outside(exit_code := running.process.poll(), oom_kills):
            return
        what = f"did not answer within {self._start_s:g} s" if exit_code is None else "ended"
        logged = running.logged()
        self._end()
        raise OpenEnvError(
            f"{self.name} {what} when it was started: {logged or 'it wrote nothing'}",
            hint="correct it, or raise env.kwargs.start_s and env.reset_timeout_s",
        )


def _started(options: OpenEnvOptions) -> list[StartedServer]:
    """Return the servers of a configuration that are started here, not yet started."""
    if not 1 <= options.copies <= _MOST_URLS:
        raise GameError(f"env.kwargs.copies={options.copies} is not between 1 and {_MOST_URLS}")
    if not options.package:
        return []
    launch = functools.partial(
        launch_package, options.package, options.python or sys.executable, options.variables
    )
    return [StartedServer(options.package, launch, options.start_s) for _ in range(options.copies)]


def launch_package(app: str, python: str, variables: Mapping[str, str]) -> StartedProcess:
    """Start `module:app` with uvicorn on a free port of the loopback interface.

    It runs as a child of this process without a sandbox of its own: the operator installed the
    package, like the packages of other games, and the sandbox of a hosted game also contains the
    child.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    passed = {name: os.environ[name] for name in _PASSED if name in os.environ}
    try:
        process = subprocess.Popen(
            [python, "-c", _SERVE, app, str(port)],
            env={**passed, **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        raise GameError(
            f"{app} cannot be started with env.kwargs.python={python}: {words_of(error)}",
            hint="give the path of a Python interpreter that has the environment's package",
        ) from error
    assert process.stdout is not None
    lines: deque[bytes] = deque(maxlen=_MOST_LINES)
    reader = threading.Thread(target=_keep_last, args=(process.stdout, lines), daemon=True)
    reader.start()

    def logged() -> str:
        if process.poll() is not None:
            reader.join(_LOOK_S)
        return _end_of(b"".join(lines))

    return StartedProcess(process, f"http://127.0.0.1:{port}", logged)


def _keep_last(output: IO[bytes], lines: "deque[bytes]") -> None:
    with output:
        while line := output.readline(_MOST_BYTES):
            lines.append(line)


def _end_of(output: bytes) -> str:
    """Return the end of a program's output as a literal."""
    text = output.decode(errors="replace").strip()
    return repr(text[-_MOST_BYTES:]) if text else ""
