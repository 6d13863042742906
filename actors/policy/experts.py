"""The routers of a mixture of experts: record, and replay, the experts of each token.

Generator and learner compute in different ways, and a router's choice is not continuous: a small
difference of a hidden state may change a token's experts, and its log-prob. So the generator
records its choices, and the learner computes with the same experts (R3, "Stabilizing MoE
Reinforcement Learning by Aligning Training and Inference Routers", arXiv:2510.11370), weighted by
its own router, with gradients.

Shape letters: B rows, T columns, X tokens of a forward pass, L layers with experts, E experts of a
layer, K of them that read a token, H hidden size.
"""

# torch leaves some of its methods untyped.
# pyright: reportUnknownMemberType=false

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ...schemas.rollout import Group
from ...schemas.wire.errors import DataError, ModelError

MAX_EXPERTS = 256
"""Experts of a layer whose numbers fit into a byte."""
_ENDING = "TopKRouter"
"""Suffix of transformers' classes that return (logits, weights, numbers) of experts."""


@dataclass(frozen=True)
class ExpertShape:
    """Numbers of experts, and of experts per token."""

    layers: int
    """Layers with experts."""
    chosen: int
    """Experts of a layer per token."""
    experts: int
    """Experts of a layer."""

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a record of choices has these dimensions after its tokens."""
        return shape[1:] == (self.layers, self.chosen)


def routers_of(model: nn.Module) -> list[nn.Module]:
    """Return the routers of a model by layer; empty for a model without experts."""
    return [module for module in model.modules() if type(module).__name__.endswith(_ENDING)]


def shape_of(model: nn.Module) -> ExpertShape:
    """Return a model's numbers of experts; raises ModelError if they cannot be recorded."""
    routers = routers_of(model)
    if not routers:
        raise _refused("the model has no routers that choose experts for a token")
    kinds = {
        (int(cast(Any, router).top_k), int(cast(Any, router).num_experts)) for router in routers
    }
    if len(kinds) > 1:
        raise _refused(f"the layers of the model differ in their experts: {sorted(kinds)}")
    chosen, experts = kinds.pop()
    if experts > MAX_EXPERTS:
        raise _refused(f"the model has {experts} experts in a layer, recorded are {MAX_EXPERTS}")
    return ExpertShape(len(routers), chosen, experts)


def weigh(router: nn.Module, logits_XE: Tensor, chosen_XK: Tensor) -> Tensor:
    """Return a router's weights of given experts: [X, K].

    They follow the router's formula, so that its gradients are the usual ones.
    """
    weights_XK = logits_XE.softmax(-1, dtype=torch.float32).gather(-1, chosen_XK)
    if getattr(router, "norm_topk_prob", True):
        weights_XK = weights_XK / weights_XK.sum(-1, keepdim=True)
    return weights_XK.to(logits_XE.dtype)


@torch.no_grad()
def check_formula(router: nn.Module) -> None:
    """Raise ModelError unless `weigh` equals the router's own weights."""
    probe = copy.deepcopy(router).to_empty(
        device="cpu"
    )  # the model's weights may be in another process
    generator = torch.Generator().manual_seed(0)
    for tensor in (*probe.parameters(), *probe.buffers()):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    weight = cast(Tensor, probe.weight)
    states_XH = torch.randn(16, weight.shape[-1], generator=generator).to(weight.dtype)
    try:
        logits_XE, weights_XK, chosen_XK = cast("tuple[Tensor, Tensor, Tensor]", probe(states_XH))
        ours_XK = weigh(probe, logits_XE, chosen_XK)
    except (TypeError, ValueError, RuntimeError) as error:  # another signature, or other tensors
        raise _refused(f"a {type(router).__name__} does not return its weights") from error
    if ours_XK.shape != weights_XK.shape or not torch.allclose(ours_XK, weights_XK, atol=1e-3):
        raise _refused(f"a {type(router).__name__} weights experts by another formula than softmax")


def _refused(reason: str) -> ModelError:
    return ModelError(
        f"algorithm.router_replay: {reason}",
        hint="set algorithm.router_replay=false, or train a model whose routers weigh at most 256 "
        "experts by a softmax, such as Qwen3's with experts or gpt-oss",
    )


# -- recording, in the generator -------------------------------------------------------------------


class RouterRecorder:
    """Records the choices of a model's routers in its latest forward pass."""

    def __init__(self, model: nn.Module) -> None:
        """Set hooks; raises ModelError for a model whose choices cannot be recorded."""
        self.shape: ExpertShape = shape_of(model)
        self._chosen: dict[int, Tensor] = {}
        for layer, router in enumerate(routers_of(model)):
            router.register_forward_hook(partial(self._note, layer))

    def take_choices(self) -> NDArray[np.uint8]:
        """Return the choices of the latest pass, once: uint8[X, L, K], in the order of its tokens.

        A token's experts are in the router's order, the likeliest first.
        """
        chosen = [self._chosen.pop(layer) for layer in range(self.shape.layers)]
        return torch.stack(chosen, 1).to(torch.uint8).cpu().numpy()

    def _note(self, layer: int, _router: nn.Module, _args: Any, output: Any) -> None:
        self._chosen[layer] = output[2]


# -- replaying, in the learner ---------------------------------------------------------------------


class RouterReplay:
    """Replaces the choices of a model's routers by recorded ones."""

    def __init__(self, model: nn.Module) -> None:
        """Set hooks; raises ModelError for a model whose choices cannot be replayed."""
        self.shape: ExpertShape = shape_of(model)
        self._chosen_XLK: Tensor | None = None
        for layer, router in enumerate(routers_of(model)):
            check_formula(router)
            router.register_forward_hook(partial(self._replay, layer))

    def use(self, chosen_BTLK: Tensor | None) -> None:
        """Use these choices in later passes; None: the routers' own.

        They stay until the next call, since gradient checkpointing computes layers again later.
        """
        self._chosen_XLK = None if chosen_BTLK is None else chosen_BTLK.flatten(0, 1).long()

    def check(self, group: Group) -> None:
        """Raise DataError for a group without the experts of its trained tokens."""
        for item in group.sampled:
            recorded = item.experts
            if recorded is None:
                raise _unfit("a trajectory has no experts of its tokens")
            if not self.shape.fits(recorded.shape):
                raise _unfit(
                    f"a trajectory has {recorded.shape[2]} experts of {recorded.shape[1]} layers "
                    f"for a token, the model has {self.shape.chosen} of {self.shape.layers}"
                )
            if recorded.max() >= self.shape.experts or (np.diff(np.sort(recorded)) == 0).any():
                raise _unfit(
                    f"experts must be from 0 to {self.shape.experts - 1}, each once for a token"
                )

    def _replay(self, layer: int, router: nn.Module, _args: Any, output: Any) -> Any:
        if self._chosen_XLK is None:
            return None
        chosen_XK = self._chosen_XLK[:, layer]
        return output[0], weigh(router, output[0], chosen_XK), chosen_XK


def _unfit(reason: str) -> DataError:
    return DataError(
        reason,
        hint="algorithm.router_replay needs them: append groups of the run's own generators only",
    )
