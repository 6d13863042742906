"""The OpenAI and Anthropic APIs over the served models of a pool.

`/v1/models` lists the models; `/v1/chat/completions`, `/v1/completions`, `/v1/responses` and
`/v1/messages` send requests to the server of an inference job, or to a sampler of a Tinker service
for the path of a checkpoint (`tinker://…`). `/tokenize`, `/detokenize` (vLLM's) and
`/v1/messages/count_tokens` ask it for tokens alone. Errors have the form of each API.

A parameter without effect is refused by name, unless it is a label or its value is the default. One
that only asks for a manner, such as how long to think, is named in the header
`x-tinkermq-without-effect`.
Chat Completions keep reasoning in their text, like other servers, unless the required form of the
answer excludes it; Responses and Messages return it as reasoning.
"""

import asyncio
import json
import time
import uuid
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
)
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypeVar, cast

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ...broker.client.connection import Broker
from ...broker.client.parts import Room, ask_parts
from ...broker.jobs import JobStore
from ...broker.presence import list_presences
from ...schemas import infer
from ...schemas.job import FINAL_STATES, JobRecord
from ...schemas.local.process import finish
from ...schemas.model_apis import answers
from ...schemas.model_apis.chat import CHAT, COMPLETIONS
from ...schemas.model_apis.messages import MESSAGES
from ...schemas.model_apis.neutral import is_label
from ...schemas.model_apis.reading import AnswerReader
from ...schemas.model_apis.request import (
    Fields,
    ModelRequest,
    RequestError,
    bounds_error,
    json_of,
    refused_field,
    served_request,
)
from ...schemas.model_apis.responses import RESPONSES
from ...schemas.tinker.names import CheckpointName, is_path
from ...schemas.wire import errors
from .holders import PrefixHolders, beginnings_of
from .limits import TAKEN
from .tinker.trainers import Trainers

# -- finding the model of a request ----------------------------------------------------------------

_FRESH_S = 2.0
_NOT_SERVED = FINAL_STATES | {"PAUSED"}


@dataclass(frozen=True)
class Serving:
    """A served model of a job."""

    record: JobRecord
    version: int | None
    is_ready: bool = True
    """One of its servers is alive and has loaded the model."""
    adapter: str = ""
    """One of its further adapters, as `run@step`; empty: its main model."""
    loads: Mapping[str, float] = field(default_factory=dict[str, float])
    """Requests of each server that has loaded the model."""
    holders: PrefixHolders = field(default_factory=PrefixHolders)

    @property
    def model(self) -> str:
        """The model's name: `run@step`, or the job's name."""
        record = self.record
        if self.adapter:
            return self.adapter
        if record.follow is not None and self.version is not None:
            return f"{record.serves}@{self.version}"
        return record.serves or record.name

    def is_called(self, name: str) -> bool:
        """Whether a name means this model: job, run, or `run@step`."""
        record = self.record
        if self.adapter:
            return name == self.adapter
        return name in (record.name, record.job, self.model, record.serves)

    async def ask(
        self, broker: Broker, query: "Query", room: Room | None
    ) -> AsyncGenerator[infer.InferPart, None]:
        """Send a request to one of the job's servers; closing the generator cancels it.

        Of several servers that which holds the prompt's beginning is asked, then the least loaded
        one, then all: a server that refuses would let the request wait, or has ended.
        """
        if len(self.loads) > 1:
            job = self.record.job
            beginnings = await asyncio.to_thread(beginnings_of, broker.user, job, query)
            for server in self.holders.order(beginnings, self.loads):
                is_taken = False
                try:
                    with self.holders.asking(job, server):
                        async with aclosing(self._send(broker, query, room, server)) as parts:
                            async for part in parts:
                                if not is_taken:
                                    self.holders.note(beginnings, server)
                                is_taken = True
                                yield part
                    return
                except (errors.BusyError, errors.NobodyAnswersError):
                    if is_taken:
                        raise
        async with aclosing(self._send(broker, query, room)) as parts:
            async for part in parts:
                yield part

    def _send(
        self, broker: Broker, query: "Query", room: Room | None, server: str = ""
    ) -> AsyncGenerator[infer.InferPart, None]:
        scope = self.record.scope
        verb = "chat" if isinstance(query, infer.ChatRequest) else "complete"
        return ask_parts(
            broker,
            scope.infer_at(server, verb) if server else scope.infer(verb),
            query,
            infer.InferPart,
            waiting_for=f"a server of {self.record.name}",
            cancel=(scope.infer("cancel"), infer.CancelInference(request=query.request)),
            room=room,
        )

    def shown(self) -> dict[str, Any]:
        """Return its entry in the list of models."""
        record = self.record
        return {
            "id": self.model,
            "object": "model",
            "created": int(record.created),
            "owned_by": record.user,
            "job": record.job,
            "name": record.name,
        }


class ServingJobs:
    """The serving jobs of each user, cached for a few seconds."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[float, list[Serving]]] = {}
        self._holders = PrefixHolders()

    async def _all(self, broker: Broker) -> list[Serving]:
        """Return the jobs with and without available servers, newest first."""
        read, serving = self._known.get(broker.user, (0.0, []))
        if not read or time.monotonic() - read > _FRESH_S:
            serving = await self._read(broker)
            self._known[broker.user] = (time.monotonic(), serving)
        return serving

    async def _read(self, broker: Broker) -> list[Serving]:
        records = [
            record
            for record in await JobStore(broker).list_jobs(broker.user)
            if record.kind == "infer" and record.state not in _NOT_SERVED
        ]
        results = await asyncio.gather(*(_serving(broker, record) for record in records))
        return [
            replace(serving, adapter=adapter, holders=self._holders)
            for serving in results
            for adapter in ("", *serving.record.adapters)
        ]

    async def list(self, broker: Broker) -> list[Serving]:
        """Return the jobs of the connection's user with available servers, newest first."""
        return [serving for serving in await self._all(broker) if serving.is_ready]

    async def find(self, broker: Broker, name: str) -> Serving:
        """Return the job that serves a model.

        Raises NotFoundError with the available models, NobodyAnswersError if no server of the job
        is available.
        """
        matching: list[Serving] = []
        for fresh in (False, True):
            if fresh:
                self._known.pop(broker.user, None)
            matching = [serving for serving in await self._all(broker) if serving.is_called(name)]
            for serving in matching:
                if serving.is_ready:
                    return serving
        if matching:
            record = matching[0].record
            raise errors.NobodyAnswersError(
                f"no server of run {record.name} answers for model {name!r} now: the run is "
                f"{record.state}",
                hint=f"retry when its servers have started; see `tinkermq logs {record.name}`",
            )
        there = ", ".join(sorted({serving.model for serving in await self.list(broker)}))
        raise errors.NotFoundError(
            f"no model {name!r} is served to user {broker.user!r}",
            hint=f"there are: {there}" if there else "serve one: `tinkermq serve RUN@STEP`",
        )


async def _serving(broker: Broker, record: JobRecord) -> Serving:
    """Return a job with the state of its servers."""
    actors = [entry.value for entry in await list_presences(broker, record.scope.key)]
    working = [actor for actor in actors if actor.role == "server" and actor.state == "working"]
    versions = [actor.version for actor in working if actor.version is not None]
    is_ready = record.state == "RUNNING" and bool(working)
    loads = {actor.actor: actor.numbers.get("requests", 0.0) for actor in working}
    return Serving(record, max(versions, default=None), is_ready=is_ready, loads=loads)


@dataclass(frozen=True)
class SampledPath:
    """A checkpoint that a Tinker service samples from."""

    adapter: str
    """Its path."""
    job: str
    """The service."""
    trainers: Trainers

    def ask(
        self, broker: Broker, query: "Query", room: Room | None
    ) -> AsyncGenerator[infer.InferPart, None]:
        """Send a request to one of the samplers; closing the generator cancels it."""
        return self.trainers.answer(broker, self.job, query, room)

    def shown(self) -> dict[str, Any]:
        """Return its entry in the list of models."""
        model = {"id": self.adapter, "object": "model", "created": 0}
        return {**model, "owned_by": "tinker", "job": self.job}


class ServedModels:
    """The models of each user."""

    def __init__(self, trainers: Trainers) -> None:
        """Find checkpoints at `trainers`."""
        self.serving = ServingJobs()
        """The serving jobs."""
        self._trainers = trainers

    async def find(self, broker: Broker, name: str) -> Serving | SampledPath:
        """Return the model of a name; raises NotFoundError, NobodyAnswersError."""
        if is_path(name):
            for serving in await self.serving.list(broker):
                if serving.is_called(name):
                    return serving
            return await self._sampled(broker, name)
        return await self.serving.find(broker, name)

    async def _sampled(self, broker: Broker, path: str) -> SampledPath:
        name = CheckpointName.parse(path)
        if name.kind == "external_weights":
            raise errors.ConfigError(
                f"{path} was saved for download and cannot be sampled from",
                hint="save the model with save_weights_for_sampler, and name that path",
            )
        job = await self._trainers.job_of_checkpoint(broker, name)
        return SampledPath(str(name), job, self._trainers)


T = TypeVar("T")
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
Query: TypeAlias = infer.ChatRequest | infer.CompletionRequest

_STATEFUL = "x-tinkermq-stateful"
_LARGE = 64 << 10
"""Bytes from which a body or answer is processed in a thread, so that the loop is not blocked."""
_VALUE_BYTES = 64
"""JSON bytes of an answer for each token, log-prob and likeliest token."""
_PIECE_ITEMS = 64
_STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_GONE_S = 0.5
_KEEPALIVE_S = 15.0
"""Interval that is shorter than the timeouts of reverse proxies for idle streams."""
_CLIENT_CLOSED = 499
_MANNERS = frozenset({"text.verbosity", "thinking.budget_tokens", "thinking.display", "verbosity"})
"""Fields that ask for a manner that models here cannot choose: they do not change an answer."""
_SINGLE = frozenset({"parallel_tool_calls", "tool_choice.disable_parallel_tool_use"})
"""Fields with an effect only for served models; in an episode answers are trained as generated."""
_HINTS = {
    "background": "answers are not kept: ask for a stream, and read it",
    "functions": "give tools instead",
    "include": "an answer holds what there is: leave it out",
    "max_tokens": "give max_tokens or max_completion_tokens, or both with one value",
    "store": "answers are not kept: give false, and send the whole conversation as input",
    "stream_options.include_usage": "it has no effect without stream",
    "tool_choice": "give auto or none, and with tools required or the name of a function",
    "top_logprobs": "it has no effect without logprobs",
    "truncation": "a conversation that is too long is refused: shorten it",
}
_FAULTS = {"max_tokens": "max_tokens and max_completion_tokens differ"}
"""What is wrong with fields that are supported."""


class Answering:
    """Answers requests of every API."""

    def __init__(self, models: ServedModels, keepalive_s: float) -> None:
        """Answer with `models`; idle streams get a keep-alive sign every `keepalive_s`."""
        self._models = models
        self._keepalive_s = keepalive_s

    async def answer(self, request: Request, broker: Broker, api: answers.ModelApi) -> Response:
        """Answer one request as `broker`'s user."""
        if _STATEFUL in request.headers:
            _refuse_stateful(f"the header {_STATEFUL!r}", "")
        raw = await request.body()  # the guard bounds it
        large = len(raw) > _LARGE
        read = await asyncio.to_thread(read_query, raw, api) if large else read_query(raw, api)
        model_request, query = read
        model = await self._models.find(broker, model_request.model)
        query = query.model_copy(update={"adapter": model.adapter})
        room: Room | None = request.scope.get(TAKEN)
        parts = model.ask(broker, query, room)
        reader = AnswerReader(api, model_request, query.request)
        if not model_request.stream:
            raw = await unless_gone(request, _whole(parts, reader, room))
            headers = _told(model_request, reader.head)
            return Response(raw, media_type="application/json", headers=headers)
        streamed = StreamedAnswer(parts, reader, api, self._keepalive_s)
        try:
            head = await unless_gone(request, streamed.begin())
        except BaseException:
            await finish(streamed.close())
            raise
        return _StreamResponse(streamed, {**_STREAM_HEADERS, **_told(model_request, head)})

    async def of_prompt(
        self, request: Request, broker: Broker, model_request: ModelRequest, **more: Any
    ) -> infer.InferPart:
        """Return what a server says of a request's prompt, without an answer to it."""
        query = _query(model_request, "chat").model_copy(update={"count_only": True, **more})
        model = await self._models.find(broker, model_request.model)
        query = query.model_copy(update={"adapter": model.adapter})
        room: Room | None = request.scope.get(TAKEN)
        async with aclosing(model.ask(broker, query, room)) as parts:
            return [part async for part in parts][-1]


def _told(model_request: ModelRequest, head: infer.InferPart | None) -> dict[str, str]:
    """Return headers with what of a request has another effect than its sender may expect."""
    names = [name for name in model_request.without_effect if name in _MANNERS]
    headers: dict[str, str] = {}
    if head is not None:
        names += [model_request.served_only[name] for name in head.without_effect]
        if head.bounded_tokens is not None:
            headers["x-tinkermq-max-tokens"] = str(head.bounded_tokens)
    return {**headers, **({"x-tinkermq-without-effect": ", ".join(names)} if names else {})}


def read_query(raw: bytes, api: answers.ModelApi) -> tuple[ModelRequest, Query]:
    """Read a body; return it and the request to a server. RequestError names a refused field."""
    value = json_of(raw)
    if isinstance(value, dict) and cast("dict[str, Any]", value).get("stateful") is not None:
        _refuse_stateful("the parameter 'stateful'", "stateful")
    model_request = api.read(value)
    _check(model_request)
    query = _query(model_request, api.name)
    decoding = query.decoding
    sampling = {"temperature": decoding.temperature, "top_p": decoding.top_p}
    echo = {**model_request.echo, **{n: 1.0 if v is None else v for n, v in sampling.items()}}
    return replace(model_request, echo=echo), query


def _query(model_request: ModelRequest, api: str) -> Query:
    try:
        return served_request(model_request, uuid.uuid4().hex)
    except ValidationError as error:
        raise bounds_error(error, api) from error


def _check(model_request: ModelRequest) -> None:
    """Raise RequestError for a field that servers do not support."""
    for name in model_request.without_effect:
        is_known = is_label(name) or name in _MANNERS
        if not is_known and not (model_request.calls_one and name in _SINGLE):
            message, hint = _FAULTS.get(name, ""), _HINTS.get(name, "")
            raise refused_field(name, model_request.known, message=message, hint=hint)
    if not model_request.model:
        raise RequestError("the parameter 'model' is missing", param="model")
    if model_request.previous:
        raise RequestError(
            "the server does not store answers, so an answer cannot be continued by its id",
            param="previous_response_id",
            hint="send the whole conversation as input",
        )
    if model_request.is_prefill:
        raise RequestError(
            "the last message is the assistant's, and served models do not continue an answer",
            param="messages",
            hint="end with a user's message, or continue the text with /v1/completions",
        )


async def _whole(
    parts: AsyncGenerator[infer.InferPart, None], reader: AnswerReader, room: Room | None
) -> bytes:
    """Return an answer as JSON; it counts against the user's share until the request is over."""
    held_bytes = 0
    async with aclosing(parts):
        async for part in parts:
            num_bytes = _held_bytes(part)
            if room is not None:
                room.hold(num_bytes)
            held_bytes += num_bytes
            for _ in reader.push(part):
                pass
    if held_bytes < _LARGE:
        return _encoded(_encode(reader.whole()))
    return await asyncio.to_thread(lambda: _encoded("".join(_json(reader.whole()))))


def _held_bytes(part: infer.InferPart) -> int:
    """Estimate the bytes that a part adds to an answer."""
    num_values = sum(
        len(delta.token_ids) + len(delta.logprobs) + sum(map(len, delta.top_logprobs))
        for delta in part.deltas
    )
    num_values += sum(score.logprobs.size + score.top_ids.size for score in part.scores)
    return _VALUE_BYTES * num_values + sum(len(delta.text) for delta in part.deltas)


def _json(value: Any, depth: int = 4) -> Iterator[str]:
    """Yield JSON in pieces, so that other threads can run in between.

    Each value down to a choice's fields is a piece; below them a piece has several list items.
    """
    if isinstance(value, dict) and depth:
        fields = cast("dict[str, Any]", value).items()
        for number, (name, field) in enumerate(fields):
            yield f"{',' if number else '{'}{_encode(name)}:"
            yield from _json(field, depth - 1)
        yield "}" if fields else "{}"
    elif isinstance(value, list) and value:
        items = cast("list[Any]", value)
        step = 1 if depth > 2 else _PIECE_ITEMS
        for start in range(0, len(items), step):
            yield "," if start else "["
            some = items[start : start + step]
            yield from _json(some[0], depth - 1) if step == 1 else [_encode(some)[1:-1]]
        yield "]"
    else:
        yield _encode(value)


class StreamedAnswer:
    """The events of an answer; its server stops when it is closed."""

    def __init__(
        self,
        parts: AsyncGenerator[infer.InferPart, None],
        reader: AnswerReader,
        api: answers.ModelApi,
        keepalive_s: float,
    ) -> None:
        """Stream `parts`; `begin` asks for the first one."""
        self._parts, self._reader, self._api = parts, reader, api
        self._keepalive_s = keepalive_s
        self._coming: asyncio.Future[infer.InferPart] | None = None

    async def begin(self) -> infer.InferPart | None:
        """Wait briefly for the first part, so that a refusal gets its own HTTP status."""
        coming = self._coming = asyncio.ensure_future(anext(self._parts))
        done, _ = await asyncio.wait({coming}, timeout=self._keepalive_s)
        return coming.result() if done else None

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the events, behind `begin`."""
        assert self._coming is not None
        try:
            while True:
                while not (await asyncio.wait({self._coming}, timeout=self._keepalive_s))[0]:
                    yield _encoded(self._api.waiting)
                for text in self._reader.push(self._coming.result()):
                    yield _encoded(text)
                self._coming = asyncio.ensure_future(anext(self._parts))
        except StopAsyncIteration:
            for text in self._reader.end():
                yield _encoded(text)
        except errors.TinkermqError as error:
            yield _encoded(self._reader.fail(self._api.error(error, error.status)))

    async def close(self) -> None:
        """Stop the server, unless the answer is complete."""
        if self._coming is not None:
            self._coming.cancel()
            await asyncio.gather(self._coming, return_exceptions=True)
        await self._parts.aclose()


class _StreamResponse(StreamingResponse):
    """A response that closes its answer, also if its client has gone before its first byte."""

    def __init__(self, streamed: StreamedAnswer, headers: Mapping[str, str]) -> None:
        super().__init__(streamed.events(), media_type="text/event-stream", headers=headers)
        self._streamed = streamed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:  # outside of Starlette's cancel scope, which would cancel each await here, too
            await finish(self._streamed.close())


def _encoded(text: str) -> bytes:
    return text.encode(errors="replace")


def _refuse_stateful(named: str, param: str) -> None:
    """Raise RequestError for stateful chats, which do not exist any more."""
    raise RequestError(
        f"{named} was removed: a served model continues the text of a conversation, not its tokens",
        param=param,
        hint="leave it out; an agent's episodes continue by tokens, for others send token ids to "
        "/v1/completions",
    )


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await an awaitable, and cancel it when the client disconnects."""
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=_GONE_S)
            if not task.done() and await request.is_disconnected():
                raise HTTPException(_CLIENT_CLOSED, "the client has disconnected")
        return task.result()
    finally:
        task.cancel()
        await finish(asyncio.wait({task}))


# -- endpoints -------------------------------------------------------------------------------------

OF_TINKER = "/tinker/oai/api/v1"
"""Prefix of OpenAI's endpoints for programs that only know Tinker's address."""
_NO_MODEL = "model_not_found"


BrokerOf: TypeAlias = Callable[[Request], Awaitable[Broker]]
"""Returns the NATS connection of a request's user."""


def routes(
    broker_of: BrokerOf, trainers: Trainers, *, keepalive_s: float = _KEEPALIVE_S
) -> list[Route]:
    """Return the endpoints, for the gateway's application."""
    endpoints = ModelEndpoints(broker_of, ServedModels(trainers), keepalive_s)
    methods = (
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", COMPLETIONS),
        (f"{OF_TINKER}/chat/completions", CHAT),
        (f"{OF_TINKER}/completions", COMPLETIONS),
        ("/v1/responses", RESPONSES),
        ("/v1/messages", MESSAGES),
    )
    of_tokens = (
        ("/tokenize", endpoints.tokenize, CHAT),
        ("/detokenize", endpoints.detokenize, CHAT),
        ("/v1/messages/count_tokens", endpoints.count_tokens, MESSAGES),
    )
    return [
        Route("/v1/models", guarded(endpoints.models), methods=["GET"]),
        Route("/v1/models/{model:path}", guarded(endpoints.model), methods=["GET"]),
        *(
            Route(path, guarded(endpoints.answering(api), api), methods=["POST"])
            for path, api in methods
        ),
        *(Route(path, guarded(do, api), methods=["POST"]) for path, do, api in of_tokens),
    ]


class ModelEndpoints:
    """The endpoints."""

    def __init__(self, broker_of: BrokerOf, models: ServedModels, keepalive_s: float) -> None:
        """Answer with `models`."""
        self._broker_of = broker_of
        self._models = models
        self._answering = Answering(models, keepalive_s)

    async def models(self, request: Request) -> Response:
        """List the models of the user's jobs."""
        broker = await self._broker_of(request)
        served = await self._models.serving.list(broker)
        return JSONResponse({"object": "list", "data": [item.shown() for item in served]})

    async def model(self, request: Request) -> Response:
        """Return one model."""
        broker = await self._broker_of(request)
        match = await self._models.find(broker, request.path_params["model"])
        return JSONResponse(match.shown())

    def answering(self, api: answers.ModelApi) -> Callable[[Request], Awaitable[Response]]:
        """Return the endpoint of an API."""

        async def answer(request: Request) -> Response:
            broker = await self._broker_of(request)  # before the body is read
            return await self._answering.answer(request, broker, api)

        return answer

    async def tokenize(self, request: Request) -> Response:
        """Return the tokens of a text or a conversation, as vLLM's server does."""
        broker = await self._broker_of(request)
        body = json_of(await request.body())
        is_chat = isinstance(body, dict) and "messages" in body
        model_request = (CHAT if is_chat else COMPLETIONS).read(body)
        _check(model_request)
        if len(model_request.prompts) > 1:
            raise RequestError("prompt must be one text", param="prompt")
        part = await self._answering.of_prompt(request, broker, model_request, token_ids=True)
        counted = {"count": part.prompt_tokens, "max_model_len": part.max_context}
        return JSONResponse({**counted, "tokens": part.prompt_token_ids[0], "token_strs": None})

    async def detokenize(self, request: Request) -> Response:
        """Return the text of tokens, as vLLM's server does."""
        broker = await self._broker_of(request)
        fields = Fields(json_of(await request.body()))
        tokens = fields.items("tokens")
        if not tokens:
            raise fields.missing("tokens", "tokens must be token ids")
        model_request = COMPLETIONS.read({"model": fields.any("model"), "prompt": tokens})
        _check(replace(model_request, without_effect=fields.unread(), known=fields.known()))
        is_ids = [not isinstance(prompt, str) for prompt in model_request.prompts]
        if is_ids != [True]:
            raise RequestError("tokens must be token ids", param="tokens")
        part = await self._answering.of_prompt(request, broker, model_request, echo=True)
        return JSONResponse({"prompt": part.deltas[0].text})

    async def count_tokens(self, request: Request) -> Response:
        """Return the number of a conversation's tokens, as Messages does."""
        broker = await self._broker_of(request)
        model_request = MESSAGES.read(json_of(await request.body()))
        _check(model_request)
        part = await self._answering.of_prompt(request, broker, model_request)
        return JSONResponse({"input_tokens": part.prompt_tokens})


def guarded(
    endpoint: Callable[[Request], Awaitable[Response]], api: answers.ModelApi = CHAT
) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    """Return an endpoint with errors in the form of an API."""

    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except errors.TinkermqError as error:
            headers = answers.retry_headers(error, error.status)
            return JSONResponse(worded(error, error.status, api), error.status, headers=headers)
        except HTTPException as error:
            refused = RequestError(str(error.detail))
            value = worded(refused, error.status_code, api)
            return JSONResponse(value, error.status_code, headers=error.headers)

    return answer


_WITHOUT_V1 = ("/chat/completions", "/completions", "/responses", "/messages", "/models")
"""Paths of clients whose base URL lacks `/v1`."""


def is_of_api(path: str) -> bool:
    """Whether errors at a path have the form of a model API."""
    of_api = ("/v1/", f"{OF_TINKER}/", *_WITHOUT_V1)
    return path.startswith(of_api) or path in ("/v1", "/tokenize", "/detokenize")


def api_of(path: str) -> answers.ModelApi:
    """Return the API in whose form errors are written under a path."""
    if path.startswith("/v1/messages"):
        return MESSAGES
    return RESPONSES if path.startswith("/v1/responses") else CHAT


def no_endpoint(method: str, path: str, status: int) -> RequestError:
    """Return the error of a request to a path, or with a method, that no API here has."""
    what = f"{method} is not answered at {path}" if status == 405 else f"there is no {path} here"
    return RequestError(
        what,
        hint="there are POST /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages, "
        "/v1/messages/count_tokens, /tokenize and /detokenize, and GET /v1/models",
    )


def worded(error: errors.TinkermqError, status: int, api: answers.ModelApi) -> dict[str, Any]:
    """Return an error in the form of an API; NotFoundError means an unknown model."""
    value = api.error(error, status)
    if isinstance(error, errors.NotFoundError) and "code" in value["error"]:
        value["error"]["code"] = _NO_MODEL
    return value
