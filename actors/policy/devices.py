"""Where an actor computes: on the GPU that its node gives it, else on the CPU."""

from typing import Any, cast

import torch


def first_device(num_gpus: int) -> torch.device:
    """Return where a process computes that sees so many GPUs: on the first."""
    return torch.device("cuda", 0) if num_gpus else torch.device("cpu")


def own_device() -> torch.device:
    """Return where this process computes: a node shows each actor its own GPUs, or none."""
    return first_device(torch.cuda.device_count())


def gpu_of(device: torch.device) -> str:
    """Return the UUID of a GPU, by which processes find that they compute on one; empty: none."""
    if device.type != "cuda":
        return ""
    return str(cast(Any, torch.cuda).get_device_properties(device).uuid)
