"""Models in the sizes that steps are measured with: of random weights, and a language model."""

# transformers leaves some of its methods untyped.
# pyright: reportUnknownMemberType=false

import os
from pathlib import Path
from typing import Any

import torch
from tinkermq.actors import get_model
from tinkermq.actors.policy.devices import own_device
from tinkermq.schemas.model_catalogue import catalogue_folder
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen2Config, Qwen3Config
from transformers.utils import logging

ALL_CORES = len(os.sched_getaffinity(0))
SIZES = {
    "small": Qwen2Config(
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=1024,
        vocab_size=8192,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    ),
    "0.5 B": Qwen2Config(
        hidden_size=896,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        intermediate_size=4864,
        vocab_size=151936,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
    ),
    "1.5 B": Qwen2Config(
        hidden_size=1536,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        intermediate_size=8960,
        vocab_size=151936,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
    ),
}
"""The shapes of Qwen2.5's models, and one that a CPU trains."""


SMOLLM2 = Qwen2Config(
    hidden_size=576,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    intermediate_size=1536,
    vocab_size=49152,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
)
"""The shape of SmolLM2-135M."""


def qwen3(width: int, layers: int, heads: int, intermediate: int, vocab_size: int = 151936) -> Any:
    """Return a shape of Qwen3, with heads of 128 and eight, or half as many, of keys."""
    return Qwen3Config(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=min(8, heads // 2),
        head_dim=128,
        intermediate_size=intermediate,
        vocab_size=vocab_size,
        max_position_embeddings=65536,
        tie_word_embeddings=True,
    )


QWEN3 = {
    "small": qwen3(64, 2, 2, 128, 512),
    "0.6 B": qwen3(1024, 28, 16, 3072),
    "4 B": qwen3(2560, 36, 32, 9728),
}
"""The shapes of Qwen3's models, and one that a CPU trains."""


def save_random_weights(config: PreTrainedConfig, folder: Path) -> int:
    """Write a model of random weights, bfloat16 where there is a GPU; return how many it has."""
    logging.disable_progress_bar()
    torch.manual_seed(0)
    device = own_device()
    with device:
        model: Any = AutoModelForCausalLM.from_config(config)
    if device.type == "cuda":
        model.to(torch.bfloat16)
    model.save_pretrained(folder)
    return sum(each.numel() for each in model.parameters())


def language_model() -> str:
    """Return the folder of SmolLM2-135M-Instruct, which is fetched unless it is on this machine."""
    folder = catalogue_folder("smollm2")
    if not folder.is_dir():
        get_model.get("smollm2", folder, "float32")
    return str(folder)
