"""A loss as it is on a GPU that holds few tokens: of one rank, or of all."""

import os
from typing import Any

import torch
import torch.distributed as dist

MOST_TOKENS = "TEST_MOST_TOKENS"
"""Of the environment: more generated tokens in a pass do not fit."""
ONLY_RANK = "TEST_SMALL_RANK"
"""Of the environment: the rank whose GPU is small; default: all."""


def small_card_loss(inputs: Any) -> Any:
    """Return REINFORCE's loss; raise what CUDA does where the pass is too large."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    small = os.environ.get(ONLY_RANK, str(rank))
    if len(inputs.logprobs_N) > int(os.environ[MOST_TOKENS]) and str(rank) == small:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    return -inputs.logprobs_N * inputs.advantages_N
