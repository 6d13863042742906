"""What an engine holds of a request, from a model's config.json: keys, values, recurrent states.

Layers of full, sliding and chunked attention have keys and values of each token; those of latent
attention (MLA) have one compressed vector in place of both. A recurrent layer (linear attention, a
state space, a short convolution) has a state of fixed size. Configurations name kinds and widths
of layers differently; `tests/actors/engine/test_families.py` compares the sums with what the
transformers engine allocates.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

_RECURRENT = frozenset({"linear_attention", "mamba", "conv", "recurrent", "hybrid"})
_WITHOUT_KEYS = frozenset({"linear_attention", "mamba", "conv", "recurrent", "mlp", "moe"})
_LETTERS = {"M": "mamba", "*": "full_attention", "-": "mlp", "E": "moe"}
"""Layers in Nemotron H's pattern."""
_STATE_SPACES = frozenset({"mamba", "mamba2", "falcon_mamba"})
"""Families without attention."""


@dataclass(frozen=True)
class CacheWidths:
    """Numbers that are held of a request, over all layers."""

    token: int = 0
    """Of each token: keys and values, or what they are computed from."""
    conv: int = 0
    """Of each request: the last inputs of convolutions."""
    state: int = 0
    """Of each request: states of linear attention and state spaces, in float32."""
    window: int = 0
    """Tokens that some layers see; 0: all layers see all tokens."""
    is_latent: bool = False
    """Whether a token's numbers are those of all heads (latent attention)."""

    def token_bytes(self, num_bytes: int) -> int:
        """Return the bytes of a token in a dtype of this size."""
        return self.token * num_bytes

    def state_bytes(self, num_bytes: int) -> int:
        """Return the bytes of a request's recurrent states, beside its tokens."""
        return self.conv * num_bytes + self.state * 4


def cache_widths(text: Mapping[str, Any]) -> CacheWidths:
    """Return the widths for the text part of a config.json; raises KeyError, TypeError, ValueError.

    The errors are for a configuration that lacks a width.
    """
    kinds = layer_kinds(text)
    num_own = len(kinds) - int(text.get("num_kv_shared_layers") or 0)
    own: Any = text.get("per_layer_config") or {}
    keeps = [
        ({**text, **own.get(str(layer), {})}, kind)
        for layer, kind in enumerate(kinds[:num_own])
        if kind not in _WITHOUT_KEYS
    ]
    num_recurrent = sum(kind in _RECURRENT for kind in kinds)
    conv, state = _recurrent(text) if num_recurrent else (0, 0)
    return CacheWidths(
        token=sum(_keys_and_values(layer, kind) for layer, kind in keeps),
        conv=num_recurrent * conv,
        state=num_recurrent * state,
        window=_window(text, kinds),
        is_latent=bool(text.get("kv_lora_rank")),
    )


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a config.json that describes the text decoder."""
    inner = config.get("text_config")
    return cast("Mapping[str, Any]", inner) if isinstance(inner, Mapping) else config


def first_of(text: Mapping[str, Any], *names: str) -> int:
    """Return the first of several names' values; KeyError with the first name if there is none."""
    for name in names:
        value = text.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return int(value)
    raise KeyError(names[0])


def layer_kinds(text: Mapping[str, Any]) -> list[str]:
    """Return the kind of each layer, by transformers' names of kinds."""
    listed = text.get("layer_types") or text.get("layers_block_type")
    if listed:
        return [str(kind) for kind in cast("Iterable[Any]", listed)]
    if pattern := text.get("hybrid_override_pattern"):
        return [_LETTERS.get(letter, "mlp") for letter in str(pattern)]
    family = text.get("model_type")
    if family == "longcat_flash":  # each has two sublayers
        return ["full_attention"] * (2 * first_of(text, "num_layers", "num_hidden_layers"))
    num = first_of(text, "num_hidden_layers", "n_layer")
    if family in _STATE_SPACES:
        return ["mamba"] * num
    if family == "falcon_h1":
        return ["hybrid"] * num
    full = _full_layers(text, num)
    other = "conv" if "conv_L_cache" in text else "linear_attention"
    return ["full_attention" if layer in full else other for layer in range(num)]


def has_recurrent_layers(text: Mapping[str, Any]) -> bool:
    """Return whether a configuration names recurrent layers."""
    try:
        return not _RECURRENT.isdisjoint(layer_kinds(text))
    except (KeyError, TypeError, ValueError):
        return False


def _full_layers(text: Mapping[str, Any], num: int) -> set[int]:
    """Return the layers of full attention in a configuration that does not list kinds."""
    if (every := text.get("full_attention_interval")) is not None:
        return set(range(every - 1, num, every))
    if (every := text.get("attn_layer_period")) is not None:
        return set(range(int(text.get("attn_layer_offset") or 0), num, every))
    linear: Any = text.get("linear_attn_config")
    if isinstance(linear, Mapping):
        return {layer - 1 for layer in cast("Any", linear)["full_attn_layers"]}
    for name in ("attn_layer_indices", "full_attn_idxs"):
        if text.get(name) is not None:
            return set(text[name])
    return set(range(num))


def _window(text: Mapping[str, Any], kinds: list[str]) -> int:
    """Return the window or chunk of some layers, 0: none has one."""
    is_listed = bool(text.get("layer_types"))
    widths = {
        "sliding_attention": text.get("sliding_window"),
        "chunked_attention": text.get("attention_chunk_size"),
    }
    if not is_listed and text.get("use_sliding_window", True):
        return int(text.get("sliding_window") or 0)
    return max([int(width or 0) for kind, width in widths.items() if kind in kinds], default=0)


def _keys_and_values(text: Mapping[str, Any], kind: str) -> int:
    """Return the numbers of a token in a layer with attention."""
    if rank := text.get("kv_lora_rank"):
        return rank + first_of(text, "qk_rope_head_dim")
    heads = first_of(text, "num_attention_heads", "n_head")
    kv_heads = first_of({"": heads, **text}, "num_key_value_heads", "num_kv_heads", "")
    if text.get("multi_query") and not text.get("new_decoder_architecture"):
        kv_heads = 1
    size = int(text.get("head_dim") or first_of(text, "hidden_size", "n_embd") // heads)
    values = int(text.get("v_head_dim") or size)
    if kind == "sliding_attention" and text.get("model_type") == "mimo_v2_flash":
        kv_heads *= 2
    if kind == "full_attention" and text.get("global_head_dim"):  # Gemma 4
        size = values = int(text["global_head_dim"])
        kv_heads = int(text.get("num_global_key_value_heads") or kv_heads)
    return kv_heads * (size + values)


def _recurrent(text: Mapping[str, Any]) -> tuple[int, int]:
    """Return the numbers of a recurrent layer: of its convolution, and of its state."""
    if "conv_L_cache" in text:
        return first_of(text, "hidden_size") * first_of(text, "conv_L_cache"), 0
    linear: Any = text.get("linear_attn_config")
    own = cast("Mapping[str, Any]", linear) if isinstance(linear, Mapping) else text
    kernel = first_of(
        {"": 4, **text, **own},
        *("linear_conv_kernel_dim", "short_conv_kernel_size", "mamba_d_conv", "conv_kernel", ""),
    )
    if own is not text or text.get("linear_num_heads"):  # Kimi Linear
        heads = first_of(own, "linear_num_heads", "num_heads")
        size = first_of(own, "linear_head_dim", "head_dim")
        return 3 * heads * size * kernel, heads * size * size
    if text.get("linear_num_value_heads"):
        keys = first_of(text, "linear_num_key_heads") * first_of(text, "linear_key_head_dim")
        heads, size = text["linear_num_value_heads"], first_of(text, "linear_value_head_dim")
        state = heads * size * first_of(text, "linear_key_head_dim")
        return (2 * keys + heads * size) * kernel, state
    states = first_of({"": 0, **text}, "mamba_d_state", "ssm_state_size", "state_size", "")
    if not states:  # MiniMax: products of keys and values
        heads = first_of(text, "num_attention_heads")
        size = first_of({"": first_of(text, "hidden_size") // heads, **text}, "head_dim", "")
        return 0, heads * size * size
    wide = first_of({"": 2, **text}, "mamba_expand", "expand", "") * first_of(text, "hidden_size")
    if text.get("model_type") in _STATE_SPACES:
        wide = first_of({"": wide, **text}, "intermediate_size", "")
    inner, groups = first_of({"": wide, **text}, "mamba_d_ssm", ""), 0
    if heads := text.get("mamba_n_heads") or text.get("mamba_num_heads"):
        size = first_of({"": inner // heads, **text}, "mamba_d_head", "mamba_head_dim", "")
        inner = heads * size
        groups = first_of({"": 1, **text}, "mamba_n_groups", "n_groups", "")
    return (inner + 2 * groups * states) * kernel, inner * states
