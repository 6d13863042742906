"""The batch log and its fence."""

import asyncio

import pytest
from tinkermq.broker.batches import BatchLog
from tinkermq.broker.client.connection import Broker, connect
from tinkermq.broker.jetstream.streams import delete_job_streams
from tinkermq.broker.nats_server import NatsServer
from tinkermq.schemas.task import BatchRecord
from tinkermq.schemas.wire.errors import FencedError, MessageError, NotFoundError
from tinkermq.schemas.wire.subjects import JobScope


def _record(step: int, learner: str = "learner") -> BatchRecord:
    return BatchRecord(
        step=step, seqs=[step], tasks=[step], seed=0, digest="d", learner=learner, time=0.0
    )


async def test_records_are_read_back_in_order_with_their_sequences(
    broker: Broker, scope: JobScope
) -> None:
    log = BatchLog(broker, scope)
    assert await log.read_all() == []
    last = 0
    for step in range(1, 4):
        last = await log.append(_record(step), last)
    assert [(seq, record.step) for seq, record in await log.read_all()] == [(1, 1), (2, 2), (3, 3)]


async def test_a_second_learner_fences_off_the_first(broker: Broker, scope: JobScope) -> None:
    log = BatchLog(broker, scope)
    last = await log.append(_record(1, "first"), 0)
    await log.append(_record(2, "second"), last)
    with pytest.raises(FencedError, match="step 2 was to come after entry 1, the last is 2"):
        await log.append(_record(2, "first"), last)


async def test_of_two_equal_records_only_one_is_appended(broker: Broker, scope: JobScope) -> None:
    log = BatchLog(broker, scope)
    results = await asyncio.gather(
        *(log.append(_record(1), 0) for _ in range(5)), return_exceptions=True
    )
    assert sorted(type(result).__name__ for result in results) == ["FencedError"] * 4 + ["int"]


async def test_a_learner_does_not_fence_itself_when_the_server_is_killed(
    own_server: NatsServer, own_broker: Broker, own_scope: JobScope
) -> None:
    log = BatchLog(own_broker, own_scope)
    stop = asyncio.Event()
    steps = 0

    async def train() -> None:
        nonlocal steps
        last = 0
        while not stop.is_set():
            last = await log.append(_record(steps + 1), last)
            steps += 1

    async with asyncio.TaskGroup() as group:
        group.create_task(train())
        for _ in range(3):
            await asyncio.sleep(0.15)
            own_server.kill()
            own_server.start()
        await asyncio.sleep(0.1)
        stop.set()
    assert [record.step for _, record in await log.read_all()] == list(range(1, steps + 1))


async def test_a_record_that_cannot_be_read_is_an_error(broker: Broker, scope: JobScope) -> None:
    await broker.append(scope.batch, b"junk", deadline_s=5, waiting_for="test")
    with pytest.raises(MessageError):
        await BatchLog(broker, scope).read_all()


async def test_the_log_of_a_removed_job_is_named(
    nats_server: NatsServer, broker: Broker, scope: JobScope
) -> None:
    await delete_job_streams(broker, scope)
    async with await connect(nats_server.url, name="late") as late:
        log = BatchLog(late, scope)
        with pytest.raises(NotFoundError):
            await log.append(_record(1), 0)
        with pytest.raises(NotFoundError):
            await log.read_all()
