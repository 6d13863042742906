"""Reads a program's calls of the model, sends them to a generator, and answers in its API."""

import asyncio
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from hashlib import blake2b
from typing import Any, TypeVar

from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from ....schemas.agent import CallPart, CallRequest
from ....schemas.http_server import ClientWatch, Receive, Scope, Send
from ....schemas.model_apis.answers import ModelApi
from ....schemas.model_apis.messages import MESSAGES
from ....schemas.model_apis.reading import AnswerReader
from ....schemas.model_apis.request import (
    ModelRequest,
    RequestError,
    bounds_error,
    call_request,
    json_of,
)
from ....schemas.model_apis.responses import RESPONSES, input_items
from ....schemas.wire.errors import NotFoundError
from ..episode import EpisodeOver
from .calls import CallAsker, KeptAnswer, OpenEpisode, RunningCall
from .exchange import BodyRoom, EventStream, JsonAnswer, read_body, worded

T = TypeVar("T")

MAX_BODY_BYTES = 32 << 20
MAX_BODIES_BYTES = 512 << 20
"""Bound on the bodies that one proxy reads at once."""
_LARGE = 64 << 10
"""Larger bodies are parsed in a thread, so that they do not block the loop."""
_MOST_NAMES, _NAME_CHARS = 256, 100
_EMPTY_BYTES, _TOKEN_BYTES = 4096, 64
"""Memory of an answer, and of each of its tokens."""


class ModelCalls:
    """Answers the model endpoints."""

    def __init__(self, asker: CallAsker, room: BodyRoom | None = None) -> None:
        """Send calls with `asker`; `room` is the memory for bodies, if it is shared."""
        self._asker = asker
        self._room = room or BodyRoom(MAX_BODIES_BYTES)

    async def answer(self, request: Request, opened: OpenEpisode, api: ModelApi) -> Response:
        """Start a call, or join the one that it repeats; return its answer."""
        raw = await read_body(request, MAX_BODY_BYTES, self._room)
        aside = _run_in_thread if len(raw) > _LARGE else _run_inline
        model_request, digest = await aside(_read, raw, api)
        if "x-tinkermq-tokens" in request.headers:
            model_request = replace(model_request, return_token_ids=True)
        is_marked = _is_retry(request)
        if named := request.headers.get("idempotency-key", ""):
            digest = blake2b(digest + named.encode(errors="replace"), person=b"named").digest()
            is_marked = is_marked or opened.is_known(digest)
        call = opened.calls.join(digest, is_marked=is_marked)
        if call is None:
            if model_request.previous:
                await self._asker.look_up(model_request.previous)
            outgoing = await aside(_request, opened, model_request, api, is_marked)
            call = RunningCall(self._asker, opened, outgoing, len(raw))
            opened.calls.add(digest, call)
        return _CallAnswer(opened, api, model_request, call, digest, self._asker.times.keepalive_s)

    async def count(self, request: Request, opened: OpenEpisode) -> Response:
        """Answer with the number of tokens of a prompt of Messages."""
        raw = await read_body(request, MAX_BODY_BYTES, self._room)
        aside = _run_in_thread if len(raw) > _LARGE else _run_inline
        model_request, _ = await aside(_read, raw, MESSAGES)
        model_request = replace(model_request, stream=False, return_token_ids=False)
        outgoing = await aside(_request, opened, model_request, MESSAGES, False)
        counting = outgoing.model_copy(update={"count_only": True})
        call = RunningCall(self._asker, opened, counting, len(raw))
        try:
            with (
                call.listening() as woken,
                ClientWatch(request.scope, woken.set) as client,
            ):
                await _until_over(client, call, woken)
        finally:
            call.end(EpisodeOver("the program no longer waits for the count"))
        assert call.answer.head is not None
        return JsonAnswer({"input_tokens": call.answer.head.prompt_tokens})


class _CallAnswer(Response):
    """The answer to a call, sent as the model generates it, or whole."""

    def __init__(
        self,
        opened: OpenEpisode,
        api: ModelApi,
        model_request: ModelRequest,
        call: RunningCall,
        digest: bytes,
        keepalive_s: float,
    ) -> None:
        super().__init__()
        self._opened, self._api = opened, api
        self._call, self._digest = call, digest
        self._request = model_request
        self._reader = AnswerReader(api, model_request, call.request.request, is_call=True)
        self._places = [(0, 0)] * len(call.answer.choices)
        """Tokens and characters of each choice that were read."""
        self._has_begun = False
        self._keepalive_s = keepalive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer, and report to the generator whether the program received it."""
        call, arrived = self._call, False
        try:
            with call.listening() as woken, ClientWatch(scope, woken.set) as client:
                try:
                    if self._request.stream:
                        await self._send_events(EventStream(send), client, woken)
                    else:
                        await _until_over(client, call, woken)
                        self._read()
                        answer = JsonAnswer(self._reader.whole(), 200, _headers(call))
                        await answer(scope, receive, send)
                    arrived = (
                        not client.is_gone
                    )  # before the end of the answer can close the connection
                finally:
                    if call.answer.is_whole:
                        await call.delivered(whole=arrived)
            if self._api is RESPONSES and call.error is None:
                self._keep()
        finally:
            self._opened.calls.leave(self._digest, call)

    async def _send_events(
        self, stream: EventStream, client: ClientWatch, woken: asyncio.Event
    ) -> None:
        call = self._call
        while True:
            woken.clear()
            if client.is_gone:
                raise ClientDisconnect
            if call.error is not None and not stream.is_started:
                raise call.error
            is_over = call.is_over
            text = self._read()
            if call.answer.is_whole:
                text += "".join(self._reader.end())
            if call.error is not None:
                text += self._reader.fail(worded(call.error, self._api))
            if text:
                await self._write(stream, text)
            if is_over:
                return await stream.end()
            if not await _is_woken(woken, self._keepalive_s):
                await self._write(stream, self._api.waiting)

    def _read(self) -> str:
        """Read the new part of the answer; return its events."""
        answer = self._call.answer
        if answer.head is None:
            return ""
        fields: dict[str, Any] = {"deltas": answer.read_on(self._places), "calls": answer.calls}
        if self._has_begun:
            return "".join(self._reader.push(CallPart(**fields)))
        self._has_begun = True
        return "".join(self._reader.push(answer.head.model_copy(update=fields)))

    def _keep(self) -> None:
        """Keep the answer and its input messages for further requests."""
        answer, name, messages = self._call.answer, self._reader.id, self._request.messages
        num_chars = sum(len(choice.text) for choice in answer.choices)
        num_tokens = answer.num_generated
        if answer.head is not None:
            num_tokens += sum(map(len, answer.head.prompt_token_ids))
        num_bytes = _EMPTY_BYTES + 4 * num_chars + _TOKEN_BYTES * num_tokens
        self._opened.answers.add(name, KeptAnswer(self._reader.whole, num_bytes))
        num_bytes = _EMPTY_BYTES + sum(message.num_bytes for message in messages)
        inputs = KeptAnswer(lambda: {"data": list(input_items(messages, name))}, num_bytes)
        self._opened.inputs.add(name, inputs)

    async def _write(self, stream: EventStream, text: str) -> None:
        if not stream.is_started:
            await stream.start(_headers(self._call))
        await stream.write(text)


async def _run_in_thread(work: Callable[..., T], *arguments: Any) -> T:
    """Run work in a thread, so that it does not block the loop."""
    return await asyncio.to_thread(work, *arguments)


async def _run_inline(work: Callable[..., T], *arguments: Any) -> T:
    return work(*arguments)


def _read(raw: bytes, api: ModelApi) -> tuple[ModelRequest, bytes]:
    """Parse a body; return it with its digest."""
    model_request = api.read(json_of(raw))
    # sampling options are set by the job, not by the program
    echo = {**model_request.echo, "temperature": None, "top_p": None} if model_request.echo else {}
    return replace(model_request, echo=echo), blake2b(raw, person=api.name.encode()).digest()


def _request(
    opened: OpenEpisode, model_request: ModelRequest, api: ModelApi, is_retry: bool
) -> CallRequest:
    """Return the message to the generator; RequestError for values out of bounds."""
    if without_effect := (*model_request.without_effect, *model_request.ignored):
        names = tuple(dict.fromkeys(name[:_NAME_CHARS] for name in without_effect))
        model_request = replace(model_request, without_effect=names[:_MOST_NAMES], ignored=())
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


def _is_retry(request: Request) -> bool:
    num_tries = request.headers.get("x-stainless-retry-count", "")
    return num_tries.isdecimal() and num_tries.strip("0") != ""


def _headers(call: RunningCall) -> Mapping[str, str]:
    """Return the headers of a call's answer."""
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


async def _until_over(client: ClientWatch, call: RunningCall, woken: asyncio.Event) -> None:
    """Wait for the whole answer; raises its error, ClientDisconnect."""
    while not call.is_over:
        await woken.wait()
        woken.clear()
        if client.is_gone:
            raise ClientDisconnect
    if call.error is not None:
        raise call.error


async def _is_woken(woken: asyncio.Event, timeout_s: float) -> bool:
    """Wait for the event; return False after `timeout_s`."""
    try:
        async with asyncio.timeout(timeout_s):
            await woken.wait()
    except TimeoutError:
        return False
    return True
