"""Make a tiny random vision-language model of Qwen2-VL's or Qwen2.5-VL's classes.

Its tokenizer reads single characters, as that of the other tiny models does, and has one more
token, for images. An image is cut into squares of 4 pixels; 2 × 2 of them are one token.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ...schemas.wire.errors import StorageError
from .tiny_model import END, PAD, SPECIAL_TOKENS, make_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TinyVisionKind = Literal["qwen2_vl", "qwen2_5_vl"]

IMAGE = "<|image|>"
PATCH = 4
"""Pixels along the side of a patch."""
_MERGE = 2
_MAX_PATCHES = 256
_HEAD = 16

CHAT_TEMPLATE = (
    "{%- for message in messages -%}{{ '<|' + message['role'] + '|>' }}"
    "{%- if message['content'] is string -%}{{ message['content'] }}{%- else -%}"
    "{%- for part in message['content'] -%}"
    "{{ '<|image|>' if part['type'] == 'image' else part['text'] }}"
    "{%- endfor -%}{%- endif -%}{{ '<|end|>' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)


def make_vision_model(
    *,
    kind: TinyVisionKind = "qwen2_vl",
    width: int = 64,
    layers: int = 2,
    head: int = _HEAD,
    seed: int = 0,
) -> "PreTrainedModel":
    """Return a random model with heads of so many values; the same seed gives the same weights."""
    import torch
    from transformers import (
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        Qwen2VLConfig,
        Qwen2VLForConditionalGeneration,
    )

    vocabulary = len(SPECIAL_TOKENS) + 256 + 1
    text: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": width * 5 // 2,
        "num_hidden_layers": layers,
        "num_attention_heads": width // head,
        "num_key_value_heads": width // head,
        "max_position_embeddings": 4096,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            # Of the half of a head, for time, height and width.
            "mrope_section": [head // 8, 3 * head // 16, 3 * head // 16],
        },
        "pad_token_id": SPECIAL_TOKENS.index(PAD),
        "eos_token_id": SPECIAL_TOKENS.index(END),
        "bos_token_id": None,
    }
    vision: dict[str, Any] = {
        "depth": 1,
        "num_heads": 2,
        "patch_size": PATCH,
        "spatial_merge_size": _MERGE,
        "temporal_patch_size": 1,
    }
    settings: dict[str, Any] = {
        "image_token_id": vocabulary - 1,
        "video_token_id": vocabulary,  # none
        "vision_start_token_id": vocabulary,
        "vision_end_token_id": vocabulary,
        "tie_word_embeddings": True,
    }
    with torch.random.fork_rng(devices=[]):  # pyright: ignore[reportUnknownMemberType]  # untyped in torch
        torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]  # untyped in torch
        if kind == "qwen2_vl":
            vision |= {"embed_dim": 32, "hidden_size": width, "mlp_ratio": 2}
            config = Qwen2VLConfig(text_config=text, vision_config=vision, **settings)
            return Qwen2VLForConditionalGeneration(config).eval()
        vision |= {"hidden_size": 32, "out_hidden_size": width, "intermediate_size": 64}
        vision |= {"window_size": 2 * _MERGE * PATCH, "fullatt_block_indexes": []}
        config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, **settings)
        return Qwen2_5_VLForConditionalGeneration(config).eval()


def save_tiny_vision_model(
    folder: str | Path,
    *,
    kind: TinyVisionKind = "qwen2_vl",
    width: int = 64,
    layers: int = 2,
    head: int = _HEAD,
    seed: int = 0,
) -> Path:
    """Write a tiny model with its tokenizer and image processor; return the folder."""
    from transformers import Qwen2VLImageProcessorPil
    from transformers.utils import logging

    logging.disable_progress_bar()
    path = Path(folder)
    tokenizer: Any = make_tokenizer([IMAGE])
    tokenizer.chat_template = CHAT_TEMPLATE
    least, most = PATCH * PATCH * _MERGE * _MERGE, PATCH * PATCH * _MAX_PATCHES
    processor: Any = Qwen2VLImageProcessorPil(
        patch_size=PATCH,
        merge_size=_MERGE,
        temporal_patch_size=1,
        size={"shortest_edge": least, "longest_edge": most},
    )
    model: Any = make_vision_model(kind=kind, width=width, layers=layers, head=head, seed=seed)
    try:
        for part in (model, tokenizer, processor):
            part.save_pretrained(path)
    except OSError as error:
        raise StorageError(
            f"the tiny model cannot be written to {path}: {error}", hint="choose another folder"
        ) from error
    return path
