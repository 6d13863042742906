"""Make a tiny random model whose tokenizer reads single characters, with or without vision.

The warm start trains it, and tests and benchmarks run it: a real model of a real class, so small
that a CPU core trains it in seconds. The vocabulary is 8 special tokens and the 256 bytes, so every
text can be encoded without loss and ASCII characters are one token each. A game with much text can
add frequent words as tokens after the bytes.

Vision-language models are of Qwen2-VL's or Qwen2.5-VL's classes and have one more token, for
images. An image is cut into squares of 4 pixels; 2 × 2 of them are one token.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ...schemas.wire.errors import ConfigError, StorageError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from .vision import Processor

TinyKind = Literal["qwen3", "llama", "qwen2", "qwen3_moe", "qwen3_5_text", "gemma3_text"]
"""Model types of transformers. In a `qwen3_5_text` layers of linear and of full attention take
turns, in a `gemma3_text` layers with a window and with full attention."""

NUM_EXPERTS, EXPERTS_PER_TOKEN = 4, 2
"""Experts of each layer of a `qwen3_moe`, and experts per token."""
WINDOW = 8
"""Tokens that a layer with a window sees."""

PAD, END, SYSTEM, USER, ASSISTANT, TOOL = (
    "<|pad|>",
    "<|end|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|tool|>",
)
SPECIAL_TOKENS = (PAD, END, SYSTEM, USER, ASSISTANT, TOOL, "<|tool_call|>", "<|reserved|>")

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)
"""One token for the role, the content, one token for the end: it only appends."""


def make_tokenizer(
    more: Sequence[str] = (), words: Sequence[str] = ()
) -> "PreTrainedTokenizerFast":
    """Return the tokenizer: 264 tokens, one per byte after the special ones.

    `more` special tokens come after them, then `words`: pieces of text that are one token each,
    the longest match first.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *alphabet, *more))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[t for t in (*SPECIAL_TOKENS, *more) if t not in (PAD, END)],
        clean_up_tokenization_spaces=False,
    )
    fast.add_tokens(list[Any](AddedToken(word, normalized=False) for word in words))
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_model(
    *,
    kind: TinyKind = "qwen3",
    width: int = 128,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int | None = None,
    mlp_width: int | None = None,
    vocab_size: int = 264,
    max_tokens: int = 4096,
    init_std: float = 0.02,
    seed: int = 0,
) -> "PreTrainedModel":
    """Return a random model; the same seed gives the same weights.

    The defaults have 411 k parameters. `mlp_width` is by default 2.5 times the width. Weights are
    drawn with a standard deviation of `init_std`.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if width % heads:
        raise ConfigError(
            f"width {width} is not a multiple of {heads} heads", hint="choose a multiple"
        )
    settings: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": width,
        "intermediate_size": mlp_width or width * 5 // 2,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads or heads,
        "head_dim": width // heads,
        "max_position_embeddings": max_tokens,
        "initializer_range": init_std,
        "tie_word_embeddings": True,
        "pad_token_id": SPECIAL_TOKENS.index(PAD),
        "eos_token_id": SPECIAL_TOKENS.index(END),
        "bos_token_id": None,
    }
    with torch.random.fork_rng(devices=[]):  # pyright: ignore[reportUnknownMemberType]  # untyped in torch
        torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]  # untyped in torch
        config = AutoConfig.for_model(  # pyright: ignore[reportUnknownMemberType]  # untyped in transformers
            kind, **settings, **_of_kind(kind, width, layers, width // heads)
        )
        models: Any = AutoModelForCausalLM
        return models.from_config(config).eval()


def _of_kind(kind: TinyKind, width: int, layers: int, head: int) -> dict[str, Any]:
    """Return settings that only this kind has; `head` is the size of a head."""
    if kind == "qwen3_moe":
        return {
            "num_experts": NUM_EXPERTS,
            "num_experts_per_tok": EXPERTS_PER_TOKEN,
            "moe_intermediate_size": width,
            "norm_topk_prob": True,
        }
    if kind == "qwen3_5_text":
        return {
            "layer_types": _in_turn("linear_attention", layers),
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": width // 4,
            "linear_value_head_dim": width // 4,
        }
    if kind == "gemma3_text":
        return {
            "layer_types": _in_turn("sliding_attention", layers),
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": head,
        }
    return {}


def _in_turn(kind: str, layers: int) -> list[str]:
    return [kind if layer % 2 == 0 else "full_attention" for layer in range(layers)]


def save_tiny_model(
    folder: str | Path,
    *,
    width: int = 128,
    layers: int = 2,
    seed: int = 0,
    kind: TinyKind = "qwen3",
    heads: int = 4,
    kv_heads: int | None = None,
    template: str = CHAT_TEMPLATE,
    words: Sequence[str] = (),
    init_std: float = 0.02,
) -> Path:
    """Write a tiny random model and its tokenizer as a Hugging Face folder; return the folder.

    `words` are pieces of text that are one token each (`make_tokenizer`); `init_std` is as in
    `make_model`.
    """
    from .vision import Processor

    # transformers' tokenizer of a qwen2 has this token in any case
    tokenizer: Any = make_tokenizer(["<|endoftext|>"] if kind == "qwen2" else (), words)
    tokenizer.chat_template = template
    model = make_model(
        kind=kind,
        width=width,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        vocab_size=len(tokenizer),
        init_std=init_std,
        seed=seed,
    )
    return _save(model, Processor(tokenizer, None), Path(folder))


def _save(model: "PreTrainedModel", processor: "Processor", path: Path) -> Path:
    """Write a model's folder and return it."""
    from transformers.utils import logging

    from .model_folder import save_model

    logging.disable_progress_bar()
    try:
        save_model(model, path)
        processor.save_pretrained(path)
    except OSError as error:
        raise StorageError(
            f"the tiny model cannot be written to {path}: {error}", hint="choose another folder"
        ) from error
    return path


# -- vision-language models ------------------------------------------------------------------------

TinyVisionKind = Literal["qwen2_vl", "qwen2_5_vl"]

IMAGE = "<|image|>"
PATCH = 4
"""Pixels along the side of a patch."""
_MERGE = 2
_MAX_PATCHES = 256
_HEAD = 16

VISION_CHAT_TEMPLATE = (
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
    """Return a random model with heads of size `head`; the same seed gives the same weights."""
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

    from .vision import ImageReader, Processor

    tokenizer: Any = make_tokenizer([IMAGE])
    tokenizer.chat_template = VISION_CHAT_TEMPLATE
    least, most = PATCH * PATCH * _MERGE * _MERGE, PATCH * PATCH * _MAX_PATCHES
    processor: Any = Qwen2VLImageProcessorPil(
        patch_size=PATCH,
        merge_size=_MERGE,
        temporal_patch_size=1,
        size={"shortest_edge": least, "longest_edge": most},
    )
    model: Any = make_vision_model(kind=kind, width=width, layers=layers, head=head, seed=seed)
    return _save(
        model,
        Processor(tokenizer, ImageReader(processor, model.config.image_token_id)),
        Path(folder),
    )
