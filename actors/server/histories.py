"""The messages of a chat as they are alike in every API, from what a template takes."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from ...envs.agents.messages import CanonicalCall, CanonicalMessage, Picture, joined
from ...envs.agents.replies import THINK, THOUGHT, parse_reply
from ...envs.model_apis.request import Fields, RequestError, asks_nothing
from ...schemas.wire.errors import TinkermqError
from ...schemas.wire.images import encoded_image

_KNOWN = frozenset(
    {"role", "content", "tool_calls", "tool_call_id", "reasoning_content", "reasoning"}
)


def history_of(messages: Sequence[Mapping[str, Any]]) -> list[CanonicalMessage] | None:
    """Return a chat in canonical messages; None where they would lose what a template may show."""
    try:
        return [_message(message) for message in messages]
    except TinkermqError:
        return None


def _message(message: Mapping[str, Any]) -> CanonicalMessage:
    fields = Fields(dict(message))
    role = fields.text("role")
    others = _KNOWN | {"name"} if role == "tool" else _KNOWN
    for name, value in message.items():
        if name not in others and not asks_nothing(name, value):
            raise RequestError(f"{name} is kept for the template", param=name)
    if role == "assistant":
        return _assistant(fields)
    if role not in ("system", "user", "tool"):
        raise RequestError(f"a message of {role!r}", param="role")
    return CanonicalMessage(role, _content(fields), call_id=fields.text("tool_call_id"))


def _assistant(fields: Fields) -> CanonicalMessage:
    """Return a turn; what it reasons may stand in its text, as a server tells it in a chat."""
    content = _content(fields)
    calls = tuple(_call(call) for call in fields.objects("tool_calls"))
    reasoning = fields.text("reasoning_content") or fields.text("reasoning") or None
    if reasoning is None and len(content) == 1 and isinstance(text := content[0], str):
        before, closed, _ = text.partition(THOUGHT)
        read = parse_reply(text, "", calls=False, thinking=bool(closed) and THINK not in before)
        content, reasoning = read.content, read.reasoning
        if calls and content:
            content = joined([str(content[0]).rstrip()])
    return CanonicalMessage("assistant", content, calls, reasoning)


def _call(call: Fields) -> CanonicalCall:
    function = Fields(call.any("function"), "function")
    arguments = function.any("arguments")
    told = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
    return CanonicalCall(function.text("name"), told, call.text("id"))


def _content(fields: Fields) -> tuple[str | Picture, ...]:
    if isinstance(fields.any("content"), str | None):
        return joined([fields.text("content")])
    return joined(_part(part) for part in fields.items("content"))


def _part(part: Any) -> str | Picture:
    told = Fields(part)
    if told.text("type") == "text":
        return told.text("text")
    return Picture(encoded_image(cast("dict[str, Any]", part)))
