"""Adapters in folders: PEFT's files, and the optimiser's state in a separate file.

`adapter_model.safetensors` and `adapter_config.json` are PEFT's; `tinkermq.json` records the
specification and the number of updates, `optimizer.safetensors` the moments. A folder is written
under a hidden name and renamed. Folders of other programs are read, too, if their tensors are those
of an adapter here: another alpha is multiplied into B, and layers of a smaller rank are padded with
zeros, which stay 0.
"""

# peft and safetensors leave some of their methods untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from peft import LoraConfig
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ....schemas.config.sections import ADAPTER_CONFIG
from ....schemas.tinker.datum import LoraSpec
from ....schemas.wire.errors import ConfigError, ModelError, NotFoundError
from ...policy.lora import layer_settings, read_lora, uniform
from ...storage import files
from .adapter import ALPHA, LayerKind, LayerShape, Moments, tensor_shapes

_WEIGHTS = "adapter_model.safetensors"
_OPTIMIZER = "optimizer.safetensors"
_OURS = "tinkermq.json"
_FIRST, _SECOND = "exp_avg.", "exp_avg_sq."


@dataclass(frozen=True)
class AdapterFile:
    """The content of `tinkermq.json`."""

    base_model: str
    spec: LoraSpec
    optimizer_steps: int
    """Number of updates, with or without the moments."""
    has_optimizer: bool


@dataclass(frozen=True)
class StoredAdapter:
    """The adapter in a folder."""

    folder: Path
    base_model: str
    """The name of its base, or the path in PEFT's file; empty: unknown."""
    rank: int
    spec: LoraSpec | None
    """Its specification; None for another program's adapter."""
    tensors: Mapping[str, Tensor]
    """float32, for the scale ALPHA / rank."""
    moments: Moments | None
    """None if they were not requested."""


def write_adapter(
    folder: Path,
    *,
    base_model: str,
    base_path: str,
    targets: Sequence[str],
    spec: LoraSpec,
    tensors: Mapping[str, Tensor],
    steps: int,
    moments: Moments | None,
    lasting: bool = True,
) -> None:
    """Write an adapter to the folder of one save, completely or not at all; raises StorageError.

    A `lasting` one is synced to disk, with the digests of its files.
    """
    ours = AdapterFile(base_model, spec, steps, moments is not None)
    with files.new_folder(folder, SafetensorError, lasting=lasting) as new:
        save_file(dict(tensors), new / _WEIGHTS, metadata={"format": "pt"})
        _write_json(new / ADAPTER_CONFIG, _peft_config(spec.rank, targets, base_path))
        _write_json(new / _OURS, asdict(ours))
        if moments is not None:
            named = {_FIRST + name: value for name, value in moments.first.items()}
            named |= {_SECOND + name: value for name, value in moments.second.items()}
            save_file(named, new / _OPTIMIZER)


def read_adapter(folder: Path, *, with_optimizer: bool) -> StoredAdapter:
    """Read an adapter, with the optimiser's state if requested.

    Raises NotFoundError for a folder without an adapter, StorageError for a damaged one, ModelError
    for another kind of adapter or a missing optimiser state.
    """
    if not (folder / ADAPTER_CONFIG).is_file():
        raise NotFoundError(f"there is no adapter in {folder}", hint="see what was saved")
    files.check_digests(folder)
    settings = _read_json(folder / ADAPTER_CONFIG)
    ours = _read_ours(folder)
    if with_optimizer and not (ours is not None and ours.has_optimizer):
        raise ModelError(
            f"the adapter in {folder} was saved without the optimiser's state",
            hint="load it without the optimiser, or save it with `save_state`",
        )
    config, stored = read_lora(folder)
    tensors = {name: value.float() for name, value in uniform(stored, config).items()}
    for name, value in tensors.items():
        if ".lora_B." in name:
            value.mul_(config.max_rank / ALPHA)
    return StoredAdapter(
        folder=folder,
        base_model=ours.base_model if ours else settings.get("base_model_name_or_path") or "",
        rank=config.max_rank,
        spec=ours.spec if ours else None,
        tensors=tensors,
        moments=_moments(folder, ours) if with_optimizer and ours else None,
    )


def _peft_config(rank: int, targets: Sequence[str], base_path: str) -> dict[str, Any]:
    made = LoraConfig(
        r=rank,
        lora_alpha=ALPHA,
        lora_dropout=0.0,
        target_modules=list(targets),
        task_type="CAUSAL_LM",
        base_model_name_or_path=base_path,
        inference_mode=True,
    )
    return {**made.to_dict(), "target_modules": list(targets)}  # PEFT has a set, in any order


def _read_ours(folder: Path) -> AdapterFile | None:
    file = folder / _OURS
    if not file.is_file():
        return None
    try:
        return TypeAdapter(AdapterFile).validate_json(file.read_bytes())
    except (OSError, ValidationError) as error:
        raise ModelError(f"{file} cannot be read: {error}", hint="copy the folder again") from error


def _moments(folder: Path, ours: AdapterFile) -> Moments:
    if not ours.optimizer_steps:
        return Moments(0, {}, {})
    named = _load(folder / _OPTIMIZER)
    first, second = (
        {name.removeprefix(item): value for name, value in named.items() if name.startswith(item)}
        for item in (_FIRST, _SECOND)
    )
    return Moments(ours.optimizer_steps, first, second)


def _load(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file} cannot be read: {error}", hint="copy the folder again") from error


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {error}", hint="copy the folder again") from error


def _write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, indent=1, sort_keys=True, default=str), encoding="utf-8")


# -- which adapters a base model offers ------------------------------------------------------------

MAX_RANK = 128


class AdapterOffer:
    """The adapters that can be trained on one base model."""

    def __init__(
        self,
        base_model: str,
        base_path: str,
        layers: Mapping[str, LayerShape],
        linear: Sequence[str],
        max_rank: int,
    ) -> None:
        """`layers` can have adapters, `linear` are all linear layers of the model."""
        self._base_model = base_model
        self._base_path = base_path
        self._layers = layers
        self._linear = linear
        self._max_rank = max_rank

    def layers_of(self, spec: LoraSpec) -> dict[str, LayerShape]:
        """Return the layers of an adapter by name."""
        kinds = _trained_kinds(spec)
        return {name: shape for name, shape in self._layers.items() if kinds[shape.kind]}

    def target_names(self, spec: LoraSpec) -> list[str]:
        """Return PEFT's names of these layers: last parts, unless other layers have them, too."""
        layers = self.layers_of(spec)
        short = {layer.rpartition(".")[2] for layer in layers}
        others = (name.rpartition(".")[2] for name in self._linear if name not in layers)
        return sorted(layers if short & set(others) else short)

    def check(self, spec: LoraSpec) -> None:
        """Raise ConfigError for a rank or layers that are not offered."""
        if not 1 <= spec.rank <= self._max_rank:
            raise ConfigError(
                f"rank {spec.rank} is not offered", hint=f"take one from 1 to {self._max_rank}"
            )
        offered = {shape.kind for shape in self._layers.values()}
        for kind, is_trained in _trained_kinds(spec).items():
            if is_trained and kind not in offered:
                raise ConfigError(
                    f"{self._base_model} has no linear layers for train_{kind}",
                    hint=f"set train_{kind}=False",
                )
        if not any(_trained_kinds(spec).values()):
            raise ConfigError(
                "the adapter has no layers: train_attn, train_mlp and train_unembed are all False",
                hint="set one of them",
            )

    def spec_of(self, stored: StoredAdapter) -> LoraSpec:
        """Return the specification of a stored adapter; raises ConfigError if it is not offered."""
        spec = stored.spec
        if spec is None:
            has = {
                shape.kind
                for name, shape in self._layers.items()
                if not stored.tensors.keys().isdisjoint(tensor_shapes(stored.rank, {name: shape}))
            }
            spec = LoraSpec(stored.rank, None, "attn" in has, "mlp" in has, "unembed" in has)
        self.check(spec)
        return spec

    def check_stored(self, stored: StoredAdapter, spec: LoraSpec) -> None:
        """Raise ModelError for a stored adapter of another base, rank or other layers."""
        if stored.base_model not in ("", self._base_model, self._base_path):
            raise ModelError(
                f"the adapter in {stored.folder} belongs to {stored.base_model}, this is "
                f"{self._base_model}",
                hint="load it into a model on its own base",
            )
        if stored.rank != spec.rank:
            raise ModelError(
                f"the adapter in {stored.folder} has rank {stored.rank}, the model {spec.rank}",
                hint=f"create the model with rank {stored.rank}",
            )
        moments = stored.moments or Moments(0, {}, {})
        parts = [stored.tensors, *([moments.first, moments.second] if moments.step else [])]
        expected = tensor_shapes(spec.rank, self.layers_of(spec))
        for part in parts:
            shapes = {name: tuple(value.shape) for name, value in part.items()}
            names = {*shapes, *expected}
            wrong = [name for name in names if shapes.get(name) != expected.get(name)]
            if wrong:
                name = min(wrong)
                raise ModelError(
                    f"the adapter in {stored.folder} has other layers than the model: {name} is "
                    f"{_shown(shapes.get(name))} there and {_shown(expected.get(name))} here; it "
                    f"was made with {layer_settings(stored.folder)}",
                    hint="create the model with the same train_attn, train_mlp and train_unembed; "
                    "adapters of some layers of a kind are not trained here",
                )


def _trained_kinds(spec: LoraSpec) -> dict[LayerKind, bool]:
    return {"attn": spec.train_attn, "mlp": spec.train_mlp, "unembed": spec.train_unembed}


def _shown(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else str(list(shape))
