"""Where an actor computes: on the GPU that its node gives it, else on the CPU."""

# torch leaves some of its methods untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

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


# -- float32 products on a CPU ---------------------------------------------------------------------
# torch gives them to MKL, which uses AVX-512 on Intel's processors alone. On AMD's oneDNN is up to
# twice as fast.

TRAINED_WEIGHTS = 1 << 16
"""Of a linear layer with many rows; a smaller one is over sooner than oneDNN begins."""
DECODED_WEIGHTS = 1 << 18
"""The same for one with few rows."""
_CACHED_KERNELS = {"LRU_CACHE_CAPACITY": "128", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128"}
"""torch and oneDNN keep 1,024 kernels each, one for each shape: rows of other lengths in each step
would fill half a gigabyte. A pass has some twenty shapes, and a kernel is made in a millisecond."""


def use_onednn(model: nn.Module, min_weights: int) -> None:
    """Have linear layers of at least `min_weights` weights compute by oneDNN where they can.

    They can wherever input and weights are float32 on a CPU, with gradients and without. Classes
    that compute something else than torch's own linear layer, as some routers do, stay as they are.
    """
    if not torch.backends.mkldnn.is_available():
        return
    for name, number in _CACHED_KERNELS.items():  # read when the first kernel is made
        os.environ.setdefault(name, number)
    for module in model.modules():
        if type(module) is not nn.Linear or "forward" in vars(module):
            continue
        if module.weight.numel() >= min_weights:
            module.forward = partial(_compute_layer, module)


def can_use_onednn(*tensors: Tensor) -> bool:
    """Return whether `multiply` takes these tensors: none is empty or a single row."""
    fit = all(
        one.device.type == "cpu" and one.dtype == torch.float32 and one.dim() > 1 and one.numel()
        for one in tensors
    )
    return fit and torch.backends.mkldnn.is_available()


def multiply(left_AK: Tensor, right_BK: Tensor, bias_B: Tensor | None = None) -> Tensor:
    """Return float32[..., B], the products of rows with rows; no gradient. Any strides will do."""
    onednn: Any = torch.ops.mkldnn
    return onednn._linear_pointwise(left_AK, right_BK, bias_B, "none", [], "")


def _compute_layer(layer: nn.Linear, input: Tensor) -> Tensor:
    weight, bias = layer.weight, layer.bias
    if not can_use_onednn(input, weight):
        return functional.linear(input, weight, bias)
    if torch.is_grad_enabled():
        return _Linear.apply(input, weight, bias)
    return multiply(input, weight, bias)


class _Linear(torch.autograd.Function):
    """A linear layer whose three products are oneDNN's."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(input, weight_OI)
        rows_NO = multiply(input.flatten(0, -2), weight_OI, bias_O)
        # Models change outputs in place, which torch forbids where a function made a view.
        unseen: Any = torch.ops.aten._unsafe_view
        return unseen(rows_NO, [*input.shape[:-1], len(weight_OI)])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (slope,) = grad_outputs
        input, weight_OI = ctx.saved_tensors
        of_input, of_weight, of_bias = ctx.needs_input_grad
        slope_NO = slope.flatten(0, -2)
        input_NI = input.flatten(0, -2)
        return (
            multiply(slope, weight_OI.t()) if of_input else None,
            multiply(slope_NO.t(), input_NI.t()) if of_weight else None,
            slope_NO.sum(0) if of_bias else None,
        )
