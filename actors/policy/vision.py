"""Images for vision-language models: from the bytes of a file to a model's inputs.

Text is tokenised by the chat tokenizer. Of a model's processor only the image part is used, in its
Pillow form: it needs no torchvision, and generators and learner get the same pixels. A file is
decoded as in transformers' `load_image`: the first frame, upright by its EXIF data, in RGB.

Images are in the first prompt of an episode. Their tokens are determined here only: the first ones
with the image's id, as many as the images take. A policy may generate that id; such a token is
text.

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
from .older_forms import add_older_tokenizer

if TYPE_CHECKING:
    from PIL.Image import Image

_CACHE_BYTES = 256 << 20
_MAX_PROMPTS = 64
"""Cached prompts with the same images."""
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
"""Allowed formats; Pillow knows some forty more, some of which start programs."""
_ORIENTATION = 0x0112
"""The EXIF tag of the orientation."""
_TURNED = (5, 6, 7, 8)
"""Its values for images turned by 90 degrees."""
_PNG_ORIENTED = (b"eXIf", b"Raw profile type", b"XML:com.adobe.xmp")
"""Marker of EXIF data in a PNG file."""
_MAX_PIXELS = 1 << 26
"""Pixels of an image file; the processor scales it down for the model."""


@dataclass(frozen=True, slots=True, eq=False)
class Images:
    """The images of one conversation, as inputs of the vision tower."""

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
    """Images at their places in a prompt, and the resulting rotary positions."""

    images: Images
    places_Q: NDArray[np.int64]
    """Places of the image tokens in the sequence."""
    rope_3M: NDArray[np.int64]
    """Rotary positions (time, height, width) of the sequence's first M tokens; later ones increase
    by one."""

    @property
    def shift(self) -> int:
        """Offset of rotary positions after images."""
        return int(self.rope_3M[0, -1]) - (self.rope_3M.shape[1] - 1)

    def positions(self, places_N: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rotary positions of the tokens at these places: int64[3, N]."""
        inside_N = np.minimum(places_N, self.rope_3M.shape[1] - 1)
        return self.rope_3M[:, inside_N] + (places_N - inside_N)


class ImageReader:
    """Reads image files with a model's processor; thread-safe.

    Recent images are cached: the episodes of a group, and the turns of an episode, have the same
    images.
    """

    def __init__(self, processor: Any, token_id: int) -> None:
        self.processor = processor
        self.token_id = token_id
        """The id of an image's tokens in a prompt."""
        self._known: OrderedDict[bytes, _Known] = OrderedDict()
        self._known_bytes = 0
        self._lock = threading.Lock()

    def count_tokens(self, encoded: bytes) -> int:
        """Return the number of tokens of an upright image.

        Raises DataError for an invalid image.
        """
        return self._tokens(*_upright_size(encoded))

    def remembered(self, token_ids: NDArray[Any], encoded: Sequence[bytes]) -> SeenImages | None:
        """Return the images at their places in a cached prompt, else None.

        Raises DataError for a prompt without them.
        """
        with self._lock:
            known = self._known.get(digest_of(encoded))
        if known is None:
            return None
        return known.seen.get(_prefix(token_ids, self.places(token_ids, known.images)))

    def read_images(
        self, model: nn.Module, token_ids: NDArray[Any], encoded: Sequence[bytes]
    ) -> SeenImages:
        """Read images and find their tokens in a prompt; the model computes rotary positions.

        Raises DataError for an invalid image, and for a prompt without the images.
        """
        if (remembered := self.remembered(token_ids, encoded)) is not None:
            return remembered
        known = self._read(encoded)
        images = known.images
        places_Q = self.places(token_ids, images)
        kinds_M = np.zeros(int(places_Q[-1]) + 2, np.int64)  # and one text token after them
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
        """Return images, from the cache or decoded; raises DataError for an invalid one."""
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

        Raises DataError unless each image's tokens are consecutive.
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
                hint="the ids must be those of the model's processor for the images",
            )
        if (np.diff(places_Q)[ends_I[:-1] - 1] == 1).any():
            raise DataError(
                "two images of a prompt are adjacent, without a token between them",
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
    """Decoded images, and the prompts that contain them."""

    images: Images
    seen: dict[bytes, SeenImages] = field(default_factory=dict[bytes, SeenImages])


def _prefix(token_ids: NDArray[Any], places_Q: NDArray[np.int64]) -> bytes:
    """Return a prompt up to the end of its last image."""
    return token_ids[: int(places_Q[-1]) + 1].astype(np.int32).tobytes()


@dataclass(frozen=True)
class Processor:
    """A tokenizer and an image reader, if the model reads images; they are saved together."""

    tokenizer: Any
    image_reader: ImageReader | None

    def save_pretrained(self, folder: str | Path) -> None:
        """Write both as a Hugging Face folder, which transformers 4 opens, too."""
        self.tokenizer.save_pretrained(folder)
        add_older_tokenizer(Path(folder))
        if self.image_reader is not None:
            self.image_reader.processor.save_pretrained(folder)


def digest_of(encoded: Sequence[bytes]) -> bytes:
    """Return a digest of a list of images."""
    return hashlib.sha256(b"".join(hashlib.sha256(file).digest() for file in encoded)).digest()


def load_image_reader(path: str, *, trust_remote_code: bool = False) -> ImageReader | None:
    """Load the image part of a model's processor; None for a text model.

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
            f"model {path} reads images, but its image processor cannot be loaded: {error}",
            hint="copy preprocessor_config.json beside config.json, and install pillow",
        ) from error
    return ImageReader(cast("Any", loaded), int(config.image_token_id))


def embed(model: nn.Module, ids_BT: Tensor, columns_Q: Tensor, images: Sequence[Images]) -> Tensor:
    """Return the decoder's input [B, T, H]: embeddings, with the images at these columns.

    `columns_Q` counts through all rows, in the order of the images; if it is empty, the images are
    not used. Gradients flow into the vision tower.
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
    """Return the inputs of a model's own forward pass apart from the ids, for comparisons."""
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
    """Open an image by its header; raises DataError for an invalid one."""
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", Image.DecompressionBombWarning
            )  # its size is checked below
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
    """Decode an image upright, as transformers does; raises DataError for a damaged one."""
    from transformers.image_utils import load_image

    with _refusing_damage(encoded):
        return load_image(_open(encoded))


def _upright_size(encoded: bytes) -> tuple[int, int]:
    """Return the size of `_decode`'s image, without decoding if possible."""
    image = _open(encoded)
    width, height = image.size
    # Pillow would read all pixels of a PNG file to search for EXIF data, which most lack.
    if image.format == "PNG" and not any(mark in encoded for mark in _PNG_ORIENTED):
        return width, height
    with _refusing_damage(encoded):
        turned = image.getexif().get(_ORIENTATION, 1) in _TURNED
    return (height, width) if turned else (width, height)


@contextlib.contextmanager
def _refusing_damage(encoded: bytes) -> Iterator[None]:
    """Raise DataError for Pillow's errors on damaged pixels or EXIF data."""
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
    """Raise ModelError for images without a `reader`."""
    if images and reader is None:
        raise ModelError(
            "a prompt has images, but the model reads text only",
            hint="use a vision-language model of the Qwen2-VL or Qwen2.5-VL class, or leave the "
            "images out",
        )


def with_room(
    text: str,
    images: Sequence[bytes],
    reader: "ImageReader | None",
    token_text: Callable[[int], str],
) -> str:
    """Repeat the token of each image as often as the image takes tokens.

    Raises ModelError for images without a `reader`, DataError for an invalid image and for a
    message that contains an image's token as text.
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
            hint=f"no message may contain the text {token}, and the template must write it once "
            "for each image",
        )
    rooms = [token * reader.count_tokens(image) for image in images]
    return "".join(part for pair in zip(between, [*rooms, ""], strict=True) for part in pair)


# -- images in packed rows: their columns and rotary positions -------------------------------------
# Shapes: Q image tokens, B rows, T columns. A shared prompt has its images once. Tokens after an
# image continue from its largest rotary position, so these differ from the places in the sequence.

IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class PackedImages:
    """The images of a micro-batch, in the order of their columns."""

    images: tuple[Images, ...]
    """Inputs of the vision tower."""
    column_Q: Tensor
    """int64: column of each image token, counted through all rows."""
    rope_3BT: Tensor
    """int64: rotary positions of all columns, in time, height and width."""

    def to(self, device: torch.device | str) -> "PackedImages":
        """Copy the tensors of all columns to a device."""
        return PackedImages(self.images, self.column_Q.to(device), self.rope_3BT.to(device))


@dataclass
class RowImages:
    """The images of one row that is being packed."""

    rope_3T: IntArray
    images: list[Images] = field(default_factory=list[Images])
    columns: list[IntArray] = field(default_factory=list[IntArray])

    @classmethod
    def empty(cls, num_columns: int) -> "RowImages":
        """Begin a row."""
        return cls(np.zeros((3, num_columns), dtype=np.int64))

    def write(self, first: int, places: NDArray[Any], seen: SeenImages | None) -> None:
        """Add tokens at a column: their places in the sequence, and their prompt's images."""
        columns = slice(first, first + len(places))
        if seen is None:
            self.rope_3T[:, columns] = places
            return
        self.rope_3T[:, columns] = seen.positions(places)
        self.images.append(seen.images)
        self.columns.append(first + seen.places_Q)


def pack_images(rows: Sequence[RowImages]) -> PackedImages | None:
    """Join the images of a micro-batch's rows; None without images."""
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
    """Return images without columns: the vision tower runs without effect."""
    nowhere_Q = position_ids_BT.new_empty(0)
    return PackedImages((images,), nowhere_Q, position_ids_BT.expand(3, -1, -1))
