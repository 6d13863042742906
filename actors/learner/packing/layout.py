"""Where the generated tokens of a batch stand, before it is packed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...models.vision import SeenImages
from .micro_batch import TokenSequence

IntArray = NDArray[np.int64]

See = Callable[[TokenSequence], SeenImages | None]
"""Finds the images of a sequence in its tokens."""


@dataclass(frozen=True)
class TokenLayout:
    """Where the generated tokens of a batch stand (shapes: S sequences, N generated tokens)."""

    counts_S: IntArray
    """Generated tokens of each sequence."""
    place_N: IntArray
    """Place of each generated token in its sequence."""
    target_N: IntArray
    """Its id."""
    first_S: IntArray
    """Index of each sequence's first generated token among all of the batch."""
    prompts: list[int]
    """Length of each prompt; 0 without generated tokens."""
    totals: list[int]
    """Tokens of each sequence that need a column: those before its last generated one."""


def lay_out(sequences: Sequence[TokenSequence]) -> TokenLayout:
    """Find the generated tokens of sequences; ValueError for one that begins with one."""
    lengths_S = np.array([len(sequence.mask) for sequence in sequences], dtype=np.int64)
    starts_S = np.cumsum(lengths_S) - lengths_S
    mask = np.concatenate([sequence.mask for sequence in sequences]) != 0
    ids = np.concatenate([sequence.token_ids for sequence in sequences])
    at_N = np.flatnonzero(mask)
    seq_N = np.repeat(np.arange(len(sequences)), lengths_S)[at_N]
    place_N = at_N - starts_S[seq_N]
    counts_S = np.bincount(seq_N, minlength=len(sequences))
    first_S = np.cumsum(counts_S) - counts_S
    prompts_S, totals_S = np.zeros((2, len(sequences)), dtype=np.int64)
    has_S = counts_S > 0
    prompts_S[has_S] = place_N[first_S[has_S]]
    totals_S[has_S] = place_N[(first_S + counts_S - 1)[has_S]]
    unpredicted = np.flatnonzero(has_S & (prompts_S == 0))
    if len(unpredicted):
        raise ValueError(
            f"sequence {unpredicted[0]} begins with a generated token: nothing predicts it"
        )
    target_N = ids[at_N].astype(np.int64)
    return TokenLayout(counts_S, place_N, target_N, first_S, prompts_S.tolist(), totals_S.tolist())


def ranges(starts: IntArray, counts: IntArray) -> IntArray:
    """Concatenate the ranges [start, start + count)."""
    skipped = np.repeat(starts - (np.cumsum(counts) - counts), counts)
    return skipped + np.arange(len(skipped))
