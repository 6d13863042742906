"""The interface of the trainer to its adapters, and one running operation.

All of it runs in one thread, one call after the other.
"""

from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ...schemas.tinker.datum import AdamParams, Datum, LoraSpec, LossResult
from ...schemas.tinker.operation import Company, OperationResult


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
