"""Adapters (LoRA) that rows of one forward pass choose for themselves, beside one base model.

The adapters in use are laid side by side: one product with all their A, one with all their B, and
in between each row keeps the numbers of its own adapter alone; what the others would add to it is
an exact 0. Rows that all have the same adapter, or none, compute nothing else. The linear layers
stay what they are: what is added to their output is a hook, set when the first adapter comes.

New weights are prepared beside the running ones. Two sets exist from the first update on: the one
that decodes and the one that is filled next, or that lies in the machine's shared memory. So a swap
exchanges pointers and costs microseconds whatever the model's size, and an update that is refused
has touched nothing.

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
from ...policy.lora import PREFIX, has_adapter, layer_of
from ...weights.shared_memory import is_in_memory
from ...weights.tensors import TensorSource, WeightNames, as_tensor, bytes_of, dtype_of

_A, _B = ".lora_A.weight", ".lora_B.weight"
_SPARE = 2
"""Adapters laid side by side are laid anew when they have so many times the ranks in use."""
_serials = itertools.count(1)

LowRankTensors = dict[str, tuple[Tensor, Tensor]]
"""Of each layer A [rank, in] and the transposed B [rank, out], which the scale has multiplied."""


@dataclass(slots=True, eq=False)
class EngineAdapter:
    """An adapter that rows may have; newer weights may take its place while they run."""

    name: str
    version: int
    by_layer: LowRankTensors
    serial: int = field(default_factory=lambda: next(_serials))
    """Unlike that of any other weights."""
    alone: "_Stack | None" = None
    """What lies in the layers where it is the only one."""

    @property
    def rank(self) -> int:
        """The largest of its layers."""
        return max((len(a) for a, _ in self.by_layer.values()), default=0)

    def become(self, version: int, by_layer: LowRankTensors) -> None:
        """Take other weights."""
        self.version, self.by_layer, self.serial = version, by_layer, next(_serials)
        self.alone = None


RowsOfAdapters = Sequence[EngineAdapter | None]
"""What the rows of a forward pass have; None: the base alone."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """Adapters laid side by side in one layer."""

    a: Tensor
    """float[R, in]."""
    b: Tensor
    """float[R, out]."""
    owner_R: Tensor
    """int64: the adapter of each rank."""


class _Stack:
    """Adapters laid side by side."""

    def __init__(self, adapters: Sequence[EngineAdapter]) -> None:
        self.serials = [adapter.serial for adapter in adapters]
        self.place = {serial: number for number, serial in enumerate(self.serials)}
        self.rank = sum(adapter.rank for adapter in adapters)
        self._adapters = [adapter.by_layer for adapter in adapters]
        self._layers: dict[str, _Layer | None] = {}

    def layer(self, name: str) -> _Layer | None:
        """Return what stands in one layer, None for nothing."""
        if name not in self._layers:
            self._layers[name] = self._laid(name)
        return self._layers[name]

    def _laid(self, name: str) -> _Layer | None:
        parts = [
            (at, adapter[name]) for at, adapter in enumerate(self._adapters) if name in adapter
        ]
        if not parts:
            return None
        if len(parts) == 1:
            at, (a, b) = parts[0]
            return _Layer(a, b, torch.full((len(a),), at, device=a.device))
        a = torch.cat([a for _, (a, _) in parts])
        b = torch.cat([b for _, (_, b) in parts])
        owner = [torch.full((len(a),), at) for at, (a, _) in parts]
        return _Layer(a, b, torch.cat(owner).to(a.device))


class RowAdapters:
    """The linear layers of one model, and which adapter each row of a forward pass has."""

    def __init__(self, model: nn.Module) -> None:
        """Set no hook yet."""
        self._model = model
        self._layers: dict[str, nn.Linear] = {}
        self._stack: _Stack | None = None
        self._cached: _Stack | None = None
        self._place_B: Tensor | None = None
        """int64: the adapter of each row; None where all have that of the stack."""

    def prepare(self, tensors: Mapping[str, TensorSource], config: LoraConfig) -> LowRankTensors:
        """Return an adapter's tensors, by PEFT's names, as this model takes them; in any thread.

        Each layer's are multiplied as `config` says.

        Raises ModelError for layers that there are not, other shapes, and what is no number.
        """
        layers = self._layers or self._adapted_layers()
        pairs: LowRankTensors = {}
        for name in sorted({layer_of(name) for name in tensors}):
            try:
                a, b = (as_tensor(tensors[f"{PREFIX}{name}{part}"]) for part in (_A, _B))
            except KeyError as error:
                raise _unfit(f"it has no {error.args[0]}") from None
            layer = layers.get(name)
            if layer is None:
                raise _unfit(f"the model has no linear layer {name}")
            shapes = (a.shape[1], b.shape[0], a.shape[0])
            if shapes != (layer.in_features, layer.out_features, b.shape[1]):
                raise _unfit(f"its {name} is {list(a.shape)} and {list(b.shape)}")
            if not (torch.isfinite(a).all() and torch.isfinite(b).all()):
                raise _unfit(f"its {name} holds what is no number")
            like: dict[str, Any] = {"dtype": layer.weight.dtype, "device": layer.weight.device}
            scaled = (b.float() * config.scale_of(name)).t().contiguous()
            pairs[name] = (a.to(**like, copy=True), scaled.to(**like))
        return pairs

    def open(self) -> None:
        """Set the hooks; in the thread that computes."""
        if not self._layers:
            self._layers = self._adapted_layers()
            for name, layer in self._layers.items():
                layer.register_forward_hook(self._hook(name))

    @contextlib.contextmanager
    def using(self, rows: RowsOfAdapters) -> Iterator[None]:
        """Let the rows of a forward pass have these adapters."""
        chosen = {adapter.serial: adapter for adapter in rows if adapter is not None}
        if not chosen:
            yield
            return
        self._stack = self._stack_of(list(chosen.values()))
        if len(self._stack.serials) > 1 or any(adapter is None for adapter in rows):
            place = self._stack.place
            places = [-1 if adapter is None else place[adapter.serial] for adapter in rows]
            device = next(iter(self._layers.values())).weight.device
            self._place_B = torch.tensor(places, device=device)
        try:
            yield
        finally:
            self._stack, self._place_B = None, None

    def _stack_of(self, chosen: list[EngineAdapter]) -> _Stack:
        """Return adapters side by side; those of the last pass if they hold the chosen ones."""
        if len(chosen) == 1:
            chosen[0].alone = chosen[0].alone or _Stack(chosen)
            return chosen[0].alone
        cached, rank = self._cached, sum(adapter.rank for adapter in chosen)
        if (
            cached is None
            or cached.rank > _SPARE * rank
            or any(adapter.serial not in cached.place for adapter in chosen)
        ):
            self._cached = cached = _Stack(chosen)
        return cached

    def forget(self, adapter: EngineAdapter) -> None:
        """Free what was laid side by side with an adapter."""
        if self._cached is not None and adapter.serial in self._cached.place:
            self._cached = None

    def _hook(self, name: str) -> Any:
        def add(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
            layer = None if self._stack is None else self._stack.layer(name)
            return None if layer is None else self._added(layer, inputs[0], output)

        return add

    def _added(self, layer: _Layer, x: Tensor, output: Tensor) -> Tensor:
        low_XR = nn.functional.linear(x, layer.a).flatten(0, -2)
        if self._place_B is not None:
            other_BR = self._place_B[:, None] != layer.owner_R
            # Row by row, in layers before which a model lays all tokens behind each other, too.
            num_tokens = len(low_XR) // len(other_BR)
            low_XR.masked_fill_(other_BR.repeat_interleave(num_tokens, 0), 0)
        return torch.addmm(output.flatten(0, -2), low_XR, layer.b).view(output.shape)

    def _adapted_layers(self) -> dict[str, nn.Linear]:
        if has_adapter(self._model):
            raise ModelError(
                "the engine's model has an adapter of its own",
                hint="start the engine with the base model",
            )
        decoder: nn.Module = cast(Any, self._model).get_decoder()
        head: nn.Module | None = cast(Any, self._model).get_output_embeddings()
        inside = {id(module) for module in decoder.modules()} | {id(head)}
        modules: Iterable[tuple[str, nn.Module]] = cast(Any, self._model).named_modules()
        return {
            name: module
            for name, module in modules
            if isinstance(module, nn.Linear) and id(module) in inside
        }


def _unfit(why: str) -> ModelError:
    return ModelError(
        f"the adapter does not fit the model: {why}",
        hint="an adapter belongs to the base model that it was trained on",
    )


# -- new weights -----------------------------------------------------------------------------------


class DoubleBuffer:
    """The second set of the weights that change: all of a model, or those of its adapter.

    On a CPU new weights that lie in the machine's shared memory are the second set themselves, of
    which all engines of the machine have one copy.

    `prepare` may run in any thread while the model decodes; `swap` runs in the engine's thread.
    One update at a time.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        """`weights` are the tensors themselves by name; a tied one has several names."""
        self._names = WeightNames(weights)
        self._spare: list[torch.Tensor] | None = None
        self._is_shared = self._was_shared = False
        """Whether the prepared set lies in shared memory, and whether that in use does."""

    @property
    def num_bytes(self) -> int:
        """Size of one set."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._names.tensors)

    @property
    def held_bytes(self) -> int:
        """Size of the sets that are in memory."""
        return self.num_bytes * (1 + (self._spare is not None))

    def prepare(self, tensors: Mapping[str, TensorSource]) -> list[torch.Tensor]:
        """Copy and convert new weights into the spare set, unless they are used where they lie;
        return it.

        Raises EngineError listing the names that are missing, unknown, or of the wrong shape.
        """
        given = self._names.checked(tensors)
        shared = _in_shared_memory(given.values(), self._names.tensors)
        self._is_shared = shared is not None
        if shared is not None:
            self._spare = None
            return shared
        spare, self._spare = self._spare, None
        fresh = spare or [torch.empty_like(t, requires_grad=False) for t in self._names.tensors]
        for target, source in zip(fresh, given.values(), strict=True):
            _fill(target, source)
        if fresh and fresh[0].is_cuda:
            torch.cuda.synchronize(fresh[0].device)
        return fresh

    def swap(self, fresh: list[torch.Tensor]) -> None:
        """Make a prepared set the model's weights; the old set is filled next time."""
        old = [tensor.data for tensor in self._names.tensors]
        for tensor, new in zip(self._names.tensors, fresh, strict=True):
            tensor.data = new
        can_refill = not self._is_shared and not self._was_shared
        self._was_shared = self._is_shared
        self._spare = old if can_refill and all(_is_whole(tensor) for tensor in old) else None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The weights that change."""
        return self._names.tensors

    def free_spare(self) -> None:
        """Free the set that is not in use."""
        self._spare = None


class OffloadedWeights:
    """The weights of a model in the machine's memory; on its device stands one number for each.

    Their shapes stay as they are, so that new weights can be prepared and take their place.
    """

    def __init__(self, model: nn.Module, given_up: Iterable[Tensor] = ()) -> None:
        """Copy all weights and buffers but those that are given up, and free their memory."""
        self._kept: list[tuple[Tensor, Tensor, Tensor]] = []
        """Each tensor, what stands in its place, and its values."""
        others = {id(tensor) for tensor in given_up}
        for tensor in (*model.parameters(), *model.buffers()):
            place = torch.empty((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
            if id(tensor) not in others:
                values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                self._kept.append((tensor, place, values.copy_(tensor.data)))
            tensor.data = place

    @property
    def num_bytes(self) -> int:
        """Of the machine's memory."""
        return sum(values.nbytes for _, _, values in self._kept)

    def restore(self) -> None:
        """Give the weights their memory and values back, but those that were replaced."""
        for tensor, place, values in self._kept:
            if tensor.data_ptr() == place.data_ptr():
                tensor.data = values.to(tensor.device)
        self._kept.clear()


def _is_whole(tensor: torch.Tensor) -> bool:
    """Whether a tensor has memory for all its values; none has while the engine sleeps."""
    return tensor.untyped_storage().nbytes() >= tensor.nbytes


def _in_shared_memory(
    sources: Iterable[TensorSource], live: Sequence[torch.Tensor]
) -> list[torch.Tensor] | None:
    """Return new weights as they lie in this machine's shared memory; None where they do not, or
    not as the model computes with them."""
    found: list[torch.Tensor] = []
    for source, tensor in zip(sources, live, strict=True):
        if isinstance(source, Tensor) or tensor.is_cuda or dtype_of(source) != tensor.dtype:
            return None
        if not is_in_memory(source.data) or not tensor.numel():
            return None
        shared = torch.frombuffer(source.data, dtype=torch.uint8)
        if shared.data_ptr() % tensor.itemsize or shared.numel() != tensor.nbytes:
            return None
        found.append(shared.view(tensor.dtype).view(tensor.shape))
    return found


def _fill(target: torch.Tensor, source: TensorSource) -> None:
    in_place = target.device.type == "cpu" and target.is_contiguous() and target.numel()
    if not isinstance(source, torch.Tensor) and in_place and dtype_of(source) == target.dtype:
        np.copyto(target.view(-1).view(torch.uint8).numpy(), bytes_of(source))
    else:
        on_gpu = target.is_cuda
        target.copy_(as_tensor(source, pinned=on_gpu), non_blocking=on_gpu)
