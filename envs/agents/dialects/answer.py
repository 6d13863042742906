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


_encode = json.JSONEncoder(ensure_ascii=False).encode


def event(value: dict[str, Any], name: str = "") -> str:
    """Return one server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {_encode(value)}\n\n"
