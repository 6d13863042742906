"""Differences between versions of 16-bit weights, and their base versions.

Learner and receivers hold the newest version in memory, and its anchor: the whole version on which
it is based, if it is another one. Nothing here sends or stores bytes.
"""

import os
import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ...broker.jetstream.objects import DigestMismatch, digest_of
from ...schemas.weights import Difference, Manifest, TensorEntry
from ...schemas.wire.errors import MessageError
from .tensors import DTYPES

if TYPE_CHECKING:
    from pyarrow import Codec


# Lossless differences between two versions of 16-bit weights.
#
# An optimiser step at a usual learning rate changes 1 to 15 % of the weights in bfloat16, most of
# them by one unit in the last place. So a difference holds the gaps between changed places and the
# changes of the 16-bit patterns, modulo 2^16: a byte each, with an escape for larger values,
# compressed by zstandard. It consists of blocks, which threads process in parallel and which bound
# the memory. Pure functions of bytes.

_MAGIC = b"TMQD\x01"
_HEAD = struct.Struct("<5sQI")
"""Magic number, 16-bit words of the version, words of a block."""
_BLOCK = struct.Struct("<5I")
"""Number of changes, of escaped gaps, of escaped steps, bytes of the block, compressed bytes."""
_BLOCK_WORDS = 1 << 22
_FAR = 255
"""A gap of this many unchanged words or more is stored in four bytes."""
_WIDE = -128
"""A step that does not fit into one byte is stored in two."""


Words = NDArray[np.uint16]


def encode(base: memoryview, target: memoryview, block_words: int = _BLOCK_WORDS) -> bytes:
    """Return the difference from `base` to `target`, which hold the same number of words.

    Raises ValueError for buffers of different or odd sizes.
    """
    old, new = _words(base), _words(target)
    if old.size != new.size:
        raise ValueError(f"a difference of {old.size} and {new.size} words")
    with _threads() as threads:
        blocks = threads.map(_encode_block, _blocks(old, block_words), _blocks(new, block_words))
        return b"".join([_HEAD.pack(_MAGIC, new.size, block_words), *blocks])


def apply(difference: memoryview, words: memoryview) -> None:
    """Apply a difference to the base in `words`, in place.

    Raises MessageError for a difference that is damaged or has another size; `words` is then
    undefined. Only the digest of the result shows whether the base was the right one.
    """
    target = _words(words)
    try:
        _apply(difference, target)
    except (struct.error, ValueError, IndexError, OSError) as error:
        raise MessageError(
            f"a difference of {len(difference)} bytes does not fit {target.size} words: {error}",
            hint="it is fetched again, or a whole version in its place",
        ) from error


def _apply(difference: memoryview, target: Words) -> None:
    magic, num_words, block_words = _HEAD.unpack_from(difference)
    if magic != _MAGIC or num_words != target.size or not 0 < block_words <= _BLOCK_WORDS:
        raise ValueError("its head has other values")
    place = _HEAD.size
    with _threads() as threads:
        done: list[Future[None]] = []
        for block in _blocks(target, block_words):
            *counts, num_bytes, num_packed = _BLOCK.unpack_from(difference, place)
            place += _BLOCK.size
            packed = difference[place : place + num_packed]
            place += num_packed
            if num_bytes != _block_bytes(*counts) or counts[0] > block_words:
                raise ValueError("its counts contradict each other")
            if counts[0]:
                done.append(threads.submit(_apply_block, packed, num_bytes, block, *counts))
        for block_done in done:
            block_done.result()
    if place != len(difference):
        raise ValueError("it goes on after its end")


def _blocks(words: Words, size: int) -> Iterator[Words]:
    return (words[start : start + size] for start in range(0, words.size, size))


def _encode_block(old: Words, new: Words) -> bytes:
    places = np.flatnonzero(old != new)
    gaps = np.diff(places, prepend=-1) - 1
    steps = (new[places] - old[places]).view(np.int16)  # modulo 2^16
    far = gaps >= _FAR
    wide = (steps <= _WIDE) | (steps > 127)
    streams = (
        np.where(far, _FAR, gaps).astype(np.uint8),
        np.where(wide, _WIDE, steps).astype(np.int8),
        gaps[far].astype("<u4"),
        steps[wide].astype("<i2"),
    )
    text = b"".join(stream.tobytes() for stream in streams)
    packed: bytes = _zstd().compress(text, asbytes=True) if text else b""
    counts = (places.size, streams[2].size, streams[3].size)
    return _BLOCK.pack(*counts, len(text), len(packed)) + packed


def _block_bytes(changes: int, far: int, wide: int) -> int:
    return 2 * changes + 4 * far + 2 * wide


def _apply_block(
    packed: memoryview, num_bytes: int, target: Words, changes: int, far: int, wide: int
) -> None:
    text: bytes = _zstd().decompress(packed, num_bytes, asbytes=True)
    streams = _cut(text, (np.dtype(np.uint8), changes), (np.dtype(np.int8), changes))
    escapes = _cut(text[2 * changes :], (np.dtype("<u4"), far), (np.dtype("<i2"), wide))
    gaps, steps = next(streams).astype(np.int64), next(streams).astype(np.int16)
    gaps[gaps == _FAR] = next(escapes)
    steps[steps == _WIDE] = next(escapes)
    places = np.cumsum(gaps + 1) - 1
    target[places] += steps.view(np.uint16)


def _zstd() -> "Codec":
    """Return Arrow's zstandard, imported late: it is slow, and clients do not need it."""
    from pyarrow import Codec

    return Codec("zstd", compression_level=1)


def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(8, os.cpu_count() or 1), "differences")


def _cut(text: bytes, *kinds: tuple[np.dtype[np.generic], int]) -> Iterator[NDArray[np.generic]]:
    offset = 0
    for dtype, count in kinds:
        yield np.frombuffer(text, dtype, count, offset)
        offset += dtype.itemsize * count


def _words(buffer: memoryview) -> Words:
    return np.frombuffer(buffer, "<u2")


@dataclass(frozen=True, slots=True)
class Whole:
    """A complete version in memory."""

    version: int
    """The policy's version."""
    tensors: list[TensorEntry]
    """Layout of the payload."""
    digest: str
    """SHA-256 of the payload, hexadecimal."""
    payload: memoryview
    """All tensors, concatenated; never modified."""


@dataclass(frozen=True, slots=True)
class Step:
    """A difference that makes a version, and its base."""

    difference: Difference
    base: Whole | None
    """Version to which it is applied; None: the anchor, which must be fetched first."""
    anchor: Whole | None
    """The anchor of the result, if it is held and is not the base."""


class WeightHistory:
    """The newest version and its anchor."""

    def __init__(self, *, enabled: bool, full_snapshot_every: int) -> None:
        """There is no version yet; without `enabled`, none is ever held."""
        self._enabled = enabled
        self._full_snapshot_every = full_snapshot_every
        self.held: list[Whole] = []
        """Held versions, newest first; the last is its anchor, which may be itself."""

    def keeps(self, tensors: Sequence[TensorEntry]) -> bool:
        """Return whether versions of this layout are held: at least half of the bytes 16-bit."""
        num_bytes = {2: 0, 4: 0}
        for entry in tensors:
            num_bytes[DTYPES[entry.dtype].itemsize] += entry.num_bytes
        return self._enabled and num_bytes[2] >= num_bytes[4]

    def hold(self, whole: Whole, anchor: Whole | None = None) -> None:
        """Hold a version unless a newer one is held, as receivers also fetch older ones."""
        is_past = self.held and self.held[0].version > whole.version
        if self.keeps(whole.tensors) and not is_past:
            self.held = [whole] if anchor is None else [whole, anchor]

    def restart(self, whole: Whole) -> None:
        """Hold only a new anchor."""
        self.held = [whole]

    def encode(
        self, version: int, tensors: Sequence[TensorEntry], payload: memoryview
    ) -> list[tuple[Whole, bytes]]:
        """Return the differences for a new version, each with its base.

        A new anchor has only the difference from the previous version. A version with another
        layout has none, nor one whose differences would not be smaller. Runs in a thread.
        """
        if not self.held or self.held[0].tensors != tensors or self.held[0].version >= version:
            return []
        bases = self.held[:1] if self.is_anchor(version) else self.held
        made = [(base, encode(base.payload, payload)) for base in bases]
        return made if sum(len(text) for _, text in made) < len(payload) else []

    def is_anchor(self, version: int) -> bool:
        """Return whether a new version is stored whole, as the base of later versions."""
        return not self.held or version >= self.held[-1].version + self._full_snapshot_every

    def step_to(self, manifest: Manifest) -> Step | None:
        """Return the difference that makes a version; None if the whole version must be fetched."""
        held = {(whole.version, whole.digest): whole for whole in self.held}
        steps = [
            (difference, held.get((difference.base, difference.base_digest)))
            for difference in manifest.differences
        ]
        usable = next((step for step in steps if step[1]), None)
        if manifest.kind != "delta":
            return Step(*usable, anchor=None) if usable else None
        difference, base = usable or steps[-1]
        return Step(difference, base, steps[-1][1])


def make(base: Whole, difference: memoryview, manifest: Manifest, buffer: memoryview) -> None:
    """Copy a base into `buffer` and apply a difference to it. Runs in a thread.

    Raises DigestMismatch if its digest is not the manifest's.
    """
    np.copyto(np.frombuffer(buffer, np.uint8), np.frombuffer(base.payload, np.uint8))
    try:
        apply(difference, buffer)
    except MessageError as error:
        raise DigestMismatch(error.message) from error
    if (digest := digest_of([buffer])) != manifest.digest:
        raise DigestMismatch(f"a difference gives {digest}, the manifest says {manifest.digest}")


def joined(views: Sequence[memoryview]) -> memoryview:
    """Copy views into one buffer."""
    return np.concatenate([np.frombuffer(view, np.uint8) for view in [*views, b""]]).data
