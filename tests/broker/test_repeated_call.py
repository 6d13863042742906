"""Requests that are sent again: one that is lost costs an attempt, not the whole deadline."""

import asyncio
import time

import pytest
from nats.aio.msg import Msg
from tinkermq.broker.calls import ask_users, repeated_call
from tinkermq.broker.client.connection import Broker, connect
from tinkermq.broker.nats_server import NatsServer
from tinkermq.schemas.user import UserReply
from tinkermq.schemas.wire.errors import BrokerError
from tinkermq.schemas.wire.message import Empty
from tinkermq.schemas.wire.subjects import rpc

from tests.support.waiting import AFTER_PATIENCE_S, PATIENCE_S

SUBJECT = rpc("local", "behind", "look")


async def test_a_request_that_is_lost_is_sent_again_long_before_its_deadline(
    nats_server: NatsServer, broker: Broker
) -> None:
    heard: list[Msg] = []
    answered: list[asyncio.Task[None]] = []

    def take(message: Msg) -> None:
        heard.append(message)
        if len(heard) == 3:  # two are lost
            payload = Empty().to_bytes()
            answered.append(asyncio.create_task(service.publish(message.reply, payload)))

    async with await connect(nats_server.url, name="service") as service:
        await service.listen(SUBJECT, take)
        await service.nc.flush()
        deadline = time.monotonic() + AFTER_PATIENCE_S
        asking = repeated_call(
            broker,
            SUBJECT,
            Empty(),
            Empty,
            deadline=deadline,
            waiting_for="the service",
            attempt_s=0.05,
        )
        assert await asyncio.wait_for(asking, PATIENCE_S) == Empty()
    assert len({one.reply for one in heard}) == len(heard) >= 3


async def test_the_users_of_a_pool_without_users_are_not_waited_for(broker: Broker) -> None:
    with pytest.raises(BrokerError, match="has no users"):
        await ask_users(broker, "me", Empty(), UserReply)
