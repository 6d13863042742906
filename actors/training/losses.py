"""Policy losses of generated tokens, their aggregation, KL and entropy.

Each loss returns `(loss_N, statistics)`; the statistics are detached sums over tokens, which are
added over micro-batches and divided by the number of tokens of the whole batch. The importance
weight of an off-policy correction multiplies `loss_N` afterwards; see `off_policy.py`.

Aggregation: the denominators are counted over the whole batch, all micro-batches and ranks, so the
sum of the parts' aggregates is the aggregate of the batch, for any division between sequences. A
framework that averages gradients over ranks needs the loss times the number of ranks.

KL to a frozen reference is estimated from the sampled tokens: with x = log π − log π_ref the
estimators are k1 = x, k2 = x²/2, k3 = e^(−x) − 1 + x (http://joschu.net/blog/kl-approx.html). In
the loss the gradient flows through `logprobs_N`; the gradient of k1 is 0 in expectation, so k1
belongs in the reward. k1+ and k3+ (verl's names) have the values of k1 and k3 with the gradient of
k2, which is the gradient of the KL.

Shape letters: N generated tokens, S sequences.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .sequences import choose, lengths_by_sequence, mean_by_sequence, sum_by_sequence

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to ± this value before they are exponentiated."""

_LEAST_LOG_WEIGHT = math.log(1e-8)

TokenLoss = tuple[Tensor, dict[str, Tensor]]
LossFn = Callable[..., TokenLoss]


@dataclass(frozen=True)
class LossInputs:
    """Inputs of the losses; the log-probs are of the sampled tokens."""

    logprobs_N: Tensor
    """Current policy π, with gradient."""
    advantages_N: Tensor
    """Advantage of each token."""
    old_logprobs_N: Tensor
    """Policy π_o around which the loss clips: the policy before the update, or the proximal one."""
    behaviour_logprobs_N: Tensor
    """Policy π_b that generated the tokens, as recorded by the engine; read by losses with their
    own correction: dppo, dppo_kl, topr, vespo."""
    seq_N: Tensor
    """int64: the sequence of each token; read by gspo, gmpo, topr and vespo."""
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
    """max(−A r, −A clip(r, 1−ε_lo, 1+ε_hi)), and the tokens where the clip applies."""
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
    """Clip the sequence ratio s = exp(mean log r), with a straight-through gradient to tokens.

    The paper (arXiv 2507.18071) aggregates by `seq-mean-token-mean`.
    """
    log_ratio_N = log_ratio(inputs.logprobs_N, inputs.old_logprobs_N)
    mean_S = mean_by_sequence(log_ratio_N.detach(), inputs.seq_N, inputs.num_seqs)
    straight_through_N = inputs.logprobs_N - inputs.logprobs_N.detach()
    ratio_N = (mean_S[inputs.seq_N] + straight_through_N).exp()
    loss_N, clipped_N = _clipped(ratio_N, inputs.advantages_N, clip_low, clip_high)
    return loss_N, _statistics(log_ratio_N, clipped_N)


def cispo(inputs: LossInputs, *, clip_low: float = 0.0, clip_high: float = 5.0) -> TokenLoss:
    """−sg(clip(r, ε_lo, ε_hi)) · A · log π: every token keeps its gradient (arXiv 2506.13585).

    By default it does not clip from below, as in the paper and in TRL; verl uses 1 − 0.2.
    """
    log_ratio_N = log_ratio(inputs.logprobs_N, inputs.old_logprobs_N)
    ratio_N = log_ratio_N.detach().exp()
    weight_N = ratio_N.clamp(min=clip_low, max=clip_high)
    loss_N = -weight_N * inputs.advantages_N * inputs.logprobs_N
    return loss_N, _statistics(log_ratio_N, ratio_N > clip_high, ratio_N < clip_low)


def gmpo(inputs: LossInputs, *, clip_low: float = 0.4, clip_high: float = 0.4) -> TokenLoss:
    """−A · exp(mean of clipped log r) over a sequence: the geometric mean (arXiv 2507.20673).

    Each log r is clipped to [−ε_lo, ε_hi] if the clipped value is the worse one for its advantage.
    Each token has its sequence's loss; the paper aggregates by `seq-mean-token-mean`.
    """
    log_ratio_N = log_ratio(inputs.logprobs_N, inputs.old_logprobs_N)
    sign_N = inputs.advantages_N.sign()
    bounded_N = sign_N * log_ratio_N.clamp(-clip_low, clip_high)
    worse_N = sign_N * torch.minimum(sign_N * log_ratio_N, bounded_N)
    parts = (inputs.seq_N, inputs.num_seqs)
    ratio_S = mean_by_sequence(worse_N, *parts).exp()
    advantage_S = mean_by_sequence(inputs.advantages_N, *parts)
    clipped_N = bounded_N < sign_N * log_ratio_N
    return (-advantage_S * ratio_S)[inputs.seq_N], _statistics(log_ratio_N, clipped_N)


def _by_sign(positive_N: Tensor, positive: float, negative: float) -> Tensor:
    """float64[N]: one of two numbers for each token, by the sign of its advantage."""
    numbers = torch.tensor([negative, positive], dtype=torch.float64, device=positive_N.device)
    return numbers[positive_N.long()]


def sapo(inputs: LossInputs, *, tau_pos: float = 1.0, tau_neg: float = 1.05) -> TokenLoss:
    """−A · (4/τ) σ(τ (r − 1)): a soft gate in place of a clip (arXiv 2511.20347).

    τ is `tau_pos` where A > 0, else `tau_neg`.
    """
    log_ratio_N = log_ratio(inputs.logprobs_N, inputs.old_logprobs_N)
    tau_N = _by_sign(inputs.advantages_N > 0, tau_pos, tau_neg)
    gate_N = torch.sigmoid(tau_N * (log_ratio_N.exp() - 1)) * (4 / tau_N)
    never_N = torch.zeros_like(log_ratio_N, dtype=torch.bool)
    loss_N = (-gate_N * inputs.advantages_N).to(log_ratio_N.dtype)
    return loss_N, _statistics(log_ratio_N, never_N)


def topr(inputs: LossInputs) -> TokenLoss:
    """−A log π where A ≥ 0, −sg(min(∏π/π_b, 1)) A log π elsewhere (TOPR, arXiv 2503.14286).

    Positive samples have full weight, negative ones at most their current probability ratio. It
    includes its own off-policy correction: use it with `correction=none`.
    """
    log_ratio_N = inputs.logprobs_N.detach() - inputs.behaviour_logprobs_N
    product_S = sum_by_sequence(log_ratio_N, inputs.seq_N, inputs.num_seqs)
    taper_N = product_S.clamp(-MAX_LOG_RATIO, 0.0).exp()[inputs.seq_N]
    weight_N = torch.where(inputs.advantages_N >= 0, 1.0, taper_N)
    bounded_N = (inputs.advantages_N < 0) & (product_S > 0)[inputs.seq_N]
    loss_N = -weight_N * inputs.advantages_N * inputs.logprobs_N
    return loss_N, _statistics(log_ratio_N, bounded_N)


def vespo(
    inputs: LossInputs,
    *,
    k_pos: float = 2.0,
    lambda_pos: float = 3.0,
    k_neg: float = 3.0,
    lambda_neg: float = 2.0,
) -> TokenLoss:
    """−sg(φ(W)) A log π, φ(W) = W^k e^(λ(1−W)), W = ∏π/π_b of the sequence (arXiv 2602.10693).

    k and λ depend on the advantage's sign. It includes its own off-policy correction: use it with
    `correction=none`.
    """
    log_ratio_N = log_ratio(inputs.logprobs_N.detach(), inputs.behaviour_logprobs_N)
    product_S = sum_by_sequence(log_ratio_N, inputs.seq_N, inputs.num_seqs)
    log_w_N = product_S.clamp(_LEAST_LOG_WEIGHT, MAX_LOG_RATIO)[inputs.seq_N]
    positive_N = inputs.advantages_N >= 0
    k_N, lambda_N = _by_sign(positive_N, k_pos, k_neg), _by_sign(positive_N, lambda_pos, lambda_neg)
    log_weight_N = lambda_N + k_N * log_w_N - lambda_N * log_w_N.exp()
    weight_N = log_weight_N.exp().to(log_ratio_N.dtype)
    never_N = torch.zeros_like(log_ratio_N, dtype=torch.bool)
    loss_N = -weight_N * inputs.advantages_N * inputs.logprobs_N
    return loss_N, _statistics(log_ratio_N, never_N)


def _covariance(inputs: LossInputs) -> Tensor:
    """(A − mean A)(log π − mean log π) of each token, over the tokens of the micro-batch."""
    advantages_N, logprobs_N = inputs.advantages_N, inputs.logprobs_N.detach()
    if not len(advantages_N):
        return advantages_N
    return (advantages_N - advantages_N.mean()) * (logprobs_N - logprobs_N.mean())


def clip_cov(
    inputs: LossInputs,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    share: float = 0.0002,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
) -> TokenLoss:
    """PPO's clip, without some of the tokens that lower entropy most.

    Of the tokens of a micro-batch that are not clipped, `share` (one at least) are drawn from those
    whose covariance of advantage and log-prob lies between the bounds, and are not trained (arXiv
    2505.22617).
    """
    log_ratio_N = log_ratio(inputs.logprobs_N, inputs.old_logprobs_N)
    loss_N, clipped_N = _clipped(log_ratio_N.exp(), inputs.advantages_N, clip_low, clip_high)
    cov_N = _covariance(inputs)
    drawn = ((cov_N > cov_low) & (cov_N < cov_high) & ~clipped_N).nonzero().squeeze(1)
    most = max(int(share * len(cov_N)), 1)
    drawn = drawn[torch.randperm(len(drawn))[:most].to(drawn.device)]
    left_out_N = torch.zeros_like(clipped_N).index_fill(0, drawn, value=True)
    return loss_N.masked_fill(left_out_N, 0.0), _statistics(log_ratio_N, left_out_N)


def kl_cov(inputs: LossInputs, *, share: float = 0.0002, coef: float = 1.0) -> TokenLoss:
    """−A r, and a penalty `coef` · |log r| where entropy falls most (arXiv 2505.22617).

    The penalty applies to the `share` of a micro-batch's tokens (one at least) with the greatest
    covariance of advantage and log-prob.
    """
    log_ratio_N = log_ratio(inputs.logprobs_N, inputs.old_logprobs_N)
    cov_N = _covariance(inputs)
    most = min(max(int(share * len(cov_N)), 1), len(cov_N))
    places = cov_N.topk(most).indices
    held_N = torch.zeros_like(cov_N, dtype=torch.bool).index_fill(0, places, value=True)
    plain_N = -inputs.advantages_N * log_ratio_N.exp()
    loss_N = torch.where(held_N, plain_N + coef * log_ratio_N.abs(), plain_N)
    return loss_N, _statistics(log_ratio_N, held_N)


def dppo(
    inputs: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.2, kl_tau: float = 1e-3
) -> TokenLoss:
    """−A·π/π_b, masked where the probability has moved too far, + τ (log π/π_b)².

    Too far: π − π_b > ε_hi for A > 0, < −ε_lo for A < 0 (total variation, arXiv 2602.04879). It
    includes its own off-policy correction: use it with `correction=none`.
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


def dppo_kl(
    inputs: LossInputs, *, clip_low: float = 0.05, clip_high: float = 0.05, ratio_cap: float = 20.0
) -> TokenLoss:
    """−A · sg(min(π/π_b, cap)) · log π, masked where the token's binary KL has grown too far.

    Too far: KL(Bernoulli(π_b)‖Bernoulli(π)) > ε_hi with A > 0 and π > π_b, or > ε_lo with A ≤ 0 and
    π < π_b (arXiv 2602.04879). It includes its own off-policy correction.
    """
    behaviour_N, current_N = inputs.behaviour_logprobs_N, inputs.logprobs_N.detach()
    log_ratio_N = log_ratio(current_N, behaviour_N)
    before_N, now_N = behaviour_N.exp(), current_N.exp()
    rest_N = torch.log((1 - before_N + 1e-8) / (1 - now_N + 1e-8))
    kl_N = before_N * (behaviour_N - current_N) + (1 - before_N) * rest_N
    up_N = (inputs.advantages_N > 0) & (kl_N > clip_high) & (now_N > before_N)
    down_N = (inputs.advantages_N <= 0) & (kl_N > clip_low) & (now_N < before_N)
    weight_N = log_ratio_N.exp().clamp(max=ratio_cap).masked_fill(up_N | down_N, 0.0)
    loss_N = -weight_N * inputs.advantages_N * inputs.logprobs_N
    return loss_N, _statistics(log_ratio_N, up_N | down_N)


def reinforce(inputs: LossInputs) -> TokenLoss:
    """−A log π (Williams 1992)."""
    log_ratio_N = log_ratio(inputs.logprobs_N, inputs.old_logprobs_N)
    never_N = torch.zeros_like(inputs.logprobs_N, dtype=torch.bool)
    return -inputs.advantages_N * inputs.logprobs_N, _statistics(log_ratio_N, never_N)


def sft(inputs: LossInputs) -> TokenLoss:
    """Cross entropy on the tokens of mask 1: −log π. No statistics."""
    return -inputs.logprobs_N, {}


LOSSES: dict[str, LossFn] = {
    "ppo": ppo,
    "gspo": gspo,
    "gmpo": gmpo,
    "cispo": cispo,
    "sapo": sapo,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "dppo": dppo,
    "dppo_kl": dppo_kl,
    "topr": topr,
    "vespo": vespo,
    "reinforce": reinforce,
    "sft": sft,
}


def compute_loss(name: str, inputs: LossInputs, **options: Any) -> TokenLoss:
    """Compute the loss of each token, and sums of statistics over the tokens.

    `options` are the keyword arguments of the function called `name`.
    """
    return choose(LOSSES, "loss", name)(inputs, **options)


# -- aggregation -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Denominators:
    """Denominators of the losses: counts over the whole batch, on all ranks."""

    tokens: int
    """Number of generated tokens, before any correction masks some."""
    sequences: int
    """Number of sequences with at least one generated token; rows of one episode are one
    sequence."""
    constant_length: int = 1
    """Divisor of seq-mean-token-sum-norm: the longest response allowed."""
    lengths_S: Tensor | None = None
    """int64: generated tokens of each sequence of the whole batch; None: no sequence is divided."""
    share_S: Tensor | None = None
    """Share of each sequence in a part of the batch; None: each sequence is whole."""

    @classmethod
    def of(cls, seq_N: Tensor, constant_length: int = 1, num_seqs: int = 0) -> "Denominators":
        """Count the tokens of a whole batch, and its sequences among `num_seqs`."""
        lengths_S = lengths_by_sequence(seq_N, num_seqs)
        return cls(len(seq_N), int((lengths_S > 0).sum()), constant_length, lengths_S)

    def of_part(self, seq_N: Tensor, numbers_S: Tensor) -> "Denominators":
        """Return the denominators for a part of the batch, by its sequences' numbers in the whole.

        An episode of several rows may be divided; an undivided one has a share of exactly 1. Tokens
        that are measured but not trained do not count in lengths.
        """
        if self.lengths_S is None:
            return self
        here_S = lengths_by_sequence(seq_N, len(numbers_S))
        whole_S = self.lengths_S[numbers_S]
        return replace(self, share_S=here_S / torch.where(whole_S > 0, whole_S, here_S))


Aggregation = Callable[[Tensor, Tensor, int, Denominators], Tensor]


def token_mean(
    loss_N: Tensor, seq_N: Tensor, num_seqs_local: int, denominators: Denominators
) -> Tensor:
    """Weight every token the same."""
    return loss_N.sum() / max(denominators.tokens, 1)


def seq_mean_token_mean(
    loss_N: Tensor, seq_N: Tensor, num_seqs_local: int, denominators: Denominators
) -> Tensor:
    """Weight every sequence the same: the mean of the sequences' means."""
    means_S = mean_by_sequence(loss_N, seq_N, num_seqs_local)
    if denominators.share_S is not None:
        means_S = means_S * denominators.share_S
    return means_S.sum() / max(denominators.sequences, 1)


def seq_mean_token_sum(
    loss_N: Tensor, seq_N: Tensor, num_seqs_local: int, denominators: Denominators
) -> Tensor:
    """Take the mean of the sequences' sums."""
    return loss_N.sum() / max(denominators.sequences, 1)


def seq_mean_token_sum_norm(
    loss_N: Tensor, seq_N: Tensor, num_seqs_local: int, denominators: Denominators
) -> Tensor:
    """Take the mean of the sequences' sums, divided by a constant length (Dr. GRPO)."""
    total = seq_mean_token_sum(loss_N, seq_N, num_seqs_local, denominators)
    return total / denominators.constant_length


AGGREGATIONS: dict[str, Aggregation] = {
    "token-mean": token_mean,
    "seq-mean-token-mean": seq_mean_token_mean,
    "seq-mean-token-sum": seq_mean_token_sum,
    "seq-mean-token-sum-norm": seq_mean_token_sum_norm,
}


def aggregate(
    mode: str, loss_N: Tensor, seq_N: Tensor, num_seqs_local: int, denominators: Denominators
) -> Tensor:
    """Aggregate the token losses of one micro-batch into its share of the batch's loss."""
    return choose(AGGREGATIONS, "loss_agg", mode)(loss_N, seq_N, num_seqs_local, denominators)


# -- KL and entropy --------------------------------------------------------------------------------

KlEstimator = Callable[[Tensor, Tensor], Tensor]


def k1(logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
    """Return x: unbiased, high variance, may be negative."""
    return log_ratio(logprobs_N, reference_N)


def k2(logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
    """Return x²/2: biased, never negative; its gradient is that of the KL."""
    return log_ratio(logprobs_N, reference_N) ** 2 / 2


def k3(logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
    """Return e^(−x) − 1 + x: unbiased, never negative."""
    x_N = log_ratio(logprobs_N, reference_N)
    return torch.exp(-x_N) - 1 + x_N


def _with_gradient_of_k2(value: Callable[[Tensor, Tensor], Tensor]) -> KlEstimator:
    def estimate(logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
        slope_N = k2(logprobs_N, reference_N)
        return value(logprobs_N, reference_N).detach() + slope_N - slope_N.detach()

    return estimate


KL_ESTIMATORS: dict[str, KlEstimator] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "k1+": _with_gradient_of_k2(k1),
    "k3+": _with_gradient_of_k2(k3),
}


def kl_per_token(name: str, logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
    """Estimate KL(π‖π_ref) at each token; differentiable in `logprobs_N`."""
    return choose(KL_ESTIMATORS, "kl_estimator", name)(logprobs_N, reference_N)


def rewards_with_kl(
    name: str, token_rewards_N: Tensor, logprobs_N: Tensor, reference_N: Tensor, coef: float
) -> Tensor:
    """Subtract the KL from the reward of each token; no gradient.

    An outcome advantage takes the sum over each sequence as its `rewards_S`.
    """
    kl_N = kl_per_token(name, logprobs_N.detach(), reference_N.detach())
    return token_rewards_N - coef * kl_N
