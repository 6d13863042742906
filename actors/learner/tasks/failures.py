"""When a job is given up: nothing but failed tasks, many in a row, or nothing at all.

A failed task is data: it is recorded, its credit returns, and the job goes on. But where every
task fails (the game raises, all prompts are too long) the job would issue tasks for ever; then it
ends with the last task's reason. And where nothing comes for very long, as when the client that
hosts the game has gone for good, it would hold its slots for ever.
"""

import time
from collections.abc import Callable

from ....schemas.task import Blame
from ....schemas.wire.errors import DataError, GameError, TinkermqError, of_boundary

LEAST_IN_A_ROW = 32
RESERVATION_EXPIRED = "reservation_expired"


def deserted(idle_s: float, *, external: bool = False) -> TinkermqError:
    """Return the error of a job of which nothing was heard for too long.

    `external`: its tasks or trajectories come from outside.
    """
    if external:
        return DataError(
            f"nobody published a task or a group for {idle_s:g} s (limits.idle_s), and the run "
            "needs more of them for its last steps",
            hint="groups that could not be trained (event `groups_dropped`) have to be replaced: "
            "resume the run and publish more; it goes on from its last checkpoint",
        )
    return GameError(
        f"no task was finished for {idle_s:g} s (limits.idle_s): the environments may have gone",
        hint="bring them back and resume the run; it goes on from its last checkpoint",
    )


class Failures:
    """Counts the tasks that failed since the last one that did not, and the time since any came."""

    def __init__(
        self,
        batch_size: int,
        idle_s: float,
        clock: Callable[[], float] = time.monotonic,
        *,
        external: bool = False,
    ) -> None:
        """Give up after `idle_s` without a task that ended."""
        self._limit = max(LEAST_IN_A_ROW, 2 * batch_size)
        self._num_in_a_row = 0
        self._idle_s = idle_s
        self._external = external
        self._clock = clock
        self._heard = clock()

    def heard(self) -> None:
        """Take notice that the job is not idle, or not to blame for it."""
        self._heard = self._clock()

    def idle(self) -> TinkermqError | None:
        """Return the error of a job of which nothing was heard for too long, or None."""
        late = self._clock() - self._heard >= self._idle_s
        return deserted(self._idle_s, external=self._external) if late else None

    def note(self, blame: Blame | None) -> None:
        """Take notice of one finished task: why it failed, or None if it did not.

        An agent's reservation that ran out says nothing about the job. Raises the error of the
        boundary that is to blame when too many have failed in a row.
        """
        self.heard()
        if blame is None:
            self._num_in_a_row = 0
        elif blame.code != RESERVATION_EXPIRED:
            self._num_in_a_row += 1
        if blame is not None and self._num_in_a_row >= self._limit:
            raise of_boundary(blame.boundary)(
                f"{self._num_in_a_row} tasks in a row failed, the last one: {blame.message}",
                hint=blame.hint,
            )
