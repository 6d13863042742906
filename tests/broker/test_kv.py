"""Typed buckets and their compare-and-set."""

import asyncio
import time

import pytest
from tinkermq.broker.client.connection import Broker, StoreSubjects
from tinkermq.broker.client.nats_internals import WRITE_ID
from tinkermq.broker.jetstream.direct_get import stored_message
from tinkermq.broker.jetstream.kv import Bucket, KeyChanges
from tinkermq.broker.jetstream.streams import stream_subjects
from tinkermq.broker.nats_server import NatsServer
from tinkermq.schemas.job import RequestRecord
from tinkermq.schemas.wire.errors import ConflictError, MessageError, NotFoundError
from tinkermq.schemas.wire.subjects import BUCKET_REQUESTS

from tests.support.waiting import AFTER_PATIENCE_S, PATIENCE_S


@pytest.fixture
def bucket(broker: Broker) -> Bucket[RequestRecord]:
    return Bucket(broker, BUCKET_REQUESTS, RequestRecord)


def _value(job: str) -> RequestRecord:
    return RequestRecord(job=job)


async def test_a_key_is_created_once(bucket: Bucket[RequestRecord]) -> None:
    revision = await bucket.create("once.a", _value("x"))
    with pytest.raises(ConflictError, match=r"key 'once.a' .* is there already"):
        await bucket.create("once.a", _value("y"))
    entry = await bucket.get("once.a")
    assert entry is not None
    assert (entry.value.job, entry.revision) == ("x", revision)


async def test_who_waits_for_keys_hears_of_writes_below_his_prefix_alone(
    bucket: Bucket[RequestRecord], broker: Broker
) -> None:
    async with KeyChanges(broker, BUCKET_REQUESTS, "heard.of") as changes:
        waiting = asyncio.create_task(changes.wait(AFTER_PATIENCE_S))
        await bucket.create("heard.off.a", _value("x"))
        await bucket.create("heard.of.a", _value("x"))
        await asyncio.wait_for(waiting, PATIENCE_S)
        await changes.wait(0.01)  # nothing more: it returns all the same
        revision = await bucket.put("heard.of.b", _value("y"))
        await asyncio.wait_for(changes.wait(AFTER_PATIENCE_S), PATIENCE_S)
    assert (await bucket.changes("heard.of", revision - 1))[0].value.job == "y"


async def test_who_waits_for_keys_ends_when_cancelled_in_the_moment_of_a_write(
    broker: Broker,
) -> None:
    async with KeyChanges(broker, BUCKET_REQUESTS, "heard.of") as changes:
        waiting = asyncio.create_task(changes.wait(AFTER_PATIENCE_S))
        await asyncio.sleep(0)
        changes._changed.set()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting


async def test_the_leader_of_a_cluster_answers_what_a_replica_answers(
    bucket: Bucket[RequestRecord], broker: Broker
) -> None:
    await bucket.create("led", _value("x"))
    stream, key = f"KV_{BUCKET_REQUESTS}", f"$KV.{BUCKET_REQUESTS}.led"
    store = StoreSubjects()
    replica, leader = (store.last_get(stream, key, of_leader=one) for one in (False, True))
    assert replica[0] != leader[0]
    found = [stored_message(await broker.request(*asked), stream) for asked in (replica, leader)]
    assert found[0] is not None
    assert found[1] is not None
    assert found[0].payload == found[1].payload
    assert found[0].seq == found[1].seq
    assert WRITE_ID in found[1].headers
    nothing = store.last_get(stream, f"{key}.not", of_leader=True)
    assert stored_message(await broker.request(*nothing), stream) is None


async def test_an_update_from_an_old_revision_loses(bucket: Bucket[RequestRecord]) -> None:
    first = await bucket.create("cas", _value("a"))
    second = await bucket.update("cas", _value("b"), first)
    with pytest.raises(ConflictError, match="another writer was first"):
        await bucket.update("cas", _value("c"), first)
    with pytest.raises(ConflictError):
        await bucket.delete("cas", revision=first)
    await bucket.delete("cas", revision=second)
    assert await bucket.get("cas") is None


async def test_of_two_equal_updates_from_one_revision_only_one_wins(
    bucket: Bucket[RequestRecord],
) -> None:
    revision = await bucket.create("equal", _value("a"))
    results = await asyncio.gather(
        *(bucket.update("equal", _value("same"), revision) for _ in range(8)),
        return_exceptions=True,
    )
    assert sum(isinstance(result, int) for result in results) == 1
    assert sum(isinstance(result, ConflictError) for result in results) == 7


async def test_concurrent_changes_lose_none(broker: Broker) -> None:
    bucket = Bucket(broker, BUCKET_REQUESTS, RequestRecord)

    def increment(value: RequestRecord | None) -> RequestRecord:
        return _value(str(int(value.job) + 1 if value else 1))

    await asyncio.gather(*(bucket.change("count", increment) for _ in range(10)))
    entry = await bucket.get("count")
    assert entry is not None
    assert entry.value.job == "10"


async def test_a_deleted_key_can_be_created_again(bucket: Bucket[RequestRecord]) -> None:
    await bucket.create("again", _value("a"))
    await bucket.delete("again")
    assert "again" not in await bucket.keys()
    await bucket.create("again", _value("b"))
    assert "again" in await bucket.keys()


async def test_keys_and_items_are_listed_below_whole_tokens(bucket: Bucket[RequestRecord]) -> None:
    for key in ("ann.one.x", "ann.one.y", "ann.oneandahalf.z", "bob.one.x"):
        await bucket.put(key, _value(key))
    assert await bucket.keys("ann.one") == ["ann.one.x", "ann.one.y"]
    assert [entry.value.job for entry in await bucket.items("ann")] == [
        "ann.one.x",
        "ann.one.y",
        "ann.oneandahalf.z",
    ]
    assert await bucket.items("nobody") == []


async def test_more_keys_than_one_batch_are_all_listed(bucket: Bucket[RequestRecord]) -> None:
    keys = [f"many.{number:04}" for number in range(1200)]
    await asyncio.gather(*(bucket.put(key, _value(key)) for key in keys))
    assert await bucket.keys("many") == keys


async def test_a_malformed_value_is_an_error_alone_and_left_out_of_a_list(
    broker: Broker, bucket: Bucket[RequestRecord]
) -> None:
    await broker.append(
        f"$KV.{BUCKET_REQUESTS}.bad.one", b"junk", deadline_s=PATIENCE_S, waiting_for="test"
    )
    await bucket.put("bad.two", _value("fine"))
    with pytest.raises(MessageError):
        await bucket.get("bad.one")
    assert [entry.key for entry in await bucket.items("bad")] == ["bad.two"]


@pytest.mark.parametrize("key", ["", "a b", "a.*", ">", "a..b", ".a", "a.", "a\r\nPUB x 0", "é"])
async def test_what_cannot_be_a_key_is_refused(bucket: Bucket[RequestRecord], key: str) -> None:
    for act in (bucket.get(key), bucket.put(key, _value("x")), bucket.delete(key)):
        with pytest.raises(MessageError, match="cannot be a key of bucket"):
            await act


async def test_a_missing_bucket_is_named(broker: Broker) -> None:
    bucket = Bucket(broker, "no-such-bucket", RequestRecord)
    with pytest.raises(NotFoundError, match="there is no stream KV_no-such-bucket"):
        await bucket.get("a")
    with pytest.raises(NotFoundError, match="there is no stream KV_no-such-bucket"):
        await bucket.put("a", _value("x"))
    with pytest.raises(NotFoundError, match="there is no stream KV_no-such-bucket"):
        await bucket.items()


async def test_reads_and_writes_go_on_across_a_kill_of_the_server(
    own_server: NatsServer, own_broker: Broker
) -> None:
    bucket = Bucket(own_broker, BUCKET_REQUESTS, RequestRecord)
    revision = await bucket.create("kept", _value("0"))
    written = 0

    async def write() -> None:
        nonlocal revision, written
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            revision = await bucket.update("kept", _value(str(written + 1)), revision)
            written += 1

    async with asyncio.TaskGroup() as group:
        group.create_task(write())
        await asyncio.sleep(0.2)
        own_server.kill()
        own_server.start()
    entry = await bucket.get("kept")
    assert entry is not None
    assert (entry.value.job, entry.revision) == (str(written), revision)


async def test_changes_are_read_once_however_many_keys_there_are(
    bucket: Bucket[RequestRecord],
) -> None:
    for number in range(5):
        await bucket.create(f"changing.{number}", _value("old"))
    first = await bucket.changes("changing", 0)
    assert [entry.key for entry in first] == [f"changing.{number}" for number in range(5)]
    newest = first[-1].revision
    assert await bucket.changes("changing", newest) == []
    await bucket.create("elsewhere.1", _value("new"))
    await bucket.put("changing.3", _value("new"))
    found = await bucket.changes("changing", newest)
    assert [(entry.key, entry.value.job) for entry in found] == [("changing.3", "new")]


async def test_a_purged_key_leaves_no_trace(bucket: Bucket[RequestRecord], broker: Broker) -> None:
    await bucket.create("purged.1", _value("x"))
    await bucket.create("purged.2", _value("x"))
    await bucket.purge("purged.1")
    await bucket.purge("purged.1")
    held = await stream_subjects(broker, f"KV_{bucket.name}", f"$KV.{bucket.name}.purged.>")
    assert held == [f"$KV.{bucket.name}.purged.2"]
    await bucket.create("purged.1", _value("y"))
