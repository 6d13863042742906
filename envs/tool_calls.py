"""Tool calls in generated text, in the form that Hermes and Qwen models write them.

`<tool_call>{"name": …, "arguments": {…}}</tool_call>`. The arguments are an object or its JSON
text, and may be called `parameters`; a tag may hold a list of calls, and a call may stand under
`function`, as OpenAI writes it. All else stays text: no name, no arguments (a function that has no
parameters is called with `{}`), arguments of both names, a key twice, text beside the JSON, a tag
that is not closed. A call is never given arguments that the model did not write. Pure.

Answers in another format are put into this one where the model's template declares theirs.
"""

import json
import re
import uuid
from collections.abc import Iterator
from typing import Any, TypeAlias, cast

from .chat_messages import read_object, read_value

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MAX_CLOSES = 8
"""Ends of a tag that are tried where they stand within a text of the JSON."""

_ESCAPED = re.compile(r"\\.", re.DOTALL)

FoundCall: TypeAlias = tuple[str, str]
"""A call's name and arguments, which are the JSON text of an object."""


def parse_tool_calls(text: str, name: str = "") -> tuple[str, list[dict[str, Any]]]:
    """Return the text without its tool calls, and the calls as OpenAI writes them.

    Their ids begin with `name`; without one they are new. White space around a text with calls is
    no part of it.
    """
    stream = ToolText(parse=True, name=name)
    said = stream.push(text)
    rest, calls = stream.finish()
    return (said + rest).strip() if calls else text, calls


def read_calls(body: str) -> list[FoundCall]:
    """Return the calls that a tag holds; empty for what is not well formed."""
    value = read_value(body)
    listed = cast("list[Any]", value if isinstance(value, list) else [value])
    found = [_call_of(fields) for fields in listed]
    return [call for call in found if call] if all(found) else []


def read_call(body: str) -> FoundCall | None:
    """Return a call's name and arguments; None for what is not well formed."""
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
    arguments = fields[written[0]]
    if isinstance(arguments, str):
        return None if read_object(arguments) is None else (name, arguments)
    if not isinstance(arguments, dict):
        return None
    return name, json.dumps(arguments, ensure_ascii=False)


class CallSplitter:
    """Splits text that comes bit by bit into what is said and what is called.

    Text is told as soon as it can be no part of a call. What comes out, joined, does not depend on
    the bits.
    """

    def __init__(self) -> None:
        """Begin before the first letter."""
        self._held = ""
        self._tried = 0
        """Where in the held text the next end of its first tag is looked for."""
        self._num_tried = 0
        self._may_be_closed = True
        """Whether a later end may close that tag."""

    def push(self, text: str, *, last: bool = False) -> Iterator[str | list[FoundCall]]:
        """Take more text; yield texts and the calls of tags. With `last`, nothing follows."""
        self._held += text
        while self._held:
            at = self._held.find(OPEN)
            if at < 0:
                held = 0 if last else overlap(self._held, OPEN)
                yield self._take(len(self._held) - held)
                return
            if at:
                yield self._take(at)
            if calls := self._closed():
                yield calls
            elif self._may_be_closed and not last:
                return
            else:
                yield self._take(len(OPEN))  # no call begins here; one may further on

    def _take(self, length: int) -> str:
        """Take text from the beginning, which ends the search for the end of a tag."""
        taken, self._held = self._held[:length], self._held[length:]
        self._tried = self._num_tried = 0
        self._may_be_closed = True
        return taken

    def _closed(self) -> list[FoundCall]:
        """Return the calls of the tag with which the held text begins, and take it."""
        while self._may_be_closed:
            end = self._held.find(CLOSE, max(self._tried, len(OPEN)))
            if end < 0:
                self._tried = max(0, len(self._held) - len(CLOSE) + 1)
                return []
            self._tried, self._num_tried = end + 1, self._num_tried + 1
            body = self._held[len(OPEN) : end]
            if calls := read_calls(body):
                self._take(end + len(CLOSE))
                return calls
            self._may_be_closed = self._num_tried < MAX_CLOSES and _ends_in_text(body)
        return []


def _ends_in_text(body: str) -> bool:
    """Whether JSON that is cut here is cut within a text."""
    if body.lstrip()[:1] not in ("{", "["):
        return False
    return _ESCAPED.sub("", body).count('"') % 2 == 1


class ToolText:
    """Text with tool calls that comes bit by bit: what may belong to a call is held back.

    What it tells is what `parse_tool_calls` tells of the whole, but for white space around it: that
    before a call has been told already, that behind the last call is not.
    """

    def __init__(self, *, parse: bool, name: str = "") -> None:
        """Without `parse` all text is told as it comes; the calls' ids begin with `name`."""
        self._parse = parse
        self._name = name
        self._splitter = CallSplitter()
        self._calls: list[FoundCall] = []
        self._space = ""

    def push(self, text: str) -> str:
        """Take more text; return what is certainly no part of a call."""
        return self._read(text, last=False) if self._parse else text

    def finish(self) -> tuple[str, list[dict[str, Any]]]:
        """Return the rest of the text, and the calls as OpenAI writes them."""
        rest = self._read("", last=True)
        return rest, [
            {
                "id": f"{self._name}{number:03}" if self._name else f"call_{uuid.uuid4().hex[:24]}",
                "type": "function",
                "function": {"name": function, "arguments": arguments},
            }
            for number, (function, arguments) in enumerate(self._calls)
        ]

    def _read(self, text: str, *, last: bool) -> str:
        said = ""
        for piece in self._splitter.push(text, last=last):
            if not isinstance(piece, str):
                self._calls += piece
                continue
            whole = self._space + piece
            told = whole.rstrip() if self._calls else whole
            self._space = whole[len(told) :]
            said += told
        return said


def overlap(text: str, mark: str) -> int:
    """Return how many characters at the end of a text may be the beginning of a mark."""
    start = text.find(mark[0], max(0, len(text) - len(mark) + 1))
    while start >= 0 and not mark.startswith(text[start:]):
        start = text.find(mark[0], start + 1)
    return len(text) - start if start >= 0 else 0
