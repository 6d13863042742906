"""Tensors as they come off the wire, and a digest of weights that is computed where they lie.

SHA-256 would need weights in the machine's memory and takes longer than sending them. So the digest
is taken of the sums of rows and columns of squares of 1 MiB, of 64-bit words: a parity of two
dimensions. Damage goes unseen only if at least four words changed, at the corners of a rectangle
and by just the right amounts. It finds damage; it does not keep out somebody who means to deceive.
"""

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from ...schemas.wire.errors import EngineError

TensorSource: TypeAlias = "torch.Tensor | tuple[str, Sequence[int], bytes | bytearray | memoryview]"
"""A tensor, or (dtype name such as `bfloat16`, shape, little-endian row-major bytes)."""

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def dtype_of(source: TensorSource) -> torch.dtype:
    """Return the dtype of new weights; EngineError for one that is not known."""
    if isinstance(source, torch.Tensor):
        return source.dtype
    dtype = DTYPES.get(source[0])
    if dtype is None:
        raise EngineError(
            f"weights of dtype {source[0]!r} cannot be loaded",
            hint=f"publish one of {', '.join(DTYPES)}",
        )
    return dtype


def bytes_of(source: TensorSource) -> np.ndarray:
    """Return new weights as uint8[N], row-major; EngineError for a size that does not fit."""
    if isinstance(source, torch.Tensor):
        flat = source.detach().cpu().contiguous().view(-1).view(torch.uint8)
        return flat.numpy()
    data = np.frombuffer(source[2], dtype=np.uint8)
    expected = prod(source[1]) * dtype_of(source).itemsize
    if data.size != expected:
        raise EngineError(
            f"a tensor of shape {list(source[1])} has {data.size} bytes instead of {expected}",
            hint="the payload is damaged: fetch it again",
        )
    return data


def as_tensor(source: TensorSource, *, pinned: bool = False) -> torch.Tensor:
    """Return new weights as a tensor, of bytes in `pinned` memory; EngineError if they are none."""
    if isinstance(source, torch.Tensor):
        return source.detach()
    tensor = torch.empty(tuple(source[1]), dtype=dtype_of(source), pin_memory=pinned)
    if tensor.numel():
        np.copyto(tensor.view(-1).view(torch.uint8).numpy(), bytes_of(source))
    else:
        bytes_of(source)
    return tensor


def shape_of(source: TensorSource) -> tuple[int, ...]:
    """Return the shape of new weights."""
    return tuple(source.shape) if isinstance(source, torch.Tensor) else tuple(source[1])


# -- the digest ------------------------------------------------------------------------------------

_ROWS, _COLUMNS, _WORD_BYTES = 256, 512, 8
_SQUARE_BYTES = _ROWS * _COLUMNS * _WORD_BYTES
PART_BYTES = 64 * _SQUARE_BYTES
"""Of the payload that is moved and digested at a time."""


def fingerprint(payload: Tensor) -> str:
    """Return the digest of uint8[N], hexadecimal."""
    digest = Fingerprint(payload.numel())
    for at in range(0, payload.numel(), PART_BYTES):
        digest.update(payload[at : at + PART_BYTES])
    return digest.hexdigest()


class Fingerprint:
    """The digest of a payload that comes in parts of `PART_BYTES`, of which the last is shorter."""

    def __init__(self, num_bytes: int) -> None:
        """`num_bytes` is the size of the payload."""
        self._digest = hashlib.sha256(num_bytes.to_bytes(8, "little"))
        self._totals: list[Tensor] = []

    def update(self, part: Tensor) -> None:
        """Take in the next uint8[`PART_BYTES`]; its memory may be used again after this."""
        self._totals.extend(_sums(part))

    def hexdigest(self) -> str:
        """Return the digest of all parts, hexadecimal."""
        if self._totals:
            self._digest.update(torch.cat(self._totals).cpu().numpy().data)
            self._totals = []
        return self._digest.hexdigest()


class Assembler:
    """Makes tensors of a payload that comes in parts, each as soon as it is whole."""

    def __init__(self, entries: Iterable[tuple[str, str, Sequence[int], int]]) -> None:
        """`entries` are name, dtype, shape, and first byte in the payload, in ascending order."""
        self._entries = deque(
            (name, DTYPES[dtype], tuple(shape), offset) for name, dtype, shape, offset in entries
        )
        self._place = 0
        self._open: tuple[Tensor, int] | None = None
        """The bytes of the first entry, and how many have come; None before its first one."""

    def add(self, part: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Take in the next uint8[N]; yield the tensors that are whole now, on its device.

        They have memory of their own; that of `part` may be used again after the last one.
        """
        end = self._place + part.numel()
        while self._entries and self._entries[0][3] <= end:
            name, dtype, shape, offset = self._entries[0]
            if self._open is None:
                size = prod(shape) * dtype.itemsize
                self._open = torch.empty(size, dtype=torch.uint8, device=part.device), 0
            buffer, filled = self._open
            start = offset + filled - self._place
            piece = part[start : start + buffer.numel() - filled]
            buffer[filled : filled + piece.numel()].copy_(piece)
            filled += piece.numel()
            if filled < buffer.numel():
                self._open = buffer, filled
                break
            self._open = None
            self._entries.popleft()
            yield name, buffer.view(dtype).view(shape)
        self._place = end

    @property
    def is_done(self) -> bool:
        """Whether all tensors have come."""
        return not self._entries


def _sums(part: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums of the columns and of the rows of whole squares, modulo 2^64."""
    missing = -part.numel() % _SQUARE_BYTES
    whole = torch.nn.functional.pad(part, (0, missing)) if missing else part
    words = whole.view(torch.int64).view(-1, _ROWS, _COLUMNS)
    return words.sum(1).flatten(), words.sum(2).flatten()
