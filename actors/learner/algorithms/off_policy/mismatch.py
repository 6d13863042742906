"""How far the policy that is trained is from the one that generated: numbers only.

Shapes: N generated tokens, S sequences.
"""

import torch
from torch import Tensor

from ..losses import MAX_LOG_RATIO, log_ratio
from ..sequences import mean_by_sequence, sum_by_sequence
from ..training_batch import TrainingBatch

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

    Keys are `staleness/<statistic>/<bucket>` for every bucket that has tokens, and
    `staleness/num_tokens/<bucket>`. At lag 0 they show the engine's mismatch, above it staleness.
    Statistics: mean |log w|, largest w, k3 of KL(π_b‖π_o), effective sample size as a share of
    the tokens (1: all weigh the same).
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
    """Tell what verl tells of π_o against π_b, by the same formulas, under `off_policy/`.

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
    told = {
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
    return {f"off_policy/{name}": float(value) for name, value in told.items()}


def batch_mismatch(
    seen: list[tuple[Tensor, Tensor]], batch: TrainingBatch, version: int
) -> dict[str, float]:
    """Compare the learner's log-probs with the recorded ones: engine mismatch and staleness."""
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
    """Tell how far the log-probs of tokens up to date differ, by the kind of an agent's row.

    Where they do, what the engine had in its context is not what stands in that kind of row.
    """
    numbers: dict[str, float] = {}
    for kind in sorted({kind for kind in kinds if kind}):
        of_kind_S = torch.tensor([one == kind for one in kinds], device=seq_N.device)
        of_kind_N = differs_N[of_kind_S[seq_N]]
        if len(of_kind_N):
            numbers[f"agent/abs_log_ratio/{kind}"] = float(of_kind_N.mean())
    return numbers
