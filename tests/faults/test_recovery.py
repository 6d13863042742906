"""A run goes on after what a learner may meet when it starts again.

Groups that come while it trains recorded steps again, a log in which everything is decided, a
checkpoint with a damaged file, groups from outside that came to nothing.
"""

import asyncio
from pathlib import Path

import pytest
from tinkermq.actors.training.checkpoint import CheckpointStore
from tinkermq.clients import AsyncTrajectoryPublisher
from tinkermq.clients.base import JobAddress
from tinkermq.schemas.task import BatchRecord

from tests.faults.injected import append_untrainable, episode, kill_after_checkpoint
from tests.support.configs import small_job
from tests.support.gate import Gate
from tests.support.proofs import assert_every_task_once, assert_replay_is_identical
from tests.support.stack import Stack

pytestmark = [pytest.mark.faults, pytest.mark.full, pytest.mark.asyncio(loop_scope="session")]


def _reasons(records: list[BatchRecord]) -> set[str]:
    return {item.reason for record in records for item in record.dropped}


async def test_what_comes_while_recorded_steps_are_trained_again_is_trained(
    stack: Stack, tmp_path: Path, gate: Gate
) -> None:
    """Episodes that outlast the start of a learner end in the middle of its replay."""
    from tinkermq.actors.policy.tiny_models import save_tiny_model

    large = save_tiny_model(tmp_path / "large", width=256, layers=6, seed=1)
    env = gate.env(12, delay_s=0.2, tail_s=6.0, tail_share=0.05)
    job = await stack.submit(
        small_job(
            large,
            env={**env, "workers": 48},
            training={"num_steps": 20, "save_freq": 0, "staleness_policy": "train"},
        )
    )
    await job.until_step(12)
    await job.kill("learner")
    gate.open()
    await job.until_event("training_recovered")
    await job.until("COMPLETED")
    assert "malformed" not in _reasons(await job.batches())
    await assert_every_task_once(job)
    await assert_replay_is_identical(job)


async def test_a_learner_killed_between_a_checkpoint_and_the_next_issue_goes_on(
    stack: Stack, model: Path, gate: Gate
) -> None:
    """With no staleness allowed every entry of the log is decided then, and none can come."""
    training = {"max_staleness": 0, "num_steps": 12, "save_freq": 1}
    job = await stack.submit(small_job(model, env=gate.env(0), training=training))
    pid = await job.pid("learner")
    killing = asyncio.create_task(asyncio.to_thread(kill_after_checkpoint, stack, job, pid))
    gate.open()
    saved = await killing
    again = await job.until_event("training_started", count=2)
    assert again.data["step"] == saved
    await job.until("COMPLETED")
    await assert_every_task_once(job)
    await assert_replay_is_identical(job)


@pytest.mark.parametrize(
    "keep_rollouts",
    [
        pytest.param(True, id="kept"),
        pytest.param(False, marks=pytest.mark.long, id="trimmed"),
    ],
)
async def test_a_run_whose_newest_checkpoint_is_damaged_goes_on_from_the_one_before(
    stack: Stack, model: Path, gate: Gate, keep_rollouts: bool
) -> None:
    training = {"num_steps": 24, "keep_rollouts": keep_rollouts}
    job = await stack.submit(small_job(model, env=gate.env(10), training=training))
    await job.until_step(10)
    await job.stop()
    gate.open()
    await job.until("CANCELLED")
    checkpoints = CheckpointStore(job.run_dir, keep_last=2, keep_every=0)
    before, newest = checkpoints.steps()[-2:]
    optimizer = checkpoints.path(newest) / "learner" / "optimizer.pt"
    data = bytearray(optimizer.read_bytes())
    data[len(data) // 2] ^= 1
    optimizer.write_bytes(data)

    await job.resume()
    told = await job.until_event("checkpoint_damaged")
    assert "learner/optimizer.pt differs from what was written" in told.message
    again = await job.until_event("training_recovered")
    assert (again.data["step"], int(again.message.split()[1])) == (before, newest - before)
    await job.until("COMPLETED")
    steps = [record.step for record in await job.batches()]
    assert steps == list(range(1, 25))
    if keep_rollouts:
        await assert_every_task_once(job)
        await assert_replay_is_identical(job)


async def test_a_learner_that_does_not_see_the_runs_checkpoints_begins_no_second_run(
    stack: Stack, model: Path, gate: Gate
) -> None:
    """As on a node that sees other files under the same name."""
    training = {"num_steps": 24, "keep_rollouts": False}
    job = await stack.submit(small_job(model, env=gate.env(10), training=training))
    await job.until_step(10)
    await job.stop()
    gate.open()
    await job.until("CANCELLED")
    folder = job.run_dir / "checkpoints"
    folder.rename(job.run_dir / "elsewhere")
    await job.resume()
    record = await job.until("FAILED")
    assert "newest checkpoint that this node sees" in record.reason
    assert "is of step 0" in record.reason
    if folder.exists():
        folder.rename(job.run_dir / "empty")
    (job.run_dir / "elsewhere").rename(folder)
    await job.resume()
    await job.until("COMPLETED")
    assert [record.step for record in await job.batches()] == list(range(1, 25))


def _external(model: Path, **training: object) -> dict[str, object]:
    training = {"tasks": "external", "num_steps": 2, "batch_size": 2, "save_freq": 1, **training}
    return small_job(model, training=training, rollout={"group_size": 2})


async def test_a_run_all_of_whose_groups_from_outside_are_decided_starts_again(
    stack: Stack, model: Path
) -> None:
    job = await stack.submit(_external(model))
    await job.until_event("training_started")
    url = JobAddress(stack.server.url, job.scope).server_url
    async with AsyncTrajectoryPublisher(url, source="agent") as publisher:
        for _ in range(2):
            await publisher.publish_group([episode(0), episode(1)])
        await job.until_event("checkpoint_saved")
        await job.kill("learner")
        await job.until_event("training_started", count=2)
        for _ in range(2):
            await publisher.publish_group([episode(1), episode(0)])
    await job.until("COMPLETED")
    await assert_every_task_once(job)


async def test_a_run_whose_last_group_from_outside_is_dropped_asks_for_another(
    stack: Stack, model: Path
) -> None:
    job = await stack.submit(_external(model))
    await job.until_event("training_started")
    url = JobAddress(stack.server.url, job.scope).server_url
    async with AsyncTrajectoryPublisher(url, source="agent") as publisher:
        await publisher.publish_tasks([{"seed": 5}, {"seed": 6}])
        await publisher.publish_group([episode(0), episode(1)])
        await append_untrainable(stack, job)
        told = await job.until_event("groups_dropped")
        assert "token_ids must be from 0 to 263" in told.message
        assert "publish 1 more" in told.message

        async def asks() -> bool:
            learner = (await job.actors()).get("learner")
            return learner is not None and learner.waits_for == (
                "1 more groups from outside, 0 of them under way (1 could not be trained)"
            )

        await job.eventually(asks, "the learner to ask for a group")
        await publisher.publish_group([episode(1), episode(0)])
    await job.until("COMPLETED")
    await assert_every_task_once(job)
