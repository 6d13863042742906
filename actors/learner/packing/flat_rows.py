"""Rows as flash attention reads them: one row of all tokens, and where each sequence begins.

Its kernel takes sequences of any lengths, told apart by their cumulative lengths ("varlen"), and
reads no mask: padding is left out, and prompts cannot be shared.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .micro_batch import MicroBatch
from .packed_images import PackedImages


def flatten(packed: MicroBatch) -> MicroBatch:
    """Lay the tokens of all rows in one row without padding, in their order.

    Raises ValueError for rows in which prompts are shared.
    """
    if _begins_late(packed).any():
        raise ValueError("flash attention cannot read rows in which sequences share a prompt")
    real_C = packed.segment_ids_BT.flatten() > 0  # C: columns of all rows, one after the other
    place_C = real_C.cumsum(0) - 1

    def row(values_BT: Tensor) -> Tensor:
        return values_BT.flatten()[real_C][None]

    images = packed.images
    if images is not None:
        rope_31T = images.rope_3BT.flatten(1)[:, None, real_C]
        images = PackedImages(images.images, place_C[images.column_Q], rope_31T)
    experts = packed.experts_BTLK
    row_B1 = torch.arange(len(packed.input_ids_BT), device=place_C.device)[:, None]
    last_BT = row_B1 * packed.input_ids_BT.shape[1] + packed.seen_until_BT - 1
    column_N = packed.row_N * packed.input_ids_BT.shape[1] + packed.source_col_N
    return replace(
        packed,
        input_ids_BT=row(packed.input_ids_BT),
        position_ids_BT=row(packed.position_ids_BT),
        segment_ids_BT=row(packed.segment_ids_BT),
        seen_until_BT=row(place_C[last_BT] + 1),
        row_N=torch.zeros_like(packed.row_N),
        source_col_N=place_C[column_N],
        images=images,
        experts_BTLK=None if experts is None else experts.flatten(0, 1)[real_C][None],
    )


def _begins_late(packed: MicroBatch) -> Tensor:
    """Mark the columns where a segment goes on from another: bool[B, T - 1]."""
    segments_BT = packed.segment_ids_BT
    begins = (segments_BT[:, 1:] != segments_BT[:, :-1]) & (segments_BT[:, 1:] > 0)
    return begins & (packed.position_ids_BT[:, 1:] > 0)


def kernel_arguments(flat: MicroBatch) -> dict[str, Any]:
    """Return what transformers' models hand through to flash attention: sequences of one row.

    A sequence begins where its positions do. The backward pass is the deterministic one, so that a
    step trained again has the same bits.
    """
    positions_T = flat.position_ids_BT[0]
    first_S = torch.nonzero(positions_T == 0).flatten()
    ends_S = torch.cat([first_S, first_S.new_tensor([len(positions_T)])]).int()
    longest = int(ends_S.diff().max())
    return {
        "cu_seq_lens_q": ends_S,
        "cu_seq_lens_k": ends_S,
        "max_length_q": longest,
        "max_length_k": longest,
        "deterministic": True,
    }
