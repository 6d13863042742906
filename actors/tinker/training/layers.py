"""Linear layers that add an adapter to what they compute: whichever is in use at the moment.

A model is wrapped once. Any number of adapters, of different ranks and on different layers, are
used with it one after the other, or each with some of the rows, and nothing of them stays behind:
in use is a table from a layer's name to two tensors.
"""

# torch and transformers leave some of their methods untyped.
# pyright: reportUnknownMemberType=false

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...training.model import Scorer

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


@dataclass(frozen=True)
class RowShare:
    """Some rows of what layers compute, and the adapter that is added to them."""

    num: int
    """Rows, of all that a layer is given."""
    by_layer: Mapping[str, LowRank]


class AdapterInUse:
    """Which adapter the layers of one model add, or which to which rows."""

    def __init__(self) -> None:
        """Begin with none: the layers compute their base."""
        self._by_layer: Mapping[str, LowRank] = {}
        self._shares: Sequence[RowShare] = ()

    @contextlib.contextmanager
    def using(self, by_layer: Mapping[str, LowRank]) -> Iterator[None]:
        """Use an adapter for a while; the layers that it does not name compute their base."""
        with self._set(by_layer, ()):
            yield

    @contextlib.contextmanager
    def sharing(self, shares: Sequence[RowShare]) -> Iterator[None]:
        """Use each adapter for its rows, in this order, for a while; they are all rows."""
        with self._set({}, shares):
            yield

    @contextlib.contextmanager
    def _set(self, *new: Any) -> Iterator[None]:
        before = self._by_layer, self._shares
        self._by_layer, self._shares = new
        try:
            yield
        finally:
            self._by_layer, self._shares = before

    def add(self, layer: str, rows: Tensor, whole: Tensor) -> Tensor:
        """Return a layer's products float[rows, out] with what is in use added to them.

        `whole` is nobody else's and may be written over. Raises RuntimeError where the layer is
        given other rows than those that are shared out.
        """
        if not self._shares:
            own = self._by_layer.get(layer)
            return whole if own is None else _added(own, rows, whole)
        named = [share.by_layer.get(layer) for share in self._shares]
        if not any(named):
            return whole
        sizes = [share.num for share in self._shares]
        if sum(sizes) != len(rows):
            raise RuntimeError(f"layer {layer} computes {len(rows)} rows of {sum(sizes)}")
        parts = cast("tuple[Tensor, ...]", rows.split(sizes))
        return whole + torch.cat(
            [_product(own, part, whole) for own, part in zip(named, parts, strict=True)]
        )


def _added(own: LowRank, rows: Tensor, whole: Tensor) -> Tensor:
    low = functional.linear(rows, own.a) * own.scale
    if whole.dtype == own.b.dtype:
        return whole.addmm_(low, own.b.t())
    # under autocast, which passes over products in place
    return whole + functional.linear(low, own.b)


def _product(own: LowRank | None, rows: Tensor, whole: Tensor) -> Tensor:
    """Return what an adapter adds to some rows, in the type of all; nothing without one."""
    if own is None:
        return whole.new_zeros(len(rows), whole.shape[1])
    return functional.linear(functional.linear(rows, own.a) * own.scale, own.b)


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
        rows = x.flatten(0, -2)
        whole = self._in_use.add(self._name, rows, self.base(rows))
        return cast(Tensor, whole.unflatten(0, x.shape[:-1]))


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


# The base model that all adapters share, as it is computed.


@dataclass(frozen=True)
class SharedBase:
    """The model that all adapters share, and how it is computed."""

    scorer: Scorer
    in_use: AdapterInUse
    microbatch_tokens: int
    """Columns of one forward and backward pass; a longer datum is one of its own."""
    logits_columns: int
    """Columns whose logits are held at once."""
    share_prompts: bool
    """Whether what data begin with in common is computed once."""
