"""An operation that is being done, from one piece to the next; in the trainer's thread."""

from collections.abc import Generator

from ...schemas.tinker.operation import OperationResult
from .adapters import RunningLoss

Piece = int | OperationResult
"""Tokens of what was done, or the result."""
Pieces = Generator[Piece | RunningLoss, None, None]
"""What `Applying.begin` returns."""


class Doing:
    """Does one operation; whoever drives it computes the micro-batches of its loss."""

    def __init__(self, pieces: Pieces) -> None:
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
        """Go on: the next micro-batch could not be computed; returns what is told of it."""
        self._loss = None
        result = self._pieces.throw(error)
        assert isinstance(result, OperationResult)
        return result
