"""Masks: which tokens an off-policy correction drops, whatever it weighs the others by.

Shapes: N generated tokens, S sequences. What is bounded is taken from log w = log π_o − log π_b of
each token: the ratio w itself, or an estimate of KL(π_b‖π_o): k1 = −log w, k2 = (log w)²/2,
k3 = w − 1 − log w. A mask over sequences drops all tokens of one: by the sum of its tokens' values
(of ratios their product), their mean (of ratios the geometric mean), or as soon as one of its
tokens is out of bounds.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .....schemas.config.algorithms.corrections import CorrectionMask
from ..losses import MAX_LOG_RATIO
from ..sequences import mean_by_sequence, sum_by_sequence
from .corrections import Correction, CorrectionInputs

_BY_SEQUENCE: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "sequence_sum": sum_by_sequence,
    "sequence_mean": mean_by_sequence,
}


@torch.no_grad()
def masked(
    correction: Correction,
    masks: Sequence[CorrectionMask],
    inputs: CorrectionInputs,
    advantages_N: Tensor,
) -> Correction:
    """Return a correction with the weight 0 for each token that one of the masks drops."""
    weight_N = correction.weight_N
    for mask in masks:
        dropped_N = _out_of_bounds(mask, inputs)
        if mask.only == "negative":
            dropped_N = dropped_N & (advantages_N < 0)
        weight_N = weight_N.masked_fill(dropped_N, 0.0)
    return Correction(weight_N, correction.old_logprobs_N)


def _out_of_bounds(mask: CorrectionMask, inputs: CorrectionInputs) -> Tensor:
    """Mark the tokens that a mask drops: bool[N]."""
    log_N = inputs.old_logprobs_N - inputs.behaviour_logprobs_N
    value_N = log_N if mask.of == "ratio" else _divergence(mask.of, log_N)
    if mask.over in _BY_SEQUENCE:
        value_S = _BY_SEQUENCE[mask.over](value_N, inputs.seq_N, inputs.num_seqs)
        return _outside(mask, value_S)[inputs.seq_N]
    outside_N = _outside(mask, value_N)
    if mask.over == "token":
        return outside_N
    caught_S = sum_by_sequence(outside_N.to(log_N.dtype), inputs.seq_N, inputs.num_seqs)
    return (caught_S > 0)[inputs.seq_N]


def _divergence(of: str, log_N: Tensor) -> Tensor:
    if of == "k1":
        return -log_N
    bounded_N = log_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return bounded_N**2 / 2 if of == "k2" else bounded_N.exp() - 1 - bounded_N


def _outside(mask: CorrectionMask, values: Tensor) -> Tensor:
    """Mark values beyond the bounds of a mask; those of ratios come as logarithms, whose
    exponentials may be infinite: that is beyond any bound."""
    outside = torch.zeros_like(values, dtype=torch.bool)
    low, high = mask.low, mask.high
    if mask.of == "ratio":
        values = values.exp()
    if low is not None:
        outside |= values < low
    if high is not None:
        outside |= values > high
    return outside
