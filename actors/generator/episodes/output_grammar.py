"""From the form that an answer must have to a grammar over the tokens of one model.

The grammar says the whole answer: reasoning, where the prompt has opened it, then JSON or calls of
tools, as the model's chat template writes them, and a token that ends the turn. White space within
JSON is bounded, so that no model can go on with it for ever.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from ....envs.agents.replies import THOUGHT
from ....envs.tool_calls import CLOSE, OPEN, parse_tool_calls
from ....schemas.output_format import OutputFormat, closed
from ....schemas.wire.errors import ConfigError, ModelError
from ..engine.token_grammar import GrammarCompiler, TokenGrammar, check_grammar
from .chat import ChatTokenizer

_SPACE = r"( |\n {0,24})?"
"""One space, or a line's end and an indentation."""
_NO_PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}
_NAME, _ARGUMENTS = "stand_in", {"stand": "in"}
_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "A stand-in.",
        "parameters": {
            "type": "object",
            "properties": {"stand": {"type": "string"}},
            "required": ["stand"],
        },
    },
}
_MOST_TRIED = 200
"""Parts of a schema that are compiled by themselves to find out which one is not supported."""


class OtherCallForm(ConfigError):
    """The model's chat template writes calls in a form that answers cannot be held to."""


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """How a chat template writes a call: these texts, with the name and the arguments between."""

    before: str
    between: str
    after: str
    separator: str | None
    """What stands between two calls; None: the template has no place for a second one."""


class OutputGrammars:
    """The grammars of one model's answers."""

    def __init__(self, chat: ChatTokenizer) -> None:
        """Nothing is found out of the model before the first answer with a form."""
        self._chat = chat
        self._compiler = GrammarCompiler(chat.tokenizer)
        self._form: CallSyntax | None = None

    async def of(
        self,
        wanted: OutputFormat,
        tools: Sequence[Mapping[str, Any]],
        *,
        thinking: bool = False,
    ) -> TokenGrammar:
        """Return the grammar of answers to a prompt; `thinking`: that has opened the reasoning.

        Raises ConfigError for a form that is not supported, or whose calls the model's template
        writes in another way than `<tool_call>{"name": …, "arguments": …}</tool_call>`;
        DeadlineError and BusyError as `GrammarCompiler.compile` does.
        """
        text = self.text(wanted, tools, thinking=thinking)
        try:
            return await self._compiler.compile(text)
        except ConfigError as error:
            if place := await self._compiler.aside(lambda: _unsupported(wanted, tools)):
                raise ConfigError(f"{error.message} (at {place})", hint=error.hint) from error
            raise

    def text(
        self, wanted: OutputFormat, tools: Sequence[Mapping[str, Any]], *, thinking: bool = False
    ) -> str:
        """Return the grammar's text; raises ConfigError."""
        rules: list[str] = []
        kinds: list[str] = []
        if wanted.json_schema is not None:
            rules.append(f"json: {_json(wanted.json_schema)}")
            kinds.append("json")
        if wanted.functions:
            rules += self._calls(wanted, tools)
            kinds.append("calls")
        if not kinds:
            raise ConfigError("an output format asks for nothing", hint="leave it out")
        thought = ""
        if thinking:
            thought = "thought "
            rules += self._thought()
        stops = ",".join(str(token) for token in self._chat.stop_token_ids)
        start = f"start: {thought}body stop"
        return "\n".join([start, f"body: {' | '.join(kinds)}", *rules, f"stop: <[{stops}]>", ""])

    def _thought(self) -> list[str]:
        mark = self._chat.special_token(THOUGHT)
        if mark is None:
            end = THOUGHT.replace("/", "\\/")
            return ["thought: reasoned SPACE", f"reasoned[lazy]: /(.|\\n)*{end}/", _space_rule()]
        return [f"thought: THOUGHT <[{mark}]> SPACE", "THOUGHT: /(.|\\n)*/", _space_rule()]

    def _calls(self, wanted: OutputFormat, tools: Sequence[Mapping[str, Any]]) -> list[str]:
        form = self._form = self._form or call_form(self._chat)
        functions = {_function(tool).get("name"): _function(tool) for tool in tools}
        more = "" if wanted.is_single or form.separator is None else "more*"
        rules = [f"calls: call {more}".rstrip()]
        if more:
            rules.append(f"more: {self._said(form.separator or '')} call")
        names = [f"call_{number}" for number in range(len(wanted.functions))]
        rules.append(f"call: {' | '.join(names)}")
        for rule, name in zip(names, wanted.functions, strict=True):
            if name not in functions:
                raise ConfigError(
                    f"tool_choice names the tool {name!r:.80}, which is not among the tools",
                    hint="name one of `tools`",
                )
            schema = functions[name].get("parameters") or _NO_PARAMETERS
            parts = (
                self._said(form.before),
                _text(name),
                self._said(form.between),
                _json(_arguments(schema)),
                self._said(form.after),
            )
            rules.append(f"{rule}: {' '.join(part for part in parts if part)}")
        return rules

    def _said(self, text: str) -> str:
        """Return a text of the template, the marks of calls by their own tokens if they have any.

        A mark that is written out letter by letter would be another prompt at the next turn.
        """
        parts: list[str] = []
        while text:
            at, mark = min((text.find(one) % (len(text) + 1), one) for one in (OPEN, CLOSE))
            parts.append(_text(text[:at]))
            if at < len(text):
                token = self._chat.special_token(mark)
                parts.append(_text(mark) if token is None else f"<[{token}]>")
            text = text[at + len(mark) :]
        return " ".join(part for part in parts if part)


def call_form(chat: ChatTokenizer) -> CallSyntax:
    """Find out how a template writes calls; OtherCallForm for another form than Hermes'."""
    one = _rendered_calls(chat, 1)
    arguments = next(
        (told for told in (json.dumps(_ARGUMENTS), '{"stand":"in"}') if told in one), ""
    )
    start, end = one.find(OPEN), one.rfind(CLOSE) + len(CLOSE)
    written = one[start:end] if start >= 0 else ""
    _, found = parse_tool_calls(written)
    name_at, at = written.find(_NAME), written.rfind(arguments) if arguments else -1
    if not found or not 0 <= name_at < at:
        raise OtherCallForm(
            "this model's chat template writes tool calls in a form that answers cannot be held to",
            hint='only <tool_call>{"name": …, "arguments": …}</tool_call> can be: let tool_choice '
            "be auto, or use a template that writes calls so",
        )
    try:
        two = _rendered_calls(chat, 2)
    except ConfigError:
        two = ""
    first = two.find(written)
    second = two.find(written, first + len(written)) if first >= 0 else -1
    return CallSyntax(
        written[:name_at],
        written[name_at + len(_NAME) : at],
        written[at + len(arguments) :],
        two[first + len(written) : second] if second >= 0 else None,
    )


def _rendered_calls(chat: ChatTokenizer, num: int) -> str:
    """Return what a template makes of a turn with calls."""
    call = {"type": "function", "id": "c00000000", "function": _call_told()}
    told = [
        {"role": "user", "content": "stand-in"},
        {"role": "assistant", "content": "", "tool_calls": [call] * num},
    ]
    try:
        prompt = chat.render(told[:1], prompt=True, tools=[_TOOL])
        whole = chat.render(told, prompt=False, tools=[_TOOL])
    except ModelError as error:
        raise OtherCallForm(
            f"this model's chat template takes no tool calls: {error.message}",
            hint="let tool_choice be auto or none, or use a template with tools",
        ) from error
    same = next(
        (n for n, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(prompt)
    )
    return whole[same:]


def _call_told() -> dict[str, Any]:
    return {"name": _NAME, "arguments": dict(_ARGUMENTS)}


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = tool.get("function")
    return cast("dict[str, Any]", inner) if isinstance(inner, dict) else tool


def _arguments(schema: Any) -> Any:
    """Return the schema of arguments, which are an object whatever their schema leaves open."""
    if not isinstance(schema, dict):
        return schema
    fields = cast("dict[str, Any]", schema)
    return fields if "type" in fields or "$ref" in fields else {**fields, "type": "object"}


def _json(schema: Any) -> str:
    told: dict[str, Any] | bool = closed(schema)
    if isinstance(told, bool):
        nothing: list[Any] = []
        told = {} if told else {"enum": nothing}
    options = {"whitespace_flexible": True, "whitespace_pattern": _SPACE}
    return f"%json {json.dumps({**told, 'x-guidance': options}, ensure_ascii=False)}"


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _space_rule() -> str:
    return r"SPACE: /\s{0,4}/"


def _unsupported(wanted: OutputFormat, tools: Sequence[Mapping[str, Any]]) -> str:
    """Return the place of the innermost part that is not supported by itself; empty: unknown."""
    schemas: list[tuple[str, Any]] = []
    if wanted.json_schema is not None:
        schemas.append(("schema", wanted.json_schema))
    for number, tool in enumerate(tools):
        function = _function(tool)
        if function.get("name") in wanted.functions and function.get("parameters"):
            schemas.append((f"tools[{number}].function.parameters", function["parameters"]))
    tried = 0
    for place, schema in schemas:
        told = place
        inner: list[tuple[str, Any]] = [(place, schema)]
        while inner and tried < _MOST_TRIED:
            tried += 1
            at, part = inner.pop(0)
            if _is_wrong(part, schema):
                told, inner = at, [] if at.endswith(".pattern") else _parts(part, at)
        if told != place or _is_wrong(schema, schema):
            return told
    return ""


def _is_wrong(part: Any, root: Any) -> bool:
    if not isinstance(part, dict) or not isinstance(root, dict):
        return False
    known = cast("dict[str, Any]", root)
    shared = {name: known[name] for name in ("$defs", "definitions") if name in known}
    own = cast("dict[str, Any]", part)
    return bool(check_grammar(f"start: {_json({**shared, **own})}\n"))


def _parts(schema: Any, place: str) -> list[tuple[str, Any]]:
    """Return the schemas right within one, with their places."""
    found: list[tuple[str, Any]] = []
    for key, value in cast("dict[str, Any]", schema).items() if isinstance(schema, dict) else ():
        at = f"{place}.{key}"
        if key in ("properties", "patternProperties", "$defs", "definitions"):
            if isinstance(value, dict):
                parts = cast("dict[str, Any]", value)
                found += [(f"{at}.{name}", inner) for name, inner in parts.items()]
        elif key in ("anyOf", "oneOf", "allOf", "prefixItems") and isinstance(value, list):
            listed = cast("list[Any]", value)
            found += [(f"{at}[{number}]", inner) for number, inner in enumerate(listed)]
        elif key in ("items", "additionalProperties"):
            found.append((at, value))
        elif key == "pattern":
            found.append((at, {"type": "string", "pattern": value}))
    return found
