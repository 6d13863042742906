"""A URL may hold user and password: what is printed never does."""

import pytest
from tinkermq.broker.calls import SchedulerCalls
from tinkermq.broker.client.connection import connect
from tinkermq.broker.nats_server import NatsServer
from tinkermq.clients.address import parse_broker_url, parse_server_url
from tinkermq.schemas.wire.errors import TinkermqError

from tests.clients.conftest import Cli

SECRET = "sesame"
NOBODY_THERE = f"nats://user:{SECRET}@127.0.0.1:1"


def with_password(server: NatsServer) -> str:
    return server.url.replace("//", f"//user:{SECRET}@")


def test_no_command_prints_it(cli: Cli, nats_server: NatsServer) -> None:
    there, odd = with_password(nats_server), NOBODY_THERE.replace("nats", "http")
    for words, url in ((["doctor"], there), (["ps"], NOBODY_THERE), (["watch", "run"], odd)):
        told = cli(*words, "--nats-url", url)
        assert told.code != 0
        assert SECRET not in told.out + told.err


@pytest.mark.parametrize(
    "url",
    [
        f"http://user:{SECRET}@127.0.0.1:4222",
        f"user:{SECRET}@127.0.0.1:4222",
        f"nats://user:{SECRET}@127.0.0.1:4222",
        f"nats://a,http://user:{SECRET}@b",
    ],
)
def test_no_refusal_of_an_address_repeats_it(url: str) -> None:
    with pytest.raises(TinkermqError) as raised:
        parse_server_url(url)
    assert SECRET not in str(raised.value)
    if not url.startswith(("nats://user", "user")):
        with pytest.raises(TinkermqError) as raised:
            parse_broker_url(url)
        assert SECRET not in str(raised.value)


async def test_who_finds_no_scheduler_does_not_tell_it(nats_server: NatsServer) -> None:
    async with await connect(with_password(nats_server), name="test") as broker:
        with pytest.raises(TinkermqError, match="no scheduler is connected") as raised:
            await SchedulerCalls(broker).nodes()
    assert SECRET not in str(raised.value)
