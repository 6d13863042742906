"""An agent of the user's own puts trajectories and tasks into a job; both are trained."""

from pathlib import Path

import pytest
from tinkermq.clients import AsyncTrajectoryPublisher
from tinkermq.clients.address import JobAddress
from tinkermq.schemas.wire.errors import MessageError

from tests.faults.injected import append_untrainable, episode
from tests.support.configs import small_job
from tests.support.proofs import assert_every_task_once
from tests.support.stack import Stack

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_trajectories_and_tasks_of_a_client_are_trained_and_malformed_ones_are_not(
    stack: Stack, model: Path
) -> None:
    training = {"tasks": "external", "num_steps": 3, "batch_size": 2}
    config = small_job(model, training=training, rollout={"group_size": 2})
    job = await stack.submit(config)
    await job.until_event("training_started")
    url = JobAddress(stack.server.url, job.scope).server_url
    async with AsyncTrajectoryPublisher(url, source="my-agent") as publisher:
        await publisher.publish_group([episode(0), episode(1)])
        with pytest.raises(MessageError, match="token_ids must be from 0 to 263"):
            await publisher.publish_group([episode(0), episode(1, last_token=264)])
        with pytest.raises(MessageError, match="has 2 trajectories, this has 1"):
            await publisher.publish_group([episode(0)])
        smuggled = await append_untrainable(stack, job)
        await publisher.publish_tasks([{"seed": 5}, {"seed": 6, "reset_kwargs": {"room": 1}}])
        for _ in range(3):
            await publisher.publish_group([episode(1), episode(0)])
    await job.until("COMPLETED")
    await assert_every_task_once(job)
    records = await job.batches()
    dropped = [(item.task, item.reason) for record in records for item in record.dropped]
    assert dropped == [(smuggled, "malformed")]
    groups = {entry.number: entry.group for entry in await job.entries() if entry.group}
    trained = [groups[number] for record in records for number in record.tasks]
    sources = sorted(group.source for group in trained)
    assert sources == ["generator-0"] * 2 + ["my-agent"] * 4
    asked = [group.task for group in trained if group.source == "generator-0"]
    assert sorted(task.seed for task in asked) == [5, 6]
