"""What the command line does to runs, done from Python."""

import time

import pytest
from tinkermq.broker.feed import publish_metric
from tinkermq.clients import AsyncSchedulerClient
from tinkermq.schemas.metric import Metric
from tinkermq.schemas.wire.errors import ConfigError, NotFoundError

from tests.actors.scheduler.conftest import Stack

pytestmark = pytest.mark.full


async def test_a_run_is_paused_scaled_and_resumed_with_more_steps(stack: Stack) -> None:
    job = await stack.running(slots=3)
    await stack.answer_as_learner(job)
    async with AsyncSchedulerClient(stack.broker.url) as client:
        assert (await client.pause_job(job.name))["status"] == "PAUSED"
        assert (await client.resume_job(job.name))["status"] == "RUNNING"
        await client.scale_job(job.name, "generator", 2)
        await stack.until(job, lambda now: any(one.name == "generator-1" for one in now.actors))
        stack.do(job, "learner", "done")
        await stack.until(job, "COMPLETED")
        await client.resume_job(job.name, {"training": {"num_steps": 80}})
        now = await stack.get(job)
        assert (now.attempt, now.config["training"]["num_steps"]) == (2, 80)
        with pytest.raises(ConfigError, match="num_step"):
            await client.resume_job(job.name, {"training": {"num_step": 80}})


async def test_a_fork_that_names_no_checkpoint_is_refused(stack: Stack) -> None:
    job = await stack.running()
    async with AsyncSchedulerClient(stack.broker.url) as client:
        with pytest.raises(ConfigError, match="does not name a checkpoint"):
            await client.fork_job(job.name)
        with pytest.raises(NotFoundError, match="has no checkpoint of step 40"):
            await client.fork_job(f"{job.name}@40", {"learner": {"lr": 1e-5}})


async def test_metrics_are_one_row_for_each_step(stack: Stack) -> None:
    job = await stack.running()
    for step, values in ((2, {"a": 2.0}), (1, {"a": 1.0}), (2, {"val/mean_score": 0.5})):
        metric = Metric(step=step, values=values, time=time.time())
        await publish_metric(stack.broker, job.scope, metric)
    async with AsyncSchedulerClient(stack.broker.url) as client:
        assert await client.metrics(job.name) == [
            {"step": 1, "a": 1.0},
            {"step": 2, "a": 2.0, "val/mean_score": 0.5},
        ]
