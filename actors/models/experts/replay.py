"""Replaying, where a model learns, which experts read each token as it was generated (R3).

Generator and learner compute in different ways, and a router's choice is not continuous: what
changes a hidden state by a thousandth may give a token other experts, and another log-prob. With
the generator's choices the learner computes with the experts that the generator computed with; how
they are weighed is the learner's own, with gradients ("Stabilizing MoE Reinforcement Learning by
Aligning Training and Inference Routers", arXiv:2510.11370).

Shape letters: B rows, T columns, X tokens of a forward pass, L layers, K experts of a token.
"""

from functools import partial
from typing import Any

import numpy as np
from torch import Tensor, nn

from ....schemas.rollout import Group
from ....schemas.wire.errors import DataError
from .routers import ExpertShape, check_formula, routers_of, shape_of, weigh


class RouterReplay:
    """Puts recorded choices in the place of those of a model's routers."""

    def __init__(self, model: nn.Module) -> None:
        """Take hold of the routers; ModelError for a model whose choices cannot be replayed."""
        self.shape: ExpertShape = shape_of(model)
        self._chosen_XLK: Tensor | None = None
        for layer, router in enumerate(routers_of(model)):
            check_formula(router)
            router.register_forward_hook(partial(self._replay, layer))

    def use(self, chosen_BTLK: Tensor | None) -> None:
        """Let the passes from now on have these choices; None: the routers' own.

        They hold until the next call, since gradient checkpointing computes layers again later.
        """
        self._chosen_XLK = None if chosen_BTLK is None else chosen_BTLK.flatten(0, 1).long()

    def check(self, group: Group) -> None:
        """Raise DataError for a group that does not tell the experts of what is to be trained."""
        for item in group.sampled:
            told = item.experts
            if told is None:
                raise _unfit("a trajectory does not tell which experts read its tokens")
            if not self.shape.fits(told.shape):
                raise _unfit(
                    f"a trajectory tells {told.shape[2]} experts of {told.shape[1]} layers for a "
                    f"token, the model has {self.shape.chosen} of {self.shape.layers}"
                )
            if told.max() >= self.shape.experts or (np.diff(np.sort(told)) == 0).any():
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
        hint="algorithm.router_replay needs them: append groups of the job's own generators only",
    )
