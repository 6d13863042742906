"""AdamW whose moments are kept in 8 bits each (arXiv 2110.02861).

A moment is stored as codes of the paper's dynamic map, which has a value for each of 256 codes,
more of them near 0, times a scale for each block: the largest absolute value in it. An update is
made with moments in float32 before they are rounded again. Blocks are pieces of a row, so that
ranks that hold rows of a matrix round as one process does, and read what any number of ranks wrote.

Shape letters: R rows (all dimensions but the last), C columns, B blocks of a row, K columns of one.
"""

# torch leaves some of its methods untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

_BLOCK = 256
"""Columns that share a scale, at most."""
_NUM_EXPONENTS = 7
_LEAST_SCALE = 1e-12
_VALUES_AT_ONCE = 1 << 24
"""Weights whose moments are float32 at the same time."""
_MOMENTS = (("exp_avg", True), ("exp_avg_sq", False))
"""Names as torch's AdamW has them, and whether they have a sign."""
_KEPT = tuple(f"{name}_{part}" for name, _ in _MOMENTS for part in ("codes", "scales"))


class AdamW8bit:
    """The rule of AdamW with moments in 8 bits."""

    name = "adamw_8bit"

    def __init__(self, betas: tuple[float, float], eps: float) -> None:
        self._betas = betas
        self._eps = eps

    def settings(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of it."""
        return {"betas": self._betas, "eps": self._eps}

    def update(self, matrices: list[Tensor], states: list[dict[str, Any]], group: Any) -> None:
        """Move matrices by their moments, and store these again."""
        for weight, state in zip(matrices, states, strict=True):
            if not state:
                state.update(_fresh(weight))
            state["step"] += 1
            assert weight.grad is not None
            kept = (state[name] for name in _KEPT)
            parts = [_rows(_here(each)) for each in (weight, weight.grad, *kept)]
            for weight_RC, gradient_RC, *kept_R in _pieces(parts):
                _update_rows(weight_RC, gradient_RC, kept_R, float(state["step"]), group)


def _update_rows(
    weight_RC: Tensor, gradient_RC: Tensor, kept: list[Tensor], step: float, group: Any
) -> None:
    """Update rows; `kept` are codes and scales of the mean, and of the mean square."""
    (beta1, beta2), rate = group["betas"], group["lr"]
    mean_RC = dequantised(kept[0], kept[1], signed=True).lerp_(gradient_RC, 1 - beta1)
    square_RC = dequantised(kept[2], kept[3], signed=False)
    square_RC.mul_(beta2).addcmul_(gradient_RC, gradient_RC, value=1 - beta2)
    made = (*quantised(mean_RC, signed=True), *quantised(square_RC, signed=False))
    for old, new in zip(kept, made, strict=True):
        old.copy_(new)
    weight_RC.mul_(1 - rate * group["weight_decay"])
    root_RC = square_RC.div_(1 - beta2**step).sqrt_().add_(group["eps"])
    weight_RC.addcdiv_(mean_RC, root_RC, value=-rate / (1 - beta1**step))


def quantised(values_RC: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Return the codes uint8[R, C] of values, each the nearest, and the scales float32[R, B]."""
    num_columns = values_RC.shape[1]
    values_RBK = _in_blocks(values_RC)
    scales_RB = values_RBK.abs().amax(-1).clamp(min=_LEAST_SCALE)
    map_256 = dynamic_map(signed, values_RC.device)
    middles = (map_256[1:] + map_256[:-1]) / 2
    codes_RBK = torch.bucketize(values_RBK / scales_RB[..., None], middles, out_int32=True)
    return codes_RBK.to(torch.uint8).flatten(1)[:, :num_columns], scales_RB


def dequantised(codes_RC: Tensor, scales_RB: Tensor, *, signed: bool) -> Tensor:
    """Return the values float32[R, C] that codes stand for."""
    num_columns = codes_RC.shape[1]
    map_256 = dynamic_map(signed, codes_RC.device)
    values = map_256.index_select(0, codes_RC.flatten().int())  # faster than an index
    values_RBK = _in_blocks(values.view_as(codes_RC))
    return (values_RBK * scales_RB[..., None]).flatten(1)[:, :num_columns].contiguous()


@lru_cache(maxsize=8)
def dynamic_map(signed: bool, device: torch.device) -> Tensor:
    """Return the value of each code, ascending: float32[256], from -1 or 0 to 1.

    For each power of ten from 1e-6 to 1 there are twice as many values as for the one before,
    evenly between a tenth of it and all of it.
    """
    values = [torch.tensor([0.0, 1.0])]
    for exponent in range(_NUM_EXPONENTS):
        edges = torch.linspace(0.1, 1, 2**exponent * (1 if signed else 2) + 1)
        middles = (edges[:-1] + edges[1:]) / 2 * 10 ** (exponent + 1 - _NUM_EXPONENTS)
        values += [middles, -middles] if signed else [middles]
    return torch.cat(values).sort().values.to(device)


def _fresh(weight: Tensor) -> dict[str, Any]:
    """Return the state of a weight before its first update: moments of 0."""
    zeros_RC = _rows(torch.zeros_like(_here(weight)))
    state: dict[str, Any] = {"step": torch.tensor(0.0)}
    for name, signed in _MOMENTS:
        codes_RC, scales_RB = quantised(zeros_RC, signed=signed)
        state[f"{name}_codes"] = _placed(codes_RC, weight)
        state[f"{name}_scales"] = _placed(scales_RB, weight)
    return state


def _pieces(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the same rows of several tensors, some at a time."""
    num_rows = max(1, _VALUES_AT_ONCE // tensors[0].shape[1])
    for begin in range(0, len(tensors[0]), num_rows):
        yield [tensor[begin : begin + num_rows] for tensor in tensors]


def _in_blocks(values_RC: Tensor) -> Tensor:
    num_columns = values_RC.shape[1]
    num_blocks = -(-num_columns // _BLOCK)
    size = -(-num_columns // num_blocks)
    padded = torch.nn.functional.pad(values_RC, (0, num_blocks * size - num_columns))
    return padded.unflatten(1, (num_blocks, size))


def _here(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _rows(tensor: Tensor) -> Tensor:
    """Return a view of a tensor as rows."""
    return tensor.view(-1, tensor.shape[-1])


def _placed(local_RX: Tensor, like: Tensor) -> Tensor:
    """Return a tensor with the rows of a weight, divided as it is, from what this rank holds."""
    width = local_RX.shape[-1]
    local = local_RX.reshape(*_here(like).shape[:-1], width).contiguous()
    if not isinstance(like, DTensor):
        return local
    shape = torch.Size((*like.shape[:-1], width))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride
    )
