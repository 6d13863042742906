"""Segments of running episodes: whoever was overtaken is refused by the server."""

import random
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.jetstream.direct_get import get_all
from tinkermq.broker.jetstream.streams import (
    create_job_streams,
    delete_job_streams,
    stream_info,
)
from tinkermq.broker.partial_rollouts import Fenced, SegmentWriter, purge_segments, unbroken
from tinkermq.schemas.config.job import LimitsConfig
from tinkermq.schemas.rollout import Segment
from tinkermq.schemas.wire.errors import NotFoundError
from tinkermq.schemas.wire.subjects import JobScope


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


async def test_a_holder_that_has_written_nothing_is_fenced_off_too(
    broker: Broker, recorded: JobScope
) -> None:
    slow, quick = make_writer(broker, recorded, 1), make_writer(broker, recorded, 2)
    await slow.take_over()
    assert await quick.take_over() == []
    with pytest.raises(Fenced):
        await slow.append(make_segment(0, 4, writer=slow.writer))


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
