"""An archive of operations that took effect, so that a session can be replayed.

Each model has a folder of segments; a trainer begins a segment of its own, so that what a crash has
cut off stands at the end of one. A number that is there twice was done again after a crash: the
last counts. Operations are kept as they came, of results a digest.
"""

import hashlib
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ...schemas.tinker.names import ModelName
from ...schemas.tinker.operation import ModelOperation, OperationResult

_FOLDER = "operations"
_SEGMENT_BYTES = 64 << 20
_LENGTH_BYTES, _DIGEST_BYTES = 4, 16


@dataclass(frozen=True)
class ArchivedOperation:
    """An operation, and what its result was."""

    operation: ModelOperation
    digest: bytes


def digest_of(result: OperationResult) -> bytes:
    """Return a digest of what a result says."""
    hashed = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in (result.state.encode(), result.error.encode(), result.body):
        hashed.update(len(part).to_bytes(8) + part)
    return hashed.digest()


class OperationArchive:
    """Keeps the operations of all models of a trainer, up to some bytes."""

    def __init__(self, folder: Path, *, max_bytes: int) -> None:
        """Keep them below `folder`; beyond `max_bytes` (0: none) those of the oldest models go."""
        self._folder = folder
        self._max_bytes = max_bytes
        self._bytes = sum(item.stat().st_size for item in folder.glob(f"*/*/{_FOLDER}/*"))
        self._segments: dict[str, Path] = {}

    def add(self, user: str, operation: ModelOperation, result: OperationResult) -> None:
        """Keep an operation that has taken effect; raises OSError."""
        if not self._max_bytes:
            return
        body = operation.model_copy(update={"companies": result.companies}).to_bytes()
        packed = len(body).to_bytes(_LENGTH_BYTES) + digest_of(result) + body
        segment = self._segment(user, operation)
        with segment.open("ab") as file:
            file.write(packed)
        self._bytes += len(packed)
        if self._bytes > self._max_bytes:
            self._make_room(segment.parent)

    def _segment(self, user: str, operation: ModelOperation) -> Path:
        match = self._segments.get(f"{user}/{operation.model}")
        if match is not None and match.exists() and match.stat().st_size < _SEGMENT_BYTES:
            return match
        place = place_of(self._folder, user, operation.name.model)
        place.mkdir(parents=True, exist_ok=True)
        name = f"{time.time_ns():020d}-{os.getpid()}.ops"
        self._segments[f"{user}/{operation.model}"] = place / name
        return place / name

    def _make_room(self, current: Path) -> None:
        """Forget the models of which nothing was kept for the longest time."""
        places = sorted(self._folder.glob(f"*/*/{_FOLDER}"), key=_last_used)
        for place in places:
            if self._bytes <= self._max_bytes:
                return
            if place != current:
                self._bytes -= sum(item.stat().st_size for item in place.iterdir())
                shutil.rmtree(place, ignore_errors=True)


def _last_used(place: Path) -> float:
    return max((item.stat().st_mtime for item in place.iterdir()), default=0.0)


def place_of(folder: Path, user: str, model: ModelName) -> Path:
    """Return where the operations of a model are kept."""
    return folder / user / f"{model.session}.train.{model.number}" / _FOLDER


def read_archived(place: Path) -> list[ArchivedOperation]:
    """Return the operations of a model in order, without what is not whole."""
    collected: dict[int, ArchivedOperation] = {}
    for segment in sorted(place.glob("*.ops")):
        for archived in _read(segment):
            collected[archived.operation.seq] = archived
    return [collected[seq] for seq in sorted(collected)]


def _read(segment: Path) -> Iterator[ArchivedOperation]:
    with segment.open("rb") as file:
        while len(length := file.read(_LENGTH_BYTES)) == _LENGTH_BYTES:
            digest, body = file.read(_DIGEST_BYTES), file.read(int.from_bytes(length))
            if len(body) < int.from_bytes(length):
                return  # a trainer was killed while it wrote this
            yield ArchivedOperation(ModelOperation.from_bytes(body), digest)
