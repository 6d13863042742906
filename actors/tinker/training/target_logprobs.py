"""Log-probs of some targets out of logits, without a second tensor of their size.

Shape letters: U columns, V vocabulary, E targets.
"""

# torch leaves some of its methods untyped.
# pyright: reportUnknownMemberType=false, reportUntypedBaseClass=false

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function


def target_logprobs(logits_UV: Tensor, place_E: Tensor, targets_E: Tensor) -> Tensor:
    """Return the log-prob of each target at its column: float32[E].

    The backward pass writes over the logits, so they must be nobody else's; it runs once.
    """
    return cast(Tensor, _TargetLogprobs.apply(logits_UV.float(), place_E, targets_E))


def add_at(row: Tensor, index: Tensor, values: Tensor) -> Tensor:
    """Add values to a row where the index says, in place, in an order that is always the same."""
    if row.device.type == "cpu":  # one after the other there, whatever the number of threads
        return row.index_add_(0, index, values)
    return row.index_put_((index,), values, accumulate=True)  # sorted there


class _TargetLogprobs(Function):
    @staticmethod
    def forward(ctx: Any, logits_UV: Tensor, place_E: Tensor, targets_E: Tensor) -> Tensor:
        norm_U = logits_UV.logsumexp(-1)
        ctx.save_for_backward(logits_UV, norm_U, place_E, targets_E)
        return logits_UV[place_E, targets_E] - norm_U[place_E]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """The gradient of a column's logits: what its targets get, less softmax times their sum."""
        (gradient_E,) = gradients
        logits_UV, norm_U, place_E, targets_E = cast("tuple[Tensor, ...]", ctx.saved_tensors)
        sum_U = add_at(torch.zeros_like(norm_U), place_E, gradient_E)
        result_UV = logits_UV.sub_(norm_U[:, None]).exp_().mul_(-sum_U[:, None])
        add_at(result_UV.view(-1), place_E * logits_UV.shape[1] + targets_E, gradient_E)
        return result_UV, None, None
