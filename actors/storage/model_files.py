"""What the JSON files of a model's folder may say: no file outside of it, and no code.

Libraries open what these files name. An index of shards therefore names files of its own folder
only, an adapter's settings no file at all but the base, and no setting names code: transformers
fetches kernels from the hub and runs them if a configuration asks for them.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from ...schemas.local.folder import Folder, is_inside
from ...schemas.wire.errors import ModelError, StorageError

_CONFIG = "config.json"
_INDEXES = "*.index.json"
_MAX_BYTES = 64 << 20
_IMPLEMENTATION = re.compile(r"_?\w+_implementation(_internal)?")
"""Keys that select the implementation of a layer, such as `attn_implementation`."""
_PLAIN = re.compile(r"[A-Za-z0-9_.+|-]*")
"""Implementations and formats of transformers itself; `owner/name` is code of the hub."""
_SWITCHES = frozenset({"trust_remote_code", "use_kernels", "kernel_config", "allow_all_kernels"})
_FORMATS = frozenset({"quantization_config", "compression_config"})


def check_model_files(folder: Path) -> None:
    """Raise ModelError for a configuration that names code, or an index that names other files."""
    config = _read(folder, _CONFIG)
    refuse_code(config, str(folder / _CONFIG))
    for index in sorted(folder.glob(_INDEXES)):
        shards: Any = _read(folder, index.name).get("weight_map")
        named = cast("dict[str, Any]", shards).values() if isinstance(shards, dict) else ()
        for name in {str(name) for name in named}:
            if not is_inside(name):
                raise ModelError(
                    f"{index} names {name[:200]!r}, which is outside of its folder",
                    hint="copy the model's files into one folder",
                )


def refuse_code(settings: Mapping[str, Any], where: str) -> None:
    """Raise ModelError if settings of a model name code that a library would fetch or run.

    `auto_map` is not refused: its code runs only with `model.trust_remote_code`.
    """
    for key, value in _items(settings):
        *above, last = key
        if last in _SWITCHES and value:
            raise _is_code(where, ".".join(key), value)
        chooses = any(map(_IMPLEMENTATION.fullmatch, key)) or not _FORMATS.isdisjoint(above)
        if chooses and isinstance(value, str) and not _PLAIN.fullmatch(value):
            raise _is_code(where, ".".join(key), value)


def refuse_files(settings: Mapping[str, Any], where: str, *, except_for: str) -> None:
    """Raise ModelError if settings of an adapter name a file, a folder or a model of the hub."""
    refuse_code(settings, where)
    for key, value in _items(settings):
        if key[0] != except_for and isinstance(value, str) and "/" in value:
            raise ModelError(
                f"{where} names {value[:200]!r} in {'.'.join(key)}",
                hint="an adapter may name its base model alone; its weights lie in its folder",
            )


def _is_code(where: str, key: str, value: object) -> ModelError:
    return ModelError(
        f"{where} asks for code: {key}={str(value)[:200]!r}",
        hint=f"remove {key}: no job runs code that a model's files name; "
        "model.attn_implementation chooses among those of transformers itself",
    )


def _items(value: Any, key: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the keys and leaves of a tree; items of a list have the key of the list."""
    waiting = [(key, value)]
    while waiting:
        key, value = waiting.pop()
        if isinstance(value, dict):
            named = cast("dict[str, Any]", value).items()
            waiting += [((*key, str(name)), item) for name, item in named]
        elif isinstance(value, list):
            waiting += [(key, item) for item in cast("list[Any]", value)]
        if key:
            yield key, value


def _read(folder: Path, name: str) -> dict[str, Any]:
    """Return the object in a file; a link in the folder is followed, as libraries do."""
    file = (folder / name).resolve()
    try:
        with Folder(file.parent) as opened:
            value: Any = json.loads(opened.read(file.name, _MAX_BYTES))
    except (OSError, StorageError, ValueError, RecursionError) as error:
        raise ModelError(
            f"{folder / name} cannot be read: {type(error).__name__}",
            hint="copy the model's folder again",
        ) from error
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}
