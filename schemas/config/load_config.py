"""Load a run's configuration: defaults, then the YAML file, then `key=value` overrides.

An unknown key is an error that names the closest known one.
"""

import difflib
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeGuard, Union, cast, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from ..version import VERSION
from ..wire.codec import merged
from ..wire.errors import ConfigError
from ..wire.message import requirement
from .job import JobConfig
from .sections import given_section

# Values of YAML, read by the type of their key: in files and in `key=value` alike.
#
# - A text gets what is written: `name: 007`, `1.10`, `yes` and `2024-11-25` are these texts.
# - A number may be written as YAML 1.2 or Python write it: `1e-5`, `1_000`, `0x1f`, `0o17`, `.inf`.
# - A boolean is true or false, or yes, no, on or off.
# - `null`, `~` and nothing at all stand for what is not set, where that may be.
# - In a map or list of one's own (`env.kwargs`) there is no type: YAML's core schema (1.2) says
#   what an unquoted value is. `1e-3` is a number there, `007` is 7, `yes` and `2024-11-25` are
#   texts.
# - What stands in quotes is a text; where a number is wanted, the one in it.
# - Keys are texts, and none stands twice.
#
# Aliases are refused: a few lines of them stand for more than any memory holds. libyaml's loader
# ends the process at a text that nests too deep, so values are built from its events, which are
# counted.

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


def read_value(text: str, what: str, expected: Any = Any) -> Any:
    """Return a YAML text's value for a key of type `expected`; ConfigError names `what`."""
    try:
        events = iter(yaml.parse(text.removeprefix("\ufeff"), Loader=_LOADER))
        return _Builder(events, what).document(expected)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        hint = "a key stands on a line of its own, below its neighbours; quote a text with `: `"
        if "\t" in text:
            hint = "indent with spaces: YAML takes no tabs there"
        raise ConfigError(
            f"{what} is not valid YAML: {_yaml_problem(error)[:_MAX_SHOWN]}", hint=hint
        ) from error


def _yaml_problem(error: Exception) -> str:
    """Return what a parser of YAML found, and in which line."""
    mark: Any = getattr(error, "problem_mark", None)
    if mark is None:
        return str(error)
    problem = " ".join(str(getattr(error, name) or "") for name in ("context", "problem"))
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem.strip()}"


def read_argument(text: str, what: str, expected: Any) -> Any:
    """Return the value of `key=value` for a key of type `expected`.

    For a text key it is taken as written, with `#`, `:` and brackets, without enclosing quotes.
    """
    kinds = _kinds(expected)
    if not text:
        return ""
    if _takes_text(kinds) and not any(_is_container(kind) for kind in kinds):
        return _argument_text(text, kinds)
    if text.endswith(":") and text.isprintable() and " " not in text:
        return text  # a word such as `broker:`, and no map
    return read_value(text, what, expected)


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
    untyped: Any = yaml  # its stubs leave a type open
    options = {"sort_keys": False, "allow_unicode": True, "width": 100}
    return str(untyped.dump(dict(values), Dumper=_Dumper, **options))


class _Dumper(yaml.SafeDumper):
    """Quotes texts that would otherwise be read as another type."""


def _quoted(_: _Dumper, text: str) -> yaml.ScalarNode:
    style = None if isinstance(core_value(text), str) else "'"
    return yaml.ScalarNode(f"{_TAG}str", text, style=style)


_Dumper.add_representer(str, _quoted)


def type_at(model: type[BaseModel] | None, path: Sequence[str]) -> Any:
    """Return the type of a key, given by its path; Any within a free map."""
    expected: Any = Any if model is None else model
    for name in path:
        expected = _type_of_key(expected, name)
    return expected


class _Builder:
    """Builds values from a parser's events."""

    def __init__(self, events: Iterator[Any], what: str) -> None:
        self._events = events
        self._what = what
        self._depth = 0

    def document(self, expected: Any) -> Any:
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
            value = self._value(next(self._events), expected)
        return value

    def _value(self, event: Any, expected: Any) -> Any:
        if isinstance(event, yaml.AliasEvent):
            raise ConfigError(
                f"{self._what} uses the alias *{str(event.anchor)[:64]}",
                hint="write out what it stands for",
            )
        tag = self._tag(event)
        if isinstance(event, yaml.ScalarEvent):
            text, is_plain = str(event.value), not event.style
            if tag in ("int", "float", "bool", "null"):
                return core_value(text)
            return _scalar(text, _kinds(expected)) if is_plain and not tag else text
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ConfigError(f"{self._what} nests deeper than {MAX_DEPTH} levels")
        is_list = isinstance(event, yaml.SequenceStartEvent)
        value = self._list(expected) if is_list else self._map(expected)
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

    def _list(self, expected: Any) -> list[Any]:
        values: list[Any] = []
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            values.append(self._value(event, _type_of_item(expected, len(values))))
        return values

    def _map(self, expected: Any) -> dict[str, Any]:
        values: dict[str, Any] = {}
        lines: dict[str, int] = {}
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            line = int(event.start_mark.line) + 1
            if not isinstance(event, yaml.ScalarEvent | yaml.AliasEvent):
                raise ConfigError(f"{self._what} has a key in line {line} that is not text")
            key = str(self._value(event, str))
            if key in values:
                raise ConfigError(
                    f"{self._what} has the key {key[:64]!r} twice, in lines {lines[key]} and "
                    f"{line}",
                    hint="leave one of them",
                )
            lines[key] = line
            values[key] = self._value(next(self._events), _type_of_key(expected, key))
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


def _kinds(expected: Any) -> list[Any]:
    """Return the types that a key may have, from unions and annotations."""
    origin = get_origin(expected)
    if origin is Annotated:
        return _kinds(get_args(expected)[0])
    if origin in (Union, UnionType):
        return [kind for arg in get_args(expected) for kind in _kinds(arg)]
    return [expected]


def _takes_text(kinds: Sequence[Any]) -> bool:
    return any(
        kind is str
        or (get_origin(kind) is Literal and any(isinstance(arg, str) for arg in get_args(kind)))
        for kind in kinds
    )


def _is_container(kind: Any) -> bool:
    return kind is Any or get_origin(kind) in (list, tuple, dict) or _is_section(kind)


def _type_of_item(expected: Any, number: int) -> Any:
    for kind in _kinds(expected):
        arguments = get_args(kind)
        if get_origin(kind) is list and arguments:
            return arguments[0]
        if get_origin(kind) is tuple and arguments:
            return arguments[min(number, len(arguments) - 1)]
    return Any


def _type_of_key(expected: Any, key: str) -> Any:
    for kind in _kinds(expected):
        if _is_section(kind):
            field = kind.model_fields.get(key)
            return Any if field is None else field.annotation
        if get_origin(kind) is dict:
            return get_args(kind)[1]
    return Any


MAX_VALUES = 100_000
"""Values of a configuration, far more than any run has."""
_MAX_KEY = 200
_HOW_TO_BEGIN = "begin with `model:` and `env:`, as files do that `tinkermq env new NAME` writes"
_PLAIN = (str, int, float, bool, type(None), date)


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> JobConfig:
    """Return the effective configuration of a YAML file and `section.key=value` overrides.

    Raises ConfigError, naming the key, for invalid input.
    """
    return parse_config(with_overrides(read_yaml(path) if path is not None else {}, overrides))


def with_overrides(values: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return a configuration with `section.key=value` overrides; ConfigError for a wrong one."""
    for override in overrides:
        apply_override(values, override)
    return _with_one_length(values, read_overrides(overrides))


def with_changes(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration overlaid with the leaves of `changes`."""
    return _with_one_length(merged(values, changes), changes)


def _with_one_length(values: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Let a changed `training.num_epochs` take the place of `num_steps`, and the other way round.

    Beside each other one has no effect, and they are refused.
    """
    section = given_section(changes, "training")
    changed = [key for key in ("num_steps", "num_epochs") if section.get(key) is not None]
    if len(changed) != 1:
        return values
    other = "num_steps" if changed == ["num_epochs"] else "num_epochs"
    training = given_section(values, "training")
    return {**values, "training": {key: training[key] for key in training if key != other}}


def read_yaml(path: str | Path, model: type[BaseModel] = JobConfig) -> dict[str, Any]:
    """Read a YAML map from a file; `model` types its keys."""
    file = Path(path)
    if not file.is_file():
        names = {place.stem: place.name for place in file.parent.glob("*.y*ml")}
        near = [names[stem] for stem in difflib.get_close_matches(file.stem, names, n=1)]
        raise ConfigError(
            f"{str(file)!r} is a folder, not a configuration file"
            if file.is_dir()
            else f"the configuration file {str(file)!r} does not exist",
            hint=f"did you mean {file.with_name(near[0])}?"
            if near
            else "give the path of a YAML file; `tinkermq env new NAME` writes one with a game",
        )
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{file} is not UTF-8: {error.reason} at byte {error.start}",
            hint="save it as UTF-8 text",
        ) from error
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
    return parse_yaml(text, str(file), model)


def parse_yaml(text: str, what: str, model: type[BaseModel] = JobConfig) -> dict[str, Any]:
    """Return the YAML map of a text, empty for an empty one; raises ConfigError.

    Values are read by the types of `model`, see `yaml_values`.
    """
    value = read_value(text, what, model)
    if value is None:
        return {}
    if not isinstance(value, dict):
        kind = "list" if isinstance(value, list) else "single value"
        raise ConfigError(
            f"{what} holds a {kind}, not a map of keys to values",
            hint=_HOW_TO_BEGIN,
        )
    values = cast("dict[str, Any]", value)
    _drop_empty_sections(values, model)
    return values


def _drop_empty_sections(values: dict[str, Any], model: type[BaseModel]) -> None:
    """Take out sections without a value, whose keys are commented out: they have their defaults."""
    for key, field in model.model_fields.items():
        if key not in values or not _is_section(field.annotation):
            continue
        if values[key] is None:
            del values[key]
        elif isinstance(values[key], dict):
            _drop_empty_sections(cast("dict[str, Any]", values[key]), field.annotation)


def apply_override(
    values: dict[str, Any], override: str, model: type[BaseModel] | None = JobConfig
) -> None:
    """Set `section.key=value` in a tree of maps.

    The value is read as in a file, by the key's type in `model` (None: a free map). Texts need no
    quotes.
    """
    key, separator, text = override.partition("=")
    if not separator or not key.strip():
        raise ConfigError(
            f"override {override!r} has no '='",
            hint="write key=value, without blanks: learner.lr=1e-5",
        )
    *parents, last = path = key.strip().split(".")
    place = values
    for parent in parents:
        inner = place.setdefault(parent, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"override {override!r}: {parent!r} is a value, not a section")
        place = cast("dict[str, Any]", inner)
    place[last] = read_argument(text, f"override {override!r}", type_at(model, path))


def read_overrides(
    overrides: Sequence[str], model: type[BaseModel] | None = JobConfig
) -> dict[str, Any]:
    """Return the tree that overrides make; `model` and errors as for `apply_override`."""
    values: dict[str, Any] = {}
    for override in overrides:
        apply_override(values, override, model)
    return values


def parse_config(values: dict[str, Any]) -> JobConfig:
    """Validate a tree of maps; ConfigError names the wrong key and alternatives."""
    check_keys(values)
    try:
        return JobConfig.model_validate(values)
    except ValidationError as error:
        raise _refusal(error.errors()) from error


def check_keys(values: dict[str, Any]) -> None:
    """Refuse unknown keys and invalid values of an incomplete configuration.

    Rules between keys are checked once it is complete. Raises ConfigError, naming the key and its
    value, or the closest known key.
    """
    _refuse_strange(values)
    _refuse_unknown(values, JobConfig, "")
    try:
        JobConfig.model_validate(values)
    except ValidationError as error:
        wrong = [problem for problem in error.errors() if not _may_be_mended(problem)]
        if wrong:
            raise _refusal(wrong) from error


def _may_be_mended(problem: ErrorDetails) -> bool:
    """Return whether further keys can fix it: one is missing, or keys of a section conflict."""
    if problem["type"] == "missing":
        return True
    model: Any = JobConfig
    for part in problem["loc"]:
        field = model.model_fields.get(str(part)) if _is_section(model) else None
        model = field.annotation if field is not None else None
    return problem["type"] == "value_error" and _is_section(model)


def _is_section(annotation: Any) -> TypeGuard[type[BaseModel]]:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _refuse_strange(values: dict[str, Any]) -> None:
    """Raise ConfigError for values outside of JSON, and for too many values.

    A configuration may arrive as msgpack with arrays, bytes and other keys.
    """
    left: list[tuple[str, int, Any]] = [("", 0, values)]
    num_values = 0
    while left:
        (where, depth, value), num_values = left.pop(), num_values + 1
        inner: list[tuple[Any, Any]] = []
        if isinstance(value, dict):
            inner = list(cast("dict[Any, Any]", value).items())
            strange = next((key for key, _ in inner if not isinstance(key, str)), None)
            if strange is not None:
                raise ConfigError(f"{reprlib.repr(strange)} in {where or 'it'} cannot be a key")
        elif isinstance(value, list | tuple):
            inner = list(enumerate(cast("list[Any]", value)))
        elif not isinstance(value, _PLAIN):
            raise ConfigError(f"{where} cannot be a {type(value).__name__}")
        if depth > MAX_DEPTH or num_values + len(left) + len(inner) > MAX_VALUES:
            raise ConfigError(
                f"the configuration holds more than {MAX_VALUES:,} values or {MAX_DEPTH} levels"
            )
        prefix = f"{where}." if where else ""
        left += [(f"{prefix}{str(key)[:64]}"[:256], depth + 1, item) for key, item in inner]


def _refuse_unknown(values: dict[str, Any], model: type[BaseModel], prefix: str) -> None:
    for key, value in values.items():
        field = model.model_fields.get(key)
        if field is None:
            shown = _first_leaf(key, value)[:_MAX_KEY]
            raise ConfigError(
                f"unknown configuration key {prefix}{shown}", hint=_closest(shown, prefix)
            )
        inner = field.annotation
        if _is_section(inner):
            if not isinstance(value, dict):
                raise ConfigError(
                    f"{prefix}{key} is a section, got {reprlib.repr(value)}",
                    hint=f"`tinkermq config schema {prefix}{key}` lists its keys",
                )
            _refuse_unknown(cast("dict[str, Any]", value), inner, f"{prefix}{key}.")


def _first_leaf(key: str, value: Any) -> str:
    """Return the key with its first inner key, dotted: `trainig.num_steps`."""
    while isinstance(value, dict) and value:
        inner, value = next(iter(cast("dict[Any, Any]", value).items()))
        key = f"{key}.{inner}"
    return key


def all_keys(model: type[BaseModel] = JobConfig, prefix: str = "") -> list[str]:
    """Return every dotted key of the tree, in order."""
    keys: list[str] = []
    for name, field in model.model_fields.items():
        inner = field.annotation
        if _is_section(inner):
            keys += all_keys(inner, f"{prefix}{name}.")
        else:
            keys.append(f"{prefix}{name}")
    return keys


def _closest(key: str, prefix: str) -> str:
    """Return a hint for an unknown key: a near key of its section, or a near last word of any."""
    keys = all_keys()
    by_last = {known.rsplit(".", 1)[-1]: known for known in reversed(keys)}
    in_section = {known.removeprefix(prefix): known for known in keys if known.startswith(prefix)}
    for typed, names in ((key, in_section), (key.rsplit(".", 1)[-1], by_last)):
        if near := difflib.get_close_matches(typed, list(names), n=1):
            return f"did you mean {names[near[0]]}?"
    return f"see `tinkermq config schema` for all keys of tinkermq {VERSION}"


def _refusal(problems: Sequence[ErrorDetails]) -> ConfigError:
    """Return the error of problems, whose hint leads to the text of the first one's key."""
    first = problems[0]
    if first["type"] == "missing" and len(first["loc"]) == 1:
        return ConfigError(_explain(problems), hint=_HOW_TO_BEGIN)
    key, model = "", cast("Any", JobConfig)
    for part in first["loc"]:
        if not _is_section(model) or str(part) not in model.model_fields:
            break
        key, model = f"{key}.{part}".strip("."), model.model_fields[str(part)].annotation
    text = _explain(problems)
    if not key:  # a rule between keys, which its text names
        named = re.findall(r"[a-z_]+(?:\.[a-z_]+)+", text)
        key = next((word for word in named if word in all_keys()), "")
    hint = f"`tinkermq config schema {key}` describes it" if key else "see `tinkermq config schema`"
    return ConfigError(text, hint=hint)


def _explain(problems: Sequence[ErrorDetails]) -> str:
    clauses: list[str] = []
    for problem in problems[:10]:
        where = ".".join(str(part) for part in problem["loc"])[:_MAX_KEY]
        text = requirement(problem)
        if problem["type"] == "missing":
            clauses.append(f"{where} is missing")
        elif problem["type"] == "value_error":
            clauses.append(f"{where}: {text}" if where else text)
        else:
            clauses.append(f"{where}={_shown(problem['input'])}: {text}")
        if sum(map(len, clauses)) > _MAX_SHOWN:
            break
    return "; ".join(clauses)[: 2 * _MAX_SHOWN]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_KEY else reprlib.repr(value)
