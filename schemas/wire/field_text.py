"""Type, bounds and default of a field as Markdown, for reference pages and `--help`."""

import types
import typing
from typing import Any, Literal, cast

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic import BaseModel, WithJsonSchema
from pydantic.fields import FieldInfo

from .message import Message, new_id

_BOUNDS = (
    (Ge, "ge", "≥"),
    (Gt, "gt", ">"),
    (Le, "le", "≤"),
    (Lt, "lt", "<"),
    (MinLen, "min_length", "≥"),
    (MaxLen, "max_length", "≤"),
)
"""Bounds of numbers, and of the lengths of texts, lists and maps."""


def type_text(field: FieldInfo) -> str:
    """Return a field's type and bounds as Markdown, such as `int 1..64 or null` or `text[] ≤16`."""
    arrays = [rule for rule in field.metadata if isinstance(rule, WithJsonSchema)]
    if arrays:
        return str((arrays[0].json_schema or {})["description"])
    value = _type(field.annotation)
    or_null = " or null" if value.endswith(" or null") else ""
    return f"{value.removesuffix(or_null)}{_bounds(field)}{or_null}"


def _bounds(field: FieldInfo) -> str:
    bounds = [
        (sign, f"{getattr(rule, attribute):,}")
        for rule in field.metadata
        for kind, attribute, sign in _BOUNDS
        if isinstance(rule, kind)
    ]
    if [sign for sign, _ in bounds] == ["≥", "≤"]:
        (_, low), (_, high) = bounds
        texts = [f" {low}" if low == high else f" {low}..{high}"]
    else:
        texts = [f" {sign}{bound}" for sign, bound in bounds]
    patterns = [getattr(rule, "pattern", None) for rule in field.metadata]
    return "".join([*texts, *(f" matching `{pattern}`" for pattern in patterns if pattern)])


def _type(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is None or annotation is type(None):
        return "null"
    if origin is Literal:
        return f"`{'|'.join(map(str, arguments))}`"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type(argument) for argument in arguments)
    if origin is list or (origin is tuple and arguments[-1] is ...):
        item = _type(arguments[0])
        return f"({item})[]" if " or " in item else f"{item}[]"
    if hasattr(annotation, "_fields"):  # a named tuple
        origin, arguments = tuple, tuple(typing.get_type_hints(annotation).values())
    if origin is tuple:
        return f"{_type(arguments[0])}[{len(arguments)}]"
    if origin is dict:
        return "map" if arguments[1] is Any else f"map[{_type(arguments[1])}]"
    if isinstance(annotation, type) and issubclass(annotation, Message):
        return f"[{annotation.__name__}](#{annotation.__name__.lower()})"
    if typing.get_origin(annotation) is typing.Annotated:
        return _type(arguments[0])
    return "text" if annotation is str else str(annotation.__name__)


def default_text(field: FieldInfo) -> str:
    """Return a field's default as Markdown."""
    if field.is_required():
        return "required"
    if field.default_factory is new_id:
        return "a new one"
    value: Any = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        return ""
    return f"`{_yaml(value)}`"


def _yaml(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_yaml(inner) for inner in cast('list[Any]', value))}]"
    if isinstance(value, str):
        return value or '""'
    return str(value)
