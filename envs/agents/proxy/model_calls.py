"""A program's calls of the model: read, asked for, and answered in its API's own words."""

import asyncio
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, TypeVar

from pydantic import ValidationError

from ....schemas.agent import CallPart, CallRequest
from ....schemas.model_apis.answers import AnswerHead, ModelApi
from ....schemas.model_apis.messages import MESSAGES
from ....schemas.model_apis.reading import AnswerReader
from ....schemas.model_apis.request import (
    ModelRequest,
    RequestError,
    bounds_error,
    call_request,
)
from ....schemas.model_apis.responses import RESPONSES, input_items
from ....schemas.wire.codec import read_json
from ....schemas.wire.errors import MessageError, NotFoundError
from ..episode import EpisodeOver
from .calls import CallAsker, GatheredAnswer, KeptAnswer, OpenEpisode, RunningCall
from .exchange import BodyRoom, ClientGone, HttpExchange, dumped, worded

T = TypeVar("T")

MAX_BODY_BYTES = 32 << 20
MAX_BODIES_BYTES = 512 << 20
"""Of all requests of one proxy that are being read."""
_LARGE = 64 << 10
"""Bytes of a body that is read in a thread: the loop answers others meanwhile."""
_MOST_NAMES, _NAME_CHARS = 256, 100
_EMPTY_BYTES, _TOKEN_BYTES = 4096, 64
"""What Python needs for an answer, and for each of its tokens."""


class AnswerReading:
    """How much of an answer one of a program's requests has had."""

    def __init__(self, api: ModelApi, model_request: ModelRequest, request: str) -> None:
        """Read the answer to call `request` from its beginning."""
        self.id = ""
        """The answer's id, once anything of it is known."""
        self._api = api
        self._messages = model_request.messages
        self._model = model_request.model
        self._tells_ids = model_request.return_token_ids
        self._request = request
        self._created = int(time.time())
        # a stream has the tokens in its last event
        in_answer = model_request.return_token_ids and not model_request.stream
        self._reader = AnswerReader(api, replace(model_request, return_token_ids=in_answer))
        self._places: list[tuple[int, int]] = []
        self._extra: dict[str, Any] = {}

    def news(self, gathered: GatheredAnswer) -> Iterator[str]:
        """Yield what the answer has gained, as events: the last ones once it is whole."""
        if gathered.head is None:
            return
        yield from self._read(gathered)
        if gathered.is_whole:
            yield from self._reader.end(self._extra)

    def whole(self, gathered: GatheredAnswer) -> dict[str, Any]:
        """Return an answer that is whole as one object."""
        for _ in self._read(gathered):
            pass
        return self._reader.whole() | self._extra

    def kept(self, gathered: GatheredAnswer) -> KeptAnswer:
        """Return what words an answer again that was read to its end."""
        num_chars = sum(len(choice.text) for choice in gathered.choices)
        num_tokens = gathered.num_generated
        if gathered.head is not None:
            num_tokens += sum(map(len, gathered.head.prompt_token_ids))
        num_bytes = _EMPTY_BYTES + 4 * num_chars + _TOKEN_BYTES * num_tokens
        return KeptAnswer(lambda: self._reader.whole() | self._extra, num_bytes)

    def kept_input(self) -> KeptAnswer:
        """Return what lists the messages that it was asked with."""
        name, messages = self.id, self._messages
        num_bytes = _EMPTY_BYTES + sum(message.num_bytes for message in messages)
        return KeptAnswer(lambda: {"data": list(input_items(messages, name))}, num_bytes)

    def fail(self, error: Mapping[str, Any]) -> str:
        """Return the event that ends a stream which cannot go on."""
        return self._reader.fail(AnswerHead(self._request, self._created, self._model), error)

    def _read(self, gathered: GatheredAnswer) -> Iterator[str]:
        """Read what has come since."""
        head = gathered.head
        assert head is not None
        if not self._reader.has_begun:
            names = head.names or [f"call_{self._request}"] * len(gathered.choices)
            self.id = self._api.id_of(head.names[0] if head.names else self._request)
            self._places = gathered.beginning
            top = AnswerHead(self.id, self._created, self._model or "policy")
            yield from self._reader.begin(top, head, names, head.num_reused)
        yield from self._reader.push(CallPart(deltas=gathered.read_on(self._places)))
        if gathered.is_whole and self._tells_ids:
            self._extra = _token_fields(gathered)


def _token_fields(gathered: GatheredAnswer) -> dict[str, Any]:
    """Return the field that an answer has besides where tokens were asked for."""
    head = gathered.head
    assert head is not None
    answers = [
        {
            "call": gathered.calls[number] if number < len(gathered.calls) else None,
            "token_ids": choice.delta.token_ids,
            "logprobs": choice.delta.logprobs,
            "versions": choice.delta.versions,
        }
        for number, choice in enumerate(gathered.choices)
    ]
    prompt_ids = [token for ids in head.prompt_token_ids for token in ids]
    fields = {"parent": head.parent, "reused": head.num_reused, "prompt_token_ids": prompt_ids}
    return {"tinkermq": {**fields, "answers": answers}}


@dataclass
class _Waiting:
    """A request that waits for a call."""

    exchange: HttpExchange
    opened: OpenEpisode
    api: ModelApi
    call: RunningCall
    reading: AnswerReading
    woken: asyncio.Event


class ModelCalls:
    """Answers the model endpoints."""

    def __init__(self, asker: CallAsker, room: BodyRoom | None = None) -> None:
        """Ask by `asker`; `room` is for bodies that are being read, if it is shared with others."""
        self._asker = asker
        self._room = room or BodyRoom(MAX_BODIES_BYTES)

    async def answer(self, exchange: HttpExchange, opened: OpenEpisode, api: ModelApi) -> None:
        """Answer one call."""
        raw = await exchange.body(MAX_BODY_BYTES, self._room)
        aside = _run_in_thread if len(raw) > _LARGE else _run_inline
        model_request, digest = await aside(_read, raw, api)
        if "x-tinkermq-tokens" in exchange.headers:
            model_request = replace(model_request, return_token_ids=True)
        is_marked = _is_retry(exchange)
        if named := exchange.headers.get("idempotency-key", ""):
            digest = blake2b(digest + named.encode(errors="replace"), person=b"named").digest()
            is_marked = is_marked or opened.is_known(digest)
        call = opened.calls.join(digest, is_marked=is_marked)
        if call is None:
            if model_request.previous:
                await self._asker.look_up(model_request.previous)
            request = await aside(_request, opened, model_request, api, is_marked)
            call = RunningCall(self._asker, opened, request, len(raw))
            opened.calls.add(digest, call)
        reading = AnswerReading(api, model_request, call.request.request)
        try:
            with call.listening() as woken:
                waiting = _Waiting(exchange, opened, api, call, reading, woken)
                await self._tell(waiting, stream=model_request.stream)
        finally:
            opened.calls.leave(digest, call)

    async def count(self, exchange: HttpExchange, opened: OpenEpisode) -> None:
        """Answer how many tokens a prompt of Messages has, as it would be continued."""
        raw = await exchange.body(MAX_BODY_BYTES, self._room)
        aside = _run_in_thread if len(raw) > _LARGE else _run_inline
        model_request, _ = await aside(_read, raw, MESSAGES)
        model_request = replace(model_request, stream=False, return_token_ids=False)
        request = await aside(_request, opened, model_request, MESSAGES, False)
        counting = request.model_copy(update={"count_only": True})
        call = RunningCall(self._asker, opened, counting, len(raw))
        try:
            with call.listening() as woken:
                exchange.watch(woken.set)
                await _until_over(exchange, call, woken)
        finally:
            exchange.unwatch()
            call.end(EpisodeOver("the program no longer waits for the count"))
        assert call.answer.head is not None
        await exchange.reply({"input_tokens": call.answer.head.prompt_tokens})

    async def _tell(self, waiting: _Waiting, *, stream: bool) -> None:
        """Tell a program the answer, and the generator whether it has arrived."""
        exchange, call = waiting.exchange, waiting.call
        exchange.watch(waiting.woken.set)
        arrived = False
        try:
            await (self._stream(waiting) if stream else self._whole(waiting))
            arrived = not exchange.is_gone  # at once: the end of an answer looks like a hang-up
        finally:
            exchange.unwatch()
            if call.answer.is_whole:
                await call.delivered(whole=arrived)
        if waiting.api is RESPONSES and call.error is None:
            opened, reading = waiting.opened, waiting.reading
            opened.answers.add(reading.id, reading.kept(call.answer))
            opened.inputs.add(reading.id, reading.kept_input())

    async def _stream(self, waiting: _Waiting) -> None:
        exchange, call, reading = waiting.exchange, waiting.call, waiting.reading
        while True:
            waiting.woken.clear()
            if exchange.is_gone:
                raise ClientGone
            if call.error is not None and not exchange.is_started:
                raise call.error
            is_over = call.is_over
            text = "".join(reading.news(call.answer))
            if call.error is not None:
                text += reading.fail(worded(call.error, exchange.api))
            if text:
                await _write(waiting, text)
            if is_over:
                return await exchange.end_stream()
            if not await _is_woken(waiting.woken, self._asker.times.keepalive_s):
                await _write(waiting, waiting.api.waiting)

    async def _whole(self, waiting: _Waiting) -> None:
        call = waiting.call
        await _until_over(waiting.exchange, call, waiting.woken)
        answer = dumped(waiting.reading.whole(call.answer))
        await waiting.exchange.reply_raw(answer, headers=_headers(call))


async def _run_in_thread(work: Callable[..., T], *arguments: Any) -> T:
    """Do something in a thread: the loop serves others meanwhile."""
    return await asyncio.to_thread(work, *arguments)


async def _run_inline(work: Callable[..., T], *arguments: Any) -> T:
    return work(*arguments)


def _read(raw: bytes, api: ModelApi) -> tuple[ModelRequest, bytes]:
    """Read a body; return also a digest of it."""
    try:
        value: Any = read_json(raw)
    except MessageError as error:
        raise RequestError(f"the body is not valid JSON: {error.message}") from error
    model_request = api.read(value)
    # What is sampled with the job says, not the program.
    echo = {**model_request.echo, "temperature": None, "top_p": None} if model_request.echo else {}
    return replace(model_request, echo=echo), blake2b(raw, person=api.name.encode()).digest()


def _request(
    opened: OpenEpisode, model_request: ModelRequest, api: ModelApi, is_retry: bool
) -> CallRequest:
    """Return what travels; RequestError for what is out of bounds."""
    if model_request.without_effect:
        names = dict.fromkeys(name[:_NAME_CHARS] for name in model_request.without_effect)
        model_request = replace(model_request, without_effect=tuple(names)[:_MOST_NAMES])
    previous = _previous(opened, model_request.previous) if model_request.previous else None
    try:
        return call_request(
            model_request, secrets.token_hex(16), previous=previous, is_retry=is_retry
        )
    except ValidationError as error:
        raise bounds_error(error, api.name) from error


def _previous(opened: OpenEpisode, name: str) -> int:
    try:
        return opened.call_number(name)
    except NotFoundError as error:
        raise RequestError(
            f"Previous response with id {name!r:.80} not found.", param="previous_response_id"
        ) from error


def _is_retry(exchange: HttpExchange) -> bool:
    num_tries = exchange.headers.get("x-stainless-retry-count", "")
    return num_tries.isdecimal() and num_tries.strip("0") != ""


def _headers(call: RunningCall) -> Mapping[str, str]:
    """Return what is known of a call at the beginning of its answer."""
    head = call.answer.head
    if head is None:
        return {}
    headers = {
        "x-tinkermq-parent": "root" if head.parent is None else str(head.parent),
        "x-tinkermq-reused": str(head.num_reused),
    }
    if head.branch:
        headers["x-tinkermq-branch"] = head.branch
    if call.answer.calls:
        headers["x-tinkermq-call"] = ",".join(str(number) for number in call.answer.calls)
    return headers


async def _write(waiting: _Waiting, text: str) -> None:
    if not waiting.exchange.is_started:
        await waiting.exchange.start_stream(_headers(waiting.call))
    await waiting.exchange.write(text)


async def _until_over(exchange: HttpExchange, call: RunningCall, woken: asyncio.Event) -> None:
    """Wait for all of an answer; raises the error that it ended with, ClientGone."""
    while not call.is_over:
        await woken.wait()
        woken.clear()
        if exchange.is_gone:
            raise ClientGone
    if call.error is not None:
        raise call.error


async def _is_woken(woken: asyncio.Event, timeout_s: float) -> bool:
    """Wait until something has happened; False after `timeout_s` without."""
    try:
        async with asyncio.timeout(timeout_s):
            await woken.wait()
    except TimeoutError:
        return False
    return True
