"""What a config.json says of the kind of a model, and which kinds are refused. No torch."""

import re
from collections.abc import Mapping
from typing import Any, cast

from ..wire.errors import ConfigError, ModelError
from .cache_shape import has_recurrent_layers, text_config
from .model_shape import count_positions

_NO_DECODER = re.compile(r"For(?!CausalLM|ConditionalGeneration|ImageTextToText|Multimodal)\w+\Z")
"""Ends of classes of transformers that generate no text, such as BertForMaskedLM."""


def refuse_without_decoder(path: str, config: Mapping[str, Any]) -> None:
    """Raise ModelError for an encoder-decoder, a classifier, or another model without a decoder.

    transformers would load a classifier with a random output layer.
    """
    listed = config.get("architectures")
    names = [str(name) for name in cast("list[Any]", listed)] if isinstance(listed, list) else []
    named = ", ".join(names) or str(config.get("model_type", "?"))
    if config.get("is_encoder_decoder"):
        raise ModelError(
            f"{path} is an encoder-decoder ({named}), and only decoders are trained and served",
            hint="name a model that decodes its own prompt, such as Qwen3 or Llama",
        )
    if any(name.endswith("ForSequenceClassification") for name in names):
        raise ModelError(
            f"{path} is a classifier or reward model ({named}), which generates nothing",
            hint="name a language model; a reward model is used through env.reward with "
            "source=endpoint",
        )
    if names and all(map(_NO_DECODER.search, names)):
        raise ModelError(
            f"{path} has no text decoder ({named}), and generates nothing",
            hint="name a language model, such as Qwen3 or Llama",
        )


def refuse_quantised(path: str, config: Mapping[str, Any]) -> None:
    """Raise ModelError for quantised weights, which only vLLM computes, and only to serve them."""
    for part in (config, text_config(config)):
        settings = part.get("quantization_config")
        if isinstance(settings, Mapping):
            method = cast("Mapping[str, Any]", settings).get("quant_method", "unknown method")
            raise ModelError(
                f"the weights of model {path} are quantised ({method}), and learners and the "
                "transformers engine compute with whole ones",
                hint="take the model's version in bfloat16; with generator.engine=vllm a quantised "
                "model is served and evaluated, not trained",
            )


def refuse_long_windows(path: str, config: Mapping[str, Any]) -> None:
    """Raise ModelError for layers with a window that is longer than the model's context.

    A window that no layer is named to have is often longer (Phi 3, Qwen2), and has no effect.
    """
    text, positions = text_config(config), count_positions(config)
    kinds: Any = text.get("layer_types")
    window: Any = text.get("sliding_window")
    if not isinstance(kinds, list) or not isinstance(window, int):
        return
    if "sliding_attention" in kinds and 0 < positions < window:
        raise ModelError(
            f"the sliding layers of model {path} see {window} tokens, and it has positions for "
            f"{positions}",
            hint="correct sliding_window or max_position_embeddings in config.json: one of them "
            "belongs to another model",
        )


_WITH_SINKS = frozenset(
    {"deepseek_v4", "gpt_oss", "granite_swa", "granitemoe_swa", "hy_v4", "mimo_v2_flash"}
)
SINKS = "its attention has sinks"
_CHUNKED = frozenset({"llama4_text"})
_WITH_INDEX = frozenset({"axk2", "deepseek_v32", "glm5_next", "glm_moe_dsa", "qwen4_exp"})
"""Families whose configuration need not name the kind of its layers."""


def needs_masks(text: Mapping[str, Any]) -> str | None:
    """Return why kernels without masks cannot compute a model; None: they can, as far as is known.

    `text` is the text part of its config.json, which may leave out the kinds of layers.
    """
    kind, layers = text.get("model_type"), text.get("layer_types")
    if kind in _WITH_SINKS:
        return SINKS
    if "chunked_attention" in layers if layers else kind in _CHUNKED:
        return "its attention is chunked"
    if has_index(text):
        return "its attention chooses keys by an index, in a mask"
    return None


def has_index(text: Mapping[str, Any]) -> bool:
    """Return whether layers choose the keys that they see (DeepSeek V3.2)."""
    return text.get("model_type") in _WITH_INDEX or "indexed_attention" in (
        text.get("layer_types") or ()
    )


def refuse_without_masks(attention: str, reason: str | None) -> None:
    """Raise ConfigError for a `model.attn_implementation` without masks, if a model needs them."""
    if reason is not None and attention not in ("auto", "sdpa"):
        raise ConfigError(
            f"model.attn_implementation={attention} cannot compute this model: {reason}",
            hint="set model.attn_implementation=sdpa, or auto",
        )


def refuse_dividing(text: Mapping[str, Any], size: int, *, is_recurrent: bool = False) -> None:
    """Raise ConfigError unless `size` processes can share the columns of a model's rows.

    `is_recurrent`: it has recurrent layers that its configuration does not name.
    """
    refused = f"learner.context_parallel={size} cannot divide"
    if is_recurrent or has_recurrent_layers(text):
        raise ConfigError(
            f"{refused} this model: it has recurrent layers, whose state passes through all "
            "columns of a row in order",
            hint="set learner.context_parallel=1",
        )
    if has_index(text):
        raise ConfigError(
            f"{refused} this model: an index over all columns chooses the keys of its attention",
            hint="set learner.context_parallel=1",
        )
    for name, numbers in text.items():
        if not name.endswith(("attention_heads", "key_value_heads")):
            continue
        for number in cast("list[Any]", numbers if isinstance(numbers, list) else [numbers]):
            if isinstance(number, int) and number % size:
                raise ConfigError(
                    f"{refused} a model with {name}={number}",
                    hint="choose a divisor of its numbers of heads",
                )


_NOT_RECURRENT = (
    "vLLM 0.32 has no class for it, and what it runs through transformers has no recurrent layers"
)
VLLM_REFUSALS: Mapping[str, str] = {
    "bamba": _NOT_RECURRENT,
    "minimax": _NOT_RECURRENT,
    "recurrent_gemma": _NOT_RECURRENT,
}
"""Why vLLM does not compute a family, by its `model_type`."""


STALE_IN_VLLM = ("ernie4_5_moe", "lfm2_moe")
"""Families of which vLLM 0.32 has not been seen to compute new versions as the learner does."""


BY_DRAFT = "draft_model"
"""vLLM's method for a draft that is a whole model."""
_PARTS = ("eagle", "mtp", "medusa", "mlp_speculator")
"""In the names of drafts that are parts of a model: vLLM's method for each."""


def refuse_draft(
    draft: str, config: Mapping[str, Any], path: str, policy: Mapping[str, Any] | None
) -> None:
    """Raise ModelError for a model that cannot propose tokens for a policy.

    `config` is its config.json, `policy` that of the policy in `path`, if known.
    """
    refuse_without_decoder(draft, config)
    names = f"{config.get('model_type')} {config.get('architectures')}".lower()
    refuse_part(draft, next((part for part in _PARTS if part in names), ""))
    if policy is None:
        return
    sizes = [text_config(each).get("vocab_size") for each in (config, policy)]
    if sizes[0] != sizes[1]:
        raise ModelError(
            f"generator.speculation.draft={draft} has {sizes[0]} tokens, and {path} has {sizes[1]}",
            hint="name a model with the same tokenizer and vocabulary, or remove it: then tokens "
            "are looked up in the request's own text",
        )
    if "vision_config" in policy or "vision_config" in config:
        raise ModelError(
            f"generator.speculation.draft={draft} cannot propose tokens for {path}: vLLM's draft "
            "models neither see images nor know their positions",
            hint="remove it: then tokens are looked up in the request's own text",
        )


def refuse_part(draft: str, method: str) -> None:
    """Raise ModelError for a draft that vLLM runs by a `method` with weights of the policy."""
    if method not in ("", BY_DRAFT):
        raise ModelError(
            f"generator.speculation.draft={draft} is a part of a model: vLLM runs it as {method}, "
            "with weights of the policy that new versions would not reach",
            hint="name a language model with the policy's tokenizer, or remove it: then tokens are "
            "looked up in the request's own text",
        )


def refuse_in_vllm(path: str, config: Mapping[str, Any], *, adapts: bool) -> None:
    """Raise ModelError for a family that vLLM does not compute, or not with new weights.

    `adapts`: new versions are adapters, and the model's own weights stay.
    """
    text = text_config(config)
    kind = str(text.get("model_type", "?"))
    reason = VLLM_REFUSALS.get(kind)
    if reason is None and kind in STALE_IN_VLLM and not adapts:
        reason = "its new versions have other log-probs there than in the learner"
    if reason is not None:
        raise ModelError(
            f"vLLM cannot compute model {path} of type {kind!r}: {reason}",
            hint="set generator.engine=transformers, if it takes the model (docs/models.md)",
        )
