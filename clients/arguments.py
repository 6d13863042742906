"""What users hand over as a configuration: maps, namespaces, dataclasses, OmegaConf's trees."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from ..schemas.errors import ConfigError


def as_tree(value: Any) -> dict[str, Any]:
    """Return any object with named values as plain nested maps.

    Raises ConfigError for something that has no names.
    """
    if value is None:
        return {}
    tree = _plain(value)
    if not isinstance(tree, dict):
        raise ConfigError(
            f"a configuration has named values, this is a {type(value).__name__}",
            hint="give a dict, an argparse.Namespace, a dataclass or an OmegaConf tree",
        )
    return cast("dict[str, Any]", tree)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (str, bytes, int, float, bool)):
        return value
    if isinstance(value, Mapping):
        fields = cast("Mapping[Any, Any]", value)
        return {str(key): _plain(inner) for key, inner in fields.items()}
    if isinstance(value, Sequence):
        return [_plain(inner) for inner in cast("Sequence[Any]", value)]
    if hasattr(value, "__fspath__"):
        return str(value)
    if hasattr(value, "__dict__") and not callable(value):
        attributes = cast("dict[str, Any]", vars(value))
        return {key: _plain(inner) for key, inner in attributes.items() if not key.startswith("_")}
    return value
