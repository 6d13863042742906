"""What is asked of an endpoint while it is being made, and what happens to the server meanwhile."""

import asyncio

import pytest
from tinkermq.broker.client.connection import Broker, connect
from tinkermq.broker.client.rpc import RequestContext, Service, call
from tinkermq.broker.nats_server import NatsServer
from tinkermq.schemas.env import CloseRequest
from tinkermq.schemas.wire.errors import NotFoundError
from tinkermq.schemas.wire.message import Empty
from tinkermq.schemas.wire.subjects import rpc

from tests.support.processes import halt
from tests.support.waiting import PATIENCE_S

NUM_ENDPOINTS = 60
NUM_CALLERS = 4


async def who(_: Empty, context: RequestContext) -> CloseRequest:
    return CloseRequest(episode=context.user)


async def ask(broker: Broker, subject: str) -> CloseRequest:
    return await call(
        broker, subject, Empty(), CloseRequest, timeout_s=PATIENCE_S, waiting_for="the service"
    )


async def ask_from_the_start(broker: Broker, subject: str) -> CloseRequest:
    """Ask again and again until somebody is there to answer."""
    while True:
        try:
            return await ask(broker, subject)
        except NotFoundError:
            await asyncio.sleep(0)


@pytest.mark.parametrize("fair", [False, True], ids=["plain", "fair"])
async def test_the_first_request_that_reaches_a_new_endpoint_is_answered(
    broker: Broker, nats_server: NatsServer, fair: bool
) -> None:
    async with (
        await connect(nats_server.url, name="serving") as serving,
        await Service.start(serving, name="new", description="d") as service,
    ):
        for number in range(NUM_ENDPOINTS):
            subject = rpc("ann", "test", f"new-{fair:d}-{number}")
            callers = [
                asyncio.create_task(ask_from_the_start(broker, subject)) for _ in range(NUM_CALLERS)
            ]
            await service.endpoint("who", subject, Empty, who, fair=fair)
            replies = await asyncio.gather(*callers)
            assert {reply.episode for reply in replies} == {"ann"}


@pytest.mark.parametrize("fair", [False, True], ids=["plain", "fair"])
async def test_a_server_that_dies_while_an_endpoint_is_made_is_waited_for(
    own_server: NatsServer, own_broker: Broker, fair: bool
) -> None:
    subject = rpc("ann", "test", "who")
    service = await Service.start(own_broker, name="test-service", description="d")
    assert own_server.pid is not None
    halt(own_server.pid)  # nobody answers, and then nobody is there
    making = asyncio.create_task(service.endpoint("who", subject, Empty, who, fair=fair))
    for _ in range(20):
        await asyncio.sleep(0)
    own_server.kill()
    own_server.start()
    await asyncio.wait_for(making, PATIENCE_S)
    async with await connect(own_server.url, name="caller") as caller:
        assert (await ask(caller, subject)).episode == "ann"
    await service.stop()
