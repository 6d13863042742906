"""The tools of MCP servers (Model Context Protocol) as a game.

    env:
      game: mcp
      kwargs:
        servers:
          - {name: files, command: "{python}", args: [-m, my_server], tools: [read_file]}
          - {name: search, url: "https://search.example/mcp", key_variable: SEARCH_KEY}
        allowed_hosts: [search.example]

Questions are rows of the data. The policy calls the servers' tools; a turn without a call is its
answer, which `env.reward` scores. Each episode has its own sessions with the servers, opened by the
first call that needs them; with `shared` all episodes of a host share one. Tools with the same name
at several servers are called `SERVER_TOOL`.
"""

import asyncio
import re
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

from pydantic import ValidationError

from ...schemas.wire.errors import ConfigError, GameError
from ...schemas.wire.foreign import shown
from ...schemas.wire.message import requirement
from ..game import StepResult, join_texts
from ..tools import AsyncToolGame, ToolResult, bounded_text, checked_tools
from .mcp_channels import CallRefused, GameServer, who
from .mcp_client import McpSession, close_all, connect

T = TypeVar("T")
MAX_SERVERS = 32
_NO_NAME = re.compile(r"[^A-Za-z0-9_-]")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


class McpGame(AsyncToolGame):
    """Answer a question with the tools of MCP servers."""

    def __init__(
        self,
        servers: Sequence[Mapping[str, Any]],
        allowed_hosts: Sequence[str] = (),
        system_prompt: str = "",
        max_result_chars: int = 16_000,
    ) -> None:
        """Read the settings of the servers; nothing starts yet.

        `allowed_hosts` are the hosts of servers' URLs, `system_prompt` precedes the configured
        resources and prompts of servers. Raises ConfigError.
        """
        self._servers = read_servers(servers, allowed_hosts)
        self._system_prompt = system_prompt
        self.max_result_chars = max_result_chars
        self._context = ""
        self._truth: Any = None
        self._num_failed = 0
        self._sessions: dict[int, McpSession] = {}

    def get_tools(self) -> list[dict[str, Any]]:
        """Return the tools of all servers; the first game of a process requests them.

        Raises GameError for a server that cannot be used, and for tools without a unique name.
        """
        return toolbox(self._servers).tools

    async def reset(self, *, ground_truth: Any, **_: Any) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]  # the host awaits it
        """Store the answer of a row, and read the configured resources and prompts of servers."""
        self._truth = ground_truth
        texts = [
            await self._named_texts(number, server)
            for number, server in enumerate(self._servers)
            if server.resources or server.prompts
        ]
        self._context = join_texts(*texts)
        return ""

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Call a tool at its server; a refusal becomes the result."""
        number, tool = toolbox(self._servers).owners[name]
        session = await self._session(number)
        text, failed = await session.call(tool, arguments)
        self._num_failed += failed
        return ToolResult(text or "(no output)", info={"failed_calls": self._num_failed})

    def answer(self, text: str) -> StepResult:
        """End the episode with the policy's answer, which `env.reward` scores."""
        del text
        return StepResult("", 0.0, done=True)

    def close(self) -> None:
        """End the episode's sessions; shared ones stay."""
        while self._sessions:
            _, session = self._sessions.popitem()
            if not session.is_shared:
                session.close_soon()

    def get_system_prompt(self) -> str:
        """Return the system prompt, with the servers' resources and prompts."""
        return join_texts(self._system_prompt, self._context)

    def get_state(self) -> dict[str, Any]:
        """Return the right answer, and the servers with a session."""
        names = [self._servers[number].name for number in self._sessions]
        return {"ground_truth": self._truth, "sessions": names}

    async def _session(self, number: int) -> McpSession:
        if number not in self._sessions:
            self._sessions[number] = await connect(self._servers[number])
        return self._sessions[number]

    async def _named_texts(self, number: int, server: GameServer) -> str:
        """Return the texts of the resources and prompts of a server."""
        session = await self._session(number)
        texts: list[str] = []
        try:
            for uri in server.resources:
                texts.append(f"{uri}\n{await session.resource(uri)}")
            for prompt in server.prompts:
                named: dict[str, Any] = {"name": prompt} if isinstance(prompt, str) else prompt
                texts.append(await session.prompt(named["name"], named.get("arguments", {})))
        except CallRefused as error:
            raise GameError(
                f"{who(server)} gave no resource or prompt: {error.message}",
                hint="see resources and prompts of the server",
            ) from error
        return join_texts(*(bounded_text(text, self.max_result_chars) for text in texts))


# -- settings --------------------------------------------------------------------------------------


def read_servers(
    servers: Sequence[Mapping[str, Any]], allowed_hosts: Sequence[str]
) -> list[GameServer]:
    """Read the settings of servers; ConfigError names the invalid key."""
    if not isinstance(servers, list | tuple) or not 0 < len(servers) <= MAX_SERVERS:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(
            f"env.kwargs.servers is {shown(servers)}",
            hint=f"list 1 to {MAX_SERVERS} servers, each with command or url",
        )
    read = [_read_server(server, number) for number, server in enumerate(servers)]
    names = Counter(server.name for server in read)
    if twice := [name for name, count in names.items() if count > 1]:
        raise ConfigError(
            f"several of env.kwargs.servers have the name {twice[0]}",
            hint="give each a name of its own",
        )
    for number, server in enumerate(read):
        host = _host(server.url)
        if server.url and host not in allowed_hosts:
            raise ConfigError(
                f"env.kwargs.servers[{number}].url names the host {host}, which is not allowed",
                hint=f"env.kwargs.allowed_hosts must list it: [{host}]",
            )
    return read


def _host(url: str) -> str:
    """Return the host of a URL; empty without one."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _read_server(values: Any, number: int) -> GameServer:
    place = f"env.kwargs.servers[{number}]"
    try:
        server = GameServer.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join((place, *map(str, first["loc"])))
        raise ConfigError(
            f"{key}: {requirement(first)} (it is {shown(first['input'])})",
            hint=f"the keys are {', '.join(GameServer.model_fields)}",
        ) from error
    for prompt in server.prompts:
        if not isinstance(prompt, str) and not _is_prompt(prompt):
            raise ConfigError(
                f"{place}.prompts: {shown(prompt)} does not name a prompt",
                hint="give a name, or {name: …, arguments: {…}}",
            )
    return server.named(number + 1)


def _is_prompt(prompt: Mapping[str, Any]) -> bool:
    is_named = isinstance(prompt.get("name"), str) and set(prompt) <= {"name", "arguments"}
    return is_named and isinstance(prompt.get("arguments", {}), dict)


# -- the tools of all servers ----------------------------------------------------------------------


@dataclass(frozen=True)
class Toolbox:
    """The tools of a policy, and their servers."""

    tools: list[dict[str, Any]]
    """Function schemas, in the order of the servers and of their lists."""
    owners: dict[str, tuple[int, str]]
    """By name: the number of the server, and the server's own name of the tool."""


_toolboxes: dict[str, Toolbox] = {}
_toolboxes_lock = threading.Lock()


def toolbox(servers: Sequence[GameServer]) -> Toolbox:
    """Return the tools of servers, requested once in a process. Blocks the first time.

    Raises GameError, SandboxError and ConfigError.
    """
    key = "\n".join(server.key() for server in servers)
    with _toolboxes_lock:
        if key not in _toolboxes:
            listed: list[list[dict[str, Any]]] = []
            failed: list[BaseException] = []
            # in a thread with its own event loop, since the caller may be in a running one
            thread = threading.Thread(target=_list, args=(servers, listed, failed), daemon=True)
            thread.start()
            thread.join()
            if failed:
                raise failed[0]
            _toolboxes[key] = make_toolbox(servers, listed)
        return _toolboxes[key]


def _list(
    servers: Sequence[GameServer],
    listed: list[list[dict[str, Any]]],
    failed: list[BaseException],
) -> None:
    try:
        listed += asyncio.run(_listed(servers))
    except BaseException as error:  # noqa: BLE001 - raised where the tools are asked for
        failed.append(error)


async def _listed(servers: Sequence[GameServer]) -> list[list[dict[str, Any]]]:
    try:
        return [await _tools_of(server) for server in servers]
    finally:
        await close_all()


async def _tools_of(server: GameServer) -> list[dict[str, Any]]:
    session = await connect(server)
    try:
        return await session.tools()
    except CallRefused as error:
        raise GameError(
            f"{who(server)} lists no tools: {error.message}", hint="use a server that has tools"
        ) from error
    finally:
        session.close()


def make_toolbox(
    servers: Sequence[GameServer], listed: Sequence[Sequence[Mapping[str, Any]]]
) -> Toolbox:
    """Give each offered tool a unique name.

    Raises GameError for invalid names and schemas, and ConfigError for a configured tool that a
    server does not have.
    """
    tools_of_servers = [
        (number, tool)
        for number, (server, tools) in enumerate(zip(servers, listed, strict=True))
        for tool in _offered(server, tools)
    ]
    if not tools_of_servers:
        raise GameError("the MCP servers offer no tool", hint="see their logs, and `tools`")
    plain = [_plain_name(tool["name"], servers[number]) for number, tool in tools_of_servers]
    clashing = {name for name, count in Counter(plain).items() if count > 1}
    owners: dict[str, tuple[int, str]] = {}
    functions: list[dict[str, Any]] = []
    for name, (number, tool) in zip(plain, tools_of_servers, strict=True):
        server = servers[number]
        distinct = f"{server.name}_{name}" if name in clashing else name
        if distinct in owners:
            other = servers[owners[distinct][0]]
            raise GameError(
                f"the tools {shown(owners[distinct][1])} of {who(other)} and "
                f"{shown(tool['name'])} of {who(server)} would both be called {distinct}",
                hint="leave one of them out by `tools` of its server, or give the servers other "
                "names",
            )
        owners[distinct] = (number, tool["name"])
        functions += checked_tools([_function(distinct, tool)], who(server))
    return Toolbox(checked_tools(functions, "env.kwargs.servers"), owners)


def _offered(server: GameServer, tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    if server.tools is None:
        return list(tools)
    known = {tool["name"] for tool in tools}
    for name in server.tools:
        if name not in known:
            raise ConfigError(
                f"{who(server)} has no tool {name!r}, which its `tools` names",
                hint=f"it has {', '.join(sorted(map(shown, known))) or 'none'}",
            )
    return [tool for tool in tools if tool["name"] in server.tools]


def _plain_name(name: str, server: GameServer) -> str:
    """Return a tool's name in the characters that models may use."""
    if not name or _CONTROL.search(name):
        raise GameError(
            f"{who(server)} has a tool of the name {shown(name)}",
            hint="list in `tools` of the server those that are to be offered",
        )
    return _NO_NAME.sub("_", name)


def _function(name: str, tool: Mapping[str, Any]) -> dict[str, Any]:
    schema = tool.get("inputSchema")
    description = tool.get("description") or tool.get("title") or ""
    return {"name": name, "description": description, "parameters": schema}
