"""Load a job's configuration: defaults, then the YAML file, then `key=value` overrides.

An unknown key is an error that names the closest known one.
"""

import difflib
import reprlib
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from ..wire.errors import ConfigError
from .job import JobConfig
from .yaml_values import MAX_DEPTH, read_argument, read_value, type_at

MAX_VALUES = 100_000
"""Values of a configuration, far more than any job has."""
_MAX_SHOWN = 2000
_MAX_KEY = 200
_PLAIN = (str, int, float, bool, type(None), date)


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> JobConfig:
    """Return the effective configuration of a YAML file and `section.key=value` overrides.

    Raises ConfigError, naming the key, for invalid input.
    """
    values = read_yaml(path) if path is not None else {}
    for override in overrides:
        apply_override(values, override)
    return parse_config(values)


def read_yaml(path: str | Path, model: type[BaseModel] = JobConfig) -> dict[str, Any]:
    """Read a YAML map from a file; `model` types its keys."""
    file = Path(path)
    if not file.is_file():
        raise ConfigError(
            f"there is no configuration file {str(file)!r}",
            hint="give the path of a YAML file; examples/ has one for each game",
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
            hint="begin with `model:` and `env:`; examples/ has one for each game",
        )
    return cast("dict[str, Any]", value)


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
            f"override {override!r} has no '='", hint="write it as key=value: learner.lr=1e-5"
        )
    *parents, last = path = key.strip().split(".")
    place = values
    for parent in parents:
        inner = place.setdefault(parent, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"override {override!r}: {parent!r} is a value, not a section")
        place = cast("dict[str, Any]", inner)
    place[last] = read_argument(text, f"override {override!r}", type_at(model, path))


def parse_config(values: dict[str, Any]) -> JobConfig:
    """Validate a tree of maps; ConfigError names the wrong key and alternatives."""
    check_keys(values)
    try:
        return JobConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_explain(error.errors()), hint="see `tinkermq config schema`") from error


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
            raise ConfigError(_explain(wrong), hint="see `tinkermq config schema`") from error


def _may_be_mended(problem: ErrorDetails) -> bool:
    """Whether further keys can fix it: one is missing, or keys of a section conflict."""
    if problem["type"] == "missing":
        return True
    model: Any = JobConfig
    for part in problem["loc"]:
        field = model.model_fields.get(part) if _is_section(model) else None
        model = field.annotation if field is not None else None
    return problem["type"] == "value_error" and _is_section(model)


def _is_section(annotation: Any) -> bool:
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
        left += [(f"{prefix}{str(key)[:64]}"[:256], depth + 1, one) for key, one in inner]


def _refuse_unknown(values: dict[str, Any], model: type[BaseModel], prefix: str) -> None:
    for key, value in values.items():
        field = model.model_fields.get(key)
        if field is None:
            shown = _first_leaf(key, value)[:_MAX_KEY]
            raise ConfigError(
                f"unknown configuration key {prefix}{shown}", hint=_closest(shown, prefix)
            )
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            if not isinstance(value, dict):
                raise ConfigError(f"{prefix}{key} is a section, got {reprlib.repr(value)}")
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
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            keys += all_keys(inner, f"{prefix}{name}.")
        else:
            keys.append(f"{prefix}{name}")
    return keys


def _closest(key: str, prefix: str) -> str:
    keys = all_keys()
    whole = f"{prefix}{key}"
    by_last = {known.rsplit(".", 1)[-1]: known for known in reversed(keys)}
    same_section = [known for known in keys if known.startswith(prefix)]
    near = difflib.get_close_matches(whole, same_section, n=1, cutoff=0.6)
    near = near or difflib.get_close_matches(whole, keys, n=1, cutoff=0.6)
    if not near:
        last = key.rsplit(".", 1)[-1]
        near = [by_last[name] for name in difflib.get_close_matches(last, list(by_last), n=1)]
    return f"did you mean {near[0]}?" if near else "see `tinkermq config schema` for all keys"


def _explain(problems: Sequence[ErrorDetails]) -> str:
    clauses: list[str] = []
    for problem in problems[:10]:
        where = ".".join(str(part) for part in problem["loc"])[:_MAX_KEY]
        text = problem["msg"].removeprefix("Value error, ")
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
