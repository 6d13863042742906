"""Attention over the slot cache, registered with transformers under the name ATTENTION.

Shape letters: B rows, H query heads, K key-value heads, G = H / K, N queries, T keys, D head size.

Query heads that share a key-value head become queries of that head, so that keys and values are
never repeated in memory. A mask is additive, [B, 1, N, T]; without one, N > 1 is causal and N = 1
sees every key.
"""

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

ATTENTION = "tinkermq_slots"


def slot_attention(
    module: torch.nn.Module,
    query_BHND: torch.Tensor,
    key_BKTD: torch.Tensor,
    value_BKTD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend; return [B, N, H, D] and no attention weights."""
    scale = query_BHND.shape[-1] ** -0.5 if scaling is None else scaling
    if query_BHND.shape[2] == 1:
        out_BHND = _attend_one(query_BHND, key_BKTD, value_BKTD, attention_mask, scale)
    else:
        out_BHND = scaled_dot_product_attention(
            query_BHND,
            key_BKTD,
            value_BKTD,
            attn_mask=attention_mask,
            is_causal=attention_mask is None,
            scale=scale,
            enable_gqa=query_BHND.shape[1] != key_BKTD.shape[1],
        )
    return out_BHND.transpose(1, 2).contiguous(), None


def _attend_one(
    query_BH1D: torch.Tensor,
    key_BKTD: torch.Tensor,
    value_BKTD: torch.Tensor,
    mask_B11T: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    num_rows, num_heads, _, head_size = query_BH1D.shape
    kv_heads, length = key_BKTD.shape[1:3]
    shape = (num_rows, kv_heads, num_heads // kv_heads, head_size)
    query_BKGD = query_BH1D.reshape(shape)
    if query_BH1D.dtype != torch.float32:
        mask = None if mask_B11T is None else mask_B11T.expand(-1, 1, shape[2], -1)
        out_BKGD = scaled_dot_product_attention(
            query_BKGD, key_BKTD, value_BKTD, attn_mask=mask, scale=scale
        )
        return out_BKGD.reshape(query_BH1D.shape)
    # In float32 on a CPU two plain products beat the fused kernel, which is made for long queries.
    query_XGD = query_BKGD.reshape(-1, shape[2], head_size)
    key_XDT = key_BKTD.flatten(0, 1).transpose(1, 2)
    if mask_B11T is None:
        scores_XGT = torch.bmm(query_XGD * scale, key_XDT)
    else:
        mask_X1T = mask_B11T[:, 0].expand(-1, kv_heads, -1).reshape(-1, 1, length)
        scores_XGT = torch.baddbmm(mask_X1T, query_XGD, key_XDT, alpha=scale)
    return torch.bmm(scores_XGT.softmax(-1), value_BKTD.flatten(0, 1)).view(query_BH1D.shape)


AttentionInterface.register(ATTENTION, slot_attention)  # pyright: ignore[reportUnknownMemberType]  # untyped in transformers
