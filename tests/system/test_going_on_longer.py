"""A run that has completed goes on with more steps, where it was."""

from pathlib import Path

import pytest
from tinkermq.broker.batches import BatchLog
from tinkermq.schemas.job import JobReply, ResumeRequest

from tests.support.configs import small_job
from tests.support.stack import Stack

pytestmark = [pytest.mark.long, pytest.mark.asyncio(loop_scope="session")]


async def test_a_completed_run_trains_on_to_more_steps(stack: Stack, model: Path) -> None:
    job = await stack.submit(small_job(model, training={"num_steps": 4, "save_freq": 0}))
    await job.until("COMPLETED")
    again = ResumeRequest(job=job.scope.job, config={"training": {"num_steps": 7}})
    await stack.ask("resume", again, JobReply)
    await job.until_step(7)
    await job.until("COMPLETED")
    records = [record for _, record in await BatchLog(stack.broker, job.scope).read_all()]
    assert [record.step for record in records] == [1, 2, 3, 4, 5, 6, 7]
    tasks = [task for record in records for task in record.tasks]
    assert len(tasks) == len(set(tasks))  # nothing was trained twice
