"""Adapters on their way to a store name their base by its URL, not by a folder of this machine."""

import json
from pathlib import Path
from typing import Any

from ...schemas.config.lora import ADAPTER_CONFIG
from ..models.digests import TABLE, write_digests
from .models_by_url import url_of

_BASE = "base_model_name_or_path"


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
