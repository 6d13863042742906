"""The endpoints of the model APIs over the inference jobs of a pool, and over its Tinker services.

`/v1/models` lists what a user's jobs serve; `/v1/chat/completions`, `/v1/completions`,
`/v1/responses` and `/v1/messages` ask them. A model may also be the path of a checkpoint,
`tinker://…`. Errors come in the words of each API.
"""

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ....broker.client.connection import Broker
from ....envs.model_apis.answers import ModelApi, retry_headers
from ....envs.model_apis.chat import CHAT, COMPLETIONS
from ....envs.model_apis.messages import MESSAGES
from ....envs.model_apis.request import RequestError
from ....envs.model_apis.responses import RESPONSES
from ....schemas.wire.errors import TinkermqError
from ..tinker.trainers import Trainers
from .answering import Answering
from .models import ServedModels

OF_TINKER = "/tinker/oai/api/v1"
"""Where programs look for OpenAI's endpoints that know Tinker's address alone."""
_NO_MODEL = "model_not_found"


class UserBrokers(Protocol):
    """The connections of those who are logged in."""

    async def broker(self, request: Request) -> Broker:
        """Return the NATS connection of the user that a request comes from."""
        ...


def routes(sessions: UserBrokers, trainers: Trainers) -> list[Route]:
    """Return the endpoints, for the gateway's application."""
    endpoints = ModelEndpoints(sessions, ServedModels(trainers))
    asked = (
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", COMPLETIONS),
        (f"{OF_TINKER}/chat/completions", CHAT),
        (f"{OF_TINKER}/completions", COMPLETIONS),
        ("/v1/responses", RESPONSES),
        ("/v1/messages", MESSAGES),
    )
    return [
        Route("/v1/models", guarded(endpoints.models), methods=["GET"]),
        Route("/v1/models/{model:path}", guarded(endpoints.model), methods=["GET"]),
        *(
            Route(path, guarded(endpoints.answering(api), api), methods=["POST"])
            for path, api in asked
        ),
    ]


class ModelEndpoints:
    """The endpoints."""

    def __init__(self, sessions: UserBrokers, models: ServedModels) -> None:
        """Answer those whom `sessions` knows from `models`."""
        self._sessions = sessions
        self._models = models
        self._answering = Answering(models)

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

    def answering(self, api: ModelApi) -> Callable[[Request], Awaitable[Response]]:
        """Return the endpoint of an API."""

        async def answer(request: Request) -> Response:
            broker = await self._sessions.broker(request)  # before the body is read
            return await self._answering.answer(request, broker, api)

        return answer


def guarded(
    endpoint: Callable[[Request], Awaitable[Response]], api: ModelApi = CHAT
) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    """Return an endpoint whose errors come in the words of an API."""

    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except TinkermqError as error:
            headers = retry_headers(error, error.status)
            return JSONResponse(worded(error, error.status, api), error.status, headers=headers)
        except HTTPException as error:
            refused = RequestError(str(error.detail))
            value = worded(refused, error.status_code, api)
            return JSONResponse(value, error.status_code, headers=error.headers)

    return answer


def api_of(path: str) -> ModelApi:
    """Return the API in whose words errors come under a path."""
    return {"/v1/messages": MESSAGES, "/v1/responses": RESPONSES}.get(path, CHAT)


def worded(error: TinkermqError, status: int, api: ModelApi) -> dict[str, Any]:
    """Return an error as the API words it; what is not there is a model that is not served."""
    value = api.error(error, status)
    if status == 404 and "code" in value["error"]:
        value["error"]["code"] = _NO_MODEL
    return value
