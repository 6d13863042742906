"""Reads an argument that a model wrote as plain text, by the types of its tool's schema. Pure.

A schema allows JSON types by `type`, `enum`, `const`, keywords of one type (`items` of an array), a
reference, or a combination of schemas. A text that is the JSON of an allowed type is that value.
Otherwise it stays text if the schema allows one, or says nothing about types.
"""

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias, cast
from urllib.parse import unquote

from .chat_messages import read_value

Schema: TypeAlias = Mapping[str, Any]
Types: TypeAlias = frozenset[str]
"""Names of JSON types, and texts of an `enum` or `const` behind a `=`."""

_NAMES = {
    "any": None,
    "bool": "boolean",
    "dict": "object",
    "double": "number",
    "float": "number",
    "int": "integer",
    "list": "array",
    "str": "string",
    "tuple": "array",
}
"""Names of types in other languages that tools are described with; `any` says nothing."""
_IMPLIED = {
    **dict.fromkeys(("items", "prefixItems", "minItems", "maxItems", "uniqueItems"), "array"),
    **dict.fromkeys(("properties", "additionalProperties", "patternProperties"), "object"),
    **dict.fromkeys(("required", "minProperties", "maxProperties"), "object"),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), "number"),
    **dict.fromkeys(("pattern", "minLength", "maxLength"), "string"),
    "multipleOf": "number",
}
"""Keywords that apply to one type, in a schema that names none."""
_PYTHON = {"True": "true", "False": "false", "None": "null"}
"""Python's spelling of values, which some templates print."""
_MAX_DEPTH = 64
"""Maximum number of nested combinations and references; deeper ones say nothing."""


def argument_value(text: str, parameters: Any, name: str) -> Any:
    """Return the value of the argument `name`; `parameters` is the schema of all arguments."""
    reader = _Reader(parameters)
    types = reader.types(reader.of_property(parameters, name))
    if not types or f"={text}" in types:
        return text
    written = text.strip()
    written = _PYTHON.get(written, written)
    value = read_value(written)
    if (value is not None or written == "null") and not isinstance(value, str):
        if _type_of(value) in types or "string" not in types:
            return value
    elif "string" not in types and value is not None:
        return value
    return text


def referred(root: Any, reference: str) -> Any:
    """Return the schema of a local reference (`#/$defs/x`); None for another."""
    schema = root
    for part in filter(None, reference.removeprefix("#").split("/")):
        key = unquote(part).replace("~1", "/").replace("~0", "~")
        schema = cast("Schema", schema).get(key) if isinstance(schema, Mapping) else None
    return schema


def _type_of(value: Any) -> str:
    names = {"bool": "boolean", "int": "integer", "float": "number", "NoneType": "null"}
    names |= {"list": "array", "dict": "object"}
    return names.get(type(value).__name__, "string")


def _listed(value: Any) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else []


class _Reader:
    """Finds one argument in the schema of all of a tool, following each reference once."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._searched = set[str]()
        self._known: dict[str, Types | None] = {}

    def of_property(self, schema: Any, name: str, depth: int = 0) -> Any:
        """Return the schema of a property; None: nothing is said about it."""
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return None
        fields = cast("Schema", schema)
        named = fields.get("properties")
        own = cast("Schema", named).get(name) if isinstance(named, Mapping) else None
        reference = fields.get("$ref")
        parts = _listed(fields.get("allOf"))
        if isinstance(reference, str) and reference not in self._searched:
            self._searched.add(reference)
            parts = [*parts, self._referred(fields, reference)]

        def within(inner: list[Any]) -> list[Any]:
            schemas = (self.of_property(part, name, depth + 1) for part in inner)
            return [schema for schema in schemas if schema is not None]

        schemas = [*([] if own is None else [own]), *within(parts)]
        for key in ("anyOf", "oneOf"):
            if options := within(_listed(fields.get(key))):
                schemas.append({"anyOf": options})
        if schemas:
            return {"allOf": schemas}
        return {"anyOf": others} if (others := _others(fields)) else None

    def types(self, schema: Any, depth: int = 0) -> Types | None:
        """Return the types that a schema allows; None: it says nothing.

        It is empty for a schema that only refers to itself.
        """
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return None
        fields = cast("Schema", schema)
        parts = [_declared(fields), self._of_reference(fields, depth)]
        parts += [self.types(schema, depth + 1) for schema in _listed(fields.get("allOf"))]
        for key in ("anyOf", "oneOf"):
            options = [self.types(option, depth + 1) for option in _listed(fields.get(key))]
            known = [option for option in options if option is not None]
            if options and len(known) == len(options):
                parts.append(frozenset[str]().union(*known))
        known = [types for types in parts if types]
        if not known:
            return next((types for types in parts if types is not None), None)
        allowed = known[0].intersection(*known[1:]) or known[0].union(*known[1:])
        return allowed | {"null"} if fields.get("nullable") is True else allowed

    def _of_reference(self, fields: Schema, depth: int) -> Types | None:
        reference = fields.get("$ref")
        if not isinstance(reference, str):
            return None
        if reference not in self._known:
            self._known[reference] = frozenset()  # it allows nothing beyond what it leads back to
            schema = self._referred(fields, reference)
            self._known[reference] = self.types(schema, depth + 1)
        return self._known[reference]

    def _referred(self, fields: Schema, reference: str) -> Any:
        """Return the schema of a reference from the root, or from the schema that has it."""
        schema = referred(self._root, reference)
        return referred(fields, reference) if schema is None else schema


def _declared(fields: Schema) -> Types | None:
    """Return the types that a schema allows by itself."""
    declared = fields.get("type")
    names = [declared] if isinstance(declared, str) else _listed(declared)
    types = {_NAMES.get(name.lower(), name.lower()) for name in names if isinstance(name, str)}
    if types:
        return None if None in types else _with_integers(name for name in types if name)
    choices = [fields["const"]] if "const" in fields else _listed(fields.get("enum"))
    if choices:
        texts = {f"={choice}" for choice in choices if isinstance(choice, str)}
        return _with_integers(map(_type_of, choices)) | texts
    implied = (_IMPLIED[key] for key in fields if key in _IMPLIED)
    return _with_integers(implied) or None


def _with_integers(types: Iterator[str]) -> Types:
    """Return types as a set; an integer is a number, too."""
    names = frozenset(types)
    return names | {"integer"} if "number" in names else names


def _others(fields: Schema) -> list[Any]:
    """Return the schemas of properties that are not named; patterns of names are not compared."""
    patterns = fields.get("patternProperties")
    named = [*cast("Schema", patterns).values()] if isinstance(patterns, Mapping) else []
    others = fields.get("additionalProperties")
    return [*named, others] if isinstance(others, Mapping) else named
