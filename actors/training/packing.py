"""Packing: many sequences in few rows, without attention between them.

Rows are filled first-fit-decreasing to a token budget; 98 % of the columns then hold tokens.
Sequences that begin alike may share one copy of what they have in common (`share_prompts`): the
episodes of a group their prompt, the rows of agents' episodes, which are paths of a tree, each
piece of that tree (`micro_batch.py`). Prompts under one system prompt and responses that begin
alike are paths of a tree, too, and are packed as such where that saves computation. Positions go on
where the shared part ends, and each token sees its own path alone, so that the result is the same.
Of a prompt and its responses, each response is a segment of its own that sees the prompt and
itself. Equal responses, frequent where answers are short, share one segment; where experts are
replayed, only what was computed with the same ones is equal, and there are no trees.

The model never reads the last generated token of a sequence, nor what follows it: nothing that is
trained depends on them, so they take no column. The prediction of a token may therefore stand in
another segment than its neighbours (a response's first token is predicted at the prompt's last
column): `source_col_N` names the column for each token.

Sequences with images are packed like others (`policy/vision.py`).

Shape letters: S sequences, N generated tokens, B rows, T columns.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..policy.vision import SeenImages, pack_images
from .micro_batch import (
    IntArray,
    MicroBatch,
    RowWriter,
    See,
    TokenLayout,
    TokenSequence,
    TreeUnit,
    choose_row_tokens,
    first_fit_decreasing,
    group_rows,
    lay_out,
    make_tree_units,
    ranges,
)

_LEAST_SAVING = 0.05
"""Share of the computation that trees must save, as they have more segments, and shorter ones."""


@dataclass(frozen=True)
class PromptUnit:
    """What goes into a row as a whole: a shared prompt and its responses, or one sequence."""

    prompt: NDArray[Any]
    copies: tuple[tuple[int, ...], ...]
    """Sequences, those together whose columns are the same."""
    length: int
    """Columns that it takes."""
    seen: SeenImages | None = None
    """The images of the prompt."""

    @property
    def members(self) -> list[int]:
        """Its sequences."""
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
            columns[np.cumsum(counts) - counts] = starts[0] - 1  # the prompt's end
        writer.show(first, self.seen)
        return index, columns


def _experts_of(
    sequences: Sequence[TokenSequence], chosen: Sequence[int], start: int, ends: Sequence[int]
) -> list[NDArray[Any] | None]:
    """Return the experts of some sequences' tokens from `start` on, where they are replayed."""
    recorded = ((sequences[seq].experts, end) for seq, end in zip(chosen, ends, strict=True))
    return [None if experts is None else experts[start:end] for experts, end in recorded]


def _key(sequence: TokenSequence, start: int, end: int) -> tuple[bytes, ...]:
    """Return what two sequences have in common there if the model computes the same for them."""
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
    """Put the sequences of one prompt together, as far as they fit into a row."""
    prompts, totals = layout.prompts, layout.totals
    families: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for index, sequence in enumerate(sequences):
        if totals[index]:
            same = (_key(sequence, 0, prompts[index]), sequence.images)
            families[same if share_prompts else (index,)].append(index)
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
    """Put together the sequences of one prompt that are equal but for their last token."""
    if len(members) == 1:
        return [(members[0],)]
    alike: dict[tuple[bytes, ...], list[int]] = defaultdict(list)
    for index in members:
        key = _key(sequences[index], layout.prompts[index], layout.totals[index])
        alike[key].append(index)
    return [tuple(same) for same in alike.values()]


def _split_to_budget(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Cut a group whose responses do not fit beside one prompt; an oversized one stands alone."""
    small = [index for index, length in enumerate(lengths) if length <= budget]
    large = [[index] for index, length in enumerate(lengths) if length > budget]
    bins = first_fit_decreasing([lengths[index] for index in small], budget)
    return large + [sorted(small[index] for index in bin_) for bin_ in bins]


@dataclass(frozen=True)
class _Rows:
    """Units, and the rows that they are put into."""

    units: Sequence[PromptUnit | TreeUnit]
    bins: list[list[int]]
    """The units of each row."""
    lengths: list[int]
    """Columns of each row."""

    @classmethod
    def of(cls, units: Sequence[PromptUnit | TreeUnit], row_tokens: int) -> "_Rows":
        """Put units into as few rows as first-fit-decreasing finds."""
        lengths = [unit.length for unit in units]
        bins = first_fit_decreasing(lengths, row_tokens)
        return cls(units, bins, [sum(lengths[unit] for unit in bin_) for bin_ in bins])

    def cost(self, hidden_size: int | None) -> float:
        """Return the computation in columns, attention included where rows have a mask."""
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
    """Put sequences into rows, as trees where agents' episodes are some, or that is cheaper."""
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
        images=pack_images([writer.images for writer in writers]),
        experts_BTLK=_stacked([writer.experts for writer in writers]),
    )


def _stacked(experts: Sequence[NDArray[np.uint8] | None]) -> Tensor | None:
    """Put the records of rows together; all have one, or none has."""
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
    hidden_size: int | None = None,
    see: See = _see_nothing,
) -> list[MicroBatch]:
    """Pack a batch into micro-batches of at most `microbatch_tokens` columns, padding included.

    Each sequence lies in one row; one without generated tokens is in no micro-batch. Rows have at
    most `max_row_tokens` columns; with `hidden_size` their length is chosen for the least
    computation (`choose_row_tokens`). `see` finds the images of a sequence, for a model that sees
    them. Deterministic. Raises ConfigError for a sequence that does not fit.
    """
    if not sequences:
        return []
    layout = lay_out(sequences)
    rows = _make_rows(sequences, layout, max_row_tokens, share_prompts, hidden_size, see)
    return [
        _build([[rows.units[unit] for unit in rows.bins[row]] for row in group], sequences, layout)
        for group in group_rows(rows.lengths, microbatch_tokens)
    ]


def block_causal_mask(seen_until_BT: Tensor) -> Tensor:
    """Build the attention mask, True where a column (dim 2) sees another (dim 3): bool[B, 1, T, T].

    A column sees itself and those earlier ones that are seen up to it or beyond. Padding sees only
    padding, so that no row of the mask is empty.
    """
    column_T = torch.arange(seen_until_BT.shape[1], device=seen_until_BT.device)
    seen = (column_T[:, None] >= column_T) & (column_T[:, None] < seen_until_BT[:, None, :])
    return seen[:, None]
