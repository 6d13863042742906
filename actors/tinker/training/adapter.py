"""LoRA adapters that are trained: their tensors, gradients and optimiser.

All tensors of an adapter are views of one flat tensor, and so are their gradients and moments: an
update of the optimiser is one operation, whatever the number of layers. Each view begins at a
multiple of 64 bytes, for fast products; the gaps are 0 and stay so.

Adapters of different ranks and layers are used with the base model one after the other, or each
with some of the rows.
"""

# torch and transformers leave some of their methods untyped.
# pyright: reportUnknownMemberType=false
# safetensors leaves the types of its paths open.
# pyright: reportUnknownVariableType=false

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ....schemas.tinker.datum import AdamParams, LoraSpec
from ....schemas.wire.errors import ModelError
from ...policy.adapted_layers import AdaptedLayers, LowRank, sizes_of
from ...storage.files import storage_error
from ...training.model import Scorer
from .inputs import PendingWindow

# -- linear layers with an adapter -----------------------------------------------------------------

LayerKind = Literal["attn", "mlp", "unembed"]
_ATTENTION = ("attn", "attention")


@dataclass(frozen=True)
class RowShare:
    """Consecutive rows of a layer's input, and the adapter that is added to them."""

    num: int
    by_layer: Mapping[str, LowRank]


@dataclass(frozen=True)
class RowShares:
    """The adapters of a pass for several models: shares of all rows, in order."""

    shares: Sequence[RowShare]

    def add(self, layer: str, inputs: Tensor, whole: Tensor) -> Tensor | None:
        """Return a layer's output plus that of each share's adapter; None: unchanged.

        Raises RuntimeError for a layer that does not compute all rows.
        """
        adapters = [share.by_layer.get(layer) for share in self.shares]
        if not any(adapters):
            return None
        sizes = [share.num for share in self.shares]
        if sum(sizes) != len(inputs):
            raise RuntimeError(f"layer {layer} computes {len(inputs)} rows, not {sum(sizes)}")
        parts = cast("tuple[Tensor, ...]", inputs.split(sizes))
        products = [
            whole.new_zeros(len(part), whole.shape[1]) if own is None else own.product(part)
            for own, part in zip(adapters, parts, strict=True)
        ]
        return whole + torch.cat(products)


@dataclass(frozen=True)
class LayerShape:
    """A layer that adapters may have a part in."""

    kind: LayerKind
    num_in: int
    num_out: int


def shapes_of(layers: AdaptedLayers, head: nn.Module | None) -> dict[str, LayerShape]:
    """Return the kinds and sizes of a model's adapted layers by name; `head` is the output layer.

    An output layer that shares its weights with the embeddings leaves these as they are: an
    adapter adds to what the layer computes.
    """
    shapes: dict[str, LayerShape] = {}
    for name, layer in layers.linear.items():
        in_attention = any(word in part for part in name.split(".") for word in _ATTENTION)
        kind: LayerKind = "unembed" if layer is head else "attn" if in_attention else "mlp"
        shapes[name] = LayerShape(kind, *sizes_of(layer))
    return shapes


# -- the shared base model -------------------------------------------------------------------------


@dataclass(frozen=True)
class SharedBase:
    """The model that all adapters share, and the bounds of its passes."""

    scorer: Scorer
    layers: AdaptedLayers
    """Its linear layers, which add the adapters in use."""
    microbatch_tokens: int
    """Columns of one forward and backward pass; a longer datum has a pass of its own."""
    logits_columns: int
    """Columns whose logits are in memory at once."""
    share_prompts: bool
    """Whether common prefixes of data are computed once."""


ALPHA = 32
"""The product of an adapter is multiplied by ALPHA / rank."""
_ALIGNED = 16
_BYTES = 4


@dataclass(frozen=True)
class Moments:
    """The state of AdamW: moments by the names of the tensors."""

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
    """A LoRA adapter that is trained; a new one does not change the model.

    The same specification gives the same tensors, whatever other adapters exist.
    """

    def __init__(
        self,
        model_id: str,
        spec: LoraSpec,
        layers: Mapping[str, LayerShape],
        device: torch.device,
    ) -> None:
        """Make an adapter on `layers`; without a seed the model's id gives one."""
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
        """The adapter's part in each layer."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights, and of gradients and moments if there are any."""
        rows = 1 + (self._weights.grad is not None) + 2 * bool(self._optimizer.state)
        return rows * _BYTES * self._weights.numel()

    @property
    def num_steps(self) -> int:
        """Updates of its optimiser."""
        state = self._optimizer.state
        return int(state[self._weights]["step"]) if state else 0

    def tensors(self) -> dict[str, Tensor]:
        """Return copies of its tensors on the CPU, float32, by PEFT's names."""
        return self._named(self._weights)

    def set_tensors(self, tensors: Mapping[str, Tensor], moments: Moments | None) -> None:
        """Set tensors by name, and the optimiser's state; None resets the optimiser."""
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
        """Return all of its memory, gradients included, for `set_rows`."""
        rows = {"weights": self._weights.data}
        if self._weights.grad is not None:
            rows[_GRADIENTS] = self._weights.grad
        rows |= self._optimizer.state.get(self._weights, {})
        return rows

    def set_rows(self, rows: Mapping[str, Tensor]) -> None:
        """Restore what `rows` returned, to the bit."""
        self._weights.data.copy_(rows["weights"])
        self._optimizer.state.clear()
        self.set_pending(rows)
        state = {name: row for name, row in rows.items() if name not in ("weights", _GRADIENTS)}
        if state:
            device = self._weights.device
            self._optimizer.state[self._weights] = {
                name: row.to(device, copy=True) for name, row in state.items()
            }

    def set_pending(self, rows: Mapping[str, Tensor]) -> None:
        """Restore the gradients that `rows` returned, if any."""
        if _GRADIENTS in rows:
            self.begin_gradients()
            cast(Tensor, self._weights.grad).copy_(rows[_GRADIENTS])

    def begin_gradients(self) -> None:
        """Allocate gradients, to which backward passes add."""
        if self._weights.grad is not None:
            return
        row = torch.zeros_like(self._weights.data)
        self._weights.grad = row
        for place in self._places:
            self._parameters[place.name].grad = place.of(row)

    def gradients(self) -> Tensor | None:
        """Return a copy of the gradients, None if there are none."""
        return None if self._weights.grad is None else self._weights.grad.clone()

    def set_gradients(self, row: Tensor | None) -> None:
        """Restore what `gradients` returned."""
        self.clear()
        if row is not None:
            cast(Tensor, self._weights.grad).copy_(row)

    def clear(self) -> None:
        """Set gradients to 0."""
        if self._weights.grad is not None:
            self._weights.grad.zero_()

    def step(self, params: AdamParams) -> dict[str, float]:
        """Make one update and clear the gradients; with infinite or NaN gradients weights stay.

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
        """Draw the A of each layer as PEFT does, with one generator per layer; B is 0."""
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


def num_bytes_of(spec: LoraSpec, layers: Mapping[str, LayerShape]) -> int:
    """Return the most bytes of an adapter: weights, gradients and both moments."""
    return 4 * _BYTES * _end(list(_places(spec.rank, layers))[-1])


def tensor_shapes(rank: int, layers: Mapping[str, LayerShape]) -> dict[str, tuple[int, int]]:
    """Return the shapes of an adapter's tensors by PEFT's names."""
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


# Suspended models: one file each, with pending gradients, for the process that wrote it, so it is
# not synced to disk: after a crash, saved states and the operation log are used. A state that is
# saved between a loss and its optim_step has such a file with the gradients.

_SPEC, _WINDOW, _GRADIENTS = "spec", "window", "gradients"


def write_suspended(
    file: Path, adapter: Adapter, window: PendingWindow, *, only_pending: bool = False
) -> None:
    """Write a model, or only its gradients and window; raises StorageError."""
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
    """Return the content of a written model; raises ModelError."""
    try:
        opened: Any = safe_open
        with opened(file, framework="pt") as handle:
            fields: dict[str, str] = handle.metadata()
            rows = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118  its own
        spec = TypeAdapter(LoraSpec).validate_json(fields[_SPEC])
        return spec, rows, PendingWindow.from_map(json.loads(fields[_WINDOW]))
    except (OSError, SafetensorError, KeyError, ValueError, ValidationError) as error:
        raise ModelError(
            f"{file} cannot be read: {error}",
            hint="restart the trainer: it repeats the operations from its log",
        ) from error
