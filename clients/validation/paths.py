"""Paths in a configuration: what is relative to the submitter becomes absolute.

A pool on another machine has other folders: there, paths that do not exist here are left as they
are and mean the pool's own.
"""

import copy
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

_LOCAL_HOSTS = {"localhost", "127.0.0.1", "::1"}


def resolve_paths(
    config: dict[str, Any], broker_url: str, *, has_users: bool = False
) -> dict[str, Any]:
    """Return the configuration with its folders and files made absolute.

    A pool with users has an output folder of its own, for whoever names none. The folders of agent
    programs that no host of the pool runs (`env.hosts: 0`) are those of whoever runs them.
    """
    resolved = copy.deepcopy(config)
    model: dict[str, Any] = resolved.get("model") or {}
    for key in {"path", "tokenizer"} & model.keys():
        if model[key] is not None:
            model[key] = _existing(str(model[key]))
    for section, keys in (("env", {"train_data", "val_data"}), ("sft", {"data"})):
        data: dict[str, Any] = resolved.get(section) or {}
        for key in keys & data.keys():
            data[key] = [_existing(str(path)) for path in data[key]]
    env: dict[str, Any] = resolved.get("env") or {}
    if env.get("hosts") != 0:
        _resolve_programs(resolved.get("agent") or {})
    if is_local_pool(broker_url) and ("output_dir" in resolved or not has_users):
        resolved["output_dir"] = str(Path(str(resolved.get("output_dir", "outputs"))).resolve())
    return resolved


def _resolve_programs(agent: dict[str, Any]) -> None:
    for key in {"files", "reward_files"} & agent.keys():
        if agent[key] is not None:
            agent[key] = _existing(str(agent[key]))
    if "read" in agent:
        agent["read"] = [_existing(str(path)) for path in agent["read"]]


def is_local_pool(broker_url: str) -> bool:
    """Whether the pool of a broker is on this machine and so sees the same folders."""
    return urlsplit(broker_url).hostname in _LOCAL_HOSTS


def _existing(path: str) -> str:
    """Return the absolute path of what exists here; anything else (a hub name) as it is."""
    place = Path(path).expanduser()
    return str(place.resolve()) if place.exists() else path
