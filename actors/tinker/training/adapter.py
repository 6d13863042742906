"""LoRA adapters: their tensors, gradients and optimiser, and the linear layers that use them.

All tensors of an adapter are views of one row of numbers, and so are their gradients and moments:
an update of the optimiser is one operation, whatever the number of layers. Each tensor begins at a
multiple of 64 bytes, which products like; what lies between is 0 and stays so.

The base model is wrapped once. Adapters of different ranks and layers are used with it one after
the other, or each with some of the rows: in use is a table from a layer's name to two tensors.
"""

# torch and transformers leave some of their methods untyped.
# pyright: reportUnknownMemberType=false
# torch leaves some of its methods untyped.
# safetensors leaves the types of its paths open.
# pyright: reportUnknownVariableType=false

import contextlib
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from ....schemas.tinker.datum import AdamParams, LoraSpec
from ....schemas.wire.errors import ConfigError, ModelError
from ...storage.files import storage_error
from ...training.model import Scorer
from .inputs import PendingWindow

# -- linear layers with an adapter -----------------------------------------------------------------

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

        `whole` is not shared and may be overwritten. Raises RuntimeError where the layer is
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
    low = functional.linear(rows, own.a.to(rows.dtype)) * own.scale
    return whole.addmm_(low, own.b.to(whole.dtype).t())


def _product(own: LowRank | None, rows: Tensor, whole: Tensor) -> Tensor:
    """Return what an adapter adds to some rows, in the type of all; nothing without one."""
    if own is None:
        return whole.new_zeros(len(rows), whole.shape[1])
    low = functional.linear(rows, own.a.to(rows.dtype)) * own.scale
    return functional.linear(low, own.b.to(low.dtype))


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
    collected: list[tuple[str, LayerKind]] = []
    for name, module in _modules(model):
        if type(module) is not nn.Linear:
            continue
        if module is head:
            collected.append((name, "unembed"))
        elif id(module) in inside:
            in_attention = any(word in part for part in name.split(".") for word in _ATTENTION)
            collected.append((name, "attn" if in_attention else "mlp"))
    return collected


def _modules(model: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    return cast(Any, model).named_modules()


# -- the shared base model -------------------------------------------------------------------------


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


ALPHA = 32
"""What an adapter adds is multiplied by ALPHA / rank, whatever its rank."""
_ALIGNED = 16
_BYTES = 4


@dataclass(frozen=True)
class Moments:
    """The state of an optimiser: AdamW's moments, by the names of the tensors."""

    step: int
    """Updates made."""
    first: Mapping[str, Tensor]
    second: Mapping[str, Tensor]


@dataclass(frozen=True)
class _Place:
    name: str
    layer: str
    shape: tuple[int, int]
    first: int

    def of(self, row: Tensor) -> Tensor:
        return row[self.first : self.first + math.prod(self.shape)].view(self.shape)


class Adapter:
    """A LoRA adapter that is trained; fresh, it changes nothing yet.

    The same specification gives the same tensors, whatever else there is.
    """

    def __init__(
        self,
        model_id: str,
        spec: LoraSpec,
        layers: Mapping[str, LayerShape],
        device: torch.device,
    ) -> None:
        """Make an adapter on all of `layers`; without a seed the model's id is one."""
        seed = _seed_of(model_id) if spec.seed is None else spec.seed
        self.spec = replace(spec, seed=seed)
        places = list(_places(spec.rank, layers))
        self._places = places
        size = _end(places[-1])
        self._weights = nn.Parameter(torch.zeros(size, device=device), requires_grad=False)
        self._parameters = {
            place.name: nn.Parameter(place.of(self._weights.data)) for place in places
        }
        self._optimizer = torch.optim.AdamW([self._weights], fused=True)
        self._draw(seed)
        self.by_layer = {
            layer: LowRank(
                self._parameters[_name(layer, "A")],
                self._parameters[_name(layer, "B")],
                ALPHA / spec.rank,
            )
            for layer in layers
        }
        """What each layer adds."""

    @property
    def num_bytes(self) -> int:
        """Bytes held: weights, and gradients and moments once there are some."""
        rows = 1 + (self._weights.grad is not None) + 2 * bool(self._optimizer.state)
        return rows * _BYTES * self._weights.numel()

    @property
    def num_steps(self) -> int:
        """Updates that its optimiser has made."""
        state = self._optimizer.state
        return int(state[self._weights]["step"]) if state else 0

    def tensors(self) -> dict[str, Tensor]:
        """Return copies of its tensors on the CPU, float32, by the names that PEFT gives them."""
        return self._named(self._weights)

    def put(self, tensors: Mapping[str, Tensor], moments: Moments | None) -> None:
        """Take over tensors, by name, and the optimiser's state; without one it begins anew."""
        self.clear()
        self._optimizer.state.clear()
        self._fill(self._weights.data, tensors)
        if moments is None or not moments.step:
            return
        rows = [torch.zeros_like(self._weights.data) for _ in range(2)]
        self._fill(rows[0], moments.first)
        self._fill(rows[1], moments.second)
        self._optimizer.state[self._weights] = {
            "step": torch.tensor(float(moments.step), device=self._weights.device),
            "exp_avg": rows[0],
            "exp_avg_sq": rows[1],
        }

    def moments(self) -> Moments:
        """Return copies of the optimiser's state."""
        if not self._optimizer.state:
            return Moments(0, {}, {})
        state = self._optimizer.state[self._weights]
        first, second = self._named(state["exp_avg"]), self._named(state["exp_avg_sq"])
        return Moments(self.num_steps, first, second)

    def rows(self) -> dict[str, Tensor]:
        """Return all that it has in memory, gradients included, as `put_rows` takes it back."""
        rows = {"weights": self._weights.data}
        if self._weights.grad is not None:
            rows[_GRADIENTS] = self._weights.grad
        rows |= self._optimizer.state.get(self._weights, {})
        return rows

    def put_rows(self, rows: Mapping[str, Tensor]) -> None:
        """Take back what `rows` returned: it is then as it was, to the bit."""
        self._weights.data.copy_(rows["weights"])
        self._optimizer.state.clear()
        self.put_pending(rows)
        state = {name: row for name, row in rows.items() if name not in ("weights", _GRADIENTS)}
        if state:
            device = self._weights.device
            self._optimizer.state[self._weights] = {
                name: row.to(device, copy=True) for name, row in state.items()
            }

    def put_pending(self, rows: Mapping[str, Tensor]) -> None:
        """Take back the gradients of what `rows` returned, if there are some."""
        if _GRADIENTS in rows:
            self.begin_gradients()
            cast(Tensor, self._weights.grad).copy_(rows[_GRADIENTS])

    def begin_gradients(self) -> None:
        """Make room for gradients, which then add up over backward passes."""
        if self._weights.grad is not None:
            return
        row = torch.zeros_like(self._weights.data)
        self._weights.grad = row
        for place in self._places:
            self._parameters[place.name].grad = place.of(row)

    def gradients(self) -> Tensor | None:
        """Return a copy of the gradients, None while there are none."""
        return None if self._weights.grad is None else self._weights.grad.clone()

    def put_gradients(self, row: Tensor | None) -> None:
        """Take back what `gradients` returned."""
        self.clear()
        if row is not None:
            cast(Tensor, self._weights.grad).copy_(row)

    def clear(self) -> None:
        """Forget gradients."""
        if self._weights.grad is not None:
            self._weights.grad.zero_()

    def step(self, params: AdamParams) -> dict[str, float]:
        """Make one update and forget the gradients; one that is not finite changes nothing.

        Returns `grad_norm:mean`, before clipping, and `skipped:sum`.
        """
        self.begin_gradients()
        clip = params.grad_clip_norm or math.inf
        norm = float(nn.utils.clip_grad_norm_([self._weights], clip))
        skipped = not math.isfinite(norm)
        if not skipped:
            self._optimizer.param_groups[0].update(
                lr=params.learning_rate,
                betas=(params.beta1, params.beta2),
                eps=params.eps,
                weight_decay=params.weight_decay,
            )
            self._optimizer.step()
        self.clear()
        return {"grad_norm:mean": norm, "skipped:sum": float(skipped)}

    def _draw(self, seed: int) -> None:
        """Draw the A of each layer as PEFT does, each by a generator of its own; B is 0."""
        for place in self._places:
            if place.name != _name(place.layer, "A"):
                continue
            generator = torch.Generator().manual_seed(_seed_of(f"{seed}:{place.layer}"))
            bound = 1 / math.sqrt(place.shape[1])
            drawn = torch.empty(place.shape).uniform_(-bound, bound, generator=generator)
            place.of(self._weights.data).copy_(drawn)

    def _named(self, row: Tensor) -> dict[str, Tensor]:
        return {place.name: place.of(row.detach()).to("cpu", copy=True) for place in self._places}

    def _fill(self, row: Tensor, tensors: Mapping[str, Tensor]) -> None:
        for place in self._places:
            place.of(row).copy_(tensors[place.name])


def check_adam(params: AdamParams) -> None:
    """Raise ConfigError for a parameter of the optimiser that makes no sense."""
    for name in ("beta1", "beta2"):
        value = getattr(params, name)
        if not 0 <= value < 1:
            raise ConfigError(f"{name} is {value}", hint="take a number from 0 to below 1")
    for name in ("learning_rate", "eps", "weight_decay", "grad_clip_norm"):
        value = getattr(params, name)
        if not 0 <= value < math.inf:
            raise ConfigError(
                f"{name} is {value}", hint="take a finite number that is not negative"
            )


def num_bytes_of(spec: LoraSpec, layers: Mapping[str, LayerShape]) -> int:
    """Return the most bytes that an adapter holds: weights, gradients and both moments."""
    return 4 * _BYTES * _end(list(_places(spec.rank, layers))[-1])


def tensor_shapes(rank: int, layers: Mapping[str, LayerShape]) -> dict[str, tuple[int, int]]:
    """Return the shapes of an adapter's tensors by the names that PEFT gives them."""
    return {place.name: place.shape for place in _places(rank, layers)}


def _name(layer: str, matrix: str) -> str:
    return f"base_model.model.{layer}.lora_{matrix}.weight"


def _places(rank: int, layers: Mapping[str, LayerShape]) -> Iterator[_Place]:
    first = 0
    for layer, shape in layers.items():
        for matrix, size in (("A", (rank, shape.num_in)), ("B", (shape.num_out, rank))):
            place = _Place(_name(layer, matrix), layer, size, first)
            yield place
            first = _end(place)


def _end(place: _Place) -> int:
    end = place.first + math.prod(place.shape)
    return -(-end // _ALIGNED) * _ALIGNED


def _seed_of(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 1


# Suspended models: one file each, with pending gradients, for the process that wrote it, and not
# synced to the disk. What survives a crash is the saved state and the operation log. A state that
# is saved before an optim_step has such a file, too, of the gradients alone.

_SPEC, _WINDOW, _GRADIENTS = "spec", "window", "gradients"


def write_suspended(
    file: Path, adapter: Adapter, window: PendingWindow, *, only_pending: bool = False
) -> None:
    """Write a model down, or only what is pending; raises StorageError."""
    fields = {_SPEC: json.dumps(asdict(adapter.spec)), _WINDOW: json.dumps(window.to_map())}
    rows = adapter.rows()
    if only_pending:
        rows = {name: row for name, row in rows.items() if name == _GRADIENTS}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: row.contiguous() for name, row in rows.items()}, file, fields)
    except Exception as error:
        failure = storage_error(file, error, SafetensorError)
        file.unlink(missing_ok=True)
        if failure is None:
            raise
        raise failure from error


def read_suspended(file: Path) -> tuple[LoraSpec, dict[str, Tensor], PendingWindow]:
    """Return what was written down; raises ModelError."""
    try:
        opened: Any = safe_open
        with opened(file, framework="pt") as handle:
            fields: dict[str, str] = handle.metadata()
            rows = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118  its own
        spec = TypeAdapter(LoraSpec).validate_json(fields[_SPEC])
        return spec, rows, PendingWindow.from_map(json.loads(fields[_WINDOW]))
    except (OSError, SafetensorError, KeyError, ValueError, ValidationError) as error:
        raise ModelError(
            f"{file} cannot be read: {error}", hint="start the trainer again: its log has the rest"
        ) from error
