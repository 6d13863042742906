"""The KV cache of the running rows: one slot per row, a tensor per layer, grown in blocks.

Slots are equally long. If memory is bounded (`max_cells`, on a GPU), so is the number of slots
times their length: rows are admitted by the length that they may reach, and unused slots are
replaced by longer ones. Layers grow one after the other, so that the old and new memory of only one
layer coexist.

`begin_*` sets where the next forward pass writes and which keys its queries see; the model then
calls `update` once per layer. A slot's first tokens are valid up to a length that the caller
tracks; masks hide the rest.

Attention over the slots is registered with transformers under the name ATTENTION. Query heads that
share a key-value head become queries of that head, so that keys and values are never repeated in
memory. A mask is additive, [B, 1, N, T]; without one, N > 1 is causal and N = 1 sees every key.

Between two turns the caches of conversations are kept while there is room, the newest ones. So are
those of recent prompts, since others begin like them: those of a group and of one system prompt.

Shape letters: L2 layers times two (keys and values), S slots, K key-value heads, H query heads, G =
H / K, T capacity in tokens, D head size, B rows of this forward pass, N tokens per row of it.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, Cache

from ....schemas.wire.array import IntVector
from ....schemas.wire.errors import ModelError

PREFIX_CACHE_BYTES = 1 << 30
"""Memory for the caches of conversations between two turns."""
_SLOT_BLOCK = 16
_TOKEN_BLOCK = 64


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The part of the cache's shape that the model fixes."""

    num_layers: int
    kv_heads: int
    head_size: int
    dtype: torch.dtype
    device: torch.device

    @property
    def token_bytes(self) -> int:
        """Keys and values of one token."""
        return 2 * self.num_layers * self.kv_heads * self.head_size * self.dtype.itemsize


@dataclass(slots=True)
class _Pass:
    """One forward pass: flat write positions, source tokens, and which slots are read."""

    write_index: torch.Tensor | None
    """None: nothing is stored."""
    source_index: torch.Tensor | None
    read_rows: torch.Tensor | int | None
    """None: the pass's own keys; a number: the first slots; else these slots."""
    read_length: int


class SlotCache(Cache):
    """Keys and values by slot, for the continuous batching of full-attention models."""

    def __init__(
        self, shape: CacheShape, max_slots: int, max_tokens: int, max_cells: int | None = None
    ) -> None:
        """`max_cells` bounds the tokens of all slots; None: memory is not bounded."""
        super().__init__(layers=[])
        self.shape = shape
        self.max_slots = max_slots
        self.max_tokens = max_tokens
        self.max_cells = max_cells
        self._num_rows = self._longest = 0
        self._store = self._allocate(0, 0)
        self._pass: _Pass | None = None

    @property
    def num_bytes(self) -> int:
        """Memory of the slots."""
        return sum(states_SKTD.nbytes for states_SKTD in self._store)

    def admits(self, num_rows: int, longest: int) -> bool:
        """Whether rows of this length fit into memory; one always does."""
        return self.max_cells is None or num_rows <= 1 or num_rows * longest <= self.max_cells

    def note_rows(self, num_rows: int, longest: int) -> None:
        """Keep the first slots up to a length when others grow: rows use them."""
        self._num_rows, self._longest = num_rows, longest

    def reserve(self, num_slots: int, num_tokens: int) -> None:
        """Grow to at least this many slots and tokens; stored keys and values are kept."""
        slots, _, tokens, _ = self._store[0].shape
        if num_slots <= slots and num_tokens <= tokens:
            return
        if num_slots > slots:
            slots = min(self.max_slots, max(_round_up(num_slots, _SLOT_BLOCK), 2 * slots))
        if num_tokens > tokens:
            longer = max(num_tokens, tokens + tokens // 2)
            tokens = min(self.max_tokens, _round_up(longer, _TOKEN_BLOCK))
        if self.max_cells is not None:
            used = max(num_slots, self._num_rows)
            tokens = min(tokens, max(num_tokens, self._longest, self.max_cells // used))
            slots = max(used, min(slots, self.max_cells // tokens))
        for layer in range(len(self._store)):
            old = self._store[layer]
            grown = self._allocate_layer(slots, tokens)
            num_old, length = min(slots, old.shape[0]), min(tokens, old.shape[2])
            grown[:num_old, :, :length] = old[:num_old, :, :length]
            self._store[layer] = grown

    def free(self) -> None:
        """Forget all slots, and free their memory."""
        self._store = self._allocate(0, 0)

    def begin_decode(
        self, positions_B: torch.Tensor, length: int, slots_B: torch.Tensor | None = None
    ) -> None:
        """Prepare a pass that feeds one token to each of B slots; queries see `length` keys.

        They are the first B, or `slots_B`, whose keys and values are copied.
        """
        num = positions_B.shape[0]
        rows_B = torch.arange(num, device=positions_B.device) if slots_B is None else slots_B
        read = num if slots_B is None else slots_B
        self._pass = _Pass(self._flat(rows_B, positions_B), None, read, length)

    def begin_prefill(
        self,
        rows_B: torch.Tensor,
        positions_BN: torch.Tensor,
        valid_BN: torch.Tensor | None,
        read_length: int | None,
    ) -> None:
        """Prepare a pass that feeds N tokens to each of these slots; padding is not written.

        Queries see the slots' first `read_length` keys; None: the pass's own keys.
        """
        slots_BN = rows_B[:, None].expand_as(positions_BN)
        if valid_BN is None:
            write, source = self._flat(slots_BN.flatten(), positions_BN.flatten()), None
        else:
            source = valid_BN.flatten().nonzero()[:, 0]
            write = self._flat(slots_BN[valid_BN], positions_BN[valid_BN])
        read = None if read_length is None else rows_B
        self._pass = _Pass(write, source, read, read_length or 0)

    def begin_scoring(self) -> None:
        """Prepare a pass that sees only its own keys, which are not stored."""
        self._pass = _Pass(None, None, None, 0)

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write this layer's new keys and values; return those that the queries see."""
        assert self._pass is not None, "begin_decode or begin_prefill comes first"
        return (
            self._exchange(2 * layer_idx, key_states, self._pass),
            self._exchange(2 * layer_idx + 1, value_states, self._pass),
        )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: the model gets explicit positions, so it needs no length."""
        return 0

    def copy(self, source: torch.Tensor, target: torch.Tensor, length: int) -> None:
        """Copy the first tokens of some slots to other slots."""
        for states_SKTD in self._store:
            states_SKTD[target, :, :length] = states_SKTD[source, :, :length]

    def copy_token(
        self, source: NDArray[np.int64], target: NDArray[np.int64], position: NDArray[np.int64]
    ) -> None:
        """Copy the token at a position of each source slot to that of its target slot."""
        sources, targets, positions = (
            torch.as_tensor(index, device=self.shape.device) for index in (source, target, position)
        )
        for states_SKTD in self._store:
            states_SKTD[targets, :, positions] = states_SKTD[sources, :, positions]

    def spread(self, slot: int, last: int, length: int) -> None:
        """Copy a slot's first tokens to the slots after it, up to and including `last`."""
        for states_SKTD in self._store:
            states_SKTD[slot + 1 : last + 1, :, :length] = states_SKTD[slot : slot + 1, :, :length]

    def scrub(self, slots: list[int]) -> None:
        """Zero slots with NaN, which would spoil the next rows there even if masked."""
        for states_SKTD in self._store:
            states_SKTD[slots] = 0

    def read(self, slot: int, length: int) -> torch.Tensor:
        """Return a copy of a slot's first tokens, [L2, K, length, D]."""
        return torch.stack([states_SKTD[slot, :, :length] for states_SKTD in self._store])

    def put(self, slot: int, states: torch.Tensor) -> None:
        """Write the result of `read` to a slot's first tokens."""
        for states_SKTD, own_KTD in zip(self._store, states, strict=True):
            states_SKTD[slot, :, : states.shape[2]] = own_KTD

    def _exchange(self, index: int, states_BKND: torch.Tensor, now: _Pass) -> torch.Tensor:
        if now.write_index is None:
            return states_BKND
        store_SKTD = self._store[index]
        tokens_XK = states_BKND.transpose(1, 2).flatten(0, 1)
        if now.source_index is not None:
            tokens_XK = tokens_XK[now.source_index]
        head_size = self.shape.head_size
        store_SKTD.view(-1, head_size).index_copy_(
            0, now.write_index, tokens_XK.reshape(-1, head_size)
        )
        if now.read_rows is None:
            return states_BKND
        if isinstance(now.read_rows, int):
            return store_SKTD[: now.read_rows, :, : now.read_length]
        return store_SKTD[now.read_rows, :, : now.read_length]

    def _flat(self, slots_X: torch.Tensor, positions_X: torch.Tensor) -> torch.Tensor:
        """Return the row of each (token, head) in the store, viewed as a list of head vectors."""
        _, kv_heads, capacity, _ = self._store[0].shape
        heads_K = torch.arange(kv_heads, device=slots_X.device)
        head_rows_XK = (slots_X[:, None] * kv_heads + heads_K) * capacity
        return (head_rows_XK + positions_X[:, None]).flatten()

    def _allocate(self, slots: int, tokens: int) -> list[torch.Tensor]:
        return [self._allocate_layer(slots, tokens) for _ in range(2 * self.shape.num_layers)]

    def _allocate_layer(self, slots: int, tokens: int) -> torch.Tensor:
        shape = self.shape
        size = (slots, shape.kv_heads, tokens, shape.head_size)
        # Zeros, not garbage: a masked key has weight 0, and 0 times NaN would be NaN.
        return torch.zeros(size, dtype=shape.dtype, device=shape.device)


_LEFT_SHARE = 0.85
"""Share of the free memory for the cache; the rest is for passes and fragmentation."""


def cache_cells(free_bytes: int, reserved_bytes: int, token_bytes: int) -> int:
    """Return the number of tokens of all slots that fit into the free memory.

    `reserved_bytes` are for the weights of the next version and for cached conversations.
    """
    return max(1, int(_LEFT_SHARE * (free_bytes - reserved_bytes)) // token_bytes)


def _round_up(number: int, block: int) -> int:
    return -(-number // block) * block


# -- attention -------------------------------------------------------------------------------------

ATTENTION = "tinkermq_slots"
_LEFT_OUT = {"softcap": "capped scores", "s_aux": "sinks"}
"""Arguments of transformers' models to an attention that are not used here."""


def slot_attention(
    module: torch.nn.Module,
    query_BHND: torch.Tensor,
    key_BKTD: torch.Tensor,
    value_BKTD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend; return [B, N, H, D] and no attention weights.

    Raises ModelError for a model whose scores are more than scaled products, which the probes at
    the start may not show.
    """
    for name, what in _LEFT_OUT.items():
        if options.get(name) is not None:
            raise ModelError(
                "the model computes other logits over the slot cache than in a plain forward pass: "
                f"its attention has {what}, which are left out there",
                hint="use a model without, such as Qwen3 or Llama, or generator.engine=vllm",
            )
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
    # In float32 on a CPU two plain products are faster than the fused kernel for short queries.
    query_XGD = query_BKGD.reshape(-1, shape[2], head_size)
    key_XDT = key_BKTD.flatten(0, 1).transpose(1, 2)
    if mask_B11T is None:
        scores_XGT = torch.bmm(query_XGD * scale, key_XDT)
    else:
        mask_X1T = mask_B11T[:, 0].expand(-1, kv_heads, -1).reshape(-1, 1, length)
        scores_XGT = torch.baddbmm(mask_X1T, query_XGD, key_XDT, alpha=scale)
    return torch.bmm(scores_XGT.softmax(-1), value_BKTD.flatten(0, 1)).view(query_BH1D.shape)


AttentionInterface.register(ATTENTION, slot_attention)  # pyright: ignore[reportUnknownMemberType]  # untyped in transformers


# -- caches of conversations and prompts -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """The tokens of a conversation or prompt, with their keys and values."""

    tokens: IntVector
    states: torch.Tensor
    images: bytes | None = None
    """Digest of the images, if there are any."""
    serial: int = 0
    """Serial of the adapter's weights; 0: none."""


LEAST_SHARED = 16
"""Length of a common prefix from which prompts share a cache."""
_MAX_PROMPTS = 16


class PromptCache:
    """The caches of recent prompts, at most `max_tokens` tokens in all."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._prompts: list[CachedPrefix] = []
        """The most recently used prompt is the last."""

    @property
    def num_bytes(self) -> int:
        """Memory of all keys and values."""
        return sum(prompt.states.nbytes for prompt in self._prompts)

    def admits(self, prompt: IntVector) -> bool:
        """Whether a prompt is long enough to be shared, and fits."""
        return LEAST_SHARED < len(prompt) <= self._max_tokens

    def keep(self, prompt: CachedPrefix) -> None:
        """Keep an admitted prompt; the least recently used ones are dropped."""
        self._prompts.append(prompt)
        while (
            len(self._prompts) > _MAX_PROMPTS
            or sum(len(cached.tokens) for cached in self._prompts) > self._max_tokens
        ):
            del self._prompts[0]

    def find(self, prompt: IntVector, serial: int) -> CachedPrefix | None:
        """Return the longest cached prefix of a prompt, None if shorter than `LEAST_SHARED`.

        At least one token of the prompt is not cached.
        """
        candidates = [cached for cached in self._prompts if cached.serial == serial]
        if not candidates:
            return None
        shared, best = max(
            ((num_shared(prompt[:-1], cached.tokens), cached) for cached in candidates),
            key=lambda pair: pair[0],
        )
        if shared < LEAST_SHARED:
            return None
        self._prompts = [cached for cached in self._prompts if cached is not best] + [best]
        return CachedPrefix(best.tokens[:shared], best.states[:, :, :shared], None, serial)

    def clear(self) -> None:
        """Forget all."""
        self._prompts.clear()


def num_shared(left: IntVector, right: IntVector) -> int:
    """Return the length of the common prefix of two prompts."""
    length = min(len(left), len(right))
    differs = left[:length] != right[:length]
    return int(differs.argmax()) if differs.any() else length


class PrefixCache:
    """The caches of conversations, at most `max_tokens` tokens in all.

    A conversation that is not cached is computed again.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._prefixes: OrderedDict[str, CachedPrefix] = OrderedDict()
        self._num_tokens = 0
        self.num_bytes = 0
        """Memory of all keys and values."""

    def __len__(self) -> int:
        return len(self._prefixes)

    def keep(self, conversation: str, prefix: CachedPrefix) -> None:
        """Keep a cache; the oldest ones are dropped."""
        self.drop(conversation)
        if len(prefix.tokens) > self._max_tokens:
            return
        self._prefixes[conversation] = prefix
        self._num_tokens += len(prefix.tokens)
        self.num_bytes += prefix.states.nbytes
        while self._num_tokens > self._max_tokens:
            self.drop(next(iter(self._prefixes)))

    def resume(
        self, conversation: str, prompt: IntVector, images: bytes | None = None, serial: int = 0
    ) -> CachedPrefix | None:
        """Remove a conversation's cache; return it if `prompt` continues it.

        At least one token of the prompt is not cached.
        """
        prefix = self.drop(conversation)
        if prefix is None or (prefix.images, prefix.serial) != (images, serial):
            return None
        cached = len(prefix.tokens)
        if cached < len(prompt) and np.array_equal(prompt[:cached], prefix.tokens):
            return prefix
        return None

    def drop(self, conversation: str) -> CachedPrefix | None:
        """Forget a conversation; return its cache if there is one."""
        prefix = self._prefixes.pop(conversation, None)
        if prefix is not None:
            self._num_tokens -= len(prefix.tokens)
            self.num_bytes -= prefix.states.nbytes
        return prefix

    def clear(self) -> None:
        """Forget all."""
        self._prefixes.clear()
        self._num_tokens = self.num_bytes = 0
