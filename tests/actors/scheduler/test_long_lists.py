"""A list of jobs that is longer than one answer."""

import asyncio
from itertools import chain

from tinkermq.actors.scheduler.jobs.view import (
    PAGE_ARCHIVED,
    PAGE_RECORDS,
    ArchivedJob,
    ArchivedJobs,
    JobsView,
)
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.jetstream.kv import Bucket, Entry
from tinkermq.schemas.job import JobRecord
from tinkermq.schemas.wire.subjects import BUCKET_ARCHIVE


def _record(number: int, archived: float | None = None) -> JobRecord:
    return JobRecord(
        job=f"j{number}",
        name=f"run-{number}",
        user="ann",
        state="COMPLETED",
        config={},
        created=float(number // 2),  # of two at a time the id says which is the newer one
        archived=archived,
    )


def _pages(view: JobsView, *, archived: bool) -> list[list[str]]:
    """Return the jobs of each answer, asked for one after the other."""
    found: list[list[str]] = []
    after = ""
    while not found or after:
        jobs = view.records("ann")
        page, after = view.page(view.with_archived(jobs, "ann") if archived else jobs, after)
        found.append([one.job for one in page])
    return found


async def test_the_answers_of_a_long_list_hold_every_job_once_newest_first(broker: Broker) -> None:
    view = JobsView(broker)
    records = [_record(number) for number in range(2 * PAGE_RECORDS + 7)]
    for record in records:
        view.enter(Entry(f"ann.{record.job}", record, 1))
    pages = _pages(view, archived=False)
    assert list(map(len, pages)) == [PAGE_RECORDS, PAGE_RECORDS, 7]
    newest_first = sorted(records, key=lambda one: (one.created, one.job), reverse=True)
    assert list(chain(*pages)) == [one.job for one in newest_first]


async def test_an_answer_waits_for_no_more_archived_jobs_than_are_read_at_once(
    broker: Broker,
) -> None:
    view = JobsView(broker)
    for number in range(PAGE_ARCHIVED + 3):
        view.archive.enter(_record(number, archived=1.0))
        record = _record(PAGE_RECORDS + number)
        view.enter(Entry(f"ann.{record.job}", record, 1))
    at_hand = PAGE_ARCHIVED + 3
    assert list(map(len, _pages(view, archived=True))) == [at_hand + PAGE_ARCHIVED, 3]


async def test_a_flood_of_long_lists_costs_another_user_as_many_reads_as_his_own(
    broker: Broker,
) -> None:
    archive, bucket = ArchivedJobs(broker), Bucket(broker, BUCKET_ARCHIVE, JobRecord)
    await archive.open()
    jobs: dict[str, list[ArchivedJob]] = {}
    for user in ("many", "one"):
        for number in range(130):
            record = _record(number, archived=1.0).model_copy(update={"user": user})
            await bucket.put(record.scope.key, record)
            archive.enter(record)
        jobs[user] = list(archive.of(user))
    lists = [asyncio.create_task(archive.read(jobs["many"], "many")) for _ in range(16)]
    await asyncio.sleep(0)
    assert len(await archive.read(jobs["one"], "one")) == 130
    done = [one for one in lists if one.done()]
    assert len(done) <= 1, "all the lists of the one came before that of the other"
    assert {len(one) for one in await asyncio.gather(*lists)} == {130}
