"""A model's call as it travels: canonical messages, and the request around them."""

from collections.abc import Sequence
from typing import Any, cast

from ...schemas.agent import CallMessage, CallRequest
from ..model_apis.request import ModelRequest
from .messages import CanonicalCall, CanonicalMessage, Picture, joined


def packed(message: CanonicalMessage) -> CallMessage:
    """Return a message as it travels."""
    return CallMessage(**_fields(message))


def _fields(message: CanonicalMessage) -> dict[str, Any]:
    return {
        "role": message.role,
        "content": [part if isinstance(part, str) else part.encoded for part in message.content],
        "calls": [(call.name, call.arguments, call.id) for call in message.calls],
        "reasoning": message.reasoning,
        "call_id": message.call_id,
    }


def unpacked(message: CallMessage) -> CanonicalMessage:
    """Return a message that has travelled."""
    content: tuple[str | Picture, ...]
    match message.content:
        case [str(text)] if text:  # of most messages: a history comes with each call
            content = (text,)
        case parts:
            content = joined(part if isinstance(part, str) else Picture(part) for part in parts)
    return CanonicalMessage(
        role=message.role,
        content=content,
        calls=tuple(CanonicalCall(*call) for call in message.calls),
        reasoning=message.reasoning,
        call_id=message.call_id,
    )


def call_request(
    asked: ModelRequest, request: str, *, previous: int | None = None, is_retry: bool = False
) -> CallRequest:
    """Return a request as it travels; ValidationError for what is out of bounds."""
    return CallRequest(
        request=request,
        messages=cast("list[CallMessage]", [_fields(message) for message in asked.messages]),
        tools=[dict(tool) for tool in asked.tools],
        num_choices=asked.num_choices,
        max_tokens=asked.max_tokens,
        format=asked.format,
        top_logprobs=asked.top_logprobs,
        stop=list(asked.stop),
        stream=asked.stream,
        is_prefill=asked.is_prefill,
        previous=previous,
        sampled=dict(asked.sampling),
        without_effect=list(asked.without_effect),
        is_retry=is_retry,
        token_ids=asked.return_token_ids,
    )


def history_of(request: CallRequest) -> Sequence[CanonicalMessage]:
    """Return the messages of a request."""
    return [unpacked(message) for message in request.messages]
