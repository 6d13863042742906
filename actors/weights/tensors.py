"""Tensors as they come off the wire, and a digest of weights that is computed where they lie.

SHA-256 would need weights in the machine's memory and takes longer than sending them. So the digest
is taken of the sums of rows and columns of squares of 1 MiB, of 64-bit words: a parity of two
dimensions. Damage goes unseen only if at least four words changed, at the corners of a rectangle
and by just the right amounts. It finds damage; it does not keep out somebody who means to deceive.
"""

import hashlib
from collections.abc import Sequence
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


def as_tensor(source: TensorSource) -> torch.Tensor:
    """Return new weights as a tensor; EngineError where they are none."""
    if isinstance(source, torch.Tensor):
        return source.detach()
    tensor = torch.empty(tuple(source[1]), dtype=dtype_of(source))
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
_PART_BYTES = 64 * _SQUARE_BYTES


def fingerprint(payload: Tensor) -> str:
    """Return the digest of uint8[N], hexadecimal."""
    digest = hashlib.sha256(payload.numel().to_bytes(8, "little"))
    parts = [payload[at : at + _PART_BYTES] for at in range(0, payload.numel(), _PART_BYTES)]
    if sums := [total for part in parts for total in _sums(part)]:
        digest.update(torch.cat(sums).cpu().numpy().data)
    return digest.hexdigest()


def _sums(part: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums of the columns and of the rows of whole squares, modulo 2^64."""
    missing = -part.numel() % _SQUARE_BYTES
    whole = torch.nn.functional.pad(part, (0, missing)) if missing else part
    words = whole.view(torch.int64).view(-1, _ROWS, _COLUMNS)
    return words.sum(1).flatten(), words.sum(2).flatten()
