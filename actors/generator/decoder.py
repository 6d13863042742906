"""One causal language model over the slot cache: prefill, decode, recompute.

Shape letters: B rows, N tokens per row of a prefill, T keys, V vocabulary.

The model is the ordinary transformers class. It is given the cache, explicit positions and an
additive 4-D mask. `_check` compares this way of running it with a plain forward pass, so a model
whose attention needs more than that (windows, soft caps, sinks, position biases) is refused and
never computed wrongly.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from ...schemas.errors import ModelError
from ...schemas.lora import LoraConfig
from ..model_folder import load_model_config, load_policy
from .attention import ATTENTION
from .engine import IntVector
from .kv_cache import CacheShape, SlotCache

_PREFILL_TOKENS = 4096
"""Tokens of one prefill pass, padding included, which bounds its memory; one row may have more."""
_PROBE = (1, 2, 3, 5, 1, 2)


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens that a slot is to be fed: those from position `start` on."""

    slot: int
    start: int
    tokens: IntVector


def load_decoder(
    path: str,
    *,
    dtype: torch.dtype,
    device: str,
    max_slots: int,
    max_tokens: int,
    trust_remote_code: bool = False,
    lora: LoraConfig | None = None,
    base: PreTrainedModel | None = None,
) -> "SlotDecoder":
    """Load a model and prove that the slot cache computes it; ModelError for one it cannot.

    With `base` only an adapter is loaded, beside the weights of a model that is in memory.
    """
    config = load_model_config(path, trust_remote_code=trust_remote_code)
    _check_layers(path, config)
    text_config: Any = config.get_text_config()  # pyright: ignore[reportUnknownMemberType]  # untyped in transformers
    longest = getattr(text_config, "max_position_embeddings", None)
    if longest is not None and max_tokens > longest:
        raise ModelError(
            f"sequences of up to {max_tokens} tokens are asked for, model {path} has positions "
            f"for {longest}",
            hint="lower rollout.max_prompt_tokens or rollout.max_response_tokens",
        )
    # Loaded with the reference attention, which `_check` compares with: it knows every variant.
    model = load_policy(
        path,
        lora or LoraConfig(),
        base=base,
        dtype=dtype,
        attn_implementation="eager",
        trust_remote_code=trust_remote_code,
    )
    torch.nn.Module.to(model.requires_grad_(False), torch.device(device))
    return SlotDecoder(path, model, max_slots=max_slots, max_tokens=max_tokens)


class SlotDecoder:
    """A model that decodes the first B slots of its cache together."""

    def __init__(
        self, path: str, model: PreTrainedModel, *, max_slots: int, max_tokens: int
    ) -> None:
        self.model = model
        embedding = cast("torch.Tensor", model.get_input_embeddings().weight)
        self.device = embedding.device
        self.vocab_size = int(embedding.shape[0])
        plain_NV, shape = _probe(path, model)
        self.cache = SlotCache(shape, max_slots, max_tokens)
        self._check(path, plain_NV)

    def prefill(self, spans: Sequence[Span]) -> Iterator[tuple[list[int], torch.Tensor]]:
        """Feed every span; yield (indices into `spans`, logits of their last token [B, V]).

        Spans of similar length share a forward pass.
        """
        for batch in _batches(spans):
            yield batch, self._prefill_batch([spans[index] for index in batch])

    def decode(self, tokens_B: NDArray[np.int32], positions_B: NDArray[np.int64]) -> torch.Tensor:
        """Feed one token to each of the first B slots; return the logits [B, V]."""
        length = int(positions_B.max()) + 1
        self.cache.reserve(len(tokens_B), length)
        positions = torch.as_tensor(positions_B, device=self.device)
        self.cache.begin_decode(positions, length)
        mask = None
        if int(positions_B.min()) + 1 < length:
            keys_T = torch.arange(length, device=self.device)
            mask = self._additive((keys_T <= positions[:, None])[:, None, None])
        ids = torch.as_tensor(tokens_B.astype(np.int64), device=self.device)
        return self._forward(ids[:, None], positions[:, None], mask)

    def _prefill_batch(self, spans: Sequence[Span]) -> torch.Tensor:
        lengths_B = np.array([len(span.tokens) for span in spans])
        starts_B = np.array([span.start for span in spans])
        longest = int(lengths_B.max())
        ids_BN = np.zeros((len(spans), longest), np.int64)
        for row, span in enumerate(spans):
            ids_BN[row, longest - len(span.tokens) :] = span.tokens
        padding_B = longest - lengths_B
        columns_N = np.arange(longest)
        positions_BN = np.maximum(starts_B[:, None] + columns_N - padding_B[:, None], 0)
        valid_BN = columns_N >= padding_B[:, None] if padding_B.any() else None
        length = int((starts_B + lengths_B).max())
        self.cache.reserve(max(span.slot for span in spans) + 1, length)
        positions = torch.as_tensor(positions_BN, device=self.device)
        valid = None if valid_BN is None else torch.as_tensor(valid_BN, device=self.device)
        slots = torch.tensor([span.slot for span in spans], device=self.device)
        resumed = bool(starts_B.any())
        self.cache.begin_prefill(slots, positions, valid, length if resumed else None)
        mask = self._prefill_mask(positions, valid, length if resumed else None)
        return self._forward(torch.as_tensor(ids_BN, device=self.device), positions, mask)

    def _prefill_mask(
        self, positions_BN: torch.Tensor, valid_BN: torch.Tensor | None, length: int | None
    ) -> torch.Tensor | None:
        """Causal over the slots' first `length` keys, or over the pass's own without padding."""
        if length is not None:
            keys_T = torch.arange(length, device=self.device)
            return self._additive((keys_T <= positions_BN[..., None])[:, None])
        if valid_BN is None:
            return None
        columns_N = torch.arange(positions_BN.shape[1], device=self.device)
        causal_NN = columns_N <= columns_N[:, None]
        itself_NN = columns_N == columns_N[:, None]  # padding sees itself, or it would be NaN
        return self._additive(((causal_NN & valid_BN[:, None]) | itself_NN)[:, None])

    def _additive(self, visible: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(visible.shape, dtype=self.cache.shape.dtype, device=self.device)
        return mask.masked_fill_(~visible, float("-inf"))

    def _forward(
        self, ids_BN: torch.Tensor, positions_BN: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        output = self.model(
            input_ids=ids_BN,
            position_ids=positions_BN,
            attention_mask=mask,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return cast("torch.Tensor", output.logits)[:, -1]

    def _check(self, path: str, plain_NV: torch.Tensor) -> None:
        """Raise ModelError unless prefill, resumed prefill and decode agree with `plain_NV`."""
        self.model.set_attn_implementation(ATTENTION)  # pyright: ignore[reportUnknownMemberType]  # decorated in transformers
        tokens = np.array(_PROBE, np.int32)
        with torch.inference_mode():
            rows = [
                (2, next(self.prefill([Span(0, 0, tokens[:3])]))[1]),
                (4, next(self.prefill([Span(0, 3, tokens[3:5])]))[1]),
                (5, self.decode(tokens[5:], np.array([5]))),
            ]
        scale = float(plain_NV.abs().max()) + 1e-6
        tolerance = 1e-3 if self.cache.shape.dtype == torch.float32 else 0.1
        for position, logits in rows:
            worst = float((logits[0].float() - plain_NV[position]).abs().max()) / scale
            if not worst < tolerance:
                raise ModelError(
                    f"model {path} computes other logits over the slot cache than in a plain "
                    f"forward pass (off by {worst:.1%})",
                    hint="its attention needs more than a causal mask: use another model or engine",
                )


def _check_layers(path: str, config: Any) -> None:
    layers = DynamicCache(config=config).layers
    other = sorted({type(layer).__name__ for layer in layers if type(layer) is not DynamicLayer})
    if other or not layers:
        raise ModelError(
            f"model {path} has layers without full attention ({', '.join(other) or 'unknown'})",
            hint="the transformers engine runs full-attention decoders such as Qwen3 or Llama; "
            "choose such a model",
        )


@torch.inference_mode()
def _probe(path: str, model: PreTrainedModel) -> tuple[torch.Tensor, CacheShape]:
    """Run a plain forward pass; return its logits [N, V] and the shape of its keys and values."""
    ids = torch.tensor([_PROBE], device=model.device)
    output = model(input_ids=ids, past_key_values=DynamicCache(), use_cache=True)
    layers = cast("list[DynamicLayer]", output.past_key_values.layers)
    states = [cast("torch.Tensor", s) for layer in layers for s in (layer.keys, layer.values)]
    if len({tuple(state.shape) for state in states}) != 1:
        raise ModelError(
            f"model {path} has keys and values of different shapes",
            hint="use another model or engine",
        )
    _, kv_heads, _, head_size = states[0].shape
    shape = CacheShape(len(layers), kv_heads, head_size, states[0].dtype, states[0].device)
    return cast("torch.Tensor", output.logits)[0].float(), shape


def _batches(spans: Sequence[Span]) -> Iterator[list[int]]:
    """Group spans, resumed ones apart, so that padding at most doubles the work of a pass."""
    order = sorted(range(len(spans)), key=lambda i: (spans[i].start > 0, len(spans[i].tokens)))
    batch: list[int] = []
    for index in order:
        length = len(spans[index].tokens)
        if batch and (
            (len(batch) + 1) * length > _PREFILL_TOKENS
            or length > 2 * len(spans[batch[0]].tokens) + 16
            or (spans[index].start > 0) != (spans[batch[0]].start > 0)
        ):
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch
