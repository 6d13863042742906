"""What the layers of models differ in: attention scores, how far they see, recurrent states.

Some models cap their scores (Gemma 2), or add a sink to each head: a score of its own in the
softmax that no value belongs to (gpt-oss). Some layers see only the last tokens (a window) or those
of the same chunk (Llama 4).

Shape letters: B rows, H query heads, K key-value heads, N queries of a row, T keys, D head size, E
size of a value.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, DynamicCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin
from transformers.masking_utils import AttentionMaskInterface
from transformers.masking_utils import sdpa_mask as _sdpa_mask  # pyright: ignore[reportUnknownVariableType]  # untyped in transformers

from ...schemas.plan import model_refusals
from ...schemas.wire.errors import ModelError


def attend(
    query_BHND: Tensor,
    key_BKTD: Tensor,
    value_BKTE: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Return the output [B, H, N, E].

    `mask` is additive or says what is visible, [B or 1, 1, N, T]; None: causal, where the last
    query sees all keys. Capped scores are `softcap` x tanh(score / `softcap`).
    """
    num_heads, num_queries = query_BHND.shape[1:3]
    shares_keys = num_heads != key_BKTD.shape[1]
    if not softcap and sinks_H is None:
        return scaled_dot_product_attention(
            query_BHND,
            key_BKTD,
            value_BKTE,
            attn_mask=mask,
            is_causal=mask is None and num_queries > 1,
            scale=scale,
            enable_gqa=shares_keys,
        )
    mask = _additive(mask, query_BHND, key_BKTD.shape[2])
    if shares_keys:
        repeats = num_heads // key_BKTD.shape[1]
        key_BKTD, value_BKTE = (
            part.repeat_interleave(repeats, 1) for part in (key_BKTD, value_BKTE)
        )
    if not softcap:
        assert sinks_H is not None
        # The sink is the mask of one more key, whose product with each query is zero.
        wide = mask.expand(len(query_BHND), num_heads, -1, -1)
        sinks = sinks_H.to(mask.dtype)[:, None, None].expand(*wide.shape[:3], 1)
        key_BKTD, value_BKTE = (pad(part, (0, 0, 0, 1)) for part in (key_BKTD, value_BKTE))
        return scaled_dot_product_attention(
            query_BHND, key_BKTD, value_BKTE, attn_mask=torch.cat([wide, sinks], -1), scale=scale
        )
    scores_BHNT = softcap * torch.tanh(query_BHND @ key_BKTD.mT * (scale / softcap)) + mask
    if sinks_H is not None:
        sinks = sinks_H.to(scores_BHNT.dtype)[:, None, None].expand(*scores_BHNT.shape[:3], 1)
        return torch.cat([scores_BHNT, sinks], -1).softmax(-1)[..., :-1] @ value_BKTE
    return scores_BHNT.softmax(-1) @ value_BKTE


def _additive(mask: Tensor | None, query_BHND: Tensor, num_keys: int) -> Tensor:
    num_queries = query_BHND.shape[2]
    if mask is None:
        mask = query_BHND.new_ones(num_queries, num_keys, dtype=torch.bool)
        mask = mask.tril(num_keys - num_queries)[None, None]
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=query_BHND.dtype).masked_fill_(~mask, -torch.inf)


WITH_SINKS = "tinkermq_sinks"
"""Name in transformers of an attention like its sdpa that knows sinks, and caps scores."""


def attend_for_transformers(
    module: nn.Module,
    query_BHND: Tensor,
    key_BKTD: Tensor,
    value_BKTE: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_options: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers' models call it: return [B, N, H, E] and no attention weights.

    `s_aux` are sinks.
    """
    scale = query_BHND.shape[-1] ** -0.5 if scaling is None else scaling
    parts = (query_BHND, key_BKTD, value_BKTE, attention_mask)
    return attend(*parts, scale, softcap, s_aux).transpose(1, 2).contiguous(), None


AttentionInterface.register(WITH_SINKS, attend_for_transformers)  # pyright: ignore[reportUnknownMemberType]  # untyped in transformers
AttentionMaskInterface.register(WITH_SINKS, _sdpa_mask)  # pyright: ignore[reportUnknownMemberType]


def needs_masks(model: nn.Module) -> str | None:
    """Return why a model cannot be computed by kernels without masks; None: it can."""
    named = model_refusals.needs_masks(_text_config(model).to_dict())
    return named or (model_refusals.SINKS if has_sinks(model) else None)


def is_recurrent(model: nn.Module) -> bool:
    """Return whether some layer has a state that each token changes, in place of keys and values.

    Linear attention, state spaces and convolutions have one, which some models hold themselves
    (RecurrentGemma).
    """
    return getattr(model, "_is_stateful", False) or any(
        isinstance(layer, LinearAttentionCacheLayerMixin)
        for layer in cache_layers(_text_config(model))
    )


def cache_layers(config: Any) -> list[Any]:
    """Return what transformers keeps for each layer; ModelError if a kind lacks its width."""
    try:
        return DynamicCache(config=config).layers
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ModelError(
            f"the layers of a model of type {config.model_type!r} cannot be made",
            hint="see layer_types in its config.json, and the widths of these kinds "
            "(sliding_window, attention_chunk_size)",
        ) from error


def columns_as_positions(config: Any) -> int | None:
    """Return up to which column of a row layers may take columns for positions; None: any.

    Llama 4's layers without rotary positions scale their queries by the column.
    """
    return config.floor_scale if getattr(config, "attn_temperature_tuning", False) else None


def has_sinks(model: nn.Module) -> bool:
    """Return whether heads have a sink; transformers names their parameters alike."""
    return any("sink" in name.rpartition(".")[2] for name, _ in model.named_parameters())


# -- how far layers see ----------------------------------------------------------------------------

_LIMITED = ("sliding_attention", "chunked_attention")


@dataclass(frozen=True, slots=True)
class Reach:
    """How far the attention layers of a model see."""

    window: int | None = None
    """Tokens that a sliding layer sees, its own included; None: no layer is one."""
    chunk: int | None = None
    """Tokens of a chunk; None: no layer is chunked."""
    by_kind: bool = False
    """Whether layers differ, so that the model takes a mask for each kind."""

    @property
    def full_until(self) -> int | None:
        """Length up to which every layer sees all tokens before; None: any."""
        return min((each for each in (self.window, self.chunk) if each), default=None)

    def masks(self, visible: Tensor, query_places: Tensor, key_places: Tensor) -> Any:
        """Return what the model takes as its mask: one, or one for each kind of layer.

        `visible` is what a layer sees that sees all, [B or 1, 1, N, T] of booleans; places are the
        positions of queries [B or 1, N] and keys [B or 1, T] in their sequence.
        """
        kinds = {"full_attention": visible}
        query, key = query_places[:, None, :, None], key_places[:, None, None, :]
        if self.window is not None:
            kinds["sliding_attention"] = visible & (query - key < self.window)
        if self.chunk is not None:
            kinds["chunked_attention"] = visible & (query // self.chunk == key // self.chunk)
        return kinds if self.by_kind else list(kinds.values())[-1]

    @contextmanager
    def narrowed(self, model: nn.Module, width: int = 2) -> Iterator["Reach"]:
        """Give a model a window and chunks of this many tokens, which a short text shows."""
        narrow = replace(
            self,
            window=None if self.window is None else width,
            chunk=None if self.chunk is None else width,
        )
        try:
            narrow.set(model)
            yield narrow
        finally:
            self.set(model)

    def set(self, model: nn.Module) -> None:
        """Write the widths into a model's configuration, from which it makes its own masks."""
        config: Any = _text_config(model)
        if self.window is not None:
            config.sliding_window = self.window
        if self.chunk is not None:
            config.attention_chunk_size = self.chunk


def reach_of(model: nn.Module) -> Reach:
    """Return how far a model's layers see, as its configuration and its class say.

    Llama's configuration may have a window, which Llama's attention ignores.
    """
    reach = reach_of_config(_text_config(model))
    is_ignored = reach.window is not None and not reach.by_kind and not _has_window(model, reach)
    return Reach() if is_ignored else reach


def reach_of_config(config: Any) -> Reach:
    """Return how far layers see according to a text configuration."""
    kinds: set[str] = set(getattr(config, "layer_types", None) or ())
    window: int | None = getattr(config, "sliding_window", None)
    chunk: int | None = getattr(config, "attention_chunk_size", None)
    if not kinds:
        return Reach(window)
    seeing = kinds & {"full_attention", *_LIMITED}
    return Reach(
        window if "sliding_attention" in kinds else None,
        chunk if "chunked_attention" in kinds else None,
        by_kind=len(seeing) > 1,
    )


def _has_window(model: nn.Module, reach: Reach) -> bool:
    weight = cast(Any, model).get_input_embeddings().weight
    ids = torch.arange(8, device=weight.device)[None] % len(weight)
    logits: list[Tensor] = []
    for width in (2, ids.shape[1]):
        with torch.no_grad(), reach.narrowed(model, width):
            logits.append(cast(Any, model)(input_ids=ids, use_cache=False).logits)
    return not torch.equal(*logits)


def _text_config(model: nn.Module) -> Any:
    return cast(Any, model).config.get_text_config()


def decoder_of(model: nn.Module) -> nn.Module:
    """Return the module of a causal language model whose output are hidden states."""
    decoder: nn.Module = cast(Any, model).get_decoder()
    return decoder if decoder is not model else cast(Any, model).model  # Llama 4 returns itself
