"""Tool calls and reasoning as the makers of models write them, converted to the form of Hermes.

`FORMATS` describes how each family writes calls: the marks around them, and one of few readers of
what stands between: JSON, JSON behind a name, tags, Python's calls, Gemma's values. The format of a
model is the one that reads the calls of its chat template. A malformed call stays text; a call
never gets arguments that the model did not write. In tags, which have no types, arguments get those
of the tool's schema. `MARKS` are the marks of reasoning. Pure.
"""

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from .argument_types import argument_value
from .chat_messages import read_object, read_value
from .tool_calls import (
    CLOSE,
    OPEN,
    THINK,
    THOUGHT,
    CallFormat,
    CallSplitter,
    FoundCall,
    Tools,
    overlap,
    parameters_of,
    read_call,
    read_calls,
)

CHANNELS = "<|channel|>analysis<|message|>"
"""Begins the reasoning of models with channels, such as gpt-oss."""
MARKS = {
    THINK: THOUGHT,
    "<thinking>": "</thinking>",
    "<thought>": "</thought>",
    "<reasoning>": "</reasoning>",
    "<seed:think>": "</seed:think>",
    "[THINK]": "[/THINK]",
    "◁think▷": "◁/think▷",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "<|channel>thought": "<channel|>",
    CHANNELS: "<|channel|>final<|message|>",
}
"""Marks that open and close reasoning."""

_CALLS, _CALLED = "<|channel|>commentary to=", "<|call|>"
_PYTHON = {"True": "true", "False": "false", "None": "null"}


def _json_calls(body: str, tools: Tools) -> list[FoundCall]:
    """Read one call, a list of calls, or consecutive calls; none if there is other text."""
    if calls := read_calls(body, tools):
        return calls
    rest = body.strip()
    while rest:
        end = _object_end(rest)
        call = read_call(rest[:end]) if end else None
        if call is None:
            return []
        calls.append(call)
        rest = rest[end:].lstrip("; \n")
    return calls


def _object_end(text: str) -> int:
    """Return the end of the JSON object at the beginning of a text; 0: there is none."""
    if not text.startswith("{"):
        return 0
    try:
        return json.JSONDecoder().raw_decode(text)[1]
    except (ValueError, RecursionError):
        return 0


@dataclass(frozen=True, slots=True)
class _Named:
    """Consecutive calls of a name and a JSON object."""

    head: re.Pattern[str]
    """The text up to the object; its last group is the name, `id` an id that contains it."""
    tail: re.Pattern[str]

    def __call__(self, body: str, tools: Tools) -> list[FoundCall]:
        if (rest := body.lstrip()).startswith("["):
            return _json_calls(rest, tools)
        calls: list[FoundCall] = []
        while rest:
            head = self.head.match(rest)
            after = rest[head.end() :] if head else ""
            end = _object_end(after)
            tail = self.tail.match(after, end)
            if head is None or tail is None or not end or read_object(after[:end]) is None:
                return []
            if not (name := head[head.re.groups].strip()):
                return []
            calls.append(FoundCall(name, after[:end], head.groupdict().get("id") or ""))
            rest = after[tail.end() :]
        return calls


@dataclass(frozen=True, slots=True)
class _Tagged:
    """Consecutive calls of a name and arguments in tags, typed by the schemas of the tools."""

    head: re.Pattern[str]
    """Its group is the name."""
    argument: re.Pattern[str]
    """Its first group is the name, its last the value; `text` says whether that is a text."""
    tail: re.Pattern[str]

    def __call__(self, body: str, tools: Tools) -> list[FoundCall]:
        schemas = dict(parameters_of(tools))
        calls: list[FoundCall] = []
        at = 0
        while at < len(body):
            head = self.head.match(body, at)
            if head is None:
                return []
            arguments: dict[str, Any] = {}
            at = head.end()
            while match := self.argument.match(body, at):
                if match[1] in arguments:
                    return []
                text, kind = match[match.re.groups], match.groupdict().get("text")
                value: Any = text if kind == "true" else read_value(text)
                if kind is None:
                    value = argument_value(text, schemas.get(head[1]), match[1])
                elif value is None and text.strip() != "null":
                    return []
                arguments[match[1]] = value
                at = match.end()
            tail = self.tail.match(body, at)
            if tail is None:
                return []
            calls.append(FoundCall(head[1], json.dumps(arguments, ensure_ascii=False)))
            at = tail.end()
        return calls


_PYTHON_TOKEN = re.compile(
    r"""(?P<text>'''(?:\\.|[^\\])*?'''|\"""(?:\\.|[^\\])*?\"""
    |(?P<quote>['"])(?:\\.|[^\\])*?(?:(?P=quote)(?=\s*(?:[,)\]}:]|\Z))|(?P<open>\Z)))
    |(?P<key>[^\W\d]\w*)\s*=
    |(?P<call>[^\W\d][\w.\-]*)\(
    |(?P<number>\d[\w.]*)|(?P<word>[^\W\d]\w*)""",
    re.DOTALL | re.VERBOSE,
)
"""Texts of Python, each up to a quote before a delimiter, names of arguments and calls, words."""
_PYTHON_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "0": "\0", "\n": ""}


def _pythonic(body: str, tools: Tools) -> list[FoundCall]:
    """Read `[f(a=1), g(b="x")]`, or one call; the arguments have names and are literals.

    Texts and names are replaced before Python parses the rest, so no text is ever code.
    """
    del tools
    parts: list[str] = []

    def replace(match: re.Match[str]) -> str:
        word = match["number"] or _PYTHON.get(match["word"], match["word"])
        if match["open"] is not None or (match["word"] and word not in _PYTHON.values()):
            return "!"  # a text without an end, or a name
        if word:
            return word
        kind = "key" if match["key"] else "call" if match["call"] else "text"
        parts.append(match[kind])
        return f" _{len(parts) - 1}" + {"key": "=", "call": "(", "text": " "}[kind]

    try:
        tree = ast.parse(_PYTHON_TOKEN.sub(replace, body.strip()).strip(), mode="eval").body
        listed = tree.elts if isinstance(tree, ast.List | ast.Tuple) else [tree]
        return [_python_call(call, parts) for call in listed]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return []


def _python_call(node: ast.expr, parts: list[str]) -> FoundCall:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.args:
        raise ValueError
    names = [parts[int(keyword.arg[1:])] for keyword in node.keywords if keyword.arg]
    if len({*names}) < len(node.keywords):
        raise ValueError
    values = [_python_value(keyword.value, parts) for keyword in node.keywords]
    arguments = json.dumps(dict(zip(names, values, strict=True)), ensure_ascii=False)
    return FoundCall(parts[int(node.func.id[1:])], arguments)


def _python_value(node: ast.expr, parts: list[str]) -> Any:
    if isinstance(node, ast.Name):
        return _text(parts[int(node.id[1:])]) if node.id[0] == "_" else json.loads(node.id)
    if isinstance(node, ast.List | ast.Tuple):
        return [_python_value(item, parts) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [_python_value(cast("ast.expr", key), parts) for key in node.keys]
        if not all(isinstance(key, str) for key in keys) or len({*keys}) < len(keys):
            raise ValueError
        return {key: _python_value(v, parts) for key, v in zip(keys, node.values, strict=True)}
    value = ast.literal_eval(node)
    if not isinstance(value, int | float | bool | None) or read_value(json.dumps(value)) != value:
        raise ValueError
    return value


def _text(quoted: str) -> str:
    """Return the text of a literal; unknown escapes stay, and lines may end in it."""

    def unescape(match: re.Match[str]) -> str:
        escaped = match[1]
        if len(escaped) > 1:
            return chr(int(escaped[1:], 16))
        return _ESCAPES.get(escaped, escaped if escaped in "'\"\\" else match[0])

    long = quoted[:3] in ("'''", '"""') and len(quoted) > 5
    text = _PYTHON_ESCAPE.sub(unescape, quoted[3:-3] if long else quoted[1:-1])
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


_GEMMA_CALL = re.compile(r"\s*call:([\w.\-]+)\{(.*)\}\s*", re.DOTALL)
_GEMMA_WORD = re.compile(r"(True|False|None)(?=\s*(?:[,\]}]|\Z))|([^\s{}\[\],:\"]+)\s*:")


@dataclass(frozen=True, slots=True)
class _Gemma:
    """`call:NAME{key:value,…}` with a mark at both ends of a text: JSON with bare keys."""

    quote: str

    def __call__(self, body: str, tools: Tools) -> list[FoundCall]:
        del tools
        if (call := _GEMMA_CALL.fullmatch(body)) is None:
            return []
        parts = call[2].split(self.quote)
        if len(parts) % 2 == 0 or any('"' in part for part in parts[::2]):
            return []
        parts[::2] = [_GEMMA_WORD.sub(self._word, part) for part in parts[::2]]
        parts[1::2] = [json.dumps(part, ensure_ascii=False) for part in parts[1::2]]
        arguments = f"{{{''.join(parts)}}}"
        return [] if read_object(arguments) is None else [FoundCall(call[1], arguments)]

    def _word(self, match: re.Match[str]) -> str:
        return _PYTHON[match[1]] if match[1] else f"{json.dumps(match[2])}:"


def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.DOTALL)


_SPACE = _compiled(r"\s*")
_PARAMETER = (
    r"\s*<{0}parameter name=\"?([^<>\"\n]+)\"?{1}>(.*?)</{0}parameter>\s*(?=<{0}parameter|\Z)"
)
_INVOKED, _INVOKE_END = r"[\"']?([^<>\"'\s]+)[\"']?>", _compiled(r"\s*\Z")
_INVOKE, _DSML = "<invoke name=", "<｜DSML｜invoke name="
FORMATS: tuple[CallFormat, ...] = (
    CallFormat(  # Qwen3-Coder, Qwen3.5, Nemotron 3
        "qwen_xml",
        _Tagged(
            _compiled(r"\s*<function=([^<>\s]+)>"),
            _compiled(
                r"\s*<parameter=([^<>\n]+)>\n?(.*?)\n?</parameter>\s*(?=<parameter=|</function>)"
            ),
            _compiled(r"\s*</function>\s*"),
        ),
        (OPEN,),
        CLOSE,
    ),
    CallFormat(  # GLM 4.5 and later
        "glm",
        _Tagged(
            _compiled(r"\s*([^<>\s]+)(?=\s*(?:\n|<|\Z))"),
            _compiled(
                r"\s*<arg_key>([^<>]+)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*(?=<arg_key>|\Z)"
            ),
            _compiled(r"\s*\Z"),
        ),
        (OPEN,),
        CLOSE,
    ),
    CallFormat(  # MiniMax M2
        "minimax",
        _Tagged(_compiled(_INVOKED), _compiled(_PARAMETER.format("", "")), _INVOKE_END),
        (_INVOKE,),
        "</invoke>",
        around=("<minimax:tool_call>", "</minimax:tool_call>"),
    ),
    CallFormat(  # DeepSeek V3.2
        "deepseek_dsml",
        _Tagged(
            _compiled(_INVOKED),
            _compiled(_PARAMETER.format("｜DSML｜", r'(?: string="(?P<text>true|false)")?')),
            _INVOKE_END,
        ),
        (_DSML,),
        "</｜DSML｜invoke>",
        around=("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
    ),
    CallFormat(  # DeepSeek V3, with the arguments in a fence, and V3.1
        "deepseek",
        _Named(
            _compiled(r"(?:function<｜tool▁sep｜>)?([^\n<｜]+?)(?:\n```json\n|<｜tool▁sep｜>)"),
            _compiled(r"(?:\n```)?\s*\Z"),
        ),
        ("<｜tool▁call▁begin｜>",),
        "<｜tool▁call▁end｜>",
        around=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    CallFormat(  # Kimi K2
        "kimi",
        _Named(
            _compiled(
                r"\s*(?=(?P<id>functions\.[\w.\-]+:\d+)?)(?:functions\.)?([^\s<|:]+)(?::\d+)?\s*<\|tool_call_argument_begin\|>\s*"
            ),
            _compiled(r"\s*\Z"),
        ),
        ("<|tool_call_begin|>",),
        "<|tool_call_end|>",
        around=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
    CallFormat(  # Mistral, as a list, and from v11 on by name
        "mistral",
        _Named(
            _compiled(
                r"\s*(?:\[TOOL_CALLS\])?\s*([\w.\-/:]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{)"
            ),
            _SPACE,
        ),
        ("[TOOL_CALLS]",),
        bare="[",
    ),
    CallFormat("gemma", _Gemma("<escape>"), ("<start_function_call>",), "<end_function_call>"),
    CallFormat("gemma4", _Gemma('<|"|>'), ("<|tool_call>",), "<tool_call|>"),
    CallFormat("gemma_code", _pythonic, ("```tool_code\n",), "```"),
    CallFormat("nemotron", _json_calls, ("<TOOLCALL>",), "</TOOLCALL>", is_json=True),
    CallFormat("hunyuan", _json_calls, ("<tool_calls>",), "</tool_calls>", is_json=True),
    CallFormat(
        "hunyuan_fenced",
        _Named(_compiled(r"\s*([^\s<{]+)\n```json\n"), _compiled(r"\n```\s*\Z")),
        (OPEN,),
        CLOSE,
        around=("<tool_calls>", "</tool_calls>"),
    ),
    CallFormat("lfm2", _pythonic, ("<|tool_call_start|>",), "<|tool_call_end|>"),
    CallFormat("granite", _json_calls, ("<|tool_call|>", OPEN)),
    CallFormat("llama", _json_calls, ("<|python_tag|>",), bare="{"),
    CallFormat(  # Llama 4
        "pythonic", _pythonic, ("<|python_start|>",), "<|python_end|>", may_end=True, bare="["
    ),
    CallFormat(  # gpt-oss, as `ChannelReasoning` spells it
        "harmony",
        _Named(_compiled(r"(?:functions\.)?([\w.\-]+)<\|message\|>\s*"), _compiled(r"\s*\Z")),
        (_CALLS,),
        _CALLED,
        may_end=True,
    ),
)
"""The formats beside that of Hermes and Qwen. Of several that read a template's calls the first
counts."""

AnswerPart: TypeAlias = tuple[bool, str]
"""Whether a text is reasoning, and the text."""


class MarkedReasoning:
    """Separates the reasoning at the beginning of an answer that arrives in pieces."""

    def __init__(self, mark: str = THINK, *, thinking: bool = False) -> None:
        """Read reasoning behind `mark`; with `thinking`, the prompt has opened it."""
        self._open, self._close = mark, MARKS[mark]
        self._state = "reasoning" if thinking else "begin"
        self._held = ""

    def push(self, text: str, *, last: bool = False) -> Iterator[AnswerPart]:
        """Add text; yield what later text cannot change."""
        self._held += text
        if self._state == "begin":
            first = self._held.lstrip()
            if first.startswith(self._open):
                self._state, self._held = "reasoning", first.removeprefix(self._open)
                yield True, ""
            elif last or (first and not self._open.startswith(first)):
                self._state = "text"
        if self._state == "reasoning":
            thought, closed, rest = self._held.partition(self._close)
            held = 0 if closed or last else overlap(thought, self._close)
            yield True, thought[: len(thought) - held]
            self._held = rest if closed else thought[len(thought) - held :]
            self._state = "text" if closed else "reasoning"
            if closed:
                yield False, ""
        if self._state == "text":
            rest, self._held = self._held, ""
            yield False, rest


_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"(?:\A|[\s>])to=([\w.\-]+)")
_BEGINS = ("<|start|>", "<|channel|>", "to=")
_ENDS = ("<|end|>", "<|call|>", "<|return|>", *_BEGINS[:2])


class ChannelReasoning:
    """Separates the reasoning in an answer of messages on channels, as gpt-oss writes them.

    `analysis` is reasoning, other channels are text. A message to a recipient is a call: it stays,
    in one spelling of its head and end.
    """

    def __init__(self, *, thinking: bool = False) -> None:
        """Begin; with `thinking`, the prompt has opened the channel of reasoning."""
        self._kind = "analysis" if thinking else ""
        """The channel of the message, or `call`; empty: its head is not complete."""
        self._held = ""
        self._had = {True: False, False: False}
        """Whether there were reasoning, and text."""

    def push(self, text: str, *, last: bool = False) -> Iterator[AnswerPart]:
        """Add text; yield what later text cannot change."""
        self._held += text
        while self._held:
            if not self._kind:
                head, begun, body = self._held.partition("<|message|>")
                first = head.lstrip()
                if not any(first.startswith(mark) or mark.startswith(first) for mark in _BEGINS):
                    self._kind = "final"  # text without a channel
                elif begun:
                    self._held = body
                    yield self._begin(head)
                else:
                    if last:  # a head without an end
                        yield False, self._held
                    return
                continue
            places = [(at, mark) for mark in _ENDS if (at := self._held.find(mark)) >= 0]
            held = 0 if last else max(overlap(self._held, mark) for mark in _ENDS)
            end, mark = min(places, default=(len(self._held) - held, ""))
            if end:
                yield self._kind == "analysis", self._held[:end]
                self._had[self._kind == "analysis"] = True
            self._held = self._held[end:]
            if not mark:
                return
            self._held = self._held.removeprefix("" if mark in _BEGINS else mark)
            if self._kind == "call":
                yield False, _CALLED
            self._kind = ""

    def _begin(self, head: str) -> AnswerPart:
        """Begin a message; return what separates it from earlier ones, or the head of a call."""
        channel, recipient = _CHANNEL.search(head), _RECIPIENT.search(head)
        self._kind = "call" if recipient else channel[1] if channel else "final"
        if recipient:
            return False, f"{_CALLS}{recipient[1]}<|message|>"
        thinks = self._kind == "analysis"
        return thinks, "\n" if self._had[thinks] else ""


class AnswerConverter:
    """Converts an answer that arrives in pieces into the form that replies are read in.

    That is `<think>…</think>`, text, and calls in the form of Hermes. The joined result is
    independent of the pieces.
    """

    def __init__(
        self,
        calls: CallFormat | None,
        tools: Tools,
        mark: str = THINK,
        *,
        thinking: bool = False,
    ) -> None:
        """Begin; `mark` begins the reasoning, with `thinking` in the prompt.

        Without a format of `calls` they stay as they are.
        """
        self._reasoning = (
            ChannelReasoning(thinking=thinking)
            if mark == CHANNELS
            else MarkedReasoning(mark, thinking=thinking)
        )
        self._splitter = CallSplitter(calls, tools) if calls else None
        self._thinks = thinking

    def push(self, text: str, *, last: bool = False) -> str:
        """Add text; return the converted text that later text cannot change."""
        converted = ""
        for thinks, piece in self._reasoning.push(text, last=last):
            if thinks != self._thinks:
                converted += self._converted("", last=thinks) + (THINK if thinks else THOUGHT)
                self._thinks = thinks
            converted += piece if thinks else self._converted(piece, last=False)
        return converted + self._converted("", last=last)

    def _converted(self, text: str, *, last: bool) -> str:
        if self._splitter is None:
            return text
        pieces = self._splitter.push(text, last=last)
        return "".join(
            piece if isinstance(piece, str) else "".join(map(_hermes, piece)) for piece in pieces
        )


def _hermes(call: FoundCall) -> str:
    arguments = call.arguments.replace(CLOSE, CLOSE.replace("/", "\\/"))  # the same JSON
    call_id = f', "id": "{call.id}"' if call.id else ""
    return f'{OPEN}{{"name": {json.dumps(call.name)}, "arguments": {arguments}{call_id}}}{CLOSE}'


def in_hermes_form(
    text: str, calls: CallFormat | None, tools: Tools, mark: str = THINK, *, thinking: bool = False
) -> str:
    """Return a whole answer, converted; see `AnswerConverter`."""
    return AnswerConverter(calls, tools, mark, thinking=thinking).push(text, last=True)
