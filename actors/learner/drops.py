"""Groups that are never trained: decided, accounted for, and reported.

What is dropped returns its credit; its task is issued again where that can help
(`tasks.py`). The next batch record names all that was dropped since the one before, so that
a learner that starts again decides the same.
"""

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from ...schemas.task import Dropped, DropReason
from ..training.state import LearnerState
from .data_order import TaskOrder
from .intake import CheckedEntry, Intake
from .reporter import Reporter
from .tasks import Ledger

TOLD_EVERY_S = 30.0
_EXAMPLES = 3
_EXAMPLE_CHARACTERS = 300
_TOLD: frozenset[DropReason] = frozenset({"malformed", "failed", "stale"})
"""The others are asked for (`filter_equal_rewards`), or say nothing is lost (`duplicate`)."""

Tell = Callable[..., Awaitable[None]]


class Drops:
    """The dropped groups of one learner."""

    def __init__(
        self,
        intake: Intake,
        ledger: Ledger,
        order: TaskOrder,
        reporter: Reporter,
        state: LearnerState,
        tell: Tell,
        clock: Callable[[], float] = time.monotonic,
        *,
        external: bool = False,
    ) -> None:
        """`tell` publishes an event of the job; `external`: groups come from outside."""
        self._external = external
        self._intake = intake
        self._ledger = ledger
        self._order = order
        self._reporter = reporter
        self._tell = tell
        self._clock = clock
        self._unrecorded: list[Dropped] = list(state.unrecorded)
        self._unreported: Counter[str] = Counter()
        self._examples: list[str] = []
        self._again = 0
        self._lost = 0
        self._next_s = float("-inf")

    def drop(self, dropped: Sequence[Dropped], *, reported: bool = False) -> None:
        """Decide that entries are never trained; `reported`: its event was sent already."""
        for item in dropped:
            entry = self._intake[item.seq]
            again = item.task is not None and self._ledger.drop(
                item.task,
                item.reason,
                hopeless=entry.blame is not None and entry.blame.boundary == "task",
                foreign=self._is_foreign(entry),
            )
            if again and entry.task is not None and item.reason != "malformed":
                self._order.keep(entry.task)
            if entry.group is not None:
                self._reporter.waste.add(entry.group, trained=False)
                self._order.pass_over(entry.group, item.reason)
            self._reporter.waste.add_failed(entry.tokens_wasted)
            self._reporter.num_dropped[item.reason] += 1
            if item.reason in _TOLD and not reported:
                self._count_drop(item, entry, again=again)
        self._intake.forget(item.seq for item in dropped)
        self._unrecorded += dropped

    @property
    def unrecorded(self) -> Sequence[Dropped]:
        """What was dropped since the last batch record."""
        return self._unrecorded

    def _is_foreign(self, entry: CheckedEntry) -> bool:
        """Whether a group is of another task than was issued under its number."""
        return entry.task is not None and self._ledger.issued_instead_of(entry.task) is not None

    def take_unrecorded(self) -> list[Dropped]:
        """Return what no batch record names yet; the next one does."""
        taken, self._unrecorded = self._unrecorded, []
        return taken

    def write_to(self, state: LearnerState) -> None:
        """Put what no batch record names yet into the state of a checkpoint."""
        state.unrecorded = list(self._unrecorded)

    def _count_drop(self, item: Dropped, entry: CheckedEntry, *, again: bool) -> None:
        self._unreported[item.reason] += 1
        self._again += again
        self._lost += self._external and not again and item.reason != "duplicate"
        if len(self._examples) < _EXAMPLES and (why := _why(item, entry)):
            self._examples.append(why[:_EXAMPLE_CHARACTERS])

    async def report_drops(self, *, now: bool = False) -> None:
        """Publish what was dropped since the last time as one event, now and then."""
        if not self._unreported or (not now and self._clock() < self._next_s):
            return
        self._next_s = self._clock() + TOLD_EVERY_S
        counts, self._unreported = self._unreported, Counter()
        examples, self._examples = self._examples, []
        again, self._again = self._again, 0
        lost, self._lost = self._lost, 0
        total = sum(counts.values())
        reasons = ", ".join(f"{number} {reason}" for reason, number in sorted(counts.items()))
        lines = [
            f"{total} {'group was' if total == 1 else 'groups were'} dropped ({reasons}); the "
            f"tasks of {again} are issued again",
            *examples,
        ]
        if lost:
            lines.append(f"whoever made them: publish {lost} more, or the run waits for them")
        data: dict[str, Any] = {"dropped": dict(counts), "issued_again": again}
        await self._tell("groups_dropped", "\n".join(lines), **data)


def _why(item: Dropped, entry: CheckedEntry) -> str:
    why = entry.refusal or (entry.blame.message if entry.blame is not None else "")
    named = f"task {item.task}" if item.task is not None else f"entry {item.seq}"
    return f"{named}: {why}" if why else ""
