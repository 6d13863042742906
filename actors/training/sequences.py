"""Helpers of advantages, losses and corrections: sums over sequences, and choice by name.

Shapes: N generated tokens, S sequences. The tokens of a sequence are contiguous and in order;
`seq_N` is the sequence of each token.
"""

from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor

from ...schemas.wire.errors import ConfigError, did_you_mean


def sum_by_sequence(values_N: Tensor, seq_N: Tensor, num_seqs: int) -> Tensor:
    """Sum the tokens of each sequence: S values, 0 for a sequence without tokens."""
    return values_N.new_zeros(num_seqs).index_add(0, seq_N, values_N)


def lengths_by_sequence(seq_N: Tensor, num_seqs: int) -> Tensor:
    """Count the tokens of each sequence: int64[S]."""
    return torch.bincount(seq_N, minlength=num_seqs)


def mean_by_sequence(values_N: Tensor, seq_N: Tensor, num_seqs: int) -> Tensor:
    """Average the tokens of each sequence: S values, 0 for a sequence without tokens."""
    lengths_S = lengths_by_sequence(seq_N, num_seqs).clamp(min=1)
    return sum_by_sequence(values_N, seq_N, num_seqs) / lengths_S


def positions_in_sequence(seq_N: Tensor, num_seqs: int) -> Tensor:
    """Number the tokens of each sequence from 0: int64[N]."""
    index_N = torch.arange(len(seq_N), device=seq_N.device)
    first_S = torch.zeros(num_seqs, dtype=torch.int64, device=seq_N.device)
    first_S = first_S.scatter_reduce(0, seq_N, index_N, reduce="amin", include_self=False)
    return index_N - first_S[seq_N]


def is_last_of_sequence(seq_N: Tensor) -> Tensor:
    """Mark the last token of each sequence: bool[N]."""
    last_N = torch.ones_like(seq_N, dtype=torch.bool)
    last_N[:-1] = seq_N[1:] != seq_N[:-1]
    return last_N


def by_sequence(values_N: Tensor, seq_N: Tensor, num_seqs: int) -> tuple[Tensor, Tensor]:
    """Lay tokens out as one row per sequence, padded with 0; also return each token's place."""
    place_N = positions_in_sequence(seq_N, num_seqs)
    longest = int(place_N.max()) + 1 if len(place_N) else 0
    rows_SP = values_N.new_zeros(num_seqs, longest)
    rows_SP[seq_N, place_N] = values_N
    return rows_SP, place_N


def reward_to_go(rewards_SP: Tensor, gamma: float | Tensor) -> Tensor:
    """R_p = r_p + γ R_{p+1} along each row; γ may be [S, P], the factor after each place.

    By doubling: each place has the sum over the next 1, 2, 4, … places, and the product of γ
    over them, so that a row of P places takes log₂ P operations.
    """
    returns_SP = rewards_SP.clone()
    each = torch.as_tensor(gamma, dtype=rewards_SP.dtype, device=rewards_SP.device)
    decay_SP = each.expand_as(rewards_SP).clone()
    length, ahead = rewards_SP.shape[1], 1
    while ahead < length:
        near = length - ahead
        # The right side is read whole before it is written.
        returns_SP[:, :near] += decay_SP[:, :near] * returns_SP[:, ahead:]
        decay_SP[:, :near] = decay_SP[:, :near] * decay_SP[:, ahead:]
        decay_SP[:, near:] = 0.0
        ahead *= 2
    return returns_SP


# -- choice by name --------------------------------------------------------------------------------

_Choice = TypeVar("_Choice")


def choose(table: Mapping[str, _Choice], key: str, name: str) -> _Choice:
    """Return the entry `name`; the error names the configuration key and the closest name."""
    if name in table:
        return table[name]
    every = f"choose one of {', '.join(table)}"
    hint = did_you_mean(name, table, otherwise=every)
    raise ConfigError(f"{key}={name} does not exist", hint=hint)
