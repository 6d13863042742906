"""DPO: the weights of pairs, computed before each update from the policy as it is then.

With them an update is that of a weighted log-likelihood (`pair_losses.py`): advantages of the loss
`dpo`. They cost a forward pass, and leave packing as it is: a pair need not lie in one micro-batch,
so that long answers fit where single ones do.

Shape letters: N generated tokens, S sequences, P pairs, 2 answers of each, the chosen one first.
"""

# torch leaves some of its methods untyped.
# pyright: reportUnknownMemberType=false

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ....schemas.config.sft import SftConfig
from ....schemas.rollout import Group
from ....schemas.wire.errors import DataError
from ..algorithms.sequences import lengths_by_sequence, sum_by_sequence
from ..algorithms.training_batch import TrainingBatch
from .pair_losses import Pairs, dpo_loss, pair_numbers, weigh

Score = Callable[[Tensor], Tensor]
"""Returns the log-probs of all tokens, float32[N], of which those of some sequences are needed."""


def check_pair(group: Group) -> None:
    """Raise DataError for a group that is no pair, the chosen answer first."""
    rewards = [item.reward for item in group.sampled]
    if len(rewards) != 2 or not rewards[0] > rewards[1]:
        raise DataError(
            f"a group with the rewards {rewards} is no pair of answers, the chosen one first",
            hint="generators of the pool make pairs of the rows of sft.data",
        )


class Preferences:
    """Weighs the pairs of one step, update by update."""

    def __init__(self, config: SftConfig, batch: TrainingBatch, reference_N: Tensor) -> None:
        """`reference_N` is log π_ref of each token of the batch."""
        self._config = config
        self._batch = batch
        self._reference_S = self._by_sequence(reference_N)
        self._lengths_S = lengths_by_sequence(batch.seq_N, batch.num_seqs).double()
        self._losses: list[float] = []
        self._rewards: list[Tensor] = []

    def advantages(self, part_S: Tensor, score: Score) -> Tensor:
        """Return the advantages of an update on some pairs: float32[N], 0 for other sequences.

        The loss of the update is the mean over its sequences of −A log π, summed over tokens.
        """
        policy_S = self._by_sequence(score(part_S))
        policy_P2, reference_P2, lengths_P2 = (
            values_S[part_S].view(-1, 2)
            for values_S in (policy_S, self._reference_S, self._lengths_S)
        )
        pairs = Pairs(reference_P2, lengths_P2)
        found = weigh(partial(dpo_loss, self._config, pairs=pairs), policy_P2)
        self._losses.append(found.loss)
        self._rewards.append(self._config.beta * (policy_P2 - reference_P2))
        weight_S = torch.zeros_like(self._reference_S)
        weight_S[part_S] = found.gradient_P2.flatten()
        return (-weight_S * part_S.sum()).float()[self._batch.seq_N]

    def rewards(self, policy_N: Tensor) -> Tensor:
        """Return β log π/π_ref of all answers, given log π of their tokens: float64[P, 2]."""
        gap_S = self._by_sequence(policy_N) - self._reference_S
        return self._config.beta * gap_S.view(-1, 2)

    def numbers(self) -> dict[str, float]:
        """Name what the updates saw as metrics: means over their pairs, as they were before."""
        weights = [len(rewards_P2) for rewards_P2 in self._rewards]
        total = sum(loss * n for loss, n in zip(self._losses, weights, strict=True))
        return {
            "actor/pg_loss": total / sum(weights),
            **pair_numbers(torch.cat(self._rewards), "dpo"),
        }

    def _by_sequence(self, values_N: Tensor) -> Tensor:
        return sum_by_sequence(values_N.double(), self._batch.seq_N, self._batch.num_seqs)
