"""Serve a game as an OpenEnv environment, over HTTP and WebSockets, with Starlette.

The routes and messages are those of `openenv.core.env_server` 0.10, so that its clients and other
trainers play our games unchanged. `/ws` has sessions; plain HTTP has none: `/reset` answers a first
prompt, `/step` the first turn of an episode that its parameters name. `/mcp` calls the tools of a
game that has some, with or without a session.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, ClassVar, TypeAlias, TypeVar, cast
from urllib.parse import urlsplit

import structlog

from ..schemas.config.job import EnvConfig
from ..schemas.http_server import HttpBounds, HttpServer, listening_socket
from ..schemas.wire import errors
from ..schemas.wire.codec import read_json
from ..schemas.wire.foreign import shown
from .openenv_sessions import (
    MAX_TASKS,
    ActionError,
    Answer,
    CapacityError,
    EnvSession,
    EnvSessions,
    NoTaskError,
    ServedGame,
)

try:
    import websockets  # noqa: F401  # pyright: ignore[reportUnusedImport]  # uvicorn's
    from starlette.applications import Starlette
    from starlette.requests import HTTPConnection, Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route, WebSocketRoute
    from starlette.websockets import WebSocket, WebSocketDisconnect
except ImportError as error:
    raise errors.ConfigError(
        "the packages starlette, uvicorn and websockets are not all installed",
        hint="install them: pip install 'tinkermq[openenv]'",
    ) from error

API_VERSION = "1.0.0"
"""Of OpenEnv's HTTP interface."""
_CLOSE_S = 5.0
"""How long the end of a connection may take."""
_MORE_CONNECTIONS = 64
"""Connections beyond one for each session: health checks, tasks, refusals."""
_STOP_S = 0.5

_log: structlog.stdlib.BoundLogger = structlog.get_logger()

T = TypeVar("T")
_Json: TypeAlias = dict[str, Any]
_Handler: TypeAlias = Callable[["Request"], Awaitable["Response"]]
_OPERATION: _Json = {"responses": {"200": {"description": "As OpenEnv's server answers"}}}


@dataclass(frozen=True)
class ServerBounds:
    """What clients of a served game may take."""

    max_sessions: int = 64
    """Sessions at once; OpenEnv's `max_concurrent_envs`."""
    idle_s: float = 600.0
    """A session that is not used for so long is closed."""
    stalled_s: float = 60.0
    """A client that takes nothing of an answer for so long loses its session."""
    max_message_bytes: int = 4 << 20
    """Of a message, or of a request's body."""


class OpenEnvServer:
    """One game, served until stopped."""

    def __init__(
        self, config: EnvConfig, *, seed: int = 0, bounds: ServerBounds | None = None
    ) -> None:
        """Prepare to serve `config.game`. Raises GameError, DataError, ConfigError."""
        self.bounds = bounds or ServerBounds()
        self.game = ServedGame(config, seed=seed)
        self.sessions = EnvSessions(
            self.game, most=self.bounds.max_sessions, idle_s=self.bounds.idle_s
        )

    @contextlib.asynccontextmanager
    async def listening(self, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[int]:
        """Serve in this context; yield the port. Raises StorageError for one in use."""
        most = self.bounds.max_sessions + _MORE_CONNECTIONS
        http = HttpServer(
            "server",
            self.application(),
            HttpBounds(max_running=most),
            ws="websockets-sansio",
            ws_max_size=self.bounds.max_message_bytes,
        )
        async with self.game.running():
            watching = asyncio.create_task(self.sessions.watch(), name="end overdue sessions")
            try:
                listening = listening_socket(host, port)
                await http.listen(listening)
                yield int(listening.getsockname()[1])
            finally:
                await http.stop(_STOP_S)
                watching.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await watching

    def application(self) -> Starlette:
        """Return the ASGI application."""
        named = "/{env_name}"
        posts = {
            "/reset": self._reset,
            "/step": self._step,
            "/mcp": self._mcp,
            f"{named}/tasks": self._tasks,
            f"{named}/num_tasks": self._num_tasks,
            f"{named}/task": self._task,
            f"{named}/task_range": self._task_range,
        }
        gets = {
            "/state": self._state,
            "/schema": self._schema,
            "/metadata": self._metadata,
            "/health": self._health,
            "/openapi.json": self._openapi,
            "/list_environments": self._names,
            f"{named}/splits": self._splits,
        }
        routes = [Route(path, _answering(one), methods=["POST"]) for path, one in posts.items()]
        routes += [Route(path, _answering(one), methods=["GET"]) for path, one in gets.items()]
        self._paths = {path: {"post": _OPERATION} for path in posts}
        self._paths |= {path: {"get": _OPERATION} for path in gets}
        sockets = [WebSocketRoute("/ws", self._ws), WebSocketRoute("/mcp", self._mcp_socket)]
        return Starlette(routes=[*routes, *sockets])

    # Routes without a session.

    async def _reset(self, request: Request) -> Response:
        with self._session() as session:
            return JSONResponse(await session.reset(await self._body(request)))

    async def _step(self, request: Request) -> Response:
        asked = await self._body(request)
        action = asked.pop("action", None)
        if not isinstance(action, dict):
            raise ActionError("action: an object is needed", hint='send {"action": {"text": "…"}}')
        for name in ("timeout_s", "request_id"):  # OpenEnv's own; the game has its time limits
            asked.pop(name, None)
        with self._session() as session:
            return JSONResponse(await session.act(cast("_Json", action), asked))

    async def _state(self, request: Request) -> Response:
        del request
        return JSONResponse(EnvSession(self.game).state.model_dump())

    async def _schema(self, request: Request) -> Response:
        del request
        return JSONResponse(self.game.schemas())

    async def _metadata(self, request: Request) -> Response:
        del request
        return JSONResponse(
            {
                "name": self.game.name,
                "description": self.game.description,
                "readme_content": None,
                "version": version("tinkermq"),
                "author": None,
                "documentation_url": None,
            }
        )

    async def _health(self, request: Request) -> Response:
        del request
        return JSONResponse({"status": "healthy"})

    async def _openapi(self, request: Request) -> Response:
        del request
        info = {"title": f"{self.game.name}, an OpenEnv environment", "version": API_VERSION}
        return JSONResponse({"openapi": "3.1.0", "info": info, "paths": self._paths})

    # Tasks.

    async def _names(self, request: Request) -> Response:
        del request
        return JSONResponse([self.game.name])

    async def _splits(self, request: Request) -> Response:
        self._check_name(request)
        return JSONResponse(self.game.splits())

    async def _tasks(self, request: Request) -> Response:
        split = _text(await self._of_this(request), "split")
        tasks = self.game.tasks(split, 0, MAX_TASKS)  # a preview, where there are more
        return JSONResponse({"tasks": tasks, "env_name": self.game.name})

    async def _num_tasks(self, request: Request) -> Response:
        split = _text(await self._of_this(request), "split")
        return JSONResponse({"num_tasks": self.game.num_tasks(split)})

    async def _task(self, request: Request) -> Response:
        asked = await self._of_this(request)
        index = _number(asked, "index")
        if index is None:
            raise ActionError("index: a number is needed")
        return JSONResponse({"task": self.game.task(_text(asked, "split"), index)})

    async def _task_range(self, request: Request) -> Response:
        asked = await self._of_this(request)
        bounds = _number(asked, "start"), _number(asked, "stop")
        return JSONResponse({"tasks": self.game.tasks(_text(asked, "split"), *bounds)})

    async def _of_this(self, request: Request) -> _Json:
        self._check_name(request)
        return await self._body(request)

    def _check_name(self, request: Request) -> None:
        name = str(request.path_params["env_name"])
        if name.lower() != self.game.name.lower():
            raise errors.NotFoundError(
                f"there is no environment {shown(name)} here", hint=f"it is {self.game.name}"
            )

    # Sessions on a WebSocket.

    async def _ws(self, socket: WebSocket) -> None:
        async def answer(session: EnvSession, text: str) -> _Json | None:
            return await _answer_message(session, self._mcp_answer, text)

        await self._hold(socket, answer, _error_message)

    async def _mcp_socket(self, socket: WebSocket) -> None:
        async def answer(session: EnvSession, text: str) -> _Json | None:
            return await self._mcp_answer(read_json(text), session)

        await self._hold(socket, answer, lambda error: _rpc_error(None, error))

    async def _hold(
        self,
        socket: WebSocket,
        answer: Callable[[EnvSession, str], Awaitable[_Json | None]],
        refusal: Callable[[errors.TinkermqError], _Json],
    ) -> None:
        """Answer the messages of a connection until it closes or is idle for too long."""
        if _is_of_another_site(socket):
            await socket.close()  # before it is accepted: status 403
            return
        await socket.accept()
        name = socket.query_params.get("session_id")
        try:
            session = self.sessions.attach(name) if name else self.sessions.open()
        except errors.TinkermqError as error:
            with contextlib.suppress(WebSocketDisconnect):
                await self._send(socket, refusal(_session_error(error)))
                await _close(socket)
            return
        session.is_attached = True
        try:
            await self._converse(socket, session, answer, refusal)
            await _close(socket)
        except TimeoutError:
            _log.info("session_unused", session=session.id, idle_s=self.bounds.idle_s)
            await _close(socket, 1001)
        except WebSocketDisconnect:
            pass
        finally:
            session.is_attached = False
            if name is None:
                self.sessions.close(session)

    async def _converse(
        self,
        socket: WebSocket,
        session: EnvSession,
        answer: Callable[[EnvSession, str], Awaitable[_Json | None]],
        refusal: Callable[[errors.TinkermqError], _Json],
    ) -> None:
        """Answer messages until one asks for the end; TimeoutError without any for too long."""
        while True:
            async with asyncio.timeout(self.bounds.idle_s):
                text = await _receive(socket)
            reply = await _answered(session, text, answer, refusal)
            if reply is None:
                return
            await self._send(socket, reply)

    async def _send(self, socket: WebSocket, message: _Json) -> None:
        """Send a message; a client that takes nothing counts as gone: WebSocketDisconnect."""
        try:
            async with asyncio.timeout(self.bounds.stalled_s):
                await socket.send_text(json.dumps(message))
        except TimeoutError as error:
            raise WebSocketDisconnect(1006) from error

    # MCP's JSON-RPC.

    async def _mcp(self, request: Request) -> Response:
        try:
            value: Any = read_json(await self._text(request))
        except errors.MessageError as error:
            return JSONResponse(_rpc_error(None, error))
        return JSONResponse(await self._mcp_answer(value, None))

    async def _mcp_answer(self, value: Any, session: EnvSession | None) -> _Json:
        call = cast("_Json", value) if isinstance(value, dict) else {}
        number: Any = call.get("id")
        number = number if isinstance(number, str | int) else None
        method, parameters = call.get("method"), call.get("params", {})
        if call.get("jsonrpc") != "2.0" or not isinstance(method, str):
            return _rpc_error(number, _NoRequestError("jsonrpc must be 2.0, and method a text"))
        if not isinstance(parameters, dict):
            return _rpc_error(number, ActionError("params must be an object"))
        try:
            result = await self._call(method, cast("_Json", parameters), session)
        except errors.TinkermqError as error:
            return _rpc_error(number, error)
        return {"jsonrpc": "2.0", "id": number, "result": result}

    async def _call(self, method: str, parameters: _Json, session: EnvSession | None) -> Any:
        if method == "openenv/session/create":
            opened = session or self.sessions.open()
            return {"session_id": opened.id}
        if method == "openenv/session/close":
            return self._close(_text(parameters, "session_id"))
        if not self.game.has_tools:
            raise errors.StateError("this game has no tools", hint="act with a text over /ws")
        if method not in ("tools/list", "tools/call"):
            raise _NoMethodError(f"there is no method {shown(method)}")
        if session is None and parameters.get("session_id"):
            session = self.sessions.find(_text(parameters, "session_id"))
        if method == "tools/list":
            tools = self.game.tools() if session is None else session.tools
            return {"tools": [{**tool, "inputSchema": tool["input_schema"]} for tool in tools]}
        arguments = parameters.get("arguments", {})
        if not isinstance(arguments, dict):
            raise ActionError("arguments: an object is needed")
        with contextlib.nullcontext(session) if session else self._session() as playing:
            return _mcp_result(
                await playing.call_tool(_text(parameters, "name"), cast("_Json", arguments), {})
            )

    def _close(self, name: str) -> _Json:
        session = self.sessions.find(name)
        if session.is_attached:
            raise ActionError(
                f"session {name} is held by a connection", hint="close the connection"
            )
        self.sessions.close(session)
        return {"session_id": name, "closed": True}

    @contextlib.contextmanager
    def _session(self) -> Iterator[EnvSession]:
        session = self.sessions.open()
        try:
            yield session
        finally:
            self.sessions.close(session)

    async def _body(self, request: Request) -> _Json:
        text = await self._text(request)
        value: Any = read_json(text) if text.strip() else {}
        if not isinstance(value, dict):
            raise ActionError("an object is needed")
        return cast("_Json", value)

    async def _text(self, request: Request) -> str:
        if _is_of_another_site(request):
            raise errors.DeniedError("a page of another site may not play here")
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > self.bounds.max_message_bytes:
                raise _TooLargeError(
                    f"the body has more than {self.bounds.max_message_bytes:,} bytes"
                )
        return body.decode(errors="replace")


class _TooLargeError(errors.MessageError):
    """A body over its bound."""

    status: ClassVar[int] = 413


class _SessionError(errors.TinkermqError):
    """A session that a connection cannot have."""


class _UnknownTypeError(ActionError):
    """A message of a type that there is not."""


class _NoRequestError(ActionError):
    """JSON that is no request of JSON-RPC."""


class _NoMethodError(errors.NotFoundError):
    """A method that there is not."""


_SOCKET_CODES: tuple[tuple[type[errors.TinkermqError], str], ...] = (
    (CapacityError, "CAPACITY_REACHED"),
    (_SessionError, "SESSION_ERROR"),
    (_UnknownTypeError, "UNKNOWN_TYPE"),
    (errors.MessageError, "INVALID_JSON"),
    (ActionError, "VALIDATION_ERROR"),
    (NoTaskError, "VALIDATION_ERROR"),
    (errors.TinkermqError, "EXECUTION_ERROR"),
)
"""OpenEnv's codes of our errors, the first that fits."""
_RPC_CODES: tuple[tuple[type[errors.TinkermqError], int], ...] = (
    (CapacityError, -32000),
    (errors.MessageError, -32700),
    (_NoRequestError, -32600),
    (_NoMethodError, -32601),
    (ActionError, -32602),
    (errors.NotFoundError, -32602),
    (errors.TinkermqError, -32603),
)
"""Those of JSON-RPC."""


async def _answer_message(
    session: EnvSession, mcp: Callable[[Any, EnvSession | None], Awaitable[_Json]], text: str
) -> _Json | None:
    """Answer a message of `/ws`; None for the one that closes the session."""
    message: Any = read_json(text)
    fields = cast("_Json", message) if isinstance(message, dict) else {}
    kind, data = fields.get("type"), fields.get("data", {})
    if not isinstance(data, dict):
        raise ActionError("data: an object is needed")
    values = cast("_Json", data)
    match kind:
        case "reset":
            return _observation_message(await session.reset(values))
        case "step":
            return _observation_message(await session.act(values, {}))
        case "state":
            return {"type": "state", "data": session.state.model_dump()}
        case "mcp":
            return {"type": "mcp", "data": await mcp(values, session)}
        case "close":
            return None
        case _:
            raise _UnknownTypeError(
                f"there is no message of type {shown(kind)}",
                hint="send reset, step, state, mcp or close",
            )


def _observation_message(answer: Answer) -> _Json:
    return {"type": "observation", "data": answer}


async def _answered(
    session: EnvSession,
    text: str,
    answer: Callable[[EnvSession, str], Awaitable[_Json | None]],
    refusal: Callable[[errors.TinkermqError], _Json],
) -> _Json | None:
    try:
        return await answer(session, text)
    except errors.TinkermqError as error:
        return refusal(error)


def _error_message(error: errors.TinkermqError) -> _Json:
    data: _Json = {"message": _words(error), "code": _code(_SOCKET_CODES, error)}
    if isinstance(error, ActionError) and error.details:
        data["errors"] = list(error.details)
    return {"type": "error", "data": {**data, **_capacity(error)}}


def _session_error(error: errors.TinkermqError) -> errors.TinkermqError:
    """Return the error of a session that is not there, or held; one of capacity stays."""
    if isinstance(error, CapacityError):
        return error
    return _SessionError(error.message, hint=error.hint)


def _rpc_error(number: str | int | None, error: errors.TinkermqError) -> _Json:
    code = _code(_RPC_CODES, error)
    fields = {"code": code, "message": _words(error), "data": _capacity(error) or None}
    return {"jsonrpc": "2.0", "id": number, "error": fields}


def _capacity(error: errors.TinkermqError) -> _Json:
    if not isinstance(error, CapacityError):
        return {}
    return {"active_sessions": error.num_open, "max_sessions": error.most}


def _code(codes: Iterable[tuple[type[errors.TinkermqError], T]], error: errors.TinkermqError) -> T:
    return next(code for kind, code in codes if isinstance(error, kind))


def _words(error: errors.TinkermqError) -> str:
    return f"{error.message}: {error.hint}" if error.hint else error.message


def _mcp_result(answer: Answer) -> _Json:
    """Return the answer of a call as MCP has it, with the reward beside it."""
    observation = answer["observation"]
    if observation["error"] is not None:
        raise errors.NotFoundError(observation["error"]["message"])
    meta = {"reward": answer["reward"], "done": answer["done"]}
    return {**observation["result"], "isError": False, "meta": meta, "_meta": meta}


def _answering(handler: _Handler) -> _Handler:
    """Return a handler that answers an error of ours with its status."""

    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except errors.TinkermqError as error:
            detail = {"detail": _words(error), **_capacity(error)}
            return JSONResponse(detail, status_code=error.status)

    return answer


def _is_of_another_site(connection: HTTPConnection) -> bool:
    """Whether a browser sends this for a page of another site, which could play unseen."""
    origin = connection.headers.get("origin")
    return origin is not None and urlsplit(origin).netloc != connection.headers.get("host")


async def _receive(socket: WebSocket) -> str:
    message = await socket.receive()
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(message.get("code", 1005))
    text = message.get("text")
    return text if text is not None else bytes(message["bytes"]).decode(errors="replace")


async def _close(socket: WebSocket, code: int = 1000) -> None:
    """Close a connection, unless its client takes not even that."""
    with contextlib.suppress(WebSocketDisconnect, TimeoutError):
        async with asyncio.timeout(_CLOSE_S):
            await socket.close(code)


def _text(asked: _Json, name: str) -> str:
    value = asked.get(name)
    if not isinstance(value, str):
        raise ActionError(f"{name}: a text is needed")
    return value


def _number(asked: _Json, name: str) -> int | None:
    value = asked.get(name)
    if value is not None and type(value) is not int:
        raise ActionError(f"{name}: a whole number is needed")
    return value
