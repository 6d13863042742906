"""Verify a run from its stored records: which promises of exactly-once training they prove.

A batch record names the groups of a step with a digest of their bytes, and the rollout log has the
groups. Both are read step by step, so a long run needs no more memory than a short one. Where the
log was trimmed, only what the batch records prove remains. The learner is not asked, and nothing of
its own accounts is used.
"""

import asyncio
import hashlib
from collections.abc import Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

from ..broker.client.connection import Broker
from ..broker.rollouts import BatchLog, LogEntry, RolloutLog
from ..broker.tasks import TaskQueue
from ..schemas.config.job import JobConfig
from ..schemas.config.load_config import parse_config
from ..schemas.job import FINAL_STATES, JobRecord
from ..schemas.number_set import NumberSet
from ..schemas.rollout import check_group
from ..schemas.task import BatchRecord
from ..schemas.wire.errors import MessageError, NotFoundError, StateError

CheckName = Literal["steps", "tasks", "once", "tokens", "versions", "replay"]
MEANINGS: dict[CheckName, str] = {
    "steps": "each step is recorded once, with a whole batch",
    "tasks": "each issued task was trained, dropped with a reason, or is open",
    "once": "no task, group or position of the data was decided twice",
    "tokens": "trained groups are in the log, byte for byte, with valid tokens and log-probs",
    "versions": "trained tokens are of versions within the staleness bound",
    "replay": "trained again from its log, the run has the same weights",
}
_SHOWN = 5
_MOST_MISSING = 10_000
_ANY_NUMBER = 2**31 - 1
"""Bound of what the records do not bound: the learner checked it when the group arrived."""


@dataclass
class RecordCheck:
    """One check of a run."""

    name: CheckName
    problems: list[str] = field(default_factory=list[str])
    """The first things that are wrong; none if it passed."""
    num_problems: int = 0
    seen: str = ""
    """What was looked at."""
    applies: bool = True
    """Whether there was something to look at."""

    def wrong(self, problem: str) -> None:
        """Record something that is wrong."""
        self.num_problems += 1
        if self.num_problems <= _SHOWN:
            self.problems.append(problem)

    @property
    def result(self) -> Literal["passed", "failed", "not checked"]:
        """How it ended."""
        if self.num_problems:
            return "failed"
        return "passed" if self.applies else "not checked"

    def fields(self) -> dict[str, Any]:
        """Return the fields for JSON output."""
        problems = {"problems": self.problems, "num_problems": self.num_problems}
        shown = {"check": self.name, "meaning": MEANINGS[self.name], "result": self.result}
        return {**shown, "seen": self.seen, **problems}


@dataclass
class Verification:
    """What the records of a run prove."""

    checks: dict[CheckName, RecordCheck] = field(default_factory=dict[CheckName, RecordCheck])
    num_steps: int = 0
    num_whole: int = 0
    """Steps whose groups are all in the log."""
    trained: NumberSet = field(default_factory=NumberSet)
    """Numbers of trained tasks."""
    dropped: NumberSet = field(default_factory=NumberSet)
    """Numbers of tasks that were dropped with a recorded reason."""
    open: set[int] = field(default_factory=set[int])
    """Numbers of tasks in the queue, or with a group that is not decided yet."""

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return all(check.result != "failed" for check in self.checks.values())

    def __str__(self) -> str:
        """Say in a line what was seen."""
        failed = [problem for check in self.checks.values() for problem in check.problems]
        if failed:
            return f"{len(failed)} problems, first: {failed[0]}"
        looked_at = "; ".join(check.seen for check in self.checks.values())
        return f"passed ({looked_at})"


async def verify(broker: Broker, record: JobRecord) -> Verification:
    """Check a training run from its records, so far if it runs.

    Raises StateError for a run without records.
    """
    if not record.trains or not record.has_streams:
        why = f"has no records: {record.reason}" if record.trains else "trains nothing"
        raise StateError(f"run {record.name} {why}", hint="name a training run that has started")
    return await _Verifier(broker, record).verify()


class _Verifier:
    """Reads the records of one run, newest step first."""

    def __init__(self, broker: Broker, record: JobRecord) -> None:
        self._record = record
        self._plays = record.kind == "train"
        self._config: JobConfig = parse_config(record.config)
        self._log = RolloutLog(broker, record.scope)
        self._batches = BatchLog(broker, record.scope)
        self._queue = TaskQueue(broker, record.scope)
        self._seqs, self._positions = NumberSet(), NumberSet()
        """Decided entries of the log; trained positions of the data order."""
        self._limit = 0
        """Every task number below it was issued."""
        self._num_tokens = 0
        self._largest_lag = 0
        self._has_queue = True
        names: tuple[CheckName, ...] = ("steps", "tasks", "once", "tokens", "versions")
        self._result = Verification({name: RecordCheck(name) for name in names})

    def _wrong(self, check: CheckName, problem: str) -> None:
        self._result.checks[check].wrong(problem)

    async def verify(self) -> Verification:
        # A task is in the queue until its group is in the log, and there until it is decided: read
        # in this order, none is missed.
        result, queued = self._result, await self._pending()
        last, newest = await self._log.last_seq(), await self._batches.last_seq()
        later, first_step = 0, 0
        async with aclosing(self._batches.backwards()) as records:
            async for record in records:
                if later and record.step != later - 1:
                    self._wrong("steps", f"step {later - 1} has no record")
                later = first_step = record.step
                result.num_steps += 1
                self._decide(record)
                await self._check_groups(record)
        self._check_first(first_step)
        await self._check_tasks(queued, last, newest, first_step)
        checks = result.checks
        checks["steps"].seen = f"steps recorded: {result.num_steps}"
        checks["once"].seen = f"{len(result.trained)} trained, {len(result.dropped)} dropped"
        of_all = f"{result.num_whole} of {result.num_steps} steps are in the log"
        checks["tokens"].seen = f"{of_all}, {self._num_tokens:,} generated tokens"
        checks["tokens"].applies = bool(result.num_whole)
        checks["versions"].seen = (
            f"largest lag {self._largest_lag}" if self._plays else "not played"
        )
        checks["versions"].applies = bool(result.num_whole) and self._plays
        return result

    async def _pending(self) -> set[int]:
        """Return the numbers of queued tasks; archives of ended runs leave the queue out."""
        try:
            return await self._queue.pending_numbers()
        except NotFoundError:
            if self._record.state not in FINAL_STATES:
                raise
            self._has_queue = False
            return set()

    def _check_first(self, first_step: int) -> None:
        """Check that the records begin with the run, or behind the checkpoint that it forked."""
        origin = (self._record.fork_of or "").rpartition("@")[2]
        begin = int(origin) + 1 if origin.isdecimal() else 1
        if first_step not in (0, 1, begin):
            self._wrong("steps", f"step {begin} has no record, the first is {first_step}")

    def _decide(self, record: BatchRecord) -> None:
        """Record what a step decided; each entry and task once."""
        result, size = self._result, self._config.training.batch_size
        if not len(record.seqs) == len(record.tasks) == size:
            self._wrong(
                "steps", f"step {record.step} trained {len(record.seqs)} groups, not {size}"
            )
        for number in record.tasks:
            self._add_task(result.trained, number, record.step)
            self._limit = max(self._limit, number + 1)
        for seq in record.seqs:
            self._add_seq(seq, record.step)
        for item in record.dropped:
            self._add_seq(item.seq, record.step)
            if item.task is not None and item.reason != "duplicate":
                self._add_task(result.dropped, item.task, record.step)
                if item.reason != "malformed":  # such an entry may name any number
                    self._limit = max(self._limit, item.task + 1)

    def _add_task(self, fates: NumberSet, number: int, step: int) -> None:
        if number in self._result.trained or number in self._result.dropped:
            self._wrong("once", f"task {number} was decided twice, at step {step} and later")
        fates.add(number)

    def _add_seq(self, seq: int, step: int) -> None:
        if seq in self._seqs:
            self._wrong("once", f"log entry {seq} was decided twice, at step {step} and later")
        self._seqs.add(seq)

    async def _check_groups(self, record: BatchRecord) -> None:
        """Compare the groups of a step in the log with its record."""
        entries = await asyncio.gather(*map(self._log.get, record.seqs))
        held = [entry for entry in entries if entry is not None]
        if len(held) < len(record.seqs):
            keeps_all = self._config.training.keep_rollouts
            # asked now: a run may trim its log meanwhile
            first = 1 if keeps_all else await self._log.first_seq()
            for seq, entry in zip(record.seqs, entries, strict=True):
                if entry is None and seq >= first:
                    problem = f"step {record.step} trained log entry {seq}, which is gone"
                    self._wrong("tokens", problem)
            return
        self._result.num_whole += 1
        digests = b"".join(hashlib.sha256(entry.payload).digest() for entry in held)
        if hashlib.sha256(digests).hexdigest() != record.digest:
            self._wrong("tokens", f"the groups of step {record.step} are not those it recorded")
        for number, entry in zip(record.tasks, held, strict=False):
            self._check_group(record, number, entry)

    def _check_group(self, record: BatchRecord, number: int, entry: LogEntry) -> None:
        group = entry.group
        if entry.number != number or group is None or group.error is not None:
            problem = f"is of task {entry.number}" if entry.number != number else "has no episodes"
            self._wrong("tokens", f"entry {entry.seq}, trained as task {number}, {problem}")
            return
        if (at := group.task.index) is not None:
            if at in self._positions:
                self._wrong("once", f"position {at} of the data was trained twice (task {number})")
            self._positions.add(at)
        version, training = record.step - 1, self._config.training
        try:
            check_group(
                group,
                vocab_size=_ANY_NUMBER,
                max_tokens=_ANY_NUMBER,
                version=_ANY_NUMBER,
            )
        except MessageError as error:
            self._wrong("tokens", error.message)
            return
        self._num_tokens += sum(item.num_generated for item in group.trajectories)
        if not self._plays:
            return
        oldest = max(group.min_version, record.oldest)
        self._largest_lag = max(self._largest_lag, version - oldest)
        if group.max_version > version:
            newer = f"tokens of version {group.max_version}, step {record.step} has {version}"
            self._wrong("versions", f"task {number} has {newer}")
        bound = training.largest_staleness
        if training.staleness_policy != "train" and version - oldest > bound:
            lag = f"lag {version - oldest} at step {record.step}, the bound is {bound}"
            self._wrong("versions", f"task {number} has {lag}")

    async def _check_tasks(self, queued: set[int], last: int, newest: int, first_step: int) -> None:
        """Check that every task number has an end, or is open."""
        result, first = self._result, await self._log.first_seq()
        lost = await self._log.lost_seqs()
        undecided = [
            seq for seq in self._seqs.gaps(last + 1) if seq >= max(first, 1) and seq not in lost
        ]
        for seq in undecided:
            entry = await self._log.get(seq)
            if entry is None or entry.number is None:
                continue
            if self._is_decided(entry.number) and self._has_completed:
                self._wrong("once", f"task {entry.number} has a second group, log entry {seq}")
            result.open.add(entry.number)
        result.open |= queued
        result.open = {number for number in result.open if not self._is_decided(number)}
        self._limit = max([self._limit, *(number + 1 for number in result.open)])
        decided = NumberSet(result.trained.ranges() + result.dropped.ranges())
        gaps = (number for number in decided.gaps(self._limit) if number not in result.open)
        missing = await self._still_missing(islice(gaps, _MOST_MISSING), newest)
        seen = f"tasks: {self._limit}, {len(result.open)} open"
        if missing and (why := self._why_missing(first_step)):
            seen += f", {len(missing)} {why}"
            missing = []
        for number in missing:
            self._wrong("tasks", f"task {number} is neither trained, dropped, queued nor logged")
        result.checks["tasks"].seen = seen

    def _why_missing(self, first_step: int) -> str:
        """Return why numbers may be missing from the records; empty: they may not."""
        if first_step > 1:
            return "decided before the fork"
        if not self._has_completed:
            return "reserved or not issued yet"
        if not self._has_queue:
            return "in its queue, which was not archived, or lost"
        return "reserved" if self._config.training.tasks == "external" else ""

    @property
    def _has_completed(self) -> bool:
        return self._record.state == "COMPLETED"

    def _is_decided(self, number: int) -> bool:
        return number in self._result.trained or number in self._result.dropped

    async def _still_missing(self, missing: Iterable[int], newest: int) -> list[int]:
        """Return the missing numbers that no part of a running run has meanwhile."""
        if self._record.state in FINAL_STATES:
            return list(missing)
        left = [
            number
            for number in missing
            if await self._queue.find(number) is None and not await self._log.contains(number)
        ]
        async with aclosing(self._batches.backwards(newest)) as records:
            decided = {
                number
                async for record in records
                for number in [*record.tasks, *(item.task for item in record.dropped)]
            }
        return [number for number in left if number not in decided]
