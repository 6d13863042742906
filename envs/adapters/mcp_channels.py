"""Channels to MCP servers: what they share, and a program's standard input and output.

A channel carries the messages of JSON-RPC and bounds them: a message to `MAX_MESSAGE_BYTES`,
everything before an answer to `_MAX_BYTES`. The caller sets time limits. An answer that belongs to
no request, and a message that cannot be read, end the session at once. A server's requests to its
client (sampling, elicitation, roots) are refused, and notifications are ignored. Each program runs
in a sandbox, and a limited number starts at a time.
"""

import asyncio
import contextlib
import json
import os
import re
import socket
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal, Protocol, cast

from pydantic import Field

from ...schemas.config.agent import McpServer
from ...schemas.config.sections import when
from ...schemas.wire.codec import read_json
from ...schemas.wire.errors import ConfigError, GameError, MessageError
from ...schemas.wire.foreign import clean_text, shown
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
_MAX_STARTS = 4
_METHOD_NOT_FOUND = -32601
_CONTENT = frozenset({"method", "result", "error"})
_ID = re.compile(rb'"id"\s*:\s*(\d{1,18})\s*[,}]')

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

    def cancel(self, note: dict[str, Any]) -> None:
        """Send the notification that a request is cancelled, also if `close` follows."""
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


def refused(error: Any, name: str) -> CallRefused:
    """Return the exception for the error of an answer."""
    text = shown(error)
    if isinstance(error, dict):
        message = cast("dict[str, Any]", error).get("message")
        text = printable(message) if isinstance(message, str) else text
    return CallRefused(f"error: {text}", hint=f"of {name}")


def read_messages(data: bytes | bytearray, name: str) -> list[dict[str, Any]]:
    """Return the messages of JSON-RPC in a line, an event or a body; a batch has several.

    What is not a message, such as a line that a program prints, is left out. McpServerError for a
    message that cannot be read.
    """
    try:
        parsed = read_json(bytes(data))
    except MessageError as error:
        if b'"jsonrpc"' not in data:
            return []
        raise McpServerError(
            f"{name} sent a message that cannot be read: {error.message}",
            hint="its messages must be JSON-RPC as MCP defines it",
        ) from error
    batch = cast("list[Any]", parsed) if isinstance(parsed, list) else [parsed]
    return [cast("dict[str, Any]", message) for message in batch if _is_message(message)]


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and (
        "jsonrpc" in value or ("id" in value and not value.keys().isdisjoint(_CONTENT))
    )


def answered(message: Mapping[str, Any], last: int, name: str) -> int | None:
    """Return the id of the request that a message answers; None for an error without an id.

    Some servers answer 1 with "1" or 1.0, and official clients accept that. `last` is the highest
    id sent so far. McpServerError for an id that no request has, and a result without one.
    """
    number: Any = message.get("id")
    if isinstance(number, str) and re.fullmatch("[0-9]{1,18}", number):
        number = int(number)
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    if number is None and message.get("error") is not None:
        return None
    if isinstance(number, bool) or not isinstance(number, int) or not 0 < number <= last:
        raise McpServerError(
            f"{name} sent an answer with the id {shown(message.get('id'))}, which no request has: "
            f"{shown(dict(message))}",
            hint="an answer must have the id of its request, a number",
        )
    return number


def answer_to(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer to a server's request: only a ping is served."""
    answer: dict[str, Any] = {"jsonrpc": "2.0", "id": request["id"]}
    if request.get("method") == "ping":
        return {**answer, "result": {}}
    error = {"code": _METHOD_NOT_FOUND, "message": "this client does not do that"}
    return {**answer, "error": error}


class Budget:
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


def too_long(name: str) -> CallRefused:
    """Return the exception for an answer over MAX_MESSAGE_BYTES."""
    return CallRefused(f"error: the answer is longer than {MAX_MESSAGE_BYTES:,} bytes", hint=name)


farewells: set["asyncio.Task[None]"] = set()
"""Tasks that end sessions, programs and replies."""


def begin_farewell(ending: Coroutine[Any, Any, None]) -> None:
    """Run what ends a session, a program or a reply, in a task of this event loop."""
    task = asyncio.get_running_loop().create_task(ending)
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
        self._last_id = 0
        self._line = bytearray()
        self._is_long = False
        self._budget = Budget(self._name)
        self._noise = ""
        self._error: McpServerError | None = None
        self._transport: asyncio.WriteTransport | None = None
        self._printed: _Printed | None = None
        self._program: PipedProgram | None = None
        self._grace_s = 0.0
        """Time in which the program may end by itself when it is closed."""

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
        self._last_id = message["id"]
        self._waiting[self._last_id] = future
        try:
            self._write(message)
            return await future
        finally:
            self._waiting.pop(message["id"], None)

    async def notify(self, message: dict[str, Any]) -> None:
        """Send a notification."""
        self._write(message)

    def cancel(self, note: dict[str, Any]) -> None:
        """Send the notification that a request is cancelled; the program has time to act on it."""
        self._write(note)
        self._grace_s = _END_S

    def use_protocol(self, version: str) -> None:
        """Do nothing: lines are the same in all versions."""

    def close(self) -> None:
        """End the program; harmless when repeated."""
        error = McpServerError(f"the session with {self._name} is closed")
        self._fail(error, grace_s=self._grace_s)

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
        self._settle(int(match[1]) if match else None, too_long(self._name))

    def _take_message(self, line: bytearray) -> None:
        messages = read_messages(line, self._name)
        if not messages and line.strip():
            self._budget.take(messages=1)
            self._noise = line[:200].decode(errors="replace")
        for message in messages:
            if "method" not in message:
                self._settle(answered(message, self._last_id, self._name), message)
                continue
            self._budget.take(messages=1)
            if "id" in message:
                self._write(answer_to(message))

    def _settle(self, number: int | None, answer: "dict[str, Any] | CallRefused") -> None:
        """Give an answer to its request; None: the only one that waits."""
        if number is None and len(self._waiting) > 1:
            raise McpServerError(
                f"{self._name} sent an answer without an id, and {len(self._waiting)} requests "
                f"wait: {shown(answer)}",
                hint="an answer must have the id of its request",
            )
        number = next(iter(self._waiting), 0) if number is None else number
        future = self._waiting.pop(number, None)
        if future is None or future.done():
            self._budget.take(messages=1)
            return
        self._budget = Budget(self._name)
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
        begin_farewell(self._end(error, grace_s))

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


def variable(server: GameServer, name: str) -> str:
    """Return a variable of this process for a server; ConfigError if it is not set."""
    value = os.environ.get(name)
    if not value:
        raise ConfigError(
            f"the variable {name}, which the MCP server {server.name} is to get, is not set",
            hint="set it in the environment of the environment host; in a pool with users the "
            "operator names it in TINKERMQ_GAME_VARIABLES",
        )
    return value


def _piped(server: GameServer) -> PipedSettings:
    own = {name: variable(server, name) for name in server.env_variables}
    return PipedSettings(
        command=[server.command, *server.args],
        environment={**own, **server.env},
        read=server.read,
        network=server.network,
        memory_mb=server.memory_mb,
        processes=server.processes,
        disk_mb=server.disk_mb,
    )
