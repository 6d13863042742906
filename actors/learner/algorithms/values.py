"""Values: what a critic's estimates become, and what the critic is trained towards.

Pure functions. Shapes: N generated tokens, S sequences. V_t is the value before token t is
generated. Observation tokens are in none of the arrays, so the value after a turn's last token is
that of the next turn's first.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .calls import BatchCalls
from .sequences import by_sequence, reward_to_go


@dataclass(frozen=True)
class ValueTargets:
    """What a critic's updates of one step read, over the whole batch."""

    values_N: Tensor
    """Its values before the step."""
    returns_N: Tensor
    """What they should have been."""
    sample_N: Tensor
    """int64: the sample of each token (`samples.py`)."""
    kept_N: Tensor
    """bool: tokens that the critic is trained on."""


def generalized_advantage(
    rewards_N: Tensor,
    values_N: Tensor,
    seq_N: Tensor,
    num_seqs: int,
    gamma: float,
    lam: float | Tensor,
) -> Tensor:
    """A_t = δ_t + γλ A_{t+1} with δ_t = r_t + γ V_{t+1} − V_t: float64[N] (arXiv 1506.02438).

    `lam` may be float64[S], one for each sequence. Nothing follows the last token of a sequence.
    `advantage + value` is the return that the critic is trained towards.
    """
    rewards_SP, place_N = by_sequence(rewards_N.double(), seq_N, num_seqs)
    values_SP, _ = by_sequence(values_N.double(), seq_N, num_seqs)
    delta_SP = rewards_SP - values_SP
    delta_SP[:, :-1] += gamma * values_SP[:, 1:]
    return reward_to_go(delta_SP, gamma * lam)[seq_N, place_N]


def advantage_over_chains(
    rewards_N: Tensor, values_N: Tensor, calls: BatchCalls, gamma: float, lam: float
) -> Tensor:
    """Return the same over the chains of calls of agents' episodes: float64[N]."""
    values_N = values_N.double()
    delta_N = rewards_N.double() + gamma * calls.next_values(values_N) - values_N
    return calls.to_go(delta_N, gamma * lam)


def value_loss(
    values_N: Tensor, before_N: Tensor, returns_N: Tensor, clip: float
) -> tuple[Tensor, Tensor]:
    """½ max((V − R)², (clip(V, V_old ± ε) − R)²) of each token, and where the clip counts.

    The clip keeps an update near the values that the advantages were made with (the value clip of
    PPO's first implementation).
    """
    plain_N = (values_N - returns_N) ** 2
    bounded_N = (values_N.clamp(before_N - clip, before_N + clip) - returns_N) ** 2
    return torch.maximum(plain_N, bounded_N) / 2, bounded_N > plain_N


def explained_variance(values_N: Tensor, returns_N: Tensor) -> float:
    """1 − Var(R − V) / Var(R): 1 is a perfect critic, 0 a constant one; 0 for equal returns."""
    if not len(returns_N):
        return 0.0
    variance = float(returns_N.double().var(correction=0))
    if variance == 0:
        return 0.0
    return 1 - float((returns_N.double() - values_N.double()).var(correction=0)) / variance
