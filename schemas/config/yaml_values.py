"""Values of YAML, read by the type of their key: in files and in `key=value` alike.

- A text gets what is written: `name: 007`, `1.10`, `yes` and `2024-11-25` are these texts.
- A number may be written as YAML 1.2 or Python write it: `1e-5`, `1_000`, `0x1f`, `0o17`, `.inf`.
- A boolean is true or false, or yes, no, on or off.
- `null`, `~` and nothing at all stand for what is not set, where that may be.
- In a map or list of one's own (`env.kwargs`) there is no type: YAML's core schema (1.2) says what
  an unquoted value is. `1e-3` is a number there, `007` is 7, `yes` and `2024-11-25` are texts.
- What stands in quotes is a text; where a number is wanted, the one in it.
- Keys are texts, and none stands twice.

Aliases are refused: a few lines of them stand for more than any memory holds. libyaml's loader ends
the process at a text that nests too deep, so values are built from its events, which are counted.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

import yaml
from pydantic import BaseModel

from ..wire.errors import ConfigError

MAX_DEPTH = 50
_MAX_SHOWN = 2000
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # six times as fast

_NULL = frozenset({"", "~", "null", "Null", "NULL"})
_BOOLEANS = {
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_OTHER_BOOLEANS = {"yes": True, "on": True, "no": False, "off": False}
_INTEGER = re.compile(r"[-+]?[0-9]+")
_BASED = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_SPECIAL = re.compile(r"([-+]?)\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
_UNDERSCORED = re.compile(r"[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?(?:[eE][-+]?[0-9]+)?")
_MAX_DIGITS = 4000
_TAG = "tag:yaml.org,2002:"
_TAGS = frozenset({"str", "int", "float", "bool", "null", "map", "seq"})


def core_value(text: str) -> Any:
    """Return an unquoted text's value in YAML's core schema: null, boolean, number or text."""
    if text in _NULL:
        return None
    if text in _BOOLEANS:
        return _BOOLEANS[text]
    if len(text) > _MAX_DIGITS:
        return text
    if _INTEGER.fullmatch(text):
        return int(text)
    if _BASED.fullmatch(text):
        return int(text, 0)
    if _FLOAT.fullmatch(text):
        return float(text)
    if special := _SPECIAL.fullmatch(text):
        return float(f"{special[1]}inf") if special[1] is not None else float("nan")
    return text


def read_value(text: str, what: str, wanted: Any = Any) -> Any:
    """Return a YAML text's value for a key of type `wanted`; ConfigError names `what`."""
    try:
        events = iter(yaml.parse(text.removeprefix("\ufeff"), Loader=_LOADER))
        return _Builder(events, what).document(wanted)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        hint = "indent with spaces: YAML takes no tabs there" if "\t" in text else ""
        raise ConfigError(
            f"{what} is not valid YAML: {str(error)[:_MAX_SHOWN]}", hint=hint
        ) from error


def read_argument(text: str, what: str, wanted: Any) -> Any:
    """Return the value of `key=value` for a key of type `wanted`.

    For a text key it is taken as written, with `#`, `:` and brackets, without enclosing quotes.
    """
    kinds = _kinds(wanted)
    if not text:
        return ""
    if _takes_text(kinds) and not any(_is_container(kind) for kind in kinds):
        return _argument_text(text, kinds)
    if text.endswith(":") and text.isprintable() and " " not in text:
        return text  # a word such as `broker:`, and no map
    return read_value(text, what, wanted)


def _argument_text(text: str, kinds: Sequence[Any]) -> Any:
    if text[0] in "\"'" and text[-1] == text[0]:
        try:
            value = read_value(text, "", str)
        except ConfigError:
            return text
        return value if isinstance(value, str) else text
    return _scalar(text, kinds)


def write_yaml(values: Mapping[str, Any]) -> str:
    """Return a map as YAML that `read_value` reads back equally."""
    return yaml.dump(dict(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


class _Dumper(yaml.SafeDumper):
    """Quotes texts that would otherwise be read as another type."""


def _quoted(_: _Dumper, text: str) -> yaml.ScalarNode:
    style = None if isinstance(core_value(text), str) else "'"
    return yaml.ScalarNode(f"{_TAG}str", text, style=style)


_Dumper.add_representer(str, _quoted)


def type_at(model: type[BaseModel] | None, path: Sequence[str]) -> Any:
    """Return the type of a key, given by its path; Any within a free map."""
    wanted: Any = Any if model is None else model
    for name in path:
        wanted = _type_of_key(wanted, name)
    return wanted


class _Builder:
    """Builds values from a parser's events."""

    def __init__(self, events: Iterator[Any], what: str) -> None:
        self._events = events
        self._what = what
        self._depth = 0

    def document(self, wanted: Any) -> Any:
        """Return the single value of a stream, None if empty."""
        value: Any = None
        num_documents = 0
        for event in self._events:
            if not isinstance(event, yaml.DocumentStartEvent):
                continue
            num_documents += 1
            if num_documents > 1:
                raise ConfigError(
                    f"{self._what} holds more than one document",
                    hint="leave one, without `---` between",
                )
            value = self._value(next(self._events), wanted)
        return value

    def _value(self, event: Any, wanted: Any) -> Any:
        if isinstance(event, yaml.AliasEvent):
            raise ConfigError(
                f"{self._what} uses the alias *{str(event.anchor)[:64]}",
                hint="write out what it stands for",
            )
        tag = self._tag(event)
        if isinstance(event, yaml.ScalarEvent):
            return self._read_scalar(event, tag, wanted)
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ConfigError(f"{self._what} nests deeper than {MAX_DEPTH} levels")
        is_list = isinstance(event, yaml.SequenceStartEvent)
        value = self._list(wanted) if is_list else self._map(wanted)
        self._depth -= 1
        return value

    def _tag(self, event: Any) -> str:
        tag = str(event.tag or "")
        if tag in ("", "!"):
            return "str" if tag and isinstance(event, yaml.ScalarEvent) else ""
        name = tag.removeprefix(_TAG)
        if name not in _TAGS:
            raise ConfigError(
                f"{self._what} uses the tag {tag[:64]!r} in line {event.start_mark.line + 1}",
                hint="leave it out: values are texts, numbers, booleans, lists and maps",
            )
        return name

    def _read_scalar(self, event: Any, tag: str, wanted: Any) -> Any:
        text, is_plain = str(event.value), not event.style
        if tag in ("int", "float", "bool", "null"):
            return core_value(text)
        return _scalar(text, _kinds(wanted)) if is_plain and not tag else text

    def _list(self, wanted: Any) -> list[Any]:
        values: list[Any] = []
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            values.append(self._value(event, _type_of_item(wanted, len(values))))
        return values

    def _map(self, wanted: Any) -> dict[str, Any]:
        values: dict[str, Any] = {}
        lines: dict[str, int] = {}
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            line = int(event.start_mark.line) + 1
            if not isinstance(event, yaml.ScalarEvent | yaml.AliasEvent):
                raise ConfigError(f"{self._what} has a key in line {line} that is no text")
            key = str(self._value(event, str))
            if key in values:
                raise ConfigError(
                    f"{self._what} has the key {key[:64]!r} twice, in lines {lines[key]} and "
                    f"{line}",
                    hint="leave one of them",
                )
            lines[key] = line
            values[key] = self._value(next(self._events), _type_of_key(wanted, key))
        return values


def _scalar(text: str, kinds: Sequence[Any]) -> Any:
    """Return an unquoted text as the first type that fits."""
    value = core_value(text)
    if Any in kinds or (value is None and NoneType in kinds):
        return value
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    wants_number = int in kinds or float in kinds
    if (is_number and wants_number) or (isinstance(value, bool) and bool in kinds):
        return value
    if _takes_text(kinds):
        return text
    if wants_number and _UNDERSCORED.fullmatch(text):
        return core_value(text.replace("_", ""))
    if bool in kinds and text.lower() in _OTHER_BOOLEANS:
        return _OTHER_BOOLEANS[text.lower()]
    return text if isinstance(value, bool) and wants_number else value


def _kinds(wanted: Any) -> list[Any]:
    """Return the types that a key may have, from unions and annotations."""
    origin = get_origin(wanted)
    if origin is Annotated:
        return _kinds(get_args(wanted)[0])
    if origin in (Union, UnionType):
        return [kind for one in get_args(wanted) for kind in _kinds(one)]
    return [wanted]


def _takes_text(kinds: Sequence[Any]) -> bool:
    return any(
        kind is str
        or (get_origin(kind) is Literal and any(isinstance(one, str) for one in get_args(kind)))
        for kind in kinds
    )


def _is_container(kind: Any) -> bool:
    return kind is Any or get_origin(kind) in (list, tuple, dict) or _is_section(kind)


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _type_of_item(wanted: Any, number: int) -> Any:
    for kind in _kinds(wanted):
        arguments = get_args(kind)
        if get_origin(kind) is list and arguments:
            return arguments[0]
        if get_origin(kind) is tuple and arguments:
            return arguments[min(number, len(arguments) - 1)]
    return Any


def _type_of_key(wanted: Any, key: str) -> Any:
    for kind in _kinds(wanted):
        if _is_section(kind):
            field = cast("type[BaseModel]", kind).model_fields.get(key)
            return Any if field is None else field.annotation
        if get_origin(kind) is dict:
            return get_args(kind)[1]
    return Any
