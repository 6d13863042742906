"""Policy losses: one value for each generated token, before aggregation.

Shapes: N generated tokens, S sequences. Each function returns `(loss_N, statistics)`; the
statistics are detached sums over tokens, so that those of micro-batches add up, to be divided by
the number of tokens of the whole batch. The importance weight of an off-policy correction
multiplies `loss_N` afterwards; see `corrections.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .registry import choose
from .sequences import mean_by_sequence

MAX_LOG_RATIO = 20.0
"""Log-ratios beyond it are clamped before they are exponentiated."""

TokenLoss = tuple[Tensor, dict[str, Tensor]]
LossFn = Callable[..., TokenLoss]


@dataclass(frozen=True)
class LossInputs:
    """What the losses read; the log-probs are of the sampled tokens."""

    logprobs_N: Tensor
    """Current policy π, with gradient."""
    advantages_N: Tensor
    """Advantage of each token."""
    old_logprobs_N: Tensor
    """Policy π_o around which the loss clips: before the update, or proximal."""
    behaviour_logprobs_N: Tensor
    """Policy π_b that generated the tokens, as recorded by the engine; read by dppo."""
    seq_N: Tensor
    """int64: the sequence of each token; read by gspo."""
    num_seqs: int
    """Number of sequences of this micro-batch."""


def log_ratio(numerator_N: Tensor, denominator_N: Tensor) -> Tensor:
    """Subtract log-probs and clamp the difference to ±20."""
    return (numerator_N - denominator_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _statistics(
    log_ratio_N: Tensor, clipped_N: Tensor, lower_clipped_N: Tensor | None = None
) -> dict[str, Tensor]:
    lower_N = torch.zeros_like(clipped_N) if lower_clipped_N is None else lower_clipped_N
    return {
        "pg_clipfrac": clipped_N.sum().float().detach(),
        "pg_clipfrac_lower": lower_N.sum().float().detach(),
        "ppo_kl": -log_ratio_N.detach().float().sum(),
    }


def _clipped(
    ratio_N: Tensor, advantages_N: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """max(−A r, −A clip(r, 1−ε_lo, 1+ε_hi)), and where the clip is what counts."""
    plain_N = -advantages_N * ratio_N
    bounded_N = -advantages_N * ratio_N.clamp(1 - clip_low, 1 + clip_high)
    return torch.maximum(plain_N, bounded_N), bounded_N > plain_N


def ppo(
    inputs: LossInputs,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float = 3.0,
) -> TokenLoss:
    """Clip the ratio to [1−ε_lo, 1+ε_hi] (arXiv 1707.06347).

    A higher upper clip is DAPO's clip-higher (arXiv 2503.14476). For A < 0 the loss is at most
    −cA (dual clip, arXiv 1912.09729).
    """
    log_ratio_N = log_ratio(inputs.logprobs_N, inputs.old_logprobs_N)
    loss_N, clipped_N = _clipped(log_ratio_N.exp(), inputs.advantages_N, clip_low, clip_high)
    ceiling_N = -dual_clip * inputs.advantages_N
    negative_N = inputs.advantages_N < 0
    lower_N = negative_N & (loss_N > ceiling_N)
    loss_N = torch.where(negative_N, torch.minimum(loss_N, ceiling_N), loss_N)
    return loss_N, _statistics(log_ratio_N, clipped_N, lower_N)


def gspo(inputs: LossInputs, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> TokenLoss:
    """Clip the sequence ratio s = exp(mean log r), passed straight through to the tokens.

    The paper (arXiv 2507.18071) aggregates by `seq-mean-token-mean`.
    """
    log_ratio_N = log_ratio(inputs.logprobs_N, inputs.old_logprobs_N)
    mean_S = mean_by_sequence(log_ratio_N.detach(), inputs.seq_N, inputs.num_seqs)
    straight_through_N = inputs.logprobs_N - inputs.logprobs_N.detach()
    ratio_N = (mean_S[inputs.seq_N] + straight_through_N).exp()
    loss_N, clipped_N = _clipped(ratio_N, inputs.advantages_N, clip_low, clip_high)
    return loss_N, _statistics(log_ratio_N, clipped_N)


def cispo(inputs: LossInputs, *, clip_high: float = 5.0) -> TokenLoss:
    """−sg(clip(r, 0, ε_hi)) · A · log π: no token loses its gradient (arXiv 2506.13585).

    There is no lower clip, as in the paper and in TRL; verl has one.
    """
    log_ratio_N = log_ratio(inputs.logprobs_N, inputs.old_logprobs_N)
    ratio_N = log_ratio_N.detach().exp()
    weight_N = ratio_N.clamp(max=clip_high)
    loss_N = -weight_N * inputs.advantages_N * inputs.logprobs_N
    return loss_N, _statistics(log_ratio_N, ratio_N > clip_high)


def dppo(
    inputs: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.2, kl_tau: float = 1e-3
) -> TokenLoss:
    """−A·π/π_b, masked where the probability has moved too far, + τ (log π/π_b)².

    Too far: π − π_b > ε_hi for A > 0, < −ε_lo for A < 0 (total variation, arXiv 2602.04879). It
    corrects for the behaviour policy by itself: use it with `correction=none`.
    """
    behaviour_N = inputs.behaviour_logprobs_N
    log_ratio_N = log_ratio(inputs.logprobs_N, behaviour_N)
    moved_N = inputs.logprobs_N.detach().exp() - behaviour_N.exp()
    masked_N = ((inputs.advantages_N > 0) & (moved_N > clip_high)) | (
        (inputs.advantages_N < 0) & (moved_N < -clip_low)
    )
    policy_N = -inputs.advantages_N * log_ratio_N.exp()
    loss_N = policy_N.masked_fill(masked_N, 0.0) + kl_tau * log_ratio_N**2
    return loss_N, _statistics(log_ratio_N, masked_N)


def reinforce(inputs: LossInputs) -> TokenLoss:
    """−A log π (Williams 1992)."""
    log_ratio_N = log_ratio(inputs.logprobs_N, inputs.old_logprobs_N)
    never_N = torch.zeros_like(inputs.logprobs_N, dtype=torch.bool)
    return -inputs.advantages_N * inputs.logprobs_N, _statistics(log_ratio_N, never_N)


def sft(inputs: LossInputs) -> TokenLoss:
    """Cross entropy on the tokens of mask 1: −log π. Statistics: none."""
    return -inputs.logprobs_N, {}


LOSSES: dict[str, LossFn] = {
    "ppo": ppo,
    "gspo": gspo,
    "cispo": cispo,
    "dppo": dppo,
    "reinforce": reinforce,
    "sft": sft,
}


def compute_loss(name: str, inputs: LossInputs, **options: Any) -> TokenLoss:
    """Compute the loss of each token, and sums of statistics over the tokens.

    `options` are the keyword arguments of the function called `name`.
    """
    return choose(LOSSES, "loss", name)(inputs, **options)
