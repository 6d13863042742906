"""Which models the slot decoder runs, and what it says of the others."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tinkermq.actors.engine.transformers.decoder import SlotDecoder, load_decoder
from tinkermq.schemas.wire.errors import ModelError
from transformers import PreTrainedModel
from transformers.models.gemma2 import Gemma2Config, Gemma2ForCausalLM
from transformers.models.mistral import MistralConfig, MistralForCausalLM
from transformers.models.qwen3_next import Qwen3NextConfig, Qwen3NextForCausalLM

from tests.support.models import make_tiny_model

SMALL: dict[str, Any] = {
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
}


def load(path: Path, max_tokens: int = 64) -> SlotDecoder:
    return load_decoder(
        str(path), dtype=torch.float32, device="cpu", max_slots=4, max_tokens=max_tokens
    )


def refused(path: Path, max_tokens: int = 64) -> str:
    with pytest.raises(ModelError) as caught:
        load(path, max_tokens)
    return str(caught.value)


@pytest.mark.parametrize(
    "model",
    [
        MistralForCausalLM(MistralConfig(**SMALL, sliding_window=8)),
        Gemma2ForCausalLM(Gemma2Config(**SMALL)),
        Qwen3NextForCausalLM(
            Qwen3NextConfig(
                **SMALL,
                num_experts=2,
                num_experts_per_tok=1,
                moe_intermediate_size=16,
                shared_expert_intermediate_size=16,
                linear_num_key_heads=2,
                linear_num_value_heads=2,
                linear_key_head_dim=16,
                linear_value_head_dim=16,
                layer_types=["linear_attention", "full_attention"],
            )
        ),
    ],
    ids=["sliding-window", "alternating", "recurrent"],
)
def test_models_without_full_attention_are_refused(model: PreTrainedModel, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    message = refused(tmp_path)
    assert "layers without full attention" in message
    assert "Qwen3 or Llama" in message


def test_a_model_whose_attention_is_more_than_causal_is_refused(tmp_path: Path) -> None:
    config = Gemma2Config(**SMALL, layer_types=["full_attention"] * 2, attn_logit_softcapping=1e-3)
    torch.manual_seed(0)
    model: Any = Gemma2ForCausalLM(config)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.q_proj.weight)
        torch.nn.init.normal_(layer.self_attn.k_proj.weight)
        torch.nn.init.normal_(layer.self_attn.v_proj.weight)
    model.save_pretrained(tmp_path)
    assert "computes other logits over the slot cache" in refused(tmp_path)


def test_a_folder_that_holds_no_model_names_the_missing_file(tmp_path: Path) -> None:
    assert "there is no model folder" in refused(tmp_path / "nowhere")
    assert "config.json is missing" in refused(tmp_path)
    make_tiny_model(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.bak")
    assert "model.safetensors is missing" in refused(tmp_path)
    assert "is a file" in refused(tmp_path / "config.json")


def test_a_damaged_configuration_is_refused(tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert "cannot be read" in refused(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_model"}))
    assert "no_such_model" in refused(tmp_path)


def test_incomplete_weights_are_refused_and_never_random(tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    message = refused(tmp_path)
    assert "lack 1 tensors: model.layers.1.mlp.up_proj.weight" in message


def test_sequences_beyond_the_models_positions_are_refused(tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    message = refused(tmp_path, max_tokens=5000)
    assert "up to 5000 tokens" in message
    assert "positions for 4096" in message
