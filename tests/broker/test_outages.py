"""Whoever is patient waits for a broker that is away, stores nothing, or has no room."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tinkermq.broker.client.connection import Broker, connect
from tinkermq.broker.client.reconnect import first_connection, give_up_at
from tinkermq.broker.jetstream.kv import Bucket
from tinkermq.broker.jetstream.streams import create_job_streams, create_shared
from tinkermq.broker.nats_server import NatsServer
from tinkermq.broker.rollouts import RolloutLog
from tinkermq.schemas.config.job import LimitsConfig
from tinkermq.schemas.job import RequestRecord
from tinkermq.schemas.wire.errors import BrokerError, DeadlineError
from tinkermq.schemas.wire.subjects import BUCKET_REQUESTS, JobScope

from tests.support.waiting import until

VALUE = RequestRecord(job="x")


@pytest.fixture
async def patient(own_server: NatsServer, own_broker: Broker) -> AsyncIterator[Broker]:
    """A patient connection beside `own_broker`, which is not."""
    async with await connect(own_server.url, name="patient") as broker:
        broker.availability.set_patient(True)
        yield broker


def _bucket(broker: Broker, deadline_s: float = 0.3) -> Bucket[RequestRecord]:
    return Bucket(broker, BUCKET_REQUESTS, RequestRecord, deadline_s=deadline_s)


def _told(broker: Broker) -> str:
    trouble = broker.availability.trouble
    return "" if trouble is None else trouble.text


async def test_a_patient_wait_outlasts_its_deadline_and_one_that_is_not_ends(
    own_server: NatsServer, own_broker: Broker, patient: Broker
) -> None:
    own_server.kill()
    waiting = asyncio.create_task(_bucket(patient).put("a", VALUE))
    for _ in range(2):
        with pytest.raises(DeadlineError):
            await _bucket(own_broker).put("b", VALUE)
    assert not waiting.done()
    own_server.start()
    await waiting
    assert await _bucket(own_broker, 30).get("a") is not None


async def test_who_is_told_to_stop_waits_no_longer_than_its_deadlines(
    own_server: NatsServer, own_broker: Broker, patient: Broker
) -> None:
    own_server.kill()
    stopping = asyncio.Event()
    giving_up = asyncio.create_task(give_up_at(stopping, patient))
    waiting = asyncio.create_task(_bucket(patient).put("a", VALUE))
    with pytest.raises(DeadlineError):
        await _bucket(own_broker).put("b", VALUE)
    stopping.set()
    await giving_up
    with pytest.raises(DeadlineError):
        await waiting


async def test_an_actor_that_is_started_while_the_broker_is_away_waits_for_it(
    own_server: NatsServer,
) -> None:
    own_server.kill()
    stopping = asyncio.Event()
    starting = asyncio.create_task(
        first_connection(own_server.url, "actor", stopping, for_ever=True)
    )
    with pytest.raises(BrokerError):
        await connect(own_server.url, name="user", deadline_s=0.3)
    own_server.start()
    broker = await starting
    assert broker is not None
    async with broker:
        assert broker.is_patient


async def test_an_actor_that_is_told_to_stop_before_the_broker_came_just_ends(
    own_server: NatsServer,
) -> None:
    own_server.kill()
    stopping = asyncio.Event()
    starting = asyncio.create_task(
        first_connection(own_server.url, "actor", stopping, for_ever=True)
    )
    await asyncio.sleep(0)
    stopping.set()
    assert await starting is None


async def test_a_server_that_comes_back_without_jetstream_is_waited_for(
    own_server: NatsServer, patient: Broker, tmp_path: Path
) -> None:
    own_server.kill()
    without = NatsServer(tmp_path / "without", port=own_server.port, jetstream=False)
    with without:
        waiting = asyncio.create_task(_bucket(patient).put("a", VALUE))
        await until(lambda: bool(_told(patient)), "the trouble to be told")
        assert "its JetStream is off" in _told(patient)
        assert not waiting.done()
    own_server.start()
    await waiting
    assert _told(patient) == ""


@pytest.fixture
def small_server(tmp_path: Path) -> Iterator[NatsServer]:
    """A server that stores eight megabytes in all."""
    with NatsServer(tmp_path / "small", max_store_bytes=8 * 2**20) as server:
        yield server


async def test_a_full_store_is_waited_for_and_told_and_then_gone_on_with(
    small_server: NatsServer,
) -> None:
    async with (
        await connect(small_server.url, name="patient") as patient,
        await connect(small_server.url, name="other") as other,
    ):
        patient.availability.set_patient(True)
        config = {"storage": "file", "max_bytes": -1, "allow_direct": True}
        for name in ("other", f"KV_{BUCKET_REQUESTS}"):
            subject = f"$KV.{BUCKET_REQUESTS}.>" if name != "other" else "other.>"
            await other.api(
                f"STREAM.CREATE.{name}", {"name": name, "subjects": [subject], **config}
            )
        for number in range(8):
            await other.request(f"other.{number}", os.urandom(2**20))
        waiting = asyncio.create_task(_bucket(patient).put("a", VALUE))
        await until(lambda: bool(_told(patient)), "the trouble to be told")
        assert "is the storage of nats-server full?" in _told(patient)
        await other.api("STREAM.PURGE.other")
        await waiting
        assert _told(patient) == ""


async def test_a_generator_waits_for_room_in_a_full_rollout_log(
    own_server: NatsServer, patient: Broker, own_broker: Broker
) -> None:
    scope = JobScope("local", "full")
    await create_shared(own_broker)
    await create_job_streams(own_broker, scope, LimitsConfig(rollout_bytes=2**20))
    log = RolloutLog(patient, scope)
    assert await log.append_payload(0, bytes(2**20 - 2**10))
    waiting = asyncio.create_task(log.append_payload(1, bytes(2**19), deadline_s=2.0))
    with pytest.raises(BrokerError, match=r"waited 2 s for room"):
        await RolloutLog(own_broker, scope).append_payload(2, bytes(2**19), deadline_s=2.0)
    assert not waiting.done()
    await log.trim(2)
    assert await waiting
