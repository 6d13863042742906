"""Games whose policy calls tools: the base of adapters for other environments.

A turn of the policy is text with calls (`schemas/tool_calls.py`). Each call is checked against its
tool's schema and answered by one tool message, in the order of the calls. A call that cannot be
parsed, of an unknown tool, or with wrong arguments gets a message as its answer, from which a
policy can learn; it is not an error of the game. A turn without a call goes to `answer`, which by
default ends the episode.

Schemas of tools may be untrusted, so `checked_tools` bounds their names, size and depth. Answers of
tools are bounded in length.
"""

import json
import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

from ..schemas.argument_types import referred
from ..schemas.call_formats import FORMATS
from ..schemas.chat_messages import read_object
from ..schemas.tool_calls import HERMES, CallSplitter, FoundCall
from ..schemas.wire.errors import GameError
from ..schemas.wire.foreign import shown
from .game import AbstractGame, StepResult
from .prompt import resolve
from .reasoning import behind_reasoning

MAX_TOOLS = 128
"""Tools of one game."""
MAX_SCHEMA_CHARS = 65_536
"""Characters of one tool's schema as JSON."""
MAX_SCHEMA_DEPTH = 32
"""Nested lists and maps of a schema."""
_EXAMPLE_DEPTH = 8
_MAX_STEPS = 20_000
"""Maximum number of comparisons of values with schemas for one call."""
_MAX_NAMED = 32
"""Maximum number of choices in a message."""

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}}
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}

Schema: TypeAlias = Mapping[str, Any]


@dataclass
class ToolResult:
    """The result of one call."""

    text: str
    """The text that the policy reads."""
    reward: float = 0.0
    """Reward of the call; those of one turn are added."""
    done: bool = False
    """The episode has ended; later calls of the turn are not run."""
    info: dict[str, Any] = field(default_factory=dict[str, Any])
    """Further values; later calls of a turn overwrite earlier ones."""


class ToolGame(AbstractGame):
    """A game whose policy calls tools; `answer` gets a turn without a call.

    Subclasses write `get_tools` and `call_tool`, and `reset` and the prompts like any game.
    """

    max_result_chars: int = 16_000
    """Characters of one result; a longer one is cut, with a note."""
    max_calls: int = 16
    """Maximum number of calls of one turn; further ones are answered by a message."""
    max_tool_turns: int = 256
    """Maximum number of turns with calls; then the episode ends as by a limit (`finish_early`)."""

    _functions: dict[str, Schema] | None = None
    _num_turns = _num_calls = _num_refused = 0

    @abstractmethod
    def get_tools(self) -> list[dict[str, Any]]:
        """Return the tools as OpenAI's function schemas, always in the same order."""

    def tools_by_environment(self) -> dict[str, list[dict[str, Any]]]:
        """Return the tools of each environment if rows choose one by their column `environment`.

        By default all episodes have the same tools.
        """
        return {}

    def describe(self) -> dict[str, str]:
        """Return the lines of `tinkermq env check` about the environment, by topic.

        Topics are `tasks`, `rewards` and `sessions at once`, or any other.
        """
        return {"rewards": "those of the tools and of the answer"}

    @abstractmethod
    def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Run a call whose name and arguments fit the tool's schema."""

    def answer(self, text: str) -> StepResult:
        """Answer a turn without a call, its reasoning removed; by default it ends the episode."""
        del text
        return StepResult("", 0.0, done=True)

    def step(self, action: str) -> StepResult:
        """Run the calls of a turn in their order, or call `answer` with its text."""
        turn = self._begin_turn(action)
        if not turn.calls:
            return self._answered(self.answer(turn.text))
        for number, call in enumerate(turn.calls):
            name, arguments = self._read(call, number, turn)
            if arguments is not None and not turn.add(self.call_tool(name, arguments)):
                break
        if self.ends_with(turn):
            turn.end(self.finish_early())
        return self._result(turn)

    def _begin_turn(self, action: str) -> "ToolTurn":
        if self._functions is None:
            tools = checked_tools(self.get_tools(), type(self).__name__)
            self._functions = {tool["function"]["name"]: tool["function"] for tool in tools}
        answer = behind_reasoning(action)
        tools = [{"function": function} for function in self._functions.values()]
        calls = calls_in(answer, tools)
        return ToolTurn(answer.strip(), calls, self.max_result_chars)

    def _read(
        self, call: FoundCall | None, number: int, turn: "ToolTurn"
    ) -> tuple[str, dict[str, Any] | None]:
        """Return a call's name and arguments; None for arguments if a message refused it."""
        assert self._functions is not None
        name, arguments, problem = "", None, ""
        if number >= self.max_calls:
            problem = f"not run: a turn has at most {self.max_calls} calls"
        elif call is None:
            problem = (
                'this call cannot be read: write {"name": "…", "arguments": {…}} and close its tag'
            )
        else:
            name, arguments = call[0], read_object(call[1])
            problem = _problem_of(name, arguments, self._functions)
        self._num_calls += 1
        if problem:
            self._num_refused += 1
            turn.texts.append(f"Error: {problem}")
        return name, None if problem else arguments

    def ends_with(self, turn: "ToolTurn") -> bool:
        """Count a turn whose calls have been run; return whether it is the last one allowed."""
        self._num_turns += 1
        return not turn.done and self._num_turns >= self.max_tool_turns

    def _result(self, turn: "ToolTurn") -> StepResult:
        """Return the answer to a turn whose calls were run."""
        info = {**turn.info, **self._counts()}
        return StepResult("", turn.reward, turn.done, info, "tool", tool_results=turn.texts)

    def _answered(self, result: StepResult) -> StepResult:
        result.info = {**(result.info or {}), **self._counts()}
        return result

    def _counts(self) -> dict[str, int]:
        return {"tool_calls": self._num_calls, "refused_calls": self._num_refused}


class AsyncToolGame(ToolGame):
    """A ToolGame whose `call_tool` is a coroutine; `answer` may be one, too."""

    @abstractmethod
    async def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolResult:  # pyright: ignore[reportIncompatibleMethodOverride]  # step awaits it
        """Run a call whose name and arguments fit the tool's schema."""

    async def step(self, action: str) -> StepResult:  # pyright: ignore[reportIncompatibleMethodOverride]  # the host awaits it
        """Run the calls of a turn in their order, or call `answer` with its text."""
        turn = self._begin_turn(action)
        if not turn.calls:
            return self._answered(await resolve(self.answer(turn.text)))
        for number, call in enumerate(turn.calls):
            name, arguments = self._read(call, number, turn)
            if arguments is not None and not turn.add(await self.call_tool(name, arguments)):
                break
        if self.ends_with(turn):
            turn.end(await resolve(self.finish_early()))
        return self._result(turn)


@dataclass
class ToolTurn:
    """One turn of the policy, and the results of its calls so far."""

    text: str
    """Its text, with its calls and without its reasoning."""
    calls: list[FoundCall | None]
    """Its calls; None for one that cannot be parsed."""
    max_chars: int
    texts: list[str] = field(default_factory=list[str])
    """The result of each call."""
    reward: float = 0.0
    done: bool = False
    info: dict[str, Any] = field(default_factory=dict[str, Any])

    def add(self, result: ToolResult) -> bool:
        """Add the result of the next call; return whether the episode continues."""
        self.texts.append(bounded_text(result.text, self.max_chars))
        self.reward += result.reward
        self.info.update(result.info)
        self.done = self.done or result.done
        return not self.done

    def end(self, result: StepResult) -> None:
        """Add the reward of the episode's end."""
        self.reward += result.reward
        self.info.update(result.info or {})
        self.done = True


def bounded_text(text: str, max_chars: int) -> str:
    """Return a text that can travel, cut to `max_chars` characters with a note.

    Lone surrogates become question marks.
    """
    cut = text if len(text) <= max_chars else text[:max_chars]
    whole = cut if cut.isascii() else cut.encode(errors="replace").decode()
    num_left_out = len(text) - len(cut)
    return f"{whole}\n[{num_left_out:,} more characters left out]" if num_left_out else whole


# -- calls in a turn, and their arguments ----------------------------------------------------------


def calls_in(text: str, tools: Sequence[Mapping[str, Any]]) -> list[FoundCall | None]:
    """Return the calls of a text in their order; None for one that cannot be parsed.

    A text without a call in the form of Hermes and Qwen may have calls in another known form.
    """
    broken: list[FoundCall | None] = []
    for form in (HERMES, *FORMATS):
        calls: list[FoundCall | None] = []
        for piece in CallSplitter(form, tools).push(text, last=True):
            if isinstance(piece, list):
                calls += piece
            elif piece in form.opens:
                calls.append(None)
        names = [call.name for call in calls if call]
        if names and (form is HERMES or all(map(_NAME.fullmatch, names))):
            return calls
        broken = broken or [None for call in calls if call is None]
    return broken


def _problem_of(
    name: str, arguments: dict[str, Any] | None, functions: Mapping[str, Schema]
) -> str:
    """Return why a call cannot be run; empty if it can."""
    function = functions.get(name)
    if function is None:
        return f"there is no tool {shown(name)}; the tools are {', '.join(functions)}"
    if arguments is None:
        return f"the arguments of {name} are not a JSON object"
    return next(_Check(function["parameters"]).problems(arguments, f"{name}: "), "")


class _Check:
    """Compares values with a schema: types, choices, required and unknown names.

    Other keywords of JSON schemas are ignored. The number of steps is limited, since a schema with
    references may be endless.
    """

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._steps_left = _MAX_STEPS

    def problems(self, value: Any, place: str, schema: Any = None, depth: int = 0) -> Iterator[str]:
        """Yield the problems of a value at `place`, by default with the whole schema."""
        fields = self._root if depth == 0 else schema
        self._steps_left -= 1
        if not isinstance(fields, Mapping) or depth > MAX_SCHEMA_DEPTH or self._steps_left < 0:
            return
        fields = cast("Schema", fields)
        yield from self._combined(value, place, fields, depth)
        if value is None and fields.get("nullable") is True:
            return
        allowed = _listed(fields.get("type")) or [fields.get("type")]
        if not any(_is_of(value, name) for name in allowed):
            types = " or ".join(map(str, allowed))
            actual = next(name for name in _TYPES if _is_of(value, name))
            yield f"{place}{shown(value)} is of type {actual}, it must be {types}"
        elif isinstance(value, dict):
            yield from self._in_map(cast("dict[str, Any]", value), place, fields, depth)
        elif isinstance(value, list):
            for number, item in enumerate(cast("list[Any]", value)):
                inner = f"{place.removesuffix(': ')}[{number}]: "
                yield from self.problems(item, inner, fields.get("items"), depth + 1)

    def _combined(self, value: Any, place: str, fields: Schema, depth: int) -> Iterator[str]:
        """Yield the problems with the references, combinations and choices of a schema."""
        others = _listed(fields.get("allOf"))
        if "$ref" in fields:
            others = [*others, referred(self._root, str(fields["$ref"]))]
        for schema in others:
            yield from self.problems(value, place, schema, depth + 1)
        for key in ("anyOf", "oneOf"):
            branches = _listed(fields.get(key))
            problems = [
                next(self.problems(value, place, branch, depth + 1), "") for branch in branches
            ]
            if problems and all(problems):
                yield problems[0] if len(problems) == 1 else f"{place}{shown(value)} fits no choice"
        choices = [fields["const"]] if "const" in fields else _listed(fields.get("enum"))
        if choices and value not in choices:
            names = ", ".join(map(json.dumps, choices[:_MAX_NAMED]))
            yield f"{place}{shown(value)} is none of {names}"

    def _in_map(
        self, value: dict[str, Any], place: str, fields: Schema, depth: int
    ) -> Iterator[str]:
        named = fields.get("properties")
        properties = cast("Schema", named if isinstance(named, Mapping) else {})
        required = [name for name in _listed(fields.get("required")) if isinstance(name, str)]
        if missing := [name for name in required if name not in value]:
            yield f"{place}{', '.join(missing)} is missing"
        others = fields.get("additionalProperties", depth > 0)  # every argument is unknown
        unknown = [name for name in value if name not in properties]
        if unknown and others is False:
            known = ", ".join(properties) or "none"
            yield f"{place}{shown(unknown[0])} is unknown, known are {known}"
        for name, item in value.items():
            inner = f"{place.removesuffix(': ')}.{name}: "
            yield from self.problems(item, inner, properties.get(name, others), depth + 1)


def _listed(value: Any) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else []


def _is_of(value: Any, name: Any) -> bool:
    types = _TYPES.get(name) if isinstance(name, str) else None
    if types is None:  # any type, or an unknown one
        return True
    return isinstance(value, types) and (bool in types or not isinstance(value, bool))


# -- schemas of tools ------------------------------------------------------------------------------


def checked_tools(tools: Sequence[Any], source: str) -> list[dict[str, Any]]:
    """Return tools as function schemas with name, description and parameters.

    `source` names their origin. Raises GameError for names that models cannot call or that repeat,
    parameters that are not an object, control characters, and schemas that are too many, too large
    or too deep.
    """
    if len(tools) > MAX_TOOLS:
        raise GameError(
            f"{source} has {len(tools)} tools, at most {MAX_TOOLS} fit",
            hint="offer fewer tools: a prompt shows each of them",
        )
    checked = [_checked_tool(tool, source) for tool in tools]
    names = [tool["function"]["name"] for tool in checked]
    if clashing := sorted({name for name in names if names.count(name) > 1}):
        raise GameError(
            f"{source} has several tools of the name {', '.join(clashing)}",
            hint="give each tool a name of its own",
        )
    return checked


def _checked_tool(tool: Any, source: str) -> dict[str, Any]:
    fields: Any = cast("Any", tool).get("function", tool) if isinstance(tool, Mapping) else None
    name = cast("Schema", fields).get("name") if isinstance(fields, Mapping) else None
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise GameError(
            f"{source} has a tool of the name {shown(name)}",
            hint="a tool's name has 1 to 64 letters, digits, _ or -",
        )
    fields = cast("Schema", fields)
    if _depth_of(fields) > MAX_SCHEMA_DEPTH:
        raise _unfit(source, name, f"its schema nests over {MAX_SCHEMA_DEPTH} levels deep")
    parameters: Any = fields.get("parameters") or _NO_ARGUMENTS
    description = fields.get("description") or ""
    if not isinstance(description, str):
        raise _unfit(source, name, f"its description is {shown(description)}, no text")
    if not isinstance(parameters, Mapping) or cast("Schema", parameters).get("type") != "object":
        raise _unfit(
            source,
            name,
            f"its parameters are {shown(cast('object', parameters))}, no object schema",
        )
    function = {
        "name": name,
        "description": description,
        "parameters": dict(cast("Schema", parameters)),
    }
    function |= {str(key): value for key, value in fields.items() if key not in function}
    try:
        text = json.dumps(function, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise _unfit(source, name, f"its schema is not JSON: {error}") from error
    if len(text) > MAX_SCHEMA_CHARS:
        raise _unfit(
            source, name, f"its schema has {len(text):,} characters of {MAX_SCHEMA_CHARS:,}"
        )
    if culprit := next(filter(_CONTROL.search, _texts_in(function)), None):
        raise _unfit(source, name, f"its schema has a control character: {shown(culprit)}")
    return {"type": "function", "function": function}


def _unfit(source: str, name: str, why: str) -> GameError:
    return GameError(
        f"{source}: the tool {name} cannot be offered: {why}",
        hint="correct the tool where it is written, or leave it out",
    )


def _depth_of(value: Any) -> int:
    """Return the nesting depth of a value, up to a little more than allowed."""
    level, depth = [value], 0
    while level and depth <= MAX_SCHEMA_DEPTH:
        level = [inner for outer in level for inner in _inside(outer)]
        depth += 1
    return depth


def _texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from map(str, cast("Schema", value))
    for inner in _inside(value):
        yield from _texts_in(inner)


def _inside(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(cast("Schema", value).values())
    return cast("list[Any]", value) if isinstance(value, list) else []


def example_of(schema: Any, root: Any = None, depth: int = _EXAMPLE_DEPTH) -> Any:
    """Return a value that fits a JSON schema in most cases, for an untrained policy.

    References are resolved in `root`, by default the schema itself.
    """
    if not isinstance(schema, Mapping) or not depth:
        return "text"
    fields = cast("Schema", schema)
    root = fields if root is None else root
    reference = fields.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        return example_of(referred(root, reference), root, depth - 1)
    for key in ("const", "default"):
        if fields.get(key) is not None:
            return fields[key]
    for key in ("enum", "examples"):
        if fields.get(key):
            return fields[key][0]
    for key in ("anyOf", "oneOf", "allOf"):
        if branches := [branch for branch in fields.get(key) or () if branch != {"type": "null"}]:
            return example_of(branches[0], root, depth - 1)
    kind: Any = fields.get("type")
    if isinstance(kind, list):
        kind = next((name for name in cast("list[Any]", kind) if name != "null"), "null")
    properties: Mapping[str, Any] = fields.get("properties") or {}
    if kind == "object" or properties:
        names: Sequence[str] = fields.get("required") or ()
        return {name: example_of(properties.get(name), root, depth - 1) for name in names}
    if kind == "array":
        items = fields.get("prefixItems") or [fields.get("items")] * (fields.get("minItems") or 0)
        return [example_of(item, root, depth - 1) for item in items]
    minimum = fields.get("minimum")
    lowest = minimum if isinstance(minimum, int | float) else 1
    scalars = {"integer": lowest, "number": float(lowest), "boolean": True, "null": None}
    return scalars.get(str(kind), "text")
