"""HTTP for programs: bodies, answers, and the errors of the proxy.

Many programs ignore `x-should-retry`, so the statuses were chosen by tests of client libraries:
each one ends a call or makes clients repeat it.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ....schemas.http_server import Receive, Scope, Send
from ....schemas.model_apis.answers import ModelApi, retry_headers
from ....schemas.model_apis.messages import MESSAGES
from ....schemas.model_apis.request import RequestError
from ....schemas.wire.errors import AuthError, BrokerError, BusyError, TinkermqError
from ..episode import ContextTooLong

_COUNTS = re.compile(r"(\d+) tokens > (\d+) maximum")
_LARGE = 32 << 10
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_STREAM = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class KeyRefused(AuthError):
    """The key belongs to no open episode."""

    status = 401


class TooLarge(RequestError):
    """A body, or its message, exceeds the limit."""

    status = 413


class NobodyPlays(BrokerError):
    """No generator has played the episode for as long as a call waits."""


class NoSuchEndpoint(RequestError):
    """The path or method is not served, or the answer does not exist."""

    status = 404


class UnreadableBody(RequestError):
    """The encoding of a body is not supported."""

    status = 415


class BodyRoom:
    """Memory for the bodies that are being read by all requests."""

    def __init__(self, num_bytes: int) -> None:
        """Allow so many bytes."""
        self._left = num_bytes

    def reserve(self, num_bytes: int) -> None:
        """Reserve bytes; BusyError if too few are left."""
        if num_bytes > self._left:
            raise BusyError("too many large requests are being read", hint="send fewer at once")
        self._left -= num_bytes

    def release(self, num_bytes: int) -> None:
        """Release reserved bytes."""
        self._left += num_bytes


async def read_body(request: Request, most: int, room: BodyRoom | None = None) -> bytes:
    """Return a body; TooLarge, as soon as possible, for one of more than `most` bytes.

    The body takes up `room` while it is read; BusyError if too little is left.
    """
    room = room or BodyRoom(most)
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > most:
        raise _too_large(most)
    if request.headers.get("content-encoding", "identity") != "identity":
        raise UnreadableBody("the body is compressed", hint="send it as it is")
    raw = bytearray()
    try:
        async for piece in request.stream():
            if len(raw) + len(piece) > most:
                raise _too_large(most)
            room.reserve(len(piece))
            raw += piece
        return bytes(raw)
    finally:
        room.release(len(raw))


class JsonAnswer(Response):
    """A JSON value, or the bytes of one."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Return the bytes of a value."""
        return content if isinstance(content, bytes) else dumped(content)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer; the end of a large one waits until the program has read the rest."""
        is_large = len(self.body) > _LARGE
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        await send({"type": "http.response.body", "body": self.body, "more_body": is_large})
        if is_large:
            await send({"type": "http.response.body", "body": b""})


class EventStream:
    """An answer of server-sent events."""

    def __init__(self, send: Send) -> None:
        """Prepare a stream that writes with `send`."""
        self.is_started = False
        self._send = send

    async def start(self, headers: Mapping[str, str]) -> None:
        """Send the head."""
        self.is_started = True
        raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        message = {"type": "http.response.start", "status": 200, "headers": [*_STREAM, *raw]}
        await self._send(message)

    async def write(self, text: str) -> None:
        """Send events; waits while the program reads too slowly."""
        body = text.encode(errors="replace")
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def end(self) -> None:
        """End the stream."""
        await self._send({"type": "http.response.body", "body": b""})


def error_answer(error: TinkermqError, api: ModelApi) -> JsonAnswer:
    """Return the answer for an error."""
    return JsonAnswer(worded(error, api), error.status, retry_headers(error, error.status))


def dumped(value: Any) -> bytes:
    """Return a value as JSON."""
    return _encode(value).encode(errors="replace")


def _too_large(most: int) -> TooLarge:
    return TooLarge(
        f"the body is over the limit of {most:,} bytes", hint="send less with each call"
    )


def worded(error: TinkermqError, api: ModelApi) -> dict[str, Any]:
    """Return an error in the form of the API."""
    error = _own_words(error, api) if isinstance(error, ContextTooLong) else error
    return api.error(error, error.status)


def _own_words(error: ContextTooLong, api: ModelApi) -> ContextTooLong:
    """Return the API's own text for a context that is too long, which makes programs compact it."""
    if api is MESSAGES:
        return ContextTooLong(f"prompt is too long: {error.message}")
    counts = _COUNTS.search(error.message)
    if counts is None:
        return ContextTooLong(
            f"Your input exceeds the context window: maximum context length: {error.message}"
        )
    return ContextTooLong(
        f"This model's maximum context length is {counts[2]} tokens. However, your messages "
        f"resulted in {counts[1]} tokens: your input exceeds the context window of this model. "
        "Please reduce the length of the messages."
    )
