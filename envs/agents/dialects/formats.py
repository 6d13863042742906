"""What a request demands of its answer's form, in the words of each API.

`response_format`, Responses' `text.format` and Messages' `output_config.format` name JSON;
`tool_choice` names tools. Schemas are checked here, so that who asks is told the place at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from ....schemas.output_format import ANY_OBJECT, OutputFormat, SchemaError, check_schema
from .request import Fields, RequestError

_NO_CHOICE = (None, "auto", "none")
_NAMED = ("function", "custom", "tool")


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """What a `tool_choice` says."""

    functions: tuple[str, ...] = ()
    """Tools of which one at least is called; none: the model may call or not."""
    is_single: bool = False
    """Only one is called."""
    hides_tools: bool = False
    """The model is shown no tools."""
    without_effect: tuple[str, ...] = ()
    """Fields that ask for what cannot be had."""


def read_tool_choice(
    value: Any, tools: Sequence[Mapping[str, Any]], *, single: str = ""
) -> ToolChoice:
    """Read the `tool_choice` of any API; RequestError for one that names no tool of `tools`.

    `single` names the field by which the request says that tools are called one at a time.
    """
    is_single = bool(single)
    names = tuple(str(function_of(tool).get("name")) for tool in tools)
    if isinstance(value, dict) and cast("dict[str, Any]", value).get("type") in ("auto", "none"):
        value = cast("dict[str, Any]", value)["type"]
    if value in _NO_CHOICE:
        is_told = is_single and bool(tools) and value != "none"
        return ToolChoice((), is_single, value == "none", (single,) if is_told else ())
    if value in ("required", "any") and names:
        return ToolChoice(tuple(dict.fromkeys(names)), is_single)
    if not isinstance(value, dict) or not names:
        return ToolChoice(without_effect=("tool_choice",))
    fields = Fields(value, "tool_choice")
    kind = fields.text("type")
    inner = fields.any(kind)
    told = Fields(inner, fields.name(kind)) if isinstance(inner, dict) else fields
    if kind in _NAMED:
        return ToolChoice(_among((told.text("name"),), names), is_single=True)
    if kind == "allowed_tools" and told.text("mode") == "required" and told.items("tools"):
        allowed = [
            Fields(tool.any("function"), tool.name("function")) if tool.any("function") else tool
            for tool in told.objects("tools")
        ]
        return ToolChoice(_among([one.text("name") for one in allowed], names), is_single)
    if kind in ("any", "required"):
        return read_tool_choice(kind, tools, single=single)
    return ToolChoice(without_effect=("tool_choice",))


def _among(asked: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    for name in asked:
        if name not in names:
            raise RequestError(
                f"tool_choice names {name!r:.80}, which is not among the tools",
                param="tool_choice",
                hint="name one of `tools`",
            )
    return tuple(dict.fromkeys(asked))


def read_format(value: Any, place: str) -> dict[str, Any] | bool | None:
    """Return the schema that a `response_format` (or its like, at `place`) demands; None: none.

    Raises RequestError, which names the place, for one that is malformed or not supported.
    """
    if value is None:
        return None
    fields = Fields(value, place)
    kind = fields.text("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return dict(ANY_OBJECT)
    if kind != "json_schema":
        raise RequestError(
            f"{fields.name('type')} is {kind!r:.80}",
            param=fields.name("type"),
            hint="give json_schema, json_object or text",
        )
    nested = fields.any("json_schema")
    told = fields if nested is None else Fields(nested, fields.name("json_schema"))
    schema = told.any("schema")
    if schema is None:
        return dict(ANY_OBJECT)
    _check(schema, told.name("schema"))
    return cast("dict[str, Any] | bool", schema)


def output_format(
    schema: dict[str, Any] | bool | None,
    choice: ToolChoice,
    tools: Sequence[Mapping[str, Any]],
) -> OutputFormat | None:
    """Return what an answer must be; None: anything.

    Where a format is demanded and tools may be called, the answer is either. Raises RequestError
    for parameters of tools that no call can be held to.
    """
    functions = choice.functions
    if schema is not None and not functions and not choice.hides_tools:
        functions = tuple(str(function_of(tool).get("name")) for tool in tools)
    elif functions:
        schema = None
    if schema is None and not functions:
        return None
    for number, tool in enumerate(tools):
        function = function_of(tool)
        if function.get("name") in functions and function.get("parameters"):
            _check(function["parameters"], f"tools[{number}].function.parameters")
    return OutputFormat(
        json_schema=schema,
        functions=list(functions),
        is_single=bool(functions) and choice.is_single,
    )


def function_of(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a tool, as chat templates take it, says of its function."""
    inner = tool.get("function")
    return cast("dict[str, Any]", inner) if isinstance(inner, dict) else tool


def _check(schema: Any, place: str) -> None:
    try:
        check_schema(schema, place)
    except SchemaError as error:
        raise RequestError(error.message, param=error.place, hint=error.hint) from error
