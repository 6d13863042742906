"""Rows whose columns are divided over ranks, which compute a part of each sequence together."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .micro_batch import MicroBatch
from .packed_images import PackedImages


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
