"""The interface of the trainer to its adapters, and one running operation.

All of it runs in one thread, one call after the other.
"""

from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ...schemas.tinker.datum import AdamParams, Datum, LoraSpec, LossResult
from ...schemas.tinker.operation import Company, OperationResult


class RunningLoss(Protocol):
    """A loss that is computed one micro-batch at a time."""

    @property
    def num_left(self) -> int:
        """Number of micro-batches not yet computed."""
        ...

    @property
    def next_tokens(self) -> int:
        """Tokens of the next micro-batch."""
        ...

    @property
    def companies(self) -> list[Company]:
        """The companies of the computed micro-batches."""
        ...

    def result(self) -> LossResult:
        """Return the loss after the last micro-batch."""
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
        """Prepare a loss, which with `backward` adds its gradients; raises DataError, ConfigError.

        `operation` names it in the error of an optim_step that fails because of it. With the
        `companies` of an earlier computation the result has the same bits.
        """
        ...

    def advance(self, losses: Sequence[Any]) -> Sequence[RunningLoss]:
        """Compute the next micro-batch of the first loss, and of others that fit in the same pass.

        `losses` are results of `begin`. Returns those of which a micro-batch was computed.
        """
        ...

    def refuse(self, model_id: str, *, operation: str, reason: str) -> None:
        """Fail a model's next optim_step because of a loss that could not be read."""
        ...

    def optim_step(self, model_id: str, params: AdamParams) -> dict[str, float]:
        """Apply the gradients since the last step; DataError if one of their losses failed."""
        ...

    def save(
        self, model_id: str, folder: Path, *, with_optimizer: bool, lasting: bool = True
    ) -> None:
        """Write an adapter to a new folder, completely or not at all.

        One that is not `lasting` survives the process but may be lost with the machine.
        """
        ...

    def load(self, model_id: str, folder: Path, *, with_optimizer: bool) -> None:
        """Load an adapter from a folder, into a new model if there is none. Raises ModelError."""
        ...

    def evict(self, model_id: str) -> None:
        """Forget a model."""
        ...

    def suspend(self, model_id: str, file: Path) -> None:
        """Write all of a model's memory to a file, and evict it; raises StorageError."""
        ...

    def resume(self, model_id: str, file: Path) -> None:
        """Restore a suspended model, to the bit; raises ModelError."""
        ...

    def save_pending(self, model_id: str, file: Path) -> None:
        """Write gradients and failures for the next optim_step; raises StorageError."""
        ...

    def load_pending(self, model_id: str, file: Path) -> None:
        """Restore them after the adapter was loaded; raises ModelError."""
        ...

    def num_bytes_of(self, spec: LoraSpec) -> int:
        """Return the most bytes that such a model takes; ConfigError if it is not offered."""
        ...


# -- a running operation ---------------------------------------------------------------------------

Piece = int | OperationResult
"""Tokens of a finished piece, or the operation's result."""
RunningPieces = Generator[Piece | RunningLoss, None, None]
"""What `OperationApplier.begin` returns."""


class RunningOperation:
    """Does one operation; its caller computes the micro-batches of its loss."""

    def __init__(self, pieces: RunningPieces) -> None:
        """Start with the first call of `next`."""
        self._pieces = pieces
        self._loss: RunningLoss | None = None

    @property
    def loss(self) -> RunningLoss:
        """The loss whose next micro-batch must be computed, after `next` has returned None."""
        assert self._loss is not None
        return self._loss

    def next(self) -> Piece | None:
        """Do the next piece; None: the next micro-batch of `loss` must be computed first."""
        if self._loss is None:
            piece = next(self._pieces)
            if isinstance(piece, int | OperationResult):
                return piece
            self._loss = piece
        return None

    def computed(self) -> None:
        """Continue: the next micro-batch of `loss` was computed."""
        self._loss = None

    def failed(self, error: Exception) -> OperationResult:
        """Continue after a failed micro-batch; return its error."""
        self._loss = None
        result = self._pieces.throw(error)
        assert isinstance(result, OperationResult)
        return result
