"""Adapters of rows in one forward pass, and new weights prepared beside the running ones.

The adapters in use are concatenated: one product with all their A, one with all their B; in
between, each row keeps the values of its own adapter, and the others contribute exactly 0.

From the first update of weights on there are two sets: the set in use and the set that is filled
next, or that is in shared memory. So a swap exchanges pointers and takes microseconds for any model
size, and a refused update changes nothing.

Shape letters: B rows of a forward pass, N tokens of each, X of all, R ranks of all adapters in use
together.
"""

# torch and transformers leave some of their methods untyped.
# pyright: reportUnknownMemberType=false

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from ....schemas.config.sections import LoraConfig
from ....schemas.wire.errors import ModelError
from ...policy.adapted_layers import AdaptedLayers, LowRank, OneAdapter, sizes_of
from ...policy.lora import PREFIX, layer_of
from ...weights.shared_memory import is_in_memory
from ...weights.tensors import TensorSource, WeightNames, as_tensor, bytes_of, dtype_of

_A, _B = ".lora_A.weight", ".lora_B.weight"
_MAX_UNUSED = 2
"""Concatenated adapters are rebuilt when they have this many times the ranks in use."""
_serials = itertools.count(1)


@dataclass(slots=True, eq=False)
class EngineAdapter:
    """An adapter for rows; newer weights may replace its weights while they run."""

    name: str
    version: int
    by_layer: dict[str, LowRank]
    serial: int = field(default_factory=lambda: next(_serials))
    """Unique to these weights."""
    alone: "_Stack | None" = None
    """The adapter for passes in which other rows have none."""

    @property
    def rank(self) -> int:
        """The largest rank of its layers."""
        return max((len(pair.a) for pair in self.by_layer.values()), default=0)

    def replace_weights(self, version: int, by_layer: dict[str, LowRank]) -> None:
        """Replace the weights."""
        self.version, self.by_layer, self.serial = version, by_layer, next(_serials)
        self.alone = None


RowsOfAdapters = Sequence[EngineAdapter | None]
"""The adapters of the rows of a forward pass; None: the base model alone."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """Concatenated adapters in one layer."""

    a: Tensor
    """float[R, in]."""
    b: Tensor
    """float[R, out]."""
    owner_R: Tensor
    """int64: the adapter of each rank."""


class _Stack:
    """Concatenated adapters."""

    def __init__(self, adapters: Sequence[EngineAdapter]) -> None:
        self.place = {adapter.serial: number for number, adapter in enumerate(adapters)}
        self.rank = sum(adapter.rank for adapter in adapters)
        self._adapters = [adapter.by_layer for adapter in adapters]
        self._layers: dict[str, _Layer | None] = {}

    def layer(self, name: str) -> _Layer | None:
        """Return the adapters in one layer; None if none has that layer."""
        if name not in self._layers:
            self._layers[name] = self._concatenate(name)
        return self._layers[name]

    def _concatenate(self, name: str) -> _Layer | None:
        parts = [(at, some[name]) for at, some in enumerate(self._adapters) if name in some]
        if not parts:
            return None
        owner = [torch.full((len(pair.a),), at, device=pair.a.device) for at, pair in parts]
        if len(parts) == 1:
            pair = parts[0][1]
            return _Layer(pair.a, pair.b.t(), owner[0])
        a = torch.cat([pair.a for _, pair in parts])
        b = torch.cat([pair.b.t() for _, pair in parts])
        return _Layer(a, b, torch.cat(owner))


@dataclass(frozen=True, slots=True)
class _AdapterOfEachRow:
    stack: _Stack
    place_B: Tensor
    """Index of each row's adapter in the stack; -1: no adapter."""

    def add(self, layer: str, inputs: Tensor, whole: Tensor) -> Tensor | None:
        """See Addition."""
        in_layer = self.stack.layer(layer)
        if in_layer is None:
            return None
        low_XR = nn.functional.linear(inputs, in_layer.a).flatten(0, -2)
        other_BR = self.place_B[:, None] != in_layer.owner_R
        # Also the order of tokens in layers with flattened input.
        num_tokens = len(low_XR) // len(other_BR)
        low_XR.masked_fill_(other_BR.repeat_interleave(num_tokens, 0), 0)
        return whole.flatten(0, -2).addmm_(low_XR, in_layer.b).view(whole.shape)


class RowAdapters:
    """The adapters of one model's rows."""

    def __init__(self, model: nn.Module) -> None:
        """Set no hooks yet."""
        self._layers = AdaptedLayers(model)
        self._cached: _Stack | None = None

    def prepare(
        self, tensors: Mapping[str, TensorSource], config: LoraConfig
    ) -> dict[str, LowRank]:
        """Return an adapter's tensors by layer, scaled as `config` says; in any thread.

        `tensors` have PEFT's names. Raises ModelError for layers that the model does not have,
        other shapes, and values that are not finite.
        """
        pairs: dict[str, LowRank] = {}
        for name in sorted({layer_of(name) for name in tensors}):
            try:
                a, b = (as_tensor(tensors[f"{PREFIX}{name}{part}"]) for part in (_A, _B))
            except KeyError as error:
                raise _unfit(f"it has no {error.args[0]}") from None
            layer = self._layers.linear.get(name)
            if layer is None:
                raise _unfit(f"the model has no linear layer {name}")
            if (a.shape[1], b.shape[0], a.shape[0]) != (*sizes_of(layer), b.shape[1]):
                raise _unfit(f"its {name} is {list(a.shape)} and {list(b.shape)}")
            if not (torch.isfinite(a).all() and torch.isfinite(b).all()):
                raise _unfit(f"its {name} has values that are not finite")
            weight = cast(Tensor, layer.weight)
            like: dict[str, Any] = {"dtype": weight.dtype, "device": weight.device}
            scaled = (b.float() * config.scale_of(name)).t().contiguous()
            pairs[name] = LowRank(a.to(**like, copy=True), scaled.to(**like).t())
        return pairs

    def open(self) -> None:
        """Set the hooks; in the thread that computes."""
        self._layers.open()

    @contextlib.contextmanager
    def using(self, rows: RowsOfAdapters) -> Iterator[None]:
        """Use these adapters for the rows of the forward passes in this block."""
        used = list({adapter.serial: adapter for adapter in rows if adapter is not None}.values())
        if not used:
            yield
        elif len(used) == 1 and None not in rows:
            with self._layers.using(OneAdapter(used[0].by_layer)):
                yield
        else:
            stack = self._stack_of(used)
            places = [-1 if adapter is None else stack.place[adapter.serial] for adapter in rows]
            device = next(iter(used[0].by_layer.values())).a.device
            place_B = torch.tensor(places, device=device)
            with self._layers.using(_AdapterOfEachRow(stack, place_B)):
                yield

    def _stack_of(self, used: list[EngineAdapter]) -> _Stack:
        """Return concatenated adapters; those of the last pass if they contain the used ones."""
        if len(used) == 1:
            used[0].alone = used[0].alone or _Stack(used)
            return used[0].alone
        cached, rank = self._cached, sum(adapter.rank for adapter in used)
        if (
            cached is None
            or cached.rank > _MAX_UNUSED * rank
            or any(adapter.serial not in cached.place for adapter in used)
        ):
            self._cached = cached = _Stack(used)
        return cached

    def forget(self, adapter: EngineAdapter) -> None:
        """Free concatenated adapters that contain this one."""
        if self._cached is not None and adapter.serial in self._cached.place:
            self._cached = None


def _unfit(why: str) -> ModelError:
    return ModelError(
        f"the adapter does not fit the model: {why}",
        hint="an adapter belongs to the base model that it was trained on",
    )


# -- new weights -----------------------------------------------------------------------------------


class DoubleBuffer:
    """Two sets of the published weights: all of a model, or those of its adapter.

    On a CPU new weights in the machine's shared memory are used as the second set, of which all
    engines of the machine share one copy.

    `prepare` may run in any thread while the model decodes; `swap` runs in the engine's thread.
    One update at a time.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        """`weights` are the model's tensors by name; a tied tensor has several names."""
        self._names = WeightNames(weights)
        self._spare: list[torch.Tensor] | None = None
        self._is_shared = self._was_shared = False
        """Whether the prepared set is in shared memory, and whether the current set is."""

    @property
    def num_bytes(self) -> int:
        """Size of one set."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._names.tensors)

    @property
    def held_bytes(self) -> int:
        """Size of the sets that are in memory."""
        return self.num_bytes * (1 + (self._spare is not None))

    def prepare(self, tensors: Mapping[str, TensorSource]) -> list[torch.Tensor]:
        """Return new weights, copied to the spare set or in shared memory.

        Raises EngineError that lists names which are missing, unknown, or of the wrong shape.
        """
        new = self._names.checked(tensors)
        shared = _in_shared_memory(new.values(), self._names.tensors)
        self._is_shared = shared is not None
        if shared is not None:
            self._spare = None
            return shared
        spare, self._spare = self._spare, None
        fresh = spare or [torch.empty_like(t, requires_grad=False) for t in self._names.tensors]
        for target, source in zip(fresh, new.values(), strict=True):
            _fill(target, source)
        if fresh and fresh[0].is_cuda:
            torch.cuda.synchronize(fresh[0].device)
        return fresh

    def swap(self, fresh: list[torch.Tensor]) -> None:
        """Use a prepared set as the model's weights; the old set becomes the spare one."""
        old = [tensor.data for tensor in self._names.tensors]
        for tensor, new in zip(self._names.tensors, fresh, strict=True):
            tensor.data = new
        can_refill = not self._is_shared and not self._was_shared
        self._was_shared = self._is_shared
        self._spare = old if can_refill and all(_is_whole(tensor) for tensor in old) else None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The published weights."""
        return self._names.tensors

    def free_spare(self) -> None:
        """Free the spare set."""
        self._spare = None


class OffloadedWeights:
    """A model's weights, moved to host memory.

    On the device each tensor is replaced by one number with the tensor's shape, so that new weights
    can be prepared.
    """

    def __init__(self, model: nn.Module, dropped: Iterable[Tensor] = ()) -> None:
        """Copy all weights and buffers except the dropped ones, and free the device's memory."""
        self._copies: list[tuple[Tensor, Tensor, Tensor]] = []
        """Each tensor, its replacement, and its values."""
        others = {id(tensor) for tensor in dropped}
        for tensor in (*model.parameters(), *model.buffers()):
            place = torch.empty((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
            if id(tensor) not in others:
                values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                self._copies.append((tensor, place, values.copy_(tensor.data)))
            tensor.data = place

    @property
    def num_bytes(self) -> int:
        """Used memory of the machine."""
        return sum(values.nbytes for _, _, values in self._copies)

    def restore(self) -> None:
        """Copy the weights back to the device, except those that were replaced meanwhile."""
        for tensor, place, values in self._copies:
            if tensor.data_ptr() == place.data_ptr():
                tensor.data = values.to(tensor.device)
        self._copies.clear()


def _is_whole(tensor: torch.Tensor) -> bool:
    """Whether a tensor has memory for all its values, unlike in a sleeping engine."""
    return tensor.untyped_storage().nbytes() >= tensor.nbytes


def _in_shared_memory(
    sources: Iterable[TensorSource], live: Sequence[torch.Tensor]
) -> list[torch.Tensor] | None:
    """Return new weights in this machine's shared memory; None for others, or another layout."""
    views: list[torch.Tensor] = []
    for source, tensor in zip(sources, live, strict=True):
        if isinstance(source, Tensor) or tensor.is_cuda or dtype_of(source) != tensor.dtype:
            return None
        if not is_in_memory(source.data) or not tensor.numel():
            return None
        shared = torch.frombuffer(source.data, dtype=torch.uint8)
        if shared.data_ptr() % tensor.itemsize or shared.numel() != tensor.nbytes:
            return None
        views.append(shared.view(tensor.dtype).view(tensor.shape))
    return views


def _fill(target: torch.Tensor, source: TensorSource) -> None:
    in_place = target.device.type == "cpu" and target.is_contiguous() and target.numel()
    if not isinstance(source, torch.Tensor) and in_place and dtype_of(source) == target.dtype:
        np.copyto(target.view(-1).view(torch.uint8).numpy(), bytes_of(source))
    else:
        on_gpu = target.is_cuda
        target.copy_(as_tensor(source, pinned=on_gpu), non_blocking=on_gpu)
