"""Where an actor computes: on the GPU that its node gives it, else on the CPU."""

from typing import Literal

import torch

from ...schemas.config.sections import Dtype, resolve_dtype


def first_device(num_gpus: int) -> torch.device:
    """Return where a process computes that sees so many GPUs: on the first."""
    return torch.device("cuda", 0) if num_gpus else torch.device("cpu")


def own_device() -> torch.device:
    """Return where this process computes: a node shows each actor its own GPUs, or none."""
    return first_device(torch.cuda.device_count())


def own_dtype(dtype: Dtype) -> Literal["float32", "bfloat16"]:
    """Return the dtype that a key means where this process computes."""
    return resolve_dtype(dtype, on_gpu=own_device().type == "cuda")
