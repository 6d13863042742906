"""Paths in a configuration: what is relative to the submitter becomes absolute.

A pool on another machine has other folders: there, paths that do not exist here are left as they
are and mean the pool's own.
"""

import copy
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

_LOCAL_HOSTS = {"localhost", "127.0.0.1", "::1"}


def resolve_paths(config: dict[str, Any], broker_url: str) -> dict[str, Any]:
    """Return the configuration with model folder, data files and output folder made absolute."""
    resolved = copy.deepcopy(config)
    model: dict[str, Any] = resolved.get("model") or {}
    for key in {"path", "tokenizer"} & model.keys():
        if model[key] is not None:
            model[key] = _existing(str(model[key]))
    env: dict[str, Any] = resolved.get("env") or {}
    for key in {"train_data", "val_data"} & env.keys():
        env[key] = [_existing(str(path)) for path in env[key]]
    if is_local_pool(broker_url):
        resolved["output_dir"] = str(Path(str(resolved.get("output_dir", "outputs"))).resolve())
    return resolved


def is_local_pool(broker_url: str) -> bool:
    """Whether the pool of a broker is on this machine and so sees the same folders."""
    return urlsplit(broker_url).hostname in _LOCAL_HOSTS


def _existing(path: str) -> str:
    """Return the absolute path of what exists here; anything else (a hub name) as it is."""
    place = Path(path).expanduser()
    return str(place.resolve()) if place.exists() else path
