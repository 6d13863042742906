"""What an element of a batch is compared with: the statistics of those with the same key.

Where elements belong to episodes, an episode counts once for each key, however many of its elements
have it: each of them weighs as one part of it.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor


@dataclass(frozen=True)
class Peers:
    """Statistics of the peers of each element, broadcast back to the elements."""

    count: Tensor
    """Elements with its key; episodes, where elements belong to some."""
    mean: Tensor
    std: Tensor
    mine: Tensor
    """The mean of its own episode; the element itself where there are no episodes."""


def peers_of(values: Tensor, key: Tensor, owner: Tensor | None = None) -> Peers:
    """Compare each value with those of the same key; `owner` is the episode of each.

    Where all are equal the mean is that value itself, so that the deviation is exactly 0 and not
    a rounding error that a division by a tiny std would blow up.
    """
    num_keys = int(key.max()) + 1 if len(key) else 0
    zeros = values.new_zeros(num_keys)
    if owner is None:
        count = torch.bincount(key, minlength=num_keys)
        mean = zeros.index_add(0, key, values) / count.clamp(min=1)
        squares = zeros.index_add(0, key, (values - mean[key]) ** 2)
        mine = values
    else:
        count, mean, squares, mine = _by_owner(values, key, owner, num_keys)
    std = (squares / (count - 1).clamp(min=1)).sqrt()
    lowest = zeros.scatter_reduce(0, key, values, reduce="amin", include_self=False)[key]
    highest = zeros.scatter_reduce(0, key, values, reduce="amax", include_self=False)[key]
    equal, alone = lowest == highest, (count == 1)[key]
    mean = torch.where(equal, values, mean[key]).masked_fill(alone, 0.0)
    std = std[key].masked_fill(equal, 0.0).masked_fill(alone, 1.0)
    return Peers(count[key], mean, std, mine)


def _by_owner(
    values: Tensor, key: Tensor, owner: Tensor, num_keys: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return count, mean and sum of squares of each key, and the mean of each value's episode."""
    num_owners = int(owner.max()) + 1 if len(owner) else 0
    pair: Any = key * num_owners + owner  # torch leaves `unique` untyped
    pairs, of_pair = cast("tuple[Tensor, Tensor]", pair.unique(return_inverse=True))
    in_pair = torch.bincount(of_pair, minlength=len(pairs))
    key_of_pair = torch.div(pairs, max(num_owners, 1), rounding_mode="floor")
    zeros = values.new_zeros(num_keys)
    means = values.new_zeros(len(pairs)).index_add(0, of_pair, values) / in_pair
    count = torch.bincount(key_of_pair, minlength=num_keys)
    mean = zeros.index_add(0, key_of_pair, means) / count.clamp(min=1)
    deviations = (values - mean[key]) ** 2 / in_pair[of_pair]
    return count, mean, zeros.index_add(0, key, deviations), means[of_pair]
