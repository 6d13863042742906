"""Streams and buckets that somebody deletes are told by name, with what brings them back."""

import asyncio
from functools import partial
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from tinkermq.broker.calls import SchedulerCalls
from tinkermq.broker.client.connection import connect
from tinkermq.broker.client.rpc import call
from tinkermq.broker.jetstream.streams import create_shared, delete_stream, stream_info
from tinkermq.schemas.job import JobReply, SubmitRequest
from tinkermq.schemas.wire.errors import NotFoundError, StateError
from tinkermq.schemas.wire.subjects import (
    BUCKET_ACTORS,
    BUCKET_COPIES,
    BUCKET_EVALS,
    BUCKET_JOBS,
    BUCKET_LEASES,
    BUCKET_NODES,
    BUCKET_REQUESTS,
    BUCKET_SECRETS,
    rpc,
)

from tests.support.configs import small_job
from tests.support.gate import Gate
from tests.support.jobs import Job
from tests.support.stack import Stack
from tests.support.waiting import eventually, until

pytestmark = [pytest.mark.faults, pytest.mark.full, pytest.mark.asyncio(loop_scope="session")]


async def _started(stack: Stack, model: Path, gate: Gate) -> Job:
    job = await stack.submit(
        small_job(
            model,
            env=gate.env(4),
            generator={"segment_tokens": 3},
            training={"num_steps": 20, "save_freq": 2},
        )
    )
    await job.until_step(4)
    return job


async def _fails_without(stack: Stack, model: Path, gate: Gate, kind: str) -> tuple[Job, str]:
    """Delete a stream of a run that is under way; return what the run fails with."""
    job = await _started(stack, model, gate)
    await delete_stream(stack.broker, _named(job, kind))
    gate.open()
    reason = (await job.until("FAILED")).reason
    assert f"there is no stream {_named(job, kind)}" in reason
    return job, reason


def _named(job: Job, kind: str) -> str:
    return kind.format(f"tmq-{job.scope.user}-{job.scope.job}")


@pytest.mark.parametrize(
    "kind",
    [
        "{}-task",
        "KV_{}-weights",
        *(pytest.param(f"{{}}-{one}", marks=pytest.mark.long) for one in ("feed", "segment")),
        pytest.param("OBJ_{}-weights", marks=pytest.mark.long),
    ],
)
async def test_a_run_without_one_of_its_streams_names_it_and_goes_on_when_it_is_resumed(
    stack: Stack, model: Path, gate: Gate, kind: str
) -> None:
    job, reason = await _fails_without(stack, model, gate, kind)
    assert "`tinkermq resume RUN` makes it again" in reason
    await job.resume()
    await job.until("COMPLETED")


@pytest.mark.parametrize("kind", ["{}-rollout", pytest.param("{}-batch", marks=pytest.mark.long)])
async def test_a_run_without_its_log_names_it_and_does_not_begin_another(
    stack: Stack, model: Path, gate: Gate, kind: str
) -> None:
    job, reason = await _fails_without(stack, model, gate, kind)
    assert "`tinkermq fork RUN@STEP`" in reason
    await job.resume()
    record = await job.until("FAILED")
    assert f"stream {_named(job, kind)} was deleted and made again" in record.reason


async def test_a_run_needs_no_stream_that_only_tells_of_it(
    stack: Stack, model: Path, gate: Gate
) -> None:
    job = await _started(stack, model, gate)
    for kind in ("{}-trace", "{}-log", "{}-dead"):
        await delete_stream(stack.broker, _named(job, kind))
    gate.open()
    await job.until("COMPLETED")


async def _is_there(stack: Stack, bucket: str) -> bool:
    try:
        await stream_info(stack.broker, f"KV_{bucket}")
    except NotFoundError:
        return False
    return True


async def test_the_scheduler_makes_shared_buckets_again_and_runs_go_on(
    tmp_path: Path, model: Path, gate: Gate
) -> None:
    actors = (BUCKET_ACTORS, BUCKET_NODES)
    buckets = (*actors, BUCKET_REQUESTS, BUCKET_SECRETS, BUCKET_EVALS, BUCKET_COPIES)
    async with Stack(tmp_path) as stack:
        job = await _started(stack, model, gate)
        for bucket in (*buckets, BUCKET_LEASES):
            await delete_stream(stack.broker, f"KV_{bucket}")
        gate.let(9)
        await job.until_step(9)
        for bucket in buckets:
            await delete_stream(stack.broker, f"KV_{bucket}")
            await eventually(partial(_is_there, stack, bucket), f"bucket {bucket}")
        await stack.until_nodes()
        gate.open()
        record = await job.until("COMPLETED")
        assert record.attempt == 1
        another = await stack.submit(small_job(model))
        await another.until("COMPLETED")


async def test_a_pool_without_the_records_of_its_jobs_stops_nothing_and_says_what_is_gone(
    tmp_path: Path, model: Path, gate: Gate
) -> None:
    async with Stack(tmp_path) as stack:
        await _started(stack, model, gate)
        await delete_stream(stack.broker, f"KV_{BUCKET_JOBS}")
        request = SubmitRequest(request_id="another", config=small_job(model))
        with pytest.raises(NotFoundError, match=f"there is no stream KV_{BUCKET_JOBS}") as raised:
            await call(
                stack.broker,
                rpc(stack.broker.user, "scheduler", "submit"),
                request,
                JobReply,
                timeout_s=60,
                waiting_for="the scheduler",
            )
        assert "tinkermq restore" in raised.value.hint
        stack.kill("scheduler")
        with pytest.raises(StateError, match="held the records of all jobs, and 1 jobs"):
            async with await connect(stack.server.url, name="scheduler") as broker:
                await create_shared(broker)
        stack.start("scheduler")
        log = stack.folder / "scheduler.log"

        async def told() -> bool:
            return "held the records of all jobs" in await asyncio.to_thread(log.read_text)

        await eventually(told, "the scheduler to say what is gone")


async def test_a_submission_waits_for_a_scheduler_that_starts_again(
    tmp_path: Path, model: Path
) -> None:
    async with Stack(tmp_path) as stack:
        stack.kill("scheduler")
        with capture_logs() as logs:
            submitting = asyncio.create_task(
                SchedulerCalls(stack.broker).submit(
                    {"output_dir": str(tmp_path / "runs"), **small_job(model)}
                )
            )
            await until(
                lambda: any(line["event"] == "service_is_away" for line in logs),
                "the wait to be reported",
            )
        assert not submitting.done()
        stack.start("scheduler")
        record = await submitting
        assert record.state == "QUEUED"
        await Job(stack, record).until("COMPLETED")
