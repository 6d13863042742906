"""Pieces of operations, as the trainer's thread does them: one, or a loss and others beside it."""

from collections.abc import Sequence
from typing import NamedTuple

from ...schemas.tinker.operation import Company, ModelOperation, OperationResult
from ...schemas.wire.errors import ModelError
from .applying import Applying, as_failure
from .doing import Doing, Piece
from .models import TrainedModel
from .residence import Residence


class Turn(NamedTuple):
    """An operation that may be gone on with."""

    model: TrainedModel
    operation: ModelOperation
    companies: Sequence[Company] | None
    """Beside whom it was computed before, if it was."""


class Pieces:
    """Does the next pieces of operations."""

    def __init__(self, applying: Applying, residence: Residence, *, micro_tokens: int) -> None:
        """Compute about `micro_tokens` at once, if there are losses of several models."""
        self._applying = applying
        self._residence = residence
        self._micro_tokens = micro_tokens

    def do(self, turn: Turn, others: Sequence[Turn]) -> list[tuple[Turn, Piece]]:
        """Do the next piece of an operation; raises StorageError where there is no room.

        If that is a micro-batch, those of `others` are computed with it that fit. Returns what came
        of each that was done.
        """
        piece = self._begun(turn)
        if piece is not None:
            return [(turn, piece)]
        waiting, done = self._company(turn, others)
        losses = [_doing(one).loss for one in waiting]
        tokens = [loss.next_tokens for loss in losses]
        try:
            computed = self._applying.advance(losses)
        except Exception as error:  # noqa: BLE001  it is the operation's result
            return [*done, self._noted(turn, _doing(turn).failed(error))]
        for one, loss, num in zip(waiting, losses, tokens, strict=True):
            if loss in computed:
                _doing(one).computed()
                done.append((one, num))
        return done

    def _company(
        self, turn: Turn, others: Sequence[Turn]
    ) -> tuple[list[Turn], list[tuple[Turn, Piece]]]:
        """Return the turns whose losses wait to be computed, and what came of others' beginning."""
        waiting: list[Turn] = [turn]
        done: list[tuple[Turn, Piece]] = []
        room = self._micro_tokens - _doing(turn).loss.next_tokens
        for one in others:
            if room <= 0:
                break
            if not self._residence.fits(one.model):
                continue  # nobody is written down for company
            piece = self._begun(one)
            if piece is not None:
                done.append((one, piece))
                continue
            waiting.append(one)
            room -= _doing(one).loss.next_tokens
        return waiting, done

    def _begun(self, turn: Turn) -> Piece | None:
        """Begin an operation unless it is begun, and go on up to its next micro-batch: None."""
        model = turn.model
        if model.doing is None:
            try:
                self._residence.admit(model)
            except ModelError as error:
                return as_failure(error).model_copy(update={"category": "server"})
            begun = self._applying.begin(model, turn.operation, turn.companies)
            model.doing = Doing(begun)
        piece = model.doing.next()
        return piece if piece is None else self._noted(turn, piece)[1]

    def _noted(self, turn: Turn, piece: Piece) -> tuple[Turn, Piece]:
        if isinstance(piece, OperationResult):
            self._residence.note(turn.model)
        return turn, piece


def _doing(turn: Turn) -> Doing:
    assert turn.model.doing is not None
    return turn.model.doing
