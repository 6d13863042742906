"""Shaping: what an episode's length adds to its reward, before advantages are computed.

Shapes: S sequences. Lengths are tokens after the first prompt, observations included.
"""

import torch
from torch import Tensor

from ....schemas.wire.errors import ConfigError


def overlong_penalty(
    lengths_S: Tensor,
    max_len: int,
    buffer: int,
    factor: float = 1.0,
    cut_S: Tensor | None = None,
) -> Tensor:
    """Give the soft penalty of DAPO for lengths in the last `buffer` tokens: float32[S], ≤ 0.

    min(−(len − (max_len − buffer)) / buffer · factor, 0), arXiv 2503.14476; the whole factor for
    an episode that a limit cut (bool[S]), though it be one of less than `max_len` tokens.
    """
    if not 0 < buffer <= max_len:
        raise ConfigError(
            f"overlong_buffer is {buffer}, the longest response has {max_len} tokens",
            hint=f"set algorithm.overlong_buffer between 1 and {max_len}",
        )
    excess_S = lengths_S.float() - (max_len - buffer)
    penalty_S = (-excess_S / buffer * factor).clamp(max=0.0)
    return penalty_S if cut_S is None else penalty_S.masked_fill(cut_S, -factor)


def length_reward(
    lengths_S: Tensor, group_S: Tensor, solved_S: Tensor, coef: float = 1.0
) -> Tensor:
    """Reward short episodes within their group: float32[S] (Kimi k1.5, arXiv 2501.12599 §2.3.3).

    λ = ½ − (len − shortest) / (longest − shortest), for an episode that is not solved at most 0;
    0 in a group whose episodes are all of one length.
    """
    lengths_S = lengths_S.double()
    bounds = lengths_S.new_zeros(int(group_S.max()) + 1)
    shortest_S, longest_S = (
        bounds.scatter_reduce(0, group_S, lengths_S, reduce=reduce, include_self=False)[group_S]
        for reduce in ("amin", "amax")
    )
    share_S = (lengths_S - shortest_S) / (longest_S - shortest_S).clamp(min=1)
    lambda_S = torch.where(longest_S > shortest_S, 0.5 - share_S, 0.0)
    return (coef * torch.where(solved_S, lambda_S, lambda_S.clamp(max=0.0))).float()
