"""Prompts with images, as vLLM takes them.

vLLM would read images and make room for their tokens itself, by a processor of its own. It is
given what the learner's reader makes of them instead, at the places where the prompt has their
tokens: the pixels are the same to the bit, and no prompt is changed. vLLM knows an image by the
digest of its file. It keeps those that it was lately sent, so that a group's image is sent once,
and never shares the cache of a prompt with that of another image.

Shape letters: see `actors/models/vision.py`.
"""

# Not installed for development; typings/vllm has what is used of it.
# pyright: reportMissingModuleSource=false

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from vllm.inputs import MultiModalInput, mm_input
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange
from vllm.v1.engine.input_processor import InputProcessor

from ....models.vision import Images

_KIND = "image"


@dataclass(frozen=True, slots=True, eq=False)
class ShownImages:
    """Images that were read, and where a prompt has their tokens."""

    images: Images
    starts_I: NDArray[np.int64]
    """Place of the first token of each image."""
    names: Sequence[str]
    """Digests of the files."""


def show(images: Images, places_Q: NDArray[np.int64], encoded: Sequence[bytes]) -> ShownImages:
    """Return images that were read, at the places of their tokens in a prompt."""
    lengths_I = np.array(images.tokens)
    names = [hashlib.sha256(one).hexdigest() for one in encoded]
    return ShownImages(images, places_Q[np.cumsum(lengths_I) - lengths_I], names)


def prompt_with_images(
    processor: InputProcessor, tokens: list[int], shown: ShownImages, salt: str
) -> MultiModalInput:
    """Return a prompt for the request that is sent next; images that vLLM has are left out."""
    images = shown.images
    patches_I = images.grid_I3.prod(-1)
    items = MultiModalKwargsItems.from_hf_inputs(
        {"pixel_values": images.pixels_PD, "image_grid_thw": images.grid_I3},
        {
            "pixel_values": MultiModalFieldConfig.flat_from_sizes(_KIND, patches_I),
            "image_grid_thw": MultiModalFieldConfig.batched(_KIND, keep_on_cpu=True),
        },
    )
    names = {_KIND: list(shown.names)}
    processor.inject_into_mm_cache(names, items)
    places = [
        PlaceholderRange(offset=int(start), length=length)
        for start, length in zip(shown.starts_I, images.tokens, strict=True)
    ]
    return mm_input(tokens, items, names, {_KIND: places}, cache_salt=salt)
