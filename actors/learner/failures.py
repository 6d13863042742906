"""Ends a job after many consecutive failed tasks or useless groups, or a long time without tasks.

A failed task is recorded, its credit returns, and the job continues. If every task fails (the game
raises, all prompts are too long), the job would issue tasks forever; it then ends with the last
task's reason. It also ends if tasks succeed but no group can be trained: the returns of each group
are equal, a filter leaves them out, or they are stale or malformed. If no task finishes for a long
time, for example because the client that hosts the game has left, the job ends to free its slots.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable

from ...schemas.task import Blame, Dropped, DropReason
from ...schemas.wire import errors

LEAST_IN_A_ROW = 32
LEAST_ALIKE = 8
"""So many tasks fail with one error before any succeeds: the game does not work."""
_ALIKE_IN: frozenset[str] = frozenset({"environment", "reward", "task"})
LEAST_UNTRAINABLE = 256
UNTRAINABLE_BATCHES = 20
RESERVATION_EXPIRED = "reservation_expired"
_HICCUP = 32
"""This many consecutive untrainable groups after a step are normal and not reported."""
_NOT_COUNTED: frozenset[DropReason] = frozenset({"failed", "duplicate"})
"""Reasons not counted here: `Failures` counts failed tasks, and the first of duplicates was
counted."""
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
        "check the filter, or remove it",
    ),
    "stale": (
        "their tokens are older than training.max_staleness allows",
        errors.ConfigError,
        "raise training.max_staleness, or set training.staleness_policy to train",
    ),
    "malformed": (
        "they are malformed (event `groups_dropped` says why)",
        errors.DataError,
        "check that generators, model and configuration belong together",
    ),
}


def deserted(idle_s: float, *, external: bool = False) -> errors.TinkermqError:
    """Return the error of a job without finished tasks for too long.

    `external`: its tasks or trajectories come from outside.
    """
    if external:
        return errors.DataError(
            f"nobody published a task or a group for {idle_s:g} s (limits.idle_s), and the run "
            "needs more of them for its last steps",
            hint="groups that could not be trained (event `groups_dropped`) have to be replaced: "
            "resume the run and publish more; it continues from its last checkpoint",
        )
    return errors.GameError(
        f"no task was finished for {idle_s:g} s (limits.idle_s): the environments may be missing",
        hint="start them again and resume the run; it continues from its last checkpoint",
    )


class Failures:
    """Counts the consecutive failed tasks, and the time since the last finished task."""

    def __init__(
        self,
        batch_size: int,
        idle_s: float,
        clock: Callable[[], float] = time.monotonic,
        *,
        external: bool = False,
        is_new: bool = True,
    ) -> None:
        """End the job after `idle_s` without a finished task.

        `is_new`: no task has succeeded before.
        """
        self._limit = max(LEAST_IN_A_ROW, 2 * batch_size)
        self._num_in_a_row = 0
        self._first: Blame | None = None
        """The error of all tasks so far."""
        self._is_alike = is_new
        self._idle_s = idle_s
        self._external = external
        self._clock = clock
        self._progressed_at = clock()

    def note_progress(self) -> None:
        """Record that the job is not idle, or is idle for a known reason."""
        self._progressed_at = self._clock()

    def idle(self) -> errors.TinkermqError | None:
        """Return the error of a job that was idle for too long, or None."""
        late = self._clock() - self._progressed_at >= self._idle_s
        return deserted(self._idle_s, external=self._external) if late else None

    def note_task(self, blame: Blame | None) -> None:
        """Record a finished task: the reason of its failure, or None.

        An agent's expired reservation is not counted. Raises the error of the responsible boundary
        if too many have failed in a row.
        """
        self.note_progress()
        if blame is None:
            self._num_in_a_row, self._is_alike = 0, False
            return
        if blame.code != RESERVATION_EXPIRED:
            self._num_in_a_row += 1
            self._first = self._first or blame
            self._is_alike &= blame == self._first and blame.boundary in _ALIKE_IN
        if self._is_alike and self._num_in_a_row >= LEAST_ALIKE:
            raise errors.of_boundary(blame.boundary)(
                f"the first {self._num_in_a_row} tasks in a row failed with one error: "
                f"{blame.message}",
                hint=blame.hint,
            )
        if self._num_in_a_row >= self._limit:
            raise errors.of_boundary(blame.boundary)(
                f"{self._num_in_a_row} tasks in a row failed, the last one: {blame.message}",
                hint=blame.hint,
            )


class Untrainable:
    """Counts consecutive groups since the last step that could not be trained.

    Pure: dropped groups are in the learner's state and in the log, so that a restarted learner
    counts the same.
    """

    def __init__(self, batch_size: int, limit: int | None, judged_seq: int = 0) -> None:
        """`limit`: number of groups after which the job ends; 0: never, None: default.

        Log entries up to `judged_seq` were counted before.
        """
        by_default = max(LEAST_UNTRAINABLE, UNTRAINABLE_BATCHES * batch_size)
        self._limit = by_default if limit is None else limit
        self._batch_size = batch_size
        self._judged_seq = judged_seq
        self._counts: Counter[DropReason] = Counter()
        self._least = self._next_report = batch_size

    @property
    def num_in_a_row(self) -> int:
        """Number of untrainable groups since the last trainable one."""
        return self._counts.total()

    def count_dropped(self, dropped: Iterable[Dropped], usable: Iterable[int]) -> None:
        """Count the groups `dropped` since the last step; `usable` groups wait to be trained."""
        after = max(usable, default=self._judged_seq)
        self._counts = Counter(
            item.reason for item in dropped if item.seq > after and item.reason not in _NOT_COUNTED
        )

    def stepped(self) -> None:
        """Record a step: some groups can be trained."""
        self._counts.clear()
        self._least = self._next_report = max(self._batch_size, _HICCUP)

    def give_up(self, seq: int) -> int:
        """Mark entries up to `seq` as judged: a resumed run counts from there; return it."""
        self._judged_seq = seq
        return seq

    @property
    def wait(self) -> str:
        """Name of the job's wait after a batch of untrainable groups; empty before."""
        if self.num_in_a_row < self._least:
            return ""
        return f"a group that can be trained: {self._summary()}"

    def due_report(self) -> str:
        """Return the report that is due: after one batch, and at each doubling."""
        if self.num_in_a_row < self._next_report:
            return ""
        self._next_report = 2 * self.num_in_a_row
        ends = f"; after {self._limit} the run ends" if self._limit else ""
        return f"{self._summary()}{ends} (limits.untrainable_groups)\n{self._main[2]}"

    def error(self) -> errors.TinkermqError | None:
        """Return the error of a job with too many untrainable groups, or None."""
        if not self._limit or self.num_in_a_row < self._limit:
            return None
        _, error, remedy = self._main
        return error(
            f"{self._summary()} (limits.untrainable_groups: {self._limit})",
            hint=f"{remedy}; when resumed, the run continues from its checkpoint; with "
            "limits.untrainable_groups=0 it never ends for this reason",
        )

    @property
    def _main(self) -> tuple[str, type[errors.TinkermqError], str]:
        return _WHY[self._counts.most_common(1)[0][0]]

    def _summary(self) -> str:
        reasons = ", ".join(f"{number} {reason}" for reason, number in sorted(self._counts.items()))
        return (
            f"the last {self.num_in_a_row} groups could not be trained ({reasons}): {self._main[0]}"
        )
