"""Runs beside each other: where their configurations differ."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

MAX_RUNS = 20
"""Runs that one page lays over each other."""
_OF_THE_RUN = frozenset({"name", "tags", "group", "notes"})
"""What differs anyway."""


class ConfigDifference(NamedTuple):
    """One key of the configuration."""

    key: str
    """Dotted."""
    values: list[str | None]
    """By run, as JSON; None where the run has no such key."""


def differences(configs: Sequence[Mapping[str, Any]]) -> list[ConfigDifference]:
    """Return the keys in which configurations differ, by name."""
    flat = [_flat(config) for config in configs]
    keys = sorted(set[str]().union(*flat) - _OF_THE_RUN)
    found = (ConfigDifference(key, [one.get(key) for one in flat]) for key in keys)
    return [one for one in found if len(set(one.values)) > 1]


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return dotted keys and their values as JSON; an empty section is a value."""
    told: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            told |= _flat(cast("Mapping[str, Any]", value), f"{prefix}{key}.")
        else:
            told[f"{prefix}{key}"] = json.dumps(value, ensure_ascii=False, default=repr)
    return told
