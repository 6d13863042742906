"""Trees of maps, such as unvalidated configurations."""

from collections.abc import Mapping
from typing import Any, cast


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` overlaid with the leaves of `over`."""
    result = dict(base)
    for key, value in over.items():
        inner = result.get(key)
        if isinstance(inner, Mapping) and isinstance(value, Mapping):
            result[key] = merged(cast("Mapping[str, Any]", inner), cast("Mapping[str, Any]", value))
        else:
            result[key] = value
    return result
