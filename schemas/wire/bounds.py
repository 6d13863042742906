"""Default bounds of texts, lists, maps and numbers from users.

`bounded` applies them: sections of the configuration and requests of users pass their pydantic
schema through it, so no new field can be forgotten. A field of type `Any` that holds a tree is
bounded as a whole.
"""

from typing import Annotated, Any, TypeAlias, cast

from pydantic import Field
from pydantic_core import CoreSchema, core_schema

MAX_CHARS = 4096
"""Length of a text: a path, a name, a reason."""
MAX_ITEMS = 10_000
"""Entries of a list or map."""
MAX_NUMBER = 1_000_000_000
"""Absolute value of an integer."""
MAX_REAL = 1e12
"""Absolute value of any other number."""
MAX_TREE_CHARS = 256 << 10
"""Length of all texts of a free tree together."""
MAX_TREE_VALUES = 50_000
"""Values of a free tree."""
MAX_TREE_DEPTH = 32
"""Nested maps and lists of a free tree."""
MAX_TOP_K = 256
"""Likeliest tokens requested per position."""

Moment: TypeAlias = Annotated[float, Field(ge=0, le=1e11, allow_inf_nan=False)]
"""Seconds since the epoch that another process names, and that calendars can show."""

_DEFAULTS: dict[str, dict[str, Any]] = {
    "str": {"max_length": MAX_CHARS},
    "bytes": {"max_length": MAX_CHARS},
    "list": {"max_length": MAX_ITEMS},
    "set": {"max_length": MAX_ITEMS},
    "dict": {"max_length": MAX_ITEMS},
    "int": {"le": MAX_NUMBER, "ge": -MAX_NUMBER},
    "float": {"le": MAX_REAL, "ge": -MAX_REAL, "allow_inf_nan": False},
}
_SAME_SIDE = {"le": "lt", "ge": "gt"}
_OPAQUE = frozenset({"serialization", "metadata", "config", "default", "function"})


def bounded(schema: CoreSchema) -> CoreSchema:
    """Return a model's schema with a bound for each field that has none."""
    return cast("CoreSchema", _bounded(cast("dict[str, Any]", schema), is_outer=True))


def _bounded(schema: dict[str, Any], *, is_outer: bool) -> dict[str, Any]:
    kind = schema.get("type")
    if kind == "model" and not is_outer:  # a type that is for users bounds itself
        return schema
    if kind == "any":
        return cast(
            "dict[str, Any]",
            core_schema.no_info_after_validator_function(check_tree, core_schema.any_schema()),
        )
    for name, value in _DEFAULTS.get(str(kind), {}).items():
        if _SAME_SIDE.get(name) not in schema:
            schema.setdefault(name, value)
    for name, value in schema.items():
        if name not in _OPAQUE:
            schema[name] = _inside(value, is_outer=is_outer and kind != "model")
    return schema


def _inside(value: Any, *, is_outer: bool) -> Any:
    """Bound the schemas within a schema: one, a list, or a map by name."""
    if isinstance(value, list):
        return [_inside(item, is_outer=is_outer) for item in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    part = cast("dict[str, Any]", value)
    if isinstance(part.get("type"), str):
        return _bounded(part, is_outer=is_outer)
    return {name: _inside(item, is_outer=is_outer) for name, item in part.items()}


def check_tree(value: Any) -> Any:
    """Return a tree of maps, lists and plain values unchanged; ValueError if it is too large."""
    left: list[tuple[Any, int]] = [(value, 0)]
    num_values = num_chars = 0
    while left:
        item, depth = left.pop()
        num_values += 1
        if isinstance(item, str | bytes):
            num_chars += len(item)
        elif isinstance(item, dict):
            tree = cast("dict[Any, Any]", item)
            num_chars += sum(len(key) for key in tree if isinstance(key, str | bytes))
            left += [(inner, depth + 1) for inner in tree.values()]
        elif isinstance(item, list | tuple):
            left += [(inner, depth + 1) for inner in cast("list[Any]", item)]
        for what, number, most in (
            ("values", num_values + len(left), MAX_TREE_VALUES),
            ("characters", num_chars, MAX_TREE_CHARS),
            ("levels", depth, MAX_TREE_DEPTH),
        ):
            if number > most:
                raise ValueError(f"holds more than {most:,} {what}")
    return value
