"""When a job is given up: nothing but failed tasks, many in a row.

A failed task is data: it is recorded, its credit returns, and the job goes on. But where every
task fails (the game raises, all prompts are too long) the job would issue tasks for ever; then it
ends with the last task's reason. Pure.
"""

from ...schemas.errors import BrokerError, DataError, EngineError, GameError, TinkermqError
from ...schemas.task import Blame

LEAST_IN_A_ROW = 32
RESERVATION_EXPIRED = "reservation_expired"
_ERRORS: dict[str, type[TinkermqError]] = {
    "engine": EngineError,
    "environment": GameError,
    "sandbox": GameError,
    "task": DataError,
    "broker": BrokerError,
}


class Failures:
    """Counts the tasks that failed since the last one that did not."""

    def __init__(self, batch_size: int) -> None:
        self._limit = max(LEAST_IN_A_ROW, 2 * batch_size)
        self._num_in_a_row = 0

    def note(self, blame: Blame | None) -> None:
        """Take notice of one finished task: why it failed, or None if it did not.

        An agent's reservation that ran out says nothing about the job. Raises the error of the
        boundary that is to blame when too many have failed in a row.
        """
        if blame is None:
            self._num_in_a_row = 0
        elif blame.code != RESERVATION_EXPIRED:
            self._num_in_a_row += 1
        if blame is not None and self._num_in_a_row >= self._limit:
            raise _ERRORS[blame.boundary](
                f"{self._num_in_a_row} tasks in a row failed, the last one: {blame.message}",
                hint=blame.hint,
            )
