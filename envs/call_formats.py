"""Tool calls in the formats that chat templates teach models other than those of Hermes and Qwen.

Each reader takes a whole answer and the tools that were shown, and returns its texts and calls in
order; none where it finds no well-formed call, and the answer is text then. Which of them reads a
model's answers, its chat template decides: the one that reads a call as the template writes it. A
format without an object for arguments (XML) gives them the types of the tool's schema; a call
without any is `{}` there, as there is no other way to write it. Pure.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast

from .chat_messages import read_object, read_value
from .tool_calls import CLOSE, OPEN, FoundCall, overlap, read_call, read_calls

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
    told = "".join(piece if isinstance(piece, str) else _hermes(piece) for piece in pieces)
    return thought + closed + (told or said)


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

    Where the mark is not told, the list is the whole answer, of tools that were shown.
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
    found: list[FoundCall] = []
    while body:
        end = _object_end(body)
        call = read_call(body[:end]) if end else None
        if call is None:
            return
        found.append(call)
        body = body[end:].lstrip("; \n")
    yield from found


def _named_calls(body: str) -> list[FoundCall]:
    """Return calls of the form `name{…}` that follow each other; none for anything else."""
    found: list[FoundCall] = []
    while body:
        named = _MISTRAL_CALL.match(body)
        rest = body[named.end() :] if named else ""
        end = _object_end(rest)
        if named is None or not end or read_object(rest[:end]) is None:
            return []
        found.append((named[1], rest[:end]))
        body = rest[end:].lstrip().removeprefix(_MISTRAL_MARK).lstrip()
    return found


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
        told = json.dumps(arguments, ensure_ascii=False)
        pieces += [text[end : match.start()], (match[1], told)]
        end = match.end()
    return [*pieces, text[end:]] if pieces else []


def _arguments(
    body: str, pattern: re.Pattern[str], schemas: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return the arguments of a call in tags; None where anything else stands among them."""
    found: dict[str, Any] = {}
    at = 0
    while match := pattern.match(body, at):
        if match[1] in found:
            return None
        found[match[1]] = _typed(match[2], schemas.get(match[1]))
        at = match.end()
    return found if not body[at:].strip() else None


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
    told = fields.get("type")
    yield from [told] if isinstance(told, str) else told if isinstance(told, list) else []
    for key in ("anyOf", "oneOf"):
        for one in cast("list[Any]", fields.get(key) or []):
            yield from _types(one)


def _schemas(tools: Tools) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the name of each tool, and the schemas of its parameters by their names."""
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping):
            fields = cast("Mapping[str, Any]", function)
            given = fields.get("parameters")
            parameters = cast("dict[str, Any]", given) if isinstance(given, dict) else {}
            told = parameters.get("properties")
            schemas = cast("dict[str, Any]", told) if isinstance(told, dict) else {}
            yield str(fields.get("name")), schemas
