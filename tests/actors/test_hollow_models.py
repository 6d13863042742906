"""A hollow model is what another process fills: like the loaded one, without its weights."""

import re
from pathlib import Path

import pytest
import torch
from tinkermq.actors.policy.model_folder import load_causal_lm, load_policy
from tinkermq.actors.policy.tiny_models import TinyKind
from tinkermq.schemas.config.sections import LoraConfig
from transformers import Qwen2Config

from tests.support.images import make_vision_model
from tests.support.models import make_tiny_model


def _held_mib() -> float:
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


@pytest.mark.parametrize("kind", ["qwen2", "llama", "qwen3_moe", "sees images", "adapter"])
def test_a_hollow_model_is_like_the_loaded_one_but_for_its_weights(
    tmp_path: Path, kind: str
) -> None:
    kinds: dict[str, TinyKind] = {"llama": "llama", "qwen3_moe": "qwen3_moe"}
    if kind == "sees images":
        folder = make_vision_model(tmp_path)
    else:
        folder = make_tiny_model(tmp_path, kinds.get(kind, "qwen2"))
    lora = LoraConfig(rank=4 if kind == "adapter" else 0)
    loaded, hollow = (
        load_policy(str(folder), lora, dtype=torch.float32, hollow=hollow)
        for hollow in (False, True)
    )
    assert [(name, each.shape, each.dtype) for name, each in loaded.named_parameters()] == [
        (name, each.shape, each.dtype) for name, each in hollow.named_parameters()
    ]
    assert loaded.state_dict().keys() == hollow.state_dict().keys()
    assert loaded.training is hollow.training is False
    buffers = dict(hollow.named_buffers())
    assert len(buffers) > 0
    for name, value in loaded.named_buffers():
        assert value.equal(buffers[name])


def test_a_hollow_model_reads_no_weights_and_takes_no_memory(tmp_path: Path) -> None:
    Qwen2Config(
        hidden_size=1024,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        intermediate_size=4096,
        vocab_size=50_000,
        architectures=["Qwen2ForCausalLM"],
    ).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"nothing that could be read")
    before = _held_mib()
    model = load_causal_lm(str(tmp_path), dtype=torch.float32, hollow=True)
    size_mib = sum(each.numel() for each in model.parameters()) * 4 / 2**20
    assert size_mib > 400
    assert _held_mib() - before < 0.2 * size_mib
