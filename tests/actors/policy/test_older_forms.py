"""What is saved is read by transformers 4, too: the same positions, types, tokens and log-probs."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tinkermq.actors.policy.model_folder import load_causal_lm, load_tokenizer, save_model
from tinkermq.actors.policy.older_forms import older_config, older_tokenizer
from tinkermq.actors.policy.tiny_models import (
    IMAGE,
    SPECIAL_TOKENS,
    make_tokenizer,
    save_tiny_vision_model,
)
from tinkermq.actors.policy.vision import Processor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from tests.support.models import make_tiny_model

OLDEST = ("transformers==4.57.*", "huggingface-hub>=0.34,<1", "tokenizers>=0.22,<=0.23")
MINUTES_S = 600
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": {"rope_theta": 1e6} | LLAMA},
    "qwen2": {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
    "qwen3": {"rope_parameters": {"rope_theta": 1e6} | YARN},
    "mistral": {"rope_parameters": {"rope_theta": 3e5, "rope_type": "default"}},
    "gemma2": {"rope_parameters": {"rope_theta": 3e5, "rope_type": "default"}},
    "gemma3_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0},
            "sliding_attention": {"rope_theta": 2e4, "rope_type": "default"},
        },
    },
    "olmo3": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_theta": 5e5} | YARN,
            "sliding_attention": {"rope_theta": 5e5, "rope_type": "default"},
        },
    },
    "phi3": {
        "rope_parameters": {"rope_theta": 1e6} | LONG,
        "original_max_position_embeddings": 64,
    },
    "glm": {"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.25}},
    "gpt_neox": {"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}},
    "stablelm": {"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}},
}
"""Positions that differ from the family's own, as transformers 5 writes them."""

READ = """
import json, sys, torch, transformers
from pathlib import Path
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer
assert transformers.__version__.startswith("4.57"), transformers.__version__
answer = {}
for name in sys.argv[2:]:
    folder = Path(sys.argv[1]) / name
    auto = AutoModelForImageTextToText if name == "vision" else AutoModelForCausalLM
    model = auto.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.encode("<|user|>Hello, world! " * 9)
    with torch.no_grad():
        out = model(input_ids=torch.tensor([ids])).logits[0]
    answer[name] = [ids, tokenizer.all_special_tokens, tokenizer.chat_template, out.tolist()]
    answer[name].append(str(model.dtype))
print(json.dumps(answer))
"""


@pytest.mark.parametrize(
    ("kind", "positions", "older"),
    [
        ("qwen2", {"rope_theta": 1e6, "rope_type": "default"}, {"rope_theta": 1e6}),
        ("llama", {"rope_theta": 5e5, **LLAMA}, {"rope_theta": 5e5, "rope_scaling": LLAMA}),
        (
            "qwen2_vl_text",
            {"rope_theta": 1e6, "rope_type": "default", "mrope_section": [2, 3, 3]},
            {
                "rope_theta": 1e6,
                "rope_scaling": {"rope_type": "default", "mrope_section": [2, 3, 3]},
            },
        ),
        (
            "glm",
            {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
            {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
        ),
        (
            "gpt_neox",
            {"rope_theta": 2e4, "partial_rotary_factor": 0.25},
            {"rotary_emb_base": 2e4, "rotary_pct": 0.25},
        ),
        (
            "gemma3_text",
            FAMILIES["gemma3_text"]["rope_parameters"],
            {
                "rope_theta": 1e6,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
                "rope_local_base_freq": 2e4,
            },
        ),
        (
            "phi3",
            {"rope_theta": 1e4, "partial_rotary_factor": 1.0, **LONG},
            {
                "rope_theta": 1e4,
                "partial_rotary_factor": 1.0,
                "rope_scaling": {
                    "type": "longrope",
                    "short_factor": LONG["short_factor"],
                    "long_factor": LONG["long_factor"],
                },
            },
        ),
    ],
)
def test_positions_are_written_in_both_forms(
    kind: str, positions: dict[str, Any], older: dict[str, Any]
) -> None:
    written = {"model_type": kind, "dtype": "bfloat16", "rope_parameters": positions}
    assert older_config(written) == ({**written, **older, "torch_dtype": "bfloat16"}, [])
    nested = {"model_type": "other", "tie_word_embeddings": True, "text_config": written}
    part = {**written, **older, "torch_dtype": "bfloat16", "tie_word_embeddings": True}
    assert older_config(nested)[0]["text_config"] == part


@pytest.mark.parametrize(
    ("kind", "positions"),
    [
        ("gemma4_text", {"rope_theta": 1e6, "rope_type": "proportional"}),
        ("zaya", {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}),
        (
            "olmo3",
            {
                "full_attention": {"rope_theta": 1e6, "rope_type": "default"},
                "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
            },
        ),
    ],
)
def test_positions_that_version_4_cannot_express_are_named_and_left(
    kind: str, positions: dict[str, Any]
) -> None:
    written = {"model_type": kind, "rope_parameters": positions}
    assert older_config({"text_config": written}) == (
        {"text_config": written},
        [f"{kind}: {positions}"],
    )


def test_a_tokenizer_is_written_as_both_versions_open_it() -> None:
    written = {
        "tokenizer_class": "TokenizersBackend",
        "extra_special_tokens": ["<|user|>"],
        "model_specific_special_tokens": {"image_token": "<|image|>"},
    }
    assert older_tokenizer(written) == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "additional_special_tokens": ["<|user|>"],
        "extra_special_tokens": {"image_token": "<|image|>"},
    }
    assert older_tokenizer({"tokenizer_class": "Qwen2Tokenizer"}) == {
        "tokenizer_class": "Qwen2Tokenizer"
    }


def saved(family: str, folder: Path) -> Path:
    """Write a small model of a family as a learner does; return its folder."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ messages }}"
    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 1,
    }
    if family == "gpt_neox":
        del sizes["num_key_value_heads"], sizes["head_dim"]
    torch.manual_seed(1)  # pyright: ignore[reportUnknownMemberType]  # untyped in torch
    config = AutoConfig.for_model(family, **sizes, **FAMILIES[family])
    save_model(AutoModelForCausalLM.from_config(config).float(), folder)
    Processor(tokenizer, None).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_both_forms_together_are_read_as_what_was_saved(family: str, tmp_path: Path) -> None:
    folder = saved(family, tmp_path / family)
    both = json.loads((folder / "config.json").read_text())
    assert {"rope_theta", "rotary_emb_base"} & both.keys()
    assert both["torch_dtype"] == both["dtype"] == "float32"
    read = AutoConfig.from_pretrained(folder).rope_parameters
    for positions in read.values() if "full_attention" in read else [read]:
        positions.pop("type", None)
    assert read == both["rope_parameters"]


@pytest.mark.long
def test_the_oldest_supported_transformers_reads_what_is_saved(tmp_path: Path) -> None:
    older = tmp_path / "older"
    pip = (sys.executable, "-P", "-m", "pip", "install", "-qq", "--no-deps", "--no-compile")
    subprocess.run((*pip, "--target", str(older), *OLDEST), check=True, timeout=MINUTES_S)
    for family in FAMILIES:
        saved(family, tmp_path / family)
    make_tiny_model(tmp_path / "tiny")
    save_tiny_vision_model(tmp_path / "vision")
    names = [*FAMILIES, "tiny", "vision"]
    done = subprocess.run(
        (sys.executable, "-c", READ, str(tmp_path), *names),
        env={"PYTHONPATH": str(older), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        check=True,
        timeout=MINUTES_S,
    )
    for name, (ids, special, template, logits_TV, dtype) in json.loads(done.stdout).items():
        print(name)
        folder = str(tmp_path / name)
        tokenizer = load_tokenizer(folder)
        assert tokenizer.encode("<|user|>Hello, world! " * 9) == ids
        assert set(special) == {*SPECIAL_TOKENS, *([IMAGE] if name == "vision" else [])}
        assert tokenizer.chat_template == template
        assert dtype == "torch.float32"
        auto = AutoModelForImageTextToText
        model: Any = (
            auto.from_pretrained(folder)
            if name == "vision"
            else load_causal_lm(folder, dtype=torch.float32)
        )
        with torch.no_grad():
            ours_TV = model.eval()(input_ids=torch.tensor([ids])).logits[0]
        torch.testing.assert_close(torch.tensor(logits_TV), ours_TV)
