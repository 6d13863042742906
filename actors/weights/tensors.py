"""Tensors of weights: their transfer format, layout in a payload, and a digest on GPUs.

The digest of the `nccl` transport is a fingerprint: SHA-256 would need weights in host memory and
takes longer than sending them. The fingerprint covers the sums of rows and columns of squares of 1
MiB, of 64-bit words: a two-dimensional parity. Damage is undetected only if at least four words
changed, at the corners of a rectangle and by matching amounts. It detects damage, not forged
payloads.
"""

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from ...schemas.weights import Manifest, TensorEntry
from ...schemas.wire.errors import EngineError, MessageError


@dataclass(frozen=True, slots=True)
class TensorBytes:
    """A tensor in host memory in transfer format: little endian, row major."""

    dtype: str
    """A name in `DTYPES`."""
    shape: Sequence[int]
    data: memoryview


class CopiedWeights(dict[str, TensorBytes]):
    """The tensors of a version, by name."""

    fingerprint = ""
    """Digest of all bytes in order; empty: not computed."""


TensorSource: TypeAlias = Tensor | TensorBytes
"""A tensor of new weights; a tensor received on a GPU is a tensor there."""
Payload: TypeAlias = memoryview | Tensor
"""All tensors of a version, concatenated; on a GPU uint8[N]."""

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""Dtypes of transferred weights."""


def layout(tensors: Mapping[str, TensorBytes]) -> list[TensorEntry]:
    """Return the layout of a payload of concatenated tensors. Raises MessageError."""
    entries: list[TensorEntry] = []
    offset = 0
    for name, tensor in tensors.items():
        entries.append(entry_of(name, tensor, offset))
        offset += tensor.data.nbytes
    for entry in entries:
        _check_entry(entry, offset)
    return entries


def entry_of(name: str, tensor: TensorBytes, offset: int) -> TensorEntry:
    """Return the entry of a tensor whose first byte is at `offset`."""
    return TensorEntry(
        name=name,
        dtype=tensor.dtype,
        shape=list(tensor.shape),
        offset=offset,
        num_bytes=tensor.data.nbytes,
    )


def check_layout(manifest: Manifest) -> None:
    """Raise MessageError for a manifest whose tensors do not fit its payload."""
    for entry in manifest.tensors:
        _check_entry(entry, manifest.num_bytes)


def _check_entry(entry: TensorEntry, num_bytes: int) -> None:
    dtype = DTYPES.get(entry.dtype)
    size = 0 if dtype is None else prod(entry.shape) * dtype.itemsize
    fits = size == entry.num_bytes and entry.offset + size <= num_bytes
    if dtype is None or not fits or min(entry.shape, default=0) < 0:
        raise MessageError(
            f"tensor {entry.name} of dtype {entry.dtype} and shape {entry.shape} does not fit "
            f"its {entry.num_bytes} bytes at {entry.offset} of {num_bytes}",
            hint="tensors travel as float32, bfloat16 or float16",
        )


def tensors_of(entries: Iterable[TensorEntry], payload: Payload) -> dict[str, TensorSource]:
    """Return the tensors of a version: views of its payload; on a GPU, copies if unaligned."""

    def source(entry: TensorEntry) -> TensorSource:
        data = payload[entry.offset : entry.offset + entry.num_bytes]
        if isinstance(data, memoryview):
            return TensorBytes(entry.dtype, tuple(entry.shape), data)
        dtype = DTYPES[entry.dtype]
        is_aligned = data.storage_offset() % dtype.itemsize == 0
        return (data if is_aligned else data.clone()).view(dtype).view(entry.shape)

    return {entry.name: source(entry) for entry in entries}


def dtype_of(source: TensorSource) -> torch.dtype:
    """Return the dtype of new weights; EngineError for an unknown one."""
    if isinstance(source, Tensor):
        return source.dtype
    dtype = DTYPES.get(source.dtype)
    if dtype is None:
        raise EngineError(
            f"weights of dtype {source.dtype!r} cannot be loaded",
            hint=f"publish one of {', '.join(DTYPES)}",
        )
    return dtype


def bytes_of(source: TensorSource) -> np.ndarray:
    """Return new weights as uint8[N], row-major; EngineError for a wrong size."""
    if isinstance(source, Tensor):
        flat = source.detach().cpu().contiguous().view(-1).view(torch.uint8)
        return flat.numpy()
    data = np.frombuffer(source.data, dtype=np.uint8)
    expected = prod(source.shape) * dtype_of(source).itemsize
    if data.size != expected:
        raise EngineError(
            f"a tensor of shape {list(source.shape)} has {data.size} bytes instead of {expected}",
            hint="the payload is damaged: fetch it again",
        )
    return data


def in_bytes(source: TensorSource) -> TensorBytes:
    """Return new weights in host memory; EngineError for a wrong size."""
    name = str(dtype_of(source)).removeprefix("torch.")
    return TensorBytes(name, tuple(source.shape), bytes_of(source).data)


def as_tensor(source: TensorSource, *, pinned: bool = False) -> Tensor:
    """Return new weights as a tensor; EngineError for a wrong size."""
    if isinstance(source, Tensor):
        return source.detach()
    tensor = torch.empty(tuple(source.shape), dtype=dtype_of(source), pin_memory=pinned)
    if tensor.numel():
        np.copyto(tensor.view(-1).view(torch.uint8).numpy(), bytes_of(source))
    else:
        bytes_of(source)
    return tensor


# -- which tensors new weights must have -----------------------------------------------------------

_NAMES_SHOWN = 8


class WeightNames:
    """The tensors that change between versions; a tied tensor has several names."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        """`weights` are the tensors by name, on any device."""
        self.tensors: list[Tensor] = []
        self.names: list[list[str]] = []
        """The names of each of `tensors`."""
        seen: dict[int, int] = {}
        for name, tensor in weights.items():
            index = seen.setdefault(id(tensor), len(self.tensors))
            if index == len(self.tensors):
                self.tensors.append(tensor)
                self.names.append([])
            self.names[index].append(name)

    def check(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Raise EngineError listing the names that are missing, unknown, or of the wrong shape."""
        known = {name for names in self.names for name in names}
        missing = [names[0] for names in self.names if not any(name in shapes for name in names)]
        unknown = sorted(name for name in shapes if name not in known)
        wrong = [
            f"{name} {list(shapes[name])}, the model's is {list(tensor.shape)}"
            for tensor, names in zip(self.tensors, self.names, strict=True)
            for name in names
            if name in shapes and tuple(shapes[name]) != tuple(tensor.shape)
        ]
        problems: list[str] = []
        for what, names in (("missing", missing), ("unknown", unknown), ("wrong shape", wrong)):
            if names:
                more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
                problems.append(f"{what}: {', '.join(names[:_NAMES_SHOWN])}{more}")
        if problems:
            raise EngineError(
                f"the new weights do not fit the model: {'; '.join(problems)}",
                hint="learner and generator must run the same model",
            )

    def checked(self, tensors: Mapping[str, TensorSource]) -> dict[str, TensorSource]:
        """Return each tensor under one of its names.

        Raises EngineError for names and shapes that do not fit the model, for an invalid dtype or
        size, and for different values under two names of one tensor.
        """
        self.check({name: tensor.shape for name, tensor in tensors.items()})
        by_name: dict[str, TensorSource] = {}
        for names in self.names:
            first, *others = [name for name in names if name in tensors]
            by_name[first] = tensors[first]
            for other in others:
                both = [as_tensor(tensors[name]).float() for name in (first, other)]
                if not torch.equal(*both):
                    raise EngineError(
                        f"{first} and {other} are one tensor in this model, the new weights give "
                        "two",
                        hint="learner and generator must both tie their embeddings",
                    )
        return by_name


# -- the digest ------------------------------------------------------------------------------------

_ROWS, _COLUMNS, _WORD_BYTES = 256, 512, 8
_SQUARE_BYTES = _ROWS * _COLUMNS * _WORD_BYTES
PART_BYTES = 64 * _SQUARE_BYTES
"""Bytes of the payload that are moved and digested at a time."""


def fingerprint(payload: Tensor) -> str:
    """Return the digest of uint8[N], hexadecimal."""
    digest = Fingerprint(payload.numel())
    for at in range(0, payload.numel(), PART_BYTES):
        digest.update(payload[at : at + PART_BYTES])
    return digest.hexdigest()


class Fingerprint:
    """The digest of a payload in parts of `PART_BYTES`, of which the last is shorter."""

    def __init__(self, num_bytes: int) -> None:
        """`num_bytes` is the size of the payload."""
        self._digest = hashlib.sha256(num_bytes.to_bytes(8, "little"))
        self._totals: list[Tensor] = []

    def update(self, part: Tensor) -> None:
        """Add the next uint8[`PART_BYTES`]; its memory may be reused afterwards."""
        self._totals.extend(_sums(part))

    def hexdigest(self) -> str:
        """Return the digest of all parts, hexadecimal."""
        if self._totals:
            self._digest.update(torch.cat(self._totals).cpu().numpy().data)
            self._totals = []
        return self._digest.hexdigest()


class DigestedCopy:
    """Copies tensors one after another into host memory, in parts that are digested on a device."""

    def __init__(self, target: Tensor, device: torch.device) -> None:
        """`target` is uint8[N], pinned for a GPU."""
        self._target = target
        self._part = torch.empty(min(PART_BYTES, target.numel()), dtype=torch.uint8, device=device)
        self._digest = Fingerprint(target.numel())
        self._filled: int = 0
        self._copied: int = 0

    def add(self, raw: Tensor) -> None:
        """Add the next uint8[M]."""
        added = 0
        while added < raw.numel():
            room = self._part[self._filled : self._filled + raw.numel() - added]
            room.copy_(raw[added : added + room.numel()])
            added += room.numel()
            self._filled += room.numel()
            if self._filled == self._part.numel():
                self._flush()

    def finish(self) -> str:
        """Return the digest, hexadecimal, once the target has all tensors."""
        self._flush()
        return self._digest.hexdigest()

    def _flush(self) -> None:
        part, self._filled = self._part[: self._filled], 0
        if part.numel():
            self._digest.update(part)
        self._target[self._copied : self._copied + part.numel()].copy_(part)
        self._copied += part.numel()


class Assembler:
    """Assembles tensors from a payload in parts, each as soon as it is complete."""

    def __init__(self, entries: Iterable[tuple[str, str, Sequence[int], int]]) -> None:
        """`entries` are name, dtype, shape, and first byte in the payload, in ascending order."""
        self._entries = deque(
            (name, DTYPES[dtype], tuple(shape), offset) for name, dtype, shape, offset in entries
        )
        self._place = 0
        self._open: tuple[Tensor, int] | None = None
        """The first entry's bytes and the number received; None before the first byte."""

    def add(self, part: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Add the next uint8[N]; yield the tensors that are now complete, on its device.

        They have their own memory; the memory of `part` may be reused after the last one.
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
        """Whether all tensors are complete."""
        return not self._entries


def _sums(part: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums of the columns and of the rows of whole squares, modulo 2^64."""
    missing = -part.numel() % _SQUARE_BYTES
    whole = torch.nn.functional.pad(part, (0, missing)) if missing else part
    words = whole.view(torch.int64).view(-1, _ROWS, _COLUMNS)
    return words.sum(1).flatten(), words.sum(2).flatten()
