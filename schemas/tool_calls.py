"""Tool calls in generated text, in the format of Hermes and Qwen models.

`<tool_call>{"name": …, "arguments": {…}}</tool_call>`. The arguments are an object or its JSON
text, and may be called `parameters`. A tag may have a list of calls, and a call may be nested under
`function`, as in OpenAI's API. Anything else stays text: a call without a name, without arguments
(a function without parameters is called with `{}`), with both names of arguments, with a repeated
key or with text beside the JSON, and a tag that is not closed. A call never gets arguments that the
model did not write. Pure.

Answers in another format are converted to this one, if the model's template uses that format
(`call_formats`).
"""

import json
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, cast

from .chat_messages import read_object, read_value

OPEN, CLOSE = "<tool_call>", "</tool_call>"
THINK, THOUGHT = "<think>", "</think>"
MAX_CLOSES = 8
"""Maximum number of closing tags that are tried, since texts in the JSON may contain some."""

NAMING_ID = re.compile(r"(functions\.[\w.\-]+:\d+)(?:-\w+)?")
"""An id that contains the name of its tool, as the model wrote it, and what makes it unique."""
_ESCAPED = re.compile(r"\\.", re.DOTALL)
_END = re.compile(r"\s*(<\|[^<>|]*\|>|</s>)?\s*\Z")
"""Text that may follow the last call: the mark that ends a turn."""

Tools: TypeAlias = Sequence[Mapping[str, Any]]


class FoundCall(NamedTuple):
    """A call of the model."""

    name: str
    arguments: str
    """JSON text of an object."""
    id: str = ""
    """The id that the model wrote, if it contains the name (Kimi: `functions.NAME:0`)."""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How the models of a maker write tool calls."""

    name: str
    read: Callable[[str, Tools], list[FoundCall]]
    """Reads what stands between the marks, with the described tools; empty if it is malformed."""
    opens: tuple[str, ...]
    """Marks that begin a call, or a list of calls."""
    close: str = ""
    """The mark that ends it; empty: the end of the answer."""
    around: tuple[str, str] = ("", "")
    """Marks before the first and behind the last call of an answer; they may be missing."""
    may_end: bool = False
    """The end of the answer may stand for the closing mark."""
    bare: str = ""
    """First characters of an answer that consists of calls of described tools, without marks."""
    is_json: bool = False
    """Only a text in its JSON may contain the closing mark."""


def parse_tool_calls(text: str, name: str = "") -> tuple[str, list[dict[str, Any]]]:
    """Return the text without its tool calls, and the calls in the form of OpenAI's API.

    Their ids begin with `name`, or are random. White space around a text with calls is removed.
    """
    pieces = list(CallSplitter().push(text, last=True))
    calls = [
        {
            "id": f"{name}{number:03}" if name else f"call_{uuid.uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for number, call in enumerate(
            call for piece in pieces if isinstance(piece, list) for call in piece
        )
    ]
    rest = "".join(piece for piece in pieces if isinstance(piece, str))
    return (rest.strip() if calls else text), calls


def read_calls(body: str, tools: Tools = ()) -> list[FoundCall]:
    """Return the calls in a tag; empty if it is malformed."""
    del tools
    value = read_value(body)
    listed = cast("list[Any]", value if isinstance(value, list) else [value])
    calls = [_call_of(fields) for fields in listed]
    return [call for call in calls if call] if all(calls) else []


def read_call(body: str) -> FoundCall | None:
    """Return a call's name and arguments; None if it is malformed."""
    return _call_of(read_object(body))


def _call_of(value: Any) -> FoundCall | None:
    if not isinstance(value, dict):
        return None
    fields = cast("dict[str, Any]", value)
    if "name" not in fields and "function" in fields:
        return _call_of(fields["function"])
    name = fields.get("name")
    written = [key for key in ("arguments", "parameters") if key in fields]
    if not isinstance(name, str) or not name.strip() or len(written) != 1:
        return None
    arguments, call_id = fields[written[0]], fields.get("id")
    if not isinstance(call_id, str) or not NAMING_ID.fullmatch(call_id):
        call_id = ""
    if isinstance(arguments, str):
        return None if read_object(arguments) is None else FoundCall(name, arguments, call_id)
    if not isinstance(arguments, dict):
        return None
    return FoundCall(name, json.dumps(arguments, ensure_ascii=False), call_id)


HERMES = CallFormat("hermes", read_calls, (OPEN,), CLOSE, is_json=True)
"""The format that replies are read in."""


class CallSplitter:
    """Splits text that arrives in pieces into text and calls.

    Text is released as soon as it cannot be part of a call. The joined result is independent of the
    pieces. The opening mark of a call that cannot be read is a text of its own.
    """

    def __init__(self, form: "CallFormat | None" = None, tools: Tools = ()) -> None:
        """Begin an empty text, with calls in `form` (default: Hermes') of described `tools`."""
        self._form, self._tools = form or HERMES, tools
        before, self._after = self._form.around
        self._marks = (*self._form.opens, *filter(None, [before]))
        self._held = ""
        self._tried = 0
        """Position in the held text from which the next closing mark is searched."""
        self._num_tried = 0
        self._may_be_closed = True
        """Whether a later closing mark may end the first call."""
        self._may_be_bare = bool(self._form.bare)
        """Whether the whole text may be calls without a mark."""
        self._follows_call = False

    def push(self, text: str, *, last: bool = False) -> Iterator[str | list[FoundCall]]:
        """Add text; yield texts and calls. With `last` the text is complete."""
        self._held += text
        while self._held and not self._must_wait(last=last):
            if not self._held:
                return
            if self._may_be_bare and (calls := self._bare()):
                yield calls
                return
            self._may_be_bare = False
            places = [(at, mark) for mark in self._marks if (at := self._held.find(mark)) >= 0]
            if not places:
                held = 0 if last else max(overlap(self._held, mark) for mark in self._marks)
                if length := len(self._held) - held:
                    yield self._release(length)
                return
            at, mark = min(places)
            if at:
                yield self._release(at)
            begin = self._begin_of(mark)
            if begin > 0 and (calls := self._closed(begin, last=last)):
                self._follows_call = True
                yield calls
            elif begin and self._may_be_closed and not last:
                return
            else:
                yield self._release(len(mark))  # not a call; one may begin later

    def _must_wait(self, *, last: bool) -> bool:
        """Whether more text decides what the beginning of the held text is."""
        rest = self._held.lstrip()
        if self._follows_call and self._after:
            if rest.startswith(self._after):
                self._held = rest.removeprefix(self._after)
            elif self._after.startswith(rest) and not last:
                return True
            self._follows_call = False
        if not self._may_be_bare or last:
            return False
        marked = any(rest.startswith(mark) for mark in self._marks)
        may_mark = any(mark.startswith(rest) for mark in self._marks)
        return not marked and (may_mark or rest[0] in self._form.bare)

    def _bare(self) -> list[FoundCall]:
        """Return the calls of known tools that the text consists of, and remove it."""
        if self._held.lstrip()[:1] not in [*self._form.bare]:
            return []
        calls = self._form.read(_END.sub("", self._held), self._tools)
        if not all(call.name in dict(parameters_of(self._tools)) for call in calls):
            return []
        self._release(len(self._held) if calls else 0)
        return calls

    def _begin_of(self, mark: str) -> int:
        """Return where the body of the first call begins; 0: not a call, -1: it is not known."""
        if mark in self._form.opens:
            return len(mark)
        rest = self._held[len(mark) :].lstrip()
        for opening in self._form.opens:
            if rest.startswith(opening):
                return len(self._held) - len(rest) + len(opening)
        return -1 if any(opening.startswith(rest) for opening in self._form.opens) else 0

    def _release(self, length: int) -> str:
        """Remove text from the beginning, and begin a new search for a closing mark."""
        text, self._held = self._held[:length], self._held[length:]
        self._tried = self._num_tried = 0
        self._may_be_closed = True
        return text

    def _closed(self, begin: int, *, last: bool) -> list[FoundCall]:
        """Return the calls at the beginning of the held text, and remove it."""
        close = self._form.close
        while close and self._may_be_closed:
            end = self._held.find(close, max(self._tried, begin))
            if end < 0:
                self._tried = max(0, len(self._held) - len(close) + 1)
                break
            self._tried, self._num_tried = end + 1, self._num_tried + 1
            if calls := self._form.read(body := self._held[begin:end], self._tools):
                self._release(end + len(close))
                return calls
            may_go_on = not self._form.is_json or _ends_in_text(body)
            self._may_be_closed = self._num_tried < MAX_CLOSES and may_go_on
        if last and (self._form.may_end or not close):
            calls = self._form.read(_END.sub("", self._held[begin:]), self._tools)
            self._release(len(self._held) if calls else 0)
            return calls
        return []


def _ends_in_text(body: str) -> bool:
    """Whether cut JSON ends within a text."""
    if body.lstrip()[:1] not in ("{", "["):
        return False
    return _ESCAPED.sub("", body).count('"') % 2 == 1


def overlap(text: str, mark: str) -> int:
    """Return how many characters at the end of a text may begin a mark."""
    start = text.find(mark[0], max(0, len(text) - len(mark) + 1))
    while start >= 0 and not mark.startswith(text[start:]):
        start = text.find(mark[0], start + 1)
    return len(text) - start if start >= 0 else 0


def parameters_of(tools: Tools) -> Iterator[tuple[str, Any]]:
    """Yield the name of each tool, with the schema of its arguments."""
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping):
            fields = cast("Mapping[str, Any]", function)
            yield str(fields.get("name")), fields.get("parameters")
