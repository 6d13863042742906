"""Data in rows, by the learner's packing.

The learner's sequences end with the token that their last column predicts; a datum's targets are
given, so that one more token stands behind each, which nobody reads. All positions predict.
"""

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from ...training.micro_batch import MicroBatch, TokenSequence, ranges
from ...training.packing import pack


def pack_data(
    tokens: list[NDArray[np.int64]],
    *,
    microbatch_tokens: int,
    hidden_size: int,
    share_prompts: bool,
) -> list[MicroBatch]:
    """Pack the tokens of data into micro-batches of at most so many columns, padding included.

    `index_N` of a micro-batch tells its positions among those of all data one after the other. A
    datum longer than a micro-batch is one of its own. With `share_prompts` what data begin with in
    common is there once for each row. Deterministic.
    """
    sequences = [_sequence(one) for one in tokens]
    lengths = np.array([len(one) for one in tokens], dtype=np.int64)
    first = np.cumsum(lengths) - lengths
    long = np.flatnonzero(lengths > microbatch_tokens)
    short = np.flatnonzero(lengths <= microbatch_tokens)
    calls = [(short, microbatch_tokens)] if len(short) else []
    calls += [(long[at : at + 1], int(lengths[long[at]])) for at in range(len(long))]
    micros: list[MicroBatch] = []
    for chosen, columns in calls:
        positions = ranges(first[chosen], lengths[chosen])
        found = pack(
            [sequences[at] for at in chosen],
            row_tokens=columns,
            microbatch_tokens=columns,
            share_prompts=share_prompts,
            hidden_size=hidden_size,
        )
        micros += [
            replace(micro, index_N=torch.as_tensor(positions[micro.index_N.numpy()]))
            for micro in found
        ]
    return micros


def _sequence(tokens: NDArray[np.int64]) -> TokenSequence:
    mask = np.ones(len(tokens) + 1, dtype=np.uint8)
    mask[0] = 0
    return TokenSequence(np.append(tokens, 0), mask, branches=True)
