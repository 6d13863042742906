"""What a program is told when a call fails: in its API's own words, and whether to try again.

The makers' libraries try again after 408, 409, 429 and from 500 on, unless `x-should-retry` says
otherwise; some programs read no such header, so that the statuses themselves are those that were
measured to end or to repeat a call.
"""

import re
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from ....schemas.wire.errors import AuthError, BrokerError, BusyError, TinkermqError
from ..dialects.messages_api import messages_error
from ..dialects.request import RequestError, text_of
from ..episode import ContextTooLong, EpisodeOver

Api: TypeAlias = Literal["chat", "responses", "messages"]

_OVER: Mapping[Api, int] = {"chat": 410, "responses": 400, "messages": 410}
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_PASSING = (429, 500, 502, 503, 504)
_PAUSE_MS = 1000
_COUNTS = re.compile(r"(\d+) tokens > (\d+) maximum")


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


def status_of(error: TinkermqError, api: Api) -> int:
    """Return the HTTP status of an error."""
    return _OVER[api] if isinstance(error, EpisodeOver) else error.status


def headers_of(error: TinkermqError, status: int) -> dict[str, str]:
    """Return what tells the makers' libraries whether to try again, and when."""
    if status not in _PASSING:
        return {"x-should-retry": "false"}
    pause_ms = int(error.retry_after_s * 1000) if isinstance(error, BusyError) else _PAUSE_MS
    return {
        "x-should-retry": "true",
        "retry-after-ms": str(pause_ms),
        "retry-after": str(-(-pause_ms // 1000)),
    }


def worded(error: TinkermqError, api: Api) -> dict[str, Any]:
    """Return an error as the API words it."""
    error = _own_words(error, api) if isinstance(error, ContextTooLong) else error
    status = status_of(error, api)
    return messages_error(error, status) if api == "messages" else _openai(error, status)


def _openai(error: TinkermqError, status: int) -> dict[str, Any]:
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    param = error.param if isinstance(error, RequestError) else ""
    told = {"message": text_of(error), "type": kind, "param": param or None, "code": error.code}
    return {"error": told}


def _own_words(error: ContextTooLong, api: Api) -> ContextTooLong:
    """Word a context that is too long as the API's maker does: programs begin to compact by it."""
    if api == "messages":
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
