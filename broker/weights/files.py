"""Weights as files on a path that learner and generators share.

A file has the safetensors layout, so that any tool of the field opens it; its data part is the
payload that the digest is of. It is written under another name and renamed, never changed in
place, so a reader that has it mapped reads on undisturbed even after it was removed.
"""

import contextlib
import json
import mmap
import struct
import uuid
from collections.abc import Sequence
from io import FileIO
from pathlib import Path

from ...schemas.weights import TensorEntry
from ...schemas.wire.errors import NotFoundError, StorageError
from ..jetstream.digests import digest_of, new_digest

_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_LENGTH = struct.Struct("<Q")
_WRITE_BYTES = 64 * 2**20


def write_file(path: Path, entries: list[TensorEntry], views: Sequence[memoryview]) -> str:
    """Write the file, then give it its name; return the payload's BLAKE3. Runs in a thread.

    Raises StorageError.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    digest = new_digest()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb", buffering=0) as file:
            file.write(_header(entries))
            for view in views:
                digest.update(view)
                _write_all(file, view)
        temporary.rename(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise StorageError(
            f"the weights cannot be written to {path}: {error}",
            hint="make room, or set weights.folder to a path that can be written",
        ) from error
    return digest.hexdigest()


def read_file(path: Path, num_bytes: int) -> tuple[str, memoryview]:
    """Map the file; return the payload's BLAKE3 and the payload, privately writable.

    Runs in a thread. Raises NotFoundError when it was removed, StorageError.
    """
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except FileNotFoundError as error:
        raise NotFoundError(
            f"there is no weights file {path}",
            hint="it was removed, or this machine does not share weights.folder with the "
            "learner: use weights.transport=object",
        ) from error
    except (OSError, ValueError) as error:
        raise StorageError(f"the weights file {path} cannot be read: {error}") from error
    with contextlib.suppress(AttributeError, OSError):  # only a hint to the kernel
        mapped.madvise(mmap.MADV_WILLNEED)
    payload = memoryview(mapped)[len(mapped) - min(num_bytes, len(mapped)) :]
    return digest_of([payload]), payload


def remove_file(path: Path) -> None:
    """Remove the file; readers that have it mapped keep it."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()


def _header(entries: list[TensorEntry]) -> bytes:
    header = {
        entry.name: {
            "dtype": _NAMES[entry.dtype],
            "shape": entry.shape,
            "data_offsets": [entry.offset, entry.offset + entry.num_bytes],
        }
        for entry in entries
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return _LENGTH.pack(len(text)) + text


def _write_all(file: FileIO, view: memoryview) -> None:
    start = 0
    while start < len(view):
        start += file.write(view[start : start + _WRITE_BYTES]) or 0
