"""New weights as files in memory, for an engine whose processes read them.

vLLM reads adapters from a folder. Weights of a model are written only if they are not yet in a
shared-memory file.
"""

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors import TensorSpec, serialize_file

from ....schemas.config.sections import ADAPTER_CONFIG, LoraConfig
from ....schemas.local.folder import process_folder
from ....schemas.weights import TensorEntry
from ....schemas.wire.errors import EngineError, ModelError
from ...policy.lora import add_adapter, policy_tensors, uniform
from ...policy.model_folder import auto_class, load_model_config
from ...weights.shared_memory import MEMORY_FOLDER
from ...weights.tensors import (
    TensorBytes,
    TensorSource,
    WeightNames,
    as_tensor,
    in_bytes,
    layout,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_INFIX = ".lora_A."
_VISION_TOWER = ".visual."


class WeightFiles:
    """A folder in memory with one folder per version; it is removed with its owner."""

    def __init__(self) -> None:
        root = MEMORY_FOLDER if MEMORY_FOLDER.is_dir() else None
        self._root = process_folder("weights", root)

    def write_model(
        self, version: int, tensors: Mapping[str, TensorSource]
    ) -> tuple[Path, list[TensorEntry]]:
        """Write checked tensors, concatenated; return the file and its layout.

        For tensors that are not yet in a shared-memory file.
        """
        by_name = self._with_room(tensors)
        path = Path(tempfile.mkdtemp(prefix=f"{version}-", dir=self._root)) / "model"
        with path.open("wb") as file:
            for tensor in by_name.values():
                file.write(tensor.data)
        return path, layout(by_name)

    def write_adapter(
        self, version: int, tensors: Mapping[str, TensorSource], config: LoraConfig
    ) -> Path:
        """Write an adapter as a PEFT folder.

        vLLM uses one scale for all layers: if `config` has several, B is scaled here.
        """
        alpha = config.alpha
        if not config.is_uniform:
            by_name = {name: as_tensor(source) for name, source in tensors.items()}
            tensors, alpha = uniform(by_name, config), config.max_rank
        folder = self._write(version, "adapter_model.safetensors", tensors)
        layers = {key.partition(_INFIX)[0].rpartition(".")[2] for key in tensors if _INFIX in key}
        settings = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": config.max_rank,
            "lora_alpha": alpha,
            "target_modules": sorted(layers),
            "bias": "none",
        }
        (folder / ADAPTER_CONFIG).write_text(json.dumps(settings), encoding="utf-8")
        return folder

    def keep_only(self, folder: Path | None) -> None:
        """Remove all other versions."""
        for other in self._root.iterdir():
            if other != folder:
                shutil.rmtree(other, ignore_errors=True)

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self._root, ignore_errors=True)

    def _write(self, version: int, file: str, tensors: Mapping[str, TensorSource]) -> Path:
        by_name = self._with_room(tensors)
        folder = Path(tempfile.mkdtemp(prefix=f"{version}-", dir=self._root))
        specs = {
            name: TensorSpec(
                dtype=tensor.dtype,
                shape=list(tensor.shape),
                data_ptr=np.frombuffer(tensor.data, np.uint8).ctypes.data,
                data_len=tensor.data.nbytes,
            )
            for name, tensor in by_name.items()
        }
        serialize_file(specs, folder / file, {"format": "pt"})
        return folder

    def _with_room(self, tensors: Mapping[str, TensorSource]) -> dict[str, TensorBytes]:
        """Return the bytes of tensors; EngineError if the memory has no room for them."""
        by_name = {name: in_bytes(source) for name, source in tensors.items()}
        size = sum(tensor.data.nbytes for tensor in by_name.values())
        free = shutil.disk_usage(self._root).free
        if size > free:
            raise EngineError(
                f"new weights of {size >> 20} MiB do not fit into {self._root.parent}, which has "
                f"{free >> 20} MiB left",
                hint="make it larger (`mount -o remount,size=…`, or --shm-size of a container)",
            )
        return by_name


def hollow_model(path: str, *, trust_remote_code: bool) -> "PreTrainedModel":
    """Return a model without weights; ModelError."""
    config = load_model_config(path, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        return auto_class(config).from_config(config, trust_remote_code=trust_remote_code)


def reference_names(path: str, lora: LoraConfig, *, trust_remote_code: bool) -> WeightNames:
    """Return the names and shapes of the weights of a model, or its adapter; takes no memory.

    Raises ModelError for an adapter that vLLM supports only in part.
    """
    model = hollow_model(path, trust_remote_code=trust_remote_code)
    if lora.rank:
        with torch.device("meta"):
            add_adapter(model, lora, seed=0)
    tensors = policy_tensors(model)
    if lora.rank and any(_VISION_TOWER in name for name in tensors):
        raise ModelError(
            "an adapter changes how the model sees images, which vLLM would leave out",
            hint="set lora.targets=[q_proj,k_proj,v_proj,o_proj], or generator.engine=transformers",
        )
    return WeightNames(tensors)
