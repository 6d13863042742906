"""The batch records of a job: appended before each step, and read when a learner starts.

A starting learner first records all issued tasks in its ledger. Then it trains each recorded batch
after its checkpoint again: same groups, same order, same weights. Generators meanwhile continue
with weights newer than those of the repeated step.
"""

import asyncio
import contextlib

import structlog

from ...broker.jetstream.direct_get import get_all
from ...broker.rollouts import BatchLog, RolloutLog
from ...broker.tasks import TaskQueue
from ...schemas.config.job import TrainingConfig
from ...schemas.task import BatchRecord, Task
from ...schemas.wire.errors import BrokerError, DeadlineError, MessageError, StorageError
from ..runtime import JobContext
from ..training.state import LearnerState
from .intake import CheckedEntry, Drops, Intake, batch_digest
from .rewind import records_behind
from .staleness import num_admissible
from .tasks import Ledger

CATCH_UP_S = 300.0
_OWNER_S = 2.0
_log = structlog.get_logger()


class RecordedSteps:
    """The recorded steps of a job: those from before a start, and those of this learner."""

    def __init__(
        self,
        context: JobContext,
        intake: Intake,
        ledger: Ledger,
        drops: Drops,
        state: LearnerState,
    ) -> None:
        self._context = context
        self._batches = BatchLog(context.broker, context.scope)
        self._log = RolloutLog(context.broker, context.scope)
        self._intake = intake
        self._ledger = ledger
        self._drops = drops
        self._state = state
        self._records: list[BatchRecord] = []
        self._recording = asyncio.Lock()

    async def append(self, record: BatchRecord) -> None:
        """Record a step; FencedError if another learner of the job has recorded one."""
        async with self._recording:
            self._state.batch_seq = await self._batches.append(record, self._state.batch_seq)

    async def check_owner(self) -> None:
        """Raise FencedError if another learner of the job has recorded a step.

        Raises RewoundError if the log lacks this learner's last record.
        """
        async with self._recording:  # clients request tasks while a step is recorded
            await self._batches.check_owner(self._state.batch_seq)

    async def refuse_if_replaced(self) -> None:
        """Raise FencedError to keep a fenced-off learner from writing a checkpoint.

        An unreachable broker does not prevent a checkpoint: its unrecorded decisions are compared
        with the records when it is loaded.
        """
        with contextlib.suppress(TimeoutError, BrokerError, DeadlineError):
            async with asyncio.timeout(_OWNER_S):
                await self.check_owner()

    async def read(self) -> None:
        """Read the records: the job's last step, and an upper bound of issued task numbers."""
        self._state.batch_seq = await self._batches.last_seq()
        self._records = await records_behind(self._batches, self._log, self._state.step)
        self._intake.note_version(self._state.step)
        if self._records:
            self._intake.note_version(self._records[-1].step)
        self._ledger.expect(await self._largest_number())

    async def note_issued(self) -> None:
        """Record in the ledger all issued tasks, from the task queue and the rollout log.

        Generators continue meanwhile. They append a group before its task leaves the queue, and the
        log is read after the queue, so each task is found. A task for a version that no recorded
        step has made was issued before the broker's store was set back, and leaves the queue.
        """
        broker, scope = self._context.broker, self._context.scope
        queued = await get_all(broker, scope.stream_task, scope.task("*"))
        with self._context.waiting("the rollout log to be read"):
            await self._intake.catch_up(CATCH_UP_S)
        self._intake.take_arrived()
        for message in queued:
            try:
                task = Task.from_bytes(message.payload, at=message.subject)
            except MessageError as error:
                _log.error("task_malformed", subject=message.subject, error=error.message)
                continue
            if task.min_version <= self._intake.max_version:
                self._ledger.note_task(task)
            else:
                await TaskQueue(broker, scope).remove(task.task)
        self._ledger.find_missing()

    async def behind(self) -> list[BatchRecord]:
        """Return the records after the checkpoint, in order, whose steps are trained again.

        An event reports their number.
        """
        behind, self._records = self._records, []
        if behind:
            await self._context.event(
                "training_recovered",
                f"training {len(behind)} recorded steps again",
                step=self._state.step,
            )
        return behind

    def entries_of(self, record: BatchRecord) -> list[CheckedEntry]:
        """Return the entries that a recorded step trained, and drop the entries that it dropped."""
        step, intake = record.step, self._intake
        missing = [seq for seq in record.seqs if seq not in intake]
        if missing:
            raise StorageError(
                f"step {step} trained log entries {missing[:5]} that the rollout log no longer has",
                hint="resume from a checkpoint that is at least that new, or fork the run",
            )
        self._drops.drop([item for item in record.dropped if item.seq in intake], reported=True)
        self._drops.take_unrecorded()
        entries = [intake[seq] for seq in record.seqs]
        if batch_digest(entries) != record.digest:
            raise StorageError(f"the groups of step {step} are not the recorded ones")
        if refused := [entry for entry in entries if entry.group is None]:
            raise StorageError(
                f"step {step} trained log entries {[entry.seq for entry in refused[:5]]} that "
                f"cannot be trained now: {refused[0].refusal}",
                hint="check whether the configuration was changed in the middle of the run",
            )
        return entries

    async def _largest_number(self) -> int:
        """Bound the numbers issued before a crash: each log entry may have returned a credit."""
        training: TrainingConfig = self._context.config.training
        num_read = await self._intake.newest() + 1 - self._state.log_seq
        by_gate = num_admissible(
            self._intake.max_version,
            training.largest_staleness,
            training.batch_size,
            self._ledger.num_credits + max(num_read, 0),
        )
        return max([by_gate, *(n + 1 for record in self._records for n in record.tasks)])
