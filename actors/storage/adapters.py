"""Folders of LoRA adapters in PEFT's format, and their base models.

In a store an adapter names its base by URL instead of a folder of this machine; the base is fetched
with it.
"""

import json
import os
from pathlib import Path
from typing import Any, cast

from ...schemas.config.sections import ADAPTER_CONFIG
from ...schemas.wire.errors import ModelError
from .cache import base_here, url_of
from .files import TABLE, write_digests
from .model_files import refuse_files

_BASE = "base_model_name_or_path"


def is_adapter(path: str | Path) -> bool:
    """Whether a folder contains a PEFT adapter instead of a model."""
    return os.path.isfile(os.path.join(path, ADAPTER_CONFIG))  # noqa: PTH113, PTH118  False for odd paths


def base_of(folder: str | Path) -> str:
    """Return the base model of an adapter; raises ModelError if the folder does not name it.

    If both are named by URL, the base is fetched; raises StorageError.
    """
    base = adapter_settings(folder).get(_BASE)
    if not base:
        raise ModelError(
            f"{folder} does not name the base model of its adapter",
            hint=f"set base_model_name_or_path in its {ADAPTER_CONFIG}",
        )
    return base_here(str(folder), str(base))


def root_of(path: str) -> str:
    """Return the model below all adapters of a path."""
    while is_adapter(path):
        path = base_of(path)
    return path


def adapter_settings(folder: str | Path) -> dict[str, Any]:
    """Return the settings in PEFT's file of an adapter's folder.

    Raises ModelError if it is damaged, or names other files than the base model.
    """
    file = Path(folder) / ADAPTER_CONFIG
    try:
        read: Any = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {error}", hint="copy the folder again") from error
    if not isinstance(read, dict):
        raise ModelError(f"{file} must contain a JSON object", hint="copy the folder again")
    settings = cast("dict[str, Any]", read)
    refuse_files(settings, str(file), except_for=_BASE)
    return settings


def name_bases_by_url(checkpoint: Path) -> None:
    """Name bases by URL in the adapters of a copy of hard links; the originals do not change."""
    changed = [_renamed(file) for file in checkpoint.rglob(ADAPTER_CONFIG)]
    if any(changed):
        (checkpoint / TABLE).unlink()
        write_digests(checkpoint)


def _renamed(file: Path) -> bool:
    settings: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    url = url_of(str(settings.get(_BASE)))
    if url is None:
        return False
    file.unlink()
    file.write_text(json.dumps({**settings, _BASE: url}, indent=2), encoding="utf-8")
    return True
