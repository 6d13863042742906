"""One running operation, applied piece by piece, and the results of failed ones."""

from collections.abc import Generator
from typing import TYPE_CHECKING

from ...schemas.tinker.operation import OperationResult
from ...schemas.wire.bounds import MAX_CHARS
from ...schemas.wire.errors import TinkermqError

if TYPE_CHECKING:  # the models of a trainer need no torch
    from .training.loss_pass import LossPass

Piece = int | OperationResult
"""Tokens of a finished piece, or the operation's result."""
RunningPieces = Generator["Piece | LossPass", None, None]
"""What `OperationApplier.begin` returns."""


class RunningOperation:
    """Does one operation; its caller computes the micro-batches of its loss."""

    def __init__(self, pieces: RunningPieces) -> None:
        """Start with the first call of `next`."""
        self._pieces = pieces
        self._loss: LossPass | None = None

    @property
    def loss(self) -> "LossPass":
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


def as_failure(error: TinkermqError) -> OperationResult:
    """Return the result of an operation that raised an error, whose message is cut if long."""
    message = error.message[:MAX_CHARS]
    message = f"{message} ({error.hint[:MAX_CHARS]})" if error.hint else message
    mistake = error.is_mistake or 400 <= error.status < 500
    return OperationResult(state="failed", error=message, category="user" if mistake else "server")
