"""One HTTP request of a program and its answer, as ASGI has them, and the errors it may be given.

Some programs read no `x-should-retry`, so the statuses themselves are those that were measured to
end or to repeat a call.
"""

import asyncio
import json
import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import parse_qs

from ....schemas.model_apis.answers import ModelApi, retry_headers
from ....schemas.model_apis.chat import CHAT
from ....schemas.model_apis.messages import MESSAGES
from ....schemas.model_apis.request import RequestError
from ....schemas.model_apis.responses import RESPONSES
from ....schemas.wire.errors import AuthError, BrokerError, BusyError, TinkermqError
from ...http_server import Hangup, Receive, Scope, Send
from ..episode import ContextTooLong, EpisodeOver

_COUNTS = re.compile(r"(\d+) tokens > (\d+) maximum")
_OVER = {CHAT: 410, RESPONSES: 400, MESSAGES: 410}
"""The statuses by which programs stop to call once their episode is over."""
_JSON = "application/json"
_LARGE = 32 << 10
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_STREAM: Mapping[str, str] = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


class KeyRefused(AuthError):
    """A key that is that of no episode, or of one that has ended."""

    status = 401


class TooLarge(RequestError):
    """A body, or what it becomes as a message, over the limit."""

    status = 413


class NobodyPlays(BrokerError):
    """Nobody has played the episode for as long as a call waits."""


class NoSuchEndpoint(RequestError):
    """A path or method that is not served, or an answer that is not there."""

    status = 404


class ClientGone(Exception):
    """The program has closed its connection."""


class UnreadableBody(RequestError):
    """A body in an encoding that is not read."""

    status = 415


class BodyRoom:
    """Memory for bodies that are being read, of all requests together."""

    def __init__(self, num_bytes: int) -> None:
        """Allow so many bytes."""
        self._left = num_bytes

    def reserve(self, num_bytes: int) -> None:
        """Take some; BusyError where so much is not left."""
        if num_bytes > self._left:
            raise BusyError("too many large requests are being read", hint="send fewer at once")
        self._left -= num_bytes

    def release(self, num_bytes: int) -> None:
        """Give some back."""
        self._left += num_bytes


class HttpExchange:
    """A request that is being answered."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Take what the server has read of it."""
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers: dict[str, str] = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        self.api: ModelApi = CHAT
        """The API in whose words it gets errors."""
        self.is_started = False
        """Whether the head of the answer has been sent."""
        self.status = 0
        """What was answered; 0: nothing."""
        self.is_gone = False
        """Whether the program has closed the connection before the answer was whole."""
        self._query: bytes = scope["query_string"]
        self._receive = receive
        self._send = send
        self._hangup: Hangup | None = scope.get("state", {}).get(Hangup.NAME)
        self._watching: asyncio.Task[None] | None = None

    def asked(self, name: str) -> str:
        """Return a parameter of the query; empty where it is missing."""
        return parse_qs(self._query.decode("latin-1")).get(name, [""])[-1]

    async def body(self, most: int, room: "BodyRoom | None" = None) -> bytes:
        """Return the body; TooLarge, as soon as it is known, for one over `most` bytes.

        While it is read it takes up `room`; BusyError where there is none left.
        """
        room = room or BodyRoom(most)
        taken = 0
        declared = self.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > most:
            raise _too_large(most)
        if self.headers.get("content-encoding", "identity") != "identity":
            raise UnreadableBody("the body is compressed", hint="send it as it is")
        raw = bytearray()
        try:
            while True:
                message = await self._receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                piece = message.get("body", b"")
                if len(raw) + len(piece) > most:
                    raise _too_large(most)
                room.reserve(len(piece))
                taken += len(piece)
                raw += piece
                if not message.get("more_body", False):
                    return bytes(raw)
        finally:
            room.release(taken)

    def watch(self, wake: Callable[[], object]) -> None:
        """From now on notice when the program goes away, and call `wake` then."""

        def gone() -> None:
            self.is_gone = True
            wake()

        async def wait() -> None:
            while (await self._receive())["type"] != "http.disconnect":
                pass
            gone()

        if self._hangup is not None:
            self._hangup.watch(gone)
        else:
            self._watching = asyncio.create_task(wait(), name="watch a program's connection")

    def unwatch(self) -> None:
        """Watch no more."""
        if self._hangup is not None:
            self._hangup.call = None
        if self._watching is not None:
            self._watching.cancel()

    async def reply(
        self, value: Any, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        """Answer with a JSON value."""
        await self.reply_raw(dumped(value), status, headers)

    async def reply_raw(
        self, raw: bytes, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        """Answer with a JSON value that is serialised already."""
        described = {"content-type": _JSON, "content-length": str(len(raw)), **(headers or {})}
        await self._start(status, described)
        large = len(raw) > _LARGE
        await self._send({"type": "http.response.body", "body": raw, "more_body": large})
        if large:  # the end of it waits until the program has read the rest
            await self._send({"type": "http.response.body", "body": b""})

    async def fail(self, error: TinkermqError) -> None:
        """Answer with an error, if nothing has been said yet."""
        if self.is_started or self.is_gone:
            return
        status = status_of(error, self.api)
        await self.reply(worded(error, self.api), status, retry_headers(error, status))

    async def start_stream(self, headers: Mapping[str, str]) -> None:
        """Begin a stream of server-sent events."""
        await self._start(200, {**_STREAM, **headers})

    async def write(self, text: str) -> None:
        """Send events; waits while the program reads too slowly."""
        body = text.encode(errors="replace")
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def end_stream(self) -> None:
        """End a stream."""
        await self._send({"type": "http.response.body", "body": b""})

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        self.is_started, self.status = True, status
        encoded = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": encoded})


def dumped(value: Any) -> bytes:
    """Return a value as JSON."""
    return _encode(value).encode(errors="replace")


def _too_large(most: int) -> TooLarge:
    return TooLarge(
        f"the body is over the limit of {most:,} bytes", hint="send less with each call"
    )


def status_of(error: TinkermqError, api: ModelApi) -> int:
    """Return the HTTP status of an error."""
    return _OVER[api] if isinstance(error, EpisodeOver) else error.status


def worded(error: TinkermqError, api: ModelApi) -> dict[str, Any]:
    """Return an error as the API words it."""
    error = _own_words(error, api) if isinstance(error, ContextTooLong) else error
    return api.error(error, status_of(error, api))


def _own_words(error: ContextTooLong, api: ModelApi) -> ContextTooLong:
    """Word a context that is too long as the API's maker does: programs begin to compact by it."""
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
