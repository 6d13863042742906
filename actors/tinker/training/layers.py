"""Linear layers that add an adapter to what they compute: whichever is in use at the moment.

A model is wrapped once. Any number of adapters, of different ranks and on different layers, are
used with it one after the other, and nothing of them stays behind: in use is a table from a layer's
name to two tensors.
"""

# torch and transformers leave some of their methods untyped.
# pyright: reportUnknownMemberType=false

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from torch import Tensor, nn
from torch.nn import functional

LayerKind = Literal["attn", "mlp", "unembed"]
_ATTENTION = ("attn", "attention")


@dataclass(frozen=True)
class LowRank:
    """What an adapter adds to one layer: x A^T B^T times a scale."""

    a: Tensor
    """float32[rank, in]."""
    b: Tensor
    """float32[out, rank]."""
    scale: float


@dataclass
class AdapterInUse:
    """Which adapter the layers of one model add."""

    by_layer: Mapping[str, LowRank] = field(default_factory=dict[str, LowRank])

    @contextlib.contextmanager
    def using(self, by_layer: Mapping[str, LowRank]) -> Iterator[None]:
        """Use an adapter for a while; the layers that it does not name compute their base."""
        before, self.by_layer = self.by_layer, by_layer
        try:
            yield
        finally:
            self.by_layer = before


@dataclass(frozen=True)
class LayerShape:
    """A layer that adapters may have a part in."""

    kind: LayerKind
    num_in: int
    num_out: int


class AdaptedLinear(nn.Module):
    """A frozen linear layer, and beside it the adapter in use."""

    def __init__(self, base: nn.Linear, name: str, in_use: AdapterInUse) -> None:
        super().__init__()
        self.base = base
        self._name = name
        self._in_use = in_use

    @property
    def weight(self) -> Tensor:
        """The base's, which some models and the scorer look at."""
        return self.base.weight

    @property
    def bias(self) -> Tensor | None:
        """The base's."""
        return self.base.bias

    def forward(self, x: Tensor) -> Tensor:
        """Compute float[..., out] of float[..., in]."""
        added = self._in_use.by_layer.get(self._name)
        if added is None:
            return self.base(x)
        rows = x.flatten(0, -2)
        whole = self.base(rows)
        low = functional.linear(rows, added.a) * added.scale
        if whole.dtype == added.b.dtype:
            whole.addmm_(low, added.b.t())  # the base's product is nobody else's
        else:  # under autocast, which passes over products in place
            whole = whole + functional.linear(low, added.b)
        return whole.unflatten(0, x.shape[:-1])


def adapt(model: nn.Module) -> tuple[AdapterInUse, dict[str, LayerShape]]:
    """Freeze a causal language model and wrap its linear layers.

    Returns what is in use, and the layers by name.

    The layers are those of the decoder, and the output layer. Embeddings that the output layer
    shares its weights with are not touched: an adapter adds to what that layer computes.
    """
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    in_use = AdapterInUse()
    shapes: dict[str, LayerShape] = {}
    for name, kind in _linear_layers(model):
        base = cast(nn.Linear, model.get_submodule(name))
        model.set_submodule(name, AdaptedLinear(base, name, in_use))
        shapes[name] = LayerShape(kind, base.in_features, base.out_features)
    return in_use, shapes


def linear_names(model: nn.Module) -> list[str]:
    """Return the names of all linear layers of a model that is not wrapped yet."""
    return [name for name, module in _modules(model) if isinstance(module, nn.Linear)]


def _linear_layers(model: nn.Module) -> list[tuple[str, LayerKind]]:
    decoder: nn.Module = cast(Any, model).get_decoder()
    head: nn.Module | None = cast(Any, model).get_output_embeddings()
    inside = {id(module) for module in decoder.modules()}
    found: list[tuple[str, LayerKind]] = []
    for name, module in _modules(model):
        if type(module) is not nn.Linear:
            continue
        if module is head:
            found.append((name, "unembed"))
        elif id(module) in inside:
            in_attention = any(word in part for part in name.split(".") for word in _ATTENTION)
            found.append((name, "attn" if in_attention else "mlp"))
    return found


def _modules(model: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    return cast(Any, model).named_modules()
