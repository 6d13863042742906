"""A client of MCP servers (Model Context Protocol).

`connect` opens a session with a server: over the standard input and output of a program that it
starts in a sandbox, or over streamable HTTP. A session lists tools, calls them, and reads resources
and prompts. The official package is not used: importing it takes five times as long as all other
imports of a host, and its client buffers anything that a server sends.

An error of the server ends the session and the episode. A refused call, or one whose answer is too
long, returns a message to the policy.
"""

import asyncio
import contextlib
import json
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from ...schemas.wire.errors import ConfigError, SandboxError
from ...schemas.wire.foreign import shown
from ..running.episodes import GameHung
from . import mcp_channels
from .mcp_http import HttpChannel, HttpClients

T = TypeVar("T")
PROTOCOLS = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")
"""Supported versions of the protocol, the preferred one first."""
MAX_TOOLS = 512
"""Most tools of one server."""
_MAX_PAGES = 64


class McpSession:
    """A conversation with one server."""

    def __init__(self, server: mcp_channels.GameServer, channel: mcp_channels.Channel) -> None:
        """Not public: `connect` makes sessions."""
        self._server = server
        self._channel = channel
        self._num_requests = 0
        self._loop = asyncio.get_running_loop()
        self.on_close: Callable[[], None] | None = None
        """Called once, when it is closed."""

    @property
    def is_open(self) -> bool:
        """Whether it can be used."""
        return self._channel.is_open

    @property
    def is_shared(self) -> bool:
        """Whether all episodes of an event loop share it."""
        return self._server.shared

    async def begin(self) -> None:
        """Agree on a version; McpServerError for a server without a supported one."""
        client = {"name": "tinkermq", "version": "1"}
        params = {"protocolVersion": PROTOCOLS[0], "capabilities": {}, "clientInfo": client}
        try:
            result = await self.request("initialize", params, self._server.start_timeout_s)
        except mcp_channels.CallRefused as error:
            raise mcp_channels.McpServerError(
                f"{self._who} refused to begin: {error.message}",
                hint=f"it must speak MCP {' or '.join(PROTOCOLS)}",
            ) from error
        version = result.get("protocolVersion")
        if version not in PROTOCOLS:
            raise mcp_channels.McpServerError(
                f"{self._who} speaks MCP {shown(version)}",
                hint=f"use a version of it that speaks {' or '.join(PROTOCOLS)}",
            )
        self._channel.use_protocol(cast("str", version))
        await self._channel.notify(mcp_channels.rpc_message("notifications/initialized"))

    async def tools(self) -> list[dict[str, Any]]:
        """Return the tools in the server's own form; only names are checked."""
        tools: list[dict[str, Any]] = []
        cursor: Any = None
        for _ in range(_MAX_PAGES):
            params = {} if cursor is None else {"cursor": cursor}
            result = await self.request("tools/list", params)
            page = result.get("tools")
            if not isinstance(page, list):
                raise self._wrong("tools/list", result)
            for tool in cast("list[Any]", page):
                fields = cast("dict[str, Any]", tool) if isinstance(tool, dict) else {}
                if not isinstance(fields.get("name"), str):
                    raise self._wrong("tools/list", cast("object", tool))
                tools.append(fields)
            cursor = result.get("nextCursor")
            if len(tools) > MAX_TOOLS or not isinstance(cursor, str):
                break
        else:
            raise mcp_channels.McpServerError(
                f"{self._who} lists tools without end", hint="see the server"
            )
        if len(tools) > MAX_TOOLS:
            raise mcp_channels.McpServerError(
                f"{self._who} lists more than {MAX_TOOLS} tools", hint="use a server with fewer"
            )
        return tools

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> tuple[str, bool]:
        """Call a tool; return its text, and whether it failed.

        Raises McpServerError and GameHung, after which the session is over.
        """
        try:
            result = await self.request("tools/call", {"name": tool, "arguments": arguments})
        except mcp_channels.CallRefused as error:
            return error.message, True
        return self._text("tools/call", result, "content"), result.get("isError") is True

    async def resource(self, uri: str) -> str:
        """Return the text of a resource; CallRefused if it does not exist."""
        result = await self.request("resources/read", {"uri": uri})
        return self._text("resources/read", result, "contents")

    async def prompt(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return the text of a prompt; CallRefused if it does not exist."""
        result = await self.request("prompts/get", {"name": name, "arguments": arguments})
        return self._text("prompts/get", result, "messages")

    async def request(
        self, method: str, params: Mapping[str, Any], limit_s: float | None = None
    ) -> dict[str, Any]:
        """Return the result of a request; CallRefused, McpServerError, GameHung.

        `limit_s` is its time limit, by default the server's `call_timeout_s`.
        """
        self._num_requests += 1
        message = mcp_channels.rpc_message(method, params) | {"id": self._num_requests}
        limit_s = limit_s or self._server.call_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                answer = await self._channel.request(message)
        except TimeoutError as error:
            self._cancel(message, f"no answer within {limit_s:g} s")
            if not self.is_shared or self._server.command:  # over HTTP a session survives
                self.close()
            call = f"{method} of {params['name']}" if "name" in params else method
            raise GameHung(
                f"{self._who} did not answer {call} within {limit_s:g} s",
                hint="raise call_timeout_s of the server if it may take longer; "
                "env.on_step_timeout decides what happens to the episode",
            ) from error
        except asyncio.CancelledError:
            self._cancel(message, "the episode is given up")
            if not self.is_shared:
                self.close()
            raise
        except mcp_channels.McpServerError:
            self.close()
            raise
        if (refusal := answer.get("error")) is not None:
            raise mcp_channels.refused(refusal, self._who)
        result = answer.get("result")
        if not isinstance(result, dict):
            raise self._wrong(method, answer)
        return cast("dict[str, Any]", result)

    def _cancel(self, message: Mapping[str, Any], reason: str) -> None:
        """Report that the answer to a request is not awaited any more, as the protocol asks."""
        if message["method"] != "initialize":  # which must not be cancelled
            params = {"requestId": message["id"], "reason": reason}
            self._channel.cancel(mcp_channels.rpc_message("notifications/cancelled", params))

    def close(self) -> None:
        """End the session; harmless when repeated. On its event loop only."""
        self._channel.close()
        if self.on_close is not None:
            on_close, self.on_close = self.on_close, None
            on_close()

    def close_soon(self) -> None:
        """End the session, from any thread."""
        with contextlib.suppress(RuntimeError):  # its event loop has ended, and the session with it
            self._loop.call_soon_threadsafe(self.close)

    def _text(self, method: str, result: Mapping[str, Any], key: str) -> str:
        parts = result.get(key, [])
        if not isinstance(parts, list):
            raise self._wrong(method, result)
        try:
            texts = [_part_text(part) for part in cast("list[Any]", parts)]
        except (TypeError, KeyError) as error:
            raise self._wrong(method, cast("object", parts)) from error
        if not texts and (structured := result.get("structuredContent")) is not None:
            texts = [json.dumps(structured, ensure_ascii=False)]
        return "\n".join(texts)

    def _wrong(self, method: str, answer: object) -> mcp_channels.McpServerError:
        self.close()
        return mcp_channels.McpServerError(
            f"{self._who} answered {method} with {shown(answer)}, which is not a valid answer",
            hint="see the server: its answers must be as MCP defines them",
        )

    @property
    def _who(self) -> str:
        return mcp_channels.who(self._server)


def _part_text(part: Any) -> str:
    """Return a part of an answer as text; TypeError or KeyError for an invalid one.

    Images and sound are replaced by a note.
    """
    fields = cast("dict[str, Any]", _typed(part, dict))
    if "role" in fields:  # a message of a prompt
        return _part_text(fields["content"])
    kind = fields.get("type", "text" if "text" in fields else "blob")
    if kind == "text":
        return _typed(fields["text"], str)
    if kind == "resource":
        return _part_text(fields["resource"])
    if kind == "resource_link":
        return f"[resource {_typed(fields['uri'], str)}]"
    return f"[{kind} {fields.get('mimeType', '')}: not shown]"


def _typed(value: Any, expected: type[T]) -> T:
    if not isinstance(value, expected):
        raise TypeError(f"{shown(value)} is not {expected.__name__}")
    return value


# -- sessions of an event loop ---------------------------------------------------------------------


@dataclass
class _LoopSessions:
    """Shared state of the sessions of one event loop."""

    clients: HttpClients
    shared: dict[str, "asyncio.Task[McpSession]"] = field(
        default_factory=dict[str, "asyncio.Task[McpSession]"]
    )
    places: dict[str, asyncio.Semaphore] = field(default_factory=dict[str, asyncio.Semaphore])
    """Free sessions of `max_sessions`, by server."""


_of_loops: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopSessions]" = (
    weakref.WeakKeyDictionary()
)


async def connect(server: mcp_channels.GameServer) -> McpSession:
    """Return a session with a server: a new one, or the shared one.

    Raises McpServerError, GameHung, SandboxError and ConfigError.
    """
    if not server.shared:
        return await _new_session(server)
    shared, key = _here().shared, server.key()
    task = shared.get(key)
    if task is None or (task.done() and not _is_usable(task)):
        task = shared[key] = asyncio.ensure_future(_new_session(server))
    return await asyncio.shield(task)


async def close_all() -> None:
    """Close the connections of this event loop, which ends."""
    here = _of_loops.pop(asyncio.get_running_loop(), None)
    if here is None:
        return
    for task in here.shared.values():
        if task.done() and _is_usable(task):
            task.result().close()
    if mine := [
        task for task in mcp_channels.farewells if task.get_loop() is asyncio.get_running_loop()
    ]:
        await asyncio.wait(mine)
    await here.clients.aclose()


def _here() -> _LoopSessions:
    loop = asyncio.get_running_loop()
    if loop not in _of_loops:
        _of_loops[loop] = _LoopSessions(HttpClients())
    return _of_loops[loop]


def _is_usable(task: "asyncio.Task[McpSession]") -> bool:
    return not task.cancelled() and task.exception() is None and task.result().is_open


async def _new_session(server: mcp_channels.GameServer) -> McpSession:
    """Open a session as soon as the server's limit allows it."""
    limit_s = server.start_timeout_s
    places = _here().places.setdefault(server.key(), asyncio.Semaphore(server.max_sessions))
    try:
        async with asyncio.timeout(limit_s):
            await places.acquire()
    except TimeoutError as error:
        raise mcp_channels.McpServerError(
            f"{server.max_sessions} sessions with {mcp_channels.who(server)} are open, and none "
            f"ended within {limit_s:g} s",
            hint="raise its max_sessions, lower generator.max_episodes, or set shared",
        ) from error
    try:
        async with asyncio.timeout(limit_s):
            session = await _begun(server)
    except BaseException as error:
        places.release()
        if not isinstance(error, TimeoutError):
            raise
        raise mcp_channels.McpServerError(
            f"{mcp_channels.who(server)} did not start within {limit_s:g} s",
            hint="raise its start_timeout_s, and see what it does as it starts",
        ) from error
    session.on_close = places.release
    return session


async def _begun(server: mcp_channels.GameServer) -> McpSession:
    if server.command:
        channel = mcp_channels.StdioChannel(server)
        try:
            await channel.start()
        except (SandboxError, ConfigError) as error:
            error.message = f"{mcp_channels.who(server)}: {error.message}"
            raise
    else:
        channel = HttpChannel(server, _here().clients)
    session = McpSession(server, channel)
    try:
        await session.begin()
    except BaseException:
        session.close()
        raise
    return session
