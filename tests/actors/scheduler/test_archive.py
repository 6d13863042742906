"""Jobs beyond the bounds are archived by themselves, and are found and deleted as before."""

import asyncio
import shutil
from pathlib import Path

import pytest
from tinkermq.actors.scheduler.jobs.view import RetentionLimits
from tinkermq.broker.jetstream.kv import Bucket
from tinkermq.broker.jetstream.streams import create_job_streams, stream_info
from tinkermq.clients.pool import Pool
from tinkermq.schemas.config.job import LimitsConfig
from tinkermq.schemas.job import JobRecord, JobReply, JobRequest, ListRequest, StopRequest
from tinkermq.schemas.user import QuotaReply
from tinkermq.schemas.wire.errors import NotFoundError, StateError
from tinkermq.schemas.wire.message import Empty
from tinkermq.schemas.wire.subjects import BUCKET_ARCHIVE, BUCKET_JOBS

from tests.actors.scheduler.conftest import Stack
from tests.support.waiting import PATIENCE_S, eventually

pytestmark = pytest.mark.full

ONE = RetentionLimits(of_user=1, of_all=10)


async def _cancelled(stack: Stack, name: str) -> JobRecord:
    """Make a job that ends before it had a node."""
    job = await stack.submit(name=name, request_id=f"request-of-{name}")
    await stack.ask("stop", StopRequest(job=job.job, now=True))
    return await stack.until(job, "CANCELLED")


async def _until_away(stack: Stack, *jobs: JobRecord) -> None:
    """Wait until exactly the records of these jobs are in the archive and not among the others."""
    wanted = {job.scope.key for job in jobs}

    async def away() -> bool:
        kept = set(await Bucket(stack.broker, BUCKET_JOBS, JobRecord).keys())
        gone = set(await Bucket(stack.broker, BUCKET_ARCHIVE, JobRecord).keys())
        return gone == wanted and not kept & wanted

    await eventually(away, f"{len(jobs)} jobs to be archived")


async def test_what_a_user_has_beyond_the_bound_is_archived_and_found_as_before(
    stack: Stack,
) -> None:
    first_scheduler = await stack.scheduler(keeping=ONE)
    jobs = [await _cancelled(stack, name) for name in ("a", "b", "c")]
    await _until_away(stack, *jobs[:2])
    names = [one.name for one in await stack.list_jobs(ListRequest(all=True, archived=True))]
    assert names == ["c", "b", "a"]
    assert [one.name for one in await stack.list_jobs(ListRequest(all=True))] == ["c"]
    await first_scheduler.drain()
    await stack.scheduler(keeping=ONE)  # which reads the archive anew
    found = await stack.ask("get", JobRequest(job="a"))
    assert (found.job, found.state) == (jobs[0].job, "CANCELLED")
    assert (await Pool(stack.broker).find("a")).job == jobs[0].job
    again = await stack.submit(name="a", request_id="request-of-a")
    assert again.job == jobs[0].job
    with pytest.raises(StateError, match="run a is archived"):
        await stack.ask("resume", JobRequest(job="a"))
    with pytest.raises(NotFoundError):
        await stack.ask("get", JobRequest(job="a"), user="mallory")
    quota = await stack.ask_for("quota", Empty(), QuotaReply)
    assert quota.held["max_jobs"] == 3
    assert quota.held["max_record_bytes"] > quota.held["max_live_jobs"] == 0


async def test_an_archived_job_is_deleted_for_good_and_brought_back_for_a_while(
    stack: Stack,
) -> None:
    await stack.scheduler(keeping=ONE)
    jobs = [await _cancelled(stack, name) for name in ("a", "b", "c")]
    await _until_away(stack, *jobs[:2])
    pool = Pool(stack.broker)
    await pool.delete_run("a")
    with pytest.raises(NotFoundError):
        await pool.find("a")
    await _until_away(stack, jobs[1])
    back = await pool.archive_run("b", undo=True)
    assert back.archived is None
    await _until_away(stack, jobs[2])  # it is the one that ended longest ago now
    assert (await stack.ask("resume", JobRequest(job="b"))).state == "QUEUED"


@pytest.mark.parametrize("is_begun", [False, True])
async def test_an_archived_run_that_never_began_a_step_frees_its_name(
    stack: Stack, is_begun: bool
) -> None:
    await stack.scheduler()
    old = await _cancelled(stack, "a")
    if is_begun:
        await stack.jobs.update(old, lambda now: now.model_copy(update={"started": 1.0}))
        await create_job_streams(stack.broker, old.scope, LimitsConfig())
        await stack.jobs.update(old, lambda now: now.model_copy(update={"has_streams": True}))
        await stack.broker.append(
            old.scope.batch, b"of its first step", deadline_s=PATIENCE_S, waiting_for="the log"
        )
    await Pool(stack.broker).archive_run("a")
    await _until_away(stack, old)
    if is_begun:
        with pytest.raises(StateError, match="a run named 'a' exists already"):
            await stack.submit(name="a")
        return
    new = await stack.submit(name="a")
    assert (await stack.ask("get", JobRequest(job="a"))).job == new.job
    archived = await stack.ask("get", JobRequest(job="a-cancelled-1"))
    assert (archived.job, archived.archived is None) == (old.job, False)
    back = await Pool(stack.broker).archive_run("a-cancelled-1", undo=True)
    assert (back.name, back.config["name"], back.state) == (*2 * ("a-cancelled-1",), "CANCELLED")


async def test_pages_hold_archived_jobs_at_their_places(stack: Stack) -> None:
    await stack.scheduler(keeping=RetentionLimits(of_user=2, of_all=10))
    jobs = [await _cancelled(stack, name) for name in "abcd"]
    await _until_away(stack, *jobs[:2])
    await Pool(stack.broker).archive_run("a", undo=True)  # the oldest is at hand, a newer one not
    everything = await Pool(stack.broker).all_jobs(archived=True)
    assert [one.name for one in everything] == ["d", "c", "b", "a"]


async def test_what_a_kill_left_in_both_buckets_is_one_job_and_is_moved_to_its_end(
    stack: Stack,
) -> None:
    first = await stack.scheduler()
    job = await _cancelled(stack, "a")
    await first.drain()
    half = job.model_copy(update={"removal": "archive"})
    await stack.jobs.update(job, lambda now: now.model_copy(update={"removal": "archive"}))
    await Bucket(stack.broker, BUCKET_ARCHIVE, JobRecord).put(job.scope.key, half)
    await stack.scheduler()
    await _until_away(stack, job)
    listed = await stack.list_jobs(ListRequest(all=True, archived=True))
    assert [(one.job, one.removal) for one in listed] == [(job.job, "no")]
    quota = await stack.ask_for("quota", Empty(), QuotaReply)
    assert quota.held["max_jobs"] == 1


async def test_a_job_asked_to_be_deleted_while_it_is_archived_is_deleted(stack: Stack) -> None:
    scheduler = await stack.scheduler()
    job = await _cancelled(stack, "a")
    await scheduler.drain()
    archiving = await stack.jobs.update(
        job, lambda now: now.model_copy(update={"removal": "delete"})
    )
    with pytest.raises(Exception, match="not to be archived any more"):
        await stack.jobs.move_to_archive(archiving)
    assert (await stack.jobs.get("local", job.job)).removal == "delete"


async def test_streams_of_a_run_whose_folder_is_gone_stay_where_they_are(stack: Stack) -> None:
    first_scheduler = await stack.scheduler()
    await stack.node()
    await stack.until_nodes(1)
    lost = await stack.until(await stack.submit(name="lost"), "RUNNING")
    await stack.ask("stop", StopRequest(job="lost", now=True))
    await stack.until(lost, "CANCELLED")
    await stack.until_actors()
    shutil.move(lost.run_dir, Path(lost.run_dir).with_name("elsewhere"))
    await first_scheduler.drain()
    await stack.scheduler(keeping=RetentionLimits(of_user=0, of_all=0))
    other = await _cancelled(stack, "other")
    await _until_away(stack, other)
    record = await stack.get(lost)
    assert (record.removal, record.archived) == ("no", None)
    assert await stream_info(stack.broker, lost.scope.stream_batch)


async def test_many_ask_for_one_archived_job_at_once(stack: Stack) -> None:
    await stack.scheduler(keeping=RetentionLimits(of_user=0, of_all=0))
    job = await _cancelled(stack, "a")
    await _until_away(stack, job)
    asked = [stack.ask_for("get", JobRequest(job="a"), JobReply) for _ in range(8)]
    assert {one.record.job for one in await asyncio.gather(*asked)} == {job.job}
