"""The shape of a model, from its config.json and the headers of its weights. No torch.

Numbers of weights are computed from the shape, or read exactly from safetensors headers if the
weights are present. A model that is neither a folder nor in the hub's cache is looked up by name
among published models.
"""

import json
import os
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, cast

from ..model_catalogue import CATALOGUE, catalogue_folder
from ..wire.errors import ModelError
from .cache_shape import CacheWidths, cache_widths, first_of, layer_kinds, text_config

_CONFIG = "config.json"
_MAX_CONFIG_BYTES = 16 << 20
_MAX_HEADER_BYTES = 100 << 20
"""Largest header of a weights file: safetensors' own bound."""
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_VISION = re.compile(r"(?:^|\.)(?:visual|vision_tower|vision_model)\.")
_EXPERTS = re.compile(r"\.experts\.")
_TUNED = re.compile(r"^meta-|-(?:base|chat|instruct|thinking|math|coder|2507)(?=-|$)")
"""Parts of published names that do not change the shape."""
_ORIGINAL = "original_max_position_embeddings"
_SCALED_BY_FACTOR = ("yarn", "linear")
"""Kinds of scaled rotary positions that may exceed `max_position_embeddings`."""
_MOVING = ("dynamic", "longrope", "su")
"""Kinds whose positions change beyond a length, and then for all sequences of a batch."""
_FACTORS = ("factor", "mscale")
"""What longrope has for short and for long sequences: `short_factor`, `long_factor`, …"""

_NO_CACHE = CacheWidths()


@dataclass(frozen=True)
class VisionShape:
    """The properties of a vision tower that determine memory."""

    hidden: int
    layers: int
    intermediate: int
    gated: bool
    """Whether its MLP multiplies two products, as in Qwen2.5-VL."""
    merge: int
    """Patches of an image that become one token of the decoder."""
    pixels: int
    """Numbers of a patch."""
    outputs: int
    """Width of the decoder."""

    @property
    def merged(self) -> int:
        """Width of the input of an image token."""
        return self.merge * self.hidden

    @property
    def weights(self) -> int:
        """Approximate number of the tower's weights, including the projection to the decoder."""
        mlp = (3 if self.gated else 2) * self.hidden * self.intermediate
        layers = self.layers * (4 * self.hidden**2 + mlp)
        return layers + self.pixels * self.hidden + self.merged * (self.merged + self.outputs)


@dataclass(frozen=True)
class ModelShape:
    """The properties of a decoder that determine memory and time."""

    kind: str
    """`model_type`."""
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    """Width of a dense layer's MLP; of a mixture, of all experts that read a token together."""
    vocab: int
    tied: bool
    """Whether the output layer is the embedding."""
    normed_heads: bool
    """Whether queries and keys are normed, as in Qwen3."""
    layer_weights: int
    """Weights of a decoder layer."""
    active_layer_weights: int
    """Of these, those that compute a token."""
    vision: VisionShape | None = None
    """What reads images, if something does."""
    vision_weights: int = 0
    """Weights of that."""
    quantization: str = ""
    """How the weights are quantised (`fp8`, `awq`), if they are."""
    experts: int = 0
    """Experts of a layer; 0: it is dense."""
    chosen_experts: int = 0
    """Experts that read a token."""
    cache: CacheWidths = _NO_CACHE
    """What an engine holds of a request."""

    @property
    def is_unknown(self) -> bool:
        """Whether only the number of weights is known."""
        return not self.hidden

    @property
    def embedding_weights(self) -> int:
        """Number of weights of the embedding, and of the output layer."""
        return self.vocab * self.hidden

    @property
    def root_weights(self) -> int:
        """Number of weights outside of the layers, without the vision tower."""
        return self.embedding_weights * (1 if self.tied else 2) + self.hidden

    @property
    def weights(self) -> int:
        """Number of all weights."""
        return self.layers * self.layer_weights + self.root_weights + self.vision_weights

    @property
    def active_weights(self) -> int:
        """Number of weights used for one token, including the output layer."""
        return self.layers * self.active_layer_weights + self.embedding_weights

    @property
    def attention_width(self) -> int:
        """Width of all query heads."""
        return self.heads * self.head_size

    @property
    def kv_width(self) -> int:
        """Width of all key heads, and of all value heads."""
        return self.kv_heads * self.head_size

    def linear_shapes(self) -> list[tuple[str, int, int]]:
        """Return name, inputs and outputs of a layer's linear layers, without experts."""
        hidden, wide, narrow = self.hidden, self.attention_width, self.kv_width
        attention = [
            ("q_proj", hidden, wide),
            ("k_proj", hidden, narrow),
            ("v_proj", hidden, narrow),
            ("o_proj", wide, hidden),
        ]
        if self.experts:
            return attention
        mlp = [("gate_proj", hidden, self.intermediate), ("up_proj", hidden, self.intermediate)]
        return [*attention, *mlp, ("down_proj", self.intermediate, hidden)]


def unknown_shape(weights: int) -> ModelShape:
    """Return a shape with a known number of weights only."""
    return ModelShape(
        kind="?",
        hidden=0,
        layers=1,
        heads=0,
        kv_heads=0,
        head_size=0,
        intermediate=0,
        vocab=0,
        tied=True,
        normed_heads=False,
        layer_weights=weights,
        active_layer_weights=weights,
    )


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    """Return the shape that a config.json describes.

    Raises ModelError if it lacks the dimensions of a decoder.
    """
    text = text_config(config)
    try:
        shape = _decoder(text, str(config.get("model_type", "?")))
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"the model's config.json does not say {error}, without which its memory cannot be "
            "estimated",
            hint="give a decoder as transformers saves it",
        ) from error
    quantization = cast("Mapping[str, Any]", config.get("quantization_config") or {})
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    tower = config.get("vision_config")
    kind = str(config.get("model_type", ""))
    vision = _tower(cast("Mapping[str, Any]", tower), kind, shape.hidden) if tower else None
    return replace(
        shape,
        tied=bool(tied),
        quantization=str(quantization.get("quant_method", "")),
        vision=vision,
        vision_weights=vision.weights if vision is not None else 0,
    )


def _decoder(text: Mapping[str, Any], kind: str) -> ModelShape:
    hidden = first_of(text, "hidden_size", "n_embd")
    heads = first_of(text, "num_attention_heads", "n_head")
    kv_heads = int(text.get("num_key_value_heads") or heads)
    head_size = int(text.get("head_dim") or hidden // heads)
    own = str(text.get("model_type", kind))
    normed = own.startswith("qwen3") or own in ("olmo2", "gemma3", "gemma3_text")
    biased = bool(text.get("attention_bias", own.startswith("qwen2")))
    wide, narrow = heads * head_size, kv_heads * head_size
    attention = 2 * hidden * (wide + narrow) + (wide + 2 * narrow if biased else 0)
    attention += 2 * hidden + (2 * head_size if normed else 0)
    experts = int(text.get("num_experts") or text.get("num_local_experts") or 0)
    width = first_of({"": 4 * hidden, **text}, "intermediate_size", "ffn_dim", "n_inner", "")
    mlp = active = 3 * hidden * width
    chosen = 0
    if experts:
        chosen = first_of(text, "num_experts_per_tok", "num_experts_per_token")
        each = int(text.get("moe_intermediate_size") or width)
        shared = int(text.get("shared_expert_intermediate_size") or 0)
        router = hidden * experts
        width = chosen * each + shared
        mlp = 3 * hidden * (experts * each + shared) + router
        active = 3 * hidden * width + router
    return ModelShape(
        kind=own,
        hidden=hidden,
        layers=len(layer_kinds(text)),
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        intermediate=width,
        vocab=int(text["vocab_size"]),
        tied=False,
        normed_heads=normed,
        layer_weights=attention + mlp,
        active_layer_weights=attention + active,
        experts=experts,
        chosen_experts=chosen,
        cache=cache_widths(text),
    )


def _tower(vision: Mapping[str, Any], kind: str, outputs: int) -> VisionShape:
    """Return the tower of a vision_config, approximate for an unknown kind."""
    # In Qwen2-VL, hidden_size is the width of the decoder.
    hidden = int(vision.get("embed_dim") or vision.get("hidden_size") or 0)
    width = int(vision.get("intermediate_size") or vision.get("mlp_ratio", 4) * hidden)
    patch = int(vision.get("patch_size") or 14)
    times = int(vision.get("temporal_patch_size") or 1)
    return VisionShape(
        hidden=hidden,
        layers=int(vision.get("depth") or vision.get("num_hidden_layers") or 0),
        intermediate=width,
        gated=kind.startswith("qwen2_5"),
        merge=int(vision.get("spatial_merge_size") or 1) ** 2,
        pixels=int(vision.get("in_channels") or vision.get("in_chans") or 3) * times * patch**2,
        outputs=outputs,
    )


def with_counted_weights(shape: ModelShape, folder: Path) -> ModelShape:
    """Return the shape with the number of weights in a folder's safetensors files, if any.

    It is unchanged for an adapter's folder and for unreadable files.
    """
    counted = dict.fromkeys(("layers", "experts", "vision", "root"), 0)
    try:
        stored = stored_shapes(folder, "model*.safetensors")
    except ModelError:
        return shape
    for name, sizes in stored.items():
        part = "vision" if _VISION.search(name) else "layers" if _LAYER.search(name) else "root"
        part = "experts" if part == "layers" and _EXPERTS.search(name) else part
        counted[part] += prod(sizes)
    if not counted["layers"] or shape.quantization:
        return shape
    experts, dense = counted["experts"] // shape.layers, counted["layers"] // shape.layers
    read = experts * shape.chosen_experts // max(1, shape.experts)
    return replace(
        shape,
        tied=counted["root"] < 2 * shape.embedding_weights,
        layer_weights=dense + experts,
        active_layer_weights=dense + read,
        vision_weights=counted["vision"],
    )


def stored_shapes(folder: Path, pattern: str = "*.safetensors") -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors in a folder's safetensors files, from their headers.

    Raises ModelError for a damaged file.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob(pattern)):
        for name, entry in _header(file).items():
            if name != "__metadata__":
                shapes[name] = tuple(entry["shape"])
    return shapes


def _header(file: Path) -> dict[str, Any]:
    """Read the header of a safetensors file, and check the file's length."""
    try:
        if not file.is_file():  # a pipe would be waited for
            raise ValueError("it is not a file")
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            if length > _MAX_HEADER_BYTES:
                raise ValueError("its header is too large")  # its bytes may be of any file
            header: dict[str, Any] = json.loads(opened.read(length))
        entries = [entry for name, entry in header.items() if name != "__metadata__"]
        size = 8 + length + max((entry["data_offsets"][1] for entry in entries), default=0)
        if file.stat().st_size < size:
            raise ValueError(f"it has {file.stat().st_size:,} of {size:,} bytes")
        return header
    except (OSError, ValueError, LookupError, TypeError, AttributeError, struct.error) as error:
        raise ModelError(
            f"{file} is damaged or cut: {error}",
            hint="copy or download the model's files again",
        ) from error


# -- finding a model -------------------------------------------------------------------------------


def find_shape(path: str) -> ModelShape | None:
    """Return a model's shape from its folder, the hub's cache, or its published name.

    None for an unknown model. Raises ModelError for a config.json that describes no decoder.
    """
    match = _find_config(path)
    if match is not None:
        config, place = match
        return with_counted_weights(shape_of(config), place)
    base = _base_of(path)
    if base is not None:
        return find_shape(base)
    known = _PUBLISHED.get(_TUNED.sub("", path.rsplit("/", 1)[-1].lower()))
    return None if known is None else shape_of(known)


def find_config(path: str) -> dict[str, Any] | None:
    """Return a model's local config.json, of an adapter that of its base; None: there is none."""
    match, seen = _find_config(path), {path}
    while match is None and (base := _base_of(path)) is not None and base not in seen:
        path, match = base, _find_config(base)
        seen.add(base)
    return None if match is None else match[0]


def find_max_positions(path: str) -> int:
    """Return the longest sequence of a model with a local config.json; 0: unknown."""
    config = find_config(path)
    return 0 if config is None else count_positions(config)


def count_positions(config: Mapping[str, Any]) -> int:
    """Return a model's longest sequence by its positions; 0: not in its configuration.

    Scaled rotary positions are multiplied by their factor. Positions that change beyond a length
    end there: a longer sequence would change other sequences of the batch, and its own earlier
    tokens.
    """
    text = text_config(config)
    longest = text.get("max_position_embeddings")
    if not isinstance(longest, int) or isinstance(longest, bool):
        return 0
    kinds = list(_rotary_kinds(text))
    moving = [_unmoved_positions(kind, text, longest) for kind in kinds if _type(kind) in _MOVING]
    return min(moving) if moving else max([longest, *(_scaled(kind, longest) for kind in kinds)])


def _rotary_kinds(text: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the scaling of rotary positions: once, or for each kind of layer."""
    scaling = text.get("rope_parameters") or text.get("rope_scaling")
    if not isinstance(scaling, Mapping):
        return
    values = cast("Mapping[str, Any]", scaling)
    kinds = [values] if _type(values) is not None else values.values()
    yield from (cast("Mapping[str, Any]", kind) for kind in kinds if isinstance(kind, Mapping))


def _type(kind: Mapping[str, Any]) -> Any:
    return kind.get("rope_type", kind.get("type"))


def _unmoved_positions(kind: Mapping[str, Any], text: Mapping[str, Any], longest: int) -> int:
    """Return the length of unchanged positions; dynamic ones change beyond the longest.

    Those of longrope with equal factors for short and long sequences never do.
    """
    pairs = [[kind.get(f"{length}_{name}") for length in ("short", "long")] for name in _FACTORS]
    is_fixed = pairs[0][0] is not None and all(short == long for short, long in pairs)
    if is_fixed or _type(kind) == "dynamic":
        return longest
    original = kind.get(_ORIGINAL) or text.get(_ORIGINAL)
    return min(longest, original) if isinstance(original, int) else longest


def _scaled(kind: Mapping[str, Any], longest: int) -> int:
    """Return the length of scaled positions; 0: not scaled, or included in `longest`."""
    if _type(kind) not in _SCALED_BY_FACTOR:
        return 0
    factor = kind.get("factor")
    original = kind.get(_ORIGINAL) or longest
    if not isinstance(factor, int | float) or not isinstance(original, int | float):
        return 0
    return int(factor * original)


def refuse_long_sequences(path: str, max_tokens: int, max_positions: int) -> None:
    """Raise ModelError for sequences longer than a model's positions; 0: unknown."""
    if 0 < max_positions < max_tokens:
        raise ModelError(
            f"sequences of up to {max_tokens} tokens are asked for, model {path} has positions "
            f"for {max_positions}",
            hint="lower rollout.max_prompt_tokens or rollout.max_response_tokens (and "
            "generator.max_context where it is set), or take a model with more positions; those "
            "that change beyond a length (rope_type dynamic, longrope) count up to there: copy "
            "long_factor (and long_mscale) of longrope to short_factor (and short_mscale) in "
            "config.json, and they no longer change",
        )


def _find_config(path: str) -> tuple[dict[str, Any], Path] | None:
    """Return a model's config.json and its folder; None if it is not present."""
    for place in (_folder_of(path), *_cached(path)):
        config = _read(place / _CONFIG)
        if config is not None:
            return config, place
    return None


def _base_of(path: str) -> str | None:
    """Return the base model named in an adapter's folder."""
    settings = _read(_folder_of(path) / "adapter_config.json")
    base = None if settings is None else settings.get("base_model_name_or_path")
    return base if isinstance(base, str) else None


def _folder_of(path: str) -> Path:
    return catalogue_folder(path) if path in CATALOGUE else _home(path)


def _home(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError:  # the user does not exist
        return Path(path)


def _read(file: Path) -> dict[str, Any] | None:
    try:
        if not file.is_file() or file.stat().st_size > _MAX_CONFIG_BYTES:
            return None
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None


def _cached(path: str) -> list[Path]:
    """Return the folders of a model in the hub's cache, newest first."""
    if path.count("/") > 1 or path.startswith(("/", ".", "~")):
        return []
    caches = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    home = Path(os.environ.get("HF_HOME", caches / "huggingface")).expanduser()
    cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    snapshots = cache / f"models--{path.replace('/', '--')}" / "snapshots"
    match = snapshots.glob("*") if snapshots.is_dir() else ()
    return sorted(match, key=lambda folder: folder.stat().st_mtime, reverse=True)


def _published(kind: str, tied: bool, vocab: int, sizes: str, head_size: int = 0) -> dict[str, Any]:
    """Return a config with width, layers, heads, key-value heads and MLP width."""
    hidden, layers, heads, kv_heads, width = map(int, sizes.split())
    return {
        "model_type": kind,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": width,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        **({"head_dim": head_size} if head_size else {}),
    }


_PUBLISHED = {
    "qwen2.5-0.5b": _published("qwen2", True, 151936, "896 24 14 2 4864"),
    "qwen2.5-1.5b": _published("qwen2", True, 151936, "1536 28 12 2 8960"),
    "qwen2.5-3b": _published("qwen2", True, 151936, "2048 36 16 2 11008"),
    "qwen2.5-7b": _published("qwen2", False, 152064, "3584 28 28 4 18944"),
    "qwen2.5-14b": _published("qwen2", False, 152064, "5120 48 40 8 13824"),
    "qwen2.5-32b": _published("qwen2", False, 152064, "5120 64 40 8 27648"),
    "qwen2.5-72b": _published("qwen2", False, 152064, "8192 80 64 8 29568"),
    "qwen3-0.6b": _published("qwen3", True, 151936, "1024 28 16 8 3072", 128),
    "qwen3-1.7b": _published("qwen3", True, 151936, "2048 28 16 8 6144", 128),
    "qwen3-4b": _published("qwen3", True, 151936, "2560 36 32 8 9728", 128),
    "qwen3-8b": _published("qwen3", False, 151936, "4096 36 32 8 12288", 128),
    "qwen3-14b": _published("qwen3", False, 151936, "5120 40 40 8 17408", 128),
    "qwen3-32b": _published("qwen3", False, 151936, "5120 64 64 8 25600", 128),
    "qwen3-30b-a3b": {
        **_published("qwen3_moe", False, 151936, "2048 48 32 4 6144", 128),
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    "llama-3.2-1b": _published("llama", True, 128256, "2048 16 32 8 8192", 64),
    "llama-3.2-3b": _published("llama", True, 128256, "3072 28 24 8 8192", 128),
    "llama-3.1-8b": _published("llama", False, 128256, "4096 32 32 8 14336", 128),
    "llama-3.1-70b": _published("llama", False, 128256, "8192 80 64 8 28672", 128),
}
"""Configurations of published models, by hub name without `_TUNED`."""
