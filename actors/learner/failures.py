"""When a job is given up: nothing but failed or useless tasks, many in a row, or nothing at all.

A failed task is data: it is recorded, its credit returns, and the job goes on. But where every
task fails (the game raises, all prompts are too long) the job would issue tasks for ever; then it
ends with the last task's reason. So it does where tasks succeed and none of their groups can be
trained: all returns of each are equal, a filter leaves them out, they are stale or malformed. And
where nothing comes for very long, as when the client that hosts the game has gone for good, it
would hold its slots for ever.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable

from ...schemas.task import Blame, Dropped, DropReason
from ...schemas.wire import errors

LEAST_IN_A_ROW = 32
LEAST_UNTRAINABLE = 256
UNTRAINABLE_BATCHES = 20
RESERVATION_EXPIRED = "reservation_expired"
_HICCUP = 32
"""After a step so many groups in a row that cannot be trained are nothing special."""
_NOT_COUNTED: frozenset[DropReason] = frozenset({"failed", "duplicate"})
"""Failed tasks are counted by `Failures`; of a duplicate the first was trained or counted."""
_WHY: dict[DropReason, tuple[str, type[errors.TinkermqError], str]] = {
    "equal_rewards": (
        "all returns of each group were equal (algorithm.filter_equal_rewards)",
        errors.RewardError,
        "read some of them (`tinkermq rollouts RUN`): the tasks are too hard or too easy for the "
        "model, or the reward is constant; change data, prompt, reward or "
        "rollout.temperature, or raise rollout.group_size",
    ),
    "filtered": (
        "algorithm.own_filter left them out",
        errors.ConfigError,
        "see what the filter looks at, or leave it out",
    ),
    "stale": (
        "their tokens are older than training.max_staleness allows",
        errors.ConfigError,
        "raise training.max_staleness, or set training.staleness_policy to train",
    ),
    "malformed": (
        "they are malformed (event `groups_dropped` says why)",
        errors.DataError,
        "see whether generators, model and configuration belong together",
    ),
}


def deserted(idle_s: float, *, external: bool = False) -> errors.TinkermqError:
    """Return the error of a job of which nothing was heard for too long.

    `external`: its tasks or trajectories come from outside.
    """
    if external:
        return errors.DataError(
            f"nobody published a task or a group for {idle_s:g} s (limits.idle_s), and the run "
            "needs more of them for its last steps",
            hint="groups that could not be trained (event `groups_dropped`) have to be replaced: "
            "resume the run and publish more; it goes on from its last checkpoint",
        )
    return errors.GameError(
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

    def idle(self) -> errors.TinkermqError | None:
        """Return the error of a job of which nothing was heard for too long, or None."""
        late = self._clock() - self._heard >= self._idle_s
        return deserted(self._idle_s, external=self._external) if late else None

    def note_task(self, blame: Blame | None) -> None:
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
            raise errors.of_boundary(blame.boundary)(
                f"{self._num_in_a_row} tasks in a row failed, the last one: {blame.message}",
                hint=blame.hint,
            )


class Untrainable:
    """Counts the groups in a row that came and could not be trained, since the last step.

    Pure: what is dropped stands in the learner's state and in the log, so that a learner that
    starts again counts the same.
    """

    def __init__(self, batch_size: int, limit: int | None, judged_seq: int = 0) -> None:
        """`limit`: give up after so many, 0 for never, None for the default.

        What came up to the entry `judged_seq` of the log was judged before.
        """
        by_default = max(LEAST_UNTRAINABLE, UNTRAINABLE_BATCHES * batch_size)
        self._limit = by_default if limit is None else limit
        self._batch_size = batch_size
        self._judged_seq = judged_seq
        self._counts: Counter[DropReason] = Counter()
        self._least = self._next_report = batch_size

    @property
    def num_in_a_row(self) -> int:
        """So many came since the last that can be trained."""
        return self._counts.total()

    def count_dropped(self, dropped: Iterable[Dropped], usable: Iterable[int]) -> None:
        """Count anew, of what was `dropped` since the last step; `usable` waits to be trained."""
        after = max(usable, default=self._judged_seq)
        self._counts = Counter(
            item.reason for item in dropped if item.seq > after and item.reason not in _NOT_COUNTED
        )

    def stepped(self) -> None:
        """Take notice of a step: some groups can be trained."""
        self._counts.clear()
        self._least = self._next_report = max(self._batch_size, _HICCUP)

    def give_up(self, seq: int) -> int:
        """Judge all up to an entry of the log, so that a resumed run begins to count; return it."""
        self._judged_seq = seq
        return seq

    @property
    def wait(self) -> str:
        """What a job waits for that has had a batch's worth of them; nothing before."""
        if self.num_in_a_row < self._least:
            return ""
        return f"a group that can be trained: {self._summary()}"

    def due_report(self) -> str:
        """Return the report that is due now: after a batch's worth, and each time they doubled."""
        if self.num_in_a_row < self._next_report:
            return ""
        self._next_report = 2 * self.num_in_a_row
        ends = f"; after {self._limit} the run ends" if self._limit else ""
        return f"{self._summary()}{ends} (limits.untrainable_groups)\n{self._main[2]}"

    def error(self) -> errors.TinkermqError | None:
        """Return the error of a job that has had too many of them, or None."""
        if not self._limit or self.num_in_a_row < self._limit:
            return None
        _, error, remedy = self._main
        return error(
            f"{self._summary()} (limits.untrainable_groups: {self._limit})",
            hint=f"{remedy}; the run goes on from its checkpoint when it is resumed, and with "
            "limits.untrainable_groups=0 it never ends for this",
        )

    @property
    def _main(self) -> tuple[str, type[errors.TinkermqError], str]:
        return _WHY[self._counts.most_common(1)[0][0]]

    def _summary(self) -> str:
        reasons = ", ".join(f"{number} {reason}" for reason, number in sorted(self._counts.items()))
        return (
            f"the last {self.num_in_a_row} groups could not be trained ({reasons}): {self._main[0]}"
        )
