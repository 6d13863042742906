"""Aggregation: how token losses become one number.

The denominators are counted over the whole batch, all micro-batches and ranks, so the sum of the
aggregates of the parts is the aggregate of the whole, however the batch was cut between
sequences. A framework that averages gradients over ranks needs the loss times the number of
ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .registry import choose
from .sequences import lengths_by_sequence, mean_by_sequence


@dataclass(frozen=True)
class Denominators:
    """What the losses are divided by: counts over the whole batch, on all ranks."""

    tokens: int
    """Generated tokens, before any correction masks some."""
    sequences: int
    """Sequences with at least one generated token; rows of one episode are one."""
    constant_length: int = 1
    """Divides in seq-mean-token-sum-norm; the longest response allowed."""
    lengths_S: Tensor | None = None
    """int64: generated tokens of each sequence of the whole batch; None: none is divided."""
    share_S: Tensor | None = None
    """Of each sequence of a part of the batch: how much of it the part holds; None: all."""

    @classmethod
    def of(cls, seq_N: Tensor, constant_length: int = 1, num_seqs: int = 0) -> "Denominators":
        """Count the tokens of a whole batch, and its sequences among `num_seqs`."""
        lengths_S = lengths_by_sequence(seq_N, num_seqs)
        return cls(len(seq_N), int((lengths_S > 0).sum()), constant_length, lengths_S)

    def of_part(self, seq_N: Tensor, numbers_S: Tensor) -> "Denominators":
        """Return those for a part of the batch, whose sequences have these numbers in the whole.

        An episode of several rows may be divided; one that is not has a share of exactly 1. What
        is only measured is not among the lengths.
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
    """Weigh every token the same."""
    return loss_N.sum() / max(denominators.tokens, 1)


def seq_mean_token_mean(
    loss_N: Tensor, seq_N: Tensor, num_seqs_local: int, denominators: Denominators
) -> Tensor:
    """Weigh every sequence the same: the mean of the sequences' means."""
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
