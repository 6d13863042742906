"""Image files are seen as transformers' `load_image` decodes them, and counted as they are seen."""

import base64
import io
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, PngImagePlugin
from tinkermq.actors.policy.vision import ImageReader, load_image_reader
from tinkermq.schemas.wire.errors import DataError
from tinkermq.schemas.wire.images import encoded_image
from transformers.image_utils import load_image

from tests.support.images import make_vision_model

SIZE = (40, 16)
"""Width and height of pictures, whose grid tells whether they were turned."""
XMP = (
    '<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description xmlns:tiff="http://ns.adobe.com/tiff/1.0/"'
    ' tiff:Orientation="6"/></x:xmpmeta>'
)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> ImageReader:
    folder = make_vision_model(tmp_path_factory.mktemp("files"), "qwen2_5_vl")
    found = load_image_reader(str(folder))
    assert found is not None
    return found


def drawn(size: tuple[int, int] = SIZE, seed: int = 0) -> Image.Image:
    width, height = size
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def file_of(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def turned(value: int, kind: str = "JPEG", mode: str = "RGB", **options: Any) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = value
    return file_of(drawn().convert(mode), kind, exif=exif, **options)


def transparent(mode: str, kind: str = "PNG") -> bytes:
    whole = drawn().convert("RGBA")
    whole.putalpha(drawn(seed=3).convert("L"))
    if mode == "P":
        palette = drawn().convert("P")
        return file_of(palette, kind, transparency=3)
    return file_of(whole.convert(mode), kind)


def deep() -> bytes:
    pixels = np.random.default_rng(1).integers(0, 1 << 16, SIZE[::-1], dtype=np.uint16)
    return file_of(Image.fromarray(pixels))


def animated(kind: str) -> bytes:
    frames = [drawn(seed=seed) for seed in range(3)]
    return file_of(frames[0], kind, save_all=True, append_images=frames[1:])


def with_xmp() -> bytes:
    info = PngImagePlugin.PngInfo()
    info.add_itxt("XML:com.adobe.xmp", XMP)
    return file_of(drawn(), "PNG", pnginfo=info)


def exif_behind_pixels() -> bytes:
    """Return a PNG file whose EXIF data stand behind its pixels, where the standard allows them."""
    whole = turned(8, "PNG")
    start = whole.index(b"eXIf") - 4
    length = struct.unpack(">I", whole[start : start + 4])[0] + 12
    chunk, rest = whole[start : start + length], whole[:start] + whole[start + length :]
    end = rest.index(b"IEND") - 4
    return rest[:end] + chunk + rest[end:]


FILES: dict[str, Callable[[], bytes]] = {
    **{f"jpeg turned {value}": (lambda v=value: turned(v)) for value in range(1, 9)},
    **{f"png turned {value}": (lambda v=value: turned(v, "PNG")) for value in (3, 5, 6, 7, 8)},
    **{f"webp turned {value}": (lambda v=value: turned(v, "WEBP")) for value in (2, 6, 8)},
    "jpeg with an orientation that there is not": lambda: turned(9),
    "jpeg with orientation 0": lambda: turned(0),
    "png turned by xmp": with_xmp,
    "png turned behind its pixels": exif_behind_pixels,
    "mpo turned": lambda: turned(6, "MPO", save_all=True, append_images=[drawn(seed=2)]),
    "palette with transparency": lambda: transparent("P"),
    "gif with transparency": lambda: transparent("P", "GIF"),
    "rgba": lambda: transparent("RGBA"),
    "webp rgba": lambda: transparent("RGBA", "WEBP"),
    "grey with transparency": lambda: transparent("LA"),
    "grey": lambda: file_of(drawn().convert("L")),
    "one bit": lambda: file_of(drawn().convert("1")),
    "sixteen bits": deep,
    "cmyk": lambda: file_of(drawn().convert("CMYK"), "JPEG"),
    "cmyk turned": lambda: turned(6, mode="CMYK"),
    "progressive": lambda: file_of(drawn(), "JPEG", progressive=True),
    "animated gif": lambda: animated("GIF"),
    "animated webp": lambda: animated("WEBP"),
    "animated png": lambda: animated("PNG"),
    "one pixel": lambda: file_of(drawn((1, 1))),
    "a line": lambda: file_of(drawn((150, 1))),
    "a column": lambda: file_of(drawn((2, 190))),
}


@pytest.mark.parametrize("name", FILES)
def test_pixels_and_grid_are_those_of_transformers_and_as_many_tokens_are_counted(
    reader: ImageReader, name: str
) -> None:
    encoded = FILES[name]()
    judge = load_image(base64.b64encode(encoded).decode())
    expected = reader.processor(images=[judge], return_tensors="pt")
    found = reader.read([encoded])
    assert torch.equal(found.grid_I3, expected["image_grid_thw"])
    assert torch.equal(found.pixels_PD, expected["pixel_values"])
    merged = reader.processor.merge_size**2
    assert reader.count_tokens(encoded) == int(found.grid_I3.prod()) // merged
    assert found.tokens == (reader.count_tokens(encoded),)


def test_a_picture_that_lies_on_its_side_has_the_grid_of_one_that_stands(
    reader: ImageReader,
) -> None:
    lying, upright = reader.read([turned(1)]), reader.read([turned(6)])
    assert lying.grid_I3[0].tolist()[1:] == upright.grid_I3[0].tolist()[:0:-1]
    assert lying.grid_I3[0, 1] != lying.grid_I3[0, 2]


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def bomb() -> bytes:
    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    pixels = chunk(b"IDAT", zlib.compress(b"0" * 100))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + pixels + chunk(b"IEND", b"")


def bad_exif() -> bytes:
    whole = turned(6, "PNG")
    start = whole.index(b"eXIf") - 4
    length = struct.unpack(">I", whole[start : start + 4])[0] + 12
    return whole[:start] + chunk(b"eXIf", b"no TIFF at all") + whole[start + length :]


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: turned(6)[:-200], "damaged"),
        (lambda: file_of(drawn((300, 300)))[:2000], "damaged"),
        (lambda: animated("WEBP")[:100], "damaged|cannot be opened"),
        (lambda: turned(6)[:20], "damaged|cannot be opened"),
        (bomb, "pixels, allowed are|cannot be opened"),
        (bad_exif, "damaged"),
        (lambda: b"", "cannot be opened"),
        (lambda: b"GIF89a", "cannot be opened"),
        (lambda: file_of(drawn(), "TIFF"), "cannot be opened"),
        (lambda: file_of(drawn((900, 2))), "cannot be seen"),
        (lambda: file_of(drawn((2, 900))), "cannot be seen"),
    ],
)
def test_a_file_that_cannot_be_seen_is_refused_with_the_reason(
    reader: ImageReader, make: Callable[[], bytes], why: str
) -> None:
    with pytest.raises(DataError, match=why):
        reader.read([make()])


def test_an_image_is_taken_in_each_form_in_which_data_hold_it(tmp_path: Path) -> None:
    encoded = turned(6)
    text = base64.b64encode(encoded).decode()
    lines = "\n".join(text[at : at + 76] for at in range(0, len(text), 76))
    for image in (
        encoded,
        bytearray(encoded),
        memoryview(encoded),
        {"bytes": encoded, "path": "photo.jpg"},
        {"bytes": encoded, "path": None},
        {"url": f"data:image/jpeg;base64,{text}", "detail": "low"},
        {"bytes": None, "path": None, "url": f"data:image/jpeg;base64,{text}"},
        f"data:image/jpeg;base64,{text}",
        f"data:image/jpeg;name=a.jpg;base64,{lines}",
    ):
        assert encoded_image({"type": "image", "image": image}) == encoded
    for image in ({"bytes": None, "path": "photo.jpg"}, "photo.jpg", "https://a/b.png", None, 7):
        with pytest.raises(DataError, match="is not there in bytes"):
            encoded_image({"type": "image", "image": image})
