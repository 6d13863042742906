"""Objects in buckets: what a killed writer leaves goes, and nothing whole goes with it."""

import asyncio
import gc
import sys
import threading
from collections.abc import Iterator

from tinkermq.broker.client.connection import Broker
from tinkermq.broker.jetstream.objects import ObjectStore
from tinkermq.broker.jetstream.streams import num_messages, stream_subjects
from tinkermq.schemas.wire.subjects import JobScope

from tests.support.cancelling import cancel_everywhere
from tests.support.waiting import PATIENCE_S, eventually


class Parts(list[memoryview]):
    """Parts of an object, the later ones of which are held back."""

    def __init__(self, *parts: bytes) -> None:
        super().__init__(map(memoryview, parts))
        self.let_go = threading.Event()

    def __iter__(self) -> Iterator[memoryview]:
        yield self[0]
        assert self.let_go.wait(PATIENCE_S)
        yield from self[1:]


async def _subjects(broker: Broker, bucket: str) -> list[str]:
    return await stream_subjects(broker, f"OBJ_{bucket}", f"$O.{bucket}.C.*")


async def test_chunks_of_no_object_are_removed(broker: Broker, scope: JobScope) -> None:
    bucket = scope.object_weights
    store = ObjectStore(broker, bucket)
    await store.put("kept", [memoryview(b"kept")], deadline_s=PATIENCE_S)
    kept = await _subjects(broker, bucket)
    for _ in range(3):
        subject = f"$O.{bucket}.C.killed"
        await broker.append(subject, b"part", deadline_s=PATIENCE_S, waiting_for="a part")
    await store.sweep()
    assert await _subjects(broker, bucket) == kept
    assert await store.names() == ["kept"]


async def test_an_object_whose_chunks_are_removed_meanwhile_is_stored_anew(
    broker: Broker, scope: JobScope
) -> None:
    """As by a learner that begins while one that was cut off still publishes."""
    bucket, parts = scope.object_weights, Parts(b"a" * 1024, b"b" * 1024)
    store = ObjectStore(broker, bucket, chunk_bytes=1024)
    putting = asyncio.create_task(store.put("whole", parts, deadline_s=PATIENCE_S))

    async def first() -> bool:
        there = await _subjects(broker, bucket)
        return bool(there) and await num_messages(broker, f"OBJ_{bucket}", there[0]) == 1

    await eventually(first, "the first part to be stored")
    await store.sweep()
    assert await _subjects(broker, bucket) == []
    parts.let_go.set()
    buffer = memoryview(bytearray(2048))
    await store.get_into(await putting, buffer, deadline_s=PATIENCE_S)
    assert bytes(buffer) == b"a" * 1024 + b"b" * 1024
    assert len(await _subjects(broker, bucket)) == 1


async def test_a_put_or_read_cancelled_at_any_await_leaves_whole_objects_and_no_thread(
    broker: Broker, scope: JobScope
) -> None:
    bucket, whole = scope.object_weights, b"a" * 1024 + b"b" * 1024
    store = ObjectStore(broker, bucket, chunk_bytes=1024)
    buffers: list[bytearray] = []

    async def play() -> None:
        info = await store.put("whole", [memoryview(whole)], deadline_s=PATIENCE_S)
        buffers.append(bytearray(len(whole)))
        await store.get_into(info, memoryview(buffers[-1]), deadline_s=PATIENCE_S)

    async def given_back() -> None:
        assert len(await _subjects(broker, bucket)) == len(await store.infos())
        gc.collect()  # a cancelled task and what it raised refer to each other
        while buffers:
            buffers.pop().clear()  # BufferError while a thread writes or digests it

    # from Python 3.12 on it suspends once less
    assert await cancel_everywhere(play, given_back) > 6 - (sys.version_info >= (3, 12))
    await play()
    assert buffers == [whole]
