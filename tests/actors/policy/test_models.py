"""Models of the hub, hollow and tiny ones, and image files."""

import base64
import io
import os
import re
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from PIL import Image, PngImagePlugin
from tinkermq.actors.engine.transformers.adapters import DoubleBuffer
from tinkermq.actors.policy.devices import first_device
from tinkermq.actors.policy.model_folder import (
    hub_error,
    load_causal_lm,
    load_policy,
    load_tokenizer,
)
from tinkermq.actors.policy.tiny_models import TinyKind, save_tiny_model
from tinkermq.actors.policy.vision import ImageReader, load_image_reader
from tinkermq.actors.weights.follower import of_policy
from tinkermq.actors.weights.job_weights import device_of_new_weights
from tinkermq.actors.weights.shared_memory import SharedMemory
from tinkermq.actors.weights.tensors import TensorBytes, TensorSource, tensors_of
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.config.sections import LoraConfig
from tinkermq.schemas.weights import TensorEntry
from tinkermq.schemas.wire.errors import DataError
from tinkermq.schemas.wire.images import encoded_image
from tinkermq.schemas.wire.subjects import JobScope
from transformers import Qwen2Config
from transformers.image_utils import load_image

from tests.support.images import make_vision_model
from tests.support.models import make_tiny_model
from tests.support.waiting import PATIENCE_S

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


# -- What is told of a hub's model that cannot be had, with errors of huggingface_hub's classes ----


_OPEN = """
from tinkermq.actors.policy.model_folder import load_model_config
from tinkermq.schemas.wire.errors import ModelError
try:
    load_model_config("nowhere/model")
except ModelError as error:
    print(error.message, "|", error.hint)
"""


def _raised(kind: type[Exception]) -> OSError:
    """Return transformers' error, which tells its cause by the one behind it only."""
    error = OSError("nowhere/model")
    error.__cause__ = kind.__new__(kind)
    return error


@pytest.mark.parametrize(
    ("kind", "offline", "words", "hint"),
    [
        (LocalEntryNotFoundError, True, "offline mode (HF_HUB_OFFLINE)", "unset HF_HUB_OFFLINE"),
        (LocalEntryNotFoundError, False, "the hub cannot be reached", "HF_ENDPOINT"),
        (RepositoryNotFoundError, False, "the hub has no such model", "check owner and name"),
        (GatedRepoError, False, "is gated on the hub", "accept its terms"),
        (ValueError, True, "cannot be read", "model_type"),
    ],
)
def test_each_way_in_which_a_model_cannot_be_had_is_told_apart(
    kind: type[Exception], offline: bool, words: str, hint: str
) -> None:
    error = hub_error("nowhere/model", _raised(kind), offline=offline)
    assert words in error.message
    assert hint in (error.hint or "")


def test_offline_mode_is_named_by_who_opens_the_model() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _OPEN],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    assert "nowhere/model is neither a folder on" in done.stdout
    assert "offline mode" in done.stdout


# -- A hollow model is what another process fills: like the loaded one, without its weights --------


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


# -- The tiny model that recipes, tests and benchmarks start from ----------------------------------


def test_the_default_model_has_411_thousand_parameters_and_264_tokens(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    model = load_causal_lm(str(tmp_path), dtype=torch.float32)
    assert model.num_parameters() == 411_392
    assert len(load_tokenizer(str(tmp_path))) == model.config.vocab_size == 264
    assert model.generation_config.eos_token_id == 1


def test_a_seed_makes_the_same_model_and_leaves_the_global_generator_alone(
    tmp_path: Path,
) -> None:
    state = torch.get_rng_state()
    weights = [
        (save_tiny_model(tmp_path / name, width=32, seed=seed) / "model.safetensors").read_bytes()
        for name, seed in (("a", 3), ("b", 3), ("c", 4))
    ]
    assert weights[0] == weights[1] != weights[2]
    assert torch.equal(torch.get_rng_state(), state)


def test_every_text_is_one_token_per_byte_and_comes_back(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(save_tiny_model(tmp_path, width=32)))
    for text in ("3+4=?", "  two  spaces\n", "naïve €"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert len(ids) == len(text.encode())
        assert tokenizer.decode(ids) == text


def test_words_are_one_token_each_the_longest_first_and_come_back(tmp_path: Path) -> None:
    words = ("<move>", " X1,0", "a line\n\n", "a line")
    folder = save_tiny_model(tmp_path, width=32, words=words)
    tokenizer = load_tokenizer(str(folder))
    ids = tokenizer.encode("a line\n\na line X1,0 X1<move>", add_special_tokens=False)
    assert ids[:3] == [266, 267, 265]
    assert ids[-1] == 264
    assert len(ids) == 3 + len(" X1") + 1
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a line\n\na line X1,0 X1<move>"
    assert load_causal_lm(str(folder), dtype=torch.float32).config.vocab_size == 268


# -- Where new weights are received, and in which form an engine is given them ---------------------


def test_an_actor_computes_on_the_first_gpu_that_its_node_gives_it() -> None:
    assert first_device(0) == torch.device("cpu")
    assert first_device(1) == first_device(4) == torch.device("cuda", 0)


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_without_a_gpu_new_weights_come_into_memory(engine: str) -> None:
    config = {"model": {"path": "m"}, "env": {"game": "bandit"}, "generator": {"engine": engine}}
    assert device_of_new_weights(JobConfig.model_validate(config)) == torch.device("cpu")


@pytest.mark.parametrize("on_device", [False, True])
def test_an_engine_takes_weights_from_memory_and_from_tensors_alike(on_device: bool) -> None:
    payload = np.random.default_rng(0).integers(0, 120, 2 + 24, np.uint8)
    data = torch.from_numpy(payload) if on_device else payload.data
    b = {"dtype": "float32", "shape": [2, 3], "offset": 2, "num_bytes": 24}  # not aligned
    entries = [
        TensorEntry(name="a", dtype="bfloat16", shape=[1], offset=0, num_bytes=2),
        TensorEntry.model_validate({"name": "b", **b}),
        TensorEntry.model_validate({"name": "other/b", **b}),
    ]
    tensors = tensors_of(entries, data)
    weights = {"a": torch.zeros(1, dtype=torch.bfloat16), "b": torch.zeros(2, 3)}
    buffer = DoubleBuffer(weights)
    buffer.swap(buffer.prepare(of_policy(tensors)))
    assert weights["a"].view(torch.uint8).tolist() == payload[:2].tolist()
    assert weights["b"].flatten().view(torch.uint8).tolist() == payload[2:].tolist()
    assert set(of_policy(tensors, "other")) == {"b"}


async def test_an_engine_computes_with_weights_where_they_lie_in_shared_memory(
    tmp_path: Path,
) -> None:
    payloads = [np.full((2, 1 << 18), number, np.float32) for number in range(3)]
    memory = SharedMemory(JobScope("ada", "j"), 1 << 30, root=tmp_path)
    weights = {"a": torch.zeros(1 << 18), "b": torch.zeros(1 << 18)}
    buffer = DoubleBuffer(weights)

    def given(data: memoryview) -> dict[str, TensorSource]:
        half = len(data) // 2
        views = {"a": data[:half], "b": data[half:]}
        return {name: TensorBytes("float32", (1 << 18,), view) for name, view in views.items()}

    first = await memory.offer("0" * 64, [payloads[1].data.cast("B")])
    assert first is not None
    buffer.swap(buffer.prepare(given(first)))
    place = np.frombuffer(first, np.uint8).ctypes.data
    assert weights["a"].data_ptr() == place
    assert float(weights["b"].mean()) == 1
    # private memory after that is memory of its own: nothing is written over what is shared
    for number in (2, 0):
        buffer.swap(buffer.prepare(given(payloads[number].data.cast("B"))))
        assert {float(tensor.mean()) for tensor in weights.values()} == {number}
    assert float(np.frombuffer(first, np.float32).mean()) == 1
