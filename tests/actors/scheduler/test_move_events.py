"""The ends of many jobs are told some at a time, so that a slow server gets done with each."""

import asyncio

from tinkermq.actors.scheduler.notifier import MoveEvents
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.jetstream.streams import create_job_streams
from tinkermq.broker.jobs import JobStore
from tinkermq.schemas.config.job import LimitsConfig
from tinkermq.schemas.job import JobRecord
from tinkermq.schemas.metric import Event

from tests.support.waiting import PATIENCE_S

NUM_JOBS, AT_ONCE = 20, 8


async def ended(broker: Broker, jobs: JobStore, number: int) -> JobRecord:
    """A job that ended the earlier the lower its number is; its end is still to be told."""
    name = f"j{number}"
    record = JobRecord(
        job=name,
        name=name,
        user="local",
        state="COMPLETED",
        config={},
        created=1.0,
        finished=100.0 + number,
        has_streams=True,
        untold=[Event(kind="job_completed", source="scheduler", message="done", time=2.0)],
    )
    await create_job_streams(broker, record.scope, LimitsConfig())
    await jobs.create(record, "a test")
    return (await jobs.find_by_id("local", name)) or record


async def test_a_thousand_ends_at_once_are_told_some_at_a_time_the_oldest_first(
    own_broker: Broker,
) -> None:
    jobs = JobStore(own_broker)
    waiting = {one.job: one for one in [await ended(own_broker, jobs, n) for n in range(NUM_JOBS)]}
    events, order, most = MoveEvents(own_broker, jobs), list[str](), 0
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
        while waiting:
            events.publish(reversed(waiting.values()), group)
            most = max(most, events.num_closing)
            await asyncio.sleep(0.01)
            for name in list(waiting):
                now = await jobs.find_by_id("local", name)
                assert now is not None
                if not now.untold:
                    assert now.stored_bytes
                    order.append(name)
                    del waiting[name]
    assert most == AT_ONCE
    assert {f"j{number}" for number in range(AT_ONCE)} == set(order[:AT_ONCE])
