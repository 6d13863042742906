"""OpenAI's Chat Completions."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...chat_messages import Origin, UnreadableMessageError, read_conversation
from ..messages import CanonicalCall, CanonicalMessage, Picture, joined
from ..replies import Piece, ReasoningPiece, TextPiece
from .answer import Answered, AnswerHead, TokenLogprob, Usage, event
from .formats import output_format, read_format, read_tool_choice
from .request import Fields, ModelRequest, RequestError, sampling_of, tools_of

_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "min_p",
)
DONE = "data: [DONE]\n\n"


def read_chat(body: Any) -> ModelRequest:
    """Read the body of `POST /v1/chat/completions`; RequestError names what cannot be served."""
    fields = Fields(body)
    messages = _messages(fields)
    tools, left_out = tools_of(fields, nested=True)
    single = "parallel_tool_calls" if fields.any("parallel_tool_calls") is False else ""
    choice = read_tool_choice(fields.any("tool_choice"), tools, single=single)
    schema = read_format(fields.any("response_format"), "response_format")
    options = Fields(fields.any("stream_options") or {}, "stream_options")
    include_usage = options.flag("include_usage")
    limit = fields.count("max_completion_tokens") or fields.count("max_tokens")
    return ModelRequest(
        messages=messages,
        tools=() if choice.hides_tools else tools,
        format=output_format(schema, choice, tools),
        top_logprobs=_top_logprobs(fields),
        num_choices=fields.count("n") or 1,
        max_tokens=limit,
        stop=fields.texts("stop"),
        stream=fields.flag("stream"),
        include_usage=include_usage,
        model=fields.text("model"),
        overruled=sampling_of(fields, _SAMPLING),
        without_effect=(*left_out, *fields.unread(), *options.unread(), *choice.without_effect),
    )


def _top_logprobs(fields: Fields) -> int | None:
    num = fields.count("top_logprobs", least=0)
    return (num or 0) if fields.flag("logprobs") else None


def _messages(fields: Fields) -> tuple[CanonicalMessage, ...]:
    given = fields.items("messages")
    if not given:
        raise RequestError("messages is empty", param="messages")
    try:
        read = read_conversation(given, Origin(is_request=True, keeps_text=True))
    except UnreadableMessageError as error:
        raise RequestError(error.message, param=error.place, hint=error.hint) from error
    return tuple(canonical_message(message, f"messages[{n}]") for n, message in enumerate(read))


def canonical_message(message: Mapping[str, Any], place: str) -> CanonicalMessage:
    """Return a message that the reader of all origins has read; RequestError for its role."""
    role = message["role"]
    if role not in ("system", "user", "assistant", "tool"):
        raise RequestError(f"{place}.role is {role!r}", param=f"{place}.role")
    content = message["content"]
    parts = [content] if isinstance(content, str) else [_part(part) for part in content]
    name = message.get("tool_call_id") or message.get("name") if role == "tool" else ""
    reasoning = message.get("reasoning_content") if role == "assistant" else None
    return CanonicalMessage(
        role,
        joined(parts),
        tuple(_call(call) for call in message.get("tool_calls", ())),
        reasoning if isinstance(reasoning, str) else None,
        name if isinstance(name, str) else "",
    )


def _part(part: Mapping[str, Any]) -> str | Picture:
    return part["text"] if part["type"] == "text" else Picture(part["image"])


def _call(call: Mapping[str, Any]) -> CanonicalCall:
    arguments, name = call["function"]["arguments"], call.get("id")
    told = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return CanonicalCall(call["function"]["name"], told, name if isinstance(name, str) else "")


def custom_call(name: str, text: str, call_id: str) -> CanonicalCall:
    """Return a call of a tool that takes any text."""
    return CanonicalCall(name, json.dumps({"input": text}, ensure_ascii=False), call_id)


class ChatCompletionAnswer:
    """The choices of one answer, as one object or as the chunks of a stream."""

    def __init__(self, head: AnswerHead, num_choices: int, *, include_usage: bool) -> None:
        """Word an answer."""
        self._head = head
        self._include_usage = include_usage
        self._choices = [_Choice(number) for number in range(num_choices)]

    def start(self) -> Iterator[str]:
        """Yield the first chunks: whose turn it is."""
        for choice in self._choices:
            yield self._chunk(choice, {"role": "assistant", "content": ""})

    def push(self, piece: Piece, choice: int = 0) -> Iterator[str]:
        """Take more of a choice; yield it as chunks."""
        yield self._chunk(self._choices[choice], self._choices[choice].add(piece))

    def finish(self, answered: Answered, choice: int = 0) -> Iterator[str]:
        """End a choice."""
        of = self._choices[choice]
        of.close(answered)
        yield self._chunk(of, {}, of.finish)

    def take(self, piece: Piece, choice: int = 0) -> None:
        """Take more of a choice, of an answer that is told as one object."""
        self._choices[choice].add(piece)

    def note_logprobs(self, told: Sequence[TokenLogprob], choice: int = 0) -> Iterator[str]:
        """Take the log-probs of new tokens of a choice; yield them as a chunk."""
        of = self._choices[choice]
        fresh = [one.told() for one in told]
        of.logprobs = [*(of.logprobs or []), *fresh]
        if fresh:
            yield self._chunk(of, {}, logprobs={"content": fresh, "refusal": None})

    def close(self, answered: Answered, choice: int = 0) -> None:
        """End a choice of such an answer."""
        self._choices[choice].close(answered)

    def end(self, usage: Usage, extra: Mapping[str, Any] | None = None) -> Iterator[str]:
        """Yield the token counts, if they were asked for, what is told besides, and the end."""
        top: dict[str, Any] = {**self._top("chat.completion.chunk"), "choices": []}
        if extra:
            yield event({**top, **extra})
        if self._include_usage:
            yield event({**top, "usage": told(usage)})
        yield DONE

    def whole(self, usage: Usage) -> dict[str, Any]:
        """Return the answer as one object."""
        choices = [choice.told() for choice in self._choices]
        return {**self._top("chat.completion"), "choices": choices, "usage": told(usage)}

    def _chunk(
        self,
        of: "_Choice",
        delta: dict[str, Any],
        finish: str | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> str:
        told = {"index": of.number, "delta": delta, "logprobs": logprobs}
        choice = {**told, "finish_reason": finish}
        usage = {"usage": None} if self._include_usage else {}
        return event({**self._top("chat.completion.chunk"), "choices": [choice], **usage})

    def _top(self, kind: str) -> dict[str, Any]:
        head = self._head
        return {"id": head.id, "object": kind, "created": head.created, "model": head.model}


class _Choice:
    """One choice as it has come so far."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.text = ""
        self.reasoning: str | None = None
        self.calls: list[CanonicalCall] = []
        self.logprobs: list[dict[str, Any]] | None = None
        self.finish = "stop"

    def add(self, piece: Piece) -> dict[str, Any]:
        """Take more of it; return what is new, as a chunk has it."""
        if isinstance(piece, TextPiece):
            self.text += piece.text
            return {"content": piece.text}
        if isinstance(piece, ReasoningPiece):
            self.reasoning = (self.reasoning or "") + piece.text
            return {"reasoning_content": piece.text}
        told = {"index": len(self.calls), **_told(piece)}
        self.calls.append(piece)
        return {"tool_calls": [told]}

    def close(self, answered: Answered) -> None:
        self.finish = "tool_calls" if self.calls else "length" if answered == "length" else "stop"

    def told(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.text, "refusal": None}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["content"] = self.text or None
            message["tool_calls"] = [_told(call) for call in self.calls]
        return {
            "index": self.number,
            "message": message,
            "logprobs": self.logprobs and {"content": self.logprobs, "refusal": None},
            "finish_reason": self.finish,
        }


def _told(call: CanonicalCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def told(usage: Usage) -> dict[str, Any]:
    """Return the counts in the words of Chat Completions."""
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.generated,
        "total_tokens": usage.prompt + usage.generated,
        "prompt_tokens_details": {"cached_tokens": usage.reused},
    }
