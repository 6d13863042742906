"""Bins: what is put into which row, and which rows go through the model together."""

from collections.abc import Callable, Sequence

import numpy as np

from ....schemas.wire.errors import ConfigError
from .layout import IntArray


def first_fit_decreasing(lengths: Sequence[int] | IntArray, budget: int) -> list[list[int]]:
    """Put items into as few bins of `budget` as first-fit-decreasing finds.

    Gives the items of each bin. Equal lengths keep their order, so the result is deterministic.
    """
    items = np.asarray(lengths, dtype=np.int64)
    if 0 < items.sum() <= budget:
        return [np.argsort(-items, kind="stable").tolist()]
    free = np.full(len(items), budget, dtype=np.int64)
    bins: list[list[int]] = []
    for item in np.argsort(-items, kind="stable").tolist():
        if items[item] > budget:
            raise ConfigError(
                f"a sequence of {items[item]} tokens does not fit into a row of {budget}",
                hint=f"set learner.row_tokens (and learner.microbatch_tokens) to at least "
                f"{items[item]}, or lower rollout.max_response_tokens",
            )
        place = int(np.argmax(free[: len(bins) + 1] >= items[item]))
        if place == len(bins):
            bins.append([])
        bins[place].append(item)
        free[place] -= items[item]
    return bins


def group_rows(row_lengths: Sequence[int], microbatch_tokens: int) -> list[list[int]]:
    """Group rows of similar length, so that rows × longest stays within `microbatch_tokens`."""
    order = sorted(range(len(row_lengths)), key=lambda row: (-row_lengths[row], row))
    groups: list[list[int]] = []
    longest = 0
    for row in order:
        if groups and (len(groups[-1]) + 1) * longest <= microbatch_tokens:
            groups[-1].append(row)
            continue
        longest = row_lengths[row]
        if longest > microbatch_tokens:
            raise ConfigError(
                f"a row of {longest} tokens does not fit into a micro-batch of {microbatch_tokens}",
                hint=f"set learner.microbatch_tokens to at least {longest}",
            )
        groups.append([row])
    return groups


def choose_row_tokens(
    lengths: Sequence[int],
    row_tokens: int,
    hidden_size: int,
    cut: Callable[[int], Sequence[int]] | None = None,
) -> int:
    """Choose the row length, at most `row_tokens`, that costs the least computation.

    Long rows waste fewer columns, short rows waste less attention: a column costs about
    1 + T / (6 · hidden_size), the second term being attention over a masked row of T columns.
    `cut` tells the lengths of what is put into rows of so many tokens, where they depend on that;
    `lengths` are the shortest then.
    """
    longest = max(lengths, default=1)
    candidates = [min(longest * factor, row_tokens) for factor in (1, 2, 3, 4, 6, 8, 12, 16)]

    def cost(tokens: int) -> float:
        num_rows = len(first_fit_decreasing(lengths if cut is None else cut(tokens), tokens))
        return num_rows * tokens * (1 + tokens / (6 * hidden_size))

    return min(sorted(set(candidates)), key=cost) if longest <= row_tokens else row_tokens
