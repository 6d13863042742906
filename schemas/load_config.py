"""Read a job's configuration: defaults, then the YAML file, then `key=value` overrides.

An unknown key is an error that names the closest known one.
"""

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import yaml
from pydantic import BaseModel, ValidationError

from .config import JobConfig
from .errors import ConfigError

MAX_VALUES = 100_000
"""Values of a configuration, far more than any job has."""


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> JobConfig:
    """Return the effective configuration of a YAML file and `section.key=value` overrides.

    Raises ConfigError, naming the key, for anything that cannot be used.
    """
    values = read_yaml(path) if path is not None else {}
    for override in overrides:
        apply_override(values, override)
    return parse_config(values)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Read a YAML map from a file."""
    file = Path(path)
    if not file.is_file():
        raise ConfigError(
            f"there is no configuration file {str(file)!r}",
            hint="give the path of a YAML file; examples/ has one for each game",
        )
    return parse_yaml(file.read_text(encoding="utf-8"), str(file))


def parse_yaml(text: str, what: str) -> dict[str, Any]:
    """Return the YAML map that a text holds, none for an empty one; raises ConfigError."""
    value = _load(text, what)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(
            f"{what} holds a {type(value).__name__}, not a map of keys to values",
            hint="begin with `model:` and `env:`; examples/ has one for each game",
        )
    return cast("dict[str, Any]", value)


def _load(text: str, what: str) -> Any:
    """Read YAML of a bounded size: a few lines of aliases stand for more than any memory holds."""
    try:
        value: Any = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{what} is not valid YAML: {error}") from error
    left, num_values = [value], 0
    while left:
        one, num_values = left.pop(), num_values + 1
        if num_values > MAX_VALUES:
            raise ConfigError(
                f"{what} holds more than {MAX_VALUES:,} values",
                hint="what an alias stands for counts each time",
            )
        if isinstance(one, dict):
            left += cast("dict[Any, Any]", one).values()
        elif isinstance(one, list):
            left += cast("list[Any]", one)
    return value


def apply_override(values: dict[str, Any], override: str) -> None:
    """Set `section.key=value` in a tree of maps; the value is read as YAML."""
    key, separator, text = override.partition("=")
    if not separator or not key.strip():
        raise ConfigError(
            f"override {override!r} has no '='", hint="write it as key=value: learner.lr=1e-5"
        )
    *parents, last = key.strip().split(".")
    place = values
    for parent in parents:
        inner = place.setdefault(parent, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"override {override!r}: {parent!r} is a value, not a section")
        place = cast("dict[str, Any]", inner)
    place[last] = _scalar(text, f"override {override!r}")


def _scalar(text: str, what: str) -> Any:
    """Read a value as YAML, taking 1e-5 as the number that people mean."""
    value = _load(text, what) if text else ""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def parse_config(values: dict[str, Any]) -> JobConfig:
    """Validate a tree of maps; ConfigError says which key is wrong and what it could be."""
    _refuse_unknown(values, JobConfig, "")
    try:
        return JobConfig.model_validate(_numbers(values))
    except ValidationError as error:
        raise ConfigError(_explain(error), hint="see `tinkermq config schema`") from error


def check_keys(values: dict[str, Any]) -> None:
    """Refuse unknown keys of a configuration that is not complete yet.

    Raises ConfigError, naming the closest known key.
    """
    _refuse_unknown(values, JobConfig, "")


def _numbers(value: Any) -> Any:
    """YAML 1.1 reads 1e-5 as a string; give such strings their number, except in free maps."""
    if isinstance(value, dict):
        return {key: _numbers(inner) for key, inner in cast("dict[str, Any]", value).items()}
    if isinstance(value, str) and value[:1].isdigit() and "e" in value.lower():
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _refuse_unknown(values: dict[str, Any], model: type[BaseModel], prefix: str) -> None:
    for key, value in values.items():
        field = model.model_fields.get(key)
        if field is None:
            raise ConfigError(
                f"unknown configuration key {prefix}{key!s}", hint=_closest(key, prefix)
            )
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            if not isinstance(value, dict):
                raise ConfigError(f"{prefix}{key} is a section, got {value!r}")
            _refuse_unknown(cast("dict[str, Any]", value), inner, f"{prefix}{key}.")


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
        near = [by_last[name] for name in difflib.get_close_matches(key, list(by_last), n=1)]
    return f"did you mean {near[0]}?" if near else "see `tinkermq config schema` for all keys"


def _explain(error: ValidationError) -> str:
    clauses: list[str] = []
    for problem in error.errors():
        where = ".".join(str(part) for part in problem["loc"])
        text = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "missing":
            clauses.append(f"{where} is missing")
        elif problem["type"] == "value_error":
            clauses.append(f"{where}: {text}" if where else text)
        else:
            clauses.append(f"{where}={problem['input']!r}: {text}")
    return "; ".join(clauses)
