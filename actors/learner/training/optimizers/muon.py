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
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from .....schemas.config.learner import LearnerConfig

_LINEAR, _CUBIC, _QUINTIC = 3.4445, -4.7750, 2.0315
"""They make small singular values grow fastest; all end between 0.7 and 1.2."""
_STEPS = 5
_EPS = 1e-7
_RMS_OF_ADAMW = 0.2
_MOMENTUM = "momentum_buffer"
MUON = "muon"
"""Marks the group of the matrices in a state."""


class Muon(torch.optim.Optimizer):
    """Muon, with Nesterov momentum and decoupled weight decay, for hidden matrices; AdamW for the
    rest.

    To whoever sets a learning rate, writes a checkpoint or divides the state over ranks it is an
    optimiser like any other, with a group of parameters for each of the two.
    """

    def __init__(
        self,
        matrices: Sequence[nn.Parameter],
        rest: torch.optim.AdamW | None,
        config: LearnerConfig,
        learning_rate: float,
    ) -> None:
        """`rest` updates all other parameters; None: there are no others."""
        self._adamw = rest
        # Of a learner that computes in 16 bits the matrices are made orthogonal in 16 bits, too.
        self._dtype = torch.float32 if config.dtype == "float32" else torch.bfloat16
        own: dict[str, Any] = {
            "params": list(matrices),
            "lr": learning_rate,
            "weight_decay": config.weight_decay,
            MUON: True,
            "momentum": config.muon_momentum,
        }
        groups = [own] if matrices else []
        super().__init__([*groups, *(rest.param_groups if rest else [])], {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Make one update with the gradients that are there."""
        assert closure is None
        for group in self.param_groups:
            if MUON in group:
                moved = [weight for weight in group["params"] if weight.grad is not None]
                self._update(moved, [self.state[weight] for weight in moved], group)
        if self._adamw is not None:
            # Both are replaced when a state is loaded.
            self._adamw.param_groups = [group for group in self.param_groups if MUON not in group]
            self._adamw.state = self.state
            self._adamw.step()

    def _update(self, matrices: list[Tensor], states: list[dict[str, Any]], group: Any) -> None:
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


def split(
    model: nn.Module, parameters: Sequence[nn.Parameter]
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the hidden matrices among parameters, and all else.

    A tensor of more dimensions than two counts as many matrices where a model keeps its experts so.
    """
    apart = _not_hidden(model)
    matrices = [each for each in parameters if each.ndim in (2, 3) and id(each) not in apart]
    found = {id(each) for each in matrices}
    return matrices, [each for each in parameters if id(each) not in found]


def _not_hidden(model: nn.Module) -> set[int]:
    """Return the ids of the parameters of embeddings, convolutions and the output layer."""
    output: nn.Module = cast(Any, model).get_output_embeddings()
    kinds = (nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    modules = [module for module in model.modules() if isinstance(module, kinds)]
    return {id(weight) for module in [*modules, output] for weight in module.parameters()}
