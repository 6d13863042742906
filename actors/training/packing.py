"""Packing: places many sequences in few rows, without attention between them.

Rows are filled first-fit-decreasing to a token budget; 98 % of the columns then hold tokens.
Sequences with a common prefix may share one copy of it (`share_prompts`). Positions continue after
the shared prefix, and each token sees only its own path, so that the result is the same. Two kinds
of units go into a row as a whole:

- A prompt and its responses, as the episodes of a group are. Each response is a segment of its own
  that sees the prompt and itself. Equal responses, frequent where answers are short, share one
  segment; where experts are replayed, only what was computed with the same ones is equal.
- Paths of a tree, each piece of which takes its columns once: the calls of an agent's episode are a
  tree, and its rows are paths that begin alike. Prompts under one system prompt and responses that
  begin alike are paths of a tree, too, and are packed as such where that saves computation. Sorted
  by their tokens, sequences that begin alike stand side by side, and each adds to the row what it
  does not have in common with the one before it: the columns of a row are a tree in depth-first
  order. The descendants of a token follow it without a gap in the row, so that one number for each
  column describes the attention. A tree that is larger than a row is cut into several, each with
  the path that it begins with. Trees are not used where experts are replayed.

The last generated token of a sequence and the tokens after it take no column: nothing trained
depends on them. A token may be predicted in another segment than its neighbours (a response's first
token at the prompt's last column): `source_col_N` has the column of each token.

For a model with recurrent layers each row holds one sequence, or equal ones (`one_per_row`). Rows
of similar length share a micro-batch, so that at most a tenth of it is padding.

Sequences with images are packed like others (`policy/vision.py`).

Shape letters: S sequences, N generated tokens, B rows, T columns.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...schemas.wire.errors import ConfigError
from ..policy.vision import RowImages, SeenImages, pack_images
from .micro_batch import MicroBatch, TokenSequence

_LEAST_SAVING = 0.05
"""Share of the computation that trees must save, since their segments are more and shorter."""

_MOST_PADDED = 0.1
"""Share of padding in micro-batches of rows with one sequence each."""

IntArray = NDArray[np.int64]

See = Callable[[TokenSequence], SeenImages | None]
"""Finds the images of a sequence in its tokens."""


# -- places of generated tokens --------------------------------------------------------------------


@dataclass(frozen=True)
class TokenLayout:
    """Places of the generated tokens of a batch (shapes: S sequences, N generated tokens)."""

    counts_S: IntArray
    """Generated tokens of each sequence."""
    place_N: IntArray
    """Place of each generated token in its sequence."""
    target_N: IntArray
    """Id of each generated token."""
    first_S: IntArray
    """Index of each sequence's first generated token among all generated tokens of the batch."""
    prompts: list[int]
    """Length of each prompt; 0 without generated tokens."""
    totals: list[int]
    """Tokens of each sequence that need a column: those before its last generated token."""


def lay_out(sequences: Sequence[TokenSequence]) -> TokenLayout:
    """Find the generated tokens of sequences; ValueError for a sequence that begins with one."""
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


# -- rows and bins ---------------------------------------------------------------------------------


class RowWriter:
    """Fills one row: segments of tokens, with their positions and their attention."""

    def __init__(self, num_columns: int) -> None:
        self.ids, self.positions, self.segments = np.zeros((3, num_columns), dtype=np.int64)
        self.seen_until = np.full(num_columns, num_columns, dtype=np.int64)
        self.images = RowImages.empty(num_columns)
        self.experts: NDArray[np.uint8] | None = None
        """uint8[T, L, K]: experts that processed each token, if they are replayed."""
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

        Columns before `seen_until` see them; by default each segment sees only itself.
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
        """Set the experts of the tokens of segments that begin at these columns."""
        for start, of_segment in zip(starts.tolist(), experts, strict=True):
            if of_segment is None:
                continue
            if self.experts is None:
                self.experts = np.zeros((len(self.ids), *of_segment.shape[1:]), np.uint8)
                self.experts[:] = np.arange(of_segment.shape[2])  # for padding, too
            self.experts[start : start + len(of_segment)] = of_segment

    def show(self, first: int, seen: SeenImages | None) -> None:
        """Record the images in the columns from `first` on."""
        self.images.write(first, self.positions[first : self.num_used], seen)


def first_fit_decreasing(lengths: Sequence[int] | IntArray, budget: int) -> list[list[int]]:
    """Put items into bins of size `budget` by first-fit-decreasing.

    Returns the items of each bin. Equal lengths keep their order, so the result is deterministic.
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


def group_rows(
    row_lengths: Sequence[int], microbatch_tokens: int, most_padded: float = 1.0
) -> list[list[int]]:
    """Group rows of similar length, with rows × longest within `microbatch_tokens`.

    A row is padded by at most the share `most_padded`.
    """
    order = sorted(range(len(row_lengths)), key=lambda row: (-row_lengths[row], row))
    groups: list[list[int]] = []
    longest = 0
    for row in order:
        fits = groups and (len(groups[-1]) + 1) * longest <= microbatch_tokens
        if fits and row_lengths[row] >= (1 - most_padded) * longest:
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
    """Choose the row length up to `max_row_tokens` with the least computation.

    Long rows waste fewer columns, short rows waste less attention: a column costs about 1 + T / (6
    · hidden_size), the second term being attention over a masked row of T columns. `cut` returns
    the lengths of the units for a given row length, if they depend on it; `lengths` are then the
    shortest.
    """
    longest = max(lengths, default=1)
    candidates = [min(longest * factor, max_row_tokens) for factor in (1, 2, 3, 4, 6, 8, 12, 16)]

    def cost(tokens: int) -> float:
        num_rows = len(first_fit_decreasing(lengths if cut is None else cut(tokens), tokens))
        return num_rows * tokens * (1 + tokens / (6 * hidden_size))

    return min(sorted(set(candidates)), key=cost) if longest <= max_row_tokens else max_row_tokens


# -- a prompt and its responses --------------------------------------------------------------------


@dataclass(frozen=True)
class PromptUnit:
    """A unit of a row: a shared prompt with its responses, or one sequence."""

    prompt: NDArray[Any]
    copies: tuple[tuple[int, ...], ...]
    """Sequences, grouped by equal columns."""
    length: int
    """Number of columns."""
    seen: SeenImages | None = None
    """The images of the prompt."""

    @property
    def members(self) -> list[int]:
        """The unit's sequences."""
        return [index for same in self.copies for index in same]

    def write(
        self, writer: RowWriter, sequences: Sequence[TokenSequence], layout: TokenLayout
    ) -> tuple[IntArray, IntArray]:
        """Write it into a row; return its generated tokens and the columns that predict them."""
        first = writer.num_used
        seqs = np.concatenate(self.copies)
        counts = layout.counts_S[seqs]
        index = ranges(layout.first_S[seqs], counts)
        shared = len(self.prompt) if len(self.copies) > 1 else 0
        if shared:
            start = writer.append([self.prompt], 0, np.array([shared]), first + self.length)
            writer.replay(start, _experts_of(sequences, [self.members[0]], 0, [shared]))
        ids = [
            sequences[same[0]].token_ids[shared : layout.totals[same[0]]] for same in self.copies
        ]
        lengths = np.array([len(part) for part in ids], dtype=np.int64)
        starts = writer.append(ids, shared, lengths)
        owners = [same[0] for same in self.copies]
        ends = [layout.totals[seq] for seq in owners]
        writer.replay(starts, _experts_of(sequences, owners, shared, ends))
        starts = np.repeat(starts, [len(same) for same in self.copies])
        columns = np.repeat(starts, counts) + layout.place_N[index] - shared - 1
        if shared:
            columns[np.cumsum(counts) - counts] = starts[0] - 1  # last prompt column
        writer.show(first, self.seen)
        return index, columns


def _experts_of(
    sequences: Sequence[TokenSequence], chosen: Sequence[int], start: int, ends: Sequence[int]
) -> list[NDArray[Any] | None]:
    """Return the experts of some sequences' tokens from `start` on, if they are replayed."""
    recorded = ((sequences[seq].experts, end) for seq, end in zip(chosen, ends, strict=True))
    return [None if experts is None else experts[start:end] for experts, end in recorded]


def _key(sequence: TokenSequence, start: int, end: int) -> tuple[bytes, ...]:
    """Return a key that is equal for sequences with the same computation."""
    ids = np.ascontiguousarray(sequence.token_ids[start:end], dtype=np.int64).tobytes()
    experts = sequence.experts
    return (ids,) if experts is None else (ids, experts[start:end].tobytes())


def make_prompt_units(
    sequences: Sequence[TokenSequence],
    layout: TokenLayout,
    max_row_tokens: int,
    share_prompts: bool,
    see: See,
) -> list[PromptUnit]:
    """Group the sequences of one prompt, as far as they fit into a row, or else equal ones."""
    prompts, totals = layout.prompts, layout.totals
    families: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for index, sequence in enumerate(sequences):
        if totals[index]:
            end = prompts[index] if share_prompts else totals[index]
            same = (prompts[index], _key(sequence, 0, end), sequence.images)
            families[same].append(index)
    units: list[PromptUnit] = []
    for members in families.values():
        length = prompts[members[0]]
        prompt = sequences[members[0]].token_ids[:length]
        seen = see(sequences[members[0]])
        copies = _same_columns(members, sequences, layout)
        responses = [totals[same[0]] - length for same in copies]
        for part in _split_to_budget(responses, max_row_tokens - length):
            total = length + sum(responses[item] for item in part)
            units.append(PromptUnit(prompt, tuple(copies[item] for item in part), total, seen))
    return units


def _same_columns(
    members: Sequence[int], sequences: Sequence[TokenSequence], layout: TokenLayout
) -> list[tuple[int, ...]]:
    """Group the sequences of one prompt that are equal except for their last token."""
    if len(members) == 1:
        return [(members[0],)]
    alike: dict[tuple[bytes, ...], list[int]] = defaultdict(list)
    for index in members:
        key = _key(sequences[index], layout.prompts[index], layout.totals[index])
        alike[key].append(index)
    return [tuple(same) for same in alike.values()]


def _split_to_budget(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Split a group whose responses do not fit after one prompt; an oversized one is alone."""
    small = [index for index, length in enumerate(lengths) if length <= budget]
    large = [[index] for index, length in enumerate(lengths) if length > budget]
    bins = first_fit_decreasing([lengths[index] for index in small], budget)
    return large + [sorted(small[index] for index in bin_) for bin_ in bins]


# -- trees -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TreeUnit:
    """A unit of a row: paths of one tree, in depth-first order."""

    members: list[int]
    """The unit's sequences."""
    shared: list[int]
    """Columns that each sequence shares with the previous one; 0 for the first one."""
    length: int
    """Number of columns."""
    seen: SeenImages | None
    """The images, in the prefix that all its sequences share."""

    def write(
        self, writer: RowWriter, sequences: Sequence[TokenSequence], layout: TokenLayout
    ) -> tuple[IntArray, IntArray]:
        """Write it into a row; return its generated tokens and the columns that predict them."""
        first = writer.num_used
        path = np.empty(0, dtype=np.int64)
        """Columns of the current sequence's tokens."""
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
    """Sequences in depth-first order of their trees."""

    order: list[int]
    shared: list[int]
    """Columns that each sequence shares with the previous one; 0: it begins another tree."""
    totals: list[int]
    """Columns of each sequence."""
    seen: list[SeenImages | None]
    """The images of each sequence; a shared prefix holds all of them, or is empty."""

    @classmethod
    def of(
        cls, sequences: Sequence[TokenSequence], totals: Sequence[int], see: See
    ) -> "DepthFirst":
        """Order sequences by their first `totals` tokens; sequences with 0 are left out."""
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
        """Cut the trees into units of at most `budget` columns; a longer sequence is alone."""
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
        """Return the lengths of the units that `cut` returns."""
        return [unit.length for unit in self.cut(budget)]


def make_tree_units(
    sequences: Sequence[TokenSequence],
    layout: TokenLayout,
    max_row_tokens: int,
    hidden_size: int | None,
    see: See,
) -> tuple[list[TreeUnit], int]:
    """Cut the trees of a batch into units; return them and the row length for them.

    With `hidden_size` it is the length up to `max_row_tokens` with the least computation.
    """
    trees = DepthFirst.of(sequences, layout.totals, see)
    row_tokens = max_row_tokens
    if hidden_size is not None:
        row_tokens = choose_row_tokens(trees.totals, max_row_tokens, hidden_size, trees.lengths)
    return trees.cut(row_tokens), row_tokens


def count_distinct(paths: Sequence[NDArray[np.integer[Any]]]) -> int:
    """Count the distinct tokens of paths; common prefixes count once."""
    order = sorted(range(len(paths)), key=lambda index: _sort_key(paths[index]))
    shared = sum(_num_shared(paths[before], paths[other]) for before, other in pairwise(order))
    return sum(map(len, paths)) - shared


class _Beginnings:
    """Numbers the beginnings of sequences, up to their last image, to distinguish images."""

    def __init__(self, see: See) -> None:
        self._see = see
        self._known: dict[tuple[object, ...], int] = {}

    def of(self, sequence: TokenSequence) -> tuple[int, SeenImages | None]:
        """Return the number of a sequence's beginning (0 without images), and its images."""
        seen = self._see(sequence) if sequence.images else None
        if seen is None:
            return 0, None
        end = int(seen.places_Q[-1]) + 1
        begins = (sequence.images, _sort_key(sequence.token_ids[:end]))
        return self._known.setdefault(begins, len(self._known) + 1), seen


def _sort_key(token_ids: NDArray[np.generic]) -> bytes:
    """Return bytes that sort in the order of the ids."""
    return token_ids.astype(">u4").tobytes()


def _num_shared(left: NDArray[np.generic], other: NDArray[np.generic]) -> int:
    """Return the length of two paths' common prefix."""
    length = min(len(left), len(other))
    differs = left[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length


# -- micro-batches ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Rows:
    """Units, and the rows that hold them."""

    units: Sequence[PromptUnit | TreeUnit]
    bins: list[list[int]]
    """The units of each row."""
    lengths: list[int]
    """Columns of each row."""

    @classmethod
    def of(cls, units: Sequence[PromptUnit | TreeUnit], row_tokens: int) -> "_Rows":
        """Put units into rows by first-fit-decreasing."""
        lengths = [unit.length for unit in units]
        bins = first_fit_decreasing(lengths, row_tokens)
        return cls(units, bins, [sum(lengths[unit] for unit in bin_) for bin_ in bins])

    def cost(self, hidden_size: int | None) -> float:
        """Return the computation in columns, including attention if rows have a mask."""
        if hidden_size is None:
            return sum(self.lengths)
        return sum(length * (1 + length / (6 * hidden_size)) for length in self.lengths)


def _rows_of_prompts(
    sequences: Sequence[TokenSequence],
    layout: TokenLayout,
    max_row_tokens: int,
    share_prompts: bool,
    hidden_size: int | None,
    see: See,
) -> _Rows:
    units = make_prompt_units(sequences, layout, max_row_tokens, share_prompts, see)
    row_tokens = max_row_tokens
    if hidden_size is not None:
        lengths = [unit.length for unit in units]
        row_tokens = choose_row_tokens(lengths, max_row_tokens, hidden_size)
    return _Rows.of(units, row_tokens)


def _make_rows(
    sequences: Sequence[TokenSequence],
    layout: TokenLayout,
    max_row_tokens: int,
    share_prompts: bool,
    hidden_size: int | None,
    see: See,
) -> _Rows:
    """Put sequences into rows, as trees for agents' episodes or if trees are cheaper."""
    must_be_trees = any(item.branches and item.experts is None for item in sequences)
    may_be_trees = must_be_trees or all(item.experts is None for item in sequences)
    if not (share_prompts and may_be_trees):
        return _rows_of_prompts(sequences, layout, max_row_tokens, share_prompts, hidden_size, see)
    trees = _Rows.of(*make_tree_units(sequences, layout, max_row_tokens, hidden_size, see))
    if must_be_trees:
        return trees
    prompts = _rows_of_prompts(sequences, layout, max_row_tokens, True, hidden_size, see)
    largest = (1 - _LEAST_SAVING) * prompts.cost(hidden_size)
    return trees if trees.cost(hidden_size) <= largest else prompts


def _build(
    rows: Sequence[Sequence[PromptUnit | TreeUnit]],
    sequences: Sequence[TokenSequence],
    layout: TokenLayout,
) -> MicroBatch:
    num_columns = max(sum(unit.length for unit in row) for row in rows)
    writers = [RowWriter(num_columns) for _ in rows]
    placed = [
        (row, *unit.write(writer, sequences, layout))
        for row, (writer, units) in enumerate(zip(writers, rows, strict=True))
        for unit in units
    ]
    index_N = np.concatenate([index for _, index, _ in placed])
    order_N = np.argsort(index_N)
    index_N = index_N[order_N]
    row_N = np.repeat([row for row, *_ in placed], [len(index) for _, index, _ in placed])
    seq_S = np.sort(np.concatenate([unit.members for row in rows for unit in row]))

    def tensor(array: Any) -> Tensor:
        return torch.as_tensor(np.ascontiguousarray(array, dtype=np.int64))

    return MicroBatch(
        input_ids_BT=tensor([writer.ids for writer in writers]),
        position_ids_BT=tensor([writer.positions for writer in writers]),
        segment_ids_BT=tensor([writer.segments for writer in writers]),
        seen_until_BT=tensor([writer.seen_until for writer in writers]),
        row_N=tensor(row_N[order_N]),
        source_col_N=tensor(np.concatenate([columns for *_, columns in placed])[order_N]),
        target_N=tensor(layout.target_N[index_N]),
        seq_N=tensor(np.repeat(np.arange(len(seq_S)), layout.counts_S[seq_S])),
        seq_S=tensor(seq_S),
        index_N=tensor(index_N),
        segments=max(int(writer.segments.max()) for writer in writers),
        longest=1 + max(int(writer.positions.max()) for writer in writers),
        images=pack_images([writer.images for writer in writers]),
        experts_BTLK=_stacked([writer.experts for writer in writers]),
    )


def _stacked(experts: Sequence[NDArray[np.uint8] | None]) -> Tensor | None:
    """Concatenate the records of rows; all rows have one, or none has."""
    rows = [row for row in experts if row is not None]
    return torch.as_tensor(np.stack(rows)) if rows else None


def _see_nothing(_: TokenSequence) -> None:
    return None


def pack(
    sequences: Sequence[TokenSequence],
    *,
    max_row_tokens: int,
    microbatch_tokens: int,
    share_prompts: bool = False,
    one_per_row: bool = False,
    hidden_size: int | None = None,
    see: See = _see_nothing,
) -> list[MicroBatch]:
    """Pack a batch into micro-batches of at most `microbatch_tokens` columns, padding included.

    Each sequence is in one row; sequences without generated tokens are in no micro-batch. Rows have
    at most `max_row_tokens` columns; with `hidden_size` their length is chosen for the least
    computation (`choose_row_tokens`). With `one_per_row` each row holds one sequence. `see` finds
    the images of a sequence, for a vision model. Deterministic. Raises ConfigError for a sequence
    that does not fit.
    """
    if not sequences:
        return []
    layout = lay_out(sequences)
    if one_per_row:
        units = make_prompt_units(sequences, layout, max_row_tokens, share_prompts=False, see=see)
        lengths = [unit.length for unit in units]
        rows = _Rows(units, [[unit] for unit in range(len(units))], lengths)
    else:
        rows = _make_rows(sequences, layout, max_row_tokens, share_prompts, hidden_size, see)
    most_padded = _MOST_PADDED if one_per_row else 1.0
    return [
        _build([[rows.units[unit] for unit in rows.bins[row]] for row in group], sequences, layout)
        for group in group_rows(rows.lengths, microbatch_tokens, most_padded)
    ]


def block_causal_mask(seen_until_BT: Tensor) -> Tensor:
    """Build the attention mask, True if a column (dim 2) sees another (dim 3): bool[B, 1, T, T].

    A column sees itself and the earlier columns whose `seen_until` is beyond it. Padding sees only
    padding, so that no row of the mask is empty.
    """
    column_T = torch.arange(seen_until_BT.shape[1], device=seen_until_BT.device)
    seen = (column_T[:, None] >= column_T) & (column_T[:, None] < seen_until_BT[:, None, :])
    return seen[:, None]
