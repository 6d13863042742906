"""What of the caller's environment goes with a job: secrets, sealed, and what wandb is told."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, cast

from ..schemas.config.algorithm import is_endpoint
from ..schemas.job import NOTIFY_URL, TEACHER_KEY, WANDB_KEY, SecretName
from ..schemas.wire.codec import merged
from ..schemas.wire.errors import ConfigError

_OF_WANDB = {
    "WANDB_ENTITY": ("tracking", "entity"),
    "WANDB_PROJECT": ("project",),
    "WANDB_RUN_GROUP": ("group",),
    "WANDB_TAGS": ("tags",),
    "WANDB_NOTES": ("notes",),
}
_ON_NODES = ("WANDB_BASE_URL",)
_MODES = {"online": "wandb", "offline": "wandb-offline"}


def with_tracker_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with what $WANDB_… says here, where it logs to wandb and is silent.

    Raises ConfigError for a variable that has to be set where the learner runs.
    """
    backends = [str(one) for one in config.get("logger_backends") or ()]
    if not {"wandb", "wandb-offline"} & set(backends):
        return dict(config)
    for name in _ON_NODES:
        if os.environ.get(name):
            raise ConfigError(
                f"{name} is set here, but the learner logs to wandb from one of the pool's nodes",
                hint=f"have it set in the environment of the nodes (node.env), and unset {name} "
                "here, or log to wandb-offline",
            )
    changes: dict[str, Any] = {"logger_backends": _in_mode(backends)}
    for name, path in _OF_WANDB.items():
        value = os.environ.get(name, "").strip()
        if value and not _is_set(config, path):
            told: Any = [one.strip() for one in value.split(",")] if path == ("tags",) else value
            changes = merged(changes, _nested(path, told))
    return merged(dict(config), changes)


def _in_mode(backends: list[str]) -> list[str]:
    """Return trackers as $WANDB_MODE has them."""
    mode = os.environ.get("WANDB_MODE", "")
    if not mode:
        return backends
    if mode in ("disabled", "dryrun"):
        return [one for one in backends if not one.startswith("wandb")]
    if mode not in _MODES:
        raise ConfigError(
            f"WANDB_MODE={mode!r} is not known for jobs", hint="set online, offline or disabled"
        )
    return [_MODES[mode] if one.startswith("wandb") else one for one in backends]


def _is_set(config: Mapping[str, Any], path: Sequence[str]) -> bool:
    value: Any = config
    for part in path:
        value = cast("Mapping[str, Any]", value).get(part) if isinstance(value, Mapping) else None
    return value is not None


def _nested(path: Sequence[str], value: Any) -> dict[str, Any]:
    return {path[0]: _nested(path[1:], value) if len(path) > 1 else value}


def _asks_endpoint(config: Mapping[str, Any]) -> bool:
    algorithm = config.get("algorithm")
    named = cast("Mapping[str, Any]", algorithm).get("teacher") if algorithm else None
    several = cast("Mapping[str, Any]", named).values() if isinstance(named, Mapping) else [named]
    return any(isinstance(one, str) and is_endpoint(one) for one in several)


def secrets_for(config: Mapping[str, Any], wandb_key: str | None = None) -> dict[SecretName, str]:
    """Return the secrets that a job of this configuration uses, from the environment if need be."""
    found: dict[SecretName, str] = {}
    if url := os.environ.get(NOTIFY_URL):
        found[NOTIFY_URL] = url
    if (key := os.environ.get(TEACHER_KEY)) and _asks_endpoint(config):
        found[TEACHER_KEY] = key
    uses_wandb = "wandb" in (config.get("logger_backends") or ())
    if key := wandb_key or (os.environ.get(WANDB_KEY) if uses_wandb else None):
        found[WANDB_KEY] = key
    return found
