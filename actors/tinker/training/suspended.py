"""Models that are out of memory for a while: one file each, with all that they had in memory.

It is for the process that wrote it: pending gradients are in it, and it is not brought to the disk.
What survives a crash is the state behind the last step, and the operation log.
"""

# safetensors leaves the types of its paths open.
# pyright: reportUnknownVariableType=false

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ....schemas.tinker.datum import LoraSpec
from ....schemas.wire.errors import ModelError
from ...models.writing import storage_error
from .adapter import Adapter
from .window import PendingWindow

_SPEC, _WINDOW = "spec", "window"


def write_suspended(file: Path, adapter: Adapter, window: PendingWindow) -> None:
    """Write a model down; raises StorageError."""
    told = {_SPEC: json.dumps(asdict(adapter.spec)), _WINDOW: json.dumps(window.to_map())}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: row.contiguous() for name, row in adapter.rows().items()}, file, told)
    except Exception as error:
        failure = storage_error(file, error)
        file.unlink(missing_ok=True)
        if failure is None:
            raise
        raise failure from error


def read_suspended(file: Path) -> tuple[LoraSpec, dict[str, Tensor], PendingWindow]:
    """Return what was written down; raises ModelError."""
    try:
        opened: Any = safe_open
        with opened(file, framework="pt") as handle:
            told: dict[str, str] = handle.metadata()
            rows = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118  its own
        spec = TypeAdapter(LoraSpec).validate_json(told[_SPEC])
        return spec, rows, PendingWindow.from_map(json.loads(told[_WINDOW]))
    except (OSError, SafetensorError, KeyError, ValueError, ValidationError) as error:
        raise ModelError(
            f"{file} cannot be read: {error}", hint="start the trainer again: its log has the rest"
        ) from error
