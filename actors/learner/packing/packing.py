"""Packing: many sequences in few rows, without attention between them.

Shapes: S sequences, N generated tokens, B rows, T columns. Rows are filled first-fit-decreasing
to a token budget; 98 % of the columns then hold tokens. Sequences that begin alike may share one
copy of what they have in common (`share_prompts`): the episodes of a group their prompt
(`shared_prompts`), the rows of agents' episodes, which are paths of a tree, each piece of that tree
(`trees`). Positions go on where the shared part ends, and each token sees its own path alone, so
that the result is the same.

The model never reads the last generated token of a sequence, nor what follows it: nothing that is
trained depends on them, so they take no column. The prediction of a token may therefore stand in
another segment than its neighbours (a response's first token is predicted at the prompt's last
column): `source_col_N` names the column for each token.

Sequences with images are packed like others (`packed_images`).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .bins import choose_row_tokens, first_fit_decreasing, group_rows
from .layout import See, TokenLayout, lay_out
from .micro_batch import MicroBatch, TokenSequence
from .packed_images import pack_images
from .row_writer import RowWriter
from .shared_prompts import PromptUnit, make_prompt_units
from .trees import TreeUnit, make_tree_units


def _build(
    rows: Sequence[Sequence[PromptUnit | TreeUnit]],
    sequences: Sequence[TokenSequence],
    layout: TokenLayout,
) -> MicroBatch:
    num_columns = max(sum(unit.length for unit in row) for row in rows)
    writers = [RowWriter(num_columns) for _ in rows]
    found = [
        (row, *unit.write(writer, sequences, layout))
        for row, (writer, units) in enumerate(zip(writers, rows, strict=True))
        for unit in units
    ]
    index_N = np.concatenate([index for _, index, _ in found])
    order_N = np.argsort(index_N)
    index_N = index_N[order_N]
    row_N = np.repeat([row for row, *_ in found], [len(index) for _, index, _ in found])
    seq_S = np.sort(np.concatenate([unit.members for row in rows for unit in row]))

    def tensor(array: Any) -> Tensor:
        return torch.as_tensor(np.ascontiguousarray(array, dtype=np.int64))

    return MicroBatch(
        input_ids_BT=tensor([writer.ids for writer in writers]),
        position_ids_BT=tensor([writer.positions for writer in writers]),
        segment_ids_BT=tensor([writer.segments for writer in writers]),
        seen_until_BT=tensor([writer.seen_until for writer in writers]),
        row_N=tensor(row_N[order_N]),
        source_col_N=tensor(np.concatenate([columns for *_, columns in found])[order_N]),
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
    layout = lay_out(sequences)
    units: Sequence[PromptUnit | TreeUnit]
    if share_prompts and any(one.branches and one.experts is None for one in sequences):
        units, row_tokens = make_tree_units(sequences, layout, row_tokens, hidden_size, see)
        lengths = [unit.length for unit in units]
    else:
        units = make_prompt_units(sequences, layout, row_tokens, share_prompts, see)
        lengths = [unit.length for unit in units]
        if hidden_size is not None:
            row_tokens = choose_row_tokens(lengths, row_tokens, hidden_size)
    bins = first_fit_decreasing(lengths, row_tokens)
    row_lengths = [sum(lengths[unit] for unit in bin_) for bin_ in bins]
    return [
        _build([[units[unit] for unit in bins[row]] for row in rows], sequences, layout)
        for rows in group_rows(row_lengths, microbatch_tokens)
    ]


def block_causal_mask(seen_until_BT: Tensor) -> Tensor:
    """Build the attention mask, True where a column (dim 2) sees another (dim 3): bool[B, 1, T, T].

    A column sees itself and those earlier ones that are seen up to it or beyond. Padding sees only
    padding, so that no row of the mask is empty.
    """
    column_T = torch.arange(seen_until_BT.shape[1], device=seen_until_BT.device)
    seen = (column_T[:, None] >= column_T) & (column_T[:, None] < seen_until_BT[:, None, :])
    return seen[:, None]
