"""The steps that were recorded before a learner started: read, checked, and trained again.

Everything that was issued is taken notice of first. Then each recorded batch behind the checkpoint
is trained as it was: same groups, same order, same weights. Generators go on meanwhile, and what
they append was made with weights that are newer than those of the replayed step.
"""

from collections.abc import Awaitable, Callable
from typing import Protocol

import structlog

from ...broker.jetstream.direct_get import get_all
from ...broker.rollouts import BatchLog
from ...schemas.config.job import TrainingConfig
from ...schemas.task import BatchRecord, Task
from ...schemas.wire.errors import MessageError, StorageError
from ..runtime import JobContext
from ..training.state import LearnerState
from .drops import Drops
from .intake import CheckedEntry, Intake, batch_digest
from .staleness import num_admissible
from .tasks import Ledger

CATCH_UP_S = 300.0
_log = structlog.get_logger()


class Train(Protocol):
    """Trains one step from its entries."""

    def __call__(
        self, entries: list[CheckedEntry], batch: BatchRecord, *, record: bool
    ) -> Awaitable[None]:
        """Train as the batch record says; `record`: it was written down just now."""
        ...


class RecordedSteps:
    """The recorded steps of one job."""

    def __init__(
        self,
        context: JobContext,
        batches: BatchLog,
        intake: Intake,
        ledger: Ledger,
        drops: Drops,
        state: LearnerState,
    ) -> None:
        self._context = context
        self._batches = batches
        self._intake = intake
        self._ledger = ledger
        self._drops = drops
        self._state = state
        self._records: list[BatchRecord] = []

    async def read(self) -> None:
        """Read the records: what the job had come to, and how many tasks were given out."""
        stored = await self._batches.read_all()
        self._records = [record for _, record in stored]
        last_seq = stored[-1][0] if stored else 0
        if last_seq < self._state.batch_seq:
            raise _cut_off("batch records", last_seq, self._state.batch_seq, self._batches.stream)
        self._state.batch_seq = last_seq
        self._intake.note_version(self._state.step)
        if self._records:
            self._intake.note_version(self._records[-1].step)
        self._ledger.expect(await self._largest_number())

    async def take_notice(self, notice_arrivals: Callable[[], object]) -> None:
        """Read the task queue and the rollout log: all that was issued, and its fate.

        Generators go on meanwhile. They append a group before its task leaves the queue, so what is
        not in the queue any more is in the log that is read behind it.
        """
        broker, scope = self._context.broker, self._context.scope
        queued = await get_all(broker, scope.stream_task, scope.task("*"))
        with self._context.waiting("the rollout log to be read"):
            await self._intake.catch_up(CATCH_UP_S)
        notice_arrivals()
        for message in queued:
            try:
                self._ledger.note_task(Task.from_bytes(message.payload, at=message.subject))
            except MessageError as error:
                _log.error("task_malformed", subject=message.subject, error=error.message)
        self._ledger.find_missing()

    async def train(self, train: Train) -> None:
        """Train what was recorded behind the checkpoint again, until `stopping` is set."""
        behind = [record for record in self._records if record.step > self._state.step]
        self._records = []
        if not behind:
            return
        await self._context.event(
            "training_recovered",
            f"training {len(behind)} recorded steps again",
            step=self._state.step,
        )
        for record in behind:
            if self._context.stopping.is_set():
                return
            await train(self._entries_of(record), record, record=False)

    def _entries_of(self, record: BatchRecord) -> list[CheckedEntry]:
        """Return the entries that a recorded step trained; what it dropped is dropped."""
        step, intake = record.step, self._intake
        lost = [seq for seq in record.seqs if seq not in intake]
        if lost:
            raise StorageError(
                f"step {step} trained log entries {lost[:5]} that the rollout log no longer has",
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
                hint="was the configuration changed in the middle of the run?",
            )
        return entries

    async def _largest_number(self) -> int:
        """Bound the numbers that were given out before a crash: each log entry may be a credit."""
        training: TrainingConfig = self._context.config.training
        num_read = await self._intake.newest() + 1 - self._state.log_seq
        by_gate = num_admissible(
            self._intake.max_version,
            training.largest_staleness,
            training.batch_size,
            self._ledger.num_credits + max(num_read, 0),
        )
        return max([by_gate, *(n + 1 for record in self._records for n in record.tasks)])


def _cut_off(what: str, last: int, known: int, stream: str) -> StorageError:
    return StorageError(
        f"the {what} end at {last}, the checkpoint knows of {known}: stream {stream} was deleted "
        "and made again",
        hint="restore the stream from a back-up, or go on in a new run: `tinkermq fork RUN@STEP`",
    )
