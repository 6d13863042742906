"""Values: what a critic's estimates become, and what the critic is trained towards.

Pure functions. Shapes: N generated tokens, S sequences. V_t is the value before token t is
generated. Observation tokens are in none of the arrays, so the value after a turn's last token is
that of the next turn's first.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .calls import BatchCalls
from .sequences import by_sequence, is_last_of_sequence, reward_to_go


@dataclass(frozen=True)
class Values:
    """What a critic says of a batch before a step."""

    values_N: Tensor
    """Value before each token."""
    after_S: Tensor | None = None
    """Value at the end of each sequence whose game would have gone on, 0 for others; None: nothing
    is expected behind any end."""


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
    gamma: float | Tensor,
    lam: float | Tensor,
) -> Tensor:
    """A_t = δ_t + γλ A_{t+1} with δ_t = r_t + γ V_{t+1} − V_t: float64[N] (arXiv 1506.02438).

    `gamma` and `lam` may be float64[N], those between each token and the next. Nothing follows the
    last token of a sequence. `advantage + value` is the return that the critic is trained towards.
    """
    rewards_SP, place_N = by_sequence(rewards_N.double(), seq_N, num_seqs)
    values_SP, _ = by_sequence(values_N.double(), seq_N, num_seqs)
    gamma_SP, lam_SP = (_laid_out(one, seq_N, num_seqs) for one in (gamma, lam))
    delta_SP = rewards_SP - values_SP
    delta_SP[:, :-1] += (gamma_SP * values_SP.roll(-1, 1))[:, :-1]
    return reward_to_go(delta_SP, gamma_SP * lam_SP)[seq_N, place_N]


def _laid_out(value: float | Tensor, seq_N: Tensor, num_seqs: int) -> Tensor:
    """Return float64[S, P], or one number for all."""
    if not isinstance(value, Tensor):
        return torch.tensor(value, dtype=torch.float64, device=seq_N.device)
    return by_sequence(value.double(), seq_N, num_seqs)[0]


def between_tokens(
    within: float, turns: float | None, seq_N: Tensor, turn_N: Tensor | None
) -> float | Tensor:
    """Return what counts between each token and the next: float64[N] where turns have their own."""
    if turns is None or turn_N is None:
        return within
    ends_N = is_last_of_sequence(seq_N)
    ends_N[:-1] |= turn_N[1:] != turn_N[:-1]
    ours_N = torch.full_like(ends_N, within, dtype=torch.float64)
    return ours_N.masked_fill(ends_N, turns)


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
