"""Channels to MCP servers: a program's standard input and output, and streamable HTTP.

A channel carries the messages of JSON-RPC and bounds them: a message to `MAX_MESSAGE_BYTES`,
everything before an answer to `_MAX_BYTES`. The caller sets time limits. Each program runs in a
sandbox, and a limited number starts at a time. A server's requests to its client (sampling,
elicitation, roots) are refused, and notifications are ignored.
"""

import asyncio
import contextlib
import json
import os
import re
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from http.cookiejar import DefaultCookiePolicy
from typing import Any, Literal, Protocol, cast
from urllib.parse import urlsplit

import httpx
from pydantic import Field

from ...schemas.config.agent import McpServer
from ...schemas.config.sections import when
from ...schemas.wire.codec import read_json
from ...schemas.wire.errors import ConfigError, GameError
from ...schemas.wire.foreign import clean_text, shown
from .. import user_http
from ..sandbox.piped import PipedProgram, PipedSettings
from ..sandbox.served import start_piped

MAX_MESSAGE_BYTES = 4 << 20
"""Largest message; a longer answer is not read, and its call fails."""
_MAX_BYTES = 256 << 20
_MAX_MESSAGES = 10_000
_MAX_TAIL_BYTES = 2048
_CHUNK = 64 << 10
_PAUSE_S = 0.02
_END_S = 0.5
_FINISH_S = 0.05
_CONNECT_S = 10.0
_MAX_STARTS = 4
_METHOD_NOT_FOUND = -32601
_ID = re.compile(rb'"id"\s*:\s*(\d{1,18})\s*[,}]')
_SESSION_ID = re.compile(r"[\x21-\x7e]{1,1024}")
_NEEDS_KEY = frozenset({401, 403})
_REDIRECTS = frozenset({301, 302, 303, 307, 308})

_starters = ThreadPoolExecutor(_MAX_STARTS, thread_name_prefix="mcp-start")
_enders = ThreadPoolExecutor(2, thread_name_prefix="mcp-end")


class GameServer(McpServer):
    """A server whose tools a policy calls."""

    env_variables: list[str] = Field(default_factory=list[str], json_schema_extra=when("command"))
    """Variables of the environment host to pass on, such as one with a key."""
    read: list[str] = Field(default_factory=list[str], json_schema_extra=when("command"))
    """Files and folders that it may read, by absolute paths."""
    network: Literal["none", "open"] = Field(default="none", json_schema_extra=when("command"))
    """open: the program has the machine's network."""
    memory_mb: int = Field(default=512, ge=64, le=1 << 20, json_schema_extra=when("command"))
    """Memory of all its processes."""
    processes: int = Field(default=128, ge=1, le=4096, json_schema_extra=when("command"))
    """Its concurrent processes and threads."""
    disk_mb: int = Field(default=64, ge=1, le=1 << 20, json_schema_extra=when("command"))
    """Size of its /tmp, which is its home and working folder."""
    key_variable: str = Field(default="", json_schema_extra=when("url"))
    """Variable of the environment host with the key for `Authorization: Bearer`."""
    tools: list[str] | None = None
    """The offered tools, by the server's names; default: all."""
    resources: list[str] = Field(default_factory=list[str], max_length=64)
    """URIs of resources for the system prompt."""
    prompts: list[str | dict[str, Any]] = Field(
        default_factory=list[str | dict[str, Any]], max_length=64
    )
    """Prompts for the system prompt: a name, or `{name: …, arguments: {…}}`."""
    shared: bool = False
    """One session for all episodes of a host, for servers without state."""
    max_sessions: int = Field(default=64, ge=1, le=4096)
    """Sessions of one host at the same time; more episodes wait for `start_timeout_s`."""
    start_timeout_s: float = Field(default=20.0, gt=0, le=3600)
    """Time limit of a start, up to the server's first answer."""
    call_timeout_s: float = Field(default=20.0, gt=0, le=3600)
    """Time limit of one call; `env.step_timeout_s` bounds all calls of a turn."""

    def key(self) -> str:
        """Return a text that is the same for equal settings."""
        return self.model_dump_json()


class McpServerError(GameError):
    """A server cannot be used, has died, or sent an invalid answer; the session is over."""


class CallRefused(GameError):
    """A server answered a request with an error; the session continues."""


class Channel(Protocol):
    """Carries messages to a server and back."""

    @property
    def is_open(self) -> bool:
        """Whether requests can be sent."""
        ...

    async def request(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send a request and return the answer's message; McpServerError, CallRefused."""
        ...

    async def notify(self, message: dict[str, Any]) -> None:
        """Send a notification."""
        ...

    def use_protocol(self, version: str) -> None:
        """Record the version of the protocol."""
        ...

    def close(self) -> None:
        """End the server's session; harmless when repeated. On the event loop only."""
        ...


def who(server: GameServer) -> str:
    """Return the name of a server in messages."""
    return f"the MCP server {server.name} ({server.url or server.command})"


def printable(text: str) -> str:
    """Return a text of bounded length with control characters escaped."""
    return "".join(
        character if character.isprintable() or character == "\n" else repr(character)[1:-1]
        for character in clean_text(text)
    )


def rpc_message(method: str, params: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return a notification of JSON-RPC; an id makes it a request."""
    message: dict[str, Any] = {"jsonrpc": "2.0", "method": method}
    return message if params is None else {**message, "params": dict(params)}


def _parsed(data: bytes | bytearray) -> Any:
    """Return the value of a JSON message; None if it is not JSON."""
    try:
        return read_json(bytes(data))
    except ValueError:
        return None


def _answer_to(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer to a server's request: only a ping is served."""
    answer: dict[str, Any] = {"jsonrpc": "2.0", "id": request["id"]}
    if request.get("method") == "ping":
        return {**answer, "result": {}}
    error = {"code": _METHOD_NOT_FOUND, "message": "this client does not do that"}
    return {**answer, "error": error}


class _Budget:
    """Bytes that a server may still send before an answer."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._num_bytes = self._num_messages = 0

    def take(self, *, num_bytes: int = 0, messages: int = 0) -> None:
        """Count bytes; McpServerError beyond the bounds."""
        self._num_bytes += num_bytes
        self._num_messages += messages
        if self._num_bytes > _MAX_BYTES or self._num_messages > _MAX_MESSAGES:
            raise McpServerError(
                f"{self._name} sent {self._num_bytes:,} bytes and {self._num_messages:,} messages "
                "without an answer",
                hint="see the server; a call may ask for less",
            )


def _too_long(name: str) -> CallRefused:
    return CallRefused(f"error: the answer is longer than {MAX_MESSAGE_BYTES:,} bytes", hint=name)


farewells: set["asyncio.Task[None]"] = set()
"""Interface to end sessions."""


def _begin_farewell(task: "asyncio.Task[None]") -> None:
    farewells.add(task)
    task.add_done_callback(farewells.discard)


# -- programs over stdio ---------------------------------------------------------------------------


class StdioChannel(asyncio.Protocol):
    """One program: a line is a message. Answers may come in any order."""

    def __init__(self, server: GameServer) -> None:
        self._name = who(server)
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._line = bytearray()
        self._is_long = False
        self._budget = _Budget(self._name)
        self._noise = ""
        self._error: McpServerError | None = None
        self._transport: asyncio.WriteTransport | None = None
        self._printed: _Printed | None = None
        self._program: PipedProgram | None = None

    async def start(self) -> None:
        """Start the program; SandboxError, ConfigError."""
        settings = _piped(self._server)
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        read_end, write_end = os.pipe()
        self._printed = _Printed(self._loop, read_end)
        start = _Start(settings, theirs, write_end)
        try:
            self._program = await asyncio.wrap_future(start.future)
        except BaseException:
            start.give_up()
            ours.close()
            self._printed.close()
            raise
        try:
            await self._loop.create_unix_connection(lambda: self, sock=ours)
        except BaseException:
            ours.close()
            self.close()
            raise

    @property
    def is_open(self) -> bool:
        """Whether requests can be sent."""
        return self._error is None

    async def request(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send a request and return the answer's message; McpServerError, CallRefused."""
        if self._error is not None:
            raise self._error
        future: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._waiting[message["id"]] = future
        try:
            self._write(message)
            return await future
        finally:
            self._waiting.pop(message["id"], None)

    async def notify(self, message: dict[str, Any]) -> None:
        """Send a notification."""
        self._write(message)

    def use_protocol(self, version: str) -> None:
        """Do nothing: lines are the same in all versions."""

    def close(self) -> None:
        """End the program; harmless when repeated."""
        self._fail(McpServerError(f"the session with {self._name} is closed"), grace_s=0.0)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the pipe to the program."""
        self._transport = cast("asyncio.WriteTransport", transport)

    def data_received(self, data: bytes) -> None:
        """Split output into lines; a line that is too long is dropped."""
        try:
            self._budget.take(num_bytes=len(data))
            *ends, rest = data.split(b"\n")
            for end in ends:
                self._add_piece(end)
                self._take_line()
            self._add_piece(rest)
        except McpServerError as error:
            self._fail(error, grace_s=0.0)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail all waiting requests: the program has ended, or closed its output."""
        self._fail(None, grace_s=_END_S)

    def _add_piece(self, piece: bytes) -> None:
        if self._is_long:
            return
        self._line += piece
        if len(self._line) > MAX_MESSAGE_BYTES:
            self._is_long = True
            del self._line[_CHUNK:]

    def _take_line(self) -> None:
        line, self._line = self._line, bytearray()
        if not self._is_long:
            self._take_message(line)
            return
        self._is_long = False
        match = _ID.search(line)
        number = int(match[1]) if match else next(iter(self._waiting), 0)
        self._settle(number, _too_long(self._name))

    def _take_message(self, line: bytearray) -> None:
        message = _parsed(line)
        if not isinstance(message, dict):
            if line.strip():
                self._budget.take(messages=1)
                self._noise = line[:200].decode(errors="replace")
            return
        fields = cast("dict[str, Any]", message)
        if "method" not in fields:
            self._settle(fields.get("id"), fields)
            return
        self._budget.take(messages=1)
        if "id" in fields:
            self._write(_answer_to(fields))

    def _settle(self, number: Any, answer: "dict[str, Any] | CallRefused") -> None:
        future = self._waiting.pop(number, None) if isinstance(number, int) else None
        if future is None or future.done():
            self._budget.take(messages=1)
            return
        self._budget = _Budget(self._name)
        if isinstance(answer, CallRefused):
            future.set_exception(answer)
        else:
            future.set_result(answer)

    def _write(self, message: dict[str, Any]) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(json.dumps(message).encode() + b"\n")

    def _fail(self, error: McpServerError | None, *, grace_s: float) -> None:
        if self._error is not None:
            return
        self._error = error or McpServerError(f"{self._name} has ended")
        if self._transport is not None:
            self._transport.abort()
        _begin_farewell(self._loop.create_task(self._end(error, grace_s)))

    async def _end(self, error: McpServerError | None, grace_s: float) -> None:
        """End the program; fail waiting requests with the reason, once it is known."""
        program, printed = self._program, self._printed
        assert program is not None
        assert printed is not None
        ending = asyncio.wrap_future(_enders.submit(program.end, grace_s))
        try:
            ended = await asyncio.shield(ending)
            if error is None:
                words = printed.last_words(self._noise)
                self._error = error = McpServerError(f"{self._name} {ended}", hint=words)
        finally:
            printed.close()
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(self._error or McpServerError(self._name))


class _Start:
    """The start of a program in a thread; the number of threads limits concurrent starts."""

    def __init__(self, settings: PipedSettings, stdio: socket.socket, errors: int) -> None:
        self._settings, self._stdio, self._errors = settings, stdio, errors
        self.future = _starters.submit(self._run)

    def give_up(self) -> None:
        """End the program if it still starts."""
        self.future.add_done_callback(self._end)

    def _run(self) -> PipedProgram:
        try:
            return start_piped(self._settings, self._stdio.fileno(), self._errors)
        finally:
            self._close()

    def _end(self, future: "Future[PipedProgram]") -> None:
        if future.cancelled():
            self._close()
        elif future.exception() is None:
            _enders.submit(future.result().end)

    def _close(self) -> None:
        self._stdio.close()
        os.close(self._errors)


class _Printed:
    """The end of a program's standard error, which is read at intervals."""

    def __init__(self, loop: asyncio.AbstractEventLoop, file: int) -> None:
        self._loop = loop
        self._file = file
        self._tail = b""
        os.set_blocking(file, False)
        loop.add_reader(file, self._read)

    def last_words(self, noise: str) -> str:
        """Return the last output of the program, for error messages."""
        if self._file >= 0:
            self._read()
        output = self._tail.decode(errors="replace").strip() or noise.strip()
        return f"it printed at last: {printable(output)}" if output else "it printed nothing"

    def close(self) -> None:
        """Stop reading; harmless when repeated."""
        if self._file >= 0:
            self._loop.remove_reader(self._file)
            os.close(self._file)
            self._file = -1

    def _read(self) -> None:
        self._loop.remove_reader(self._file)
        with contextlib.suppress(BlockingIOError):
            chunk = os.read(self._file, _CHUNK)
            if not chunk:
                return
            self._tail = (self._tail + chunk)[-_MAX_TAIL_BYTES:]
        self._loop.call_later(_PAUSE_S, self._follow)

    def _follow(self) -> None:
        if self._file >= 0:
            self._loop.add_reader(self._file, self._read)


# -- streamable HTTP -------------------------------------------------------------------------------


class HttpChannel:
    """One session over HTTP: each request is a POST, answered with JSON or a stream of events."""

    def __init__(self, server: GameServer, client: httpx.AsyncClient) -> None:
        """Raises ConfigError for a key that is not set."""
        self._name = who(server)
        self._server = server
        self._client = client
        self._url = server.url
        self._loop = asyncio.get_running_loop()
        self._headers = {
            **_headers(server),
            "Accept": "application/json, text/event-stream",
            "Accept-Encoding": "identity",
            "Content-Type": "application/json",
        }
        self._is_open = True
        self._ends_streams = True

    @property
    def is_open(self) -> bool:
        """Whether requests can be sent."""
        return self._is_open

    def use_protocol(self, version: str) -> None:
        """Send the version with each request from now on."""
        self._headers["MCP-Protocol-Version"] = version

    async def request(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send a request and return the answer's message; McpServerError, CallRefused."""
        with self._blaming():
            async with self._posted(message) as reply:
                self._keep_session(message, reply)
                kind = reply.headers.get("Content-Type", "").partition(";")[0].strip().lower()
                if kind == "application/json":
                    return self._checked(_parsed(await self._body(reply)), message)
                if kind == "text/event-stream":
                    return await self._awaited(reply, message)
                raise McpServerError(
                    f"{self._name} answered {shown(kind)} to {message['method']}",
                    hint="url must be the endpoint of MCP over streamable HTTP, often /mcp",
                )

    async def notify(self, message: dict[str, Any]) -> None:
        """Send a notification, or the answer to a request of the server."""
        with self._blaming():
            async with self._posted(message) as reply:
                await self._body(reply)

    def close(self) -> None:
        """End the session, and report this to a server that has named one."""
        if not self._is_open:
            return
        self._is_open = False
        if "Mcp-Session-Id" in self._headers:
            _begin_farewell(self._loop.create_task(self._delete()))

    async def _delete(self) -> None:
        with contextlib.suppress(httpx.HTTPError, httpx.InvalidURL, TimeoutError):
            async with asyncio.timeout(_CONNECT_S):
                await self._client.delete(self._url, headers=self._headers)

    @contextlib.asynccontextmanager
    async def _posted(self, message: dict[str, Any]) -> AsyncIterator[httpx.Response]:
        """Post a message; a redirect within the server's origin is followed once."""
        if not self._is_open:
            raise McpServerError(f"the session with {self._name} is closed")
        body = json.dumps(message).encode()
        for is_last in (False, True):
            request = self._client.stream("POST", self._url, content=body, headers=self._headers)
            async with request as reply:
                if not is_last and self._moved(reply):
                    continue
                await self._check(reply)
                yield reply
                return

    def _moved(self, reply: httpx.Response) -> bool:
        """Follow a redirect within the same origin."""
        if reply.status_code not in (307, 308):
            return False
        target = str(reply.url.join(reply.headers.get("Location", "")))
        if _origin(target) != _origin(self._url):
            return False
        self._url = target
        return True

    async def _check(self, reply: httpx.Response) -> None:
        status = reply.status_code
        if status < 300:
            if reply.headers.get("Content-Encoding", "identity") != "identity":
                raise McpServerError(f"{self._name} compresses, though asked not to")
            return
        if status in _REDIRECTS:
            raise McpServerError(
                f"{self._name} redirects to {shown(reply.headers.get('Location', ''))}",
                hint="redirects to other places are not followed: give the url itself",
            )
        if status in _NEEDS_KEY:
            raise McpServerError(
                f"{self._name} refused with status {status}: it needs a key, or another one",
                hint="key_variable of the server names the variable with it, or set its headers",
            )
        body = printable(user_http.shown_body((await self._body(reply)).decode(errors="replace")))
        raise McpServerError(
            f"{self._name} answered with status {status}: {body}",
            hint="see its url, which is often /mcp, and its log",
        )

    def _keep_session(self, message: Mapping[str, Any], reply: httpx.Response) -> None:
        session = reply.headers.get("Mcp-Session-Id")
        if message["method"] != "initialize" or session is None:
            return
        if not _SESSION_ID.fullmatch(session):
            raise McpServerError(f"{self._name} named its session {shown(session)}", hint="see it")
        self._headers["Mcp-Session-Id"] = session

    async def _body(self, reply: httpx.Response) -> bytes:
        body = bytearray()
        async for chunk in reply.aiter_raw():
            body += chunk
            if len(body) > MAX_MESSAGE_BYTES:
                raise _too_long(self._name)
        return bytes(body)

    async def _awaited(self, reply: httpx.Response, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer among the events of a stream."""
        budget = _Budget(self._name)
        async with contextlib.aclosing(self._events(reply, budget)) as events:
            async for data in events:
                parsed = _parsed(data)
                budget.take(messages=1)
                if not isinstance(parsed, dict):
                    continue
                fields = cast("dict[str, Any]", parsed)
                if "method" not in fields and fields.get("id") == message["id"]:
                    await self._finish(events)
                    return fields
                if "method" in fields and "id" in fields:
                    await self.notify(_answer_to(fields))
        raise McpServerError(
            f"{self._name} ended its stream without an answer to {message['method']}",
            hint="see the server's log",
        )

    async def _finish(self, events: AsyncIterator[bytes]) -> None:
        """Read the rest of a stream, for a limited time, so that its connection can be reused."""
        if not self._ends_streams:
            return
        try:
            async with asyncio.timeout(_FINISH_S):
                async for _ in events:
                    pass
        except TimeoutError:
            self._ends_streams = False

    async def _events(self, reply: httpx.Response, budget: _Budget) -> AsyncGenerator[bytes, None]:
        """Yield the data of each event of a stream."""
        rest, data = bytearray(), bytearray()
        async for chunk in reply.aiter_raw():
            budget.take(num_bytes=len(chunk))
            rest += chunk
            if len(rest) + len(data) > MAX_MESSAGE_BYTES:
                raise _too_long(self._name)
            if b"\n" not in chunk:
                continue
            *lines, last = rest.replace(b"\r\n", b"\n").split(b"\n")
            rest = bytearray(last)
            for line in lines:
                if line.startswith(b"data:"):
                    data += line[5:].removeprefix(b" ") + b"\n"
                elif not line and data:
                    yield bytes(data)
                    data = bytearray()

    def _checked(self, parsed: Any, message: Mapping[str, Any]) -> dict[str, Any]:
        fields = cast("dict[str, Any]", parsed) if isinstance(parsed, dict) else {}
        if not fields or fields.get("id") not in (message["id"], None):
            raise McpServerError(
                f"{self._name} answered {message['method']} with {shown(cast('object', parsed))}",
                hint="its answers must be as MCP defines them",
            )
        return fields

    @contextlib.contextmanager
    def _blaming(self) -> Iterator[None]:
        try:
            yield
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise McpServerError(
                f"{self._name} cannot be reached: {type(error).__name__}: {printable(str(error))}",
                hint="see whether it runs, and its url",
            ) from error


def http_client() -> httpx.AsyncClient:
    """Return a client for all sessions of an event loop; they share connections, not cookies."""
    client = user_http.http_client(
        timeout=httpx.Timeout(None, connect=_CONNECT_S),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=256),
    )
    client.cookies.jar.set_policy(DefaultCookiePolicy(allowed_domains=[]))
    return client


def _headers(server: GameServer) -> dict[str, str]:
    """Return the headers of each request; ConfigError for a key that is not set."""
    headers = dict(server.headers)
    if server.key_variable:
        headers["Authorization"] = f"Bearer {_variable(server, server.key_variable)}"
    return headers


def _variable(server: GameServer, name: str) -> str:
    value = os.environ.get(name)
    if not value:
        raise ConfigError(
            f"the variable {name}, which the MCP server {server.name} is to get, is not set",
            hint="set it in the environment of the environment host; in a pool with users the "
            "operator names it in TINKERMQ_GAME_VARIABLES",
        )
    return value


def _origin(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.scheme, parts.netloc


def _piped(server: GameServer) -> PipedSettings:
    own = {name: _variable(server, name) for name in server.env_variables}
    return PipedSettings(
        command=[server.command, *server.args],
        environment={**own, **server.env},
        read=server.read,
        network=server.network,
        memory_mb=server.memory_mb,
        processes=server.processes,
        disk_mb=server.disk_mb,
    )
