"""Messages of a model call in one form for all APIs.

A program sends its whole history with each call, often changed: frameworks rewrite a tool's
arguments, drop the reasoning, move cache markers, and send a list of texts instead of a string. A
`ModelMessage` holds the content that the model read and wrote, from the program's proxy to the log
of calls. Its `key` is equal for all spellings of one message and differs with its meaning.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b, sha256
from itertools import groupby
from typing import Any, Literal, NamedTuple, Self, TypeAlias, cast

from pydantic import Field, field_validator

from ..call_formats import MarkedReasoning
from ..chat_messages import in_call_order, read_object
from ..tool_calls import CallSplitter
from ..wire.codec import read_json
from ..wire.message import Message

Role: TypeAlias = Literal["system", "user", "assistant", "tool"]

Volatile: TypeAlias = tuple[str, re.Pattern[str]]
"""A text that each match contains, for a quick check, and the pattern."""
VOLATILE: tuple[Volatile, ...] = (
    (
        "x-anthropic-billing-header:",
        re.compile(r"^x-anthropic-billing-header:[^\n]*\n?", re.MULTILINE),
    ),
    ("<total_tokens>", re.compile(r"<total_tokens>[^<]*</total_tokens>\n?")),
)
"""Text that programs change in each call without a meaning: it is neither rendered nor compared."""


MIN_QUOTE = 16
"""Minimum length of an answer's text whose appearance in a message shows that it was read."""


class CanonicalCall(NamedTuple):
    """A tool call of the model."""

    name: str
    arguments: str
    """As the model wrote them: JSON, or text that is not valid JSON."""
    id: str = ""
    """Names the call in its result. Programs may change it in both."""

    @property
    def value(self) -> dict[str, Any] | str:
        """The arguments for a template: an object, or the text if it is not a JSON object."""
        value = read_object(self.arguments)
        return self.arguments if value is None else value

    @property
    def key(self) -> str:
        """Equal for equal JSON values, types included: 1, 1.0 and true are three values."""
        try:
            value: Any = read_json(self.arguments)
            return json.dumps(value, sort_keys=True, allow_nan=False)
        except ValueError:
            return f"text:{self.arguments}"


class ModelMessage(Message):
    """One message of a conversation, in any of the APIs."""

    __slots__ = ("_cached_key",)  # outside of the fields, which are sent
    role: Role
    content: tuple[str | bytes, ...] = ()
    """Texts and encoded images, in order; no text is empty, and no two are adjacent."""
    calls: tuple[CanonicalCall, ...] = ()
    """The assistant's tool calls: name, arguments as written, id."""
    reasoning: str | None = None
    """The assistant's reasoning; null: not sent, which equals any reasoning."""
    call_id: str = ""
    """Id of the call that a tool result answers."""
    extra: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Further fields for the chat template, such as `name`."""

    @field_validator("content")
    @classmethod
    def _joined(cls, content: tuple[str | bytes, ...]) -> tuple[str | bytes, ...]:
        return content if len(content) == 1 and content[0] else joined(content)

    def replaced(self, **fields: Any) -> Self:
        """Return the message with other fields."""
        return type(self)(**{**vars(self), **fields})

    @property
    def text(self) -> str:
        """The texts without the images."""
        return "".join(part for part in self.content if isinstance(part, str))

    @property
    def num_bytes(self) -> int:
        """Approximate size of its content."""
        texts = [self.reasoning or "", *(call.arguments for call in self.calls)]
        return sum(map(len, self.content)) + sum(map(len, texts))

    @property
    def key(self) -> bytes:
        """16 bytes, equal for all spellings of the message; reasoning and ids do not count."""
        try:  # cached, since a history is compared at each call
            return _CACHED_KEY.__get__(self)
        except AttributeError:  # by the slot itself: pydantic's search for it takes longer
            key = self._made_key()
            _CACHED_KEY.__set__(self, key)
            return key

    def _made_key(self) -> bytes:
        is_text = not self.calls and all(isinstance(part, str) for part in self.content)
        if is_text and not self._has_own_extra:
            text = self.text.encode(errors="surrogatepass")
            return blake2b(text, digest_size=16, person=self.role.encode()).digest()
        parts = [part if isinstance(part, str) else [digest_of(part)] for part in self.content]
        calls = [[call.name, call.key] for call in self.calls]
        extra = [self.extra] if self._has_own_extra else []
        whole = json.dumps([self.role, parts, calls, *extra], sort_keys=True, default=repr)
        return blake2b(whole.encode(), digest_size=16).digest()

    @property
    def _has_own_extra(self) -> bool:
        """Whether further fields belong to its meaning; programs add fields to answers."""
        return bool(self.extra) and self.role != "assistant"

    def agrees(self, other: "ModelMessage") -> bool:
        """Whether the messages are equal; reasoning is compared if both have it."""
        both_have = self.reasoning is not None and other.reasoning is not None
        return self.key == other.key and not (both_have and self.reasoning != other.reasoning)

    def for_template(self) -> dict[str, Any]:
        """Return the message as chat templates take it."""
        message: dict[str, Any] = {"role": self.role, "content": self._content()}
        message |= {name: value for name, value in self.extra.items() if name not in message}
        if self.calls:
            message["tool_calls"] = [
                {
                    "type": "function",
                    "id": call.id,
                    "function": {"name": call.name, "arguments": call.value},
                }
                for call in self.calls
            ]
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.call_id:
            message["tool_call_id"] = self.call_id
        return message

    def _content(self) -> str | list[dict[str, Any]]:
        if all(isinstance(part, str) for part in self.content):
            return self.text
        return [
            {"type": "text", "text": part}
            if isinstance(part, str)
            else {"type": "image", "image": part}
            for part in self.content
        ]


_CACHED_KEY: Any = vars(ModelMessage)["_cached_key"]


def pictures_of(messages: Iterable[ModelMessage]) -> Iterator[bytes]:
    """Yield the encoded images of messages, in order."""
    for message in messages:
        for part in message.content:
            if isinstance(part, bytes):
                yield part


def digest_of(picture: bytes) -> str:
    """Return the SHA-256 of an image's bytes."""
    return sha256(picture).hexdigest()


def marks_of(reply: ModelMessage) -> list[str]:
    """Return texts that show that a message contains an answer: its call ids and its own text.

    Some programs (smolagents) write ids as text.
    """
    text = reply.text.strip()
    ids = [call.id for call in reply.calls if call.id]
    return [*ids, *([text] if len(text) >= MIN_QUOTE else [])]


def quotes(messages: Iterable[ModelMessage], reply: ModelMessage) -> bool:
    """Whether messages contain an answer: its text, or the id of one of its calls."""
    ids = {call.id for call in reply.calls if call.id}
    marks = marks_of(reply)
    return any(
        message.call_id in ids
        or any(call.id in ids for call in message.calls)
        or any(mark in message.text for mark in marks)
        for message in messages
    )


def joined(parts: Iterable[str | bytes]) -> tuple[str | bytes, ...]:
    """Return the parts of a message with adjacent texts joined and empty texts left out."""
    content: list[str | bytes] = []
    for is_text, group in groupby(parts, lambda part: isinstance(part, str)):
        if not is_text:
            content += group
        elif text := "".join(cast("Iterable[str]", group)):
            content.append(text)
    return tuple(content)


def canonical_history(
    messages: Sequence[ModelMessage], volatile: Sequence[Volatile] = VOLATILE
) -> list[ModelMessage]:
    """Return a history without volatile text, with tool results in the order of their calls."""
    return in_call_order(
        [_without(message, volatile) for message in messages],
        lambda message: [call.id for call in message.calls],
        lambda message: message.call_id if message.role == "tool" else None,
    )


def _without(message: ModelMessage, volatile: Sequence[Volatile]) -> ModelMessage:
    if message.role not in ("system", "user"):
        return message
    parts: list[str | bytes] = []
    for part in message.content:
        if isinstance(part, str):
            for mark, pattern in volatile:
                part = pattern.sub("", part) if mark in part else part
        parts.append(part)
    content = joined(parts)
    return message if content == message.content else message.replaced(content=content)


# Replies, read incrementally, in the same form in which an echo of the answer is recognised. Calls
# are read in the format of Hermes and Qwen; malformed calls are text. White space beside reasoning
# and calls belongs to neither.


@dataclass(frozen=True, slots=True)
class ReasoningPiece:
    """More of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class TextPiece:
    """More of its text."""

    text: str


Piece: TypeAlias = ReasoningPiece | TextPiece | CanonicalCall
"""A new part of an answer; a tool call is one piece, after its end."""


class ReplyReader:
    """Reads one answer incrementally."""

    def __init__(
        self, name: str, *, calls: bool, thinking: bool = False, keeps_reasoning: bool = False
    ) -> None:
        """Read an answer; the ids of its tool calls begin with `name`.

        Without `calls`, text that looks like a call stays text; with `keeps_reasoning`, so does
        reasoning. With `thinking`, the prompt has opened the reasoning already.
        """
        self._name = name
        self._reads_calls = calls
        self._parts = None if keeps_reasoning else MarkedReasoning(thinking=thinking)
        self._thinks = self._hides_space = thinking and not keeps_reasoning
        self._space = ""
        self._reasoning: list[str] | None = [] if thinking else None
        self._texts: list[str] = []
        self._calls: list[CanonicalCall] = []
        self._splitter = CallSplitter()

    @property
    def reply(self) -> ModelMessage:
        """The content so far, as a message."""
        return ModelMessage(
            role="assistant",
            content=tuple(self._texts),
            calls=tuple(self._calls),
            reasoning=None if self._reasoning is None else "".join(self._reasoning),
        )

    def push(self, text: str) -> list[Piece]:
        """Add text; return the pieces that later text cannot change."""
        return self._read(text, last=False)

    def finish(self) -> list[Piece]:
        """Return the pieces that were held back, at the end of the answer."""
        pieces = self._read("", last=True)
        if not self._thinks and not self._calls and self._space:
            pieces.append(TextPiece(self._space))
            self._texts.append(self._space)
        return pieces

    def _read(self, text: str, *, last: bool) -> list[Piece]:
        pieces: list[Piece] = []
        parts = [(False, text)] if self._parts is None else self._parts.push(text, last=last)
        for thinks, part in parts:
            if thinks != self._thinks:
                self._thinks, self._space, self._hides_space = thinks, "", True
            if not thinks:
                self._read_text(part, pieces, last=False)
                continue
            self._reasoning = self._reasoning or []
            if thought := self._spaced(part):
                pieces.append(ReasoningPiece(thought))
                self._reasoning.append(thought)
        self._read_text("", pieces, last=last)
        return pieces

    def _read_text(self, text: str, pieces: list[Piece], *, last: bool) -> None:
        """Read text and tool calls."""
        if not self._reads_calls:
            pieces += self._text_piece(text) if text else []
            return
        for piece in self._splitter.push(text, last=last):
            if isinstance(piece, str):
                pieces += self._text_piece(piece)
                continue
            for read in piece:
                own = f"{self._name}{len(self._calls):03}"
                call_id = f"{read.id}-{own}" if read.id else own
                call = CanonicalCall(read.name, read.arguments, call_id)
                self._calls.append(call)
                pieces.append(call)
            self._space, self._hides_space = "", True

    def _text_piece(self, text: str) -> list[Piece]:
        ready = self._spaced(text)
        if not ready:
            return []
        self._texts.append(ready)
        return [TextPiece(ready)]

    def _spaced(self, text: str) -> str:
        """Return the text to send; trailing white space is held back until the next text."""
        whole = self._space + text
        if self._hides_space:
            whole = whole.lstrip()
        stripped = whole.rstrip()
        self._space = whole[len(stripped) :]
        self._hides_space = self._hides_space and not stripped
        return stripped


def call_name(request: str, choice: int = 0) -> str:
    """Return the prefix of the tool call ids of a served answer."""
    return f"call_{request[:20]}" if not choice else f"call_{request[:17]}{choice:03}"


def parse_reply(text: str, name: str, *, calls: bool, thinking: bool = False) -> ModelMessage:
    """Read a whole answer; see `ReplyReader`."""
    reader = ReplyReader(name, calls=calls, thinking=thinking)
    reader.push(text)
    reader.finish()
    return reader.reply
