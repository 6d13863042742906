"""Tiny models of the families of transformers that generate text, and the table of docs/models.md.

`python -m tests.support.families` writes the table.
"""

import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tinkermq.actors.engine.transformers.decoder import load_decoder
from tinkermq.actors.policy.layers import needs_masks
from tinkermq.actors.training.micro_batch import TokenSequence
from tinkermq.actors.training.model import Scorer
from tinkermq.actors.training.packing import pack
from tinkermq.actors.training.varlen import choose_attention, set_attention
from tinkermq.schemas.wire.errors import TinkermqError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

PAGE = Path("docs/models.md")
WINDOW = 8
VOCAB = 300
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "sliding_window": WINDOW,
    "attention_chunk_size": WINDOW,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    # GPT-2 and its like
    "n_embd": 32,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 256,
    "ffn_hidden_size": 48,
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
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    # latent attention
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    # linear attention and state spaces
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
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
    "lru_width": 32,
    "attention_window_size": WINDOW,
    # Gemma 3n and 4
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
    "num_kv_shared_layers": 1,
    "global_head_dim": 16,
}
_ALWAYS = ("hidden_size", "num_hidden_layers", "vocab_size")

Row = tuple[str, str]
"""What the learner does, and what the transformers engine does."""

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "afmoe": ("Arcee Trinity", {}),
    "apertus": ("Apertus", {}),
    "arcee": ("Arcee AFM", {}),
    "bamba": ("Bamba", {"attn_layer_indices": [1, 3]}),
    "bitnet": ("BitNet b1.58", {}),
    "bloom": ("BLOOM", {}),
    "cohere": ("Command R", {}),
    "cohere2": ("Command R7B, Command A", {}),
    "cwm": ("Code World Model", {}),
    "deepseek_v3": ("DeepSeek V3, R1", {}),
    "deepseek_v32": ("DeepSeek V3.2", {}),
    "ernie4_5": ("ERNIE 4.5", {}),
    "ernie4_5_moe": ("ERNIE 4.5 with experts", {}),
    "exaone4": ("EXAONE 4", {}),
    "exaone_moe": ("K-EXAONE", {}),
    "falcon": ("Falcon", {"head_dim": None, "num_key_value_heads": None}),
    "falcon_h1": ("Falcon H1", {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16}),
    "falcon_mamba": ("Falcon Mamba", {"layer_types": None}),
    "flex_olmo": ("FlexOlmo", {}),
    "gemma": ("Gemma", {}),
    "gemma2": ("Gemma 2", {}),
    "gemma3_text": ("Gemma 3", {}),
    "gemma3n_text": ("Gemma 3n", {}),
    "gemma4_text": ("Gemma 4", {}),
    "glm": ("GLM 4 (9B, 2024)", {}),
    "glm4": ("GLM 4 (2025)", {}),
    "glm4_moe": ("GLM 4.5 to 4.7", {}),
    "glm4_moe_lite": ("GLM 4.7 Flash", {}),
    "glm_moe_dsa": ("GLM 5", {}),
    "gpt2": ("GPT-2", {}),
    "gpt_neox": ("Pythia", {}),
    "gpt_oss": ("gpt-oss", {}),
    "granite": ("Granite 3", {}),
    "granitemoe": ("Granite 3 with experts", {}),
    "granitemoehybrid": ("Granite 4", {"layer_types": ["mamba", "attention"] * 2}),
    "granitemoeshared": ("Granite with shared experts", {}),
    "helium": ("Helium", {}),
    "jais2": ("Jais 2", {}),
    "jamba": ("Jamba", {"layer_types": None, "attn_layer_period": 2, "attn_layer_offset": 1}),
    "kimi_linear": (
        "Kimi Linear",
        {
            "num_expert_group": 1,
            "topk_group": 1,
            "num_experts_per_token": 2,
            "linear_head_dim": 8,
            "linear_num_heads": 4,
        },
    ),
    "lfm2": ("LFM2", {"layer_types": ["conv", "full_attention"] * 2}),
    "lfm2_moe": ("LFM2 with experts", {"layer_types": ["conv", "full_attention"] * 2}),
    "llama": ("Llama 2 and 3, SmolLM2", {}),
    "llama4_text": ("Llama 4", {}),
    "longcat_flash": ("LongCat Flash", {"num_layers": 2}),
    "mamba": ("Mamba", {"layer_types": None}),
    "minicpm3": ("MiniCPM 3", {}),
    "mimo_v2_flash": ("MiMo V2 Flash", {}),
    "minimax": ("MiniMax 01, M1", {}),
    "minimax_m2": ("MiniMax M2", {}),
    "ministral3": ("Ministral 3", {}),
    "mistral": ("Mistral 7B", {}),
    "mixtral": ("Mixtral", {}),
    "nanochat": ("nanochat", {}),
    "nemotron": ("Nemotron 3 and 4, Minitron", {"head_dim": 8, "num_key_value_heads": 2}),
    "nemotron_h": ("Nemotron H, Nano 2 and 3", {"n_groups": 1, "hybrid_override_pattern": "M*M*"}),
    "olmo": ("OLMo", {}),
    "olmo2": ("OLMo 2", {}),
    "olmo3": ("OLMo 3", {}),
    "olmo_hybrid": ("OLMo Hybrid", {}),
    "olmoe": ("OLMoE", {}),
    "opt": ("OPT", {}),
    "phi": ("Phi 1 and 2", {}),
    "phi3": ("Phi 3 and 4", {}),
    "phimoe": ("Phi 3.5 MoE", {}),
    "qwen2": ("Qwen2, Qwen2.5, DeepSeek R1 distilled", {}),
    "qwen2_moe": ("Qwen1.5 MoE, Qwen2 57B", {}),
    "qwen3": ("Qwen3", {}),
    "qwen3_5_moe_text": ("Qwen3.5 with experts", {}),
    "qwen3_5_text": ("Qwen3.5", {}),
    "qwen3_moe": ("Qwen3 with experts", {}),
    "qwen3_next": ("Qwen3-Next", {}),
    "recurrent_gemma": ("RecurrentGemma", {}),
    "seed_oss": ("Seed OSS", {}),
    "smollm3": ("SmolLM3", {}),
    "solar_open": ("Solar Open", {}),
    "stablelm": ("StableLM", {}),
    "starcoder2": ("StarCoder2", {}),
    "youtu": ("Youtu-LLM", {}),
}
"""The families by their `model_type`: well-known models of it, and settings of the tiny model."""
QUICK = (
    "deepseek_v3",
    "gemma2",
    "gemma3_text",
    "gpt_oss",
    "granitemoehybrid",
    "lfm2",
    "llama4_text",
    "mistral",
    "qwen3",
    "qwen3_5_text",
    "recurrent_gemma",
)
"""Families that have all kinds of layers among them."""


def make_model(
    family: str, sizes: Mapping[str, Any] | None = None, **settled: Any
) -> PreTrainedModel:
    """Return a random model of a family, four layers with every kind that the family has.

    `sizes` are other sizes than the usual ones, `settled` further settings.
    """
    plain: Any = AutoConfig.for_model(family)
    defaults: dict[str, Any] = plain.to_dict()
    settings = {
        name: value
        for name, value in {**_SIZES, **(sizes or {})}.items()
        if defaults.get(name) is not None or name in _ALWAYS
    }
    if "kv_lora_rank" in settings:
        settings["num_key_value_heads"] = 4
    if kinds := defaults.get("layer_types"):
        settings["layer_types"] = (list(dict.fromkeys(kinds)) * 4)[:4]
    settings |= FAMILIES[family][1] | settled
    config = type(plain)(**{name: value for name, value in settings.items() if value is not None})
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    for name, weight in model.named_parameters():
        if "sink" in name:
            torch.nn.init.normal_(weight)
    return model


def plain_logprobs(
    model: PreTrainedModel, ids: Sequence[int] | np.ndarray[Any, Any], start: int
) -> torch.Tensor:
    """Return the log-probs of a sequence's tokens from `start` on, by the model's own pass."""
    tokens = torch.as_tensor(np.asarray(ids, np.int64))
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=tokens[None], use_cache=False).logits[0].float()
    return logits.log_softmax(-1)[torch.arange(start - 1, len(tokens) - 1), tokens[start:]]


def row_of(family: str) -> Row:
    """Run a family's tiny model in the learner and the engine; return the row of the table."""
    model = make_model(family)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        try:
            load_decoder(folder, dtype=torch.float32, device="cpu", max_slots=4, max_tokens=128)
            engine = "yes"
        except TinkermqError as error:
            engine = f"no: {error.message.replace(f'model {folder}', 'it')}"
    return _learner(model), engine


def _learner(model: PreTrainedModel) -> str:
    """Say how the learner reads a model's sequences; raises AssertionError if it is not right."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(3, VOCAB, 12)
    ids = [np.concatenate([prompt, rng.integers(3, VOCAB, more)]) for more in (9, 14, 20)]
    plain = torch.cat([plain_logprobs(model, each, len(prompt)) for each in ids])
    cpu = torch.device("cpu")
    try:
        reason, config = needs_masks(model), model.config.get_text_config()
        set_attention(model, choose_attention("auto", config, cpu, torch.float32, reason), cpu)
        scorer = Scorer(model, temperature=1.0)
    except TinkermqError as error:
        return f"no: {error.message}"
    ours = torch.empty(len(plain))
    sequences = [
        TokenSequence(each, (np.arange(len(each)) >= len(prompt)).astype(np.uint8)) for each in ids
    ]
    for micro in pack(
        sequences,
        max_row_tokens=128,
        microbatch_tokens=256,
        share_prompts=True,
        one_per_row=scorer.one_per_row,
    ):
        ours[micro.index_N] = scorer.score(micro).logprobs_N.detach()
    torch.testing.assert_close(ours, plain, atol=1e-4, rtol=1e-4)
    return "a row each" if scorer.one_per_row else "packed"


def line_of(family: str, row: Row) -> str:
    """Return a family's line of the table."""
    return f"| `{family}` | {FAMILIES[family][0]} | {row[0]} | {row[1]} |"


def main() -> None:
    """Write the lines of all families into the page."""
    before, _, rest = PAGE.read_text().partition("<!-- families -->\n")
    _, _, after = rest.partition("<!-- end -->")
    lines = ["| family | models | learner | transformers engine |", "|---|---|---|---|"]
    for family in FAMILIES:
        lines.append(line_of(family, row_of(family)))
        sys.stdout.write(f"{lines[-1]}\n")
    table = "\n".join(lines)
    PAGE.write_text(f"{before}<!-- families -->\n{table}\n<!-- end -->{after}")


if __name__ == "__main__":
    main()
