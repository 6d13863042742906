"""Small JSON files, each there whole or not at all."""

import json
import os
from pathlib import Path
from typing import Any, cast

from ....schemas.tinker.checkpoints import MAX_METADATA_BYTES, Metadata
from ....schemas.wire.errors import ConfigError, StorageError


def write_record(file: Path, value: dict[str, Any]) -> None:
    """Write a file; raises StorageError."""
    hidden = file.with_name(f".{file.name}.new")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with hidden.open("w", encoding="utf-8") as opened:
            json.dump(value, opened)
            opened.flush()
            os.fsync(opened.fileno())
        hidden.rename(file)
    except OSError as error:
        raise StorageError(
            f"{file} cannot be written: {error.strerror}", hint="see the disk of the pool"
        ) from error


def read_record(file: Path) -> dict[str, Any] | None:
    """Return what a file holds, None for one that is not there or damaged: nothing hangs on it."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None


def metadata_of(given: Any) -> Metadata | None:
    """Return what a user says about something as texts; raises ConfigError if it is too large."""
    if given is None:
        return None
    if not isinstance(given, dict):
        raise ConfigError("user_metadata must be a JSON object", hint="leave it out, or mend it")
    pairs = cast("dict[Any, Any]", given).items()
    texts = {
        str(key): one if isinstance(one, str) else json.dumps(one, default=str)
        for key, one in pairs
    }
    size = len(json.dumps(texts).encode())
    if size > MAX_METADATA_BYTES:
        raise ConfigError(
            f"user_metadata has {size:,} bytes", hint=f"{MAX_METADATA_BYTES:,} are kept at most"
        )
    return texts
