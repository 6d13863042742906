"""Off-policy corrections and masks, and the mismatch of trained and generating policy.

π_b is the behaviour policy, π_o the policy before the update, w = π_o/π_b. A correction returns a
weight for each token (0 for dropped tokens) and the log-probs around which the loss clips; masks
drop further tokens. Weights have no gradient; the denominators of the aggregation include dropped
tokens, unless `correction_denominator` is `kept`.

Sequence corrections need whole sequences; m2po and normalised weights need the whole batch: compute
them before the batch is divided into micro-batches. Only the log-linear proximal policy of
`decoupled` needs the current log-probs, and it works on any part.

A mask bounds a value of log w = log π_o − log π_b of each token: the ratio w itself, or an estimate
of KL(π_b‖π_o): k1 = −log w, k2 = (log w)²/2, k3 = w − 1 − log w. A mask over sequences drops all
tokens of a sequence, by the sum of its tokens' values (for ratios their product), by their mean
(for ratios the geometric mean), or if one of its tokens is out of bounds.

Shape letters: N generated tokens, S sequences.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ...schemas.config.algorithm import CorrectionMask
from ...schemas.wire.errors import ConfigError
from .batch import TrainingBatch
from .losses import MAX_LOG_RATIO, log_ratio
from .sequences import choose, mean_by_sequence, sum_by_sequence


@dataclass(frozen=True)
class CorrectionInputs:
    """Inputs of the corrections."""

    old_logprobs_N: Tensor
    """Learner's log-probs before the update (π_o)."""
    behaviour_logprobs_N: Tensor
    """Log-probs recorded by the engine (π_b)."""
    seq_N: Tensor
    """int64: the sequence of each token."""
    num_seqs: int
    """Number of sequences."""
    logprobs_N: Tensor | None = None
    """Current log-probs (π); read by `decoupled` with proximal=loglinear."""
    lag_N: Tensor | None = None
    """Learner's version minus each token's version; read by `decoupled` with proximal=loglinear."""


@dataclass(frozen=True)
class Correction:
    """Weights and log-probs for the loss."""

    weight_N: Tensor
    """Weight of the token loss; 0 drops the token; no gradient."""
    old_logprobs_N: Tensor
    """Log-probs around which the loss clips; no gradient."""


CorrectionFn = Callable[..., Correction]


def _log_weight(inputs: CorrectionInputs) -> Tensor:
    return log_ratio(inputs.old_logprobs_N, inputs.behaviour_logprobs_N)


def _log_product(inputs: CorrectionInputs) -> Tensor:
    """log ∏w of each sequence, clamped so that its exponential stays finite."""
    total_S = sum_by_sequence(_log_weight(inputs), inputs.seq_N, inputs.num_seqs)
    return total_S.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _keep(inputs: CorrectionInputs, keep_N: Tensor) -> Correction:
    return Correction(keep_N.to(inputs.old_logprobs_N.dtype), inputs.old_logprobs_N)


def none(inputs: CorrectionInputs) -> Correction:
    """Train as if the behaviour policy were π_o."""
    return Correction(torch.ones_like(inputs.old_logprobs_N), inputs.old_logprobs_N)


def tis(
    inputs: CorrectionInputs, *, cap: float = 2.0, level: Literal["token", "sequence"] = "token"
) -> Correction:
    """Weight by min(w, C), or by min(∏w, C) over the sequence (truncated importance sampling)."""
    if level not in ("token", "sequence"):
        raise ConfigError(f"correction_level={level} does not exist", hint="choose token, sequence")
    if level == "token":
        log_N = _log_weight(inputs)
    else:
        plain_N = inputs.old_logprobs_N - inputs.behaviour_logprobs_N
        total_S = sum_by_sequence(plain_N, inputs.seq_N, inputs.num_seqs)
        log_N = total_S.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)[inputs.seq_N]
    return Correction(log_N.exp().clamp(max=cap), inputs.old_logprobs_N)


def icepop(inputs: CorrectionInputs, *, floor: float = 0.5, cap: float = 5.0) -> Correction:
    """Weight by w if floor ≤ w ≤ cap, and drop the other tokens (IcePop)."""
    weight_N = _log_weight(inputs).exp()
    outside_N = (weight_N < floor) | (weight_N > cap)
    return Correction(weight_N.masked_fill(outside_N, 0.0), inputs.old_logprobs_N)


def geometric(inputs: CorrectionInputs, *, floor: float = 0.99, cap: float = 1.01) -> Correction:
    """Keep the sequences with floor ≤ exp(mean log w) ≤ cap."""
    mean_S = mean_by_sequence(_log_weight(inputs), inputs.seq_N, inputs.num_seqs).exp()
    return _keep(inputs, ((mean_S >= floor) & (mean_S <= cap))[inputs.seq_N])


def mis(inputs: CorrectionInputs, *, cap: float = 3.0) -> Correction:
    """Drop the sequences with ∏w > cap (masked importance sampling)."""
    return _keep(inputs, (_log_product(inputs).exp() <= cap)[inputs.seq_N])


def veto(inputs: CorrectionInputs, *, floor: float = 1e-4) -> Correction:
    """Drop a sequence in which any token has w < floor."""
    caught_N = (_log_weight(inputs).exp() < floor).to(inputs.old_logprobs_N.dtype)
    caught_S = sum_by_sequence(caught_N, inputs.seq_N, inputs.num_seqs)
    return _keep(inputs, (caught_S == 0)[inputs.seq_N])


def loglinear_proximal(behaviour_N: Tensor, logprobs_N: Tensor, lag_N: Tensor) -> Tensor:
    """Interpolate the policy before the update from version tags, without a forward pass.

    log π_b + α (log π − log π_b), α = (v_prox − v_b)/(v − v_b). The policy before the update is
    version v_prox, and the update makes v = v_prox + 1. With lag = v_prox − v_b, α = lag/(lag + 1):
    an up-to-date token keeps its recorded log-prob.
    """
    alpha_N = (lag_N / (lag_N + 1)).to(behaviour_N.dtype)
    return behaviour_N + alpha_N * (logprobs_N.detach() - behaviour_N)


def _up_to(weight_N: Tensor, cap: float | None) -> Tensor:
    return weight_N if cap is None else weight_N.clamp(max=cap)


def decoupled(
    inputs: CorrectionInputs,
    *,
    proximal: Literal["forward", "loglinear"] = "forward",
    cap: float | None = None,
) -> Correction:
    """Weight by π_prox/π_b, up to `cap`, and clip around π_prox (decoupled PPO, arXiv 2505.24298).

    The proximal policy is π_o or an interpolation (`loglinear_proximal`).
    """
    if proximal == "forward":
        return Correction(_up_to(_log_weight(inputs).exp(), cap), inputs.old_logprobs_N)
    if inputs.logprobs_N is None or inputs.lag_N is None:
        raise ConfigError(
            f"correction=decoupled with proximal={proximal} got no current log-probs or lags",
            hint="pass logprobs_N and lag_N, or choose proximal=forward",
        )
    behaviour_N = inputs.behaviour_logprobs_N
    proximal_N = loglinear_proximal(behaviour_N, inputs.logprobs_N, inputs.lag_N)
    return Correction(_up_to(log_ratio(proximal_N, behaviour_N).exp(), cap), proximal_N)


def m2po(inputs: CorrectionInputs, *, budget: float = 0.04) -> Correction:
    """Drop the tokens with the largest (log w)² until the mean of the rest is within the budget.

    Second-moment trust region, arXiv 2510.01161. Needs the whole batch.
    """
    squares_N = _log_weight(inputs).double() ** 2
    ascending_N, order_N = squares_N.sort(stable=True)
    counts_N = torch.arange(1, len(squares_N) + 1, device=squares_N.device)
    # The mean over the smallest k values rises with k, so the kept values are a prefix. On a GPU,
    # torch's cumulative sum of floats has no deterministic kernel.
    kept_N = ascending_N.cpu().cumsum(0).to(counts_N.device) / counts_N < budget
    keep_N = torch.zeros_like(kept_N)
    keep_N[order_N] = kept_N
    return _keep(inputs, keep_N)


CORRECTIONS: dict[str, CorrectionFn] = {
    "none": none,
    "tis": tis,
    "icepop": icepop,
    "geometric": geometric,
    "mis": mis,
    "veto": veto,
    "decoupled": decoupled,
    "m2po": m2po,
}


def normalised(
    correction: Correction, inputs: CorrectionInputs, *, level: Literal["token", "sequence"]
) -> Correction:
    """Divide the weights by their mean over the tokens, or over the sequences."""
    weight_N = correction.weight_N
    if level == "token":
        mean = weight_N.mean()
    else:
        mean_S = mean_by_sequence(weight_N, inputs.seq_N, inputs.num_seqs)
        mean = mean_S[torch.bincount(inputs.seq_N, minlength=inputs.num_seqs) > 0].mean()
    return Correction(weight_N / mean.clamp(min=1e-8), correction.old_logprobs_N)


@torch.no_grad()
def correct(name: str, inputs: CorrectionInputs, **options: Any) -> Correction:
    """Compute the weights of the correction called `name`; `options` are its keyword arguments."""
    return choose(CORRECTIONS, "correction", name)(inputs, **options)


# -- masks -----------------------------------------------------------------------------------------

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
    """Return a correction with weight 0 for each token dropped by one of the masks."""
    weight_N = correction.weight_N
    for mask in masks:
        dropped_N = _out_of_bounds(mask, inputs)
        if mask.only == "negative":
            dropped_N = dropped_N & (advantages_N < 0)
        weight_N = weight_N.masked_fill(dropped_N, 0.0)
    return Correction(weight_N, correction.old_logprobs_N)


def _out_of_bounds(mask: CorrectionMask, inputs: CorrectionInputs) -> Tensor:
    """Mark the tokens dropped by a mask: bool[N]."""
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
    """Mark values outside of a mask's bounds; ratios are given as logarithms, whose
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


# -- the lag of the generating policy --------------------------------------------------------------

LAG_BUCKETS: dict[str, tuple[int, int | None]] = {
    "lag_0": (0, 0),
    "lag_1": (1, 1),
    "lag_2": (2, 2),
    "lag_3_4": (3, 4),
    "lag_5_up": (5, None),
}
"""Name of each bucket, its first lag and its last."""


def _mismatch(log_weight_N: Tensor) -> dict[str, float]:
    weight_N = log_weight_N.exp()
    effective = weight_N.sum() ** 2 / (len(weight_N) * (weight_N**2).sum())
    return {
        "abs_log_ratio": float(log_weight_N.abs().mean()),
        "max_ratio": float(weight_N.max()),
        "k3": float((weight_N - 1 - log_weight_N).mean()),
        "effective_sample_size": float(effective),
    }


@torch.no_grad()
def mismatch_statistics(old_N: Tensor, behaviour_N: Tensor, lag_N: Tensor) -> dict[str, float]:
    """Compare the learner's log-probs with the engine's, by lag.

    Keys are `staleness/<statistic>/<bucket>` for every bucket with tokens, and
    `staleness/num_tokens/<bucket>`. At lag 0 they measure the engine's mismatch, at larger lags
    staleness. Statistics: mean |log w|, largest w, k3 of KL(π_b‖π_o), effective sample size as a
    share of the tokens (1: equal weights).
    """
    log_weight_N = log_ratio(old_N.double(), behaviour_N.double())
    result: dict[str, float] = {}
    for bucket, (first, last) in LAG_BUCKETS.items():
        inside_N = (lag_N >= first) & (lag_N <= last) if last is not None else lag_N >= first
        if not bool(inside_N.any()):
            continue
        result[f"staleness/num_tokens/{bucket}"] = float(inside_N.sum())
        for name, value in _mismatch(log_weight_N[inside_N]).items():
            result[f"staleness/{name}/{bucket}"] = value
    return result


@torch.no_grad()
def off_policy_statistics(
    old_N: Tensor, behaviour_N: Tensor, seq_N: Tensor, num_seqs: int
) -> dict[str, float]:
    """Return verl's statistics of π_o against π_b under `off_policy/`, by the same formulas.

    With l = mean log-prob of a sequence: perplexities are the mean exp(−l), `log_ppl_diff` is the
    mean l_b − l_o, `ppl_ratio` the mean of its exponential; `kl` and `k3_kl` estimate KL(π_b‖π_o)
    by token, `chi2_token` is the mean w² − 1, `chi2_seq` that of ∏w. Source: verl's
    `rollout_corr_helper.compute_offpolicy_metrics`.
    """
    old_N, behaviour_N = old_N.double(), behaviour_N.double()
    log_weight_N = old_N - behaviour_N
    here_S = torch.bincount(seq_N, minlength=num_seqs) > 0
    old_S = mean_by_sequence(old_N, seq_N, num_seqs)[here_S]
    behaviour_S = mean_by_sequence(behaviour_N, seq_N, num_seqs)[here_S]
    differs_S = behaviour_S - old_S
    bounded_N = log_ratio(old_N, behaviour_N)
    product_S = sum_by_sequence(log_weight_N, seq_N, num_seqs)[here_S]
    product_S = product_S.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    numbers = {
        "training_ppl": (-old_S).exp().mean(),
        "rollout_ppl": (-behaviour_S).exp().mean(),
        "log_ppl_diff": differs_S.mean(),
        "log_ppl_abs_diff": differs_S.abs().mean(),
        "ppl_ratio": differs_S.exp().mean(),
        "kl": -log_weight_N.mean(),
        "k3_kl": (bounded_N.exp() - 1 - bounded_N).mean(),
        "chi2_token": (2 * bounded_N).exp().mean() - 1,
        "chi2_seq": (2 * product_S).exp().mean() - 1,
    }
    return {f"off_policy/{name}": float(value) for name, value in numbers.items()}


def batch_mismatch(
    seen: list[tuple[Tensor, Tensor]], batch: TrainingBatch, version: int
) -> dict[str, float]:
    """Compare the learner's log-probs with the recorded ones, for engine mismatch and staleness."""
    if not seen:
        return {}
    device = batch.behaviour_N.device
    index_N = torch.cat([index.to(device) for index, _ in seen])
    old_N = torch.cat([old.to(device) for _, old in seen])
    lag_N = version - batch.versions_N[index_N]
    behaviour_N = batch.behaviour_N[index_N]
    numbers = mismatch_statistics(old_N, behaviour_N, lag_N)
    numbers |= off_policy_statistics(old_N, behaviour_N, batch.seq_N[index_N], batch.num_seqs)
    if any(batch.kinds):
        up_to_date_N = lag_N == 0
        differs_N = (old_N - behaviour_N).abs()[up_to_date_N]
        numbers |= _by_kind(differs_N, batch.seq_N[index_N[up_to_date_N]], batch.kinds)
    return numbers


def _by_kind(differs_N: Tensor, seq_N: Tensor, kinds: list[str]) -> dict[str, float]:
    """Return the log-probs' differences for up-to-date tokens, by the kind of an agent's row.

    A large difference means that the engine's context differs from rows of that kind.
    """
    numbers: dict[str, float] = {}
    for kind in sorted({kind for kind in kinds if kind}):
        of_kind_S = torch.tensor([of_seq == kind for of_seq in kinds], device=seq_N.device)
        of_kind_N = differs_N[of_kind_S[seq_N]]
        if len(of_kind_N):
            numbers[f"agent/abs_log_ratio/{kind}"] = float(of_kind_N.mean())
    return numbers
