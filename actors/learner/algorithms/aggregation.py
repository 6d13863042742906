"""Aggregation: how token losses become one number.

The denominators are counted over the whole batch, all micro-batches and ranks, so the sum of the
aggregates of the parts is the aggregate of the whole, however the batch was cut between
sequences. A framework that averages gradients over ranks needs the loss times the number of
ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from .registry import choose
from .sequences import lengths_by_sequence, mean_by_sequence


@dataclass(frozen=True)
class Denominators:
    """What the losses are divided by: counts over the whole batch, on all ranks."""

    tokens: int
    """Generated tokens, before any correction masks some."""
    sequences: int
    """Sequences with at least one generated token."""
    constant_length: int = 1
    """Divides in seq-mean-token-sum-norm; the longest response allowed."""

    @classmethod
    def of(cls, seq_N: Tensor, constant_length: int = 1) -> "Denominators":
        """Count the tokens and sequences of a whole batch."""
        sequences = int((lengths_by_sequence(seq_N, 0) > 0).sum())
        return cls(len(seq_N), sequences, constant_length)


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
    return mean_by_sequence(loss_N, seq_N, num_seqs_local).sum() / max(denominators.sequences, 1)


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
