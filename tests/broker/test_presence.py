"""Heartbeats of actors."""

import asyncio
import time

from tinkermq.broker.client.connection import Broker
from tinkermq.broker.jetstream.streams import bucket_config, ensure_stream
from tinkermq.broker.nats_server import NatsServer
from tinkermq.broker.presence import PresenceBeat, list_presences
from tinkermq.schemas.metric import Presence
from tinkermq.schemas.wire.subjects import BUCKET_ACTORS

from tests.support.waiting import PATIENCE_S


def _presence(name: str) -> Presence:
    return Presence(
        actor=name, role="generator", host="here", pid=1, state="working", time=time.time()
    )


async def test_an_actor_is_listed_while_it_beats_and_gone_at_its_end(broker: Broker) -> None:
    async with (
        PresenceBeat(broker, "local.one.a", lambda: _presence("a")),
        PresenceBeat(broker, "local.one.b", lambda: _presence("b")),
        PresenceBeat(broker, "local.two.c", lambda: _presence("c")),
    ):
        actors = [entry.value.actor for entry in await list_presences(broker, "local.one")]
        assert actors == ["a", "b"]
        assert len(await list_presences(broker, "local")) == 3
    assert await list_presences(broker, "local") == []


async def test_the_heartbeat_tells_what_the_actor_does_now(broker: Broker) -> None:
    beats = 0

    def beat() -> Presence:
        nonlocal beats
        beats += 1
        return _presence("a").model_copy(update={"state": f"beat{beats}"})

    async with PresenceBeat(broker, "local.one.a", beat, interval_s=0.02):
        async with asyncio.timeout(PATIENCE_S):
            while beats < 4:
                await asyncio.sleep(0.01)
        [entry] = await list_presences(broker, "local.one")
        assert entry.value.state != "beat1"


async def test_a_heartbeat_that_stops_is_gone_after_its_ttl(own_broker: Broker) -> None:
    await ensure_stream(own_broker, bucket_config(BUCKET_ACTORS, "short-lived", ttl_s=1))
    beat = PresenceBeat(own_broker, "local.one.a", lambda: _presence("a"), interval_s=60)
    async with beat:
        assert len(await list_presences(own_broker)) == 1
        async with asyncio.timeout(PATIENCE_S):
            while await list_presences(own_broker):
                await asyncio.sleep(0.05)


async def test_a_heartbeat_goes_on_after_the_server_was_killed(
    own_server: NatsServer, own_broker: Broker
) -> None:
    async with PresenceBeat(own_broker, "local.one.a", lambda: _presence("a"), interval_s=0.02):
        own_server.kill()
        own_server.start()
        restarted = time.time()
        async with asyncio.timeout(PATIENCE_S):
            while True:
                [entry] = await list_presences(own_broker)
                if entry.value.time > restarted:
                    return
                await asyncio.sleep(0.01)
