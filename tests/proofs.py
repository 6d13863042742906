"""Proofs from a run's own records: every task decided once, the weights a function of the log."""

import hashlib
from pathlib import Path

from tinkermq.actors.learner.checkpoint import CheckpointStore, load_state
from tinkermq.actors.learner.numbers import NumberSet
from tinkermq.actors.learner.replay import replay
from tinkermq.broker.tasks import TaskQueue
from tinkermq.schemas.batch import BatchRecord

from tests.stack import Job


async def assert_every_task_once(job: Job) -> None:
    """Prove that each task number was trained once, or dropped once with a recorded reason.

    The batch records have no gap and no repetition, each names entries of the log with the
    digests that they have, the newest checkpoint agrees, and nothing is left in the queue.
    Needs `keep_rollouts`.
    """
    records = await job.batches()
    config = job.record.config["training"]
    trained = [number for record in records for number in record.tasks]
    dropped = [item for record in records for item in record.dropped]
    assert [record.step for record in records] == list(range(1, config["num_steps"] + 1))
    assert {len(record.tasks) for record in records} == {config["batch_size"]}
    assert len(trained) == len(set(trained)), "a task was trained twice"
    fates = trained + [item.task for item in dropped if item.reason != "duplicate"]
    assert len(fates) == len(set(fates)), "a task has two fates"
    assert sorted(fates) == list(range(len(fates))), "a task number is missing"
    await _assert_log_agrees(job, records)
    state = load_state(_newest_checkpoint(job))
    assert state.step == config["num_steps"]
    assert state.next_task == len(fates)
    assert list(NumberSet(state.trained)) == sorted(trained)
    assert list(NumberSet(state.dropped)) == sorted(set(fates) - set(trained))
    assert await TaskQueue(job.stack.broker, job.scope).pending_numbers() == set()


async def _assert_log_agrees(job: Job, records: list[BatchRecord]) -> None:
    entries = {entry.seq: entry for entry in await job.entries()}
    decided = [seq for record in records for seq in record.seqs]
    decided += [item.seq for record in records for item in record.dropped]
    assert sorted(decided) == sorted(entries), "an entry of the log was not decided on, or twice"
    for record in records:
        assert [entries[seq].number for seq in record.seqs] == record.tasks
        digests = [hashlib.sha256(entries[seq].payload).digest() for seq in record.seqs]
        assert hashlib.sha256(b"".join(digests)).hexdigest() == record.digest


async def assert_replay_is_identical(job: Job) -> None:
    """Train the run again from its log, here: every bit of the weights is the same."""
    result = await replay(job.stack.broker, job.record)
    assert result.steps == job.record.config["training"]["num_steps"]
    assert result.identical, f"{len(result.differing)} tensors differ: {result.differing[:3]}"


def _newest_checkpoint(job: Job) -> Path:
    newest = CheckpointStore(job.run_dir, keep_last=1, keep_every=0).latest()
    assert newest is not None, "the run has no checkpoint"
    return newest
