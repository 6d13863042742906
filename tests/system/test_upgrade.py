"""An upgrade of the pool: each of its processes is restarted under a running job."""

from pathlib import Path

import pytest

from tests.support.configs import small_job
from tests.support.proofs import assert_every_task_once, assert_replay_is_identical
from tests.support.stack import Stack

pytestmark = [pytest.mark.long, pytest.mark.asyncio(loop_scope="session")]

SLOW = {"game": "tests.support.games:SlowBandit", "kwargs": {"delay_s": 0.1}, "num_val": 0}


async def test_scheduler_node_and_server_are_restarted_and_no_job_is_lost(
    stack: Stack, model: Path
) -> None:
    job = await stack.submit(small_job(model, env=SLOW, training={"num_steps": 24}))
    told = await job.until_step(3)
    before = {name: actor.pid for name, actor in (await job.actors()).items()}

    await stack.restart("scheduler")
    told = await job.until_step(told.step + 2)
    await stack.restart("nats-server")
    told = await job.until_step(told.step + 2)
    now = {name: actor.pid for name, actor in (await job.actors()).items()}
    assert now == before, "an actor of the job was restarted, too"

    await stack.restart("node")
    again = await job.until_event("training_started", count=2)
    assert again.data["step"] >= told.step, "the node left without a checkpoint"
    await job.until("COMPLETED")
    await assert_every_task_once(job)
    await assert_replay_is_identical(job)
