"""Sequences that are paths of trees, packed so that each piece of a tree takes its columns once.

The calls of an agent's episode are a tree, and its rows are paths of it that begin alike; so do the
episodes of a task, and tasks under one system prompt. Sorted by their tokens, sequences that begin
alike stand side by side, and each adds to the row what it does not have in common with the one
before it: the columns of a row are a tree in depth-first order. What follows a token in the tree
follows it without a gap in the row, so that one number for each column says who sees it.

A tree that is larger than a row is cut into several, each with the path that it begins with.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...models.vision import SeenImages
from .bins import choose_row_tokens
from .layout import IntArray, See, TokenLayout, ranges
from .micro_batch import TokenSequence
from .row_writer import RowWriter


@dataclass(frozen=True)
class TreeUnit:
    """What goes into a row as a whole: paths of one tree, in depth-first order."""

    members: list[int]
    """Its sequences."""
    shared: list[int]
    """Columns that each has in common with the one before it; the first one: 0."""
    length: int
    """Columns that it takes."""
    seen: SeenImages | None
    """The images, in the part that all of its sequences have in common."""

    def write(
        self, writer: RowWriter, sequences: Sequence[TokenSequence], layout: TokenLayout
    ) -> tuple[IntArray, IntArray]:
        """Write it into a row; return its generated tokens and the columns that predict them."""
        first = writer.num_used
        path = np.empty(0, dtype=np.int64)
        """Columns of the tokens of the sequence at hand."""
        index: list[IntArray] = []
        columns: list[IntArray] = []
        for seq, shared in zip(self.members, self.shared, strict=True):
            writer.seen_until[path[shared:]] = writer.num_used
            own = sequences[seq].token_ids[shared : layout.totals[seq]]
            start = writer.num_used
            if len(own):
                writer.append([own], shared, np.array([len(own)], dtype=np.int64))
            path = np.concatenate([path[:shared], np.arange(start, writer.num_used)])
            generated = ranges(layout.first_S[seq : seq + 1], layout.counts_S[seq : seq + 1])
            index.append(generated)
            columns.append(path[layout.place_N[generated] - 1])
        writer.seen_until[path] = writer.num_used
        writer.show(first, self.seen)
        return np.concatenate(index), np.concatenate(columns)


@dataclass(frozen=True)
class DepthFirst:
    """Sequences in depth-first order of the trees that they are paths of."""

    order: list[int]
    shared: list[int]
    """Columns that each has in common with the one before it; 0: it begins another tree."""
    totals: list[int]
    """Columns of each."""
    seen: list[SeenImages | None]
    """The images of each; what is in common holds them all, or nothing is."""

    @classmethod
    def of(
        cls, sequences: Sequence[TokenSequence], totals: Sequence[int], see: See
    ) -> "DepthFirst":
        """Order sequences of which the first `totals` tokens matter; those of 0 are left out."""
        chosen = [index for index, total in enumerate(totals) if total]
        images = _Beginnings(see)
        found = {index: images.of(sequences[index]) for index in chosen}
        paths = {index: sequences[index].token_ids[: totals[index]] for index in chosen}
        order = sorted(chosen, key=lambda index: (found[index][0], _sort_key(paths[index])))
        shared = [
            _num_shared(paths[before], paths[index]) if found[before][0] == found[index][0] else 0
            for before, index in pairwise(order)
        ]
        return cls(
            order,
            [0, *shared][: len(order)],
            [totals[index] for index in order],
            [found[index][1] for index in order],
        )

    def cut(self, budget: int) -> list[TreeUnit]:
        """Cut the trees into units of at most `budget` columns; a longer sequence stands alone."""
        units: list[TreeUnit] = []
        at = 0
        while at < len(self.order):
            end, length = at + 1, self.totals[at]
            while end < len(self.order) and self.shared[end]:
                longer = length + self.totals[end] - self.shared[end]
                if longer > budget:
                    break
                end, length = end + 1, longer
            shared = [0, *self.shared[at + 1 : end]]
            units.append(TreeUnit(self.order[at:end], shared, length, self.seen[at]))
            at = end
        return units

    def lengths(self, budget: int) -> list[int]:
        """Return the lengths of the units that `cut` gives."""
        return [unit.length for unit in self.cut(budget)]


def make_tree_units(
    sequences: Sequence[TokenSequence],
    layout: TokenLayout,
    row_tokens: int,
    hidden_size: int | None,
    see: See,
) -> tuple[list[TreeUnit], int]:
    """Cut the trees of a batch into units; return them and the length of the rows for them.

    With `hidden_size` that is the length, at most `row_tokens`, of the least computation.
    """
    trees = DepthFirst.of(sequences, layout.totals, see)
    if hidden_size is not None:
        row_tokens = choose_row_tokens(trees.totals, row_tokens, hidden_size, trees.lengths)
    return trees.cut(row_tokens), row_tokens


def count_distinct(paths: Sequence[NDArray[np.integer[Any]]]) -> int:
    """Count the tokens of paths, those that several begin with in common once."""
    order = sorted(range(len(paths)), key=lambda index: _sort_key(paths[index]))
    shared = sum(_num_shared(paths[one], paths[other]) for one, other in pairwise(order))
    return sum(map(len, paths)) - shared


class _Beginnings:
    """Tells sequences with images apart: those that begin alike, up to their last image."""

    def __init__(self, see: See) -> None:
        self._see = see
        self._known: dict[tuple[object, ...], int] = {}

    def of(self, sequence: TokenSequence) -> tuple[int, SeenImages | None]:
        """Return the number of a sequence's beginning, 0 without images, and its images."""
        seen = self._see(sequence) if sequence.images else None
        if seen is None:
            return 0, None
        end = int(seen.places_Q[-1]) + 1
        begins = (sequence.images, _sort_key(sequence.token_ids[:end]))
        return self._known.setdefault(begins, len(self._known) + 1), seen


def _sort_key(token_ids: NDArray[np.generic]) -> bytes:
    """Return bytes in the order of the ids, the first one first."""
    return token_ids.astype(">u4").tobytes()


def _num_shared(one: NDArray[np.generic], other: NDArray[np.generic]) -> int:
    """Count the tokens that two paths begin with in common."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length
