"""Proofs from a run's own records: every task decided once, the weights a function of the log."""

import hashlib
from pathlib import Path

from tinkermq.actors.learner.replay import replay
from tinkermq.actors.training.checkpoint import CheckpointStore, load_state
from tinkermq.actors.training.state import LearnerState, NumberSet
from tinkermq.broker.tasks import TaskQueue
from tinkermq.schemas.task import BatchRecord

from tests.support.jobs import Job


async def assert_every_task_once(job: Job) -> None:
    """Prove that each task number was trained once, or dropped once with a recorded reason.

    The batch records have no gap and no repetition, each names entries of the log with the
    digests that they have, the newest checkpoint agrees, and nothing is left in the queue.
    Needs `keep_rollouts`.
    """
    records = await job.batches()
    state = await _assert_nothing_twice(job, records)
    fates = _fates(records)
    assert state.step == job.record.config["training"]["num_steps"]
    assert set(fates) == set(range(len(fates))), "a task number is missing"
    assert state.next_task == len(fates)
    assert set(NumberSet(state.dropped)) == set(fates) - set(NumberSet(state.trained))
    assert sorted(_decided(records)) == [entry.seq for entry in await job.entries()]
    assert await TaskQueue(job.stack.broker, job.scope).pending_numbers() == set()


async def assert_every_position_once(job: Job) -> None:
    """Prove that each position of the data order, up to the last, was trained once.

    For runs whose every position is trained in the end: none fails for good or teaches nothing.
    """
    groups = {entry.seq: entry.group for entry in await job.entries()}
    trained: list[int] = []
    for record in await job.batches():
        for seq in record.seqs:
            group = groups[seq]
            assert group is not None
            assert group.task.index is not None
            trained.append(group.task.index)
    assert sorted(trained) == list(range(len(trained)))


async def assert_no_task_twice(job: Job) -> None:
    """Prove what `assert_every_task_once` proves of a run that was stopped before its end."""
    state = await _assert_nothing_twice(job, await job.batches())
    assert state.next_task > max(NumberSet(state.trained))


async def _assert_nothing_twice(job: Job, records: list[BatchRecord]) -> LearnerState:
    """Check the records against themselves, the log, and the newest checkpoint."""
    trained = [number for record in records for number in record.tasks]
    state = load_state(_newest_checkpoint(job))
    assert [record.step for record in records] == list(range(1, state.step + 1))
    assert {len(record.tasks) for record in records} == {
        job.record.config["training"]["batch_size"]
    }
    assert len(trained) == len(set(trained)), "a task was trained twice"
    assert list(NumberSet(state.trained)) == sorted(trained)
    fates, decided = _fates(records), _decided(records)
    assert len(fates) == len(set(fates)), "a task has two fates"
    assert len(decided) == len(set(decided)), "an entry of the log was decided on twice"
    await _assert_log_agrees(job, records)
    return state


async def _assert_log_agrees(job: Job, records: list[BatchRecord]) -> None:
    entries = {entry.seq: entry for entry in await job.entries()}
    for record in records:
        assert [entries[seq].number for seq in record.seqs] == record.tasks
        digests = [hashlib.sha256(entries[seq].payload).digest() for seq in record.seqs]
        assert hashlib.sha256(b"".join(digests)).hexdigest() == record.digest
        for item in record.dropped:
            assert entries[item.seq].number == item.task


def _fates(records: list[BatchRecord]) -> list[int | None]:
    """Return the task numbers that were decided on, in order."""
    trained = [number for record in records for number in record.tasks]
    dropped = [item for record in records for item in record.dropped]
    return trained + [item.task for item in dropped if item.reason != "duplicate"]


def _decided(records: list[BatchRecord]) -> list[int]:
    """Return the sequences of the log that were decided on."""
    trained = [seq for record in records for seq in record.seqs]
    return trained + [item.seq for record in records for item in record.dropped]


async def assert_replay_is_identical(job: Job) -> None:
    """Train the run again from its log, here: every bit of the weights is the same."""
    result = await replay(job.stack.broker, job.record)
    assert result.steps == len(await job.batches())
    assert result.identical, f"{len(result.differing)} tensors differ: {result.differing[:3]}"


def _newest_checkpoint(job: Job) -> Path:
    newest = CheckpointStore(job.run_dir, keep_last=1, keep_every=0).latest()
    assert newest is not None, "the run has no checkpoint"
    return newest
