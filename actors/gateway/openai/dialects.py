"""The further dialects of a served model: OpenAI's Responses and Anthropic's Messages.

What a body asks for without effect is refused by name, as it is in Chat Completions; labels and
values that ask for nothing are taken.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, cast

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from ....broker.client.connection import Broker
from ....envs.agents.dialects.answer import Answered, AnswerHead, Usage
from ....envs.agents.dialects.messages_api import MessagesAnswer, read_messages
from ....envs.agents.dialects.neutral import is_label
from ....envs.agents.dialects.request import Fields, ModelRequest, RequestError
from ....envs.agents.dialects.responses import ResponseAnswer, read_response
from ....envs.agents.messages import canonical_history
from ....envs.agents.replies import Piece, ReplyReader, call_name
from ....schemas.infer import ChatRequest, Decoding, InferPart
from ....schemas.wire.codec import read_json
from ....schemas.wire.errors import MessageError, TinkermqError
from .asking import (
    LARGE,
    STREAM_HEADERS,
    first_of,
    read_body,
    refuse_stateful,
    refuse_stateful_body,
    unless_gone,
)
from .served_models import ServedModels

Words: TypeAlias = Callable[[TinkermqError, int], dict[str, Any]]

_WHY = {
    "store": "answers are not kept: give false, and send the whole conversation as input",
    "background": "answers are not kept: ask for a stream, and read it",
    "include": "an answer holds what there is: leave it out",
    "output_config": "how much a model thinks is set by its chat template: leave effort out",
    "parallel_tool_calls": "how many tools are called is the model's choice, unless tool_choice "
    "demands one: leave it out",
    "tool_choice.disable_parallel_tool_use": "how many tools are called is the model's choice, "
    "unless tool_choice demands one",
    "tool_choice": "give auto or none, and with tools required or the name of a function",
    "text.verbosity": "how long an answer is, is the model's choice: say it in the prompt",
    "reasoning": "how much a model thinks is set by its chat template: leave it out",
    "thinking": "how much a model thinks is set by its chat template: leave it out",
    "truncation": "a conversation that is too long is refused: shorten it",
}
_SAMPLED = (
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)


class WordedAnswer(Protocol):
    """An answer in the words of one API."""

    def start(self, usage: Usage) -> Iterator[str]:
        """Yield the first events."""
        ...

    def push(self, piece: Piece) -> Iterator[str]:
        """Take more of the answer; yield it as events."""
        ...

    def finish(
        self, answered: Answered, usage: Usage, extra: Mapping[str, Any] | None = None
    ) -> Iterator[str]:
        """End the answer; `extra` is told besides."""
        ...

    def fail(self, told: dict[str, Any]) -> str:
        """Return the event that ends an answer which cannot go on."""
        ...

    def whole(self, answered: Answered, usage: Usage) -> dict[str, Any]:
        """Return the answer as one object, once it is finished."""
        ...


@dataclass(frozen=True)
class Dialect:
    """An API: how its requests are read, and its answers worded."""

    prefix: str
    """Of an answer's id."""
    read: Callable[[Any], ModelRequest]
    answer: Callable[[AnswerHead, ModelRequest, Decoding], WordedAnswer]


def _response(head: AnswerHead, asked: ModelRequest, decoding: Decoding) -> WordedAnswer:
    sampled = {"temperature": decoding.temperature, "top_p": decoding.top_p}
    echo = {**asked.echo, **sampled}
    return ResponseAnswer(head, custom_tools=asked.custom_tools, echo=echo)


def _message(head: AnswerHead, asked: ModelRequest, decoding: Decoding) -> WordedAnswer:
    del asked, decoding
    return MessagesAnswer(head)


RESPONSES = Dialect("resp", read_response, _response)
MESSAGES = Dialect("msg", read_messages, _message)


class Dialects:
    """Answers requests of further dialects."""

    def __init__(self, models: ServedModels) -> None:
        """Ask `models`."""
        self._models = models

    async def answer(
        self, request: Request, broker: Broker, dialect: Dialect, words: Words
    ) -> Response:
        """Answer one request as `broker`'s user."""
        refuse_stateful(request)
        raw = await read_body(request)
        large = len(raw) > LARGE
        read = await asyncio.to_thread(_read, raw, dialect) if large else _read(raw, dialect)
        asked, token_ids = read
        model = await self._models.find(broker, asked.model)
        update = {"token_ids": token_ids, "adapter": model.adapter}
        query = _query(asked).model_copy(update=update)
        parts = model.ask(broker, query)
        if not asked.stream:
            return JSONResponse(await unless_gone(request, _whole(parts, dialect, asked, query)))
        first = await first_of(parts)
        return StreamingResponse(
            _stream(first, parts, dialect, asked, query, words),
            media_type="text/event-stream",
            headers=STREAM_HEADERS,
        )


def _read(raw: bytes, dialect: Dialect) -> tuple[ModelRequest, bool]:
    """Read a body, and whether it asks for tokens; RequestError names what has no effect."""
    try:
        value: Any = read_json(raw)
    except MessageError as error:
        raise RequestError(f"the body is not valid JSON: {error.message}") from error
    token_ids = False
    if isinstance(value, dict):
        body = cast("dict[str, Any]", value)
        refuse_stateful_body(body)
        token_ids = Fields(body).flag("return_token_ids")
        value = {name: given for name, given in body.items() if name != "return_token_ids"}
    asked = dialect.read(value)
    unknown = [name for name in asked.overruled or {} if name not in _SAMPLED]
    for name in (*asked.without_effect, *unknown):
        if is_label(name):
            continue
        hint = _WHY.get(name, "leave it out")
        raise RequestError(f"{name!r} is not supported here", param=name, hint=hint)
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
    return asked, token_ids


def _query(asked: ModelRequest) -> ChatRequest:
    sampled = asked.overruled or {}
    try:
        return ChatRequest(
            request=uuid.uuid4().hex,
            messages=[told.for_template() for told in canonical_history(asked.messages, ())],
            tools=[dict(tool) for tool in asked.tools],
            decoding=Decoding(
                max_tokens=asked.max_tokens, stop=list(asked.stop), format=asked.format, **sampled
            ),
            stream=asked.stream,
        )
    except ValidationError as error:
        problem = error.errors()[0]
        param = str(problem["loc"][-1]) if problem["loc"] else ""
        raise RequestError(
            f"the parameter {param!r} cannot be used: {problem['msg']}", param=param
        ) from error


class _Reading:
    """One answer, read part by part."""

    def __init__(
        self, dialect: Dialect, asked: ModelRequest, query: ChatRequest, model: str
    ) -> None:
        head = AnswerHead(f"{dialect.prefix}_{query.request}", int(time.time()), model)
        self.answer = dialect.answer(head, asked, query.decoding)
        self.usage = Usage(0, 0)
        self.answered: Answered = "stop"
        self._reader = ReplyReader(call_name(query.request), calls=bool(query.tools))
        self._tokens: dict[str, list[int]] | None = None
        if query.token_ids:
            self._tokens = {"prompt_token_ids": [], "token_ids": []}

    def start(self, part: InferPart) -> Iterator[str]:
        """Yield the first events, which the first part has the counts for."""
        self.usage = Usage(part.prompt_tokens, 0)
        yield from self.answer.start(self.usage)

    def push(self, part: InferPart) -> Iterator[str]:
        """Take a part; yield what is new as events."""
        if self._tokens is not None and part.prompt_token_ids:
            self._tokens["prompt_token_ids"] = part.prompt_token_ids[0]
        for delta in part.deltas:
            if self._tokens is not None:
                self._tokens["token_ids"] += delta.token_ids
            self.answered = delta.finish or self.answered
            if delta.stop and isinstance(self.answer, MessagesAnswer):
                self.answer.stop_sequence = delta.stop
            yield from self._said(self._reader.push(delta.text))
        if part.last:
            self.usage = Usage(part.prompt_tokens, part.completion_tokens)

    def end(self) -> Iterator[str]:
        """Yield the last events."""
        yield from self._said(self._reader.finish())
        yield from self.answer.finish(self.answered, self.usage, self.extra)

    @property
    def extra(self) -> dict[str, Any]:
        """What is told besides, as episodes tell it."""
        if self._tokens is None:
            return {}
        prompt, said = self._tokens["prompt_token_ids"], self._tokens["token_ids"]
        return {"tinkermq": {"prompt_token_ids": prompt, "answers": [{"token_ids": said}]}}

    def _said(self, pieces: list[Piece]) -> Iterator[str]:
        for piece in pieces:
            yield from self.answer.push(piece)


async def _whole(
    parts: AsyncGenerator[InferPart, None],
    dialect: Dialect,
    asked: ModelRequest,
    query: ChatRequest,
) -> dict[str, Any]:
    """Return an answer as one object."""
    reading: _Reading | None = None
    async with aclosing(parts):
        async for part in parts:
            reading = reading or _Reading(dialect, asked, query, part.model)
            _exhaust(reading.push(part))
    reading = reading or _Reading(dialect, asked, query, "")
    _exhaust(reading.end())
    whole = reading.answer.whole(reading.answered, reading.usage)
    return {**whole, **reading.extra}


async def _stream(
    first: InferPart,
    parts: AsyncGenerator[InferPart, None],
    dialect: Dialect,
    asked: ModelRequest,
    query: ChatRequest,
    words: Words,
) -> AsyncGenerator[str, None]:
    """Yield the events of an answer; the server stops when the reader goes away."""
    reading = _Reading(dialect, asked, query, first.model)
    async with aclosing(parts):
        for text in (*reading.start(first), *reading.push(first)):
            yield text
        try:
            async for part in parts:
                for text in reading.push(part):
                    yield text
        except TinkermqError as error:
            yield reading.answer.fail(words(error, error.status))
            return
        for text in reading.end():
            yield text


def _exhaust(events: Iterator[str]) -> None:
    for _ in events:
        pass
