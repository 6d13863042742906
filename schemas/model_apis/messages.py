"""Anthropic's Messages."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..wire.errors import TinkermqError
from .answers import AnswerHead, FinishReason, ModelApi, NewTokens, Usage, event, text_of
from .canonical import CanonicalCall, ModelMessage, Piece, TextPiece, joined
from .request import (
    FieldNames,
    Fields,
    ModelRequest,
    ReadTools,
    RequestError,
    function_tool,
    read_content,
    read_part,
    read_picture,
    read_shared,
    without_effect_in,
)

_FIELDS = FieldNames(
    effort="output_config.effort",
    formats=("output_config.format", "output_format"),
    stop="stop_sequences",
    num_choices="",
)


class ThreadRefused(RequestError):
    """A request needs a history stored by the server."""

    details: Mapping[str, Any] = {
        "error_code": "thread_unsupported_request",
        "unsupported": ["thread"],
    }
    """Makes Anthropic's library send the whole history."""

    def __init__(self) -> None:
        super().__init__(
            "the server does not store conversations as threads",
            param="thread",
            hint="leave `thread` out, and send the whole conversation as messages",
        )


def read_messages(body: Any) -> ModelRequest:
    """Read the body of `POST /v1/messages`; raises RequestError naming the field."""
    fields = Fields(body)
    if fields.any("thread") is not None:
        raise ThreadRefused
    messages: list[ModelMessage] = []
    if fields.any("system"):
        messages.append(ModelMessage(role="system", content=read_content(fields, "system")))
    for message in fields.objects("messages"):
        messages += _messages(message)
    if not fields.items("messages"):
        raise fields.missing("messages", "messages must be a list of at least one message")
    chosen = Fields(fields.any("tool_choice") or {"type": "auto"}, "tool_choice")
    single = chosen.name("disable_parallel_tool_use")
    return read_shared(
        fields,
        _FIELDS,
        _read_tools(fields),
        single=single if chosen.flag("disable_parallel_tool_use") else "",
        messages=tuple(messages),
        is_prefill=messages[-1].role == "assistant",
    )


def _messages(message: Fields) -> Iterator[ModelMessage]:
    """Yield a message's content as messages; each tool result becomes one of its own."""
    role = message.text("role")
    if role == "assistant":
        yield _assistant(message)
        return
    if role not in ("user", "system"):
        raise RequestError(f"{message.name('role')} is {role!r}", param=message.name("role"))
    if isinstance(message.any("content"), str | None):
        content = read_content(message)
        yield ModelMessage(role=role, content=content, extra=message.extra())
        return
    parts: list[str | bytes] = []
    has_results = False
    for block in message.objects("content"):
        if block.text("type") != "tool_result":
            parts.append(_part(block))
            continue
        if content := joined(parts):
            yield ModelMessage(role=role, content=content, extra=message.extra())
            parts = []
        has_results = True
        result, call_id = _result(block), block.text("tool_use_id")
        yield ModelMessage(role="tool", content=result, call_id=call_id, extra=block.extra())
    content = joined(parts)
    if content or not has_results:
        yield ModelMessage(role=role, content=content, extra=message.extra())


def _result(block: Fields) -> tuple[str | bytes, ...]:
    if isinstance(block.any("content"), str | None):
        return read_content(block)
    return joined(_part(part) for part in block.objects("content"))


def _part(block: Fields) -> str | bytes:
    if block.text("type") != "image":
        return read_part(block)
    source = Fields(block.any("source"), block.name("source"))
    url = source.text("url") or f"data:{source.text('media_type')};base64,{source.text('data')}"
    return read_picture({"type": "image_url", "image_url": {"url": url}}, block)


def _assistant(message: Fields) -> ModelMessage:
    if isinstance(message.any("content"), str | None):
        content = read_content(message)
        return ModelMessage(role="assistant", content=content, extra=message.extra())
    parts: list[str | bytes] = []
    calls: list[CanonicalCall] = []
    thoughts: list[str] = []
    for block in message.objects("content"):
        kind = block.text("type")
        if kind == "tool_use":
            arguments = json.dumps(block.any("input") or {}, ensure_ascii=False)
            calls.append(CanonicalCall(block.text("name"), arguments, block.text("id")))
        elif kind == "thinking":
            thoughts.append(block.text("thinking"))
        elif kind != "redacted_thinking":
            parts.append(_part(block))
    reasoning = "".join(thoughts) if thoughts else None
    return ModelMessage(
        role="assistant",
        content=joined(parts),
        calls=tuple(calls),
        reasoning=reasoning,
        extra=message.extra(),
    )


def _read_tools(fields: Fields) -> ReadTools:
    tools: list[dict[str, Any]] = []
    left_out: list[str] = []
    ignored: list[str] = []
    for tool in fields.objects("tools"):
        kind = tool.text("type", "custom")
        if kind == "custom":
            name, description = tool.text("name"), tool.text("description")
            parameters, returned = tool.any("input_schema"), tool.any("return")
            tools.append(function_tool(name, description, parameters, returned))
            ignored += without_effect_in(tool)
        else:
            left_out.append(f"tools: {kind}")
    return ReadTools(tuple(tools), left_out=tuple(left_out), ignored=tuple(ignored))


class MessagesAnswer:
    """An answer of Messages, which has one choice; see `Answer`."""

    def __init__(self, head: AnswerHead, request: ModelRequest) -> None:
        """Write the answer to a request."""
        del request
        self.prompt_ids: Sequence[Sequence[int]] = ()
        """Tokens of the prompt, which the API cannot return."""
        self._head = head
        self._blocks: list[dict[str, Any]] = []
        self._is_open = False
        self._reason = "end_turn"
        self._stop: str | None = None

    def start(self, usage: Usage) -> Iterator[str]:
        """Yield the first event, with the counts of the prompt."""
        yield _event("message_start", message=self._message(None, usage))

    def push(
        self, pieces: Sequence[Piece], choice: int = 0, tokens: NewTokens | None = None
    ) -> Iterator[str]:
        """Add to the answer; yield the addition as events, without token ids."""
        del choice, tokens
        for piece in pieces:
            if isinstance(piece, CanonicalCall):
                yield from self._close()
                yield from self._call(piece)
            elif isinstance(piece, TextPiece):
                yield from self._add("text", piece.text, {"type": "text", "text": ""})
            else:
                empty = {"type": "thinking", "thinking": "", "signature": ""}
                yield from self._add("thinking", piece.text, empty)

    def finish(self, reason: FinishReason, choice: int = 0, stop: str | int = "") -> Iterator[str]:
        """End the last block."""
        del choice
        self._stop = stop if isinstance(stop, str) and stop else None
        if any(block["type"] == "tool_use" for block in self._blocks):
            self._reason = "tool_use"
        elif self._stop:
            self._reason = "stop_sequence"
        else:
            self._reason = "max_tokens" if reason == "length" else "end_turn"
        yield from self._close()

    def end(self, usage: Usage, extra: Mapping[str, Any] | None = None) -> Iterator[str]:
        """Yield the last events."""
        delta = {"stop_reason": self._reason, "stop_sequence": self._stop}
        yield _event("message_delta", delta=delta, usage=_worded_usage(usage), **(extra or {}))
        yield _event("message_stop")

    def fail(self, error: Mapping[str, Any]) -> str:
        """Return the event that ends a failed stream."""
        return event(error, "error")

    def whole(self, usage: Usage) -> dict[str, Any]:
        """Return the answer as one object, once it is finished."""
        return self._message(self._reason, usage)

    def _message(self, reason: str | None, usage: Usage) -> dict[str, Any]:
        return {
            "id": self._head.id,
            "type": "message",
            "role": "assistant",
            "model": self._head.model,
            "content": list(self._blocks),
            "stop_reason": reason,
            "stop_sequence": self._stop,
            "usage": _worded_usage(usage),
        }

    def _add(self, kind: str, text: str, empty: dict[str, Any]) -> Iterator[str]:
        if not self._is_open or self._blocks[-1]["type"] != kind:
            yield from self._close()
            yield self._begin(empty)
        self._blocks[-1][kind] += text
        yield self._delta({"type": f"{kind}_delta", kind: text})

    def _begin(self, empty: dict[str, Any]) -> str:
        self._blocks.append(dict(empty))
        self._is_open = True
        return _event("content_block_start", index=len(self._blocks) - 1, content_block=empty)

    def _delta(self, delta: dict[str, Any]) -> str:
        return _event("content_block_delta", index=len(self._blocks) - 1, delta=delta)

    def _close(self) -> Iterator[str]:
        if not self._is_open:
            return
        block = self._blocks[-1]
        if block["type"] == "thinking":
            block["signature"] = self._head.id
            yield self._delta({"type": "signature_delta", "signature": self._head.id})
        self._is_open = False
        yield _event("content_block_stop", index=len(self._blocks) - 1)

    def _call(self, call: CanonicalCall) -> Iterator[str]:
        value = call.value if isinstance(call.value, dict) else {"input": call.value}
        block: dict[str, Any] = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
        yield self._begin(block)
        sent = json.dumps(value, ensure_ascii=False)
        yield self._delta({"type": "input_json_delta", "partial_json": sent})
        self._blocks[-1]["input"] = value
        yield from self._close()


def _worded_usage(usage: Usage) -> dict[str, int]:
    """Return the counts; the API does not count cached tokens as `input_tokens`."""
    return {
        "input_tokens": usage.prompt - usage.reused,
        "cache_read_input_tokens": usage.reused,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.generated,
    }


def _event(kind: str, **fields: Any) -> str:
    return event({"type": kind, **fields}, kind)


_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


def messages_error(error: TinkermqError, status: int) -> dict[str, Any]:
    """Return an error in the form of Messages."""
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    details = {"details": dict(error.details)} if isinstance(error, ThreadRefused) else {}
    return {"type": "error", "error": {"type": kind, "message": text_of(error), **details}}


_PING = event({"type": "ping"}, "ping")
MESSAGES = ModelApi("messages", "msg_", read_messages, MessagesAnswer, messages_error, _PING)
