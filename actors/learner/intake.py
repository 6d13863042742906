"""The learner's intake: reads the rollout log, holds undecided groups, counts dropped groups.

The staleness gate bounds the number of held groups.
"""

import asyncio
import hashlib
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import structlog

from ...broker.rollouts import LogEntry, RolloutLog
from ...schemas.number_set import NumberSet
from ...schemas.rollout import Group, check_group, return_of
from ...schemas.task import Blame, Dropped, DropReason, Task
from ...schemas.wire.errors import (
    DataError,
    DeadlineError,
    MessageError,
    RewoundError,
    StorageError,
)
from ..training.state import LearnerState
from .data_order import TaskOrder
from .staleness import Candidate
from .tasks import Ledger

_log = structlog.get_logger()


@dataclass(frozen=True)
class CheckedEntry:
    """A checked entry of the log."""

    seq: int
    number: int | None
    group: Group | None
    """The group; None if it cannot be trained."""
    task: Task | None
    """The group's task; None if it cannot be read."""
    tokens_wasted: int
    """Generated tokens of a task that was given up."""
    digest: bytes
    """SHA-256 of its payload."""
    candidate: Candidate
    blame: Blame | None
    """Reason why its task was given up; None if it was not."""
    traceparent: str
    """W3C trace context of its message."""
    arrived: float
    """Time of reading, in seconds since the epoch."""
    refusal: str = ""
    """Why the entry is malformed; empty if it is not."""


class Intake:
    """Entries of the rollout log that are neither trained nor dropped."""

    def __init__(
        self,
        log: RolloutLog,
        ledger: Ledger,
        *,
        from_seq: int = 1,
        decided: Iterable[tuple[int, int]] = (),
        newest_decided: tuple[int, str] = (0, ""),
        vocab_size: int,
        max_tokens: int,
        group_size: int,
        greedy_baseline: bool,
        check_readable: Callable[[Group], None] | None = None,
        why_no_rows: str | None = None,
        keeps: Callable[[Group], bool] | None = None,
    ) -> None:
        """Read from `from_seq` on; entries before it and in the ranges `decided` are decided.

        `newest_decided` are sequence and digest of the newest of them.
        `ledger` has the issued tasks; `check_readable` raises DataError for a group that the model
        cannot read, such as one with images; `why_no_rows` is the reason if episodes may not have
        several rows; `keeps` returns whether a group is trained.
        """
        self._log = log
        self._ledger = ledger
        self._from_seq = from_seq
        self._decided = NumberSet(decided)
        self._vocab_size = vocab_size
        self._max_tokens = max_tokens
        self._group_size = group_size
        self._greedy_baseline = greedy_baseline
        self._check_readable = check_readable
        self._why_no_rows = why_no_rows
        self._keeps = keeps
        self._entries: dict[int, CheckedEntry] = {}
        self._newest_decided = newest_decided
        self._newest_read = newest_decided
        self.changed = asyncio.Event()
        """Set when an entry arrives."""
        self.last_seq = from_seq - 1
        """Newest sequence that was read, or need not be read."""
        self.max_version = 0
        """Newest version that may have generated a group: the newest recorded version."""
        self.bytes_held = 0
        """Bytes of the log since the last checkpoint."""
        self._arrived: list[CheckedEntry] = []

    async def read_log(self) -> None:
        """Read the log, forever."""
        async with aclosing(self._log.read(self._from_seq)) as entries:
            async for entry in entries:
                if self._is_new(entry):
                    self._enter(entry, await self._filtered(self._check(entry)))

    def note_version(self, version: int) -> None:
        """Raise `max_version` to a version that may have generated groups; it never falls.

        While recorded steps are repeated, generators still have newer weights.
        """
        self.max_version = max(self.max_version, version)

    async def check_log(self) -> None:
        """Raise RewoundError if the log no longer holds the newest entry that was read."""
        if not await self._log.holds(*self._newest_read):
            raise RewoundError(
                f"the rollout log no longer holds entry {self._newest_read[0]}, which was read: "
                "the broker's store was set back"
            )

    async def newest(self) -> int:
        """Return the newest sequence of the log, read or not."""
        return await self._log.last_seq()

    async def catch_up(self, deadline_s: float) -> None:
        """Wait until all current entries of the log have been read; raises DeadlineError.

        Raises StorageError for a log that ends before the first entry to read.
        """
        ever = await self.newest()
        if ever < self._from_seq - 1:
            raise stream_recreated("rollout log", ever, self._from_seq - 1, self._log.stream)
        newest = await self._log.newest_there()
        try:
            async with asyncio.timeout(deadline_s):
                while self.last_seq < newest:
                    self.changed.clear()
                    await self.changed.wait()
        except TimeoutError:
            raise DeadlineError(
                f"the rollout log was read up to {self.last_seq} of {newest} within "
                f"{deadline_s:.0f} s"
            ) from None

    def take_arrived(self) -> list[CheckedEntry]:
        """Return the entries that arrived since the last call, and record them in the ledger."""
        arrived, self._arrived = self._arrived, []
        for entry in arrived:
            if entry.number is not None:
                self._ledger.note_in_log(entry.number, entry.task)
        return arrived

    def candidates(self) -> list[Candidate]:
        """Return the undecided entries."""
        return [entry.candidate for entry in self._entries.values()]

    def __getitem__(self, seq: int) -> CheckedEntry:
        return self._entries[seq]

    def __contains__(self, seq: int) -> bool:
        return seq in self._entries

    def forget(self, seqs: Iterable[int]) -> None:
        """Remove decided entries."""
        for seq in seqs:
            entry = self._entries.pop(seq)
            self._newest_decided = max(self._newest_decided, (seq, entry.digest.hex()))

    def first_undecided(self) -> int:
        """Return the first sequence that the log must keep."""
        return min(self._entries, default=self.last_seq + 1)

    def write_to(self, state: LearnerState) -> None:
        """Write the decided entries into the state of a checkpoint."""
        first = state.log_seq = self.first_undecided()
        ends = [*sorted(self._entries), self.last_seq + 1]
        later = [(seq + 1, following) for seq, following in pairwise(ends) if following > seq + 1]
        known = [(start, end) for start, end in self._decided.ranges() if end > first]
        state.decided_seqs = NumberSet([*known, *later]).ranges()
        state.newest_decided = self._newest_decided

    def _is_new(self, raw: LogEntry) -> bool:
        """Return whether an entry is neither read nor decided."""
        if raw.seq > self.last_seq and raw.seq in self._decided:
            self.last_seq = raw.seq
            self.changed.set()
        return raw.seq > self.last_seq

    def _enter(self, raw: LogEntry, entry: CheckedEntry) -> None:
        self.last_seq = raw.seq
        self._newest_read = raw.seq, entry.digest.hex()
        self._entries[raw.seq] = entry
        self.bytes_held += len(raw.payload)
        self._arrived.append(entry)
        self.changed.set()

    async def _filtered(self, entry: CheckedEntry) -> CheckedEntry:
        """Return an entry with the decision of the user's filter, which may take long."""
        if self._keeps is None or entry.group is None:
            return entry
        filtered = not await asyncio.to_thread(self._keeps, entry.group)
        return replace(entry, candidate=replace(entry.candidate, filtered=filtered))

    def _check(self, raw: LogEntry) -> CheckedEntry:
        error, group = raw.error, raw.group
        blame = None if group is None else group.error
        if group is not None:
            try:
                self._refuse_unfit(group)
            except MessageError as refused:
                error, blame = refused, _blame_of(refused)
        if error is not None:
            _log.warning("rollout_malformed", seq=raw.seq, task=raw.number, error=error.message)
        usable = error is None and group is not None and group.error is None
        candidate = _candidate(raw, group, usable=usable, malformed=error is not None)
        return CheckedEntry(
            refusal="" if error is None else error.message,
            seq=raw.seq,
            number=raw.number,
            group=group if usable else None,
            task=None if group is None else group.task,
            tokens_wasted=0 if group is None or group.error is None else group.tokens_wasted,
            digest=hashlib.sha256(raw.payload).digest(),
            candidate=candidate,
            blame=blame,
            traceparent=raw.traceparent,
            arrived=time.time(),
        )

    def _refuse_unfit(self, group: Group) -> None:
        """Raise MessageError for a group that this job cannot train."""
        task = group.task
        if not self._ledger.was_issued(task.task):
            raise MessageError(f"task {task.task} was never issued")
        if (issued := self._ledger.issued_instead_of(task)) is not None:
            raise MessageError(
                f"the group of task {task.task} is of position {task.index} with seed {task.seed}; "
                f"the issued task is position {issued.index} with seed {issued.seed}",
                hint="a fenced-off learner issued the other task",
            )
        if group.error is not None:
            return
        if task.group_size != self._group_size:
            raise MessageError(
                f"the group of task {task.task} has {task.group_size} episodes, the job's have "
                f"{self._group_size}"
            )
        if task.greedy_baseline != self._greedy_baseline:
            problem = "lacks its" if self._greedy_baseline else "has a"
            raise MessageError(f"the group of task {task.task} {problem} greedy episode")
        if self._why_no_rows and any(len(rows) > 1 for rows in group.episodes):
            raise MessageError(
                f"the group of task {task.task} has episodes of several rows: {self._why_no_rows}"
            )
        check_group(
            group,
            vocab_size=self._vocab_size,
            max_tokens=self._max_tokens,
            version=self.max_version,
        )
        if self._check_readable is not None:
            try:
                self._check_readable(group)
            except DataError as error:
                raise MessageError(f"a group of task {task.task} is refused: {error}") from error
        if not all(math.isfinite(item.reward) for item in group.trajectories) or not all(
            math.isfinite(return_of(rows)) for rows in group.episodes
        ):
            raise MessageError(f"the returns of the group of task {task.task} must be finite")


def stream_recreated(what: str, last: int, known: int, stream: str) -> StorageError:
    """Return the error of a stream that ends before the checkpoint's place in it."""
    return StorageError(
        f"the {what} ends at entry {last}, the checkpoint knows entry {known}: stream {stream} was "
        "deleted and made again",
        hint="restore the stream from a back-up, or start a new run: `tinkermq fork RUN@STEP`",
    )


def _blame_of(refused: MessageError) -> Blame | None:
    """Blame the task for an unreadable group, so that many in a row end the job."""
    cause = refused.__cause__
    if not isinstance(cause, DataError):
        return None
    return Blame(boundary="task", code=cause.code, message=cause.message, hint=cause.hint)


def _candidate(raw: LogEntry, group: Group | None, *, usable: bool, malformed: bool) -> Candidate:
    if not usable or group is None:
        return Candidate(raw.seq, raw.number, unusable="malformed" if malformed else "failed")
    rewards = tuple(return_of(rows) for rows in group.episodes)
    return Candidate(
        seq=raw.seq,
        number=raw.number,
        min_token_version=group.min_version,
        rewards=() if group.has_equal_rewards else rewards,
        max_token_version=group.max_version,
    )


def batch_digest(entries: Iterable[CheckedEntry]) -> str:
    """Return the digest of a batch's groups for its batch record."""
    return hashlib.sha256(b"".join(entry.digest for entry in entries)).hexdigest()


# -- groups that are never trained -----------------------------------------------------------------
# A dropped group returns its credit; its task is issued again if that can help (`tasks.py`). The
# next batch record lists all groups dropped since the last one, so that a restarted learner makes
# the same decisions.

REPORT_EVERY_S = 30.0
_EXAMPLES = 3
_EXAMPLE_CHARACTERS = 300
_REPORTED: frozenset[DropReason] = frozenset({"malformed", "failed", "stale"})
"""Reported reasons; the others are configured (`filter_equal_rewards`) or lose nothing
(`duplicate`)."""


class Drops:
    """The dropped groups of a learner."""

    def __init__(
        self,
        intake: Intake,
        ledger: Ledger,
        order: TaskOrder,
        state: LearnerState,
        publish_event: Callable[..., Awaitable[None]],
        clock: Callable[[], float] = time.monotonic,
        *,
        external: bool = False,
    ) -> None:
        """`publish_event` publishes an event of the job; `external`: groups come from outside."""
        self._external = external
        self._intake = intake
        self._ledger = ledger
        self._order = order
        self.waste = state.waste.model_copy()
        """Counts of generated and of trained tokens and episodes."""
        self.num_by_reason = Counter(state.dropped_by_reason)
        """Number of dropped groups by reason since the start of the run."""
        self._publish_event = publish_event
        self._clock = clock
        self._unrecorded: list[Dropped] = list(state.unrecorded)
        self._unreported: Counter[str] = Counter()
        self._examples: list[str] = []
        self._num_reissued = 0
        self._num_lost = 0
        self._next_s = self._pause_s = 0.0
        self._earlier: set[str] = set()
        """Reasons of earlier events."""

    def drop(self, dropped: Sequence[Dropped], *, reported: bool = False) -> None:
        """Drop entries for good; `reported`: their event was sent before."""
        for item in dropped:
            entry = self._intake[item.seq]
            again = item.task is not None and self._ledger.drop(
                item.task,
                item.reason,
                unplayable=entry.blame is not None and entry.blame.boundary == "task",
                of_another_task=self._is_of_another_task(entry),
            )
            if again and entry.task is not None and item.reason != "malformed":
                self._order.keep(entry.task)
            if entry.group is not None:
                self.waste.add(entry.group, trained=False)
                self._order.pass_over(entry.group, item.reason)
            self.waste.add_failed(entry.tokens_wasted)
            self.num_by_reason[item.reason] += 1
            if item.reason in _REPORTED and not reported:
                self._count_drop(item, entry, again=again)
        self._intake.forget(item.seq for item in dropped)
        self._unrecorded += dropped

    @property
    def unrecorded(self) -> Sequence[Dropped]:
        """Entries dropped since the last batch record."""
        return self._unrecorded

    def _is_of_another_task(self, entry: CheckedEntry) -> bool:
        """Return whether a group's task differs from the task issued under its number."""
        return entry.task is not None and self._ledger.issued_instead_of(entry.task) is not None

    def take_unrecorded(self) -> list[Dropped]:
        """Return the dropped entries that the next batch record lists."""
        dropped, self._unrecorded = self._unrecorded, []
        return dropped

    def write_to(self, state: LearnerState) -> None:
        """Write the counters and the unrecorded entries into the state of a checkpoint."""
        state.unrecorded = list(self._unrecorded)
        state.waste = self.waste.model_copy()
        state.dropped_by_reason = dict(self.num_by_reason)

    def _count_drop(self, item: Dropped, entry: CheckedEntry, *, again: bool) -> None:
        self._unreported[item.reason] += 1
        self._num_reissued += again
        self._num_lost += self._external and not again and item.reason != "duplicate"
        if len(self._examples) < _EXAMPLES and (why := _why(item, entry)):
            self._examples.append(why[:_EXAMPLE_CHARACTERS])

    async def report_drops(self, *, now: bool = False) -> None:
        """Publish the entries dropped since the last event as one event, if due.

        The first of a reason is due at once, the others after ever longer pauses.
        """
        is_new = not self._earlier.issuperset(self._unreported)
        if not self._unreported or not (now or is_new or self._clock() >= self._next_s):
            return
        self._earlier |= self._unreported.keys()
        self._pause_s = REPORT_EVERY_S if is_new else 2 * self._pause_s
        self._next_s = self._clock() + self._pause_s
        counts, self._unreported = self._unreported, Counter()
        examples, self._examples = self._examples, []
        again, self._num_reissued = self._num_reissued, 0
        lost, self._num_lost = self._num_lost, 0
        total = sum(counts.values())
        reasons = ", ".join(f"{number} {reason}" for reason, number in sorted(counts.items()))
        lines = [
            f"{total} {'group was' if total == 1 else 'groups were'} dropped ({reasons}); the "
            f"tasks of {again} are issued again",
            *examples,
        ]
        if lost:
            lines.append(f"external actors must publish {lost} more; the run waits for them")
        data: dict[str, Any] = {"dropped": dict(counts), "issued_again": again}
        await self._publish_event("groups_dropped", "\n".join(lines), **data)


def _why(item: Dropped, entry: CheckedEntry) -> str:
    why = entry.refusal or (entry.blame.message if entry.blame is not None else "")
    named = f"task {item.task}" if item.task is not None else f"entry {item.seq}"
    return f"{named}: {why}" if why else ""
