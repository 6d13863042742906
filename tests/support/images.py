"""Images and tiny vision-language models for tests, and the plain pass to compare with."""

import io
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tinkermq.actors.policy.tiny_models import IMAGE, TinyVisionKind, save_tiny_vision_model
from tinkermq.actors.policy.vision import ImageReader, plain_inputs
from transformers import AutoModelForImageTextToText, PreTrainedModel

IMAGE_ID = 264
"""The tiny models' token of an image."""
KINDS: tuple[TinyVisionKind, ...] = ("qwen2_vl", "qwen2_5_vl")


def picture(width: int, height: int, seed: int = 0, kind: str = "PNG") -> bytes:
    """Return a file of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def png(width: int, height: int, seed: int = 0) -> bytes:
    """Return a PNG file of random pixels."""
    return picture(width, height, seed)


def make_vision_model(folder: Path, kind: TinyVisionKind = "qwen2_vl", head: int = 16) -> Path:
    """Write a tiny model whose eyes and rotary positions matter; return its folder."""
    save_tiny_vision_model(folder, kind=kind, head=head, seed=1)
    model = load(folder)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    return folder


def load(folder: Path) -> PreTrainedModel:
    """Load the model to compare with."""
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


def seeing_logprobs(
    model: PreTrainedModel,
    reader: ImageReader,
    prompt: np.ndarray,
    tokens: np.ndarray,
    images: tuple[bytes, ...] = (),
) -> np.ndarray:
    """Return the log-prob of each token after the prompt, by the model's own forward pass."""
    picked = torch.from_numpy(tokens.astype(np.int64))[:, None]
    return seeing_pass(model, reader, prompt, tokens, images).gather(1, picked)[:, 0].numpy()


def seeing_pass(
    model: PreTrainedModel,
    reader: ImageReader,
    prompt: np.ndarray,
    tokens: np.ndarray,
    images: tuple[bytes, ...] = (),
) -> torch.Tensor:
    """Return [tokens, vocabulary]: log-probs at each place after the prompt, by the model's pass.

    That takes every image token for an image: those of the prompt get an id of their own here, so
    that one which the policy has generated is a text for it, too.
    """
    ids = torch.from_numpy(np.concatenate([prompt, tokens]).astype(np.int64))[None]
    shown, more = ids.clone(), {}
    if images:
        seen = reader.read_images(model, prompt, images)
        more = plain_inputs(ids, seen)
        model.config.image_token_id = next(i for i in range(264) if i not in ids)
        shown[0, torch.from_numpy(seen.places_Q)] = model.config.image_token_id
    with torch.no_grad():
        logprobs = model(input_ids=shown, **more).logits[0].log_softmax(-1)
    return logprobs[len(prompt) - 1 : -1]


__all__ = [
    "IMAGE",
    "IMAGE_ID",
    "KINDS",
    "load",
    "make_vision_model",
    "png",
    "seeing_logprobs",
    "seeing_pass",
]
