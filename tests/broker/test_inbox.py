"""An inbox hands out what comes in order, and ends a wait that nobody will answer."""

import asyncio
from collections.abc import Callable

import pytest
from nats.aio.msg import Msg
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.client.faults import ConnectionLost
from tinkermq.broker.client.parts import Inbox
from tinkermq.broker.nats_server import NatsServer


def _answering(broker: Broker, *answers: bytes) -> Callable[[Msg], None]:
    """Return what answers a request with several messages, in tasks that the loop keeps."""
    tasks: list[asyncio.Task[None]] = []

    async def send(reply: str) -> None:
        for answer in answers:
            await broker.publish(reply, answer)

    return lambda message: tasks.append(asyncio.create_task(send(message.reply)))


async def test_all_answers_to_a_request_come_in_order_and_say_which_it_was(broker: Broker) -> None:
    await broker.listen("free.several", _answering(broker, b"a", b"b"))
    inbox = Inbox(broker)
    for _ in range(2):
        subject = await inbox.ask("free.several", b"")
        received = [await inbox.next(5), await inbox.next(5)]
        assert [message.data for message in received] == [b"a", b"b"]
        assert {message.subject for message in received} == {subject}
    with pytest.raises(TimeoutError):
        await inbox.next(0.05)
    await inbox.close()


async def test_a_lost_connection_ends_the_wait_unless_answers_may_still_come(
    own_server: NatsServer, own_broker: Broker
) -> None:
    ends, goes_on = Inbox(own_broker), Inbox(own_broker, ends_with_connection=False)
    await own_broker.listen("free.silent", lambda _: None)
    for inbox in (ends, goes_on):
        await inbox.ask("free.silent", b"")
    own_server.kill()
    with pytest.raises(ConnectionLost, match=r"broke during a request on free\.silent"):
        await ends.next(5)
    with pytest.raises(TimeoutError):
        await goes_on.next(0.3)
    own_server.start()
    await ends.close()
    await goes_on.close()
