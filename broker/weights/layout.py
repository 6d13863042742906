"""Tensors as they travel, and where each lies in the payload of a version. No torch here."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ...schemas.weights import Manifest, TensorEntry
from ...schemas.wire.errors import MessageError
from .history import ITEM_BYTES
from .payloads import Payload


@dataclass(frozen=True, slots=True)
class TensorBytes:
    """One tensor as it travels: little endian, row major."""

    dtype: str
    """`float32`, `bfloat16` or `float16`."""
    shape: tuple[int, ...]
    """Shape."""
    data: Payload
    """Its bytes; those that are published are in the machine's memory."""


def layout(tensors: Mapping[str, TensorBytes]) -> list[TensorEntry]:
    """Say where each tensor lies in the payload, one after the other. Raises MessageError."""
    entries: list[TensorEntry] = []
    offset = 0
    for name, tensor in tensors.items():
        size = tensor.data.nbytes
        entries.append(
            TensorEntry(
                name=name,
                dtype=tensor.dtype,
                shape=list(tensor.shape),
                offset=offset,
                num_bytes=size,
            )
        )
        offset += size
    for entry in entries:
        _check_entry(entry, offset)
    return entries


def check_layout(manifest: Manifest) -> None:
    """Raise MessageError for a manifest whose tensors do not fit its payload."""
    for entry in manifest.tensors:
        _check_entry(entry, manifest.num_bytes)


def _check_entry(entry: TensorEntry, num_bytes: int) -> None:
    size = math.prod(entry.shape) * ITEM_BYTES.get(entry.dtype, 0)
    fits = size == entry.num_bytes and entry.offset + size <= num_bytes
    if not fits or min(entry.shape, default=0) < 0 or entry.dtype not in ITEM_BYTES:
        raise MessageError(
            f"tensor {entry.name} of dtype {entry.dtype} and shape {entry.shape} does not fit "
            f"its {entry.num_bytes} bytes at {entry.offset} of {num_bytes}",
            hint="tensors travel as float32, bfloat16 or float16",
        )
