"""OpenAI's Responses."""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any

from ..wire.images import data_url
from . import answers
from .canonical import (
    CanonicalCall,
    ModelMessage,
    Piece,
    ReasoningPiece,
    TextPiece,
    joined,
)
from .request import (
    FieldNames,
    Fields,
    ModelRequest,
    RequestError,
    custom_call,
    custom_input,
    read_content,
    read_openai_tools,
    read_shared,
)

_FIELDS = FieldNames(
    effort="reasoning.effort",
    max_tokens=("max_output_tokens",),
    formats=("text.format",),
    stop="",
    num_choices="",
)
_ECHOED: Mapping[str, Any] = {
    "background": False,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt": None,
    "prompt_cache_key": None,
    "prompt_cache_retention": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "service_tier": "default",
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": None,
    "truncation": "disabled",
    "user": None,
}
"""Fields of its request that a response repeats, with their defaults."""
_OUTPUTS = ("function_call_output", "custom_tool_call_output")


def read_response(body: Any) -> ModelRequest:
    """Read the body of `POST /v1/responses`; raises RequestError naming the field."""
    fields = Fields(body)
    messages: list[ModelMessage] = []
    if instructions := fields.text("instructions"):
        messages.append(ModelMessage(role="system", content=(instructions,)))
    left_out: list[str] = []
    items = fields.any("input")
    if isinstance(items, str):
        messages.append(ModelMessage(role="user", content=joined([items])))
    else:
        for item in fields.objects("input"):
            _add(messages, item, left_out)
    if not messages:
        raise fields.missing("input", "input is empty")
    fields.inner("stream_options")
    return read_shared(
        fields,
        _FIELDS,
        read_openai_tools(fields, nested=False),
        single="parallel_tool_calls" if fields.any("parallel_tool_calls") is False else "",
        without_effect=left_out,
        messages=tuple(messages),
        previous=fields.text("previous_response_id"),
        echo=_echo(body),
    )


def _echo(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request's fields that a response repeats; they must be valid JSON."""
    echoed = {name: body[name] for name in _ECHOED if body.get(name) is not None}
    for name, value in echoed.items():
        try:
            json.dumps(value, allow_nan=False)
        except ValueError as error:
            raise RequestError(f"{name} has a number that is not finite", param=name) from error
    for name in ("reasoning", "text"):  # in objects whose other fields have their defaults
        if isinstance(echoed.get(name), dict):
            echoed[name] = {**_ECHOED[name], **echoed[name]}
    if echoed.get("service_tier") == "auto":
        echoed["service_tier"] = "default"
    return {**_ECHOED, **echoed}


def _add(messages: list[ModelMessage], item: Fields, left_out: list[str]) -> None:
    """Add an item; the assistant's consecutive reasoning, text and calls are one message."""
    kind = item.text("type", "message")
    if kind in _OUTPUTS:
        output = read_content(item, "output")
        call_id = item.text("call_id")
        result = ModelMessage(role="tool", content=output, call_id=call_id, extra=item.extra())
        messages.append(result)
        return
    message = _message(item) if kind == "message" else _part_of_turn(item, kind)
    if message is None:
        left_out.append(f"input: {kind}")
    elif message.role == "assistant" and messages and messages[-1].role == "assistant":
        messages[-1] = _together(messages[-1], message)
    else:
        messages.append(message)


def _message(item: Fields) -> ModelMessage:
    role = item.text("role", "user")
    role = "system" if role == "developer" else role
    if role not in ("system", "user", "assistant"):
        raise RequestError(f"{item.name('role')} is {role!r}", param=item.name("role"))
    content = read_content(item)
    return ModelMessage(role=role, content=content, extra=item.extra())


def _part_of_turn(item: Fields, kind: str) -> ModelMessage | None:
    if kind == "function_call":
        arguments = item.text("arguments").strip() or "{}"
        call = CanonicalCall(item.text("name"), arguments, item.text("call_id"))
    elif kind == "custom_tool_call":
        call = custom_call(item.text("name"), item.text("input"), item.text("call_id"))
    elif kind == "reasoning":
        texts = read_content(item) or read_content(item, "summary")
        reasoning = "".join(text for text in texts if isinstance(text, str))
        return ModelMessage(role="assistant", reasoning=reasoning or None)
    else:
        return None
    return ModelMessage(role="assistant", calls=(call,))


def _together(first: ModelMessage, second: ModelMessage) -> ModelMessage:
    thoughts = [text for text in (first.reasoning, second.reasoning) if text is not None]
    return ModelMessage(
        role="assistant",
        content=joined([*first.content, *second.content]),
        calls=(*first.calls, *second.calls),
        reasoning="".join(thoughts) if thoughts else None,
        extra={**first.extra, **second.extra},
    )


def input_items(messages: Sequence[ModelMessage], name: str) -> Iterator[dict[str, Any]]:
    """Yield messages as input items; `name` is the id of their response."""
    numbers = count()

    def item(prefix: str, kind: str, **fields: Any) -> dict[str, Any]:
        of_item = {"id": f"{prefix}_{name}_in{next(numbers)}", "type": kind}
        return {**of_item, "status": "completed", **fields}

    for message in messages:
        if message.reasoning:
            thought = [{"type": "reasoning_text", "text": message.reasoning}]
            yield item("rs", "reasoning", summary=[], content=thought)
        if message.role == "tool":
            call_id = message.call_id
            yield item("fc", "function_call_output", call_id=call_id, output=message.text)
        elif message.content:
            content = [_worded_part(part, message.role) for part in message.content]
            yield item("msg", "message", role=message.role, content=content)
        for call in message.calls:
            called = {"call_id": call.id, "name": call.name, "arguments": call.arguments}
            yield item("fc", "function_call", **called)


def _worded_part(part: str | bytes, role: str) -> dict[str, Any]:
    if isinstance(part, bytes):
        return {"type": "input_image", "detail": "auto", "image_url": data_url(part)}
    if role == "assistant":
        return {"type": "output_text", "text": part, "annotations": [], "logprobs": []}
    return {"type": "input_text", "text": part}


class ResponseAnswer:
    """An answer of Responses, which has one choice; see `Answer`."""

    def __init__(self, head: answers.AnswerHead, request: ModelRequest) -> None:
        """Write the answer to a request."""
        self.prompt_ids: Sequence[Sequence[int]] = ()
        """Tokens of the prompt, which the API cannot return."""
        self._head = head
        self._echo = request.echo or _ECHOED
        self._custom = request.custom_tools
        self._numbers = count()
        self._output: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._status = "completed"

    def start(self, usage: answers.Usage) -> Iterator[str]:
        """Yield the first events, without counts."""
        del usage
        for kind in ("created", "in_progress"):
            yield self._event(f"response.{kind}", response=self._response("in_progress"))

    def push(
        self, pieces: Sequence[Piece], choice: int = 0, tokens: answers.NewTokens | None = None
    ) -> Iterator[str]:
        """Add to the answer; yield the addition as events, without token ids."""
        del choice, tokens
        for piece in pieces:
            if isinstance(piece, CanonicalCall):
                yield from self._close()
                yield from self._call(piece)
            else:
                yield from self._add(piece)

    def finish(
        self, reason: answers.FinishReason, choice: int = 0, stop: str | int = ""
    ) -> Iterator[str]:
        """End the last item."""
        del choice, stop
        self._status = "incomplete" if reason == "length" else "completed"
        yield from self._close()

    def end(self, usage: answers.Usage, extra: Mapping[str, Any] | None = None) -> Iterator[str]:
        """Yield the last event, which holds the whole answer."""
        whole = {**self.whole(usage), **(extra or {})}
        yield self._event(f"response.{self._status}", response=whole)

    def fail(self, error: Mapping[str, Any]) -> str:
        """Return the event that ends a failed stream."""
        fields = error["error"]
        code = "rate_limit_exceeded" if fields["type"] == "rate_limit_error" else "server_error"
        failed = {"error": {"code": code, "message": fields["message"]}}
        return self._event("response.failed", response={**self._response("failed"), **failed})

    def whole(self, usage: answers.Usage) -> dict[str, Any]:
        """Return the answer as one object, once it is finished."""
        counts = {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.reused, "cache_write_tokens": 0},
            "output_tokens": usage.generated,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt + usage.generated,
        }
        why = {"reason": "max_output_tokens"} if self._status == "incomplete" else None
        return {**self._response(self._status), "incomplete_details": why, "usage": counts}

    def _response(self, status: str) -> dict[str, Any]:
        return {
            "id": self._head.id,
            "object": "response",
            "created_at": self._head.created,
            "model": self._head.model,
            "status": status,
            "output": list(self._output),
            "error": None,
            "incomplete_details": None,
            **self._echo,
            "usage": None,
        }

    def _add(self, piece: TextPiece | ReasoningPiece) -> Iterator[str]:
        """Add to the open item, or open one of the piece's kind."""
        kind = "message" if isinstance(piece, TextPiece) else "reasoning"
        if self._open is None or self._open["type"] != kind:
            yield from self._close()
            yield from self._begin(kind)
        assert self._open is not None
        self._open["content"][0]["text"] += piece.text
        name = "output_text" if kind == "message" else "reasoning_text"
        logprobs: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        yield self._event(f"response.{name}.delta", **self._part(), delta=piece.text, **logprobs)

    def _begin(self, kind: str) -> Iterator[str]:
        name = f"{'msg' if kind == 'message' else 'rs'}_{self._head.id}_{len(self._output)}"
        content: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        item: dict[str, Any] = {"id": name, "type": kind, "summary": []}
        if kind == "message":
            content = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item = {"id": name, "type": kind, "role": "assistant"}
        self._open = {**item, "status": "in_progress", "content": [content]}
        place = {"output_index": len(self._output)}
        yield self._event("response.output_item.added", **place, item={**self._open, "content": []})
        yield self._event("response.content_part.added", **self._part(), part=dict(content))

    def _close(self) -> Iterator[str]:
        if self._open is None:
            return
        item: dict[str, Any] = {**self._open, "status": "completed"}
        place = self._part()
        content = item["content"][0]
        name = "output_text" if item["type"] == "message" else "reasoning_text"
        logprobs: dict[str, Any] = {"logprobs": []} if item["type"] == "message" else {}
        yield self._event(f"response.{name}.done", **place, text=content["text"], **logprobs)
        yield self._event("response.content_part.done", **place, part=content)
        self._open = None
        yield from self._done(item)

    def _call(self, call: CanonicalCall) -> Iterator[str]:
        is_custom = call.name in self._custom
        field, sent = ("input", custom_input(call)) if is_custom else ("arguments", call.arguments)
        item = {
            "id": f"fc_{self._head.id}_{len(self._output)}",
            "type": "custom_tool_call" if is_custom else "function_call",
            "call_id": call.id,
            "name": call.name,
            "status": "in_progress",
        }
        name = "custom_tool_call_input" if is_custom else "function_call_arguments"
        place: dict[str, Any] = {"output_index": len(self._output)}
        yield self._event("response.output_item.added", **place, item={**item, field: ""})
        place["item_id"] = item["id"]
        yield self._event(f"response.{name}.delta", **place, delta=sent)
        named = {} if is_custom else {"name": call.name}
        yield self._event(f"response.{name}.done", **place, **named, **{field: sent})
        yield from self._done({**item, field: sent, "status": "completed"})

    def _done(self, item: dict[str, Any]) -> Iterator[str]:
        place = {"output_index": len(self._output)}
        self._output.append(item)
        yield self._event("response.output_item.done", **place, item=item)

    def _part(self) -> dict[str, Any]:
        assert self._open is not None
        return {
            "item_id": self._open["id"],
            "output_index": len(self._output),
            "content_index": 0,
        }

    def _event(self, kind: str, **fields: Any) -> str:
        return answers.event({"type": kind, "sequence_number": next(self._numbers), **fields}, kind)


RESPONSES = answers.ModelApi(
    "responses", "resp_", read_response, ResponseAnswer, answers.openai_error
)
