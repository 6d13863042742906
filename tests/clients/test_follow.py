"""A run is followed from its first metric to its last state."""

import asyncio
import time
from contextlib import aclosing

import pytest
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.feed import publish_event, publish_metric
from tinkermq.broker.jobs import JobStore
from tinkermq.broker.presence import presences
from tinkermq.clients.follow import Update, follow_run
from tinkermq.clients.pool import Pool
from tinkermq.schemas.job import JobRecord
from tinkermq.schemas.metric import Event, Metric, Presence
from tinkermq.schemas.wire.errors import NotFoundError
from tinkermq.schemas.wire.subjects import JobScope

from tests.support.waiting import PATIENCE_S


async def followed(broker: Broker, record: JobRecord) -> list[Update]:
    async with asyncio.timeout(PATIENCE_S), aclosing(follow_run(Pool(broker), record)) as updates:
        return [update async for update in updates]


async def tell(broker: Broker, scope: JobScope, step: int) -> None:
    values = {"training_step_reward": step / 10}
    await publish_metric(broker, scope, Metric(step=step, values=values, time=time.time()))


async def test_updates_come_in_order_and_end_with_the_last_state(
    broker: Broker, scope: JobScope, record: JobRecord
) -> None:
    await tell(broker, scope, 1)
    following = asyncio.create_task(followed(broker, record))
    await asyncio.sleep(0.3)
    await tell(broker, scope, 2)
    await JobStore(broker).transition(record, "COMPLETED", "done", "test")
    await tell(broker, scope, 3)
    updates = await following
    assert [one.step for one in updates if isinstance(one, Metric)] == [1, 2, 3]
    last = updates[-1]
    assert isinstance(last, JobRecord)
    assert last.state == "COMPLETED"


async def test_who_wants_them_is_told_of_the_actors(
    broker: Broker, scope: JobScope, record: JobRecord
) -> None:
    presence = Presence(
        actor="generator-0", role="generator", host="h", pid=1, state="working", time=time.time()
    )
    await presences(broker).put(f"{scope.key}.generator-0", presence)
    updates = follow_run(Pool(broker), record, with_actors=True)
    async with asyncio.timeout(PATIENCE_S), aclosing(updates):
        crew = await anext(update async for update in updates if isinstance(update, tuple))
    assert [one.actor for one in crew] == ["generator-0"]


async def test_a_run_that_has_ended_is_shown_from_its_start(
    broker: Broker, scope: JobScope, record: JobRecord
) -> None:
    await tell(broker, scope, 1)
    await publish_event(
        broker, scope, Event(kind="checkpoint_saved", source="learner", time=time.time())
    )
    ended = await JobStore(broker).transition(record, "FAILED", "no disk", "test")
    updates = await followed(broker, ended)
    assert [one.step for one in updates if isinstance(one, Metric)] == [1]
    assert "checkpoint_saved" in [one.kind for one in updates if isinstance(one, Event)]
    assert updates[-1] == ended


async def test_a_run_that_vanishes_ends_the_following_with_an_error(
    broker: Broker, record: JobRecord
) -> None:
    following = asyncio.create_task(followed(broker, record))
    await asyncio.sleep(0.3)
    await JobStore(broker)._jobs.delete(f"local.{record.job}")
    with pytest.raises(NotFoundError):
        await following


async def test_a_run_is_found_by_name_and_by_id_and_a_wrong_name_names_the_closest(
    broker: Broker, record: JobRecord
) -> None:
    pool = Pool(broker)
    assert await pool.find(record.job) == record
    assert await pool.find(record.name) == record
    with pytest.raises(NotFoundError) as caught:
        await pool.find(record.name[:-1] + "x9")
    assert "did you mean" in caught.value.hint
    with pytest.raises(NotFoundError):
        await pool.find("Not A Run!")
