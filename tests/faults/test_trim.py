"""SIGKILL to the learner between a checkpoint and the trimming of the log behind it.

The moment is found from outside: nats-server is halted (SIGSTOP) while the checkpoint is being
written, so the learner can tell nobody about it and cannot trim. A mirror of the rollout log keeps
what the learner trims, so that the run can still be proved and trained again.
"""

import asyncio
from pathlib import Path

import pytest
from tinkermq.broker.jetstream.direct_get import get_seq
from tinkermq.broker.jetstream.streams import delete_stream, stream_info
from tinkermq.broker.rollouts import read_entry

from tests.faults.injected import kill_after_checkpoint
from tests.support.configs import small_job
from tests.support.gate import Gate
from tests.support.jobs import Job
from tests.support.proofs import assert_every_task_once, assert_replay_is_identical
from tests.support.stack import Stack

pytestmark = [
    pytest.mark.faults,
    pytest.mark.full,
    pytest.mark.asyncio(loop_scope="session"),
]

BACKUP = "rollout-backup"
SAVED_STEP = 3


async def test_a_learner_killed_between_a_checkpoint_and_its_trim_and_a_late_append(
    stack: Stack, model: Path, gate: Gate
) -> None:
    training = {"keep_rollouts": False, "save_freq": SAVED_STEP, "num_steps": 30}
    job = await stack.submit(small_job(model, env=gate.env(0), training=training))
    await job.until_streams()
    await _mirror(stack, job.scope.stream_rollout, BACKUP)
    await job.eventually(lambda: _is_mirrored(job), "the mirror to follow")
    pid = await job.pid("learner")
    killing = asyncio.create_task(asyncio.to_thread(kill_after_checkpoint, stack, job, pid))
    gate.let(20)
    saved = await killing
    first = await job.rollout_log.first_seq()  # at once: another learner is starting
    trained = next(record.seqs for record in await job.batches() if record.step == saved)
    assert first <= min(trained), "the log was trimmed before the kill"
    again = await job.until_event("training_started", count=2)
    assert again.data["step"] == saved
    await job.eventually(lambda: _is_trimmed(job), "the log to be trimmed")
    await _append_again(stack, job)
    gate.open()
    await job.until("COMPLETED")
    last = (await job.batches())[-1]
    assert set(last.seqs) <= {entry.seq for entry in await job.entries()}, "the newest groups stay"
    await _restore(stack, job)
    records = await job.batches()
    assert [one.reason for record in records for one in record.dropped] == ["duplicate"]
    await assert_every_task_once(job)
    await assert_replay_is_identical(job)


async def _is_mirrored(job: Job) -> bool:
    """Whether the mirror has the first groups; none is trimmed yet."""
    mirrored = (await stream_info(job.stack.broker, BACKUP))["state"]["last_seq"]
    return mirrored > 0


async def _is_trimmed(job: Job) -> bool:
    return await job.rollout_log.first_seq() > 1


async def _mirror(stack: Stack, stream: str, name: str) -> None:
    """Make `name` hold all that `stream` holds and will hold, under the same sequences."""
    config = {"name": name, "storage": "file", "mirror": {"name": stream}, "allow_direct": True}
    await stack.broker.api(f"STREAM.CREATE.{name}", config)


async def _append_again(stack: Stack, job: Job) -> None:
    """Append the first group again, as a generator that slept through the trimming would."""
    oldest = await get_seq(stack.broker, BACKUP, 1)
    assert oldest is not None
    entry = read_entry(oldest)
    assert entry.number is not None
    assert await job.rollout_log.append_payload(entry.number, entry.payload)


async def _restore(stack: Stack, job: Job) -> None:
    """Put the backup in the place of the trimmed log."""
    whole = (await stream_info(stack.broker, BACKUP))["state"]["last_seq"]
    await delete_stream(stack.broker, job.scope.stream_rollout)
    alone = {"name": BACKUP, "storage": "file", "subjects": [BACKUP], "allow_direct": True}
    await stack.broker.api(f"STREAM.UPDATE.{BACKUP}", alone)  # a mirror of a mirror is a cycle
    await _mirror(stack, BACKUP, job.scope.stream_rollout)

    async def complete() -> bool:
        return await job.rollout_log.last_seq() == whole

    await job.eventually(complete, "the log to be restored")
