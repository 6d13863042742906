"""The rollout log: once and only once, live, bounded, and never ended by what it holds."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.jetstream.direct_get import StoredMessage, StreamReader
from tinkermq.broker.jetstream.streams import (
    create_job_streams,
    delete_job_streams,
    stream_info,
)
from tinkermq.broker.nats_server import NatsServer
from tinkermq.broker.rollouts import LogEntry, RolloutLog, read_entry
from tinkermq.schemas.config.job import LimitsConfig
from tinkermq.schemas.wire.errors import BrokerError, MessageError, NotFoundError
from tinkermq.schemas.wire.subjects import JobScope

from tests.support.strategies import hostile_payloads, make_group, make_tombstone
from tests.support.waiting import PATIENCE_S


class Tail:
    """Collects what a reader yields."""

    def __init__(self) -> None:
        self.entries: list[LogEntry] = []

    @property
    def numbers(self) -> list[int]:
        return [entry.number for entry in self.entries if entry.number is not None]

    async def run(self, log: RolloutLog, from_seq: int) -> None:
        async with aclosing(log.read(from_seq)) as entries:
            async for entry in entries:
                self.entries.append(entry)

    async def reach(self, count: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while len(self.entries) < count:
                await asyncio.sleep(0.005)


@asynccontextmanager
async def tailing(broker: Broker, scope: JobScope, from_seq: int = 1) -> AsyncIterator[Tail]:
    tail = Tail()
    task = asyncio.create_task(tail.run(RolloutLog(broker, scope), from_seq))
    try:
        yield tail
    finally:
        task.cancel()
        await asyncio.wait({task})


async def test_the_first_group_of_a_task_wins(broker: Broker, scope: JobScope) -> None:
    log = RolloutLog(broker, scope)
    assert not await log.contains(3)
    assert await log.append(make_group(3, source="first"))
    assert not await log.append(make_group(3, source="second"))
    assert await log.contains(3)
    entry = await log.find(3)
    assert entry is not None
    assert entry.group is not None
    assert entry.group.source == "first"
    assert await log.numbers() == {3}


async def test_of_many_writers_of_one_task_exactly_one_wins(
    broker: Broker, scope: JobScope
) -> None:
    log = RolloutLog(broker, scope)
    won = await asyncio.gather(*(log.append(make_group(1, source=f"g{i}")) for i in range(20)))
    assert sum(won) == 1


async def test_even_a_writer_that_expects_nothing_cannot_append_twice(
    broker: Broker, scope: JobScope
) -> None:
    log = RolloutLog(broker, scope)
    await log.append(make_group(1))
    with pytest.raises(Exception, match="maximum messages per subject"):
        await broker.append(scope.rollout(1), b"other", deadline_s=5, waiting_for="test")
    assert await log.last_seq() == 1


async def test_groups_and_tombstones_come_back_as_they_were_appended(
    broker: Broker, scope: JobScope
) -> None:
    log = RolloutLog(broker, scope)
    group, tombstone = make_group(0, num_tokens=100), make_tombstone(1)
    await log.append(group)
    await log.append(tombstone)
    first, second = await log.get(1), await log.get(2)
    assert first is not None
    assert second is not None
    assert first.payload == group.to_bytes()
    assert first.group is not None
    assert (first.group.trajectories[0].token_ids == group.trajectories[0].token_ids).all()
    assert second.group == tombstone
    assert await log.get(3) is None


async def test_a_reader_yields_what_is_there_and_then_what_comes(
    broker: Broker, scope: JobScope
) -> None:
    log = RolloutLog(broker, scope)
    for number in range(5):
        await log.append(make_group(number))
    async with tailing(broker, scope, from_seq=3) as tail:
        await tail.reach(3)
        await log.append(make_group(5))
        await tail.reach(4)
    assert tail.numbers == [2, 3, 4, 5]


async def test_a_log_of_many_groups_is_read_once_and_in_order(
    broker: Broker, scope: JobScope
) -> None:
    log = RolloutLog(broker, scope)
    await asyncio.gather(*(log.append(make_group(number)) for number in range(700)))
    async with tailing(broker, scope) as tail:
        await tail.reach(700)
    assert [entry.seq for entry in tail.entries] == list(range(1, 701))
    assert sorted(tail.numbers) == list(range(700))


async def test_a_reader_goes_on_across_kills_of_the_server(
    own_server: NatsServer, own_broker: Broker, own_scope: JobScope
) -> None:
    log = RolloutLog(own_broker, own_scope)
    async with tailing(own_broker, own_scope) as tail:
        for number in range(3):
            await log.append(make_group(number))
            await tail.reach(number + 1)
            own_server.kill()
            own_server.start()
        await log.append(make_group(3))
        await tail.reach(4)
    assert tail.numbers == [0, 1, 2, 3]


async def test_nothing_confirmed_is_lost_and_nothing_doubled_by_kills_under_load(
    own_server: NatsServer, own_broker: Broker, own_scope: JobScope
) -> None:
    log = RolloutLog(own_broker, own_scope)
    confirmed: set[int] = set()
    stop = asyncio.Event()

    async def write(first: int) -> None:
        number = first
        while not stop.is_set():
            assert await log.append(make_group(number)) or await log.contains(number)
            confirmed.add(number)
            number += 8

    async with tailing(own_broker, own_scope) as tail:
        async with asyncio.TaskGroup() as writers:
            for first in range(8):
                writers.create_task(write(first))
            for _ in range(3):
                await asyncio.sleep(0.3)
                own_server.kill()
                await asyncio.sleep(0.05)
                own_server.start()
            await asyncio.sleep(0.3)
            stop.set()
        await tail.reach(await log.last_seq())
    assert len(confirmed) > 100
    assert sorted(tail.numbers) == sorted(confirmed)
    assert [entry.seq for entry in tail.entries] == list(range(1, len(confirmed) + 1))


async def test_trimming_removes_what_is_before_and_numbers_may_come_again(
    broker: Broker, scope: JobScope
) -> None:
    log = RolloutLog(broker, scope)
    for number in range(6):
        await log.append(make_group(number))
    await log.trim(4)
    assert (await log.first_seq(), await log.last_seq()) == (4, 6)
    assert await log.numbers() == {3, 4, 5}
    assert not await log.contains(0)
    async with tailing(broker, scope) as tail:
        await tail.reach(3)
    assert tail.numbers == [3, 4, 5]


async def test_trimming_leaves_about_as_many_bytes_of_the_newest_as_it_is_told(
    broker: Broker, scope: JobScope
) -> None:
    log = RolloutLog(broker, scope)
    for number in range(10):
        await log.append(make_group(number))
    info = await stream_info(broker, scope.stream_rollout)
    await log.trim(11, keep_bytes=info["state"]["bytes"] * 2)
    assert await log.first_seq() == 1
    await log.trim(11, keep_bytes=info["state"]["bytes"] // 2)
    assert 4 <= len(await log.numbers()) <= 6
    await log.trim(3, keep_bytes=1)
    assert len(await log.numbers()) >= 4
    await log.trim(11, keep_bytes=1)  # one that is larger than that
    assert await log.numbers() == {9}
    await log.trim(11)
    assert await log.numbers() == set()


async def test_a_full_log_makes_writers_wait_until_it_is_trimmed(
    broker: Broker, scope: JobScope
) -> None:
    await create_job_streams(broker, scope, LimitsConfig(rollout_bytes=1 << 20))
    log = RolloutLog(broker, scope)
    number = 0

    async def fill() -> None:
        nonlocal number
        while True:
            await log.append(make_group(number, num_tokens=5000), deadline_s=2.0)
            number += 1

    with pytest.raises(BrokerError, match=r"waited 2 s for room in the rollout log") as raised:
        await fill()
    assert "limits.rollout_bytes" in raised.value.hint
    waiting = asyncio.create_task(
        log.append(make_group(number, num_tokens=5000), deadline_s=PATIENCE_S)
    )
    await asyncio.sleep(0.3)
    assert not waiting.done()
    await log.trim(5)
    assert await waiting


async def test_a_group_larger_than_the_server_takes_is_refused_with_size_and_limit(
    broker: Broker, scope: JobScope
) -> None:
    group = make_group(5, num_tokens=700_000)
    size = len(group.to_bytes())
    with pytest.raises(MessageError, match=rf"the group of task 5 has {size:,} bytes") as raised:
        await RolloutLog(broker, scope).append(group)
    assert "group_size" in raised.value.hint
    assert broker.is_connected


async def test_a_reader_of_a_removed_job_says_so(broker: Broker, scope: JobScope) -> None:
    tail = Tail()
    reading = asyncio.create_task(tail.run(RolloutLog(broker, scope), 1))
    await asyncio.sleep(0.1)
    await delete_job_streams(broker, scope)
    with pytest.raises(NotFoundError, match=f"there is no stream {scope.stream_rollout}"):
        await asyncio.wait_for(reading, PATIENCE_S)
    with pytest.raises(NotFoundError, match="there is no stream tmq-"):
        await RolloutLog(broker, scope).append(make_group(1))


async def test_malformed_entries_are_yielded_as_such_and_the_reader_goes_on(
    broker: Broker, scope: JobScope
) -> None:
    log = RolloutLog(broker, scope)
    for subject, payload in (
        (scope.rollout(0), b"junk"),
        (scope.rollout("not-a-number"), make_group(1).to_bytes()),
        (scope.rollout(2), make_group(3).to_bytes()),
        (scope.rollout(4), b""),
    ):
        await broker.append(subject, payload, deadline_s=5, waiting_for="test")
    await log.append(make_group(5))
    async with tailing(broker, scope) as tail:
        await tail.reach(5)
    assert [entry.number for entry in tail.entries] == [0, None, 2, 4, 5]
    assert [entry.error is None for entry in tail.entries] == [False] * 4 + [True]
    assert "rollout.3" in str(tail.entries[2].error)


@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(payload=hostile_payloads(make_group(1)), tail=st.text(max_size=30))
def test_whatever_an_entry_holds_it_is_read_as_a_group_or_an_error(
    payload: bytes, tail: str
) -> None:
    for subject in ("tmq.v1.job.u.j.rollout.1", f"tmq.v1.job.u.j.rollout.{tail}"):
        entry = read_entry(StoredMessage(subject, 1, payload, {}))
        assert (entry.group is None) != (entry.error is None)
        assert entry.payload == payload


async def test_a_reader_makes_no_consumer(broker: Broker, scope: JobScope) -> None:
    log = RolloutLog(broker, scope)
    await asyncio.gather(*(log.append(make_tombstone(number)) for number in range(50)))
    async with tailing(broker, scope) as tail:
        await tail.reach(50)
        info = await stream_info(broker, scope.stream_rollout)
    assert info["state"]["consumer_count"] == 0


async def test_a_reader_of_two_subjects_passes_over_the_others(
    broker: Broker, scope: JobScope
) -> None:
    log = RolloutLog(broker, scope)
    for number in range(5):
        await log.append(make_tombstone(number))
    subjects = [scope.rollout(1), scope.rollout(4)]
    reader = StreamReader(broker, scope.stream_rollout, subjects)
    seen: list[str] = []
    async with asyncio.timeout(PATIENCE_S), aclosing(reader.messages()) as messages:
        async for message in messages:
            seen.append(message.subject)
            if len(seen) == 2:
                break
    assert seen == subjects
