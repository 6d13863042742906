"""OpenAI's endpoints over the inference jobs of a pool.

`/v1/models` lists what a user's jobs serve, `/v1/chat/completions` and `/v1/completions` ask them.
Errors come in OpenAI's envelope, whatever they are.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

import structlog
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ....broker.client.connection import Broker
from ....broker.client.parts import ask_parts
from ....schemas.infer import CancelInference, ChatRequest, CompletionRequest, InferPart
from ....schemas.wire.errors import TinkermqError
from ..limits import MAX_INFERENCE_BYTES
from .answer import Answer, event
from .body import BodyError, ChatBody, CompletionBody, parse_body, query_of
from .serving_jobs import Serving, ServingJobs

T = TypeVar("T")

_GONE_S = 0.5
_CLIENT_CLOSED = 499
_LARGE = 64 << 10
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
_log: structlog.stdlib.BoundLogger = structlog.get_logger()


class UserBrokers(Protocol):
    """The connections of those who are logged in."""

    async def broker(self, request: Request) -> Broker:
        """Return the NATS connection of the user that a request comes from."""
        ...


def routes(sessions: UserBrokers) -> list[Route]:
    """Return the endpoints, for the gateway's application."""
    api = OpenAI(sessions)
    return [
        Route("/v1/models", guarded(api.models), methods=["GET"]),
        Route("/v1/models/{model:path}", guarded(api.model), methods=["GET"]),
        Route("/v1/chat/completions", guarded(api.chat), methods=["POST"]),
        Route("/v1/completions", guarded(api.complete), methods=["POST"]),
    ]


class OpenAI:
    """The endpoints."""

    def __init__(self, sessions: UserBrokers) -> None:
        self._sessions = sessions
        self._serving = ServingJobs()

    async def models(self, request: Request) -> Response:
        """List what the user's jobs serve."""
        broker = await self._sessions.broker(request)
        served = await self._serving.list(broker)
        return JSONResponse({"object": "list", "data": [_model(one) for one in served]})

    async def model(self, request: Request) -> Response:
        """Tell of one model."""
        broker = await self._sessions.broker(request)
        return JSONResponse(_model(await self._serving.find(broker, request.path_params["model"])))

    async def chat(self, request: Request) -> Response:
        """Continue a conversation."""
        return await self._answer(request, ChatBody)

    async def complete(self, request: Request) -> Response:
        """Continue texts."""
        return await self._answer(request, CompletionBody)

    async def _answer(
        self, request: Request, model: type[ChatBody] | type[CompletionBody]
    ) -> Response:
        broker = await self._sessions.broker(request)  # nobody's body is read
        body = await _parsed(await _body(request), model)
        serving = await self._serving.find(broker, body.model)
        query = query_of(body).model_copy(update={"adapter": serving.adapter})
        num_prompts = len(query.prompts) if isinstance(query, CompletionRequest) else 1
        answer = Answer(body, query.request, num_prompts * body.n)
        parts = _ask(broker, serving, query)
        if not body.stream:
            return JSONResponse(await _unless_gone(request, _whole(parts, answer)))
        try:
            first = await anext(parts)  # what is refused at once gets a status of its own
        except BaseException:
            await parts.aclose()
            raise
        return StreamingResponse(
            _stream(first, parts, answer),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )


def guarded(
    endpoint: Callable[[Request], Awaitable[Response]],
) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    """Return an endpoint whose errors come in OpenAI's envelope."""

    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except TinkermqError as error:
            headers = {"Retry-After": "1"} if error.status == 429 else None
            return JSONResponse(envelope(error, error.status), error.status, headers=headers)
        except HTTPException as error:
            told = _envelope(str(error.detail), error.status_code, None, None)
            return JSONResponse(told, error.status_code, headers=error.headers)

    return answer


def envelope(error: TinkermqError, status: int) -> dict[str, Any]:
    """Return an error as OpenAI words it."""
    text = f"{error.message}. {error.hint}" if error.hint else error.message
    param = error.param if isinstance(error, BodyError) else None
    code = "model_not_found" if status == 404 else error.code
    return _envelope(text, status, param, code)


def _envelope(message: str, status: int, param: str | None, code: str | None) -> dict[str, Any]:
    if status == 429:
        kind = "rate_limit_error"
    elif status >= 500:
        kind = "server_error"
    else:
        kind = _TYPES.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _ask(
    broker: Broker, serving: Serving, query: ChatRequest | CompletionRequest
) -> AsyncGenerator[InferPart, None]:
    scope = serving.record.scope
    verb = "chat" if isinstance(query, ChatRequest) else "complete"
    return ask_parts(
        broker,
        scope.infer(verb),
        query,
        InferPart,
        waiting_for=f"a server of {serving.record.name}",
        cancel=(scope.infer("cancel"), CancelInference(request=query.request)),
    )


async def _whole(parts: AsyncGenerator[InferPart, None], answer: Answer) -> dict[str, Any]:
    async with aclosing(parts):
        async for part in parts:
            answer.take(part)
    return answer.whole()


async def _stream(
    first: InferPart, parts: AsyncGenerator[InferPart, None], answer: Answer
) -> AsyncGenerator[str, None]:
    """Yield the events of an answer; the server stops when the reader goes away."""
    async with aclosing(parts):
        for text in (*answer.start(), *answer.events(first)):
            yield text
        try:
            async for part in parts:
                for text in answer.events(part):
                    yield text
        except TinkermqError as error:
            yield event(envelope(error, error.status))
            return
        for text in answer.end():
            yield text


async def _unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await something, but give it up when the client has gone away."""
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=_GONE_S)
            if not task.done() and await request.is_disconnected():
                raise HTTPException(_CLIENT_CLOSED, "the client has gone")
        return task.result()
    finally:
        task.cancel()


async def _parsed(
    raw: bytes, model: type[ChatBody] | type[CompletionBody]
) -> ChatBody | CompletionBody:
    """Read a body, a large one in a thread: the loop answers others meanwhile."""
    if len(raw) > _LARGE:
        return await asyncio.to_thread(parse_body, raw, model)
    return parse_body(raw, model)


async def _body(request: Request) -> bytes:
    raw = bytearray()
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > MAX_INFERENCE_BYTES:
            raise HTTPException(413, f"the body is over {MAX_INFERENCE_BYTES:,} bytes")
    return bytes(raw)


def _model(serving: Serving) -> dict[str, Any]:
    record = serving.record
    return {
        "id": serving.model,
        "object": "model",
        "created": int(record.created),
        "owned_by": record.user,
        "job": record.job,
        "name": record.name,
    }
