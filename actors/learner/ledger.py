"""The ledger of task numbers: issued, trained, dropped, and what is issued next.

Pure: it is changed by calls and knows neither broker nor clock. Its state is part of each
checkpoint; what happened since is read again from the task queue, the rollout log and the batch
records.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from ...schemas.batch import DropReason
from ...schemas.task import Task
from .admission import num_admissible
from .batching import returns_credit
from .checkpoint import LearnerState
from .numbers import NumberSet


@dataclass(frozen=True)
class Issue:
    """A task that may be issued now."""

    number: int
    index: int
    reissue_of: int | None
    slot: int


class Ledger:
    """Knows the fate of every task number of a job."""

    def __init__(self, state: LearnerState) -> None:
        self.trained = NumberSet(state.trained)
        self.dropped = NumberSet(state.dropped)
        self.next_task = state.next_task
        self._next_index = state.next_index
        self._owed: dict[int, int] = dict(state.owed)
        self._missing: list[int] = []
        self.min_versions: dict[int, int] = {}
        """Issued and not in the log yet: number -> oldest version its tokens may have."""
        self._in_log: set[int] = set()

    def __contains__(self, number: object) -> bool:
        """Whether a number's fate is decided."""
        assert isinstance(number, int)
        return number in self.trained or number in self.dropped

    @property
    def num_credits(self) -> int:
        """Admission credits that were returned."""
        return len(self.dropped)

    def note_task(self, task: Task) -> None:
        """Take notice of a task that was issued, found in the queue or in the log."""
        self.next_task = max(self.next_task, task.task + 1)
        if task.index is not None:
            self._next_index = max(self._next_index, task.index + 1)
        if task.reissue_of is not None:
            self._owed.pop(task.reissue_of, None)
        if task.task not in self and task.task not in self._in_log:
            self.min_versions[task.task] = task.min_version

    def note_in_log(self, number: int) -> None:
        """Take notice that a number's group is in the log."""
        self._in_log.add(number)
        self.min_versions.pop(number, None)
        self.next_task = max(self.next_task, number + 1)

    def find_missing(self) -> None:
        """List the numbers that were given out and are nowhere: they are issued again."""
        self._missing = [
            number
            for number in range(self.next_task)
            if number not in self and number not in self._in_log and number not in self.min_versions
        ]

    def train(self, numbers: Iterable[int]) -> None:
        """Decide: these are trained."""
        for number in numbers:
            self.trained.add(number)
            self._in_log.discard(number)

    def drop(self, number: int, reason: DropReason, index: int | None) -> None:
        """Decide: this one is never trained; its credit returns unless it was decided before."""
        if not returns_credit(reason):
            return
        self.dropped.add(number)
        self._in_log.discard(number)
        if reason == "stale" and index is not None:
            self._owed[number] = index

    def num_issuable(self, version: int, max_staleness: int, batch: int, total_steps: int) -> int:
        """Count the tasks that the admission gate lets through now."""
        allowed = num_admissible(version, max_staleness, batch, self.num_credits, total_steps)
        return max(0, allowed - self.next_task) + len(self._missing)

    def reserve(self) -> tuple[int, int]:
        """Give out the next number, and its slot."""
        number = self._missing.pop(0) if self._missing else self.next_task
        self.next_task = max(self.next_task, number + 1)
        return number, max(0, number - self.num_credits)

    def next_issue(self) -> Issue:
        """Give out the next number with the data position it stands for."""
        number, slot = self.reserve()
        if self._owed:
            old = min(self._owed)
            return Issue(number, self._owed.pop(old), old, slot)
        index = self._next_index
        self._next_index += 1
        return Issue(number, index, None, slot)

    def write_to(self, state: LearnerState) -> None:
        """Put the ledger into the state of a checkpoint."""
        state.trained = self.trained.ranges()
        state.dropped = self.dropped.ranges()
        state.next_task = self.next_task
        state.next_index = self._next_index
        state.owed = sorted(self._owed.items())
