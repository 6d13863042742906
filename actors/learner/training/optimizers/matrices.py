"""An optimiser with a rule of its own for matrices; AdamW updates all else.

To whoever sets a learning rate, writes a checkpoint or divides the state over ranks it is an
optimiser like any other, with a group of parameters for each of the two.
"""

# torch leaves some of its methods untyped.
# pyright: reportUnknownMemberType=false

from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from .....schemas.config.learner import LearnerConfig

_CODES = "_codes"
"""How the names of integers in an optimiser's state end."""


class MatrixRule(Protocol):
    """How matrices are updated by their gradients."""

    name: str
    """That of the optimiser, as it is configured; the group of its matrices is marked with it."""

    def settings(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of it beside rate and decay."""
        ...

    def update(self, matrices: list[Tensor], states: list[dict[str, Any]], group: Any) -> None:
        """Move matrices that have gradients, and what is remembered of each: empty at first."""
        ...


class MatrixOptimizer(torch.optim.Optimizer):
    """A rule for matrices and torch's AdamW for the rest, as one optimiser."""

    def __init__(
        self,
        matrices: Sequence[nn.Parameter],
        rest: Sequence[nn.Parameter],
        rule: MatrixRule,
        config: LearnerConfig,
        learning_rate: float,
    ) -> None:
        """Either of the two kinds of parameters may be lacking."""
        self._rule = rule
        self._adamw = adamw(rest, config, learning_rate) if rest else None
        own: dict[str, Any] = {
            "params": list(matrices),
            "lr": learning_rate,
            "weight_decay": config.weight_decay,
            rule.name: True,
            **rule.settings(),
        }
        groups = [own] if matrices else []
        super().__init__([*groups, *(self._adamw.param_groups if self._adamw else [])], {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Make one update with the gradients that are there."""
        assert closure is None
        for group in self.param_groups:
            if self._rule.name in group:
                moved = [weight for weight in group["params"] if weight.grad is not None]
                self._rule.update(moved, [self.state[weight] for weight in moved], group)
        if self._adamw is not None:
            # Both are replaced when a state is loaded.
            rest = [group for group in self.param_groups if self._rule.name not in group]
            self._adamw.param_groups = rest
            self._adamw.state = self.state
            self._adamw.step()

    def load_state_dict(self, state_dict: Any) -> None:
        """Take over a state; integers of it stay integers, which torch makes floats of."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            for name in [name for name in state if name.endswith(_CODES)]:
                state[name] = state[name].to(torch.uint8)


def adamw(
    parameters: Sequence[nn.Parameter], config: LearnerConfig, learning_rate: float
) -> torch.optim.AdamW:
    """Return torch's AdamW with the learner's settings but for the rate."""
    return torch.optim.AdamW(
        parameters,
        lr=learning_rate,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )


def split(parameters: Sequence[nn.Parameter], apart: set[int]) -> tuple[list[Any], list[Any]]:
    """Return the matrices among parameters, and all else; those `apart`, by their ids, are else.

    A tensor of more dimensions than two counts as many matrices where a model keeps its experts so.
    """
    matrices = [each for each in parameters if each.ndim in (2, 3) and id(each) not in apart]
    found = {id(each) for each in matrices}
    return matrices, [each for each in parameters if id(each) not in found]


def not_hidden(model: nn.Module) -> set[int]:
    """Return the ids of the parameters of embeddings, convolutions and the output layer."""
    output: nn.Module = cast(Any, model).get_output_embeddings()
    kinds = (nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    modules = [module for module in model.modules() if isinstance(module, kinds)]
    return {id(weight) for module in [*modules, output] for weight in module.parameters()}
