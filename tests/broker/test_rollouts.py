"""Rollout log, batch log and segments: once and only once, fenced, live and bounded."""

import asyncio
import hashlib
import os
import random
import signal
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tinkermq.broker.client.connection import Broker, connect
from tinkermq.broker.jetstream.direct_get import StoredMessage, StreamReader, get_all
from tinkermq.broker.jetstream.streams import (
    create_job_streams,
    delete_job_streams,
    stream_info,
)
from tinkermq.broker.nats_server import NatsServer
from tinkermq.broker.partial_rollouts import Fenced, SegmentWriter, purge_segments, unbroken
from tinkermq.broker.rollouts import BatchLog, LogEntry, RolloutLog, read_entry
from tinkermq.schemas.config.job import LimitsConfig
from tinkermq.schemas.rollout import Segment
from tinkermq.schemas.task import BatchRecord
from tinkermq.schemas.wire.errors import (
    BrokerError,
    FencedError,
    MessageError,
    NotFoundError,
    RewoundError,
)
from tinkermq.schemas.wire.subjects import JobScope

from tests.support.processes import halt
from tests.support.strategies import hostile_payloads, make_group, make_tombstone
from tests.support.waiting import PATIENCE_S, until


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
        await until(lambda: len(self.entries) >= count, "entries")


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
        await broker.append(scope.rollout(1), b"other", deadline_s=PATIENCE_S, waiting_for="test")
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
    assert await log.get(0) is None


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
            for kills in range(1, 4):
                await until(lambda: len(confirmed) > 30 * kills, "writes")  # noqa: B023
                own_server.kill()
                own_server.start()
            await until(lambda: len(confirmed) > 120, "writes behind the last kill")
            stop.set()
        await tail.reach(await log.last_seq())
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


async def test_a_full_log_is_told_as_full_though_the_last_attempt_is_not_answered(
    own_server: NatsServer, own_broker: Broker, own_scope: JobScope
) -> None:
    await create_job_streams(own_broker, own_scope, LimitsConfig(rollout_bytes=1 << 20))
    log = RolloutLog(own_broker, own_scope)
    assert await log.append_payload(0, bytes((1 << 20) - (1 << 10)))
    attempts = list[bytes]()
    await own_broker.listen(own_scope.rollout(1), lambda message: attempts.append(message.data))
    waiting = asyncio.create_task(log.append_payload(1, bytes(1 << 19), deadline_s=3.0))
    await until(lambda: len(attempts) > 1 or waiting.done(), "a second attempt")
    assert own_server.pid is not None
    halt(own_server.pid)
    try:
        with pytest.raises(BrokerError, match=r"waited 3 s for room in the rollout log"):
            await waiting
    finally:
        os.kill(own_server.pid, signal.SIGCONT)


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
        await broker.append(subject, payload, deadline_s=PATIENCE_S, waiting_for="test")
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


# -- The batch log and its fence -------------------------------------------------------------------


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


async def test_a_log_that_was_set_back_is_no_other_learner(broker: Broker, scope: JobScope) -> None:
    log = BatchLog(broker, scope)
    await log.append(_record(1), 0)
    with pytest.raises(RewoundError, match="ends at entry 1, entry 4 was confirmed"):
        await log.append(_record(5), 4)
    with pytest.raises(RewoundError, match="ends at entry 1, entry 4 was confirmed"):
        await log.check_owner(4)


async def test_a_record_replaces_those_of_its_step_and_of_later_ones_before_it(
    broker: Broker, scope: JobScope
) -> None:
    log = BatchLog(broker, scope)
    last = 0
    for step in (1, 2, 3, 2, 3, 4):
        last = await log.append(_record(step), last)
    assert [(seq, record.step) for seq, record in await log.read_all()] == [
        (1, 1),
        (4, 2),
        (5, 3),
        (6, 4),
    ]


async def test_records_since_a_step_are_those_of_the_whole_log(
    broker: Broker, scope: JobScope
) -> None:
    log, draw, last, step = BatchLog(broker, scope), random.Random(0), 0, 0
    for _ in range(300):
        step = max(step + 1 - draw.choice([0] * 9 + [draw.randrange(80)]), 1)
        last = await log.append(_record(step), last)
    every = [record.step for _, record in await log.read_all()]
    for since in [*range(0, every[-1] + 2, 7), *every[-3:], every[-1] + 1, 1000]:
        found = [record.step for record in await log.read_since(since)]
        assert found == [step for step in every if step >= since], since


async def test_a_log_tells_whether_it_still_holds_an_entry(broker: Broker, scope: JobScope) -> None:
    log = RolloutLog(broker, scope)
    digests: list[str] = []
    for number in range(4):
        group = make_group(number)
        await log.append(group)
        digests.append(hashlib.sha256(group.to_bytes()).hexdigest())
    assert await log.holds(4, digests[3])
    assert not await log.holds(4, digests[2]), "another entry is there"
    assert not await log.holds(5, digests[3]), "the log ends before it"
    await broker.api(f"STREAM.MSG.DELETE.{log.stream}", {"seq": 3})
    assert await log.lost_seqs() == {3}
    await log.trim(3)
    assert await log.holds(1, digests[0]), "it was trimmed"


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
    await broker.append(scope.batch, b"junk", deadline_s=PATIENCE_S, waiting_for="test")
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


# -- Segments of running episodes: whoever was overtaken is refused by the server ------------------


@pytest.fixture
async def recorded(broker: Broker) -> AsyncIterator[JobScope]:
    """A job whose running episodes are written down, in a stream of the least size."""
    scope = JobScope("local", "segments")
    limits = LimitsConfig(segment_bytes=1 << 16)
    await create_job_streams(broker, scope, limits, segments=True)
    yield scope
    await delete_job_streams(broker, scope)


def make_segment(start: int, num: int, **fields: Any) -> Segment:
    ids = np.arange(start, start + num, dtype=np.int32)
    return Segment(
        **{"delivery": 1, "writer": "w", **fields},
        start=start,
        token_ids=ids,
        mask=np.ones(num, np.uint8),
        logprobs=np.zeros(num, np.float32),
        versions=np.zeros(num, np.int32),
    )


def make_writer(broker: Broker, scope: JobScope, delivery: int, task: int = 0) -> SegmentWriter:
    return SegmentWriter(broker, scope, task, 0, delivery=delivery, writer=f"holder-{delivery}")


async def stored(broker: Broker, scope: JobScope, task: int = 0) -> list[Segment]:
    messages = await get_all(broker, scope.stream_segment, scope.segment(task))
    return [Segment.from_bytes(message.payload) for message in messages]


async def test_the_next_holder_reads_what_is_there_and_fences_off_the_one_before(
    broker: Broker, recorded: JobScope
) -> None:
    first, second, third = (make_writer(broker, recorded, number) for number in (1, 2, 3))
    assert await first.take_over() == []
    assert await first.append(make_segment(0, 4, writer=first.writer))
    assert await first.append(make_segment(4, 3, writer=first.writer))
    found = await second.take_over()
    assert [(one.start, one.end) for one in found] == [(0, 4), (4, 7)]
    with pytest.raises(Fenced, match=r"taken over by holder-2 \(delivery 2\); this was delivery 1"):
        await first.append(make_segment(7, 1, writer=first.writer))
    assert await second.append(make_segment(7, 2, delivery=2, writer=second.writer))
    assert [one.end for one in await third.take_over()] == [4, 7, 7, 9]
    with pytest.raises(Fenced):  # a delivery that was overtaken does not take it back
        await make_writer(broker, recorded, 2).take_over()
    assert [one.end for one in await stored(broker, recorded)] == [4, 7, 7, 9, 9]


async def test_an_append_whose_answer_was_lost_is_recognised(
    broker: Broker, recorded: JobScope
) -> None:
    writer = make_writer(broker, recorded, 1)
    again = make_writer(broker, recorded, 1)  # it knows nothing of the append, as who lost the word
    segment = make_segment(0, 4, writer=writer.writer)
    assert await writer.append(segment)
    assert await again.append(segment)
    assert await again.append(make_segment(4, 4, writer=writer.writer))
    assert [one.end for one in await stored(broker, recorded)] == [4, 8]


async def test_what_does_not_fit_is_said_and_the_room_comes_back(
    broker: Broker, recorded: JobScope
) -> None:
    writer = make_writer(broker, recorded, 1)
    assert await writer.append(make_segment(0, 2500, writer=writer.writer))
    assert not await writer.append(make_segment(2500, 2500, writer=writer.writer))
    other = make_writer(broker, recorded, 1, task=1)
    assert not await other.append(make_segment(0, 2500, writer=other.writer))
    await purge_segments(broker, recorded, 0)
    assert await other.append(make_segment(0, 2500, writer=other.writer))
    with pytest.raises(Fenced, match="another generator finished the task"):
        await writer.append(make_segment(2500, 1, writer=writer.writer))
    assert [one.end for one in await stored(broker, recorded, 1)] == [2500]


def test_a_record_with_a_gap_is_none() -> None:
    whole = [make_segment(0, 2), make_segment(2, 3), make_segment(5, 0)]
    assert unbroken(whole) == whole
    assert unbroken([whole[0], make_segment(3, 1)]) == []
    assert unbroken([make_segment(2, 1)]) == []
    assert unbroken([whole[0], make_segment(7, 1), *whole]) == []
    assert unbroken([*whole, make_segment(0, 1)]) == [make_segment(0, 1)]


async def test_whatever_happens_in_which_order_the_record_is_of_one_holder_after_the_other(
    broker: Broker, recorded: JobScope
) -> None:
    for seed in range(10):
        await _let_holders_come_and_wake(broker, recorded, random.Random(seed), task=seed)
        await purge_segments(broker, recorded, seed)


async def _let_holders_come_and_wake(
    broker: Broker, scope: JobScope, rng: random.Random, task: int
) -> None:
    """Holders come, write, stall, and wake at random; the server alone decides."""
    holders: list[tuple[SegmentWriter, int]] = []
    written: list[Segment] = []
    for _ in range(20):
        if not holders or rng.random() < 0.2:
            fresh = make_writer(broker, scope, len(holders) + 1, task)
            found = await fresh.take_over()
            assert [one.end for one in found] == [one.end for one in unbroken(written)]
            holders.append((fresh, found[-1].end if found else 0))
            written = await stored(broker, scope, task)
            continue
        place = rng.choice([len(holders) - 1, rng.randrange(len(holders))])
        writer, end = holders[place]
        num = rng.randrange(1, 5)
        segment = make_segment(end, num, delivery=writer.delivery, writer=writer.writer)
        if place == len(holders) - 1:
            assert await writer.append(segment)
            holders[place] = writer, end + num
            written.append(segment)
        else:
            with pytest.raises(Fenced):
                await writer.append(segment)
    there = await stored(broker, scope, task)
    assert [(one.writer, one.start, one.end) for one in there] == [
        (one.writer, one.start, one.end) for one in written
    ]
    deliveries = [one.delivery for one in there]
    assert deliveries == sorted(deliveries)
    if there:
        assert unbroken(there)[-1].end == holders[-1][1]


async def test_a_job_that_does_not_ask_for_it_has_no_stream(
    broker: Broker, scope: JobScope
) -> None:
    with pytest.raises(NotFoundError):
        await stream_info(broker, scope.stream_segment)
