"""What is learnt from a teacher: the arithmetic, apart from who the teacher is.

Shape letters: N generated tokens, K tokens in the place of each.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_LEAST_REST = 1e-6
"""Probability of all other tokens below which they are left out."""


@dataclass(frozen=True)
class TeacherScores:
    """What teachers say of the tokens of a batch."""

    logprobs_N: Tensor
    """float32: log-prob of each token; 0 where nobody teaches."""
    taught_N: Tensor
    """bool: tokens that a teacher has scored."""
    top_ids_NK: Tensor | None = None
    """int64: its likeliest tokens in the place of each."""
    top_logprobs_NK: Tensor | None = None
    """float32: their log-probs."""


@dataclass(frozen=True)
class TeacherTargets:
    """What a forward KL reads, over the whole batch."""

    ids_NK: Tensor
    """int64: the teacher's likeliest tokens."""
    logprobs_NK: Tensor
    """float32: their log-probs to the teacher."""
    taught_N: Tensor
    """bool: tokens that are taught."""


def teacher_advantage(gap_N: Tensor, taught_N: Tensor, *, normalise: bool) -> Tensor:
    """Return the advantage of each token from log π_teacher − log π_o; 0 where nobody teaches.

    Normalised it is divided by its standard deviation over the tokens taught, and not centred: the
    sign says what the teacher would rather have.
    """
    if not normalise or int(taught_N.sum()) < 2:
        return gap_N
    return gap_N / (gap_N[taught_N].std() + 1e-6)


def forward_kl(policy_NK: Tensor, teacher_NK: Tensor) -> Tensor:
    """Return KL(π_teacher‖π) over the teacher's likeliest tokens and the rest as one event.

    Both are log-probs of the same tokens; float32[N], with gradient in `policy_NK`. It is at most
    the whole KL, and 0 where both agree on these tokens.
    """
    teacher_p_NK = teacher_NK.exp()
    kl_N = (teacher_p_NK * (teacher_NK - policy_NK)).sum(-1)
    rest_N = (1 - teacher_p_NK.sum(-1)).clamp(min=0)
    own_rest_N = (1 - policy_NK.exp().sum(-1)).clamp(min=_LEAST_REST)
    gap_N = rest_N.clamp(min=_LEAST_REST).log() - own_rest_N.log()
    return kl_N + torch.where(rest_N > _LEAST_REST, rest_N * gap_N, 0.0)
