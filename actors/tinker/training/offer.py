"""Which adapters a base model offers, and whether a stored one is such."""

from collections.abc import Mapping, Sequence

from ....schemas.tinker.datum import LoraSpec
from ....schemas.wire.errors import ConfigError, ModelError
from ...models.lora import layer_settings
from .adapter import Moments, tensor_shapes
from .folders import StoredAdapter
from .layers import LayerKind, LayerShape

MAX_RANK = 128


class AdapterOffer:
    """The adapters that one base model can have."""

    def __init__(
        self,
        base_model: str,
        base_path: str,
        layers: Mapping[str, LayerShape],
        linear: Sequence[str],
        max_rank: int,
    ) -> None:
        """`layers` are those that adapters may have a part in, `linear` all linear ones."""
        self._base_model = base_model
        self._base_path = base_path
        self._layers = layers
        self._linear = linear
        self._max_rank = max_rank

    def layers_of(self, spec: LoraSpec) -> dict[str, LayerShape]:
        """Return the layers that an adapter has a part in, by name."""
        wanted = _wanted(spec)
        return {name: shape for name, shape in self._layers.items() if wanted[shape.kind]}

    def target_names(self, spec: LoraSpec) -> list[str]:
        """Return what PEFT calls these layers: last names, unless others of the model have them."""
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
        for kind, wanted in _wanted(spec).items():
            if wanted and kind not in offered:
                raise ConfigError(
                    f"{self._base_model} has no linear layers for train_{kind}",
                    hint=f"set train_{kind}=False",
                )
        if not any(_wanted(spec).values()):
            raise ConfigError(
                "an adapter of no layers: train_attn, train_mlp and train_unembed are all False",
                hint="set one of them",
            )

    def spec_of(self, stored: StoredAdapter) -> LoraSpec:
        """Return what makes an adapter like a stored one; ConfigError if it is not offered."""
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
        wanted = tensor_shapes(spec.rank, self.layers_of(spec))
        for part in parts:
            found = {name: tuple(value.shape) for name, value in part.items()}
            wrong = [name for name in {*found, *wanted} if found.get(name) != wanted.get(name)]
            if wrong:
                name = min(wrong)
                raise ModelError(
                    f"the adapter in {stored.folder} has other layers than the model: {name} is "
                    f"{_shown(found.get(name))} there and {_shown(wanted.get(name))} here; it was "
                    f"made with {layer_settings(stored.folder)}",
                    hint="create the model with the same train_attn, train_mlp and train_unembed; "
                    "adapters of some layers of a kind are not trained here",
                )


def _wanted(spec: LoraSpec) -> dict[LayerKind, bool]:
    return {"attn": spec.train_attn, "mlp": spec.train_mlp, "unembed": spec.train_unembed}


def _shown(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else str(list(shape))
