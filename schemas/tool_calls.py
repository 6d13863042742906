"""Tool calls in generated text, in the format of Hermes and Qwen models.

`<tool_call>{"name": …, "arguments": {…}}</tool_call>`. The arguments are an object or its JSON
text, and may be called `parameters`. A tag may have a list of calls, and a call may be nested under
`function`, as in OpenAI's API. Anything else stays text: a call without a name, without arguments
(a function without parameters is called with `{}`), with both names of arguments, with a repeated
key or with text beside the JSON, and a tag that is not closed. A call never gets arguments that the
model did not write. Pure.

Answers in another format are converted to this one, if the model's template uses that format.
"""

import json
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast

from .argument_types import argument_value
from .chat_messages import read_object, read_value

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MAX_CLOSES = 8
"""Maximum number of closing tags that are tried, since texts in the JSON may contain some."""

_ESCAPED = re.compile(r"\\.", re.DOTALL)

FoundCall: TypeAlias = tuple[str, str]
"""A call's name and arguments, which are the JSON text of an object."""


def parse_tool_calls(text: str, name: str = "") -> tuple[str, list[dict[str, Any]]]:
    """Return the text without its tool calls, and the calls in the form of OpenAI's API.

    Their ids begin with `name`, or are random. White space around a text with calls is removed.
    """
    stream = ToolText(parse=True, name=name)
    released = stream.push(text)
    rest, calls = stream.finish()
    return (released + rest).strip() if calls else text, calls


def read_calls(body: str) -> list[FoundCall]:
    """Return the calls in a tag; empty if it is malformed."""
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
    arguments = fields[written[0]]
    if isinstance(arguments, str):
        return None if read_object(arguments) is None else (name, arguments)
    if not isinstance(arguments, dict):
        return None
    return name, json.dumps(arguments, ensure_ascii=False)


class CallSplitter:
    """Splits text that arrives in pieces into text and calls.

    Text is released as soon as it cannot be part of a call. The joined result is independent of the
    pieces.
    """

    def __init__(self) -> None:
        """Begin an empty text."""
        self._held = ""
        self._tried = 0
        """Position in the held text from which the next closing tag is searched."""
        self._num_tried = 0
        self._may_be_closed = True
        """Whether a later closing tag may end the first tag."""

    def push(self, text: str, *, last: bool = False) -> Iterator[str | list[FoundCall]]:
        """Add text; yield texts and the calls of tags. With `last` the text is complete."""
        self._held += text
        while self._held:
            at = self._held.find(OPEN)
            if at < 0:
                held = 0 if last else overlap(self._held, OPEN)
                yield self._release(len(self._held) - held)
                return
            if at:
                yield self._release(at)
            if calls := self._closed():
                yield calls
            elif self._may_be_closed and not last:
                return
            else:
                yield self._release(len(OPEN))  # not a call; one may begin later

    def _release(self, length: int) -> str:
        """Remove text from the beginning, and begin a new search for a closing tag."""
        text, self._held = self._held[:length], self._held[length:]
        self._tried = self._num_tried = 0
        self._may_be_closed = True
        return text

    def _closed(self) -> list[FoundCall]:
        """Return the calls of the tag at the beginning of the held text, and remove it."""
        while self._may_be_closed:
            end = self._held.find(CLOSE, max(self._tried, len(OPEN)))
            if end < 0:
                self._tried = max(0, len(self._held) - len(CLOSE) + 1)
                return []
            self._tried, self._num_tried = end + 1, self._num_tried + 1
            body = self._held[len(OPEN) : end]
            if calls := read_calls(body):
                self._release(end + len(CLOSE))
                return calls
            self._may_be_closed = self._num_tried < MAX_CLOSES and _ends_in_text(body)
        return []


def _ends_in_text(body: str) -> bool:
    """Whether cut JSON ends within a text."""
    if body.lstrip()[:1] not in ("{", "["):
        return False
    return _ESCAPED.sub("", body).count('"') % 2 == 1


class ToolText:
    """Text with tool calls that arrives in pieces; it holds back possible parts of calls.

    The result is that of `parse_tool_calls`, except for white space: it is released before a call,
    and removed after the last one.
    """

    def __init__(self, *, parse: bool, name: str = "") -> None:
        """Without `parse` all text is released at once; the calls' ids begin with `name`."""
        self._parse = parse
        self._name = name
        self._splitter = CallSplitter()
        self._calls: list[FoundCall] = []
        self._space = ""

    def push(self, text: str) -> str:
        """Add text; return the text that cannot be part of a call."""
        return self._read(text, last=False) if self._parse else text

    def finish(self) -> tuple[str, list[dict[str, Any]]]:
        """Return the rest of the text, and the calls in the form of OpenAI's API."""
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
        released = ""
        for piece in self._splitter.push(text, last=last):
            if not isinstance(piece, str):
                self._calls += piece
                continue
            whole = self._space + piece
            shown = whole.rstrip() if self._calls else whole
            self._space = whole[len(shown) :]
            released += shown
        return released


def overlap(text: str, mark: str) -> int:
    """Return how many characters at the end of a text may begin a mark."""
    start = text.find(mark[0], max(0, len(text) - len(mark) + 1))
    while start >= 0 and not mark.startswith(text[start:]):
        start = text.find(mark[0], start + 1)
    return len(text) - start if start >= 0 else 0


# Tool calls in the formats of other models' chat templates.
#
# Each reader gets a whole answer and the tools that the model was shown. It returns the texts and
# calls in order, or nothing if there is no well-formed call; then the answer is text. The reader of
# a model is the one that reads the calls of its chat template. In a format without a JSON object of
# arguments (XML), arguments get the types of the tool's schema; a call without arguments has `{}`.
# Pure.

Tools: TypeAlias = Sequence[Mapping[str, Any]]
Pieces: TypeAlias = list[str | FoundCall]
CallFormat: TypeAlias = Callable[[str, Tools], Pieces]

_THINK, _THOUGHT = "<think>", "</think>"
_END = re.compile(r"\s*(<\|[^<>|]*\|>|</s>)?\s*\Z")
"""Text that may follow the last call: the mark that ends a turn."""
_XML = re.compile(r"<tool_call>\s*<function=([^<>\s]+)>(.*?)</function>\s*</tool_call>", re.DOTALL)
_PARAMETER = re.compile(
    r"\s*<parameter=([^<>\n]+)>\n?(.*?)\n?</parameter>\s*(?=<parameter=|$)", re.DOTALL
)
_GLM = re.compile(r"<tool_call>[ \t]*([^<>\s]+)\s*?(?=[\n<])(.*?)</tool_call>", re.DOTALL)
_ARGUMENT = re.compile(
    r"\s*<arg_key>([^<>]+)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*(?=<arg_key>|$)", re.DOTALL
)
_DEEPSEEK = re.compile(
    r"\s*(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>(.*?)<｜tool▁call▁end｜>"
    r"(?:\s*<｜tool▁calls▁end｜>)?",
    re.DOTALL,
)
_FENCED = re.compile(r"function<｜tool▁sep｜>([^\n<｜]+)\n```json\n(.*)\n```\s*", re.DOTALL)
_BARE = re.compile(r"([^\n<｜]+)<｜tool▁sep｜>(.*)", re.DOTALL)
_MISTRAL_MARK = "[TOOL_CALLS]"
_MISTRAL_CALL = re.compile(r"\s*([\w.\-/:]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{)")
_PYTHON_TAG = "<|python_tag|>"


def in_hermes_form(text: str, read: CallFormat, tools: Tools) -> str:
    """Return an answer with its calls in the format of Hermes.

    Its reasoning, up to `</think>`, is unchanged.
    """
    thought, closed, answer = text.rpartition(_THOUGHT)
    if not closed and text.lstrip().startswith(_THINK):
        return text
    pieces = read(answer, tools)
    joined = "".join(piece if isinstance(piece, str) else _hermes(piece) for piece in pieces)
    return thought + closed + (joined or answer)


def certain_length(text: str, read: CallFormat) -> int:
    """Return how many characters of a growing answer later text cannot change.

    They end where a call may begin.
    """
    thought, closed, answer = text.rpartition(_THOUGHT)
    if not closed and _THINK.startswith(text.lstrip()[: len(_THINK)]):
        return len(text) if text.strip() else 0
    before = len(thought) + len(closed)
    marks, bare = _BEGINS[read]
    begun = answer.lstrip()
    if not begun or begun[0] in bare:
        return before
    places = [answer.find(mark) for mark in marks]
    ends = [len(answer) - overlap(answer, mark) for mark in marks]
    at = min([place for place in places if place >= 0] + ends)
    return before + len(answer[:at].rstrip())


def llama(text: str, tools: Tools) -> Pieces:
    """Read `{"name": …, "parameters": {…}}` of known tools, which is the whole answer."""
    body = _END.sub("", text).strip().removeprefix(_PYTHON_TAG).strip()
    return _shown(list(_json_calls(body)), tools)


def mistral(text: str, tools: Tools) -> Pieces:
    """Read `[TOOL_CALLS] [{"name": …, "arguments": {…}}]`, and `[TOOL_CALLS]name[ARGS]{…}`.

    Without the mark, the list is the whole answer, with known tools.
    """
    before, marked, after = text.partition(_MISTRAL_MARK)
    body = _END.sub("", after if marked else text).strip()
    if body.startswith("["):
        calls = read_calls(body)
        return [before, *calls] if marked and calls else _shown(calls, tools)
    return [before, *named] if marked and (named := _named_calls(body)) else []


def qwen_xml(text: str, tools: Tools) -> Pieces:
    """Read `<function=NAME><parameter=KEY>VALUE</parameter></function>`, in tags."""
    return _tagged(text, tools, _XML, _PARAMETER)


def glm(text: str, tools: Tools) -> Pieces:
    """Read `NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>`, in tags."""
    return _tagged(text, tools, _GLM, _ARGUMENT)


def deepseek(text: str, tools: Tools) -> Pieces:
    """Read calls between DeepSeek's marks, with the arguments in a fence or behind a separator."""
    pieces: Pieces = []
    end = 0
    for match in _DEEPSEEK.finditer(text):
        inside = _FENCED.fullmatch(match[1]) or _BARE.fullmatch(match[1])
        arguments = read_object(inside[2]) if inside else None
        if inside is None or arguments is None or not inside[1].strip():
            continue
        pieces += [text[end : match.start()], (inside[1].strip(), inside[2])]
        end = match.end()
    return [*pieces, text[end:]] if pieces else []


_BEGINS: dict[CallFormat, tuple[tuple[str, ...], str]] = {
    qwen_xml: ((OPEN,), ""),
    glm: ((OPEN,), ""),
    mistral: ((_MISTRAL_MARK,), "["),
    llama: ((_PYTHON_TAG,), "{"),
    deepseek: (("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"), ""),
}
"""Marks that begin a call, and first characters of an answer that consists of calls."""
FORMATS: tuple[CallFormat, ...] = (qwen_xml, glm, mistral, llama, deepseek)
UNTYPED: tuple[CallFormat, ...] = (qwen_xml, glm)
"""Formats that write arguments as plain texts."""


def _hermes(call: FoundCall) -> str:
    name, arguments = call
    return f'{OPEN}{{"name": {json.dumps(name)}, "arguments": {arguments}}}{CLOSE}'


def _shown(calls: list[FoundCall], tools: Tools) -> Pieces:
    """Return calls of known tools; without a mark other JSON is an ordinary answer."""
    names = {name for name, _ in _parameters(tools)}
    return [*calls] if all(name in names for name, _ in calls) else []


def _json_calls(body: str) -> Iterator[FoundCall]:
    """Yield the calls of consecutive objects; none if there is other text."""
    calls: list[FoundCall] = []
    while body:
        end = _object_end(body)
        call = read_call(body[:end]) if end else None
        if call is None:
            return
        calls.append(call)
        body = body[end:].lstrip("; \n")
    yield from calls


def _named_calls(body: str) -> list[FoundCall]:
    """Return consecutive calls of the form `name{…}`; none if there is other text."""
    calls: list[FoundCall] = []
    while body:
        named = _MISTRAL_CALL.match(body)
        rest = body[named.end() :] if named else ""
        end = _object_end(rest)
        if named is None or not end or read_object(rest[:end]) is None:
            return []
        calls.append((named[1], rest[:end]))
        body = rest[end:].lstrip().removeprefix(_MISTRAL_MARK).lstrip()
    return calls


def _object_end(text: str) -> int:
    """Return the end of the JSON object at the beginning of a text; 0: there is none."""
    if not text.startswith("{"):
        return 0
    try:
        return json.JSONDecoder().raw_decode(text)[1]
    except (ValueError, RecursionError):
        return 0


def _tagged(text: str, tools: Tools, call: re.Pattern[str], argument: re.Pattern[str]) -> Pieces:
    parameters = dict(_parameters(tools))
    pieces: Pieces = []
    end = 0
    for match in call.finditer(text):
        arguments = _arguments(match[2], argument, parameters.get(match[1]))
        if arguments is None:
            continue
        payload = json.dumps(arguments, ensure_ascii=False)
        pieces += [text[end : match.start()], (match[1], payload)]
        end = match.end()
    return [*pieces, text[end:]] if pieces else []


def _arguments(body: str, pattern: re.Pattern[str], parameters: Any) -> dict[str, Any] | None:
    """Return the arguments of a call in tags; None if there is other text among them."""
    arguments: dict[str, Any] = {}
    at = 0
    while match := pattern.match(body, at):
        if match[1] in arguments:
            return None
        arguments[match[1]] = argument_value(match[2], parameters, match[1])
        at = match.end()
    return arguments if not body[at:].strip() else None


def _parameters(tools: Tools) -> Iterator[tuple[str, Any]]:
    """Yield the name of each tool, with the schema of its arguments."""
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping):
            fields = cast("Mapping[str, Any]", function)
            yield str(fields.get("name")), fields.get("parameters")
