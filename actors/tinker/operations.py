"""The interface of the trainer to its adapters, one running operation, and the archive of all.

All of it runs in one thread, one call after the other.
"""

import hashlib
import os
import shutil
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ...schemas.tinker.datum import AdamParams, Datum, LoraSpec, LossResult
from ...schemas.tinker.names import ModelName
from ...schemas.tinker.operation import Company, ModelOperation, OperationResult


class RunningLoss(Protocol):
    """A loss that is computed one micro-batch after the other."""

    @property
    def num_left(self) -> int:
        """Micro-batches that are still to be computed."""
        ...

    @property
    def next_tokens(self) -> int:
        """Tokens of the next one."""
        ...

    @property
    def companies(self) -> list[Company]:
        """Beside how much those were computed that are."""
        ...

    def result(self) -> LossResult:
        """Return the loss, once all are computed."""
        ...


class Adapters(Protocol):
    """The adapters, with their gradients and optimisers."""

    def create(self, model_id: str, spec: LoraSpec) -> None:
        """Make a new adapter; raises ConfigError."""
        ...

    def begin(
        self,
        model_id: str,
        data: Sequence[Datum],
        loss_fn: str,
        config: Mapping[str, float | str],
        *,
        backward: bool = True,
        operation: str = "",
        companies: Sequence[Company] | None = None,
    ) -> RunningLoss:
        """Lay out a loss, which with `backward` adds its gradients; raises DataError, ConfigError.

        `operation` is what it is called when the step behind it fails because of it. With the
        `companies` of an earlier time it comes to the same bits.
        """
        ...

    def advance(self, losses: Sequence[Any]) -> Sequence[RunningLoss]:
        """Compute the next micro-batch of the first loss; return of which losses one is computed.

        With it those of others may be computed that fit. All of them are of `begin`.
        """
        ...

    def refuse(self, model_id: str, *, operation: str, reason: str) -> None:
        """Let the step behind a loss fail that could not be laid out at all."""
        ...

    def optim_step(self, model_id: str, params: AdamParams) -> dict[str, float]:
        """Take a step with the gradients since the last; raises when one of these failed."""
        ...

    def save(
        self, model_id: str, folder: Path, *, with_optimizer: bool, lasting: bool = True
    ) -> None:
        """Write an adapter to a folder that is not there yet, whole or not at all.

        One that is not `lasting` may be lost with the machine, not with a process.
        """
        ...

    def load(self, model_id: str, folder: Path, *, with_optimizer: bool) -> None:
        """Make an adapter what a folder holds; the model need not be there. Raises ModelError."""
        ...

    def evict(self, model_id: str) -> None:
        """Forget a model."""
        ...

    def suspend(self, model_id: str, file: Path) -> None:
        """Write all that a model has in memory to a file, and forget it; raises StorageError."""
        ...

    def resume(self, model_id: str, file: Path) -> None:
        """Make a model what it was when it was suspended, to the bit; raises ModelError."""
        ...

    def save_pending(self, model_id: str, file: Path) -> None:
        """Write what is pending for a model's next optim_step; raises StorageError."""
        ...

    def load_pending(self, model_id: str, file: Path) -> None:
        """Take back what is pending, once the adapter is loaded; raises ModelError."""
        ...

    def num_bytes_of(self, spec: LoraSpec) -> int:
        """Return the most bytes that such a model will hold; ConfigError for one not offered."""
        ...


# -- a running operation ---------------------------------------------------------------------------

Piece = int | OperationResult
"""Tokens of what was done, or the result."""
RunningPieces = Generator[Piece | RunningLoss, None, None]
"""What `OperationApplier.begin` returns."""


class RunningOperation:
    """Does one operation; its caller computes the micro-batches of its loss."""

    def __init__(self, pieces: RunningPieces) -> None:
        """Begin nothing yet."""
        self._pieces = pieces
        self._loss: RunningLoss | None = None

    @property
    def loss(self) -> RunningLoss:
        """The loss whose next micro-batch is to be computed, as `next` has said."""
        assert self._loss is not None
        return self._loss

    def next(self) -> Piece | None:
        """Do the next piece; None says that first a micro-batch of `loss` is to be computed."""
        if self._loss is None:
            piece = next(self._pieces)
            if isinstance(piece, int | OperationResult):
                return piece
            self._loss = piece
        return None

    def computed(self) -> None:
        """Go on: the next micro-batch of `loss` is computed."""
        self._loss = None

    def failed(self, error: Exception) -> OperationResult:
        """Continue after a failed micro-batch; return its error."""
        self._loss = None
        result = self._pieces.throw(error)
        assert isinstance(result, OperationResult)
        return result


# -- the archive of operations that took effect, so that a session can be replayed -----------------
# Each model has a folder of segments; a trainer begins a segment of its own, so that what a crash
# has cut off stands at the end of one. A number that is there twice was done again after a crash:
# the last counts. Operations are kept as they came, of results a digest.

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
