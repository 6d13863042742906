"""Choosing a function by its name in the configuration."""

import difflib
from collections.abc import Mapping
from typing import TypeVar

from ...schemas.wire.errors import ConfigError

Choice = TypeVar("Choice")


def choose(table: Mapping[str, Choice], key: str, name: str) -> Choice:
    """Give the entry called `name`; the error names the configuration key and the closest name."""
    if name in table:
        return table[name]
    close = difflib.get_close_matches(name, table, n=1)
    raise ConfigError(
        f"{key}={name} does not exist",
        hint=f"did you mean {close[0]}?" if close else f"choose one of {', '.join(table)}",
    )
