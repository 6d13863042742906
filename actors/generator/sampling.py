"""Sampling for a whole batch, each row with its own parameters and its own random stream.

Shape letters: B rows, V vocabulary, K candidates kept by a filter.

Random numbers are counter-based: the number of a token is a hash of the request's seed and the
token's index (SplitMix64, Steele et al. 2014), so a row draws the same tokens whatever the rest of
the batch does, and no generator object lives per request. One uniform per token picks the token
from the cumulative distribution.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_CANDIDATES = 1024
"""A nucleus is looked for among this many likeliest tokens before the vocabulary is sorted."""


@dataclass(frozen=True, slots=True)
class RowParameters:
    """The sampling parameters of B rows."""

    temperature_B: NDArray[np.float32]
    top_p_B: NDArray[np.float32]
    top_k_B: NDArray[np.int64]
    seed_B: NDArray[np.uint64]
    counter_B: NDArray[np.uint64]
    """Index of the token that is drawn, counted from the request's first."""


def uniforms(seed_B: NDArray[np.uint64], counter_B: NDArray[np.uint64]) -> NDArray[np.float32]:
    """Return float32[B] in [0, 1), a pure function of seed and counter."""
    bits_B = _mix(_mix(seed_B) + (counter_B + np.uint64(1)) * _GOLDEN)
    return ((bits_B >> np.uint64(40)).astype(np.float32)) * np.float32(2.0**-24)


def _mix(bits_B: NDArray[np.uint64]) -> NDArray[np.uint64]:
    bits_B = (bits_B ^ (bits_B >> np.uint64(30))) * _MIX_1
    bits_B = (bits_B ^ (bits_B >> np.uint64(27))) * _MIX_2
    return bits_B ^ (bits_B >> np.uint64(31))


def sample(
    logits_BV: torch.Tensor, rows: RowParameters
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Draw one token per row; return int64[B] tokens and float32[B] log-probs.

    The log-prob is that of softmax(logits / temperature) before any filter; a greedy row
    (temperature 0) takes the likeliest token and records its log-prob at temperature 1. Rows whose
    logits are not finite come back with a log-prob of NaN.
    """
    logits_BV = logits_BV.float()
    greedy_B = rows.temperature_B == 0
    scale_B = np.where(greedy_B, np.float32(1), rows.temperature_B)
    if (scale_B != 1).any():
        logits_BV = logits_BV / _column(scale_B, logits_BV)
    probs_BV = logits_BV.softmax(-1)
    tokens_B = _draw(logits_BV, probs_BV, rows, greedy_B)
    logprobs_B = probs_BV.gather(1, tokens_B[:, None])[:, 0].log()
    return tokens_B.cpu().numpy(), logprobs_B.cpu().numpy()


def _draw(
    logits_BV: torch.Tensor,
    probs_BV: torch.Tensor,
    rows: RowParameters,
    greedy_B: NDArray[np.bool_],
) -> torch.Tensor:
    if greedy_B.all():
        return logits_BV.argmax(-1)
    uniform_B1 = _column(uniforms(rows.seed_B, rows.counter_B), probs_BV)
    filtered_B = ~greedy_B & ((rows.top_p_B < 1) | (rows.top_k_B > 0))
    if filtered_B.all():
        return _draw_filtered(probs_BV, rows.top_p_B, rows.top_k_B, uniform_B1)
    tokens_B = _inverse_cdf(probs_BV, uniform_B1)
    if filtered_B.any():
        chosen = torch.as_tensor(np.flatnonzero(filtered_B), device=probs_BV.device)
        tokens_B[chosen] = _draw_filtered(
            probs_BV[chosen],
            rows.top_p_B[filtered_B],
            rows.top_k_B[filtered_B],
            uniform_B1[chosen],
        )
    if greedy_B.any():
        mask_B = torch.as_tensor(greedy_B, device=probs_BV.device)
        tokens_B = torch.where(mask_B, logits_BV.argmax(-1), tokens_B)
    return tokens_B


def _column(values_B: NDArray[np.float32], like: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(values_B, device=like.device)[:, None]


def _inverse_cdf(weights_BV: torch.Tensor, uniform_B1: torch.Tensor) -> torch.Tensor:
    """Pick index i with probability weights[i] / sum(weights); never one of weight 0."""
    cdf_BV = weights_BV.cumsum(-1)
    total_B1 = cdf_BV[:, -1:]
    below_B1 = torch.nextafter(total_B1, torch.zeros_like(total_B1))
    target_B1 = torch.minimum(uniform_B1 * total_B1, below_B1)
    picked_B1 = torch.searchsorted(cdf_BV, target_B1, right=True)
    return picked_B1[:, 0].clamp(max=weights_BV.shape[1] - 1)


def _draw_filtered(
    probs_BV: torch.Tensor,
    top_p_B: NDArray[np.float32],
    top_k_B: NDArray[np.int64],
    uniform_B1: torch.Tensor,
) -> torch.Tensor:
    vocabulary = probs_BV.shape[1]
    kept_B = np.where(top_k_B > 0, np.minimum(top_k_B, vocabulary), vocabulary)
    num_candidates = min(int(kept_B.max()), max(_CANDIDATES, int(top_k_B.max())), vocabulary)
    best_BK, index_BK = probs_BV.topk(num_candidates, dim=-1)
    top_p_B1 = _column(top_p_B, probs_BV)
    open_B = torch.as_tensor(kept_B > num_candidates, device=probs_BV.device)
    if bool((open_B & (best_BK.sum(-1) < top_p_B1[:, 0])).any()):
        best_BK, index_BK = probs_BV.sort(dim=-1, descending=True)
    rank_K = torch.arange(best_BK.shape[1], device=probs_BV.device)
    before_BK = best_BK.cumsum(-1) - best_BK
    keep_BK = (before_BK < top_p_B1) & (
        rank_K < torch.as_tensor(kept_B, device=rank_K.device)[:, None]
    )
    picked_B = _inverse_cdf(best_BK * keep_BK, uniform_B1)
    return index_BK.gather(1, picked_B[:, None])[:, 0]
