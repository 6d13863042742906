"""A flood of one user before the requests of others: none of theirs is lost or left waiting."""

import asyncio
import os
import signal
from typing import Any, cast

import nats.errors
import pytest
from tinkermq.broker.client.connection import Broker, connect
from tinkermq.broker.client.reconnect import drop_old_requests, request_connection
from tinkermq.broker.client.rpc import Service, call
from tinkermq.broker.fair_queue import FairQueue
from tinkermq.broker.nats_server import NatsServer
from tinkermq.schemas.wire.message import Empty
from tinkermq.schemas.wire.subjects import rpc

from tests.support.processes import halt
from tests.support.waiting import AFTER_PATIENCE_S, PATIENCE_S, until

NUM_FLOODING = 30_000
NUM_BREAKS = 5


async def _work() -> None:
    await asyncio.sleep(AFTER_PATIENCE_S)


async def test_a_request_behind_a_flood_of_another_user_is_not_dropped(
    nats_server: NatsServer, broker: Broker
) -> None:
    async def answer(_: Empty) -> Empty:
        return Empty()

    async with (
        await connect(nats_server.url, name="service") as own,
        await Service.start(own, name="behind", description="test") as service,
        await connect(nats_server.url, name="flood") as flooding,
    ):
        await service.endpoint("look", rpc("*", "behind", "look"), Empty, answer, fair=True)
        for _ in range(NUM_FLOODING):
            await flooding.nc.publish(rpc("mallory", "behind", "look"), b"\x80", reply="_INBOX.no")
        subject = rpc("ada", "behind", "look")
        who = {"waiting_for": "the service", "timeout_s": PATIENCE_S}
        replies = [call(flooding, subject, Empty(), Empty, **who) for _ in range(10)]
        assert len(await asyncio.gather(*replies)) == 10
        assert service.share.num_refused > 0


async def test_a_connection_that_a_flood_has_left_behind_is_made_anew(
    own_server: NatsServer, own_broker: Broker
) -> None:
    share, lost, back = FairQueue(), asyncio.Event(), asyncio.Event()

    def flooded() -> bool:
        for _ in range(1000):
            share.submit("mallory", _work)
        return lost.is_set()

    async with request_connection(own_broker, asyncio.Event()) as own:
        assert own is not None
        own.on_disconnect(lost.set)
        own.on_reconnect(back.set)
        dropping = asyncio.create_task(drop_old_requests(own, share, look_s=0.01, late_s=0.1))
        assert own_server.pid is not None
        halt(own_server.pid)
        try:
            await until(flooded, "the connection to be dropped")
        finally:
            os.kill(own_server.pid, signal.SIGCONT)
        await asyncio.wait_for(back.wait(), PATIENCE_S)
        assert own_broker.is_connected
        dropping.cancel()
    await share.settle(0)


async def test_a_connection_that_is_made_anew_in_the_middle_of_a_message_hears_again(
    nats_server: NatsServer,
) -> None:
    heard = asyncio.Event()

    async def flood() -> None:
        while not flooding.nc.is_closed:
            for _ in range(100):
                await flooding.nc.publish("flood", b"x" * 3000)
            await flooding.nc.flush(cast("int", PATIENCE_S))

    async def something_is_unread(own: Broker) -> None:
        """Wait until something has come that is not read yet, at the connection that there is."""
        async with asyncio.timeout(PATIENCE_S):
            while not cast("Any", own.nc)._transport._io_reader._buffer:
                assert not task.done(), task.exception()
                await asyncio.sleep(0)

    async with (
        await connect(nats_server.url, name="listener") as own,
        await connect(nats_server.url, name="flood") as flooding,
    ):
        await own.listen("flood", lambda _: heard.set())
        task = asyncio.create_task(flood())
        for _ in range(NUM_BREAKS):
            await something_is_unread(own)
            await own.nc.force_reconnect()
            heard.clear()
            await asyncio.wait_for(heard.wait(), PATIENCE_S)
        task.cancel()


async def test_a_ping_that_is_answered_late_does_not_end_the_reading(
    own_server: NatsServer, own_broker: Broker
) -> None:
    lost = asyncio.Event()
    own_broker.on_disconnect(lost.set)
    assert own_server.pid is not None
    halt(own_server.pid)
    try:
        with pytest.raises(nats.errors.FlushTimeoutError):
            await own_broker.nc.flush(cast("int", 0.05))
    finally:
        os.kill(own_server.pid, signal.SIGCONT)
    await own_broker.nc.flush()
    assert not lost.is_set()
