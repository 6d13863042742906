"""Folders of LoRA adapters, as PEFT writes them, and the models that they belong to.

On its way to a store an adapter names its base by URL, not by a folder of this machine; one that
came by URL may do so, and its base is fetched with it.
"""

import json
import os
from pathlib import Path
from typing import Any, cast

from ...schemas.config.sections import ADAPTER_CONFIG
from ...schemas.wire.errors import ModelError
from .cache import base_here, url_of
from .files import TABLE, write_digests

_BASE = "base_model_name_or_path"


def is_adapter(path: str | Path) -> bool:
    """Whether a folder holds a PEFT adapter instead of a model."""
    return os.path.isfile(os.path.join(path, ADAPTER_CONFIG))  # noqa: PTH113, PTH118  False for odd paths


def base_of(folder: str | Path) -> str:
    """Return the model that an adapter belongs to; ModelError when the folder does not say.

    One that came by URL may name its base so: that is fetched, too, which may raise StorageError.
    """
    base = adapter_settings(folder).get(_BASE)
    if not base:
        raise ModelError(
            f"{folder} does not say to which model its adapter belongs",
            hint=f"set base_model_name_or_path in its {ADAPTER_CONFIG}",
        )
    return base_here(str(folder), str(base))


def adapter_settings(folder: str | Path) -> dict[str, Any]:
    """Return what PEFT's file in an adapter's folder says; ModelError for one that is damaged."""
    file = Path(folder) / ADAPTER_CONFIG
    try:
        read: Any = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {error}", hint="copy the folder again") from error
    if not isinstance(read, dict):
        raise ModelError(f"{file} holds no JSON object", hint="copy the folder again")
    return cast("dict[str, Any]", read)


def name_bases_by_url(checkpoint: Path) -> None:
    """Rewrite the adapters of a copy made of hard links, whose originals stay as they are."""
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
