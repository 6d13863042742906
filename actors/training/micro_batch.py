"""Micro-batches: sequences of tokens, and the rows into which they are packed (`packing.py`).

Shape letters: S sequences, N generated tokens, B rows, T columns.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from ..policy.vision import PackedImages


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
    """uint8[tokens - 1, L, K]: experts that processed each token but the last; None: not
    recorded."""
    branches: bool = False
    """Whether it is a row of an agent's episode: a path of a tree, which shares its beginning with
    others."""


@dataclass(frozen=True)
class Runs:
    """Inputs of varlen kernels for a row without padding (`varlen.py`); S is the number of runs."""

    ends_S: Tensor
    """int32[S + 1]: cumulative number of columns."""
    key_ends_S: Tensor
    """int32[S + 1]: cumulative number of keys, including keys of the path before a run."""
    longest: int
    """Number of columns of the longest run."""
    most_keys: int
    """Largest number of keys of a run."""
    num_columns: int
    """Number of columns of all runs."""
    key_columns: Tensor | None
    """int64: the column of each key; None: keys and columns are the same."""

    def to(self, device: torch.device | str) -> "Runs":
        """Copy the tensors to a device."""
        columns = None if self.key_columns is None else self.key_columns.to(device)
        ends_S, key_ends_S = self.ends_S.to(device), self.key_ends_S.to(device)
        return replace(self, ends_S=ends_S, key_ends_S=key_ends_S, key_columns=columns)


@dataclass(frozen=True)
class MicroBatch:
    """Rows of tokens, with the places of the generated tokens."""

    input_ids_BT: Tensor
    """int64: token ids; 0 where padded."""
    position_ids_BT: Tensor
    """int64: position of each token within its sequence."""
    segment_ids_BT: Tensor
    """int64: segment of each token, from 1 in every row; 0 is padding."""
    seen_until_BT: Tensor
    """int64: first column after the token that does not see it; all columns in between see it.
    Padding is seen by the padding after it."""
    row_N: Tensor
    """int64: row that predicts each generated token."""
    source_col_N: Tensor
    """int64: column whose logits predict it."""
    target_N: Tensor
    """int64: id of each generated token."""
    seq_N: Tensor
    """int64: its sequence within this micro-batch, from 0; an index into `seq_S`."""
    seq_S: Tensor
    """int64: the micro-batch's sequences, as indices into the whole batch."""
    index_N: Tensor
    """int64: its index among the generated tokens of the whole batch."""
    segments: int
    """Largest number of segments of a row, known without a GPU's answer."""
    longest: int
    """Tokens of the longest sequence: one more than its largest position."""
    images: PackedImages | None = None
    """The images in the rows, if there are any."""
    experts_BTLK: Tensor | None = None
    """uint8: recorded experts of each token, if they are replayed."""
    columns: tuple[int, int] | None = None
    """First and end of the columns that are computed here; None: all columns."""
    runs: Runs | None = None
    """Runs of a single row without padding, for varlen kernels."""

    @classmethod
    def empty(cls, device: torch.device) -> "MicroBatch":
        """Return one column without predictions, for a rank without a share of a micro-batch."""
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
            segments=1,
            longest=1,
        )

    @property
    def is_empty(self) -> bool:
        """Whether the micro-batch has no predictions."""
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


# -- columns divided over ranks --------------------------------------------------------------------


def columns_of(packed: MicroBatch, place: int, size: int) -> MicroBatch:
    """Return the rows for a rank that computes part `place` of `size` parts of the columns.

    Rows are padded to a multiple of `size`. The generated tokens are those predicted at these
    columns. The attention's description covers all columns.
    """
    width = packed.input_ids_BT.shape[1]
    share = -(-width // size)
    start = place * share
    own_N = (packed.source_col_N >= start) & (packed.source_col_N < start + share)
    names = ("row_N", "source_col_N", "target_N", "seq_N", "index_N")
    changes = {name: getattr(packed, name)[own_N] for name in names}
    return replace(widened(packed, share * size), columns=(start, start + share), **changes)


def widened(packed: MicroBatch, width: int) -> MicroBatch:
    """Return the rows, padded to so many columns."""
    before = packed.input_ids_BT.shape[1]
    more = (0, width - before)
    names = ("input_ids_BT", "position_ids_BT", "segment_ids_BT")
    changes: dict[str, Any] = {name: pad(getattr(packed, name), more) for name in names}
    if packed.experts_BTLK is not None:
        changes["experts_BTLK"] = pad(packed.experts_BTLK, (0, 0, 0, 0, *more))
    if (images := packed.images) is not None:  # their places count the columns of all rows
        place_Q = images.column_Q // before * width + images.column_Q % before
        changes["images"] = PackedImages(images.images, place_Q, pad(images.rope_3BT, more))
    return replace(packed, seen_until_BT=pad(packed.seen_until_BT, more, value=width), **changes)
