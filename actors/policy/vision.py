"""Images for vision-language models: from the bytes of a file to what a model computes with.

Text goes the chat tokenizer's way. Of a model's processor only the image half is used, in its
Pillow form: it needs no torchvision, and generators and learner see the same pixels. A file is
decoded as transformers' `load_image` does: the first frame, upright as its EXIF data tell, in RGB.

Images stand in the first prompt of an episode. Which tokens are theirs is decided here alone: the
first ones with the image's id, as many as the images take. A policy may generate that id itself;
such a token is text.

Shape letters: I images, P patches, D values of a patch, Q image tokens, M tokens up to the end of
the last image, N tokens, B rows, T columns, H hidden size.
"""

# torch and transformers leave some of their methods untyped.
# pyright: reportUnknownMemberType=false

import contextlib
import hashlib
import io
import struct
import threading
import warnings
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ...schemas.wire.errors import DataError, ModelError
from ..storage.adapters import base_of, is_adapter
from .model_folder import load_model_config, sees_images

if TYPE_CHECKING:
    from PIL.Image import Image

_CACHE_BYTES = 256 << 20
_MAX_PROMPTS = 64
"""Prompts with the same images that are remembered."""
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
"""What is decoded; Pillow knows some forty more, some of which start programs."""
_ORIENTATION = 0x0112
"""The EXIF tag that tells how a camera was held."""
_TURNED = (5, 6, 7, 8)
"""Its values for images that lie on their side."""
_PNG_ORIENTED = (b"eXIf", b"Raw profile type", b"XML:com.adobe.xmp")
"""What a PNG file holds if it tells an orientation."""
_MAX_PIXELS = 1 << 26
"""Pixels of an image file; what a model sees of it is bounded by its processor."""


@dataclass(frozen=True, slots=True, eq=False)
class Images:
    """The images of one conversation, as the vision tower reads them."""

    pixels_PD: Tensor
    """float32: patches of all images, in order."""
    grid_I3: Tensor
    """int64: patches of each image in time, height and width."""
    tokens: tuple[int, ...]
    """Tokens that each image takes."""
    digest: bytes
    """SHA-256 of the files."""


@dataclass(frozen=True, slots=True, eq=False)
class SeenImages:
    """Images at their places in a prompt, and the rotary positions that come of them."""

    images: Images
    places_Q: NDArray[np.int64]
    """Places of the image tokens in the sequence."""
    rope_3M: NDArray[np.int64]
    """Rotary positions (time, height, width) of the sequence's first M tokens; from there on they
    go up by one."""

    @property
    def shift(self) -> int:
        """What a token behind the images adds to its place to have its rotary position."""
        return int(self.rope_3M[0, -1]) - (self.rope_3M.shape[1] - 1)

    def positions(self, places_N: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rotary positions of the tokens at these places: int64[3, N]."""
        inside_N = np.minimum(places_N, self.rope_3M.shape[1] - 1)
        return self.rope_3M[:, inside_N] + (places_N - inside_N)


class ImageReader:
    """Reads image files the way a model's processor does; safe to use from several threads.

    What was read lately is remembered: the episodes of a group, and the turns of an episode, see
    the same images.
    """

    def __init__(self, processor: Any, token_id: int) -> None:
        self.processor = processor
        self.token_id = token_id
        """The id that stands in a prompt for each token of an image."""
        self._known: OrderedDict[bytes, _Known] = OrderedDict()
        self._known_bytes = 0
        self._lock = threading.Lock()

    def count_tokens(self, encoded: bytes) -> int:
        """Return how many tokens an image takes, as it is held upright.

        Raises DataError for what is no image, or cannot be seen.
        """
        return self._tokens(*_upright_size(encoded))

    def remembered(self, token_ids: NDArray[Any], encoded: Sequence[bytes]) -> SeenImages | None:
        """Return the images at their places in a prompt, if such a prompt was seen lately.

        Raises DataError for a prompt that does not hold them.
        """
        with self._lock:
            known = self._known.get(digest_of(encoded))
        if known is None:
            return None
        return known.seen.get(_prefix(token_ids, self.places(token_ids, known.images)))

    def read_images(
        self, model: nn.Module, token_ids: NDArray[Any], encoded: Sequence[bytes]
    ) -> SeenImages:
        """Read images and find their tokens in a prompt; the model knows their rotary positions.

        Raises DataError for what is no image, and for a prompt that does not hold the images.
        """
        if (remembered := self.remembered(token_ids, encoded)) is not None:
            return remembered
        known = self._read(encoded)
        images = known.images
        places_Q = self.places(token_ids, images)
        kinds_M = np.zeros(int(places_Q[-1]) + 2, np.int64)  # and one text token behind them
        kinds_M[places_Q] = 1
        base: Any = cast("Any", model).base_model
        kinds = torch.from_numpy(kinds_M)[None]
        rope_31M, _ = base.get_rope_index(kinds, kinds, image_grid_thw=images.grid_I3)
        seen = SeenImages(images, places_Q, rope_31M[:, 0].numpy())
        if len(known.seen) >= _MAX_PROMPTS:
            known.seen.clear()
        known.seen[_prefix(token_ids, places_Q)] = seen
        return seen

    def read(self, encoded: Sequence[bytes]) -> Images:
        """Read images, or remember having read them; DataError for what is no image."""
        return self._read(encoded).images

    def _read(self, encoded: Sequence[bytes]) -> "_Known":
        digest = digest_of(encoded)
        with self._lock:
            if (known := self._known.get(digest)) is not None:
                return known
        decoded = [_decode(file) for file in encoded]
        tokens = tuple(self._tokens(*image.size) for image in decoded)
        features = self.processor(images=decoded, return_tensors="pt")
        pixels_PD, grid_I3 = features["pixel_values"], features["image_grid_thw"]
        entry = _Known(Images(pixels_PD, grid_I3, tokens, digest))
        self._remember(entry)
        return entry

    def places(self, token_ids: NDArray[Any], images: Images) -> NDArray[np.int64]:
        """Return the places of the images' tokens: int64[Q].

        Raises DataError for ids that do not hold each image's tokens in one piece.
        """
        lengths_I = np.array(images.tokens)
        ends_I = np.cumsum(lengths_I)
        places_Q = np.flatnonzero(token_ids == self.token_id)[: ends_I[-1]]
        if (
            len(places_Q) < ends_I[-1]
            or (places_Q[ends_I - 1] - places_Q[ends_I - lengths_I] != lengths_I - 1).any()
        ):
            raise DataError(
                f"the images of a prompt take {', '.join(map(str, images.tokens))} tokens, which "
                f"do not stand in it in one piece each ({len(places_Q)} are there)",
                hint="the ids must be those that the model's processor makes of the images",
            )
        if (np.diff(places_Q)[ends_I[:-1] - 1] == 1).any():
            raise DataError(
                "two images of a prompt stand side by side, without a token between them",
                hint="write a word between them, or use a template that marks where images end",
            )
        return places_Q

    def _tokens(self, width: int, height: int) -> int:
        try:
            patches: int = self.processor.get_number_of_image_patches(height, width)
        except ValueError as error:
            raise DataError(
                f"an image of {width} × {height} pixels cannot be seen: {error}",
                hint="crop or scale the images of the data",
            ) from error
        return patches // self.processor.merge_size**2

    def _remember(self, entry: "_Known") -> None:
        with self._lock:
            if entry.images.digest in self._known:
                return
            self._known[entry.images.digest] = entry
            self._known_bytes += entry.images.pixels_PD.nbytes
            while self._known_bytes > _CACHE_BYTES and len(self._known) > 1:
                _, oldest = self._known.popitem(last=False)
                self._known_bytes -= oldest.images.pixels_PD.nbytes


@dataclass(slots=True, eq=False)
class _Known:
    """Images that were read, and the prompts in which they were found."""

    images: Images
    seen: dict[bytes, SeenImages] = field(default_factory=dict[bytes, SeenImages])


def _prefix(token_ids: NDArray[Any], places_Q: NDArray[np.int64]) -> bytes:
    """Return a prompt up to the end of its last image."""
    return token_ids[: int(places_Q[-1]) + 1].astype(np.int32).tobytes()


@dataclass(frozen=True)
class Processor:
    """A tokenizer, and what reads images where a model sees some: they are saved together."""

    tokenizer: Any
    image_reader: ImageReader | None

    def save_pretrained(self, folder: str | Path) -> None:
        """Write both as a Hugging Face folder."""
        self.tokenizer.save_pretrained(folder)
        if self.image_reader is not None:
            self.image_reader.processor.save_pretrained(folder)


def digest_of(encoded: Sequence[bytes]) -> bytes:
    """Return a digest by which lists of images differ."""
    return hashlib.sha256(b"".join(hashlib.sha256(file).digest() for file in encoded)).digest()


def load_image_reader(path: str, *, trust_remote_code: bool = False) -> ImageReader | None:
    """Load the image half of a model's processor; None for a model that reads text alone.

    Raises ModelError for a vision model without it.
    """
    config: Any = load_model_config(path, trust_remote_code=trust_remote_code)
    if not sees_images(config):
        return None
    if is_adapter(path) and not (Path(path) / "preprocessor_config.json").is_file():
        return load_image_reader(base_of(path), trust_remote_code=trust_remote_code)
    try:
        from transformers import AutoImageProcessor

        loaded = AutoImageProcessor.from_pretrained(  # pyright: ignore[reportUnknownVariableType]
            path, backend="pil", trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelError(
            f"model {path} sees images, but its image processor cannot be loaded: {error}",
            hint="copy preprocessor_config.json beside config.json, and install pillow",
        ) from error
    return ImageReader(cast("Any", loaded), int(config.image_token_id))


def embed(model: nn.Module, ids_BT: Tensor, columns_Q: Tensor, images: Sequence[Images]) -> Tensor:
    """Return what the decoder reads, [B, T, H]: embeddings, with the images at these columns.

    `columns_Q` counts through the rows one after the other, in the order of the images; empty: the
    images are seen by nobody. Gradients flow into the vision tower.
    """
    whole: Any = model
    words_BTH: Tensor = whole.get_input_embeddings()(ids_BT)
    pixels_PD = torch.cat([image.pixels_PD for image in images]).to(ids_BT.device)
    grid_I3 = torch.cat([image.grid_I3 for image in images]).to(ids_BT.device)
    seen = whole.get_image_features(pixels_PD, grid_I3, return_dict=True).pooler_output
    seen_QH = torch.cat(tuple(seen)).to(words_BTH.dtype)
    if not len(columns_Q):
        seen_QH = seen_QH[:0]
    return words_BTH.flatten(0, 1).index_copy(0, columns_Q, seen_QH).view_as(words_BTH)


def plain_inputs(ids_BT: Tensor, seen: SeenImages) -> dict[str, Tensor]:
    """Return what a model's own forward pass asks for beside the ids, to compare with."""
    kinds_BT = torch.zeros_like(ids_BT, dtype=torch.int32)
    kinds_BT.view(-1)[torch.from_numpy(seen.places_Q)] = 1
    return {
        "pixel_values": seen.images.pixels_PD.to(ids_BT.device),
        "image_grid_thw": seen.images.grid_I3.to(ids_BT.device),
        "mm_token_type_ids": kinds_BT,
    }


def probe_image() -> bytes:
    """Return a small image, as a file."""
    from PIL import Image

    file = io.BytesIO()
    Image.linear_gradient("L").resize((48, 32)).save(file, "PNG")
    return file.getvalue()


def _open(encoded: bytes) -> "Image":
    """Open an image by its header; DataError for what is none."""
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # bounded below
            image = Image.open(io.BytesIO(encoded), formats=_FORMATS)
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError, ValueError) as error:
        raise DataError(
            f"an image of {len(encoded)} bytes cannot be opened: {error}",
            hint="store images as PNG, JPEG, WebP or GIF files",
        ) from error
    if image.width * image.height > _MAX_PIXELS:
        raise DataError(
            f"an image has {image.width} × {image.height} pixels, allowed are {_MAX_PIXELS:,}",
            hint="scale the images of the data down",
        )
    return image


def _decode(encoded: bytes) -> "Image":
    """Decode an image whole and upright, as transformers does; DataError for a damaged one."""
    from transformers.image_utils import load_image

    with _refusing_damage(encoded):
        return load_image(_open(encoded))


def _upright_size(encoded: bytes) -> tuple[int, int]:
    """Return the width and the height that `_decode` would find; decodes nothing if it can."""
    image = _open(encoded)
    width, height = image.size
    # Pillow looks behind all pixels of a PNG file for what most have nowhere.
    if image.format == "PNG" and not any(mark in encoded for mark in _PNG_ORIENTED):
        return width, height
    with _refusing_damage(encoded):
        turned = image.getexif().get(_ORIENTATION, 1) in _TURNED
    return (height, width) if turned else (width, height)


@contextlib.contextmanager
def _refusing_damage(encoded: bytes) -> Iterator[None]:
    """Raise DataError for what Pillow raises where pixels or EXIF data are damaged."""
    try:
        yield
    except DataError:
        raise
    except (
        OSError,
        SyntaxError,
        ValueError,
        TypeError,
        LookupError,
        EOFError,
        ArithmeticError,
        AttributeError,
        struct.error,
        zlib.error,
    ) as error:
        raise DataError(
            f"an image of {len(encoded)} bytes is damaged: {error}",
            hint="store whole PNG, JPEG, WebP or GIF files",
        ) from error


# -- images in a rendered text ---------------------------------------------------------------------


def check_seen(images: Sequence[bytes], reader: "ImageReader | None") -> None:
    """Raise ModelError for images that a model without a `reader` does not see."""
    if images and reader is None:
        raise ModelError(
            "a prompt holds images, and the model reads text alone",
            hint="use a vision-language model of the Qwen2-VL or Qwen2.5-VL class, or leave the "
            "images out",
        )


def with_room(
    text: str,
    images: Sequence[bytes],
    reader: "ImageReader | None",
    token_text: Callable[[int], str],
) -> str:
    """Write the token of each image as often as the image takes tokens.

    Without a `reader` the model reads text alone. Raises ModelError for images that it does not
    see, DataError for what is no image, and for a text that says an image's token in words.
    """
    check_seen(images, reader)
    if reader is None:
        return text
    token = token_text(reader.token_id)
    between = text.split(token)
    if len(between) != len(images) + 1:
        raise DataError(
            f"a prompt with {len(images)} images has {len(between) - 1} times {token} once "
            "the chat template has rendered it",
            hint=f"no message may hold the text {token}, and the template must write it once "
            "for each image",
        )
    rooms = [token * reader.count_tokens(image) for image in images]
    return "".join(part for pair in zip(between, [*rooms, ""], strict=True) for part in pair)


# -- images in packed rows: their columns, and the rotary positions that they bend -----------------
# Shapes: Q image tokens, B rows, T columns. An image stands in the prompt of its sequences and is
# there once where the prompt is; what follows an image goes on from its largest rotary position, so
# these lie beside the places in the sequence.

IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class PackedImages:
    """The images of a micro-batch, in the order of their columns."""

    images: tuple[Images, ...]
    """What the vision tower reads."""
    column_Q: Tensor
    """int64: column of each image token, counted through the rows one after the other."""
    rope_3BT: Tensor
    """int64: rotary positions of all columns, in time, height and width."""

    def to(self, device: torch.device | str) -> "PackedImages":
        """Copy the tensors of all columns to a device."""
        return PackedImages(self.images, self.column_Q.to(device), self.rope_3BT.to(device))


@dataclass
class RowImages:
    """The images of one row as it is filled."""

    rope_3T: IntArray
    images: list[Images] = field(default_factory=list[Images])
    columns: list[IntArray] = field(default_factory=list[IntArray])

    @classmethod
    def empty(cls, num_columns: int) -> "RowImages":
        """Begin a row."""
        return cls(np.zeros((3, num_columns), dtype=np.int64))

    def write(self, first: int, places: NDArray[Any], seen: SeenImages | None) -> None:
        """Note what begins at a column: tokens at these places, and the images of their prompt."""
        columns = slice(first, first + len(places))
        if seen is None:
            self.rope_3T[:, columns] = places
            return
        self.rope_3T[:, columns] = seen.positions(places)
        self.images.append(seen.images)
        self.columns.append(first + seen.places_Q)


def pack_images(rows: Sequence[RowImages]) -> PackedImages | None:
    """Put the images of a micro-batch's rows together; None where there are none."""
    images = tuple(image for row in rows for image in row.images)
    if not images:
        return None
    columns = [
        number * row.rope_3T.shape[1] + columns
        for number, row in enumerate(rows)
        for columns in row.columns
    ]
    rope_3BT = np.stack([row.rope_3T for row in rows], axis=1)
    return PackedImages(
        images, torch.from_numpy(np.concatenate(columns)), torch.from_numpy(rope_3BT)
    )


def unseen(images: Images, position_ids_BT: Tensor) -> PackedImages:
    """Return images that stand in no column: the vision tower runs, and nothing comes of it."""
    nowhere_Q = position_ids_BT.new_empty(0)
    return PackedImages((images,), nowhere_Q, position_ids_BT.expand(3, -1, -1))
