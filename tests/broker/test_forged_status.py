"""A header that a writer made up is no word of the server: what is stored is read as it is."""

from contextlib import aclosing

import pytest
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.jetstream.direct_get import (
    StreamReader,
    get_all,
    get_last,
    get_newest,
    get_seq,
)
from tinkermq.broker.tasks import TaskQueue
from tinkermq.schemas.wire.codec import read_json
from tinkermq.schemas.wire.errors import MessageError
from tinkermq.schemas.wire.subjects import JobScope

from tests.support.strategies import make_task
from tests.support.waiting import eventually

STATUSES = ("503", "404", "408", "409 Consumer Deleted", "204", "100", "403")


@pytest.mark.parametrize("status", STATUSES)
async def test_an_entry_with_a_status_of_its_own_is_an_entry_like_any_other(
    broker: Broker, scope: JobScope, status: str
) -> None:
    stream, subject = scope.stream_rollout, scope.rollout(7)
    await broker.request(subject, b"", headers={"Status": status, "Description": "Batch Completed"})
    await broker.request(scope.rollout(8), b"behind it")

    one = await get_seq(broker, stream, 1)
    assert one is not None
    assert (one.subject, one.seq, one.payload) == (subject, 1, b"")
    last = await get_last(broker, stream, subject)
    newest = await get_newest(broker, stream, subject)
    assert last is not None
    assert newest is not None
    assert last.seq == newest.seq == 1
    assert [found.seq for found in await get_all(broker, stream, ">")] == [1, 2]

    reader = StreamReader(broker, stream, [subject, scope.rollout(8)])
    async with aclosing(reader.messages()) as messages:
        assert [(await anext(messages)).seq for _ in range(2)] == [1, 2]


async def test_a_forged_status_in_the_task_queue_costs_no_task(
    broker: Broker, scope: JobScope
) -> None:
    await broker.request(scope.task(3), b"", headers={"Status": "409", "Description": "gone"})
    queue = TaskQueue(broker, scope)
    assert await queue.publish(make_task(4))

    async def task() -> int | None:
        return next((lease.task.task for lease in await queue.pull(1, 1)), None)

    assert await eventually(task, "the task behind it") == 4
    await queue.close()


@pytest.mark.parametrize("text", [r'"\ud800"', r'{"a": ["\uDC00x"]}', r'{"\ud83d": 1}'])
def test_half_a_character_is_no_json(text: str) -> None:
    with pytest.raises(MessageError, match="half a character"):
        read_json(text)
    with pytest.raises(MessageError, match="half a character"):
        read_json(text.encode())
    with pytest.raises(MessageError, match="not valid JSON"):
        read_json(b'"\xed\xa0\x80"')
    assert read_json(r'"\ud83d\ude00 \\ud800"') == "\U0001f600 \\ud800"
