"""Client of OpenEnv servers: HTTP routes that describe an environment, and WebSocket sessions.

A session is a connection to `/ws` with its own environment instance on the server, and lasts for
one episode. `SessionPool` opens sessions within the servers' capacity: a server that is full, or
does not answer, is retried until a deadline. Nothing is retried after the start of an episode.

Data of a server is not trusted: messages are bounded and checked, redirects are not followed,
compression is off, and texts are quoted in our messages, so that no control character reaches a
terminal.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar, cast

import httpx
import structlog
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ...schemas.local.proxies import proxy_of
from ...schemas.wire.codec import read_json
from ...schemas.wire.errors import GameError, MessageError
from ...schemas.wire.foreign import words_of
from ..registry import extra
from ..user_http import checked_socket, http_client

needs = extra("websockets", "openenv")
MAX_MESSAGE_BYTES = 4 << 20
CONNECT_S = 10.0
REQUEST_S = 10.0
"""Time limit of an HTTP request, and of the answer to a session's end."""
_MAX_QUEUED_FRAMES = 4
_LEAST_PAUSE_S, _MOST_PAUSE_S = 0.05, 1.0
"""Delays before another request to a server that was full or unreachable."""
_SHOWN_CHARS = 300
_TOO_BIG, _NOT_UTF8 = 1009, 1007
"""Codes with which a WebSocket connection is closed."""
PROTOCOL = "OpenEnv 0.3 to 0.10"
T = TypeVar("T")

_log: structlog.stdlib.BoundLogger = structlog.get_logger()


# -- messages --------------------------------------------------------------------------------------


class Observation(BaseModel):
    """The environment's answer to a reset or a step."""

    model_config = ConfigDict(strict=True)

    observation: dict[str, Any]
    reward: bool | float | None = Field(allow_inf_nan=False)
    """Null: the step has none."""
    done: bool

    @model_validator(mode="before")
    @classmethod
    def _read_inner(cls, value: dict[str, Any]) -> dict[str, Any]:
        """Read `reward` and `done` from the observation if they are only there."""
        inner = value.get("observation")
        known = cast("dict[str, Any]", inner) if isinstance(inner, dict) else {}
        return {**{key: known[key] for key in ("reward", "done") if key in known}, **value}


class Schemas(BaseModel):
    """The JSON schemas of an environment."""

    model_config = ConfigDict(strict=True)

    action: dict[str, Any]


class Split(BaseModel):
    """A split of an environment's tasks."""

    model_config = ConfigDict(strict=True)

    name: str


class _Frame(BaseModel):
    model_config = ConfigDict(strict=True)

    type: str
    data: dict[str, Any]


class _Refusal(BaseModel):
    model_config = ConfigDict(strict=True)

    message: str = ""
    code: str = ""
    active_sessions: int | None = None
    max_sessions: int | None = None


@dataclass(frozen=True)
class Access:
    """Headers and limits of requests."""

    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    max_message_bytes: int = MAX_MESSAGE_BYTES
    is_own: bool = False
    """The servers are started here, at loopback addresses."""


# -- errors ----------------------------------------------------------------------------------------


class OpenEnvError(GameError):
    """A server answered with an error, an invalid message, or not at all."""


class ActionRefused(OpenEnvError):
    """The environment refused an action; its episode continues."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the environment refuses the action: {reason}")
        self.reason = reason


class ServerFull(OpenEnvError):
    """All sessions of a server are in use."""

    def __init__(self, url: str, refusal: _Refusal) -> None:
        super().__init__(
            f"{url} has no session left ({refusal.active_sessions} of {refusal.max_sessions})"
        )
        self.max_sessions = refusal.max_sessions


class ServerAway(OpenEnvError):
    """A server that cannot be reached now."""


def quoted(message: str | Exception, most_chars: int = _SHOWN_CHARS) -> str:
    """Return a server's text as a literal: escaped, on one line, and bounded."""
    text = message if isinstance(message, str) else words_of(message)
    return repr(text if len(text) <= most_chars else f"{text[:most_chars]}…")


def _malformed(url: str, what: str, error: Exception) -> OpenEnvError:
    words = error.message if isinstance(error, MessageError) else _places(error)
    return OpenEnvError(
        f"{what} of {url} is not of the protocol of {PROTOCOL}: {words}",
        hint="see that the URL is of an OpenEnv server, and its version of the package openenv",
    )


def _places(error: Exception) -> str:
    """Return the invalid fields, without their values."""
    if not isinstance(error, ValidationError):
        return quoted(error)
    problems = [
        f"{'.'.join(map(str, problem['loc'])) or 'it'}: {problem['msg']}"
        for problem in error.errors(include_url=False, include_input=False, include_context=False)
    ]
    return quoted("; ".join(problems[:3]))


def _http_refusal(url: str, status: int) -> OpenEnvError:
    """Return the error of an HTTP status other than 200 and 101."""
    if 300 <= status < 400:
        return OpenEnvError(
            f"{url} redirects (HTTP {status}), and redirects are not followed",
            hint="give the URL that it redirects to, if you trust it",
        )
    if status in (401, 403):
        return OpenEnvError(
            f"{url} refuses the request (HTTP {status})",
            hint="set env.kwargs.key_variable to an environment variable of the host that holds "
            "the server's key; a server without OpenEnv's routes may answer this, too",
        )
    if status in (404, 405, 426):
        return OpenEnvError(
            f"there is no OpenEnv server of a known version at {url} (HTTP {status})",
            hint=f"give the URL above /ws and /schema; the versions are {PROTOCOL}",
        )
    if status in (408, 425, 429) or status >= 500:
        return ServerAway(f"{url} answers HTTP {status}", hint="see the server's log")
    return OpenEnvError(f"{url} answers HTTP {status}", hint="see the server's log")


# -- HTTP routes -----------------------------------------------------------------------------------


class HttpRoutes:
    """The routes of one server that describe its environment; an async context."""

    def __init__(self, url: str, access: Access) -> None:
        self.url = url
        self._access = access
        headers = {**access.headers, "accept-encoding": "identity"}
        verify = url.startswith("https:")  # loading the certificate authorities is slow
        self._client = (
            httpx.AsyncClient(headers=headers, timeout=REQUEST_S, verify=verify, trust_env=False)
            if access.is_own
            else http_client(headers=headers, timeout=REQUEST_S, verify=verify)
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def ask(self, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, bytes]:
        """GET a route, or POST `body` to it; return status and content.

        Raises ServerAway without an answer, OpenEnvError for a too large one or a redirect.
        """
        url = f"{self.url}{path}"
        method = "GET" if body is None else "POST"
        try:
            async with (
                asyncio.timeout(REQUEST_S),
                self._client.stream(method, url, json=body) as answer,
            ):
                if 300 <= answer.status_code < 400:
                    raise _http_refusal(url, answer.status_code)
                return answer.status_code, await self._content(url, answer)
        except (httpx.HTTPError, TimeoutError) as error:
            raise ServerAway(
                f"{url} does not answer within {REQUEST_S:g} s: {words_of(error)}",
                hint="start the server, or correct env.kwargs.url",
            ) from error

    async def read(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Return the JSON value of a route; OpenEnvError for any status but 200."""
        status, content = await self.ask(path, body)
        if status != 200:
            raise _http_refusal(f"{self.url}{path}", status)
        return self.parse(path, content)

    def parse(self, path: str, content: bytes) -> Any:
        """Return the JSON value of a route's content."""
        try:
            return read_json(content)
        except MessageError as error:
            raise _malformed(self.url, f"the answer to {path}", error) from error

    async def read_as(self, model: type[T], path: str, body: Mapping[str, Any] | None = None) -> T:
        """Return the JSON value of a route as a model."""
        return self.check(model, path, await self.read(path, body))

    def check(self, model: type[T], path: str, value: Any) -> T:
        """Return a value as a model; OpenEnvError for an invalid one."""
        try:
            return cast(Any, model).model_validate(value)
        except ValidationError as error:
            raise _malformed(self.url, f"the answer to {path}", error) from error

    async def _content(self, url: str, answer: httpx.Response) -> bytes:
        content = bytearray()
        async for chunk in answer.aiter_raw():
            content += chunk
            if len(content) > self._access.max_message_bytes:
                raise _too_large(url, self._access)
        return bytes(content)


def _cannot_reach(address: str, error: Exception) -> ServerAway:
    return ServerAway(
        f"{address} cannot be reached: {quoted(error)}",
        hint="start the server, or correct env.kwargs.url",
    )


def _too_large(url: str, access: Access) -> OpenEnvError:
    return OpenEnvError(
        f"{url} sent a message of more than {access.max_message_bytes:,} bytes",
        hint="let the environment send less, or raise env.kwargs.max_message_bytes",
    )


# -- sessions --------------------------------------------------------------------------------------


class OpenEnvSession:
    """One environment instance on a server, for one episode; calls may not overlap."""

    def __init__(self, connection: Any, url: str, access: Access) -> None:
        self.url = url
        self._connection = connection
        self._access = access
        self._websockets: Any = needs.load("exceptions")

    @classmethod
    async def connect(cls, url: str, access: Access) -> "OpenEnvSession":
        """Open a session; ServerAway when the server cannot be reached, OpenEnvError otherwise."""
        client: Any = needs.load("asyncio.client")
        exceptions: Any = needs.load("exceptions")
        address = f"ws{url.removeprefix('http')}/ws"
        try:
            connection = None if access.is_own else await checked_socket(url, CONNECT_S)
        except OSError as error:
            raise _cannot_reach(address, error) from error
        proxy = None if access.is_own or connection is not None else proxy_of(address)
        connecting = client.connect(
            address,
            **({} if connection is None else {"sock": connection}),
            additional_headers=dict(access.headers),
            compression=None,
            open_timeout=CONNECT_S,
            close_timeout=REQUEST_S,
            max_size=access.max_message_bytes,
            max_queue=_MAX_QUEUED_FRAMES,
            proxy=None if proxy is None else proxy.url,
        )
        connecting.process_redirect = _follow_no_redirect
        try:
            return cls(await connecting, url, access)
        except exceptions.InvalidStatus as error:
            raise _http_refusal(address, error.response.status_code) from error
        except (exceptions.WebSocketException, OSError, EOFError, ImportError) as error:
            place = address if proxy is None else f"{address} ({proxy.shown})"
            raise _cannot_reach(place, error) from error

    async def reset(self, arguments: Mapping[str, Any]) -> Observation:
        """Begin an episode. Raises ServerFull, ServerAway, OpenEnvError."""
        return self._observation("reset", await self._request("reset", arguments))

    async def step(self, action: Mapping[str, Any]) -> Observation:
        """Play an action. Raises ActionRefused, OpenEnvError."""
        return self._observation("step", await self._request("step", action))

    async def close(self) -> None:
        """End the session; return once the server has freed its place, or after a while."""
        try:
            with contextlib.suppress(self._websockets.ConnectionClosed, OSError, TimeoutError):
                async with asyncio.timeout(REQUEST_S):
                    await self._connection.send('{"type": "close"}')
                    await self._connection.wait_closed()
        finally:
            self.abort()

    def abort(self) -> None:
        """Drop the connection without a message."""
        self._connection.transport.abort()

    async def _request(self, kind: str, data: Mapping[str, Any]) -> _Frame:
        message = json.dumps({"type": kind, "data": data})
        try:
            # a server that refuses a session sends an error and closes; the error may have arrived
            # already
            with contextlib.suppress(self._websockets.ConnectionClosed):
                await self._connection.send(message)
            answer = await self._connection.recv()
        except self._websockets.ConnectionClosed as error:
            raise self._session_ended(kind, error) from error
        try:
            frame = _Frame.model_validate(read_json(answer))
        except (ValidationError, MessageError) as error:
            raise _malformed(self.url, f"the answer to {kind}", error) from error
        if frame.type == "error":
            raise self._refused(kind, frame)
        return frame

    def _observation(self, kind: str, frame: _Frame) -> Observation:
        if frame.type != "observation":
            raise OpenEnvError(f"{self.url} answered a {kind} with a {quoted(frame.type)}")
        begun = {"reward": None, "done": False} if kind == "reset" else {}
        try:
            return Observation.model_validate({**begun, **frame.data})
        except ValidationError as error:
            raise _malformed(self.url, f"the answer to {kind}", error) from error

    def _refused(self, kind: str, frame: _Frame) -> OpenEnvError:
        try:
            refusal = _Refusal.model_validate(frame.data)
        except ValidationError as error:
            return _malformed(self.url, f"the answer to {kind}", error)
        if refusal.code == "CAPACITY_REACHED":
            return ServerFull(self.url, refusal)
        if refusal.code == "VALIDATION_ERROR" and kind == "step":
            return ActionRefused(json.dumps(frame.data.get("errors", refusal.message)))
        return OpenEnvError(
            f"{self.url} answered a {kind} with the error {quoted(refusal.code)}: "
            f"{quoted(refusal.message)}",
            hint="the environment raised it; see the server's log",
        )

    def _session_ended(self, kind: str, error: Any) -> OpenEnvError:
        sent = error.sent.code if error.sent is not None else None
        if sent == _TOO_BIG:
            return _too_large(self.url, self._access)
        if sent == _NOT_UTF8:
            return OpenEnvError(f"{self.url} answered a {kind} with a text that is not UTF-8")
        return ServerAway(
            f"{self.url} ended the session during a {kind}: {quoted(error)}",
            hint="see the server's log; the episode starts again",
        )


def _follow_no_redirect(error: Exception) -> Exception:
    return error


# -- the pool --------------------------------------------------------------------------------------


@dataclass
class RemoteOpenEnv:
    """A server and its known state."""

    name: str
    """Its URL, or the name of its package or image."""
    start: Callable[[], str] | None = None
    """Starts it unless it runs, and returns its URL; None: it was started elsewhere."""
    limit: int | None = None
    """Known limit of its sessions."""
    num_open: int = 0
    """Our sessions."""
    asked_again: float = 0.0
    """Time of the monotonic clock before which it is not requested again."""
    pause_s: float = _LEAST_PAUSE_S

    def has_room(self, now: float) -> bool:
        """Return whether a session may be requested from it."""
        return now >= self.asked_again and (self.limit is None or self.num_open < self.limit)

    def rest(self) -> None:
        """Delay the next request, each time longer."""
        self.asked_again = time.monotonic() + self.pause_s
        self.pause_s = min(2 * self.pause_s, _MOST_PAUSE_S)


class PooledSession:
    """A session that frees its place when it is closed."""

    def __init__(self, pool: "SessionPool", server: RemoteOpenEnv, session: OpenEnvSession) -> None:
        self._pool = pool
        self._server = server
        self._session = session
        self._is_closed = False
        self._loop = asyncio.get_running_loop()

    async def step(self, action: Mapping[str, Any]) -> Observation:
        """Play an action; any failure ends the session, except a refused action."""
        try:
            return await self._session.step(action)
        except ActionRefused:
            raise
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the session soon; from any thread, harmless when repeated."""
        if not self._is_closed:
            self._is_closed = True
            with contextlib.suppress(RuntimeError):  # the loop is closed, the connection with it
                self._loop.call_soon_threadsafe(self._pool.end, self._server, self._session)


class SessionPool:
    """Opens the sessions of one event loop on some servers of one environment."""

    def __init__(
        self,
        servers: Sequence[RemoteOpenEnv],
        access: Access,
        wait_s: float,
        ended: Callable[["SessionPool"], None],
    ) -> None:
        """An episode waits up to `wait_s`; `ended` is called when the event loop ends."""
        self._servers = servers
        self._access = access
        self._wait_s = wait_s
        self._door = asyncio.Lock()
        """Held while an episode waits for a place, so that all are served in order."""
        self._freed = asyncio.Event()
        self._num_waiting = 0
        self._last_said = 0.0
        self._last_answer = ""
        """Why the last server gave no session; its error would hold frames, with what they own."""
        self._sessions: set[OpenEnvSession] = set()
        self._endings: set[asyncio.Task[None]] = set()
        self._guard = asyncio.create_task(self._until_the_end(ended), name="openenv sessions")

    async def open(self, arguments: Mapping[str, Any]) -> tuple["PooledSession", Observation]:
        """Begin an episode; return its session, which the caller closes, and what it shows first.

        Raises OpenEnvError.
        """
        self._num_waiting += 1
        limit = asyncio.timeout(self._wait_s)
        try:
            async with limit:
                return await self._opened(arguments)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise self._overdue() from error
        finally:
            self._num_waiting -= 1

    async def _opened(self, arguments: Mapping[str, Any]) -> tuple[PooledSession, Observation]:
        while True:
            async with self._door:
                server = await self._room()
                server.num_open += 1
            try:
                return await self._begun(server, arguments)
            except ServerFull as error:
                server.limit, self._last_answer = max(1, error.max_sessions or 1), error.message
                server.rest()
                self._say_full(server)
            except ServerAway as error:
                self._last_answer = error.message
                server.rest()

    async def _begun(
        self, server: RemoteOpenEnv, arguments: Mapping[str, Any]
    ) -> tuple[PooledSession, Observation]:
        """Open a session in a reserved place of a server, and reset it."""
        session: OpenEnvSession | None = None
        try:
            url = await asyncio.to_thread(server.start) if server.start else server.name
            session = await OpenEnvSession.connect(url, self._access)
            self._sessions.add(session)
            observation = await session.reset(arguments)
        except BaseException:
            if session is None:
                self._free(server)
            else:
                self.end(server, session)
            raise
        server.pause_s = _LEAST_PAUSE_S
        return PooledSession(self, server, session), observation

    async def _room(self) -> RemoteOpenEnv:
        """Wait for a server with a free place; return the one with the fewest of our sessions."""
        while True:
            now = time.monotonic()
            free = [server for server in self._servers if server.has_room(now)]
            if free:
                return min(free, key=lambda server: server.num_open)
            self._freed.clear()
            pauses = [s.asked_again - now for s in self._servers if s.asked_again > now]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(pauses, default=None)):
                    await self._freed.wait()

    def end(self, server: RemoteOpenEnv, session: OpenEnvSession) -> None:
        """Close a session, and free its place after the server has closed it."""
        task = asyncio.create_task(self._end(server, session), name="openenv close")
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)

    async def _end(self, server: RemoteOpenEnv, session: OpenEnvSession) -> None:
        try:
            await session.close()
        finally:
            self._sessions.discard(session)
            self._free(server)

    def _free(self, server: RemoteOpenEnv) -> None:
        server.num_open -= 1
        if server.limit is not None and server.num_open + 1 >= server.limit:
            server.asked_again = 0.0  # it was full because of our session alone, and has room now
        self._freed.set()

    def _say_full(self, server: RemoteOpenEnv) -> None:
        now = time.monotonic()
        if now - self._last_said > self._wait_s:
            self._last_said = now
            _log.warning(
                "openenv_server_full",
                server=server.name,
                max_sessions=server.limit,
                sessions_here=server.num_open - 1,
                episodes_waiting=self._num_waiting,
                hint="raise max_concurrent_envs of the server, or name several in env.kwargs.url",
            )

    def _overdue(self) -> OpenEnvError:
        held = "; ".join(
            f"{server.name}: {server.num_open} of ours"
            + (f" of at most {server.limit}" if server.limit is not None else "")
            for server in self._servers
        )
        last = f"; the last answer: {self._last_answer}" if self._last_answer else ""
        return OpenEnvError(
            f"no session within {self._wait_s:g} s, {self._num_waiting} episodes wait "
            f"({held}){last}",
            hint="raise max_concurrent_envs of the server, name several in env.kwargs.url, or "
            "raise env.kwargs.wait_s and env.reset_timeout_s",
        )

    async def _until_the_end(self, ended: Callable[["SessionPool"], None]) -> None:
        """Drop all connections when the event loop ends, which cancels its tasks."""
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            for session in self._sessions:
                session.abort()
            ended(self)
            await asyncio.sleep(0)  # the event loop closes them in its next iteration
