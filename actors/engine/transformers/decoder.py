"""One causal language model over the slot cache: prefill, decode, recompute.

Shape letters: B rows, N tokens per row of a prefill, T keys, V vocabulary.

The model is the ordinary transformers class, called with the cache, explicit positions and additive
4-D masks. The results are compared with a plain forward pass at the start, so that a model that
needs more (position biases, an index of keys) is refused; windows are then narrowed to two tokens,
so that they show. The comparison is in float32: with 16 bits even a supported model's logits differ
by tenths of their size, since the first tokens' activations are a thousand times the others'.
"""

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from ....schemas.checks import CheckSkipped
from ....schemas.config.sections import LoraConfig
from ....schemas.plan.model_shape import count_positions, refuse_long_sequences
from ....schemas.wire.array import IntVector
from ....schemas.wire.errors import ModelError
from ...policy import vision
from ...policy.devices import DECODED_WEIGHTS, exact_products, use_onednn
from ...policy.experts import RouterRecorder
from ...policy.layers import cache_layers, reach_of
from ...policy.model_folder import load_model_config, load_policy
from ...policy.small_copy import make_small_copy
from ..engine import ExpertRecord
from .adapters import EngineAdapter, RowAdapters, RowsOfAdapters
from .kv_cache import ATTENTION, PREFIX_CACHE_BYTES, CacheShape, SlotCache, cache_cells

_PREFILL_TOKENS = {"cpu": 512, "cuda": 4096}
"""Tokens of one prefill pass, padding included, which bounds its memory; one row may have more.

A CPU's matrix products are as fast with a few hundred rows as with thousands. Passes of fewer
prompts have less padding, and the first of them end sooner.
"""
_PROBE = (1, 2, 3, 5, 1, 2)
_TOLERANCE = 1e-3
"""Largest difference of logits in float32, relative to the largest logit."""


@dataclass(frozen=True, slots=True)
class FedTokens:
    """Tokens to feed to a slot: those from position `start` on."""

    slot: int
    start: int
    tokens: IntVector
    images: vision.SeenImages | None = None
    """Images in the slot's tokens, fed with a span that begins at 0."""
    adapter: EngineAdapter | None = None
    """The slot's adapter."""

    @property
    def positions_3N(self) -> NDArray[np.int64]:
        """Rotary positions of the span's tokens, in time, height and width."""
        places_N = np.arange(self.start, self.start + len(self.tokens))
        if self.images is None:
            return np.broadcast_to(places_N, (3, len(places_N)))
        return self.images.positions(places_N)


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
    """Load a model and verify that the slot cache computes it; raises ModelError.

    With `base` only an adapter is loaded, for the weights of a model in memory.
    """
    config = load_model_config(path, trust_remote_code=trust_remote_code)
    if base is None:
        try_before_loading(path, config)
    text_config: Any = config.get_text_config()  # pyright: ignore[reportUnknownMemberType]  # untyped in transformers
    refuse_long_sequences(path, max_tokens, count_positions(text_config.to_dict()))
    # Loaded with the reference attention, with which `_check` compares: it supports every variant.
    model = load_policy(
        path,
        lora or LoraConfig(),
        base=base,
        dtype=dtype,
        attn_implementation="eager",
        trust_remote_code=trust_remote_code,
    )
    torch.nn.Module.to(model.requires_grad_(False), torch.device(device))
    reader = vision.load_image_reader(path, trust_remote_code=trust_remote_code)
    return SlotDecoder(path, model, max_slots=max_slots, max_tokens=max_tokens, reader=reader)


class SlotDecoder:
    """A model that decodes the first B slots of its cache together."""

    def __init__(
        self,
        path: str,
        model: PreTrainedModel,
        *,
        max_slots: int,
        max_tokens: int,
        reader: vision.ImageReader | None = None,
    ) -> None:
        self.model = model
        self.reader = reader
        """Reads images, if the model does."""
        use_onednn(model, DECODED_WEIGHTS)
        self.adapters = RowAdapters(model)
        self._recorder: RouterRecorder | None = None
        self._by_token = any(
            hasattr(module, "A_log") and hasattr(module, "dt_proj") for module in model.modules()
        )
        """Whether a pass of several tokens begins recurrent states anew, as Mamba 1's does."""
        embedding = cast("torch.Tensor", model.get_input_embeddings().weight)
        self.device = embedding.device
        self.vocab_size = int(embedding.shape[0])
        with exact_products(), _in_float32(model):
            reach = reach_of(model)
            probes = _probes(model, reader)
            with reach.narrowed(model) as self._reach:
                plain = [_plain(path, model, probe) for probe in probes]
                shape = _cache_shape(plain[0][1])
                self.cache = SlotCache(shape, 1, max(len(probe.tokens) for probe in probes))
                self._use_slots()
                for probe, (plain_NV, _) in zip(probes, plain, strict=True):
                    self._check(path, probe, plain_NV)
        self._reach = reach
        shape = replace(shape, dtype=embedding.dtype)
        self.cache = SlotCache(shape, max_slots, max_tokens, _free_cells(model, shape, max_slots))

    def record_experts(self) -> None:
        """Record the experts of each token; raises ModelError if the model's cannot be recorded."""
        self._recorder = RouterRecorder(self.model)

    @property
    def expert_shape(self) -> tuple[int, int]:
        """Recorded layers with experts, and experts per token; (0, 0): nothing is recorded."""
        shape = None if self._recorder is None else self._recorder.shape
        return (0, 0) if shape is None else (shape.layers, shape.chosen)

    def chosen(self, num_rows: int) -> ExpertRecord:
        """Return the experts of the tokens of the latest pass, [B, N, L, K], padding included.

        Once per pass, and only if experts are recorded.
        """
        assert self._recorder is not None
        chosen = self._recorder.take_choices()
        return chosen.reshape(num_rows, -1, *chosen.shape[1:])

    def prefill(self, spans: Sequence[FedTokens]) -> Iterator[tuple[list[int], torch.Tensor]]:
        """Feed every span; yield (indices into `spans`, logits of their last token [B, V]).

        Spans of similar length share a forward pass.
        """
        most = _PREFILL_TOKENS[self.device.type]
        for batch in _batches(spans, most, equal=self.cache.is_recurrent):
            fed = [spans[index] for index in batch]
            if self._by_token and fed[0].start:
                yield batch, torch.cat([self._feed_by_token(span) for span in fed])
            else:
                yield batch, self._prefill_batch(fed)

    def _feed_by_token(self, span: FedTokens) -> torch.Tensor:
        """Feed a span that continues a slot; return the logits of its last token [1, V]."""
        slots, logits = np.array([span.slot]), torch.empty(0)
        for index in range(len(span.tokens)):
            token, position = span.tokens[index : index + 1], np.array([span.start + index])
            logits = self.decode(token, position, adapters=[span.adapter], slots_B=slots)
        return logits

    def decode(
        self,
        tokens_B: NDArray[np.int32],
        positions_B: NDArray[np.int64],
        shift_B: NDArray[np.int64] | int = 0,
        adapters: RowsOfAdapters = (),
        slots_B: NDArray[np.int64] | None = None,
    ) -> torch.Tensor:
        """Feed one token to each of the first B slots, or of `slots_B`; return the logits [B, V].

        `shift_B` is the offset of the rotary positions. `adapters` are those of the slots; empty:
        they have none.
        """
        length = int(positions_B.max()) + 1
        num_slots = len(tokens_B) if slots_B is None else int(slots_B.max()) + 1
        self.cache.reserve(num_slots, length)
        positions = torch.as_tensor(positions_B, device=self.device)
        slots = None if slots_B is None else torch.as_tensor(slots_B, device=self.device)
        self.cache.begin_decode(positions, length, slots)
        mask = None
        if int(positions_B.min()) + 1 < length or self._is_limited(length):
            mask = self._mask(positions[:, None], length)
        ids = torch.as_tensor(tokens_B.astype(np.int64), device=self.device)
        rotary = torch.as_tensor(positions_B + shift_B, device=self.device)
        return self._forward({"input_ids": ids[:, None]}, rotary[:, None], mask, adapters)

    def _prefill_batch(self, spans: Sequence[FedTokens]) -> torch.Tensor:
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
        ids = torch.as_tensor(ids_BN, device=self.device)
        adapters = [span.adapter for span in spans]
        if all(span.images is None for span in spans):
            return self._forward({"input_ids": ids}, positions, mask, adapters)
        rotary_3BN = np.zeros((3, *ids_BN.shape), np.int64)
        for row, span in enumerate(spans):
            rotary_3BN[:, row, longest - len(span.tokens) :] = span.positions_3N
        rotary = torch.as_tensor(rotary_3BN, device=self.device)
        return self._forward(self._with_images(ids, spans), rotary, mask, adapters)

    def _with_images(self, ids_BN: torch.Tensor, spans: Sequence[FedTokens]) -> dict[str, Any]:
        """Return the model's input: embeddings with the images at the start of these spans."""
        width = ids_BN.shape[1]
        fed = [
            (span.images, span.images.places_Q + (row + 1) * width - len(span.tokens))
            for row, span in enumerate(spans)
            if span.images is not None and span.start == 0
        ]
        if not fed:
            return {"input_ids": ids_BN}
        columns = np.concatenate([columns for _, columns in fed])
        columns_Q = torch.as_tensor(columns, device=self.device)
        images = [seen.images for seen, _ in fed]
        return {"inputs_embeds": vision.embed(self.model, ids_BN, columns_Q, images)}

    def _prefill_mask(
        self, positions_BN: torch.Tensor, valid_BN: torch.Tensor | None, length: int | None
    ) -> Any:
        """Return masks over the slots' first `length` keys, or over the pass's own."""
        if length is not None:
            return self._mask(positions_BN, length)
        width = positions_BN.shape[1]
        if valid_BN is None and not self._is_limited(width):
            return None
        columns_N = torch.arange(width, device=self.device)
        visible = (columns_N <= columns_N[:, None])[None]
        if valid_BN is not None:
            itself_NN = columns_N == columns_N[:, None]  # padding sees itself, to avoid NaN
            visible = (visible & valid_BN[:, None]) | itself_NN
        return self._additive(self._reach.masks(visible[:, None], positions_BN, positions_BN))

    def _mask(self, positions_BN: torch.Tensor, length: int) -> Any:
        """Return masks of queries at these positions over their slots' first `length` keys."""
        keys_T = torch.arange(length, device=self.device)
        visible = (keys_T <= positions_BN[..., None])[:, None]
        return self._additive(self._reach.masks(visible, positions_BN, keys_T[None]))

    def _is_limited(self, length: int) -> bool:
        """Whether some layer sees fewer than this many tokens."""
        full_until = self._reach.full_until
        return full_until is not None and length > full_until

    def _additive(self, visible: Any) -> Any:
        if isinstance(visible, dict):
            by_kind = cast("dict[str, torch.Tensor]", visible)
            return {kind: self._additive(mask) for kind, mask in by_kind.items()}
        mask = torch.zeros(visible.shape, dtype=self.cache.shape.dtype, device=self.device)
        return mask.masked_fill_(~visible, float("-inf"))

    def _forward(
        self,
        read: dict[str, Any],
        positions: torch.Tensor,
        mask: Any,
        adapters: RowsOfAdapters,
    ) -> torch.Tensor:
        if self.cache.shape.token_bytes:
            read |= {"position_ids": positions, "attention_mask": mask}
        read[_cache_name(self.model)] = self.cache
        try:
            with self.adapters.using(adapters):
                output = self.model(**read, use_cache=True, logits_to_keep=1)
        finally:
            self.cache.end_pass()
        return cast("torch.Tensor", output.logits)[:, -1]

    def _use_slots(self) -> None:
        """Let the decoder attend over the slots; a vision tower attends within its images."""
        model: Any = self.model
        seeing = {"text_config": ATTENTION, "vision_config": "sdpa"}
        model.set_attn_implementation(ATTENTION if self.reader is None else seeing)

    def _check(self, path: str, probe: "_Probe", plain_NV: torch.Tensor) -> None:
        """Raise ModelError unless prefill, resumed prefill and decode agree with `plain_NV`."""
        try:
            rows = self._probed(probe)
        except (ValueError, RuntimeError, TypeError, KeyError, IndexError) as error:
            raise ModelError(
                f"model {path} cannot be computed over the slot cache: its class takes no mask of "
                "the keys that each token sees, or no keys of other requests beside its own",
                hint="set generator.engine=vllm, or choose another model",
            ) from error
        scale = float(plain_NV.abs().max()) + 1e-6
        for position, logits in rows:
            worst = float((logits[0].float() - plain_NV[position]).abs().max()) / scale
            if not worst < _TOLERANCE:
                raise ModelError(
                    f"model {path} computes other logits over the slot cache than in a plain "
                    f"forward pass (off by {worst:.1%})",
                    hint="its attention needs more than a causal mask: use another model or engine",
                )

    @torch.inference_mode()
    def _probed(self, probe: "_Probe") -> list[tuple[int, torch.Tensor]]:
        """Return positions and logits after a prefill, a resumed one, and a decode."""
        tokens, images, first, last = probe.tokens, probe.images, probe.first, len(probe.tokens) - 1
        shift = 0 if images is None else images.shift
        return [
            (first - 1, next(self.prefill([FedTokens(0, 0, tokens[:first], images)]))[1]),
            (last - 1, next(self.prefill([FedTokens(0, first, tokens[first:last], images)]))[1]),
            (last, self.decode(tokens[last:], np.array([last]), shift)),
        ]


@contextlib.contextmanager
def _in_float32(model: PreTrainedModel) -> Iterator[None]:
    """Compute a model of 16 bits in float32, with a temporary copy of each module's weights."""
    originals: dict[torch.nn.Module, dict[str, torch.nn.Parameter]] = {}

    def widen(module: torch.nn.Module, args: Any, kwargs: Mapping[str, Any]) -> Any:
        originals[module] = dict(module.named_parameters(recurse=False))
        for name, parameter in originals[module].items():
            wide = torch.nn.Parameter(_float32(parameter.data), requires_grad=False)
            setattr(module, name, wide)
        return tuple(map(_float32, args)), {key: _float32(each) for key, each in kwargs.items()}

    def restore(module: torch.nn.Module, *_: object) -> None:
        for name, parameter in originals.pop(module).items():
            setattr(module, name, parameter)

    handles = [
        handle
        for module in model.modules()
        if any(_is_narrow(each) for each in module.parameters(recurse=False))
        for handle in (
            module.register_forward_pre_hook(widen, with_kwargs=True),
            module.register_forward_hook(restore, always_call=True),
        )
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        if model.device.type == "cuda":
            torch.cuda.empty_cache()


def _is_narrow(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.itemsize < 4


def _float32(value: Any) -> Any:
    return value.float() if _is_narrow(value) else value


def _free_cells(model: PreTrainedModel, shape: CacheShape, max_slots: int) -> int | None:
    """Return the tokens for whose keys and values a GPU has memory; None on a CPU.

    The weights of the next version and the recurrent states of all slots need memory, too.
    """
    if shape.device.type != "cuda" or not shape.token_bytes:
        return None
    cuda: Any = torch.cuda
    free_bytes, all_bytes = cuda.mem_get_info(shape.device)
    own_bytes = int(all_bytes * cuda.get_per_process_memory_fraction(shape.device))
    free_bytes = min(free_bytes, own_bytes - cuda.memory_allocated(shape.device))
    other = sum(weight.nbytes for weight in model.parameters()) + max_slots * shape.slot_bytes
    return cache_cells(free_bytes, other + PREFIX_CACHE_BYTES, shape.token_bytes)


_LAYERS = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)
"""What transformers keeps for the layers that the slot cache has, too."""


def try_before_loading(path: str, config: Any) -> None:
    """Raise ModelError for a model that the slot cache does not compute, as far as is known now."""
    with contextlib.suppress(CheckSkipped):
        try_slots(path, config)


def try_slots(path: str, config: Any) -> SlotDecoder:
    """Compute a small copy of a model over the slot cache, before its weights are read.

    Raises ModelError for a model that it does not compute, CheckSkipped where no copy is made.
    """
    layers = cache_layers(config)
    other = sorted({type(layer).__name__ for layer in layers if type(layer) not in _LAYERS})
    if other or not layers:
        raise ModelError(
            f"model {path} has layers that keep more than keys, values and recurrent states "
            f"({', '.join(other) or 'unknown'})",
            hint="set generator.engine=vllm, or choose another model",
        )
    return SlotDecoder(path, make_small_copy(config, "eager"), max_slots=1, max_tokens=64)


@dataclass(frozen=True)
class _Probe:
    """The sequence that is computed in both ways."""

    tokens: IntVector
    first: int
    """Tokens of the first prefill."""
    images: vision.SeenImages | None = None


def _probes(model: PreTrainedModel, reader: vision.ImageReader | None) -> list[_Probe]:
    """Return a text, and for a vision model one with an image."""
    text = _Probe(np.array(_PROBE, np.int32), 3)
    if reader is None:
        return [text]
    encoded = [vision.probe_image()]
    pads = [reader.token_id] * sum(reader.read(encoded).tokens)
    tokens = np.array([*_PROBE[:2], *pads, *_PROBE[2:]], np.int32)
    return [text, _Probe(tokens, len(pads) + 3, reader.read_images(model, tokens, encoded))]


@torch.inference_mode()
def _plain(path: str, model: PreTrainedModel, probe: _Probe) -> tuple[torch.Tensor, DynamicCache]:
    """Run a plain forward pass; return its logits [N, V], and what it keeps for each layer."""
    ids = torch.as_tensor(probe.tokens.astype(np.int64), device=model.device)[None]
    more = {} if probe.images is None else vision.plain_inputs(ids, probe.images)
    cache, name = DynamicCache(config=model.config), _cache_name(model)
    try:
        output = model(input_ids=ids, use_cache=True, **{name: cache}, **more)
    except (ValueError, TypeError) as error:
        raise _own_cache(path) from error
    if getattr(output, name, None) is not cache:
        raise _own_cache(path)
    return cast("torch.Tensor", output.logits)[0].float(), cache


def _cache_name(model: PreTrainedModel) -> str:
    """Return a model's argument for its cache; models with recurrent layers alone have another."""
    known = inspect.signature(model.forward).parameters
    alone = "cache_params" in known and "past_key_values" not in known
    return "cache_params" if alone else "past_key_values"


def _own_cache(path: str) -> ModelError:
    return ModelError(
        f"model {path} has a class with a cache of its own for its keys, values or states",
        hint="set generator.engine=vllm, or choose another model",
    )


def _cache_shape(cache: DynamicCache) -> CacheShape:
    """Return the shape of what a plain pass has stored."""
    layers: list[tuple[tuple[int, int], ...]] = []
    stored: list[torch.Tensor] = []
    slot_bytes = 0
    for layer in cast("list[Any]", cache.layers):
        own: list[torch.Tensor] = []
        if isinstance(layer, DynamicLayer) and layer.is_initialized:
            own = [cast("torch.Tensor", layer.keys), cast("torch.Tensor", layer.values)]
        layers.append(tuple((states.shape[1], states.shape[3]) for states in own))
        stored += own
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            states = [*layer.conv_states.values(), *layer.recurrent_states.values()]
            stored += (present := [each for each in states if each is not None])
            slot_bytes += sum(each[0].nbytes for each in present)
    return CacheShape(tuple(layers), stored[0].dtype, stored[0].device, slot_bytes)


def _batches(spans: Sequence[FedTokens], max_tokens: int, *, equal: bool) -> Iterator[list[int]]:
    """Group spans so that padding at most doubles the work; resumed spans are separate.

    `equal`: without padding.
    """
    order = sorted(range(len(spans)), key=lambda i: (spans[i].start > 0, len(spans[i].tokens)))
    batch: list[int] = []
    for index in order:
        length = len(spans[index].tokens)
        if batch and (
            (len(batch) + 1) * length > max_tokens
            or length > (1 if equal else 2) * len(spans[batch[0]].tokens) + (0 if equal else 16)
            or (spans[index].start > 0) != (spans[batch[0]].start > 0)
        ):
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch
