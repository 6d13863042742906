"""Where an actor computes: on the GPU that its node gives it, else on the CPU."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, cast

import torch

from ...schemas.config.sections import Dtype, resolve_dtype
from ...schemas.plan.cards import GpuCard, card_like
from ..gpus import unseen_gpu


def first_device(num_gpus: int) -> torch.device:
    """Return where a process computes that sees so many GPUs: on the first."""
    return torch.device("cuda", 0) if num_gpus else torch.device("cpu")


def bound_memory(device: torch.device, share: float | None) -> None:
    """Let this process take no more than a share of a GPU's memory: others have the rest."""
    if device.type == "cuda" and share is not None:
        cast(Any, torch.cuda).set_per_process_memory_fraction(share, device)


def own_device() -> torch.device:
    """Return where this process computes: a node shows each actor its own GPUs, or none.

    Raises ConfigError where torch does not see a GPU that the node gave.
    """
    num_gpus = torch.cuda.device_count()
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if not num_gpus and given.startswith(("GPU-", "MIG-")):  # as nodes write it
        raise unseen_gpu(given, torch.__version__, torch.version.cuda)
    return first_device(num_gpus)


def own_card() -> GpuCard | None:
    """Return the first GPU that this process sees; None on a CPU."""
    if not torch.cuda.is_available():
        return None
    found: Any = cast(Any, torch.cuda).get_device_properties(0)
    return card_like(str(found.name), int(found.total_memory))


def own_dtype(dtype: Dtype) -> Literal["float32", "bfloat16"]:
    """Return the dtype that a key means where this process computes."""
    return resolve_dtype(dtype, on_gpu=own_device().type == "cuda")


@contextmanager
def exact_products() -> Iterator[None]:
    """Compute products in float32 without TF32, whose roundings hide what a check looks for."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def gpu_of(device: torch.device) -> str:
    """Return the UUID of a GPU, by which processes find that they compute on one; empty: none."""
    if device.type != "cuda":
        return ""
    return str(cast(Any, torch.cuda).get_device_properties(device).uuid)
