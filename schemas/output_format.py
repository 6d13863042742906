"""Structured output: JSON of a schema, or tool calls.

`check_schema` reports malformed, too large and unsupported parts with their place. Only compiling a
schema shows whether it can be decoded. Pure.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, cast

from pydantic import Field

from .wire.errors import ConfigError
from .wire.message import Message

MAX_SCHEMA_CHARS = 128 << 10
"""Maximum length of a schema as JSON."""
MAX_SCHEMA_DEPTH = 64
"""Maximum depth of nested objects and lists of a schema."""
MAX_PATTERN_PROPERTIES = 32
"""Maximum number of properties of an object; each is compared with all others."""
MAX_MULTIPLE = 10_000
"""Maximum least common multiple of all `multipleOf` of an answer's schemas, without decimal points.
A compiled schema grows with it: 100 million take gigabytes and minutes."""
MAX_PENALTY = 2.0
"""Absolute value of presence and frequency penalties, as OpenAI bounds them."""
MAX_REPETITION = 10.0
MAX_BIAS = 100.0
"""Absolute value of a token's bias, as OpenAI bounds it."""
MAX_TOP_LOGPROBS = 20
"""Likeliest tokens per position, as OpenAI bounds them."""
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
"""The schema of `json_object`."""

_TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
_SHOWN = 60
_UNSUPPORTED = (
    "contains",
    "contentSchema",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "else",
    "if",
    "maxContains",
    "minContains",
    "not",
    "propertyNames",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
    "uniqueItems",
    "$dynamicAnchor",
    "$dynamicRef",
    "$recursiveRef",
)
"""Keywords that tinkermq's grammars cannot enforce."""
_FORMATS = (
    "date",
    "date-time",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "time",
    "uri",
    "uuid",
)


class SchemaError(ConfigError):
    """A JSON schema that cannot be enforced; names the place."""

    def __init__(self, message: str, *, place: str, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.place = place
        """`response_format.json_schema.schema.properties.a.type`."""


class OutputFormat(Message):
    """Required form of an answer: JSON of `json_schema`, calls of `functions`, or either if both
    are set; or a text of `regex`, `choices` or `grammar`.

    Tokens that violate it are not drawn, nor is the end of the answer until it is complete.
    Log-probs are those of the model alone.
    """

    json_schema: dict[str, Any] | bool | None = None
    """Schema of a JSON answer."""
    functions: list[str] = Field(default_factory=list[str], max_length=1024)
    """Tools, of which at least one is called."""
    is_single: bool = False
    """Exactly one tool is called."""
    regex: str = Field(default="", max_length=MAX_SCHEMA_CHARS)
    """Regular expression of the whole answer, without look-around."""
    choices: list[str] = Field(default_factory=list[str], max_length=1024)
    """Texts of which the answer is one."""
    grammar: str = Field(default="", max_length=MAX_SCHEMA_CHARS >> 3)
    """Context-free grammar in Lark's or GBNF's form, with the rule `start` or `root`."""


def check_schema(schema: Any, place: str) -> None:
    """Raise SchemaError, naming the place, for an invalid or unsupported schema."""
    _check_size(schema, place)
    if isinstance(schema, (dict, bool)):
        _check(schema, place, cast("Any", schema))
        return
    raise SchemaError(
        f"{place} must be a schema, and is {_shown(schema)}", place=place, hint="give an object"
    )


def check_multiples(schemas: Sequence[Any]) -> None:
    """Raise ConfigError for schemas of one answer whose `multipleOf` would take too much memory."""
    divisors = sorted({divisor for schema in schemas for divisor in _divisors(schema)})
    common = 1
    for divisor in divisors:
        common = math.lcm(common, _digits(divisor))
        if common > MAX_MULTIPLE:
            raise ConfigError(
                f"multipleOf {_shown(divisors)}: their least common multiple is over "
                f"{MAX_MULTIPLE:,}",
                hint="leave multipleOf out, and check the answer for it",
            )


def _divisors(value: Any) -> Iterator[int | float]:
    if isinstance(value, dict):
        divisor = cast("dict[str, Any]", value).get("multipleOf")
        if isinstance(divisor, int | float):
            yield divisor
    for inner in _within(value):
        yield from _divisors(inner)


def _digits(divisor: int | float) -> int:
    if divisor == int(divisor):
        return int(divisor)
    return int("".join(map(str, Decimal(str(divisor)).as_tuple().digits)))


def _check_size(schema: Any, place: str) -> None:
    """Refuse a schema that is too deep or large, before any recursion."""
    level, depth = [schema], 0
    while level:
        if (depth := depth + 1) > MAX_SCHEMA_DEPTH:
            raise SchemaError(
                f"{place} is nested more than {MAX_SCHEMA_DEPTH} deep",
                place=place,
                hint="make it flatter, or put recurring parts into $defs",
            )
        level = [inner for value in level for inner in _within(value)]
    try:
        size = len(json.dumps(schema, ensure_ascii=False, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise SchemaError(f"{place} cannot be written as JSON: {error}", place=place) from error
    if size > MAX_SCHEMA_CHARS:
        raise SchemaError(
            f"{place} has {size:,} characters, at most {MAX_SCHEMA_CHARS:,} are allowed",
            place=place,
            hint="give a smaller schema",
        )


def _within(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from cast("dict[str, Any]", value).values()
    elif isinstance(value, list):
        yield from cast("list[Any]", value)


def _check(schema: Any, place: str, root: Any) -> None:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise SchemaError(
            f"{place} must be a schema, and is {_shown(schema)}",
            place=place,
            hint="give an object",
        )
    for key, value in cast("dict[str, Any]", schema).items():
        at = f"{place}.{key}"
        if key in _UNSUPPORTED and not (key == "uniqueItems" and value is False):
            raise SchemaError(
                f"{at}: the keyword {key!r} is not supported",
                place=at,
                hint="leave it out, and check the answer for it",
            )
        if key in _PLAIN:
            allowed, fits = _PLAIN[key]
            if not fits(value):
                raise SchemaError(f"{at} must be {allowed}, and is {_shown(value)}", place=at)
        elif key == "$ref":
            _check_reference(value, at, root)
        elif key in _SCHEMAS:
            _check(value, at, root)
        elif key in _SCHEMA_LISTS or (key == "items" and isinstance(value, list)):
            for number, inner in enumerate(_listed(value, at)):
                _check(inner, f"{at}[{number}]", root)
        elif key in _SCHEMA_MAPS:
            if not isinstance(value, dict):
                raise SchemaError(f"{at} must be an object, and is {_shown(value)}", place=at)
            num = len(cast("dict[str, Any]", value))
            if key == "patternProperties" and num > MAX_PATTERN_PROPERTIES:
                raise SchemaError(
                    f"{at} has {num} patterns, at most {MAX_PATTERN_PROPERTIES} are allowed",
                    place=at,
                    hint="join patterns of the same schema: ^(a|b)",
                )
            for name, inner in cast("dict[str, Any]", value).items():
                _check(inner, f"{at}.{name}", root)
        elif key == "items":
            _check(value, at, root)


def _listed(value: Any, place: str) -> Sequence[Any]:
    if isinstance(value, list) and value:
        return cast("list[Any]", value)
    raise SchemaError(
        f"{place} must be a list of schemas, and is {_shown(value)}", place=place, hint="give one"
    )


def _check_reference(value: Any, place: str, root: Any) -> None:
    if not isinstance(value, str) or not value.startswith("#"):
        raise SchemaError(
            f"{place} must name a part of this schema, and is {_shown(value)}",
            place=place,
            hint="copy what it names into $defs: #/$defs/NAME",
        )
    target = root
    for step in value[1:].strip("/").split("/") if value[1:].strip("/") else ():
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(target, list) and name.isdecimal() and int(name) < len(cast("Any", target)):
            target = cast("list[Any]", target)[int(name)]
        elif isinstance(target, dict) and name in target:
            target = cast("dict[str, Any]", target)[name]
        else:
            raise SchemaError(
                f"{place}: the schema does not define {_shown(value)}",
                place=place,
                hint="define it in $defs",
            )


def _shown(value: Any) -> str:
    return repr(value)[:_SHOWN]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_type(value: Any) -> bool:
    names = cast("list[Any]", value) if isinstance(value, list) else [value]
    return bool(names) and all(isinstance(name, str) and name in _TYPES for name in names)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(text, str) for text in cast("list[Any]", value)
    )


_Rule = tuple[str, Callable[[Any], bool]]
_COUNT: _Rule = ("an integer ≥ 0", _is_count)
_NUMBER: _Rule = ("a number", _is_number)
_PLAIN: Mapping[str, _Rule] = {
    "type": (f"one of {', '.join(_TYPES)}, or a list of them", _is_type),
    "enum": ("a list of values", lambda value: isinstance(value, list) and value != []),
    "required": ("a list of names", _are_texts),
    "pattern": ("a text", lambda value: isinstance(value, str)),
    "format": (f"one of {', '.join(_FORMATS)}", lambda value: value in _FORMATS),
    "minLength": _COUNT,
    "maxLength": _COUNT,
    "minItems": _COUNT,
    "maxItems": _COUNT,
    "minProperties": _COUNT,
    "maxProperties": _COUNT,
    "minimum": _NUMBER,
    "maximum": _NUMBER,
    "exclusiveMinimum": ("a number", lambda value: _is_number(value) or isinstance(value, bool)),
    "exclusiveMaximum": ("a number", lambda value: _is_number(value) or isinstance(value, bool)),
    "multipleOf": ("a number > 0", lambda value: _is_number(value) and value > 0),
}
_SCHEMAS = frozenset({"additionalProperties", "additionalItems"})
_CHOICES = ("anyOf", "oneOf", "allOf")
_SCHEMA_LISTS = frozenset({*_CHOICES, "prefixItems"})
_SCHEMA_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions"})


def closed(schema: Any) -> Any:
    """Return a schema whose objects have only named properties unless it says otherwise.

    The original schema allows every value that this one allows. Without it a model may invent
    endless properties. Schemas that combine the properties of several parts stay open, since
    closing one part would exclude those of another, and so do objects that require a property
    without naming it.
    """
    return schema if _is_composed(schema) else _closed(schema)


def _is_composed(value: Any) -> bool:
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        parts = fields.get("allOf")
        if isinstance(parts, list) and (len(cast("Any", parts)) > 1 or "properties" in fields):
            return True
        others = {key: fields[key] for key in (*_CHOICES, "$ref") if key in fields}
        if "properties" in fields and _has_properties(others):
            return True
    return any(_is_composed(inner) for inner in _within(value))


def _has_properties(schema: Any) -> bool:
    """Whether a schema, or one that it combines, names properties, maybe by reference."""
    if not isinstance(schema, dict):
        return False
    fields = cast("dict[str, Any]", schema)
    parts = [inner for key in _CHOICES for inner in _within(fields.get(key))]
    return "properties" in fields or "$ref" in fields or any(map(_has_properties, parts))


def _closed(value: Any) -> Any:
    if isinstance(value, list):
        return [_closed(inner) for inner in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    closed = {
        key: inner
        if key in ("const", "enum", "default", "examples")
        else {name: _closed(part) for name, part in cast("dict[str, Any]", inner).items()}
        if key in _SCHEMA_MAPS and isinstance(inner, dict)
        else _closed(inner)
        for key, inner in cast("dict[str, Any]", value).items()
        if key != "uniqueItems"  # the schema is false, or was refused
    }
    is_open = "additionalProperties" in closed or "patternProperties" in closed
    names = closed.get("properties")
    if isinstance(names, dict) and not is_open and {*closed.get("required", ())} <= {*names}:
        closed["additionalProperties"] = False
    return closed
