"""What advantages are computed from.

Shape letters: N generated tokens, S samples, C components of the reward.
"""

from dataclasses import dataclass

from torch import Tensor

from .calls import BatchCalls


@dataclass(frozen=True)
class AdvantageInputs:
    """What the advantage functions read; each says what it needs beyond the first three."""

    rewards_S: Tensor
    """Outcome reward: the return of each episode."""
    group_S: Tensor
    """int64: the task group of each sequence."""
    seq_N: Tensor
    """int64: the sequence of each generated token."""
    token_rewards_N: Tensor | None = None
    """Reward on each token, a turn's on its last one; default: `rewards_S` on the last token."""
    turn_N: Tensor | None = None
    """int64: the turn of each token within its sequence, from 0; needed by the two by turns."""
    state_N: Tensor | None = None
    """int64: the observation that the token's turn answers, equal ids for equal ones; gigpo."""
    components_SC: Tensor | None = None
    """Rewards of each sequence by component; needed by gdpo."""
    baseline_S: Tensor | None = None
    """Reward of the greedy episode of the same task; needed by remax."""
    values_N: Tensor | None = None
    """The critic's value before each token; needed by gae."""
    lone_S: Tensor | None = None
    """bool: sequences that nobody of their task can be compared with: those get 0."""
    owner_S: Tensor | None = None
    """int64: the episode of each sequence, where one may have several with equal `group_S`."""
    calls: BatchCalls | None = None
    """The calls of agents' episodes, in place of turns that follow each other."""
    kept_N: Tensor | None = None
    """bool: tokens that are trained, default all; those over which a batch is whitened."""
    gamma: float = 1.0
    """Discount: per token in reinforce_pp and gae, per turn in grpo_per_turn and gigpo."""

    @property
    def num_seqs(self) -> int:
        """Number of sequences, those without generated tokens included."""
        return len(self.rewards_S)
