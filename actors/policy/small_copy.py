"""A small random model with the class and the layers of another one, on which code is tried.

What computes a model follows from its class and its kinds of layers, not from its widths. So a
model is tried before it is fetched, from its configuration alone: a copy with as many layers, each
a few numbers wide, takes a second.
"""

# torch and transformers leave some of their methods untyped.
# pyright: reportUnknownMemberType=false

from typing import TYPE_CHECKING, Any, cast

from ...schemas.checks import CheckSkipped
from .model_folder import class_of, sees_images

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

VOCABULARY = 300
SIZES: dict[str, int] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    # GPT-2 and its like
    "n_embd": 32,
    "n_head": 4,
    "ffn_dim": 48,
    "ffn_hidden_size": 48,
    "word_embed_proj_dim": 32,
    # experts
    "moe_intermediate_size": 16,
    "expert_intermediate_size": 16,
    "expert_ffn_hidden_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "num_expert_group": 1,
    "n_group": 1,
    "topk_group": 1,
    # latent attention
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 16,
    "v_head_dim": 12,
    # linear attention and state spaces
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "mamba_d_ssm": 64,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "mamba_expand": 2,
    "mamba_d_conv": 4,
    "mamba_dt_rank": 4,
    "n_mamba_heads": 4,
    "ssm_state_size": 8,
    "n_groups": 1,
    "lru_width": 32,
    # Gemma 3n and 4
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
    "global_head_dim": 16,
}
"""Widths of a small copy, by the names that configurations of transformers have for them."""
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def small_config(config: "PreTrainedConfig") -> "PreTrainedConfig":
    """Return a configuration of the same text decoder whose layers are narrow.

    Raises CheckSkipped if its class does not take these widths.
    """
    text: Any = cast("Any", config).get_text_config()
    values: dict[str, Any] = text.to_dict()
    for name, size in SIZES.items():
        if isinstance(values.get(name), int) and values[name] > 0:
            values[name] = size
    if values.get("kv_lora_rank"):
        values["num_key_value_heads"] = values["num_attention_heads"]
    values["rope_parameters"] = _plain_positions(values.get("rope_parameters"))
    values |= {"rope_scaling": None, **_TOKENS}
    try:
        return type(text)(**{name: each for name, each in values.items() if each is not None})
    except Exception as error:  # of the model's class
        raise _refused(config, error) from error


def make_small_copy(
    config: "PreTrainedConfig", attn_implementation: str | None = None
) -> "PreTrainedModel":
    """Return a random model with this configuration's layers; CheckSkipped if none can be made."""
    import torch
    from transformers import AutoModelForCausalLM

    if class_of(config) is None or sees_images(config):
        kind = "with images" if class_of(config) else "with code of its own"
        raise CheckSkipped(f"a model {kind} is tried when it is loaded")
    small = small_config(config)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            auto = cast("Any", AutoModelForCausalLM)
            model: Any = auto.from_config(small, attn_implementation=attn_implementation)
            draw_zeros(model.float().eval())
        with torch.no_grad():  # widths that do not fit each other show here
            model(input_ids=torch.arange(8)[None], use_cache=False)
    except Exception as error:  # of the model's class
        raise _refused(config, error) from error
    return cast("PreTrainedModel", model)


def draw_zeros(model: Any) -> None:
    """Give weights that begin as zeros, and sinks, random values: zeros hide what they multiply."""
    import torch

    for name, weight in model.named_parameters():
        if "sink" in name or not weight.any():
            torch.nn.init.normal_(weight, std=1.0 if "sink" in name else 0.1)


def _plain_positions(rotary: Any) -> Any:
    """Return rotary positions without scaling, whose factors have the length of a wide head."""
    if not isinstance(rotary, dict):
        return None
    values = cast("dict[str, Any]", rotary)
    if "rope_type" not in values:  # one for each kind of layer
        return {kind: _plain_positions(each) for kind, each in values.items()}
    plain = {name: each for name, each in values.items() if not isinstance(each, list)}
    return {**plain, "rope_type": "default"}


def _refused(config: "PreTrainedConfig", error: Exception) -> CheckSkipped:
    return CheckSkipped(
        f"no small copy of a model of type {config.model_type!r} is made ({error}): the model is "
        "tried when it is loaded"
    )
