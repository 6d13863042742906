"""Whether a configuration says all that a job needs to start."""

from typing import Any, cast

from ...schemas.wire.errors import ConfigError

_LEARNT = (("env", "game"), ("agent", "command"), ("agent", "client"), ("sft", "data"))
"""Keys that say what a job learns."""


def is_complete(tree: dict[str, Any]) -> bool:
    """Whether a job can start: there is a model, and a game, programs or conversations."""
    return bool(value_of(tree, "model", "path")) and any(
        value_of(tree, section, key) for section, key in _LEARNT
    )


def value_of(tree: dict[str, Any], section: str, key: str) -> Any:
    """Return a value of a section, or None; raises ConfigError for a section that is none."""
    inner: Any = tree.get(section) or {}
    if not isinstance(inner, dict):
        raise ConfigError(f"{section} is a section, got {inner!r}")
    return cast("dict[str, Any]", inner).get(key)
