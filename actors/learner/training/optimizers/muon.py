"""Muon: the momentum of a hidden matrix, made orthogonal (kellerjordan.github.io/posts/muon).

An orthogonal update is scaled so that it is as large as AdamW's are (a root mean square of 0.2,
arXiv 2502.16982), so that one learning rate serves for both. The formulas and constants are those
of `torch.optim.Muon`, which computes in bfloat16 alone: there a gradient that differs in its last
bit, as that of other numbers of ranks does, moves a weight otherwise by hundredths of its update.

Shape letters: M and N rows and columns, the fewer first; leading dimensions are many matrices.
"""

# torch leaves some of its methods untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

_LINEAR, _CUBIC, _QUINTIC = 3.4445, -4.7750, 2.0315
"""They make small singular values grow fastest; all end between 0.7 and 1.2."""
_STEPS = 5
_EPS = 1e-7
_RMS_OF_ADAMW = 0.2
_MOMENTUM = "momentum_buffer"


class Muon:
    """The rule of Muon, with Nesterov momentum and decoupled weight decay."""

    name = "muon"

    def __init__(self, momentum: float, dtype: torch.dtype) -> None:
        """Matrices are made orthogonal in `dtype`."""
        self._momentum = momentum
        self._dtype = dtype

    def settings(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of it."""
        return {"momentum": self._momentum}

    def update(self, matrices: list[Tensor], states: list[dict[str, Any]], group: Any) -> None:
        """Move matrices by what their momentum is, made orthogonal."""
        share = dist.get_world_size() if _is_divided(matrices) else 1
        for begin in range(0, len(matrices), share):
            some = matrices[begin : begin + share]
            ahead = [
                self._ahead(weight, state, group["momentum"])
                for weight, state in zip(some, states[begin:], strict=False)
            ]
            for weight, update in zip(some, self._orthogonal(ahead), strict=True):
                rate = group["lr"] * (_RMS_OF_ADAMW * math.sqrt(max(weight.shape[-2:])))
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(update, alpha=-rate)

    @staticmethod
    def _ahead(weight: Tensor, state: dict[str, Any], momentum: float) -> Tensor:
        """Add a gradient to the momentum; return where that would be a step later (Nesterov)."""
        gradient = weight.grad
        assert gradient is not None
        if not state:
            state[_MOMENTUM] = torch.zeros_like(weight)
        state[_MOMENTUM].lerp_(gradient, 1 - momentum)
        return gradient.lerp(state[_MOMENTUM], momentum)

    def _orthogonal(self, updates: list[Tensor]) -> list[Tensor]:
        """Make updates orthogonal; where they lie in parts, each rank does one for all of them."""
        if not _is_divided(updates):
            return [orthogonal(update, self._dtype) for update in updates]
        wholes = [self._gathered(update) for update in updates]
        own = dist.get_rank()
        if own < len(wholes):
            wholes[own] = orthogonal(wholes[own], self._dtype).contiguous()
        made: list[Tensor] = []
        for rank, (whole, like) in enumerate(zip(wholes, updates, strict=True)):
            dist.broadcast(whole, rank)
            made.append(_part(whole, like))
        return made

    def _gathered(self, update: Any) -> Tensor:
        return update.to(self._dtype).full_tensor().contiguous()


def orthogonal(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Return U S Vᵀ with singular values S near 1 where `matrix` has U, S and V, in `dtype`.

    By five steps of Newton-Schulz: X ← a X + (b XXᵀ + c (XXᵀ)²) X.
    """
    is_high = matrix.shape[-2] > matrix.shape[-1]
    x_MN: Tensor = matrix.to(dtype).mT if is_high else matrix.to(dtype)
    x_MN = x_MN / x_MN.norm(dim=(-2, -1), keepdim=True).clamp(min=_EPS)
    multiply_add: Any = torch.addmm if matrix.ndim == 2 else torch.baddbmm
    for _ in range(_STEPS):
        gram_MM = x_MN @ x_MN.mT
        by_MM = multiply_add(gram_MM, gram_MM, gram_MM, beta=_CUBIC, alpha=_QUINTIC)
        x_MN = multiply_add(x_MN, by_MM, x_MN, beta=_LINEAR)
    return x_MN.mT if is_high else x_MN


def _is_divided(tensors: list[Tensor]) -> bool:
    return any(isinstance(tensor, DTensor) for tensor in tensors)


def _part(whole: Tensor, like: Tensor) -> Tensor:
    """Return this rank's part of what all ranks have, divided as another tensor is."""
    assert isinstance(like, DTensor)
    mesh = like.device_mesh
    everywhere = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return everywhere.redistribute(mesh, like.placements)
