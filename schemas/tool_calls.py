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
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    calls = [_call_of(fields) for fields in listed]
    return [call for call in calls if call] if all(calls) else []


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

    Text is released as soon as it can be no part of a call. What comes out, joined, does not depend
    on the bits.
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

    Its result is that of `parse_tool_calls` for the whole, but for white space: that before a call
    was released already, that behind the last call is not.
    """

    def __init__(self, *, parse: bool, name: str = "") -> None:
        """Without `parse` all text is released as it comes; the calls' ids begin with `name`."""
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
            shown = whole.rstrip() if self._calls else whole
            self._space = whole[len(shown) :]
            said += shown
        return said


def overlap(text: str, mark: str) -> int:
    """Return how many characters at the end of a text may be the beginning of a mark."""
    start = text.find(mark[0], max(0, len(text) - len(mark) + 1))
    while start >= 0 and not mark.startswith(text[start:]):
        start = text.find(mark[0], start + 1)
    return len(text) - start if start >= 0 else 0


# Tool calls in the formats that chat templates teach models other than those of Hermes and Qwen.
#
# Each reader takes a whole answer and the tools that were shown, and returns its texts and calls
# in order; none where it finds no well-formed call, and the answer is text then. Which of them
# reads a model's answers, its chat template decides: the one that reads a call as the template
# writes it. A format without an object for arguments (XML) gives them the types of the tool's
# schema; a call without any is `{}` there, as there is no other way to write it. Pure.

Tools: TypeAlias = Sequence[Mapping[str, Any]]
Pieces: TypeAlias = list[str | FoundCall]
CallFormat: TypeAlias = Callable[[str, Tools], Pieces]

_THINK, _THOUGHT = "<think>", "</think>"
_END = re.compile(r"\s*(<\|[^<>|]*\|>|</s>)?\s*\Z")
"""What may stand behind the last call: the mark that ends a turn."""
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
    """Return an answer with its calls in the one format that answers are read in.

    What it reasons, up to `</think>`, stays as it is.
    """
    thought, closed, said = text.rpartition(_THOUGHT)
    if not closed and text.lstrip().startswith(_THINK):
        return text
    pieces = read(said, tools)
    joined = "".join(piece if isinstance(piece, str) else _hermes(piece) for piece in pieces)
    return thought + closed + (joined or said)


def certain_length(text: str, read: CallFormat) -> int:
    """Return how many letters of a growing answer stay as they are, whatever follows.

    They end where a call may begin.
    """
    thought, closed, said = text.rpartition(_THOUGHT)
    if not closed and _THINK.startswith(text.lstrip()[: len(_THINK)]):
        return len(text) if text.strip() else 0
    before = len(thought) + len(closed)
    marks, bare = _BEGINS[read]
    begun = said.lstrip()
    if not begun or begun[0] in bare:
        return before
    places = [said.find(mark) for mark in marks]
    ends = [len(said) - overlap(said, mark) for mark in marks]
    at = min([place for place in places if place >= 0] + ends)
    return before + len(said[:at].rstrip())


def llama(text: str, tools: Tools) -> Pieces:
    """Read `{"name": …, "parameters": {…}}`, the whole answer, of tools that were shown."""
    body = _END.sub("", text).strip().removeprefix(_PYTHON_TAG).strip()
    return _shown(list(_json_calls(body)), tools)


def mistral(text: str, tools: Tools) -> Pieces:
    """Read `[TOOL_CALLS] [{"name": …, "arguments": {…}}]`, and `[TOOL_CALLS]name[ARGS]{…}`.

    Without the mark, the list is the whole answer, of offered tools.
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
"""Marks with which a call begins, and the letters with which an answer begins that is all calls."""
FORMATS: tuple[CallFormat, ...] = (qwen_xml, glm, mistral, llama, deepseek)


def _hermes(call: FoundCall) -> str:
    name, arguments = call
    return f'{OPEN}{{"name": {json.dumps(name)}, "arguments": {arguments}}}{CLOSE}'


def _shown(calls: list[FoundCall], tools: Tools) -> Pieces:
    """Return calls of tools that were shown; without a mark any other JSON is an answer."""
    names = {name for name, _ in _schemas(tools)}
    return [*calls] if all(name in names for name, _ in calls) else []


def _json_calls(body: str) -> Iterator[FoundCall]:
    """Yield the calls of objects that follow each other; none where anything else stands there."""
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
    """Return calls of the form `name{…}` that follow each other; none for anything else."""
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
    """Return where the JSON object with which a text begins ends; 0 for none."""
    if not text.startswith("{"):
        return 0
    try:
        return json.JSONDecoder().raw_decode(text)[1]
    except (ValueError, RecursionError):
        return 0


def _tagged(text: str, tools: Tools, call: re.Pattern[str], argument: re.Pattern[str]) -> Pieces:
    schemas = dict(_schemas(tools))
    pieces: Pieces = []
    end = 0
    for match in call.finditer(text):
        arguments = _arguments(match[2], argument, schemas.get(match[1], {}))
        if arguments is None:
            continue
        payload = json.dumps(arguments, ensure_ascii=False)
        pieces += [text[end : match.start()], (match[1], payload)]
        end = match.end()
    return [*pieces, text[end:]] if pieces else []


def _arguments(
    body: str, pattern: re.Pattern[str], schemas: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return the arguments of a call in tags; None where anything else stands among them."""
    arguments: dict[str, Any] = {}
    at = 0
    while match := pattern.match(body, at):
        if match[1] in arguments:
            return None
        arguments[match[1]] = _typed(match[2], schemas.get(match[1]))
        at = match.end()
    return arguments if not body[at:].strip() else None


def _typed(text: str, schema: Any) -> Any:
    """Return a value of the type that a schema names first and that the text can have."""
    types = list(_types(schema))
    if not types or "string" in types:
        is_null = "null" in types and text.strip() in ("null", "None")
        return None if is_null else text
    value = read_value({"True": "true", "False": "false", "None": "null"}.get(text, text))
    return text if value is None and text.strip() not in ("null", "None") else value


def _types(schema: Any) -> Iterator[str]:
    if not isinstance(schema, Mapping):
        return
    fields = cast("Mapping[str, Any]", schema)
    declared = fields.get("type")
    yield from (
        [declared] if isinstance(declared, str) else declared if isinstance(declared, list) else []
    )
    for key in ("anyOf", "oneOf"):
        for one in cast("list[Any]", fields.get(key) or []):
            yield from _types(one)


def _schemas(tools: Tools) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the name of each tool, and the schemas of its parameters by their names."""
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping):
            fields = cast("Mapping[str, Any]", function)
            declared = fields.get("parameters")
            parameters = cast("dict[str, Any]", declared) if isinstance(declared, dict) else {}
            properties = parameters.get("properties")
            schemas = cast("dict[str, Any]", properties) if isinstance(properties, dict) else {}
            yield str(fields.get("name")), schemas
