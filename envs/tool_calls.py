"""Tool calls in generated text, in the form that Hermes and Qwen models write them.

`<tool_call>{"name": …, "arguments": {…}}</tool_call>`; what is not a well-formed call stays text.
Pure.
"""

import json
import re
import uuid
from typing import Any, cast

from ..schemas.wire.codec import read_json

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


def parse_tool_calls(text: str, name: str = "") -> tuple[str, list[dict[str, Any]]]:
    """Return the text without its tool calls, and the calls as OpenAI writes them.

    Their ids begin with `name`; without one they are new.
    """
    rest, found = find_tool_calls(text)
    if not found:
        return text, []
    return rest.strip(), [
        {
            "id": f"{name}{number:03}" if name else f"call_{uuid.uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": function, "arguments": arguments},
        }
        for number, (function, arguments) in enumerate(found)
    ]


def find_tool_calls(text: str) -> tuple[str, list[tuple[str, str]]]:
    """Return the text without its tool calls, and each call's name and arguments."""
    calls: list[tuple[str, str]] = []
    rest: list[str] = []
    end = 0
    for match in _CALL.finditer(text):
        call = read_call(match[1])
        if call is None:
            continue
        rest.append(text[end : match.start()])
        end = match.end()
        calls.append(call)
    return "".join([*rest, text[end:]]), calls


def read_call(body: str) -> tuple[str, str] | None:
    """Return a call's name and arguments; None for what is not well formed."""
    try:
        value: Any = read_json(body)
    except ValueError:
        return None
    if not isinstance(value, dict):
        return None
    fields = cast("dict[str, Any]", value)
    name, arguments = fields.get("name"), fields.get("arguments", {})
    if not isinstance(name, str):
        return None
    return name, arguments if isinstance(arguments, str) else json.dumps(
        arguments, ensure_ascii=False
    )


class ToolText:
    """Text with tool calls that comes bit by bit: what may belong to a call is held back."""

    def __init__(self, *, parse: bool, name: str = "") -> None:
        """Without `parse` all text is told as it comes; the calls' ids begin with `name`."""
        self._parse = parse
        self._name = name
        self._held = ""

    def push(self, text: str) -> str:
        """Take more text; return what is certainly no part of a call."""
        if not self._parse:
            return text
        self._held += text
        at = self._held.find(OPEN)
        if at < 0:
            at = len(self._held) - _start_of_open(self._held)
        told, self._held = self._held[:at], self._held[at:]
        return told

    def finish(self) -> tuple[str, list[dict[str, Any]]]:
        """Return the rest of the text, and the calls."""
        return parse_tool_calls(self._held, self._name) if self._parse else ("", [])


def _start_of_open(text: str) -> int:
    """Return how many characters at the end may be the beginning of a call."""
    lengths = range(min(len(OPEN) - 1, len(text)), 0, -1)
    return next((length for length in lengths if text.endswith(OPEN[:length])), 0)
