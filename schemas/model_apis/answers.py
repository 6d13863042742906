"""Common parts of the APIs' answers, streams and errors.

An answer is written choice by choice from the pieces that a `ReplyReader` finds in the generated
text. The `Answer` of each API collects them into one object and yields the events of a stream. A
`ModelApi` combines it with the reader of the API's requests.

OpenAI's and Anthropic's client libraries retry after status 408, 409, 429 and 500 or above, unless
the header `x-should-retry` says otherwise.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

from ..wire.errors import BusyError, TinkermqError
from .canonical import Piece
from .request import ModelRequest, RequestError

FinishReason: TypeAlias = Literal["stop", "length", "cancelled"]

LEAST_LOGPROB = -9999.0
"""Stands for -inf, which JSON cannot express."""
_PART = "\ufffd"
_PASSING = (425, 429, 500, 502, 503, 504)
_PAUSE_MS = 1000
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_encode = json.JSONEncoder(ensure_ascii=False).encode


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """The fields at the top of an answer."""

    id: str
    created: int
    """Seconds since the epoch."""
    model: str


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one answer."""

    prompt: int
    generated: int
    reused: int = 0
    """Prompt tokens that belong to earlier calls."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's text and log-prob, and the likeliest tokens at its position, best first."""

    text: str
    logprob: float
    top: "tuple[TokenLogprob, ...]" = ()
    encoded: bytes | None = None
    """Its bytes, which may be part of a character; None: those of its text."""

    @property
    def is_known(self) -> bool:
        """Whether it has a log-prob; a prompt's first token has none."""
        return not math.isnan(self.logprob)

    def worded(self) -> dict[str, Any]:
        """Return it in the form of Chat Completions."""
        return {**self._fields(), "top_logprobs": [other._fields() for other in self.top]}

    def _fields(self) -> dict[str, Any]:
        encoded = self.encoded
        if encoded is None and _PART not in self.text:  # a part of a character has unknown bytes
            encoded = self.text.encode(errors="replace")
        return {
            "token": self.text,
            "logprob": max(self.logprob, LEAST_LOGPROB),
            "bytes": None if encoded is None else list(encoded),
        }


@dataclass(frozen=True, slots=True)
class NewTokens:
    """New tokens of a choice, if the request asks for them."""

    ids: Sequence[int] | None = None
    logprobs: Sequence[TokenLogprob] | None = None

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self.ids or self.logprobs)


class Answer(Protocol):
    """An answer in the form of one API. It is written by iterating over its events."""

    prompt_ids: Sequence[Sequence[int]]
    """Tokens of each prompt, if requested and known."""

    def start(self, usage: Usage) -> Iterator[str]:
        """Yield the first events."""
        ...

    def push(
        self, pieces: Sequence[Piece], choice: int = 0, tokens: NewTokens | None = None
    ) -> Iterator[str]:
        """Add to a choice; yield the addition as events."""
        ...

    def finish(self, reason: FinishReason, choice: int = 0, stop: str | int = "") -> Iterator[str]:
        """End a choice; `stop` is the stop text or token that ended it, if known."""
        ...

    def end(self, usage: Usage, extra: Mapping[str, Any] | None = None) -> Iterator[str]:
        """Yield the last events, once all choices have ended, with `extra` fields."""
        ...

    def fail(self, error: Mapping[str, Any]) -> str:
        """Return the event that ends a failed stream; `error` is in the form of the API."""
        ...

    def whole(self, usage: Usage) -> dict[str, Any]:
        """Return the answer as one object, once all choices have ended."""
        ...


@dataclass(frozen=True)
class ModelApi:
    """One API: reads requests, and writes answers and errors."""

    name: Literal["chat", "completions", "responses", "messages"]
    prefix: str
    """Prefix of an answer's id."""
    read: Callable[[Any], ModelRequest]
    """Reads a body; raises RequestError naming a field that cannot be served."""
    answer: Callable[[AnswerHead, ModelRequest], Answer]
    error: Callable[[TinkermqError, int], dict[str, Any]]
    """Returns an error with an HTTP status in the form of the API."""
    waiting: str = ": waiting\n\n"
    """Sign of life on a stream without news."""

    def id_of(self, name: str) -> str:
        """Return the id of an answer whose tool calls' ids begin with `name`."""
        return f"{self.prefix}{name.strip('_-')}"


def event(value: Mapping[str, Any], name: str = "") -> str:
    """Return one server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {_encode(value)}\n\n"


def text_of(error: TinkermqError) -> str:
    """Return the message and the hint of an error."""
    return f"{error.message}. {error.hint}" if error.hint else error.message


def openai_error(error: TinkermqError, status: int) -> dict[str, Any]:
    """Return an error in the form of OpenAI's APIs."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    param = error.param if isinstance(error, RequestError) else ""
    fields = {"message": text_of(error), "type": kind, "param": param or None, "code": error.code}
    return {"error": fields}


def retry_headers(error: TinkermqError, status: int) -> dict[str, str]:
    """Return the headers that tell official libraries whether and when to retry."""
    if status not in _PASSING:
        return {"x-should-retry": "false"}
    pause_ms = int(error.retry_after_s * 1000) if isinstance(error, BusyError) else _PAUSE_MS
    return {
        "x-should-retry": "true",
        "retry-after-ms": str(pause_ms),
        "retry-after": str(-(-pause_ms // 1000)),
    }
