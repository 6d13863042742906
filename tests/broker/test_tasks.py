"""The task queue: leases, idempotent publishing, back-pressure, restarts."""

import asyncio
import time

import pytest
from tinkermq.broker.client.connection import Broker, connect
from tinkermq.broker.jetstream.streams import create_job_streams, delete_job_streams
from tinkermq.broker.nats_server import NatsServer
from tinkermq.broker.tasks import Lease, TaskQueue
from tinkermq.schemas.config.job import LimitsConfig
from tinkermq.schemas.wire.errors import BrokerError, DeadlineError, NotFoundError
from tinkermq.schemas.wire.subjects import JobScope

from tests.support.strategies import make_task
from tests.support.waiting import AFTER_PATIENCE_S, PATIENCE_S


async def _publish(queue: TaskQueue, numbers: range) -> None:
    for number in numbers:
        assert await queue.publish(make_task(number))


async def _pull(queue: TaskQueue, num: int) -> list[Lease]:
    """Pull exactly `num` tasks; one pull may bring fewer on a busy machine."""
    leases: list[Lease] = []
    async with asyncio.timeout(PATIENCE_S):
        while len(leases) < num:
            leases += await queue.pull(num - len(leases), 5)
    return leases


async def test_tasks_are_pulled_in_order_and_done_once(broker: Broker, scope: JobScope) -> None:
    queue = TaskQueue(broker, scope)
    await _publish(queue, range(5))
    leases = await _pull(queue, 3) + await _pull(queue, 2)
    assert [lease.task.task for lease in leases] == [0, 1, 2, 3, 4]
    assert await queue.pull(1, 0.05) == []
    for lease in leases:
        await lease.done()
    assert await queue.pending_numbers() == set()
    await queue.close()


async def test_a_number_that_is_queued_or_held_is_not_queued_twice(
    broker: Broker, scope: JobScope
) -> None:
    queue = TaskQueue(broker, scope)
    assert await queue.publish(make_task(7))
    assert not await queue.publish(make_task(7))
    [lease] = await queue.pull(1, PATIENCE_S)
    assert not await queue.publish(make_task(7))
    assert await queue.pending_numbers() == {7}
    await lease.done()
    assert await queue.publish(make_task(7))
    await queue.close()


async def test_a_lease_that_is_not_kept_goes_to_somebody_else(
    broker: Broker, scope: JobScope
) -> None:
    queue = TaskQueue(broker, scope, ack_wait_s=4)
    await _publish(queue, range(2))
    kept, _ = await _pull(queue, 2)
    for _ in range(12):
        await asyncio.sleep(0.4)
        await kept.keep()
    [again] = await queue.pull(2, PATIENCE_S)
    assert (again.task.task, again.num_delivered) == (1, 2)
    await queue.close()


async def test_a_task_that_is_given_back_comes_after_the_delay(
    broker: Broker, scope: JobScope
) -> None:
    queue = TaskQueue(broker, scope)
    await _publish(queue, range(1))
    [lease] = await queue.pull(1, PATIENCE_S)
    started = time.monotonic()
    await lease.give_back(0.3)
    [again] = await queue.pull(1, PATIENCE_S)
    assert time.monotonic() - started > 0.2
    assert again.num_delivered == 2
    await queue.close()


async def test_a_pull_returns_as_soon_as_there_is_one_task(broker: Broker, scope: JobScope) -> None:
    queue = TaskQueue(broker, scope, pull_expires_s=AFTER_PATIENCE_S)
    pulling = asyncio.create_task(queue.pull(10, AFTER_PATIENCE_S))
    await asyncio.sleep(0.2)
    await queue.publish(make_task(1))
    assert len(await asyncio.wait_for(pulling, PATIENCE_S)) == 1
    await queue.close()


async def test_generators_share_the_tasks_without_overlap(
    nats_server: NatsServer, broker: Broker, scope: JobScope
) -> None:
    await _publish(TaskQueue(broker, scope), range(60))

    done: list[int] = []

    async def generate(name: str) -> None:
        async with await connect(nats_server.url, name=name) as connection:
            queue = TaskQueue(connection, scope)
            while len(done) < 60:
                for lease in await queue.pull(4, 0.1):
                    await lease.done()
                    done.append(lease.task.task)
            await queue.close()

    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*(generate(f"generator-{i}") for i in range(3)))
    assert sorted(done) == list(range(60))


async def test_the_number_of_leases_is_bounded(broker: Broker, scope: JobScope) -> None:
    queue = TaskQueue(broker, scope, max_leases=3)
    await _publish(queue, range(5))
    leases = await _pull(queue, 3)
    assert await queue.pull(2, 0.1) == []
    await leases[0].done()
    assert len(await queue.pull(2, PATIENCE_S)) == 1
    await queue.close()


async def test_a_malformed_task_is_put_aside_and_the_rest_goes_on(
    broker: Broker, scope: JobScope
) -> None:
    queue = TaskQueue(broker, scope)
    for number, payload in ((0, b"junk"), (1, make_task(9).to_bytes())):
        await broker.append(scope.task(number), payload, deadline_s=PATIENCE_S, waiting_for="test")
    await broker.append(scope.task("x"), b"", deadline_s=PATIENCE_S, waiting_for="test")
    await queue.publish(make_task(2))
    assert [lease.task.task for lease in await _pull(queue, 1)] == [2]
    assert await queue.pull(10, 0.1) == []
    assert await queue.pending_numbers() == {0, 1, 2}
    await queue.close()


async def test_a_full_queue_makes_the_publisher_wait(broker: Broker, scope: JobScope) -> None:
    await create_job_streams(broker, scope, LimitsConfig(task_bytes=1 << 16))
    queue = TaskQueue(broker, scope)
    number = 0

    async def fill() -> None:
        nonlocal number
        while True:
            await queue.publish(make_task(number), deadline_s=5.0)
            number += 1

    with pytest.raises(
        BrokerError, match="for room in the task queue: maximum bytes exceeded"
    ) as raised:
        await fill()
    assert "limits.task_bytes" in raised.value.hint
    waiting = asyncio.create_task(queue.publish(make_task(number), deadline_s=PATIENCE_S))
    [lease] = await queue.pull(1, PATIENCE_S)
    assert not waiting.done()
    await lease.done()
    assert await waiting
    await queue.close()


async def test_a_pull_across_a_kill_takes_longer_and_does_not_raise(
    own_server: NatsServer,
    own_broker: Broker,
    own_scope: JobScope,
) -> None:
    queue = TaskQueue(own_broker, own_scope, pull_expires_s=AFTER_PATIENCE_S)
    pulling = asyncio.create_task(queue.pull(1, AFTER_PATIENCE_S))
    await asyncio.sleep(0.2)
    own_server.kill()
    await asyncio.sleep(0.2)
    own_server.start()
    assert await queue.publish(make_task(1))
    leases = await asyncio.wait_for(pulling, PATIENCE_S)
    assert [lease.task.task for lease in leases] == [1]
    await queue.close()


async def test_a_publish_during_a_restart_is_repeated_until_it_is_confirmed(
    own_server: NatsServer, own_broker: Broker, own_scope: JobScope
) -> None:
    queue = TaskQueue(own_broker, own_scope)
    own_server.kill()
    publishing = asyncio.create_task(queue.publish(make_task(1), deadline_s=PATIENCE_S))
    await asyncio.sleep(0.3)
    own_server.start()
    assert await publishing
    assert await queue.pending_numbers() == {1}


async def test_a_publish_without_a_server_ends_at_its_deadline(
    own_server: NatsServer, own_broker: Broker, own_scope: JobScope
) -> None:
    own_server.kill()
    with pytest.raises(DeadlineError, match=r"task 1 of job .* to be stored in the task queue"):
        await TaskQueue(own_broker, own_scope).publish(make_task(1), deadline_s=0.3)


async def test_the_queue_of_a_removed_job_is_named(broker: Broker, scope: JobScope) -> None:
    queue = TaskQueue(broker, scope)
    pulling = asyncio.create_task(queue.pull(1, PATIENCE_S))
    await asyncio.sleep(0.1)
    await delete_job_streams(broker, scope)
    with pytest.raises(NotFoundError, match=f"there is no stream {scope.stream_task}"):
        await pulling
    with pytest.raises(NotFoundError, match="there is no stream tmq-"):
        await queue.publish(make_task(1))
    with pytest.raises(NotFoundError):
        await queue.pending_numbers()
    await queue.close()


async def test_what_arrived_but_was_not_pulled_is_handed_back_at_the_end(
    nats_server: NatsServer, broker: Broker, scope: JobScope
) -> None:
    queue = TaskQueue(broker, scope, ack_wait_s=60)
    async with await connect(nats_server.url, name="leaver") as connection:
        leaver = TaskQueue(connection, scope, ack_wait_s=60)
        pulling = asyncio.create_task(leaver.pull(1, 30))
        await asyncio.sleep(0.1)
        pulling.cancel()
        await asyncio.wait({pulling})
        await queue.publish(make_task(1))  # goes to the request that was given up
        await asyncio.sleep(0.1)
        await leaver.close()
    [lease] = await queue.pull(1, PATIENCE_S)
    assert lease.task.task == 1
    await queue.close()


async def test_a_holder_whose_lease_ran_out_goes_on_with_the_next_one(
    broker: Broker, scope: JobScope
) -> None:
    queue = TaskQueue(broker, scope, ack_wait_s=4)
    await _publish(queue, range(1))
    [held] = await _pull(queue, 1)
    [again] = await queue.pull(1, PATIENCE_S)
    held.replace(again)
    assert held.num_delivered == 2
    await held.done()
    assert await queue.pending_numbers() == set()
    await queue.close()
