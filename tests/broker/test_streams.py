"""The streams of a job, and that the ordinary tools see them."""

import json
from typing import Any

import pytest
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.jetstream.streams import (
    create_job_streams,
    create_shared,
    delete_job_streams,
    settle_job_streams,
    stream_info,
    stream_subjects,
)
from tinkermq.broker.nats_server import NatsServer
from tinkermq.broker.rollouts import RolloutLog
from tinkermq.broker.tasks import TaskQueue
from tinkermq.schemas.config.job import LimitsConfig
from tinkermq.schemas.wire.errors import BrokerError
from tinkermq.schemas.wire.subjects import BUCKET_JOBS, JobScope

from tests.support.strategies import make_group, make_task


async def _listed(broker: Broker) -> dict[str, dict[str, Any]]:
    """List the streams with the request that `nats stream ls` sends."""
    reply = await broker.request("$JS.API.STREAM.LIST", b"{}")
    return {
        stream["config"]["name"]: stream["config"] for stream in json.loads(reply.data)["streams"]
    }


async def test_every_stream_has_a_description_and_a_byte_bound(
    broker: Broker, scope: JobScope
) -> None:
    streams = await _listed(broker)
    for name in (
        scope.stream_task,
        scope.stream_rollout,
        scope.stream_batch,
        scope.stream_dead,
        scope.stream_feed,
        scope.stream_log,
        f"KV_{scope.bucket_weights}",
        f"OBJ_{scope.object_weights}",
        f"KV_{BUCKET_JOBS}",
    ):
        assert streams[name]["description"], name
        assert streams[name]["max_bytes"] > 0, name
        assert streams[name]["storage"] == "file", name


async def test_the_consumer_of_tasks_is_seen_with_its_description(
    broker: Broker, scope: JobScope
) -> None:
    queue = TaskQueue(broker, scope)
    await queue.publish(make_task(0))
    assert await queue.pull(1, 5)
    subject = f"$JS.API.CONSUMER.INFO.{scope.stream_task}.generators"
    info = json.loads((await broker.request(subject)).data)
    assert scope.job in info["config"]["description"]
    assert info["num_ack_pending"] == 1
    await queue.close()


async def test_the_stock_clients_of_keys_and_objects_open_our_buckets(
    broker: Broker, scope: JobScope
) -> None:
    kv = await broker.nc.jetstream().key_value(BUCKET_JOBS)
    await kv.put("seen.by.the.tools", b"yes")
    assert (await kv.get("seen.by.the.tools")).value == b"yes"
    await kv.purge("seen.by.the.tools")
    objects = await broker.nc.jetstream().object_store(scope.object_weights)
    await objects.put("thing", b"some bytes")
    assert (await objects.get("thing")).data == b"some bytes"


async def test_making_the_streams_again_changes_their_bounds_and_keeps_what_they_hold(
    broker: Broker, scope: JobScope
) -> None:
    await RolloutLog(broker, scope).append(make_group(0))
    await create_job_streams(broker, scope, LimitsConfig(rollout_bytes=2 << 20))
    await create_shared(broker)
    info = await stream_info(broker, scope.stream_rollout)
    assert info["config"]["max_bytes"] == 2 << 20
    assert info["state"]["messages"] == 1


async def test_deleting_the_streams_twice_is_harmless(broker: Broker, scope: JobScope) -> None:
    await delete_job_streams(broker, scope)
    await delete_job_streams(broker, scope)
    assert not [name for name in await _listed(broker) if f"-{scope.job}-" in name]


async def test_subjects_are_listed_without_reading_what_they_hold(
    broker: Broker, scope: JobScope
) -> None:
    log = RolloutLog(broker, scope)
    for number in range(20):
        await log.append(make_group(number))
    subjects = await stream_subjects(broker, scope.stream_rollout, scope.rollout("*"))
    assert set(subjects) == {scope.rollout(number) for number in range(20)}


async def test_a_bound_that_the_server_cannot_hold_is_named_with_what_to_do(
    own_server: NatsServer, own_broker: Broker
) -> None:
    limits = LimitsConfig().model_copy(update={"rollout_bytes": 2**51})
    with pytest.raises(BrokerError, match="refuses the stream tmq-local-big-rollout") as raised:
        await create_job_streams(own_broker, JobScope("local", "big"), limits)
    assert "max_file_store" in raised.value.hint


async def test_an_ended_job_is_settled_though_a_stream_of_it_was_removed(
    broker: Broker, scope: JobScope
) -> None:
    await broker.api(f"STREAM.DELETE.{scope.stream_task}")
    await settle_job_streams(broker, scope)
    assert (await stream_info(broker, scope.stream_batch))["config"]["max_bytes"] == 1
