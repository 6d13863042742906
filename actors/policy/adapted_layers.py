"""LoRA adapters on the linear layers of one model, selected for each forward pass.

The layers are not replaced: hooks add the adapters' output to the layers' output. Engines and the
trainer of a Tinker service differ in which rows have which adapter (`Addition`).

Shape letters: X rows of a layer, R rank.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from ...schemas.wire.errors import ModelError
from .layers import decoder_of
from .lora import has_adapter


@dataclass(frozen=True, slots=True)
class LowRank:
    """An adapter's addition to one layer: x A^T B^T times a scale."""

    a: Tensor
    """float[R, in]."""
    b: Tensor
    """float[out, R]."""
    scale: float = 1.0

    def add(self, inputs: Tensor, whole: Tensor) -> Tensor:
        """Return a layer's output float[..., out] plus the adapter's; overwrites `whole`."""
        low_XR = self._lower(inputs).flatten(0, -2)
        return whole.flatten(0, -2).addmm_(low_XR, self.b.to(whole.dtype).t()).view(whole.shape)

    def product(self, inputs: Tensor) -> Tensor:
        """Return the adapter's products float[..., out]."""
        low = self._lower(inputs)
        return functional.linear(low, self.b.to(low.dtype))

    def _lower(self, inputs: Tensor) -> Tensor:
        low = functional.linear(inputs, self.a.to(inputs.dtype))
        return low if self.scale == 1.0 else low * self.scale


class Addition(Protocol):
    """The adapters of one forward pass."""

    def add(self, layer: str, inputs: Tensor, whole: Tensor) -> Tensor | None:
        """Return a layer's output float[..., out] plus that of adapters; None: unchanged.

        `inputs` are the layer's, float[..., in]. `whole` may be overwritten.
        """
        ...


@dataclass(frozen=True, slots=True)
class OneAdapter:
    """One adapter for all rows."""

    by_layer: Mapping[str, LowRank]

    def add(self, layer: str, inputs: Tensor, whole: Tensor) -> Tensor | None:
        """See Addition."""
        own = self.by_layer.get(layer)
        return None if own is None else own.add(inputs, whole)


def sizes_of(layer: nn.Module) -> tuple[int, int]:
    """Return the inputs and outputs of a linear layer; GPT-2's hold a transposed weight."""
    outputs, inputs = cast(Tensor, layer.weight).shape
    return (outputs, inputs) if isinstance(layer, Conv1D) else (inputs, outputs)


class AdaptedLayers:
    """The linear layers of a model's decoder and its output layer."""

    def __init__(self, model: nn.Module, *, flatten: bool = False) -> None:
        """There are no hooks before `open`.

        With `flatten` layers and adapters read one flattened input, float[X, in], so that its
        gradient is the sum of theirs before gradients of other layers are added.
        """
        self._model = model
        self._flatten = flatten
        self._addition: Addition | None = None
        self._is_open = False
        self._linear: dict[str, nn.Module] = {}

    @property
    def linear(self) -> dict[str, nn.Module]:
        """The layers by name; raises ModelError for a model with an adapter of its own."""
        if not self._linear:
            if has_adapter(self._model):
                raise ModelError(
                    "the model has an adapter of its own", hint="start with its base model"
                )
            decoder: nn.Module = decoder_of(self._model)
            head: nn.Module | None = cast(Any, self._model).get_output_embeddings()
            inside = {id(module) for module in decoder.modules()} | {id(head)}
            modules: Iterable[tuple[str, nn.Module]] = cast(Any, self._model).named_modules()
            self._linear = {
                name: module
                for name, module in modules
                if isinstance(module, nn.Linear | Conv1D) and id(module) in inside
            }
        return self._linear

    def open(self) -> None:
        """Set the hooks, in the computing thread; later calls change nothing."""
        if not self._is_open:
            for name, layer in self.linear.items():
                self._set_hooks(name, layer)
            self._is_open = True

    @contextlib.contextmanager
    def using(self, addition: Addition) -> Iterator[None]:
        """Add adapters in the forward passes of this block."""
        before, self._addition = self._addition, addition
        try:
            yield
        finally:
            self._addition = before

    def _set_hooks(self, name: str, layer: nn.Module) -> None:
        leading = torch.Size()

        def flatten(_: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
            nonlocal leading
            leading = inputs[0].shape[:-1]
            return inputs[0].flatten(0, -2)

        def add(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
            if self._addition is None:
                return None
            return self._addition.add(name, inputs[0], output)

        def unflatten(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            return cast(Tensor, output.unflatten(0, leading))

        if self._flatten:
            layer.register_forward_pre_hook(flatten)
        layer.register_forward_hook(add)
        if self._flatten:
            layer.register_forward_hook(unflatten)
