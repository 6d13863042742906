"""The routers of a mixture of experts: what chooses, in each layer, the experts that read a token.

Shape letters: X tokens, E experts of a layer, K of them that read a token, H hidden size.
"""

# torch leaves some of its methods untyped.
# pyright: reportUnknownMemberType=false

import copy
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from ....schemas.wire.errors import ModelError

MAX_EXPERTS = 256
"""Of a layer, whose numbers fit into a byte."""
_ENDING = "TopKRouter"
"""Of the names of transformers' classes that answer (logits, weights, numbers) of experts."""


@dataclass(frozen=True)
class ExpertShape:
    """How many experts there are, and how many read a token."""

    layers: int
    """Layers with experts."""
    chosen: int
    """Experts of a layer that read a token."""
    experts: int
    """Experts of a layer."""

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a record of choices has this shape behind its tokens."""
        return shape[1:] == (self.layers, self.chosen)


def routers_of(model: nn.Module) -> list[nn.Module]:
    """Return the routers of a model by layer; empty: it has no experts."""
    return [one for one in model.modules() if type(one).__name__.endswith(_ENDING)]


def shape_of(model: nn.Module) -> ExpertShape:
    """Return how many experts a model has; ModelError for one whose choices cannot be recorded."""
    routers = routers_of(model)
    if not routers:
        raise _refused("the model has no routers that choose experts for a token")
    kinds = {(int(cast(Any, one).top_k), int(cast(Any, one).num_experts)) for one in routers}
    if len(kinds) > 1:
        raise _refused(f"the layers of the model differ in their experts: {sorted(kinds)}")
    chosen, experts = kinds.pop()
    if experts > MAX_EXPERTS:
        raise _refused(f"the model has {experts} experts in a layer, recorded are {MAX_EXPERTS}")
    return ExpertShape(len(routers), chosen, experts)


def weigh(router: nn.Module, logits_XE: Tensor, chosen_XK: Tensor) -> Tensor:
    """Return the weights that a router gives to experts which were chosen for it: [X, K].

    They are those of its own formula, so that gradients reach the router as they would.
    """
    weights_XK = logits_XE.softmax(-1, dtype=torch.float32).gather(-1, chosen_XK)
    if getattr(router, "norm_topk_prob", True):
        weights_XK = weights_XK / weights_XK.sum(-1, keepdim=True)
    return weights_XK.to(logits_XE.dtype)


@torch.no_grad()
def check_formula(router: nn.Module) -> None:
    """Raise ModelError unless `weigh` gives what such a router computes by itself."""
    probe = copy.deepcopy(router).to_empty(device="cpu")  # its weights may be in another process
    generator = torch.Generator().manual_seed(0)
    for tensor in (*probe.parameters(), *probe.buffers()):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    weight = cast(Tensor, probe.weight)
    states_XH = torch.randn(16, weight.shape[-1], generator=generator).to(weight.dtype)
    logits_XE, weights_XK, chosen_XK = cast("tuple[Tensor, Tensor, Tensor]", probe(states_XH))
    ours_XK = weigh(probe, logits_XE, chosen_XK)
    if ours_XK.shape != weights_XK.shape or not torch.allclose(ours_XK, weights_XK, atol=1e-3):
        raise _refused(f"a {type(router).__name__} weighs experts by another formula than softmax")


def _refused(reason: str) -> ModelError:
    return ModelError(
        f"algorithm.router_replay: {reason}",
        hint="set algorithm.router_replay=false, or train a Qwen3-MoE of at most 256 experts",
    )
