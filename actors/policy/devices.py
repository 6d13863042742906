"""The device of an actor: the GPU from its node, else the CPU."""

# torch leaves some of its methods untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...schemas.config.sections import Dtype, resolve_dtype
from ...schemas.plan.cards import GpuCard, card_like
from ..gpus import unseen_gpu


def first_device(num_gpus: int) -> torch.device:
    """Return the device of a process with `num_gpus` visible GPUs: the first, or the CPU."""
    return torch.device("cuda", 0) if num_gpus else torch.device("cpu")


def bound_memory(device: torch.device, share: float | None) -> None:
    """Limit this process to a share of a GPU's memory."""
    if device.type == "cuda" and share is not None:
        cast(Any, torch.cuda).set_per_process_memory_fraction(share, device)


def let_segments_grow() -> None:
    """Let torch's segments of GPU memory grow, so that passes of many sizes leave fewer gaps.

    For a process that exports no memory: a receiver could map such segments by CUDA IPC only with
    the right to trace this process, which containers lack. Variables of the environment prevail.
    """
    is_set = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys()
    if torch.cuda.is_available() and not is_set:
        cast(Any, torch)._C._accelerator_setAllocatorSettings("expandable_segments:True")


def own_device() -> torch.device:
    """Return the device of this process; a node makes only the actor's own GPUs visible.

    Raises ConfigError if torch does not see a GPU of the node.
    """
    num_gpus = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if not num_gpus and visible.startswith(("GPU-", "MIG-")):  # written by nodes
        raise unseen_gpu(visible, torch.__version__, torch.version.cuda)
    return first_device(num_gpus)


def own_card() -> GpuCard | None:
    """Return the first visible GPU; None on a CPU."""
    if not torch.cuda.is_available():
        return None
    properties: Any = cast(Any, torch.cuda).get_device_properties(0)
    return card_like(str(properties.name), int(properties.total_memory))


def own_dtype(dtype: Dtype) -> Literal["float32", "bfloat16"]:
    """Return the dtype of a configuration key on this process's device."""
    return resolve_dtype(dtype, on_gpu=own_device().type == "cuda")


@lru_cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)


@contextmanager
def beside_kernels(device: torch.device) -> Iterator[None]:
    """Queue the block's copies of weights beside the kernels of the current stream.

    A training step queues kernels for seconds, and a copy in its stream waits for all of them. The
    process has one such stream for each GPU; a CPU has none. Memory allocated in the block must be
    `lent` before the current stream uses it.
    """
    if device.type != "cuda":
        yield
        return
    with torch.cuda.stream(_copy_stream(device)):
        yield


def finish_copies(device: torch.device) -> None:
    """Wait for the copies of `beside_kernels`, and for no kernel."""
    if device.type == "cuda":
        _copy_stream(device).synchronize()


def lent(tensor: Tensor) -> Tensor:
    """Return a tensor of `beside_kernels` to be read in the current stream; its copy has ended.

    Its memory is used again only once the kernels that read it have ended.
    """
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return tensor


@contextmanager
def exact_products() -> Iterator[None]:
    """Compute products in float32 without TF32, whose rounding would hide a check's differences."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def gpu_of(device: torch.device) -> str:
    """Return the UUID of a GPU, by which processes recognise a shared one; empty: none."""
    if device.type != "cuda":
        return ""
    return str(cast(Any, torch.cuda).get_device_properties(device).uuid)


# -- float32 products on a CPU ---------------------------------------------------------------------
# torch uses MKL, which has AVX-512 for Intel's processors only. On AMD's, oneDNN is up to twice as
# fast.

TRAINED_WEIGHTS = 1 << 16
"""Least number of weights of a layer with many rows; for smaller ones oneDNN's overhead is too
large."""
DECODED_WEIGHTS = 1 << 18
"""The same for a layer with few rows."""
_CACHED_KERNELS = {"LRU_CACHE_CAPACITY": "128", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128"}
"""torch and oneDNN cache 1,024 kernels each, one per shape: varying row lengths would fill half a
gigabyte. A pass has some twenty shapes, and a kernel is made in a millisecond."""


def use_onednn(model: nn.Module, min_weights: int) -> None:
    """Compute linear layers of at least `min_weights` weights by oneDNN if possible.

    It is possible if input and weights are float32 on a CPU, with or without gradients. Subclasses
    of torch's linear layer that compute something else, as some routers do, are not changed.
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
    """Return whether `multiply` supports these tensors: none is empty or a single row."""
    fit = all(
        each.device.type == "cpu"
        and each.dtype == torch.float32
        and each.dim() > 1
        and each.numel()
        for each in tensors
    )
    return fit and torch.backends.mkldnn.is_available()


def multiply(left_AK: Tensor, right_BK: Tensor, bias_B: Tensor | None = None) -> Tensor:
    """Return float32[..., B], the products of rows with rows, without gradient, for any strides."""
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
    """A linear layer with its three products by oneDNN."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(input, weight_OI)
        rows_NO = multiply(input.flatten(0, -2), weight_OI, bias_O)
        # Models change outputs in place, which torch forbids for views made by a function.
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
