"""Packing: many sequences in few rows, without attention between them.

Shapes: S sequences, N generated tokens, B rows, T columns. Rows are filled first-fit-decreasing
to a token budget; 98 % of the columns then hold tokens. Sequences that begin with the same prompt
may share one copy of it (`share_prompts`): each response is a segment of its own that sees the
prompt and itself, and its positions go on where the prompt ends, so that the result is the same.
Equal responses, frequent where answers are short, share one segment.

The model never reads the last generated token of a sequence, nor what follows it: nothing that is
trained depends on them, so they take no column. The prediction of a token may therefore stand in
another segment than its neighbours (a response's first token is predicted at the prompt's last
column): `source_col_N` names the column for each token.

Sequences with images are packed like others (`packed_images`).
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....schemas.wire.errors import ConfigError
from ...models.vision import SeenImages
from .micro_batch import MicroBatch, TokenSequence
from .packed_images import RowImages, pack_images

IntArray = NDArray[np.int64]


See = Callable[[TokenSequence], SeenImages | None]
"""Finds the images of a sequence in its tokens."""


@dataclass(frozen=True)
class _Unit:
    """What goes into a row as a whole: a shared prompt and its responses, or one sequence."""

    prompt: NDArray[Any]
    copies: tuple[tuple[int, ...], ...]
    """Sequences, those together whose columns are the same."""
    length: int
    seen: SeenImages | None = None
    """The images of the prompt."""


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


def choose_row_tokens(lengths: Sequence[int], row_tokens: int, hidden_size: int) -> int:
    """Choose the row length, at most `row_tokens`, that costs the least computation.

    Long rows waste fewer columns, short rows waste less attention: a column costs about
    1 + T / (6 · hidden_size), the second term being attention over a masked row of T columns.
    """
    longest = max(lengths, default=1)
    candidates = [min(longest * factor, row_tokens) for factor in (1, 2, 3, 4, 6, 8, 12, 16)]

    def cost(tokens: int) -> float:
        num_rows = len(first_fit_decreasing(lengths, tokens))
        return num_rows * tokens * (1 + tokens / (6 * hidden_size))

    return min(sorted(set(candidates)), key=cost) if longest <= row_tokens else row_tokens


@dataclass(frozen=True)
class _Layout:
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


def _lay_out(sequences: Sequence[TokenSequence]) -> _Layout:
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
    return _Layout(counts_S, place_N, target_N, first_S, prompts_S.tolist(), totals_S.tolist())


def _split_to_budget(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Cut a group whose responses do not fit beside one prompt; an oversized one stands alone."""
    small = [index for index, length in enumerate(lengths) if length <= budget]
    large = [[index] for index, length in enumerate(lengths) if length > budget]
    bins = first_fit_decreasing([lengths[index] for index in small], budget)
    return large + [sorted(small[index] for index in bin_) for bin_ in bins]


def _make_units(
    sequences: Sequence[TokenSequence],
    layout: _Layout,
    row_tokens: int,
    share_prompts: bool,
    see: See,
) -> list[_Unit]:
    prompts, totals = layout.prompts, layout.totals
    families: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for index, sequence in enumerate(sequences):
        if totals[index]:
            prompt = np.ascontiguousarray(sequence.token_ids[: prompts[index]], dtype=np.int64)
            same = (prompt.tobytes(), sequence.images)
            families[same if share_prompts else (index,)].append(index)
    units: list[_Unit] = []
    for members in families.values():
        length = prompts[members[0]]
        prompt = sequences[members[0]].token_ids[:length]
        seen = see(sequences[members[0]])
        copies = _same_columns(members, sequences, layout)
        responses = [totals[same[0]] - length for same in copies]
        for part in _split_to_budget(responses, row_tokens - length):
            total = length + sum(responses[item] for item in part)
            units.append(_Unit(prompt, tuple(copies[item] for item in part), total, seen))
    return units


def _same_columns(
    members: Sequence[int], sequences: Sequence[TokenSequence], layout: _Layout
) -> list[tuple[int, ...]]:
    """Put together the sequences of one prompt that are equal but for their last token."""
    if len(members) == 1:
        return [(members[0],)]
    found: dict[bytes, list[int]] = defaultdict(list)
    for index in members:
        response = sequences[index].token_ids[layout.prompts[index] : layout.totals[index]]
        found[np.ascontiguousarray(response, dtype=np.int64).tobytes()].append(index)
    return [tuple(same) for same in found.values()]


def _ranges(starts: IntArray, counts: IntArray) -> IntArray:
    """Concatenate the ranges [start, start + count)."""
    skipped = np.repeat(starts - (np.cumsum(counts) - counts), counts)
    return skipped + np.arange(len(skipped))


class _RowWriter:
    """Fills one row of a micro-batch, and notes where its generated tokens are predicted."""

    def __init__(self, num_columns: int) -> None:
        self.ids, self.positions, self.segments, self.parents = np.zeros(
            (4, num_columns), dtype=np.int64
        )
        self.images = RowImages.empty(num_columns)
        self.num_used = 0
        self.num_segments = 0

    def _append(
        self, ids: list[NDArray[Any]], first_position: int, lengths: IntArray, parent: int
    ) -> IntArray:
        """Append segments that begin at the same position; return their first columns."""
        starts = self.num_used + np.cumsum(lengths) - lengths
        columns = slice(self.num_used, self.num_used + int(lengths.sum()))
        self.ids[columns] = np.concatenate(ids)
        self.positions[columns] = _ranges(np.full_like(lengths, first_position), lengths)
        segments = self.num_segments + 1 + np.arange(len(lengths))
        self.segments[columns] = np.repeat(segments, lengths)
        self.parents[columns] = parent
        self.num_used = columns.stop
        self.num_segments += len(lengths)
        return starts

    def write(
        self, unit: _Unit, sequences: Sequence[TokenSequence], layout: _Layout
    ) -> tuple[IntArray, IntArray]:
        """Write a unit; return the indices of its generated tokens and their predicting columns."""
        first = self.num_used
        seqs = np.concatenate(unit.copies)
        counts = layout.counts_S[seqs]
        index = _ranges(layout.first_S[seqs], counts)
        shared = len(unit.prompt) if len(unit.copies) > 1 else 0
        parent = 0
        if shared:
            self._append([unit.prompt], 0, np.array([shared]), 0)
            parent = self.num_segments
        ids = [
            sequences[same[0]].token_ids[shared : layout.totals[same[0]]] for same in unit.copies
        ]
        lengths = np.array([len(part) for part in ids], dtype=np.int64)
        starts = self._append(ids, shared, lengths, parent)
        starts = np.repeat(starts, [len(same) for same in unit.copies])
        columns = np.repeat(starts, counts) + layout.place_N[index] - shared - 1
        if shared:
            columns[np.cumsum(counts) - counts] = starts[0] - 1  # the prompt's end
        self.images.write(first, self.positions[first : self.num_used], unit.seen)
        return index, columns


def _build(
    rows: Sequence[Sequence[_Unit]], sequences: Sequence[TokenSequence], layout: _Layout
) -> MicroBatch:
    num_columns = max(sum(unit.length for unit in row) for row in rows)
    writers = [_RowWriter(num_columns) for _ in rows]
    found = [
        (row, *writer.write(unit, sequences, layout))
        for row, (writer, units) in enumerate(zip(writers, rows, strict=True))
        for unit in units
    ]
    index_N = np.concatenate([index for _, index, _ in found])
    order_N = np.argsort(index_N)
    index_N = index_N[order_N]
    row_N = np.repeat([row for row, *_ in found], [len(index) for _, index, _ in found])
    seq_S = np.sort(np.concatenate([same for row in rows for unit in row for same in unit.copies]))

    def tensor(array: Any) -> Tensor:
        return torch.as_tensor(np.ascontiguousarray(array, dtype=np.int64))

    return MicroBatch(
        input_ids_BT=tensor([writer.ids for writer in writers]),
        position_ids_BT=tensor([writer.positions for writer in writers]),
        segment_ids_BT=tensor([writer.segments for writer in writers]),
        parent_ids_BT=tensor([writer.parents for writer in writers]),
        row_N=tensor(row_N[order_N]),
        source_col_N=tensor(np.concatenate([columns for *_, columns in found])[order_N]),
        target_N=tensor(layout.target_N[index_N]),
        seq_N=tensor(np.repeat(np.arange(len(seq_S)), layout.counts_S[seq_S])),
        seq_S=tensor(seq_S),
        index_N=tensor(index_N),
        images=pack_images([writer.images for writer in writers]),
    )


def _see_nothing(_: TokenSequence) -> None:
    return None


def pack(
    sequences: Sequence[TokenSequence],
    *,
    row_tokens: int,
    microbatch_tokens: int,
    share_prompts: bool = False,
    hidden_size: int | None = None,
    see: See = _see_nothing,
) -> list[MicroBatch]:
    """Pack a batch into micro-batches of at most `microbatch_tokens` columns, padding included.

    Each sequence lies in one row; one without generated tokens is in no micro-batch. Rows have at
    most `row_tokens` columns; with `hidden_size` their length is chosen for the least computation
    (`choose_row_tokens`). `see` finds the images of a sequence, for a model that sees them.
    Deterministic. Raises ConfigError for a sequence that does not fit.
    """
    if not sequences:
        return []
    layout = _lay_out(sequences)
    units = _make_units(sequences, layout, row_tokens, share_prompts, see)
    lengths = [unit.length for unit in units]
    if hidden_size is not None:
        row_tokens = choose_row_tokens(lengths, row_tokens, hidden_size)
    bins = first_fit_decreasing(lengths, row_tokens)
    row_lengths = [sum(lengths[unit] for unit in bin_) for bin_ in bins]
    return [
        _build([[units[unit] for unit in bins[row]] for row in rows], sequences, layout)
        for rows in group_rows(row_lengths, microbatch_tokens)
    ]


def block_causal_mask(segment_ids_BT: Tensor, parent_ids_BT: Tensor | None = None) -> Tensor:
    """Build the attention mask, True where a column (dim 2) sees another (dim 3): bool[B, 1, T, T].

    A column sees the earlier ones of its segment, itself, and all of the parent segment. Padding
    sees only padding, so that no row of the mask is empty.
    """
    num_columns = segment_ids_BT.shape[1]
    causal = torch.ones(num_columns, num_columns, dtype=torch.bool, device=segment_ids_BT.device)
    seen = (segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :]) & causal.tril()
    if parent_ids_BT is not None:
        parent = parent_ids_BT[:, :, None]
        seen = seen | ((parent == segment_ids_BT[:, None, :]) & (parent > 0))
    return seen[:, None]
