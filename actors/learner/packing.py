"""Packing: many sequences in few rows, without attention between them.

Shapes: S sequences, N generated tokens, B rows, T columns. Rows are filled first-fit-decreasing
to a token budget; 98 % of the columns then hold tokens. Sequences that begin with the same prompt
may share one copy of it (`share_prompts`): each response is a segment of its own that sees the
prompt and itself, and its positions go on where the prompt ends, so that the result is the same.

The model never reads the last generated token of a sequence, nor what follows it: nothing that is
trained depends on them, so they take no column. The prediction of a token may therefore stand in
another segment than its neighbours (a response's first token is predicted at the prompt's last
column): `source_col_N` names the column for each token.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...schemas.errors import ConfigError

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


@dataclass(frozen=True)
class TokenSequence:
    """One sequence to train: prompt, generated tokens and observations in order."""

    token_ids: NDArray[Any]
    """Integer ids of all tokens."""
    mask: NDArray[Any]
    """1 where the policy generated the token; the first token belongs to the prompt."""


@dataclass(frozen=True)
class Packed:
    """One micro-batch of rows, and where to find each generated token in it."""

    input_ids_BT: Tensor
    """int64: token ids; 0 where padded."""
    position_ids_BT: Tensor
    """int64: position of each token within its sequence."""
    segment_ids_BT: Tensor
    """int64: segment of each token, from 1 in every row; 0 is padding."""
    parent_ids_BT: Tensor
    """int64: segment that the token also sees in full; 0: none."""
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

    @property
    def num_seqs(self) -> int:
        """Number of sequences."""
        return len(self.seq_S)

    @property
    def num_tokens(self) -> int:
        """Columns that hold a token."""
        return int((self.segment_ids_BT > 0).sum())

    def to(self, device: torch.device | str) -> "Packed":
        """Copy every tensor to a device."""
        return Packed(**{name: tensor.to(device) for name, tensor in vars(self).items()})


@dataclass(frozen=True)
class _Unit:
    """What goes into a row as a whole: a shared prompt and its responses, or one sequence."""

    prompt: NDArray[Any]
    seqs: tuple[int, ...]
    length: int


def first_fit_decreasing(lengths: Sequence[int] | IntArray, budget: int) -> list[list[int]]:
    """Put items into as few bins of `budget` as first-fit-decreasing finds.

    Gives the items of each bin. Equal lengths keep their order, so the result is deterministic.
    """
    items = np.asarray(lengths, dtype=np.int64)
    free = np.full(len(items), budget, dtype=np.int64)
    bins: list[list[int]] = []
    for item in np.argsort(-items, kind="stable").tolist():
        if items[item] > budget:
            raise ConfigError(
                f"a sequence of {items[item]} tokens does not fit into a row of {budget}",
                hint=f"set learner.row_tokens (and learner.microbatch_tokens) to at least "
                f"{items[item]}, or lower rollout.max_response_tokens",
            )
        place = int(np.argmax(free >= items[item]))
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


def _trimmed_lengths(sequences: Sequence[TokenSequence]) -> tuple[list[int], list[int]]:
    """Give the length of each prompt, and how many tokens of each sequence need a column."""
    prompts: list[int] = []
    totals: list[int] = []
    for index, sequence in enumerate(sequences):
        generated = np.flatnonzero(sequence.mask)
        if len(generated) and generated[0] == 0:
            raise ValueError(f"sequence {index} begins with a generated token: nothing predicts it")
        prompts.append(int(generated[0]) if len(generated) else 0)
        totals.append(int(generated[-1]) if len(generated) else 0)
    return prompts, totals


def _split_to_budget(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Cut a group whose responses do not fit beside one prompt; an oversized one stands alone."""
    small = [index for index, length in enumerate(lengths) if length <= budget]
    large = [[index] for index, length in enumerate(lengths) if length > budget]
    bins = first_fit_decreasing([lengths[index] for index in small], budget)
    return large + [sorted(small[index] for index in bin_) for bin_ in bins]


def _make_units(
    sequences: Sequence[TokenSequence], row_tokens: int, share_prompts: bool
) -> list[_Unit]:
    prompts, totals = _trimmed_lengths(sequences)
    families: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for index, sequence in enumerate(sequences):
        if totals[index]:
            prompt = np.ascontiguousarray(sequence.token_ids[: prompts[index]], dtype=np.int64)
            families[(prompt.tobytes(),) if share_prompts else (index,)].append(index)
    units: list[_Unit] = []
    for members in families.values():
        length = prompts[members[0]]
        prompt = sequences[members[0]].token_ids[:length]
        responses = [totals[index] - length for index in members]
        for part in _split_to_budget(responses, row_tokens - length):
            total = length + sum(responses[item] for item in part)
            units.append(_Unit(prompt, tuple(members[item] for item in part), total))
    return units


class _RowWriter:
    """Fills one row of a micro-batch, and notes where its generated tokens are predicted."""

    def __init__(self, row: int, num_columns: int) -> None:
        self.row = row
        self.ids, self.positions, self.segments, self.parents = np.zeros(
            (4, num_columns), dtype=np.int64
        )
        self.num_used = 0
        self.num_segments = 0

    def _append(self, ids: NDArray[Any], first_position: int, parent: int) -> int:
        columns = slice(self.num_used, self.num_used + len(ids))
        self.num_segments += 1
        self.ids[columns] = ids
        self.positions[columns] = np.arange(first_position, first_position + len(ids))
        self.segments[columns] = self.num_segments
        self.parents[columns] = parent
        self.num_used += len(ids)
        return self.num_segments

    def write(
        self, unit: _Unit, sequences: Sequence[TokenSequence]
    ) -> Iterator[tuple[int, IntArray]]:
        """Write a unit; give for each of its sequences the columns that predict its tokens."""
        if len(unit.seqs) == 1:
            sequence = sequences[unit.seqs[0]]
            generated = np.flatnonzero(sequence.mask)
            start = self.num_used
            self._append(sequence.token_ids[: generated[-1]], 0, 0)
            yield unit.seqs[0], start + generated - 1
            return
        num_prompt = len(unit.prompt)
        parent = self._append(unit.prompt, 0, 0)
        prompt_end = self.num_used - 1
        for seq in unit.seqs:
            sequence = sequences[seq]
            generated = np.flatnonzero(sequence.mask)
            start = self.num_used
            self._append(sequence.token_ids[num_prompt : generated[-1]], num_prompt, parent)
            columns = start + generated - num_prompt - 1
            columns[0] = prompt_end
            yield seq, columns


def _build(
    rows: Sequence[Sequence[_Unit]], sequences: Sequence[TokenSequence], first_index: IntArray
) -> Packed:
    num_columns = max(sum(unit.length for unit in row) for row in rows)
    writers = [_RowWriter(row, num_columns) for row in range(len(rows))]
    found: list[tuple[int, int, IntArray]] = []
    for writer, units in zip(writers, rows, strict=True):
        for unit in units:
            found += [(seq, writer.row, columns) for seq, columns in writer.write(unit, sequences)]
    found.sort(key=lambda item: item[0])
    counts = [len(columns) for _, _, columns in found]
    targets = [sequences[seq].token_ids[np.asarray(sequences[seq].mask) != 0] for seq, *_ in found]
    indices = [first_index[seq] + np.arange(len(columns)) for seq, _, columns in found]

    def tensor(array: Any) -> Tensor:
        return torch.as_tensor(np.ascontiguousarray(array, dtype=np.int64))

    return Packed(
        input_ids_BT=tensor([writer.ids for writer in writers]),
        position_ids_BT=tensor([writer.positions for writer in writers]),
        segment_ids_BT=tensor([writer.segments for writer in writers]),
        parent_ids_BT=tensor([writer.parents for writer in writers]),
        row_N=tensor(np.repeat([row for _, row, _ in found], counts)),
        source_col_N=tensor(np.concatenate([columns for *_, columns in found])),
        target_N=tensor(np.concatenate(targets)),
        seq_N=tensor(np.repeat(np.arange(len(found)), counts)),
        seq_S=tensor([seq for seq, *_ in found]),
        index_N=tensor(np.concatenate(indices)),
    )


def pack(
    sequences: Sequence[TokenSequence],
    *,
    row_tokens: int,
    microbatch_tokens: int,
    share_prompts: bool = False,
    hidden_size: int | None = None,
) -> list[Packed]:
    """Pack a batch into micro-batches of at most `microbatch_tokens` columns, padding included.

    Each sequence lies in one row; one without generated tokens is in no micro-batch. Rows have at
    most `row_tokens` columns; with `hidden_size` their length is chosen for the least computation
    (`choose_row_tokens`). Deterministic. Raises ConfigError for a sequence that does not fit.
    """
    units = _make_units(sequences, row_tokens, share_prompts)
    lengths = [unit.length for unit in units]
    if hidden_size is not None:
        row_tokens = choose_row_tokens(lengths, row_tokens, hidden_size)
    bins = first_fit_decreasing(lengths, row_tokens)
    counts = [int(np.count_nonzero(sequence.mask)) for sequence in sequences]
    first_index = np.cumsum([0, *counts], dtype=np.int64)
    row_lengths = [sum(lengths[unit] for unit in bin_) for bin_ in bins]
    return [
        _build([[units[unit] for unit in bins[row]] for row in rows], sequences, first_index)
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
