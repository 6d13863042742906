"""What users hand over as a configuration: maps, namespaces, dataclasses, OmegaConf's trees."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, cast

from ...schemas.wire.errors import ConfigError
from ..validation.names import did_you_mean
from .opentinker_keys import TABLE


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


def refuse_unknown_options(
    function: Callable[..., Any], options: Mapping[str, Any], *also: Callable[..., Any]
) -> None:
    """Raise ConfigError for an option that a function does not have, with the closest it has.

    What it hands its options on to are `also`.
    """
    parameters = [inspect.signature(each).parameters.values() for each in (function, *also)]
    known = [one.name for one in chain(*parameters) if one.kind is not one.VAR_KEYWORD]
    for name, value in options.items():
        if name in known:
            continue
        refusal = TABLE[name].refusal if name in TABLE else ""
        raise ConfigError(
            f"{function.__name__.removesuffix('_async')} has no option {name} (given {value!r})",
            hint=refusal or did_you_mean(name, known, otherwise=f"it has {', '.join(known)}"),
        )


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
