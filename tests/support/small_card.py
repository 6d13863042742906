"""A loss as it is on a GPU that holds few tokens: of one rank, or of all."""

import os
from pathlib import Path
from typing import Any

import torch

MOST_TOKENS = "TEST_MOST_TOKENS"
"""Of the environment: more generated tokens in a pass do not fit."""
ONLY_RANK = "TEST_SMALL_RANK"
"""Of the environment: the rank whose GPU is small; default: all."""
FAILED_ONCE = "TEST_FAILED_ONCE"
"""Of the environment: a file that is made at a failure, after which there is none."""


def small_card_loss(inputs: Any) -> Any:
    """Return REINFORCE's loss; raise what CUDA does where the pass is too large."""
    # the parent of this process is the rank: `python -m …learner.ranks.worker RANK DESCRIPTOR`
    words = Path(f"/proc/{os.getppid()}/cmdline").read_text().split("\0")
    is_other = "tinkermq.actors.learner.ranks.worker" in words
    rank = int(words[words.index("tinkermq.actors.learner.ranks.worker") + 1]) if is_other else 0
    is_small = str(rank) == os.environ.get(ONLY_RANK, str(rank))
    once = os.environ.get(FAILED_ONCE)
    done = once is not None and Path(once).exists()
    if is_small and not done and len(inputs.logprobs_N) > int(os.environ[MOST_TOKENS]):
        if once is not None:
            Path(once).touch()
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    return -inputs.logprobs_N * inputs.advantages_N
