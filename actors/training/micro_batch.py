"""Micro-batches: sequences of tokens, the rows that they are packed into, and their ranks.

Sequences that are paths of trees are packed so that each piece of a tree takes its columns once:
the calls of an agent's episode are a tree, and its rows are paths of it that begin alike; so do the
episodes of a task, and tasks under one system prompt. Sorted by their tokens, sequences that begin
alike stand side by side, and each adds to the row what it does not have in common with the one
before it: the columns of a row are a tree in depth-first order. What follows a token in the tree
follows it without a gap in the row, so that one number for each column says who sees it. A tree
that is larger than a row is cut into several, each with the path that it begins with.

Sequences are divided over ranks by longest processing time first, on cost cL + L². The linear
layers of a decoder cost 24 D² for each of L columns, attention 4 D L (D: hidden size): in units of
4 D that is cL + L² with c = 6 D. Sequences that begin alike share columns where they lie on the
same rank, so whole families are kept together where that leaves the slowest rank less to do than
spreading them.

Shape letters: S sequences, N generated tokens, B rows, T columns.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...schemas.wire.errors import ConfigError
from ..policy.vision import PackedImages, RowImages, SeenImages


@dataclass(frozen=True)
class TokenSequence:
    """One sequence to train: prompt, generated tokens and observations in order."""

    token_ids: NDArray[Any]
    """Integer ids of all tokens."""
    mask: NDArray[Any]
    """1 where the policy generated the token; the first token belongs to the prompt."""
    images: tuple[bytes, ...] = ()
    """Encoded images of the prompt."""
    experts: NDArray[Any] | None = None
    """uint8[tokens - 1, L, K]: experts that read each token but the last; None: not recorded."""
    branches: bool = False
    """It is a row of an agent's episode: a path of a tree, that begins as others do."""


@dataclass(frozen=True)
class Runs:
    """What varlen kernels read of a row without padding (`varlen.py`); S counts its runs."""

    ends_S: Tensor
    """int32[S + 1]: cumulative numbers of columns."""
    key_ends_S: Tensor
    """int32[S + 1]: cumulative numbers of keys, those of the path before a run included."""
    longest: int
    """Most columns of a run."""
    most_keys: int
    """Most keys of a run."""
    num_columns: int
    """Columns of all runs."""
    key_columns: Tensor | None
    """int64: the column of each key; None: keys and columns are the same."""

    def to(self, device: torch.device | str) -> "Runs":
        """Copy the tensors to a device."""
        columns = None if self.key_columns is None else self.key_columns.to(device)
        ends_S, key_ends_S = self.ends_S.to(device), self.key_ends_S.to(device)
        return replace(self, ends_S=ends_S, key_ends_S=key_ends_S, key_columns=columns)


@dataclass(frozen=True)
class MicroBatch:
    """Rows of tokens, and where to find each generated token in them."""

    input_ids_BT: Tensor
    """int64: token ids; 0 where padded."""
    position_ids_BT: Tensor
    """int64: position of each token within its sequence."""
    segment_ids_BT: Tensor
    """int64: segment of each token, from 1 in every row; 0 is padding."""
    seen_until_BT: Tensor
    """int64: first column behind the token that does not see it; those between all do. Padding is
    seen by the padding behind it."""
    row_N: Tensor
    """int64: row that predicts each generated token."""
    source_col_N: Tensor
    """int64: column whose logits predict it."""
    target_N: Tensor
    """int64: its id."""
    seq_N: Tensor
    """int64: its sequence within this micro-batch, from 0; an index into `seq_S`."""
    seq_S: Tensor
    """int64: the micro-batch's sequences, as indices into the whole batch."""
    index_N: Tensor
    """int64: its place among the generated tokens of the whole batch, in the batch's order."""
    images: PackedImages | None = None
    """The images in the rows, if there are some."""
    experts_BTLK: Tensor | None = None
    """uint8: the experts that read each token as it was generated, where they are replayed."""
    columns: tuple[int, int] | None = None
    """First column that is computed here, and the one behind the last; None: all are."""
    runs: Runs | None = None
    """Of a single row without padding, for varlen kernels."""

    @classmethod
    def empty(cls, device: torch.device) -> "MicroBatch":
        """Return one column that predicts nothing, for a rank without a share of a micro-batch."""
        column_BT = torch.zeros(1, 1, dtype=torch.int64, device=device)
        none_N = torch.empty(0, dtype=torch.int64, device=device)
        return cls(
            input_ids_BT=column_BT,
            position_ids_BT=column_BT,
            segment_ids_BT=column_BT + 1,
            seen_until_BT=column_BT + 1,
            row_N=none_N,
            source_col_N=none_N,
            target_N=none_N,
            seq_N=none_N,
            seq_S=none_N,
            index_N=none_N,
        )

    @property
    def is_empty(self) -> bool:
        """Whether it predicts nothing."""
        return len(self.index_N) == 0

    @property
    def num_seqs(self) -> int:
        """Number of sequences."""
        return len(self.seq_S)

    @property
    def num_tokens(self) -> int:
        """Columns that hold a token."""
        return int((self.segment_ids_BT > 0).sum())

    def to(self, device: torch.device | str) -> "MicroBatch":
        """Copy every tensor to a device."""
        moved = {
            name: value.to(device)
            for name, value in vars(self).items()
            if isinstance(value, Tensor | PackedImages | Runs)
        }
        return replace(self, **moved)


# -- places of generated tokens --------------------------------------------------------------------

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


# -- bins ------------------------------------------------------------------------------------------


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
                hint=f"set learner.max_row_tokens (and learner.microbatch_tokens) to at least "
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
    max_row_tokens: int,
    hidden_size: int,
    cut: Callable[[int], Sequence[int]] | None = None,
) -> int:
    """Choose the row length, at most `max_row_tokens`, that costs the least computation.

    Long rows waste fewer columns, short rows waste less attention: a column costs about
    1 + T / (6 · hidden_size), the second term being attention over a masked row of T columns.
    `cut` tells the lengths of what is put into rows of so many tokens, where they depend on that;
    `lengths` are the shortest then.
    """
    longest = max(lengths, default=1)
    candidates = [min(longest * factor, max_row_tokens) for factor in (1, 2, 3, 4, 6, 8, 12, 16)]

    def cost(tokens: int) -> float:
        num_rows = len(first_fit_decreasing(lengths if cut is None else cut(tokens), tokens))
        return num_rows * tokens * (1 + tokens / (6 * hidden_size))

    return min(sorted(set(candidates)), key=cost) if longest <= max_row_tokens else max_row_tokens


class RowWriter:
    """Fills one row: segments of tokens, each with its positions and with who sees it."""

    def __init__(self, num_columns: int) -> None:
        self.ids, self.positions, self.segments = np.zeros((3, num_columns), dtype=np.int64)
        self.seen_until = np.full(num_columns, num_columns, dtype=np.int64)
        self.images = RowImages.empty(num_columns)
        self.experts: NDArray[np.uint8] | None = None
        """uint8[T, L, K]: experts that read each token, where they are replayed."""
        self.num_used = 0
        """Columns that hold a token."""
        self._num_segments = 0

    def append(
        self,
        ids: list[NDArray[Any]],
        first_position: int,
        lengths: IntArray,
        seen_until: int | None = None,
    ) -> IntArray:
        """Append segments that begin at the same position; return their first columns.

        They are seen up to the column `seen_until`, by default each by itself alone.
        """
        starts = self.num_used + np.cumsum(lengths) - lengths
        columns = slice(self.num_used, self.num_used + int(lengths.sum()))
        self.ids[columns] = np.concatenate(ids)
        self.positions[columns] = ranges(np.full_like(lengths, first_position), lengths)
        segments = self._num_segments + 1 + np.arange(len(lengths))
        self.segments[columns] = np.repeat(segments, lengths)
        ends = np.repeat(starts + lengths, lengths)
        self.seen_until[columns] = ends if seen_until is None else seen_until
        self.num_used = columns.stop
        self._num_segments += len(lengths)
        return starts

    def replay(self, starts: IntArray, experts: Sequence[NDArray[np.uint8] | None]) -> None:
        """Note the experts of the tokens of segments that begin at these columns."""
        for start, of_segment in zip(starts.tolist(), experts, strict=True):
            if of_segment is None:
                continue
            if self.experts is None:
                self.experts = np.zeros((len(self.ids), *of_segment.shape[1:]), np.uint8)
                self.experts[:] = np.arange(of_segment.shape[2])  # padding has some, too
            self.experts[start : start + len(of_segment)] = of_segment

    def show(self, first: int, seen: SeenImages | None) -> None:
        """Note the images in what was written from the column `first` on."""
        self.images.write(first, self.positions[first : self.num_used], seen)


# -- trees -----------------------------------------------------------------------------------------


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
        images_of = {index: images.of(sequences[index]) for index in chosen}
        paths = {index: sequences[index].token_ids[: totals[index]] for index in chosen}
        order = sorted(chosen, key=lambda index: (images_of[index][0], _sort_key(paths[index])))
        shared = [
            _num_shared(paths[before], paths[index])
            if images_of[before][0] == images_of[index][0]
            else 0
            for before, index in pairwise(order)
        ]
        return cls(
            order,
            [0, *shared][: len(order)],
            [totals[index] for index in order],
            [images_of[index][1] for index in order],
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
    max_row_tokens: int,
    hidden_size: int | None,
    see: See,
) -> tuple[list[TreeUnit], int]:
    """Cut the trees of a batch into units; return them and the length of the rows for them.

    With `hidden_size` that is the length, at most `max_row_tokens`, of the least computation.
    """
    trees = DepthFirst.of(sequences, layout.totals, see)
    row_tokens = max_row_tokens
    if hidden_size is not None:
        row_tokens = choose_row_tokens(trees.totals, max_row_tokens, hidden_size, trees.lengths)
    return trees.cut(row_tokens), row_tokens


def count_distinct(paths: Sequence[NDArray[np.integer[Any]]]) -> int:
    """Count the tokens of paths, those that several begin with in common once."""
    order = sorted(range(len(paths)), key=lambda index: _sort_key(paths[index]))
    shared = sum(_num_shared(paths[before], paths[other]) for before, other in pairwise(order))
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


def _num_shared(left: NDArray[np.generic], other: NDArray[np.generic]) -> int:
    """Count the tokens that two paths begin with in common."""
    length = min(len(left), len(other))
    differs = left[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length


# -- division over ranks ---------------------------------------------------------------------------


def cost(num_columns: int, hidden_size: int) -> int:
    """Return what a piece of a row costs, in units of 4 · hidden_size operations per layer."""
    return 6 * hidden_size * num_columns + num_columns**2


def longest_first(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """Give each item, the most costly first, to the rank with the least so far.

    Returns the items of each rank, ascending. The largest load is at most 4/3 − 1/(3 · ranks) of
    the least possible (Graham 1969). Deterministic: equal items keep their order, and of equal
    ranks the first takes the item.
    """
    loads, items = [0] * ranks, [list[int]() for _ in range(ranks)]
    for item in sorted(range(len(costs)), key=lambda item: (-costs[item], item)):
        rank = loads.index(min(loads))
        loads[rank] += costs[item]
        items[rank].append(item)
    return [sorted(numbers) for numbers in items]


def share_out(
    prompts: Sequence[int],
    lengths: Sequence[int],
    families: Sequence[int],
    *,
    ranks: int,
    hidden_size: int,
) -> list[list[int]]:
    """Return the sequences of each rank, ascending.

    `prompts` and `lengths` are columns of each sequence, prompt included in the length; those of
    one family share their prompt's. Every sequence is on one rank; deterministic.
    """
    members: dict[int, list[int]] = defaultdict(list)
    for sequence, family in enumerate(families):
        members[family].append(sequence)

    def load(sequences: Sequence[int]) -> int:
        columns: dict[int, int] = {}
        for sequence in sequences:
            before = columns.get(families[sequence], prompts[sequence])
            columns[families[sequence]] = before + lengths[sequence] - prompts[sequence]
        return sum(cost(number, hidden_size) for number in columns.values())

    whole = list(members.values())
    together = [
        sorted(sequence for family in rank for sequence in whole[family])
        for rank in longest_first([load(family) for family in whole], ranks)
    ]
    apart = longest_first([cost(length, hidden_size) for length in lengths], ranks)
    return min(together, apart, key=lambda shares: max(map(load, shares)))


def share_sequences(
    sequences: Sequence[TokenSequence], *, ranks: int, hidden_size: int, share_prompts: bool
) -> list[list[int]]:
    """Return the sequences of each rank, ascending; see `share_out`."""
    lengths = [len(sequence.mask) for sequence in sequences]
    if share_prompts and any(sequence.branches for sequence in sequences):
        shared, trees = _in_trees(sequences, lengths)
        return share_out(shared, lengths, trees, ranks=ranks, hidden_size=hidden_size)
    prompts = [int(sequence.mask.argmax()) for sequence in sequences]
    known: dict[bytes, int] = {}
    families = [
        known.setdefault(sequence.token_ids[:length].tobytes(), at) if share_prompts else at
        for at, (sequence, length) in enumerate(zip(sequences, prompts, strict=True))
    ]
    return share_out(prompts, lengths, families, ranks=ranks, hidden_size=hidden_size)


def _in_trees(
    sequences: Sequence[TokenSequence], lengths: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Return the columns that each shares with those of its family, and its family.

    A family begins where a sequence has less than half in common with the one before it: under one
    system prompt all tasks are one tree, and different episodes share little else.
    """
    walk = DepthFirst.of(sequences, lengths, lambda _: None)
    shared, families = [0] * len(sequences), [0] * len(sequences)
    begins: list[int] = []
    for seq, common in zip(walk.order, walk.shared, strict=True):
        if 2 * common < lengths[seq]:
            begins.append(seq)
        shared[seq], families[seq] = common, len(begins) - 1
    # Whichever is met first is counted whole: it takes the place of the one that the family begins
    # with.
    for family, first in enumerate(begins):
        shared[first] = shared[families.index(family)]
    return shared, families


# -- columns divided over ranks --------------------------------------------------------------------


def columns_of(packed: MicroBatch, place: int, size: int) -> MicroBatch:
    """Return the same rows of which only the columns at `place` among `size` are computed.

    Rows are padded to a multiple of `size`. The generated tokens are those that these columns
    predict. All that says who sees whom stays whole.
    """
    width = packed.input_ids_BT.shape[1]
    missing = -width % size
    share = (width + missing) // size
    start = place * share
    own_N = (packed.source_col_N >= start) & (packed.source_col_N < start + share)
    changes: dict[str, Any] = {
        "input_ids_BT": _padded(packed.input_ids_BT, missing, 0),
        "position_ids_BT": _padded(packed.position_ids_BT, missing, 0),
        "segment_ids_BT": _padded(packed.segment_ids_BT, missing, 0),
        "seen_until_BT": _padded(packed.seen_until_BT, missing, width + missing),
        "columns": (start, start + share),
    }
    if packed.experts_BTLK is not None:
        changes["experts_BTLK"] = torch.nn.functional.pad(
            packed.experts_BTLK, (0, 0, 0, 0, 0, missing)
        )
    if packed.images is not None:
        changes["images"] = _images_of(packed.images, width, missing)
    for name in ("row_N", "source_col_N", "target_N", "seq_N", "index_N"):
        changes[name] = getattr(packed, name)[own_N]
    return replace(packed, **changes)


def _padded(values: Tensor, missing: int, value: int) -> Tensor:
    return torch.nn.functional.pad(values, (0, missing), value=value)


def _images_of(images: PackedImages, width: int, missing: int) -> PackedImages:
    """Find the places of images, which count the columns of all rows, again in wider rows."""
    row_Q, column_Q = images.column_Q // width, images.column_Q % width
    place_Q = row_Q * (width + missing) + column_Q
    return PackedImages(images.images, place_Q, _padded(images.rope_3BT, missing, 0))
