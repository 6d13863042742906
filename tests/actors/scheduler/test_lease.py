"""Which of several schedulers acts."""

import asyncio
import contextlib
import time

import pytest
from tinkermq.actors.scheduler.lease import KEY, LeaderLease, Timing
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.client.rpc import Service, call
from tinkermq.broker.jetstream.kv import Bucket
from tinkermq.clients.cli.runs import describe_trouble
from tinkermq.clients.pool import Pool
from tinkermq.schemas.job import JobRequest, RequestRecord
from tinkermq.schemas.node import NodeStatus, NodeSync, SchedulerLease
from tinkermq.schemas.wire.errors import FencedError
from tinkermq.schemas.wire.subjects import BUCKET_LEASES, BUCKET_NODES, node

from tests.actors.scheduler.conftest import FAST, Stack
from tests.support.waiting import AFTER_PATIENCE_S, PATIENCE_S, eventually

pytestmark = pytest.mark.full


async def test_other_schedulers_wait_until_the_first_gives_its_lease_back_or_they_are_stopped(
    own_broker: Broker,
) -> None:
    never, stopping = asyncio.Event(), asyncio.Event()
    timing = Timing(stale_s=AFTER_PATIENCE_S)
    first, second, third = (LeaderLease(own_broker, timing) for _ in range(3))
    assert await first.acquire(never)
    waiting = asyncio.create_task(second.acquire(never))
    stopped = asyncio.create_task(third.acquire(stopping))
    await asyncio.sleep(0.4)
    assert not waiting.done()
    assert not stopped.done()
    stopping.set()
    assert await asyncio.wait_for(stopped, PATIENCE_S) is False
    await first.release()
    assert await asyncio.wait_for(waiting, PATIENCE_S)
    assert second.epoch > first.epoch
    assert second.is_fresh


async def test_epochs_rise_wherever_the_clock_stands(
    own_broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    never, epochs = asyncio.Event(), [0]
    for clock in (2e9, 1e9, 5.0):
        monkeypatch.setattr("tinkermq.actors.scheduler.lease.time.time", lambda now=clock: now)
        lease = LeaderLease(own_broker, FAST)
        assert await asyncio.wait_for(lease.acquire(never), PATIENCE_S)
        epochs.append(lease.epoch)
        await lease.release()
    assert epochs == sorted(set(epochs))


async def test_a_scheduler_rises_above_what_nodes_have_heard(stack: Stack) -> None:
    await stack.scheduler()
    await stack.node()
    await stack.until_nodes(1)
    bucket = Bucket(stack.broker, BUCKET_LEASES, SchedulerLease)
    held = await bucket.get(KEY)
    assert held is not None
    ahead = held.value.epoch + 10**12
    heard = NodeSync(scheduler="one whose clock is ahead", epoch=ahead, actors=[])
    subject = node("n1", "sync")
    await call(
        stack.broker, subject, heard, NodeStatus, timeout_s=PATIENCE_S, waiting_for="the node"
    )
    job = await stack.submit()
    await stack.until(job, "RUNNING")

    async def is_written() -> bool:
        risen = await bucket.get(KEY)
        return risen is not None and risen.value.epoch > ahead

    await eventually(is_written, "the lease to be renewed with a higher epoch")


async def test_nodes_that_refuse_the_scheduler_are_a_warning_in_ps(stack: Stack) -> None:
    heard_of_another = True

    async def sync(_: NodeSync) -> NodeStatus:
        if heard_of_another:
            raise FencedError("scheduler s has been replaced by another")
        return NodeStatus(node="n9", host="h", slots=2, time=time.time())

    pool = Pool(stack.broker)
    warning = "the scheduler waits for nodes that know a later scheduler and refuse this one: n9"
    service = await Service.start(stack.broker, name="n9", description="a node that refuses")
    try:
        await service.endpoint("sync", node("n9", "sync"), NodeSync, sync)
        await stack.scheduler()
        record = NodeStatus(node="n9", host="h", slots=2, time=time.time())
        await Bucket(stack.broker, BUCKET_NODES, NodeStatus).put("n9", record)
        assert await eventually(lambda: describe_trouble(pool), "the warning") == warning
        heard_of_another = False

        async def is_well() -> bool:
            return await pool.trouble() == ""

        await eventually(is_well, "the warning to go")
    finally:
        await service.stop(0)


async def test_a_lease_that_stands_still_is_taken_and_its_holder_fenced(
    own_broker: Broker,
) -> None:
    never = asyncio.Event()
    first, second = LeaderLease(own_broker, FAST), LeaderLease(own_broker, FAST)
    assert await first.acquire(never)
    started = time.monotonic()
    assert await second.acquire(never)
    assert time.monotonic() - started >= FAST.stale_s
    assert not first.is_fresh
    with pytest.raises(FencedError):
        await asyncio.wait_for(first.hold(), PATIENCE_S)
    await first.release()
    held = await Bucket(own_broker, BUCKET_LEASES, SchedulerLease).get(KEY)
    assert held is not None
    assert held.value.holder == second.holder


async def test_what_is_no_lease_at_all_is_taken_like_one_that_stands_still(
    own_broker: Broker,
) -> None:
    bucket = Bucket(own_broker, BUCKET_LEASES, RequestRecord)
    await bucket.put(KEY, RequestRecord(job="no lease"))
    lease = LeaderLease(own_broker, Timing(stale_s=0.1))
    assert await asyncio.wait_for(lease.acquire(asyncio.Event()), PATIENCE_S)


async def test_a_lease_that_is_renewed_is_not_taken(own_broker: Broker) -> None:
    never = asyncio.Event()
    timing = Timing(renew_s=0.1, stale_s=5.0)  # renewed often enough on any machine
    first, second = LeaderLease(own_broker, timing), LeaderLease(own_broker, timing)
    assert await first.acquire(never)
    holding = asyncio.create_task(first.hold())
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(second.acquire(never), timing.stale_s + 1)
    holding.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await holding


async def test_of_two_schedulers_the_second_takes_over_when_the_first_ends(stack: Stack) -> None:
    first = await stack.scheduler()
    job = await stack.submit()
    await stack.scheduler()
    await first.drain()
    assert (await stack.ask("get", JobRequest(job=job.job))).job == job.job
    await stack.node()
    await stack.until(job, "RUNNING")
