"""Off-policy corrections: what the recorded log-probs of the generating policy change.

Shapes: N generated tokens, S sequences. π_b is the behaviour policy, π_o the policy before the
update, w = π_o/π_b. A correction gives a weight for each token, 0 where the token is dropped, and
the log-probs around which the loss clips; any number of masks (`masks.py`) drops more. Weights
never carry a gradient; the denominators of the aggregation count tokens before any is dropped,
unless `correction_denominator` is `kept`.

Sequence corrections need whole sequences, m2po and normalised weights the whole batch: compute
them before the batch is cut into micro-batches. Only the log-linear proximal policy of `decoupled`
needs the current log-probs, and works on any part.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from .....schemas.wire.errors import ConfigError
from ..losses import MAX_LOG_RATIO, log_ratio
from ..registry import choose
from ..sequences import mean_by_sequence, sum_by_sequence


@dataclass(frozen=True)
class CorrectionInputs:
    """What the corrections read."""

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
    """Learner's version minus each token's version; read by the same."""


@dataclass(frozen=True)
class Correction:
    """What the loss has to use."""

    weight_N: Tensor
    """Multiplies the token loss; 0 drops the token; no gradient."""
    old_logprobs_N: Tensor
    """Log-probs around which the loss clips; no gradient."""


CorrectionFn = Callable[..., Correction]


def _log_weight(inputs: CorrectionInputs) -> Tensor:
    return log_ratio(inputs.old_logprobs_N, inputs.behaviour_logprobs_N)


def _log_product(inputs: CorrectionInputs) -> Tensor:
    """log ∏w of each sequence, whose exponential stays finite."""
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
    """Weigh by min(w, C), or by min(∏w, C) over the sequence (truncated importance sampling)."""
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
    """Weigh by w where floor ≤ w ≤ cap, and drop the other tokens (IcePop)."""
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
    """Interpolate the policy before the update from version tags: no forward pass of its own.

    log π_b + α (log π − log π_b), α = (v_prox − v_b)/(v − v_b). The policy before the update is
    version v_prox, the one in the making v = v_prox + 1, so with lag = v_prox − v_b
    α = lag/(lag + 1): a token that is up to date takes its recorded log-prob.
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
    """Weigh by π_prox/π_b, up to `cap`, and clip around π_prox (decoupled PPO, arXiv 2505.24298).

    The proximal policy is π_o, or interpolated (`loglinear_proximal`).
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
    """Drop the tokens with the largest (log w)² until the mean over the rest is under budget.

    Second-moment trust region, arXiv 2510.01161. Needs the whole batch.
    """
    squares_N = _log_weight(inputs).double() ** 2
    ascending_N, order_N = squares_N.sort(stable=True)
    counts_N = torch.arange(1, len(squares_N) + 1, device=squares_N.device)
    # The mean over the smallest k rises with k, so the kept ones are a prefix.
    kept_N = ascending_N.cumsum(0) / counts_N < budget
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
    """Divide the weights by their mean over the tokens, or over the sequences, which is 1 then."""
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
