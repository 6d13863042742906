"""Products of float32 matrices on a CPU by oneDNN, up to twice as fast as by MKL on AMD's.

torch gives them to MKL, which uses AVX-512 on Intel's processors alone.
"""

# torch leaves some of its methods untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

TRAINED_WEIGHTS = 1 << 16
"""Of a linear layer with many rows; a smaller one is over sooner than oneDNN begins."""
DECODED_WEIGHTS = 1 << 18
"""The same for one with few rows."""


def use_onednn(model: nn.Module, min_weights: int) -> None:
    """Have linear layers of at least `min_weights` weights compute by oneDNN where they can.

    They can wherever input and weights are float32 on a CPU, with gradients and without.
    """
    if not torch.backends.mkldnn.is_available():
        return
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.weight.numel() >= min_weights:
            module.forward = partial(_compute_layer, module)


def can_use_onednn(*tensors: Tensor) -> bool:
    """Return whether `multiply` takes these tensors."""
    on_cpu = all(one.device.type == "cpu" and one.dtype == torch.float32 for one in tensors)
    return on_cpu and torch.backends.mkldnn.is_available()


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
        return multiply(input, weight_OI, bias_O)

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
