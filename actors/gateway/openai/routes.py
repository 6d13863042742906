"""OpenAI's endpoints over the inference jobs of a pool, and over its Tinker services.

`/v1/models` lists what a user's jobs serve, `/v1/chat/completions` and `/v1/completions` ask them;
so do the further dialects, `/v1/responses` and `/v1/messages`. A model may also be the path of a
checkpoint, `tinker://…`. Errors come in the words of each.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any, Protocol

import structlog
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ....broker.client.connection import Broker
from ....envs.agents.dialects.messages_api import messages_error
from ....envs.agents.dialects.request import RequestError, text_of
from ....schemas.infer import CompletionRequest, InferPart
from ....schemas.wire.errors import TinkermqError
from ..tinker.trainers import Trainers
from .answer import Answer, event
from .asking import (
    LARGE,
    STREAM_HEADERS,
    first_of,
    read_body,
    refuse_stateful,
    unless_gone,
)
from .body import BodyError, ChatBody, CompletionBody, parse_body, query_of
from .dialects import MESSAGES, RESPONSES, Dialects, Words
from .served_models import ServedModels

OF_TINKER = "/tinker/oai/api/v1"
"""Where programs look for OpenAI's endpoints that know Tinker's address alone."""
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
_log: structlog.stdlib.BoundLogger = structlog.get_logger()


class UserBrokers(Protocol):
    """The connections of those who are logged in."""

    async def broker(self, request: Request) -> Broker:
        """Return the NATS connection of the user that a request comes from."""
        ...


def routes(sessions: UserBrokers, trainers: Trainers) -> list[Route]:
    """Return the endpoints, for the gateway's application."""
    api = OpenAI(sessions, ServedModels(trainers))
    return [
        Route("/v1/models", guarded(api.models), methods=["GET"]),
        Route("/v1/models/{model:path}", guarded(api.model), methods=["GET"]),
        *(
            Route(f"{prefix}/{path}", guarded(one), methods=["POST"])
            for prefix in ("/v1", OF_TINKER)
            for path, one in (("chat/completions", api.chat), ("completions", api.complete))
        ),
        Route("/v1/responses", guarded(api.respond), methods=["POST"]),
        Route("/v1/messages", guarded(api.message, messages_error), methods=["POST"]),
    ]


class OpenAI:
    """The endpoints."""

    def __init__(self, sessions: UserBrokers, models: ServedModels) -> None:
        self._sessions = sessions
        self._models = models
        self._dialects = Dialects(models)

    async def models(self, request: Request) -> Response:
        """List what the user's jobs serve."""
        broker = await self._sessions.broker(request)
        served = await self._models.serving.list(broker)
        return JSONResponse({"object": "list", "data": [one.shown() for one in served]})

    async def model(self, request: Request) -> Response:
        """Tell of one model."""
        broker = await self._sessions.broker(request)
        found = await self._models.find(broker, request.path_params["model"])
        return JSONResponse(found.shown())

    async def chat(self, request: Request) -> Response:
        """Continue a conversation."""
        return await self._answer(request, ChatBody)

    async def complete(self, request: Request) -> Response:
        """Continue texts."""
        return await self._answer(request, CompletionBody)

    async def respond(self, request: Request) -> Response:
        """Answer as Responses does."""
        return await self._dialects.answer(
            request, await self._sessions.broker(request), RESPONSES, envelope
        )

    async def message(self, request: Request) -> Response:
        """Answer as Messages does."""
        return await self._dialects.answer(
            request, await self._sessions.broker(request), MESSAGES, messages_error
        )

    async def _answer(
        self, request: Request, model: type[ChatBody] | type[CompletionBody]
    ) -> Response:
        broker = await self._sessions.broker(request)  # nobody's body is read
        refuse_stateful(request)
        body = await _parsed(await read_body(request), model)
        model_asked = await self._models.find(broker, body.model)
        query = query_of(body).model_copy(update={"adapter": model_asked.adapter})
        num_prompts = len(query.prompts) if isinstance(query, CompletionRequest) else 1
        answer = Answer(body, query.request, num_prompts * body.n)
        parts = model_asked.ask(broker, query)
        if not body.stream:
            return JSONResponse(await unless_gone(request, _whole(parts, answer)))
        first = await first_of(parts)
        return StreamingResponse(
            _stream(first, parts, answer),
            media_type="text/event-stream",
            headers=STREAM_HEADERS,
        )


def guarded(
    endpoint: Callable[[Request], Awaitable[Response]], words: Words | None = None
) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    """Return an endpoint whose errors come in the words of its API: OpenAI's, by default."""
    told = words or envelope

    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except TinkermqError as error:
            headers = {"Retry-After": "1"} if error.status in (425, 429) else None
            return JSONResponse(told(error, error.status), error.status, headers=headers)
        except HTTPException as error:
            said = told(RequestError(str(error.detail)), error.status_code)
            return JSONResponse(said, error.status_code, headers=error.headers)

    return answer


def words_of(path: str) -> Words:
    """Return how errors are worded under a path."""
    return messages_error if path == "/v1/messages" else envelope


def envelope(error: TinkermqError, status: int) -> dict[str, Any]:
    """Return an error as OpenAI words it."""
    param = error.param if isinstance(error, BodyError | RequestError) else None
    code = "model_not_found" if status == 404 else error.code
    if status == 429:
        kind = "rate_limit_error"
    elif status >= 500:
        kind = "server_error"
    else:
        kind = _TYPES.get(status, "invalid_request_error")
    return {
        "error": {"message": text_of(error), "type": kind, "param": param or None, "code": code}
    }


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
        for text in (*answer.start(first), *answer.events(first)):
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


async def _parsed(
    raw: bytes, model: type[ChatBody] | type[CompletionBody]
) -> ChatBody | CompletionBody:
    """Read a body, a large one in a thread: the loop answers others meanwhile."""
    if len(raw) > LARGE:
        return await asyncio.to_thread(parse_body, raw, model)
    return parse_body(raw, model)
