"""Arguments of tool calls, made from what a tool says that it takes.

Pure. The values are the first that fit a JSON Schema; their JSON has white space where nobody
writes any, so that a program that writes it anew is seen to.
"""

import json
from collections.abc import Mapping
from typing import Any, cast

_MAX_DEPTH = 8
_TEXT = "x"
_CHOICES = ("anyOf", "oneOf", "allOf")


def example(schema: Any) -> Any:
    """Return a value that fits a JSON Schema, as far as one can tell."""
    return _value(schema, schema, _MAX_DEPTH)


def spaced(arguments: Any) -> str:
    """Return JSON with white space that no serialiser writes."""
    if not isinstance(arguments, dict):
        return f" {json.dumps(arguments, ensure_ascii=False)} "
    fields = cast("dict[str, Any]", arguments)
    pairs = (f"{json.dumps(k)}:  {json.dumps(v, ensure_ascii=False)}" for k, v in fields.items())
    return "{" + ",  ".join(pairs) + " }"


def _value(schema: Any, root: Any, depth: int) -> Any:
    if not isinstance(schema, Mapping) or not depth:
        return _TEXT
    told = _followed(cast("Mapping[str, Any]", schema), root)
    for name in ("const", "default"):
        if told.get(name) is not None:
            return told[name]
    if isinstance(told.get("enum"), list) and told["enum"]:
        return told["enum"][0]
    for name in _CHOICES:
        if isinstance(told.get(name), list) and told[name]:
            return _value(_not_null(told[name]), root, depth - 1)
    kind = told.get("type")
    if isinstance(kind, list):
        kind = next((one for one in cast("list[Any]", kind) if one != "null"), "null")
    return _of_kind(kind, told, root, depth)


def _of_kind(kind: Any, told: Mapping[str, Any], root: Any, depth: int) -> Any:
    if kind == "object" or "properties" in told:
        return _fields(told, root, depth)
    if kind == "array":
        least = told.get("minItems")
        number = max(1, least) if isinstance(least, int) else 1
        return [_value(told.get("items", {}), root, depth - 1)] * min(number, _MAX_DEPTH)
    if kind in ("integer", "number"):
        return _number(told)
    if kind == "boolean":
        return True
    if kind == "null":
        return None
    least = told.get("minLength")
    return _TEXT * min(max(1, least) if isinstance(least, int) else 1, 1000)


def _fields(told: Mapping[str, Any], root: Any, depth: int) -> dict[str, Any]:
    """Return an object with the fields that it must have, or with all if it says nothing."""
    known: Any = told.get("properties")
    properties = cast("dict[str, Any]", known) if isinstance(known, dict) else {}
    required: Any = told.get("required")
    names = cast("list[str]", required) if isinstance(required, list) else list(properties)
    return {
        str(name): _value(properties.get(name, {}), root, depth - 1) for name in names or properties
    }


def _number(told: Mapping[str, Any]) -> int | float:
    least, most = told.get("minimum", told.get("exclusiveMinimum")), told.get("maximum")
    if isinstance(least, int | float):
        return least + ("exclusiveMinimum" in told)
    return min(2, most) if isinstance(most, int | float) else 2


def _followed(schema: Mapping[str, Any], root: Any) -> Mapping[str, Any]:
    """Return what a schema refers to in the same document; itself where it refers to nothing."""
    name = schema.get("$ref")
    if not isinstance(name, str) or not name.startswith("#/"):
        return schema
    found = root
    for part in name[2:].split("/"):
        found = cast("Any", found).get(part) if isinstance(found, Mapping) else None
    return cast("Mapping[str, Any]", found) if isinstance(found, Mapping) else schema


def _not_null(choices: Any) -> Any:
    told = cast("list[Any]", choices)
    return next((one for one in told if one != {"type": "null"}), told[0])
