"""A program's calls of the model: read, asked for, and answered in its API's own words."""

import asyncio
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, TypeVar, cast

from pydantic import ValidationError

from ....schemas.agent import CallRequest
from ....schemas.wire.codec import read_json
from ....schemas.wire.errors import MessageError, NotFoundError
from ..dialects.request import ModelRequest, RequestError
from ..episode import EpisodeOver
from ..wire import call_request
from .errors import worded
from .exchange import BodyRoom, ClientGone, HttpExchange, dumped
from .open_episodes import OpenEpisode
from .reading import AnswerReading
from .running_call import CallAsker, RunningCall
from .wording import MESSAGES, RESPONSES, ModelApi

T = TypeVar("T")

MAX_BODY_BYTES = 32 << 20
MAX_BODIES_BYTES = 512 << 20
"""Of all requests of one proxy that are being read."""
_LARGE = 64 << 10
"""Bytes of a body that is read in a thread: the loop answers others meanwhile."""
_MOST_NAMES, _NAME_CHARS = 256, 100


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
        aside = _aside if len(raw) > _LARGE else _here
        asked, tokens, digest = await aside(_read, raw, api)
        tokens = tokens or "x-tinkermq-tokens" in exchange.headers
        is_marked = _is_retry(exchange)
        if named := exchange.headers.get("idempotency-key", ""):
            digest = blake2b(named.encode(errors="replace"), person=b"named").digest()
            is_marked = is_marked or opened.is_known(digest)
        call = opened.calls.join(digest, is_marked=is_marked)
        if call is None:
            if asked.previous:
                await self._asker.look_up(asked.previous)
            request = await aside(_request, opened, asked, is_marked, tokens)
            call = RunningCall(self._asker, opened, request, len(raw))
            opened.calls.add(digest, call)
        reading = AnswerReading(api, asked, call.request.request, token_ids=tokens)
        try:
            with call.listening() as woken:
                waiting = _Waiting(exchange, opened, api, call, reading, woken)
                await self._tell(waiting, stream=asked.stream)
        finally:
            opened.calls.leave(digest, call)

    async def count(self, exchange: HttpExchange, opened: OpenEpisode) -> None:
        """Answer how many tokens a prompt of Messages has, as it would be continued."""
        raw = await exchange.body(MAX_BODY_BYTES, self._room)
        aside = _aside if len(raw) > _LARGE else _here
        asked, _, _ = await aside(_read, raw, MESSAGES)
        request = await aside(_request, opened, replace(asked, stream=False), False, False)
        counting = request.model_copy(update={"count_only": True})
        call = RunningCall(self._asker, opened, counting, len(raw))
        try:
            with call.listening() as woken:
                exchange.watch(woken.set)
                await _until_over(exchange, call, woken)
        finally:
            exchange.unwatch()
            call.end(EpisodeOver("nobody waits for the count"))
        assert call.answer.head is not None
        await exchange.reply({"input_tokens": call.answer.head.num_prompt})

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
            opened.answers.keep(reading.id, reading.kept(call.answer))
            opened.inputs.keep(reading.id, reading.kept_input())

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


async def _aside(work: Callable[..., T], *given: Any) -> T:
    """Do something in a thread: the loop serves others meanwhile."""
    return await asyncio.to_thread(work, *given)


async def _here(work: Callable[..., T], *given: Any) -> T:
    return work(*given)


def _read(raw: bytes, api: ModelApi) -> tuple[ModelRequest, bool, bytes]:
    """Read a body; return also whether it asks for tokens, and a digest of it."""
    try:
        value: Any = read_json(raw)
    except MessageError as error:
        raise RequestError(f"the body is not valid JSON: {error.message}") from error
    if not isinstance(value, dict):
        raise RequestError("the body is no object")
    fields = cast("dict[str, Any]", value)
    tokens = fields.pop("return_token_ids", None)
    digest = blake2b(raw, person=api.api.encode()).digest()
    return api.read(fields), tokens is True, digest


def _request(opened: OpenEpisode, asked: ModelRequest, is_retry: bool, tokens: bool) -> CallRequest:
    """Return what travels; RequestError for what is out of bounds."""
    if asked.without_effect:
        names = dict.fromkeys(name[:_NAME_CHARS] for name in asked.without_effect)
        asked = replace(asked, without_effect=tuple(names)[:_MOST_NAMES])
    previous = _previous(opened, asked.previous) if asked.previous else None
    try:
        request = call_request(asked, secrets.token_hex(16), previous=previous, is_retry=is_retry)
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(str(part) for part in problem["loc"])
        raise RequestError(f"{place}: {problem['msg']}", param=place) from error
    return request.model_copy(update={"token_ids": True}) if tokens else request


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
    told = {
        "x-tinkermq-parent": "root" if head.parent is None else str(head.parent),
        "x-tinkermq-reused": str(head.num_reused),
    }
    if head.branch:
        told["x-tinkermq-branch"] = head.branch
    if call.answer.calls:
        told["x-tinkermq-call"] = ",".join(str(number) for number in call.answer.calls)
    return told


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
