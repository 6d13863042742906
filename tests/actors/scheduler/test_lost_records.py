"""Records that the broker's store has lost are restored by the scheduler that leads."""

import contextlib

import pytest
from tinkermq.broker.jetstream.kv import Bucket
from tinkermq.schemas.job import JobRecord, LabelRequest
from tinkermq.schemas.wire.errors import NotFoundError
from tinkermq.schemas.wire.subjects import BUCKET_JOBS

from tests.actors.scheduler.conftest import Stack
from tests.support.waiting import eventually


@pytest.mark.parametrize("restarted", [False, True], ids=["scheduler-lives", "scheduler-dies"])
async def test_a_job_whose_record_is_lost_runs_on(stack: Stack, restarted: bool) -> None:
    scheduler = await stack.scheduler()
    await stack.node()
    job = await stack.running()
    bucket = Bucket(stack.broker, BUCKET_JOBS, JobRecord)
    if restarted:
        await scheduler.drain()
    await bucket.purge(job.scope.key)  # without a trace, as a damaged block
    if restarted:
        await stack.scheduler()
    else:
        with contextlib.suppress(NotFoundError):  # the request finds it missing
            await stack.ask("label", LabelRequest(job=job.job, notes="missed"))

    async def is_back() -> bool:
        return await bucket.get(job.scope.key) is not None

    await eventually(is_back, "the record to be restored")
    back = await stack.until(job, "RUNNING")
    assert (back.attempt, back.losses) == (1, 0)
    stack.do(job, "learner", "done")
    await stack.until(job, "COMPLETED")
    assert "record_restored" in [event.kind for event in await stack.events(job)]
