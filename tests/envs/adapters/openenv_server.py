"""A server that speaks OpenEnv's wire without OpenEnv's package: honest, full, or hostile.

`make_app` returns a Starlette application; `serving` runs one in a thread. As a module for uvicorn
it is `openenv_server:app`.
"""

import asyncio
import contextlib
import inspect
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

METADATA = {"type": "object", "additionalProperties": True}
TEXT_ACTION = {
    "type": "object",
    "title": "EchoAction",
    "additionalProperties": False,
    "properties": {"metadata": METADATA, "message": {"type": "string"}},
    "required": ["message"],
}
FORM_ACTION = {
    "type": "object",
    "title": "MoveAction",
    "description": "Move on the board.",
    "additionalProperties": False,
    "$defs": {"Direction": {"enum": ["up", "down"], "type": "string"}},
    "properties": {
        "metadata": METADATA,
        "direction": {"$ref": "#/$defs/Direction"},
        "steps": {"type": "integer", "default": 1},
    },
    "required": ["direction"],
}
CALL_ACTION = {
    "type": "object",
    "title": "CallToolAction",
    "properties": {
        "metadata": METADATA,
        "type": {"type": "string", "const": "call_tool"},
        "tool_name": {"type": "string"},
        "arguments": {"type": "object"},
    },
    "required": ["tool_name"],
}
TOOLS = [
    {
        "name": "add",
        "description": "Add two numbers.",
        "inputSchema": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
    {"name": "finish", "description": "", "inputSchema": {"type": "object", "properties": {}}},
]


@dataclass
class Behaviour:
    """What a server does."""

    action: Any = field(default_factory=lambda: TEXT_ACTION)
    tools: Any = None
    """Of an MCP environment."""
    splits: dict[str, int] = field(default_factory=dict[str, int])
    """Tasks of each."""
    max_sessions: int = 1000
    key: str = ""
    """Without it in a request's header, the request is refused."""
    answer: Callable[[dict[str, Any]], Any] | None = None
    """Returns what is sent for a message instead of the right answer; None: that."""
    delay_s: Callable[[dict[str, Any]], float] | None = None
    """Returns how long a message waits before it is answered."""
    redirect: str = ""
    """Every request is sent there."""
    description: str = "An echo."
    num_open: int = 0
    most_open: int = 0
    num_resets: int = 0


def make_app(behaviour: Behaviour) -> Starlette:
    """Return a server that behaves so."""
    one = behaviour

    def guarded(
        answer: Callable[[Request, Any], Any], status: int = 200
    ) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            if one.redirect:
                return Response(status_code=307, headers={"location": one.redirect})
            if one.key and request.headers.get("authorization") != f"Bearer {one.key}":
                return JSONResponse({"detail": "who are you"}, 401)
            body = await request.json() if request.method == "POST" else {}
            return JSONResponse(answer(request, body), status)

        return endpoint

    def tasks(request: Request, body: Any) -> Any:
        if not one.splits:
            raise HTTPException(501)
        if request.url.path.endswith("/splits"):
            return [{"name": name, "type": "train"} for name in one.splits]
        return {"num_tasks": one.splits[body["split"]]}

    def tools(_: Request, body: Any) -> Any:
        if one.tools is None:
            return {"jsonrpc": "2.0", "id": 1, "error": {"code": -32603, "message": "no MCP"}}
        return {"jsonrpc": "2.0", "id": body["id"], "result": {"tools": one.tools}}

    async def session(websocket: WebSocket) -> None:
        if one.redirect:
            denial = Response(status_code=307, headers={"location": one.redirect})
            await websocket.send_denial_response(denial)
            return
        if one.key and websocket.headers.get("authorization") != f"Bearer {one.key}":
            await websocket.close()
            return
        await websocket.accept()
        if one.num_open >= one.max_sessions:
            refusal = {"message": "full", "code": "CAPACITY_REACHED"}
            counts = {"active_sessions": one.num_open, "max_sessions": one.max_sessions}
            await websocket.send_text(json.dumps({"type": "error", "data": {**refusal, **counts}}))
            await websocket.close()
            return
        one.num_open += 1
        one.most_open = max(one.most_open, one.num_open)
        try:
            await _play(websocket, one)
        except WebSocketDisconnect:
            return
        finally:
            one.num_open -= 1
        await websocket.close()

    about = {"name": "echo", "description": one.description}
    return Starlette(
        routes=[
            Route("/health", guarded(lambda *_: {"status": "healthy"})),
            Route("/schema", guarded(lambda *_: {"action": one.action, "observation": {}})),
            Route("/metadata", guarded(lambda *_: about)),
            Route("/list_environments", guarded(lambda *_: ["echo"])),
            Route("/echo/splits", guarded(tasks)),
            Route("/echo/num_tasks", guarded(tasks), methods=["POST"]),
            Route("/mcp", guarded(tools), methods=["POST"]),
            WebSocketRoute("/ws", session),
        ]
    )


async def _play(websocket: WebSocket, one: Behaviour) -> None:
    while True:
        message = json.loads(await websocket.receive_text())
        kind, data = message["type"], message.get("data", {})
        if kind == "close":
            return
        if one.delay_s is not None:
            await asyncio.sleep(one.delay_s(message))
        odd = one.answer(message) if one.answer is not None else None
        if inspect.iscoroutine(odd):
            await odd
        elif isinstance(odd, bytes):
            await websocket.send_bytes(odd)
        elif isinstance(odd, Iterator):
            with contextlib.suppress(WebSocketDisconnect, RuntimeError):
                for piece in odd:
                    await websocket.send_text(piece)
                    await asyncio.sleep(0)
            return
        elif odd is not None:
            await websocket.send_text(odd if isinstance(odd, str) else json.dumps(odd))
        elif kind == "reset":
            one.num_resets += 1
            await websocket.send_text(observed({"prompt": _words(data)}))
        else:
            await websocket.send_text(_step(data))


def _words(arguments: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in sorted(arguments.items()))


def _step(action: dict[str, Any]) -> str:
    if action.get("type") == "call_tool":
        arguments = action["arguments"]
        text = str(sum(arguments.values()))
        result = {"content": [{"type": "text", "text": text}], "is_error": False}
        fields = {"tool_name": action["tool_name"], "result": result, "error": None}
        return observed(fields, 1.0, action["tool_name"] == "finish")
    if "message" in action:
        if action["message"] == "refuse":
            data = {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": ["no"]}
            return json.dumps({"type": "error", "data": data})
        return observed(
            {"reply": action["message"][::-1]}, len(action["message"]) / 10, action == STOP
        )
    return observed({"moved": action["direction"], "steps": action.get("steps", 1)}, None)


STOP = {"message": "stop"}


def observed(fields: dict[str, Any], reward: Any = 0.0, done: Any = False) -> str:
    """Return the message of an observation."""
    fields = {**fields, "metadata": {"secret": "x"}}
    return json.dumps(
        {"type": "observation", "data": {"observation": fields, "reward": reward, "done": done}}
    )


class Serving:
    """A server in a thread."""

    def __init__(self, app: Any, port: int = 0) -> None:
        self.socket = socket.create_server(("127.0.0.1", port))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        config = uvicorn.Config(app, log_level="critical", lifespan="off", ws_max_size=1 << 30)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self.socket]}, daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """End it with all its connections."""
        self._server.should_exit = self._server.force_exit = True
        self._thread.join()
        self.socket.close()


@contextlib.contextmanager
def serving(*behaviours: Behaviour) -> Iterator[Sequence[str]]:
    """Run servers; yield their URLs."""
    servers = [Serving(make_app(one)) for one in behaviours]
    try:
        yield [server.url for server in servers]
    finally:
        for server in servers:
            server.stop()


app = make_app(Behaviour(max_sessions=int(os.environ.get("MAX_SESSIONS", "1000"))))
