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
Layers that see only a window keep the keys and values of all tokens; their mask is narrower.

A recurrent layer (linear attention, a state space, a convolution) has a state of fixed size per
slot in place of keys and values. It is that of the slot's last token: a prefix of the slot has
none, so such models share and continue only what ends where the slot ended. Padding would change
the state, so the rows of a pass are equally long.

Between two turns the caches of conversations are kept while there is room, the newest ones. So are
those of recent prompts, since others begin like them: those of a group and of one system prompt.

Shape letters: S slots, K key-value heads, H query heads, G = H / K, T capacity in tokens, D size of
a key or value, E size of a value, B rows of this forward pass, N tokens per row of it.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, Cache
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from ....schemas.wire.array import IntVector
from ...policy.layers import attend_for_transformers
from ..engine import num_equal

PREFIX_CACHE_BYTES = 1 << 30
"""Memory for the caches of conversations between two turns."""
_SLOT_BLOCK = 16
_TOKEN_BLOCK = 64


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The part of the cache's shape that the model fixes."""

    layers: tuple[tuple[tuple[int, int], ...], ...]
    """Of each layer the heads and sizes of its keys and of its values; empty: it has none."""
    dtype: torch.dtype
    device: torch.device
    slot_bytes: int = 0
    """Recurrent states of one slot."""

    @property
    def token_bytes(self) -> int:
        """Keys and values of one token."""
        sizes = [heads * size for layer in self.layers for heads, size in layer]
        return sum(sizes) * self.dtype.itemsize

    def num_bytes(self, num_tokens: int) -> int:
        """Return the memory of one slot with this many tokens."""
        return self.slot_bytes + num_tokens * self.token_bytes


@dataclass(frozen=True, slots=True)
class SlotStates:
    """A copy of what a slot has of its first tokens."""

    parts: tuple[torch.Tensor, ...]
    """Keys and values by layer, each [K, T, D]."""
    recurrent: tuple[torch.Tensor, ...] = ()
    """Recurrent states after the last of these tokens."""

    @property
    def nbytes(self) -> int:
        """Memory of the copy."""
        return sum(part.nbytes for part in (*self.parts, *self.recurrent))

    def first(self, length: int) -> "SlotStates":
        """Return what belongs to the first tokens; only without recurrent states."""
        assert not self.recurrent
        return SlotStates(tuple(part[:, :length] for part in self.parts))


@dataclass(slots=True)
class _Pass:
    """One forward pass: where it writes, source tokens, and which slots are read."""

    slots: torch.Tensor | None
    """Slots of the written tokens; None: nothing is stored."""
    positions: torch.Tensor | None
    source_index: torch.Tensor | None
    read_rows: torch.Tensor | int | None
    """None: the pass's own keys; a number: the first slots; else these slots."""
    read_length: int
    rows: torch.Tensor | None
    """Slot of each row."""
    continues: bool
    """Whether recurrent layers begin with the state of their slot."""
    indices: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])
    """Written rows of a store by its number of heads."""


class _RecurrentLayer(LinearAttentionCacheLayerMixin):
    """A layer's recurrent states, as transformers' models read and write them.

    A model may have several states of a kind in one layer; `state_idx` is their number.
    """

    def __init__(self, cache: "SlotCache") -> None:
        cast(Any, super()).__init__()
        self._cache = cache
        self.record_past = (
            True  # so that models write through the two methods below, never in place
        )
        self.stored: dict[tuple[str, int], torch.Tensor] = {}
        """States by kind and number, [S, ...]; made when they are first written."""
        self._read: dict[tuple[str, int], tuple[torch.Tensor, torch.Tensor]] = {}
        """Rows and states that this pass has read and not written; Mamba changes them in place."""
        self.conv_states = cast(Any, _StatesOfPass(self, "conv"))
        self.recurrent_states = cast(Any, _StatesOfPass(self, "recurrent"))

    def lazy_initialization(self, *_args: object, **_options: object) -> None:
        """Do nothing: `write` makes what is missing."""

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_options: object,
    ) -> torch.Tensor:
        """Store the last inputs [B, C, N] of a convolution; return those with what precedes them.

        At the beginning of a sequence zeros precede them.
        """
        key = ("conv", state_idx)
        if self._cache.continues:
            inputs = torch.cat([self.read(key).to(conv_states.dtype), conv_states], -1)
            size = self.stored[key].shape[-1]
        else:
            size = conv_kernel_size or conv_states.shape[-1]
            inputs = nn.functional.pad(conv_states, (max(0, size - conv_states.shape[-1]), 0))
        self.write(key, inputs[..., -size:])
        return inputs

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, state_idx: int = 0, **_options: object
    ) -> torch.Tensor:
        """Store the state [B, ...] after the last token of each row."""
        self.write(("recurrent", state_idx), recurrent_states)
        return recurrent_states

    def read(self, key: tuple[str, int]) -> torch.Tensor:
        """Return the states of this pass's rows."""
        rows = self._cache.rows
        states = self.stored[key][rows]
        if rows is not None:
            self._read[key] = rows, states
        return states

    def write(self, key: tuple[str, int], states: torch.Tensor) -> None:
        """Write the states of this pass's rows."""
        rows = self._cache.rows
        if rows is None:
            return
        self._read.pop(key, None)
        if key not in self.stored:
            size = (self._cache.num_slots, *states.shape[1:])
            self.stored[key] = torch.zeros(size, dtype=states.dtype, device=states.device)
        self.stored[key][rows] = states.to(self.stored[key].dtype)

    def end_pass(self) -> None:
        """Store the states that the pass has changed in place."""
        for key, (rows, states) in self._read.items():
            self.stored[key][rows] = states
        self._read.clear()

    def resize(self, num_slots: int) -> None:
        """Keep the states of this many slots."""
        for key, old in self.stored.items():
            self.stored[key] = old.new_zeros((num_slots, *old.shape[1:]))
            both = min(num_slots, len(old))
            self.stored[key][:both] = old[:both]


class _StatesOfPass(Mapping[int, torch.Tensor]):
    """The states of one kind of a pass's rows, by number."""

    def __init__(self, layer: _RecurrentLayer, kind: str) -> None:
        self._layer, self._kind = layer, kind

    def __getitem__(self, number: int) -> torch.Tensor:
        return self._layer.read((self._kind, number))

    def __iter__(self) -> Iterator[int]:
        return (number for kind, number in self._layer.stored if kind == self._kind)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class SlotCache(Cache):
    """Keys, values and recurrent states by slot, for continuous batching."""

    def __init__(
        self, shape: CacheShape, max_slots: int, max_tokens: int, max_cells: int | None = None
    ) -> None:
        """`max_cells` bounds the tokens of all slots; None: memory is not bounded."""
        super().__init__(layers=[])
        self.layers = cast(Any, [_RecurrentLayer(self) for _ in shape.layers])
        self.shape = shape
        self.max_slots = max_slots
        self.max_tokens = max_tokens
        self.max_cells = max_cells
        self.num_slots = self.num_tokens = 0
        self._num_rows = self._longest = 0
        self._places = _places(shape)
        self._store = self._allocate(0, 0)
        self._pass: _Pass | None = None

    @property
    def is_recurrent(self) -> bool:
        """Whether slots have states that only their last token fits."""
        return self.shape.slot_bytes > 0

    @property
    def num_bytes(self) -> int:
        """Memory of the slots."""
        return sum(states.nbytes for states in self._all_states())

    @property
    def rows(self) -> torch.Tensor | None:
        """Slots of the rows of this pass; None: nothing is stored."""
        return None if self._pass is None else self._pass.rows

    @property
    def continues(self) -> bool:
        """Whether the rows of this pass continue what their slots have."""
        return self._pass is not None and self._pass.continues

    @property
    def used_share(self) -> float:
        """Share of `max_cells` that rows use; 0 if memory is not bounded."""
        return self._num_rows * self._longest / self.max_cells if self.max_cells else 0.0

    def admits(self, num_rows: int, longest: int) -> bool:
        """Whether rows of this length fit into memory; one always does."""
        return self.max_cells is None or num_rows <= 1 or num_rows * longest <= self.max_cells

    def note_rows(self, num_rows: int, longest: int) -> None:
        """Keep the first slots up to a length when others grow: rows use them."""
        self._num_rows, self._longest = num_rows, longest

    def reserve(self, num_slots: int, num_tokens: int) -> None:
        """Grow to at least this many slots and tokens; what slots have is kept."""
        slots, tokens = self.num_slots, self.num_tokens
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
        for index, old in enumerate(self._store):
            grown = self._allocate_part(slots, tokens, old.shape[1], old.shape[3])
            num_old, length = min(slots, old.shape[0]), min(tokens, old.shape[2])
            grown[:num_old, :, :length] = old[:num_old, :, :length]
            self._store[index] = grown
        if slots != self.num_slots:
            for layer in self._recurrent():
                layer.resize(slots)
        self.num_slots, self.num_tokens = slots, tokens

    def free(self) -> None:
        """Forget all slots, and free their memory."""
        self.num_slots = self.num_tokens = 0
        self._store = self._allocate(0, 0)
        for layer in self._recurrent():
            layer.stored.clear()

    def begin_decode(
        self, positions_B: torch.Tensor, length: int, slots_B: torch.Tensor | None = None
    ) -> None:
        """Prepare a pass that feeds one token to each of B slots; queries see `length` keys.

        They are the first B, or `slots_B`, whose keys and values are copied.
        """
        num = positions_B.shape[0]
        rows_B = torch.arange(num, device=positions_B.device) if slots_B is None else slots_B
        read = num if slots_B is None else slots_B
        self._pass = _Pass(rows_B, positions_B, None, read, length, rows_B, continues=True)

    def begin_prefill(
        self,
        rows_B: torch.Tensor,
        positions_BN: torch.Tensor,
        valid_BN: torch.Tensor | None,
        read_length: int | None,
    ) -> None:
        """Prepare a pass that feeds N tokens to each of these slots; padding is not written.

        Queries see the slots' first `read_length` keys; None: the pass's own keys, and recurrent
        states begin anew.
        """
        slots_BN = rows_B[:, None].expand_as(positions_BN)
        slots, positions, source = slots_BN.flatten(), positions_BN.flatten(), None
        if valid_BN is not None:
            source = valid_BN.flatten().nonzero()[:, 0]
            slots, positions = slots_BN[valid_BN], positions_BN[valid_BN]
        continues = read_length is not None
        read = rows_B if continues else None
        self._pass = _Pass(slots, positions, source, read, read_length or 0, rows_B, continues)

    def begin_scoring(self) -> None:
        """Prepare a pass that sees only its own tokens, and stores nothing."""
        self._pass = _Pass(None, None, None, None, 0, None, continues=False)

    def end_pass(self) -> None:
        """Store what the pass has changed in place."""
        for layer in self._recurrent():
            layer.end_pass()

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
        place = self._places[layer_idx]
        return (
            self._exchange(place, key_states, self._pass),
            self._exchange(place + 1, value_states, self._pass),
        )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: the model gets explicit positions, so it needs no length."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the pass's own length: the model gets explicit masks."""
        return query_length, 0

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        """Return whether recurrent layers begin with the state of their slot."""
        return self.continues

    def copy(self, source: torch.Tensor, target: torch.Tensor, length: int) -> None:
        """Copy the first tokens of some slots to other slots."""
        for states_SKTD in self._store:
            states_SKTD[target, :, :length] = states_SKTD[source, :, :length]
        for states in self._recurrent_states():
            states[target] = states[source]

    def copy_token(
        self, source: NDArray[np.int64], target: NDArray[np.int64], position: NDArray[np.int64]
    ) -> None:
        """Copy the token at a position of each source slot to that of its target slot.

        It is the last token of both.
        """
        sources, targets, positions = (
            torch.as_tensor(index, device=self.shape.device) for index in (source, target, position)
        )
        for states_SKTD in self._store:
            states_SKTD[targets, :, positions] = states_SKTD[sources, :, positions]
        for states in self._recurrent_states():
            states[targets] = states[sources]

    def spread(self, slot: int, last: int, length: int) -> None:
        """Copy a slot's first tokens to the slots after it, up to and including `last`."""
        for states_SKTD in self._store:
            states_SKTD[slot + 1 : last + 1, :, :length] = states_SKTD[slot : slot + 1, :, :length]
        for states in self._recurrent_states():
            states[slot + 1 : last + 1] = states[slot]

    def scrub(self, slots: list[int]) -> None:
        """Zero slots with NaN, which would spoil the next rows there even if masked."""
        for states in self._all_states():
            states[slots] = 0

    def read(self, slot: int, length: int) -> SlotStates:
        """Return a copy of a slot's first tokens; recurrent states are those of its last token."""
        return SlotStates(
            tuple(states_SKTD[slot, :, :length].clone() for states_SKTD in self._store),
            tuple(states[slot].clone() for states in self._recurrent_states()),
        )

    def put(self, slot: int, states: SlotStates) -> None:
        """Write the result of `read` to a slot's first tokens."""
        for states_SKTD, own_KTD in zip(self._store, states.parts, strict=True):
            states_SKTD[slot, :, : own_KTD.shape[1]] = own_KTD
        for stored, own in zip(self._recurrent_states(), states.recurrent, strict=True):
            stored[slot] = own

    def _exchange(self, index: int, states_BKND: torch.Tensor, now: _Pass) -> torch.Tensor:
        if now.slots is None:
            return states_BKND
        store_SKTD = self._store[index]
        tokens_XK = states_BKND.transpose(1, 2).flatten(0, 1)
        if now.source_index is not None:
            tokens_XK = tokens_XK[now.source_index]
        kv_heads, size = store_SKTD.shape[1], store_SKTD.shape[3]
        if kv_heads not in now.indices:
            now.indices[kv_heads] = self._flat(now, kv_heads)
        store_SKTD.view(-1, size).index_copy_(0, now.indices[kv_heads], tokens_XK.reshape(-1, size))
        if now.read_rows is None:
            return states_BKND
        if isinstance(now.read_rows, int):
            return store_SKTD[: now.read_rows, :, : now.read_length]
        return store_SKTD[now.read_rows, :, : now.read_length]

    def _flat(self, now: _Pass, kv_heads: int) -> torch.Tensor:
        """Return the row of each (token, head) in a store, viewed as a list of head vectors."""
        assert now.slots is not None
        assert now.positions is not None
        heads_K = torch.arange(kv_heads, device=now.slots.device)
        head_rows_XK = (now.slots[:, None] * kv_heads + heads_K) * self.num_tokens
        return (head_rows_XK + now.positions[:, None]).flatten()

    def _recurrent(self) -> list[_RecurrentLayer]:
        return cast("list[_RecurrentLayer]", self.layers)

    def _recurrent_states(self) -> list[torch.Tensor]:
        return [states for layer in self._recurrent() for states in layer.stored.values()]

    def _all_states(self) -> list[torch.Tensor]:
        return [*self._store, *self._recurrent_states()]

    def _allocate(self, slots: int, tokens: int) -> list[torch.Tensor]:
        parts = [part for layer in self.shape.layers for part in layer]
        return [self._allocate_part(slots, tokens, *part) for part in parts]

    def _allocate_part(self, slots: int, tokens: int, heads: int, size: int) -> torch.Tensor:
        shape = self.shape
        # Zeros, not garbage: a masked key has weight 0, and 0 times NaN would be NaN.
        return torch.zeros((slots, heads, tokens, size), dtype=shape.dtype, device=shape.device)


def _places(shape: CacheShape) -> list[int]:
    """Return the index of each layer's keys among all keys and values."""
    return [sum(map(len, shape.layers[:layer])) for layer in range(len(shape.layers))]


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


def slot_attention(
    module: torch.nn.Module,
    query_BHND: torch.Tensor,
    key_BKTD: torch.Tensor,
    value_BKTE: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as `attend_for_transformers`, one query of a row by a kernel of its own."""
    parts = query_BHND, key_BKTD, value_BKTE, attention_mask
    has_more = options.get("softcap") or options.get("s_aux") is not None
    if query_BHND.shape[2] > 1 or has_more:
        return attend_for_transformers(module, *parts, scaling, **options)
    scale = query_BHND.shape[-1] ** -0.5 if scaling is None else scaling
    return _attend_one(*parts, scale).transpose(1, 2).contiguous(), None


def _attend_one(
    query_BH1D: torch.Tensor,
    key_BKTD: torch.Tensor,
    value_BKTE: torch.Tensor,
    mask_B11T: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    num_rows, num_heads, _, head_size = query_BH1D.shape
    kv_heads, length = key_BKTD.shape[1:3]
    shape = (num_rows, kv_heads, num_heads // kv_heads, head_size)
    out_shape = (num_rows, num_heads, 1, value_BKTE.shape[-1])
    query_BKGD = query_BH1D.reshape(shape)
    if query_BH1D.dtype != torch.float32:
        mask = None if mask_B11T is None else mask_B11T.expand(-1, 1, shape[2], -1)
        out_BKGE = scaled_dot_product_attention(
            query_BKGD, key_BKTD, value_BKTE, attn_mask=mask, scale=scale
        )
        return out_BKGE.reshape(out_shape)
    # In float32 on a CPU two plain products are faster than the fused kernel for short queries.
    query_XGD = query_BKGD.reshape(-1, shape[2], head_size)
    key_XDT = key_BKTD.flatten(0, 1).transpose(1, 2)
    if mask_B11T is None:
        scores_XGT = torch.bmm(query_XGD * scale, key_XDT)
    else:
        mask_X1T = mask_B11T[:, 0].expand(-1, kv_heads, -1).reshape(-1, 1, length)
        scores_XGT = torch.baddbmm(mask_X1T, query_XGD, key_XDT, alpha=scale)
    return torch.bmm(scores_XGT.softmax(-1), value_BKTE.flatten(0, 1)).view(out_shape)


AttentionInterface.register(ATTENTION, slot_attention)  # pyright: ignore[reportUnknownMemberType]  # untyped in transformers


# -- caches of conversations and prompts -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """The tokens of a conversation or prompt, with their keys and values."""

    tokens: IntVector
    states: SlotStates
    images: bytes | None = None
    """Digest of the images, if there are any."""
    serial: int = 0
    """Serial of the adapter's weights; 0: none."""


LEAST_SHARED = 16
"""Length of a common prefix from which prompts share a cache."""
_MAX_PROMPTS = 16


class PromptCache:
    """The caches of recent prompts, at most `max_bytes` in all."""

    def __init__(self, shape: CacheShape, max_bytes: int) -> None:
        self._shape = shape
        self._max_bytes = max_bytes
        self._prompts: list[CachedPrefix] = []
        """The most recently used prompt is the last."""

    @property
    def num_bytes(self) -> int:
        """Memory of all of them."""
        return sum(prompt.states.nbytes for prompt in self._prompts)

    def admits(self, prompt: IntVector) -> bool:
        """Whether a prompt is long enough to be shared, and fits."""
        return len(prompt) > LEAST_SHARED and self._shape.num_bytes(len(prompt)) <= self._max_bytes

    def keep(self, prompt: CachedPrefix) -> None:
        """Keep an admitted prompt; the least recently used ones are dropped."""
        self._prompts.append(prompt)
        while len(self._prompts) > _MAX_PROMPTS or self.num_bytes > self._max_bytes:
            del self._prompts[0]

    def find(self, prompt: IntVector, serial: int) -> CachedPrefix | None:
        """Return the longest cached prefix of a prompt, None if shorter than `LEAST_SHARED`.

        At least one token of the prompt is not cached.
        """
        candidates = [
            (self.num_shared(prompt, cached.tokens), cached)
            for cached in self._prompts
            if cached.serial == serial
        ]
        shared, best = max(candidates, key=lambda pair: pair[0], default=(0, None))
        if best is None or shared < LEAST_SHARED:
            return None
        self._prompts = [cached for cached in self._prompts if cached is not best] + [best]
        if shared == len(best.tokens):
            return best
        return CachedPrefix(best.tokens[:shared], best.states.first(shared), None, serial)

    def num_shared(self, prompt: IntVector, other: IntVector) -> int:
        """Return how much of a prompt the cache of another one has, at most all but one token.

        Recurrent states are those of its last token alone.
        """
        shared = num_equal(prompt[:-1], other)
        return shared if not self._shape.slot_bytes or shared == len(other) else 0

    def clear(self) -> None:
        """Forget all."""
        self._prompts.clear()


class PrefixCache:
    """The caches of conversations, at most `max_bytes` in all.

    A conversation that is not cached is computed again.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._prefixes: OrderedDict[str, CachedPrefix] = OrderedDict()
        self.num_bytes = 0
        """Memory of all of them."""
        self.num_evicted = 0
        """Caches that were dropped, or not kept, for lack of room."""

    def __len__(self) -> int:
        return len(self._prefixes)

    def keep(self, conversation: str, prefix: CachedPrefix) -> None:
        """Keep a cache; the oldest ones are dropped."""
        self.drop(conversation)
        if prefix.states.nbytes > self._max_bytes:
            self.num_evicted += 1
            return
        self._prefixes[conversation] = prefix
        self.num_bytes += prefix.states.nbytes
        while self.num_bytes > self._max_bytes:
            self.drop(next(iter(self._prefixes)))
            self.num_evicted += 1

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
            self.num_bytes -= prefix.states.nbytes
        return prefix

    def clear(self) -> None:
        """Forget all."""
        self._prefixes.clear()
        self.num_bytes = 0
