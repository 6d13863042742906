"""The arguments of OpenTinker's `run_inference`, as those of ours."""

import inspect
from collections.abc import Collection, Mapping
from typing import Any

from ...schemas.wire.errors import ConfigError
from .opentinker_keys import tell_needless

_SERVED = "the model that is served says it"
_NEEDLESS = {
    "env_endpoint": "the game is hosted in this process, or by the pool",
    "tokenizer_path": _SERVED,
    "max_context_length": _SERVED,
    "tensor_parallel_size": _SERVED,
    "gpu_memory_utilization": _SERVED,
    "trust_remote_code": _SERVED,
}
_TURNS = ("max_user_turns", "max_assistant_turns")


def translate_inference(
    options: Mapping[str, Any], game_class: type | None, ours: Collection[str]
) -> dict[str, Any]:
    """Return options of `ours`: limits of turns are one, arguments of the game go to it.

    What needs no saying is left out with one warning. An argument is the game's if its constructor
    names it, and we do not. Raises ConfigError for limits that contradict each other.
    """
    rest = dict(options)
    needless = {name: _NEEDLESS[name] for name in _NEEDLESS if rest.pop(name, None) is not None}
    if needless:
        tell_needless(needless)
    limits = [limit for name in _TURNS if (limit := rest.pop(name, None))]
    if limits and rest.get("max_turns") is not None:
        raise ConfigError(
            f"max_turns={rest['max_turns']} and {' / '.join(_TURNS)} both bound the turns",
            hint="keep max_turns",
        )
    if limits:
        rest["max_turns"] = min(limits)
    own = {
        name: rest.pop(name)
        for name in _of_constructor(game_class)
        if name in rest and name not in ours
    }
    if own:
        rest["game_kwargs"] = {**(rest.get("game_kwargs") or {}), **own}
    return rest


def _of_constructor(game_class: type | None) -> list[str]:
    """Return what a game's constructor names."""
    if game_class is None:
        return []
    return [
        name
        for name, parameter in inspect.signature(game_class).parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
