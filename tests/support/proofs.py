"""Proofs from a run's own records: every task decided once, the weights a function of the log."""

from pathlib import Path

from tinkermq.actors.learner.replay import replay
from tinkermq.actors.training.checkpoint import CheckpointStore, load_state
from tinkermq.actors.training.state import LearnerState
from tinkermq.clients.verify import Verification, verify

from tests.support.jobs import Job


async def assert_every_task_once(job: Job) -> None:
    """Prove that each task number was trained once, or dropped once with a recorded reason.

    All checks of `verify` pass on every step, the newest checkpoint agrees, and nothing is left in
    the queue or undecided in the log. Needs `keep_rollouts`.
    """
    found, state = await _verified(job)
    assert state.step == job.record.config["training"]["num_steps"]
    assert not found.open
    assert state.next_task == len(found.trained) + len(found.dropped)
    assert state.dropped == found.dropped.ranges()


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
    found, state = await _verified(job)
    assert state.next_task > max(found.trained)


async def _verified(job: Job) -> tuple[Verification, LearnerState]:
    """Verify the run as `tinkermq verify` does, and compare with the newest checkpoint."""
    found = await verify(job.stack.broker, await job.read())
    state = load_state(_newest_checkpoint(job))
    assert found.passed, [check.fields() for check in found.checks.values()]
    assert found.num_whole == found.num_steps == state.step
    assert state.trained == found.trained.ranges()
    return found, state


async def assert_replay_is_identical(job: Job) -> None:
    """Train the run again from its log, here: every bit of the weights is the same."""
    result = await replay(job.stack.broker, job.record)
    assert result.steps == len(await job.batches())
    assert result.identical, f"{len(result.differing)} tensors differ: {result.differing[:3]}"


def _newest_checkpoint(job: Job) -> Path:
    newest = CheckpointStore(job.run_dir, keep_last=1, keep_every=0).latest()
    assert newest is not None, "the run has no checkpoint"
    return newest
