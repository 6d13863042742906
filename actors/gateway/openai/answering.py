"""Requests of the model APIs as a served model answers them: from a body to a server's request, and
from the parts of its answer to the words of the API.

A parameter that would be without effect is refused by name instead of ignored, unless it is a label
or its value asks for nothing. Chat Completions keep reasoning in their text, as other servers do,
unless the answer has a form of which it is no part; Responses and Messages tell it as reasoning.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Coroutine, Iterable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar, cast

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from ....broker.client.connection import Broker
from ....envs.model_apis.answers import (
    Answer,
    AnswerHead,
    ModelApi,
    NewTokens,
    TokenLogprob,
    Usage,
)
from ....envs.model_apis.canonical import Piece, ReplyReader, TextPiece, call_name
from ....envs.model_apis.chat import (
    CHAT,
    COMPLETIONS,
    ChatCompletionAnswer,
    CompletionAnswer,
)
from ....envs.model_apis.request import ModelRequest, RequestError, is_label
from ....schemas.infer import ChatRequest, CompletionRequest, Decoding, Delta, InferPart
from ....schemas.wire.codec import read_json
from ....schemas.wire.errors import MessageError, TinkermqError
from ..limits import MAX_INFERENCE_BYTES
from .models import ServedModels

T = TypeVar("T")
Query: TypeAlias = ChatRequest | CompletionRequest

_STATEFUL = "x-tinkermq-stateful"
_LARGE = 64 << 10
"""Bytes of a body that is read in a thread: the loop answers others meanwhile."""
_STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_GONE_S = 0.5
_CLIENT_CLOSED = 499
_MAX_SEED = 1 << 63
_SHOWN = 100
_SAMPLED = frozenset(Decoding.model_fields)
"""What of sampling a server takes."""
_NAMES = {
    ("", "num_choices"): "n",
    ("completions", "prompts"): "prompt",
    ("completions", "top_logprobs"): "logprobs",
    ("messages", "stop"): "stop_sequences",
    ("responses", "max_tokens"): "max_output_tokens",
}
"""What a field of a server's request is called in an API, where it is called otherwise."""
_NO_TOOL_COUNT = (
    "how many tools are called is the model's choice, unless tool_choice demands one: leave it out"
)
_NO_EFFORT = "how much a model thinks is set by its chat template: leave it out"
_HINTS = {
    "background": "answers are not kept: ask for a stream, and read it",
    "functions": "give tools instead",
    "include": "an answer holds what there is: leave it out",
    "output_config": f"{_NO_EFFORT.removesuffix(': leave it out')}: leave effort out",
    "parallel_tool_calls": _NO_TOOL_COUNT,
    "reasoning": _NO_EFFORT,
    "reasoning_effort": _NO_EFFORT,
    "store": "answers are not kept: give false, and send the whole conversation as input",
    "stream_options.include_usage": "it has no effect without stream",
    "text.verbosity": "how long an answer is, is the model's choice: say it in the prompt",
    "thinking": _NO_EFFORT,
    "tool_choice": "give auto or none, and with tools required or the name of a function",
    "tool_choice.disable_parallel_tool_use": _NO_TOOL_COUNT,
    "top_logprobs": "it has no effect without logprobs",
    "truncation": "a conversation that is too long is refused: shorten it",
    "verbosity": "how long an answer is, is the model's choice: say it in the prompt",
}


class Answering:
    """Answers requests of every API."""

    def __init__(self, models: ServedModels) -> None:
        """Ask `models`."""
        self._models = models

    async def answer(self, request: Request, broker: Broker, api: ModelApi) -> Response:
        """Answer one request as `broker`'s user."""
        if _STATEFUL in request.headers:
            _refuse_stateful(f"the header {_STATEFUL!r}", "")
        raw = await read_body(request)
        large = len(raw) > _LARGE
        read = await asyncio.to_thread(read_query, raw, api) if large else read_query(raw, api)
        asked, query = read
        model = await self._models.find(broker, asked.model)
        query = query.model_copy(update={"adapter": model.adapter})
        parts = model.ask(broker, query)
        reading = ServedAnswer(api, asked, query)
        if not asked.stream:
            value = await unless_gone(request, _whole(parts, reading))
            return JSONResponse(value)
        first = await _first_of(parts)
        return StreamingResponse(
            _stream(first, parts, reading),
            media_type="text/event-stream",
            headers=_STREAM_HEADERS,
        )


def read_query(raw: bytes, api: ModelApi) -> tuple[ModelRequest, Query]:
    """Read a body; return it and what a server is asked. RequestError names what is refused."""
    try:
        value: Any = read_json(raw)
    except MessageError as error:
        raise RequestError(f"the body is not valid JSON: {error.message}") from error
    if isinstance(value, dict) and cast("dict[str, Any]", value).get("stateful") is not None:
        _refuse_stateful("the parameter 'stateful'", "stateful")
    asked = api.read(value)
    _check(asked)
    try:
        query = _query(asked)
    except ValidationError as error:
        problem = error.errors()[0]
        param = str(problem["loc"][0]) if problem["loc"] else ""
        param = _NAMES.get((api.name, param)) or _NAMES.get(("", param), param)
        message = f"the parameter {param!r} cannot be used: {problem['msg']}"
        raise RequestError(message, param=param) from error
    decoding = query.decoding
    echo = {**asked.echo, "temperature": decoding.temperature, "top_p": decoding.top_p}
    return replace(asked, echo=echo), query


def _check(asked: ModelRequest) -> None:
    """Raise RequestError for what a server does not do."""
    for name in (*asked.without_effect, *(set(asked.sampling) - _SAMPLED)):
        if not is_label(name):
            name = name[:_SHOWN]
            raise RequestError(
                f"the parameter {name!r} is not supported here",
                param=name,
                hint=_HINTS.get(name, "leave it out"),
            )
    if not asked.model:
        raise RequestError("the parameter 'model' is missing", param="model")
    if asked.previous:
        raise RequestError(
            "answers are not kept, so none can be continued by its id",
            param="previous_response_id",
            hint="send the whole conversation as input",
        )
    if asked.is_prefill:
        raise RequestError(
            "the last message is the assistant's, and an answer is not continued here",
            param="messages",
            hint="end with a message of the user, or continue the text with /v1/completions",
        )


def _query(asked: ModelRequest) -> Query:
    """Return what a server is asked; ValidationError for a value that is out of bounds."""
    decoding = Decoding(
        max_tokens=asked.max_tokens,
        stop=list(asked.stop),
        num_choices=asked.num_choices,
        format=asked.format,
        top_logprobs=asked.top_logprobs or 0,
        **_sampling(asked.sampling),
    )
    common: dict[str, Any] = {
        "request": uuid.uuid4().hex,
        "decoding": decoding,
        "stream": asked.stream,
        "logprobs": asked.top_logprobs is not None,
        "token_ids": asked.return_token_ids,
    }
    if asked.prompts:
        return CompletionRequest(
            prompts=list(asked.prompts),
            prompt_logprobs=asked.prompt_logprobs,
            add_special_tokens=asked.add_special_tokens,
            **common,
        )
    return ChatRequest(messages=asked.template_messages(), tools=asked.template_tools(), **common)


def _sampling(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Return how tokens are drawn: any whole number is a seed, and a `top_k` of -1 is none."""
    sampling = dict(sampling)
    if isinstance(sampling.get("seed"), int):
        sampling["seed"] %= _MAX_SEED
    if sampling.get("top_k") == -1:
        sampling["top_k"] = 0
    return sampling


class ServedAnswer:
    """A server's answer, read part by part and written in the words of an API."""

    def __init__(self, api: ModelApi, asked: ModelRequest, query: Query) -> None:
        """Read the answer to `query`."""
        self._api = api
        self._asked = asked
        self._query = query
        self._answer: Answer | None = None
        self._readers: list[ReplyReader | None] = []
        self._open: set[int] = set()
        """Choices that have not ended."""
        self._usage = Usage(0, 0)
        self._ids: list[int] = []
        self._prompt_ids: list[list[int]] = []
        self._vocabulary = ""

    def start(self, first: InferPart) -> Iterator[str]:
        """Yield the first events, for which the first part has the counts."""
        self._usage = Usage(first.prompt_tokens, 0)
        yield from self._begun(first).start(self._usage)

    def push(self, part: InferPart) -> Iterator[str]:
        """Take a part; yield what is new as events."""
        answer = self._begun(part)
        self._vocabulary = part.vocabulary or self._vocabulary
        if isinstance(answer, CompletionAnswer):
            answer.scores += part.scores
        for delta in part.deltas:
            self._ids += delta.token_ids
            pieces = self._pieces(delta)
            yield from answer.push(pieces, delta.choice, self._tokens(delta))
            if delta.finish is not None:
                self._open.discard(delta.choice)
                yield from answer.finish(delta.finish, delta.choice, delta.stop)
        if part.last:
            self._usage = Usage(part.prompt_tokens, part.completion_tokens)

    def end(self) -> Iterator[str]:
        """Yield the last events."""
        yield from self._ended().end(self._usage, self._extra())

    def whole(self) -> dict[str, Any]:
        """Return the answer as one object."""
        return {**self._ended().whole(self._usage), **self._extra()}

    def fail(self, error: TinkermqError) -> str:
        """Return the event that ends a stream which cannot go on."""
        return self._begun(InferPart()).fail(self._api.error(error, error.status))

    def _begun(self, part: InferPart) -> Answer:
        """Return what writes the answer, begun with the first part."""
        if self._answer is None:
            head = AnswerHead(self._api.id_of(self._query.request), int(time.time()), part.model)
            self._answer = self._api.answer(head, self._asked)
            num = max(1, len(self._asked.prompts)) * self._asked.num_choices
            self._readers = [self._reader(part, number) for number in range(num)]
            self._open = set(range(num))
        if part.prompt_token_ids:
            self._prompt_ids = part.prompt_token_ids
            if isinstance(self._answer, ChatCompletionAnswer):
                self._answer.prompt_ids = self._prompt_ids[0]
            elif isinstance(self._answer, CompletionAnswer):
                self._answer.prompt_ids = self._prompt_ids
        return self._answer

    def _reader(self, part: InferPart, number: int) -> ReplyReader | None:
        """Return what reads a choice of a chat."""
        if not isinstance(self._query, ChatRequest):
            return None
        keeps = self._api is CHAT and not (part.is_thinking and self._asked.format is not None)
        name = call_name(self._query.request, number)
        return ReplyReader(name, calls=bool(self._query.tools), keeps_reasoning=keeps)

    def _pieces(self, delta: Delta) -> list[Piece]:
        """Return what a choice has gained; where it ends, what was held back as well."""
        reader = self._readers[delta.choice]
        if reader is None:
            return [TextPiece(delta.text)] if delta.text else []
        pieces = reader.push(delta.text)
        return pieces if delta.finish is None else [*pieces, *reader.finish()]

    def _tokens(self, delta: Delta) -> NewTokens | None:
        """Return the new tokens of a choice, as far as they were asked for."""
        wants_ids, wants_logprobs = self._asked.return_token_ids, self._query.logprobs
        if not delta.token_ids or not (wants_ids or wants_logprobs):
            return None
        return NewTokens(
            ids=delta.token_ids if wants_ids else None,
            logprobs=_logprobs(delta) if wants_logprobs else None,
        )

    def _ended(self) -> Answer:
        """Return what writes the answer, once every choice has ended."""
        answer = self._begun(InferPart())
        for number in sorted(self._open):
            for _ in answer.finish("stop", number):
                pass
        self._open = set()
        return answer

    def _extra(self) -> dict[str, Any]:
        """Return the field that an answer has besides where tokens were asked for."""
        if self._asked.prompt_logprobs is not None:
            return {"tinkermq": {"vocabulary": self._vocabulary}}
        if not self._asked.return_token_ids or self._api in (CHAT, COMPLETIONS):
            return {}
        prompt = self._prompt_ids[0] if self._prompt_ids else []
        return {"tinkermq": {"prompt_token_ids": prompt, "answers": [{"token_ids": self._ids}]}}


def _logprobs(delta: Delta) -> list[TokenLogprob]:
    """Return the log-probs of new tokens, each with the likeliest in its place."""
    rows: list[tuple[TokenLogprob, ...]] = [() for _ in delta.tokens]
    if delta.top_tokens:
        columns = zip(delta.top_tokens, delta.top_logprobs, delta.top_bytes, strict=True)
        rows = [
            tuple(
                TokenLogprob(text, value, (), encoded)
                for text, value, encoded in zip(*one, strict=True)
            )
            for one in columns
        ]
    tokens = zip(delta.tokens, delta.logprobs, rows, delta.token_bytes, strict=True)
    return [TokenLogprob(*token) for token in tokens]


async def _whole(parts: AsyncGenerator[InferPart, None], reading: ServedAnswer) -> dict[str, Any]:
    async with aclosing(parts):
        async for part in parts:
            _exhaust(reading.push(part))
    return reading.whole()


async def _stream(
    first: InferPart, parts: AsyncGenerator[InferPart, None], reading: ServedAnswer
) -> AsyncGenerator[bytes, None]:
    """Yield the events of an answer; the server stops when the reader goes away."""
    async with aclosing(parts):
        for text in (*reading.start(first), *reading.push(first)):
            yield _encoded(text)
        try:
            async for part in parts:
                for text in reading.push(part):
                    yield _encoded(text)
        except TinkermqError as error:
            yield _encoded(reading.fail(error))
            return
        for text in reading.end():
            yield _encoded(text)


def _encoded(text: str) -> bytes:
    return text.encode(errors="replace")


def _exhaust(events: Iterable[str]) -> None:
    for _ in events:
        pass


def _refuse_stateful(named: str, param: str) -> None:
    """Raise RequestError for stateful chats, which were removed."""
    raise RequestError(
        f"{named} was removed: a served model continues the text of a conversation, not its tokens",
        param=param,
        hint="leave it out; an agent's episodes continue by tokens, for others send token ids to "
        "/v1/completions",
    )


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
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


async def _first_of(parts: AsyncGenerator[InferPart, None]) -> InferPart:
    """Return the first part, so that what is refused at once gets a status of its own."""
    try:
        return await anext(parts)
    except BaseException:
        await parts.aclose()
        raise


async def read_body(request: Request) -> bytes:
    """Return a body; HTTPException 413 for one that is too large."""
    raw = bytearray()
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > MAX_INFERENCE_BYTES:
            raise HTTPException(413, f"the body is over {MAX_INFERENCE_BYTES:,} bytes")
    return bytes(raw)
