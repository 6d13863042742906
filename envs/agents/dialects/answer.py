"""What the answers of all dialects say."""

import json
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Answered: TypeAlias = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What stands at the top of an answer."""

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
    """Of the prompt: tokens of earlier calls that it continues."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's text and log-prob, and the likeliest tokens in its place, best first."""

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()

    def told(self) -> dict[str, Any]:
        """Return it in the words of Chat Completions."""
        top = [_worded(*one) for one in self.top]
        return {**_worded(self.text, self.logprob), "top_logprobs": top}


def _worded(text: str, logprob: float) -> dict[str, Any]:
    """Word one; what is a part of a character only has bytes that nobody knows here."""
    spelt = None if _PART in text else list(text.encode(errors="replace"))
    return {"token": text, "logprob": max(logprob, _LEAST), "bytes": spelt}


_PART = "\ufffd"
_LEAST = -9999.0
"""In the place of -inf, which JSON does not have."""
_encode = json.JSONEncoder(ensure_ascii=False).encode


def event(value: dict[str, Any], name: str = "") -> str:
    """Return one server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {_encode(value)}\n\n"
