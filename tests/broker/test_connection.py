"""The connection: what it says when it fails, and how it heals."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from tinkermq.broker.client.connection import Broker, connect
from tinkermq.broker.client.faults import ConnectionLost, NoResponders, shown_url
from tinkermq.broker.client.keys import new_api_key
from tinkermq.broker.jetstream.direct_get import get_all
from tinkermq.broker.nats_server import NatsServer
from tinkermq.broker.rollouts import RolloutLog
from tinkermq.schemas.wire.errors import (
    BrokerError,
    DeadlineError,
    MessageError,
    NotFoundError,
)
from tinkermq.schemas.wire.subjects import JobScope

from tests.support.strategies import make_group
from tests.support.waiting import AFTER_PATIENCE_S, PATIENCE_S

RIGHTS = """
authorization { users: [{ user: ann, password: pw, permissions: {
  publish: ["$JS.API.>", "free.>"], subscribe: ["_INBOX_local.>"] } }] }
"""


@pytest.fixture
def guarded_server(tmp_path: Path) -> Iterator[NatsServer]:
    """A server that lets in one user with few rights."""
    with NatsServer(tmp_path / "guarded", extra_config=RIGHTS) as server:
        yield server


def _as_ann(server: NatsServer, password: str = "pw") -> str:
    return server.url.replace("//", f"//ann:{password}@")


async def test_an_unreachable_server_is_named_within_the_deadline() -> None:
    with pytest.raises(BrokerError, match=r"no NATS server answers at nats://127.0.0.1:1 ") as got:
        async with asyncio.timeout(PATIENCE_S):
            await connect("nats://127.0.0.1:1", name="test", deadline_s=0.3)
    assert "tinkermq up" in got.value.hint


async def test_a_key_for_a_pool_without_users_is_told_that_nobody_asks_for_it(
    nats_server: NatsServer,
) -> None:
    with pytest.raises(BrokerError, match=r"has no users, so it has no key of user 'ada'") as got:
        await connect(nats_server.url, name="test", api_key=new_api_key("ada"))
    assert "unset TINKERMQ_API_KEY" in got.value.hint


async def test_a_host_that_does_not_exist_is_named() -> None:
    with pytest.raises(BrokerError, match=r"answers at nats://nohost\.invalid:4222"):
        await connect("nats://nohost.invalid:4222", name="test", deadline_s=0.3)


@pytest.mark.parametrize("url", ["http://127.0.0.1:4222", "127.0.0.1:4222", "nats://", ""])
async def test_something_that_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(BrokerError, match="not the URL of a NATS server"):
        await connect(url, name="test")


async def test_any_of_several_servers_is_taken(nats_server: NatsServer) -> None:
    url = f"nats://127.0.0.1:1,{nats_server.url.removeprefix('nats://')}"
    async with await connect(url, name="test") as broker:
        assert broker.is_connected


def test_no_password_is_shown_of_any_of_several_servers() -> None:
    assert shown_url("nats://u:secret@a:1,u:secret@b,nats://u:secret@c") == "nats://a:1,b,nats://c"


async def test_a_server_without_jetstream_is_refused_at_once(tmp_path: Path) -> None:
    with NatsServer(tmp_path, jetstream=False) as server:
        with pytest.raises(BrokerError, match="has JetStream disabled") as raised:
            async with asyncio.timeout(PATIENCE_S):
                await connect(server.url, name="test", deadline_s=AFTER_PATIENCE_S)
        assert "nats-server -js" in raised.value.hint


async def test_a_wrong_password_is_refused_at_once_and_not_shown(
    guarded_server: NatsServer,
) -> None:
    with pytest.raises(BrokerError, match="refuses this user") as raised:
        await connect(_as_ann(guarded_server, "secret"), name="test")
    assert "secret" not in str(raised.value)


async def test_a_request_to_a_denied_subject_names_the_subject(guarded_server: NatsServer) -> None:
    async with await connect(_as_ann(guarded_server), name="test") as broker:
        with pytest.raises(BrokerError, match=r"may not publish to 'secret.thing'"):
            await broker.request("secret.thing", timeout_s=5)
        with pytest.raises(NoResponders, match=r"no service listens on free.thing"):
            await broker.request("free.thing", timeout_s=5)


async def test_a_denied_subscription_reaches_the_error_callback(
    guarded_server: NatsServer,
) -> None:
    async with await connect(_as_ann(guarded_server), name="test") as broker:
        errors: asyncio.Queue[BrokerError] = asyncio.Queue()
        broker.on_error(errors.put_nowait)
        await broker.listen("secret.thing", lambda _: None)
        error = await asyncio.wait_for(errors.get(), PATIENCE_S)
        assert "may not subscribe to 'secret.thing'" in error.message


async def test_dropped_messages_reach_the_error_callback(broker: Broker) -> None:
    errors: asyncio.Queue[BrokerError] = asyncio.Queue()
    broker.on_error(errors.put_nowait)
    await broker.nc.subscribe("flood", pending_msgs_limit=1)
    for _ in range(5):
        await broker.publish("flood", b"x")
    error = await asyncio.wait_for(errors.get(), PATIENCE_S)
    assert "messages on flood were dropped" in error.message


async def test_a_payload_that_is_too_large_is_refused_with_size_and_limit(broker: Broker) -> None:
    size = broker.max_payload_bytes + 1
    with pytest.raises(MessageError, match=rf"has {size:,} bytes, .* at most {size - 1:,} "):
        await broker.request("anything", bytes(size))
    with pytest.raises(MessageError, match="raise max_payload"):
        await broker.publish("anything", bytes(size))
    assert broker.is_connected


async def test_the_largest_payload_with_headers_is_taken(broker: Broker) -> None:
    await broker.publish("anything", bytes(broker.max_payload_bytes), {"Nats-Msg-Id": "x" * 64})
    await broker.nc.flush()
    assert broker.is_connected


async def test_storing_where_no_stream_listens_says_so(broker: Broker) -> None:
    with pytest.raises(NotFoundError, match="there is no stream nowhere"):
        await broker.append("nowhere", b"", deadline_s=5, waiting_for="test")


async def test_a_request_in_flight_ends_when_the_server_is_killed(
    own_server: NatsServer, own_broker: Broker
) -> None:
    await own_broker.listen("silent", lambda _: None)
    request = asyncio.create_task(own_broker.request("silent", timeout_s=AFTER_PATIENCE_S))
    await asyncio.sleep(0.05)
    own_server.kill()
    with pytest.raises(ConnectionLost, match="broke during a request"):
        await asyncio.wait_for(request, PATIENCE_S)


async def test_a_repeated_request_is_answered_after_a_restart(
    own_server: NatsServer, own_broker: Broker
) -> None:
    reconnects: list[float] = []
    own_broker.on_reconnect(lambda: reconnects.append(time.monotonic()))
    own_server.kill()
    asking = asyncio.create_task(
        own_broker.retry(
            lambda: own_broker.api("INFO"), deadline_s=PATIENCE_S, waiting_for="JetStream"
        )
    )
    await asyncio.sleep(0.2)
    own_server.start()
    assert await asking
    assert len(reconnects) == 1


async def test_a_server_that_stays_away_ends_a_wait_by_name(
    own_server: NatsServer, own_broker: Broker
) -> None:
    own_server.kill()
    with pytest.raises(DeadlineError, match=r"the list of jobs: .* did not answer in time"):
        await own_broker.retry(
            lambda: own_broker.api("INFO"), deadline_s=0.3, waiting_for="the list of jobs"
        )


async def test_a_user_who_is_locked_out_later_is_told(tmp_path: Path) -> None:
    server = NatsServer(tmp_path / "a", extra_config=RIGHTS)
    server.start()
    broker = await connect(_as_ann(server), name="test")
    errors: list[str] = []
    broker.on_error(lambda error: errors.append(error.message))
    server.kill()
    with NatsServer(tmp_path / "b", port=server.port, extra_config=RIGHTS.replace("pw", "new")):
        async with asyncio.timeout(PATIENCE_S):
            while not errors:
                await asyncio.sleep(0.01)
        assert "refuses this user" in errors[0]
    await broker.close()


@contextlib.asynccontextmanager
async def gate(server: NatsServer, refused: int) -> AsyncIterator[tuple[str, Callable[[], None]]]:
    """Stand before a server: yields a URL and what cuts all connections.

    The connection of number `refused`, from 1, is told something else first, and then refused.
    """
    writers = list[asyncio.StreamWriter]()
    numbers = itertools.count(1)

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(data)
        writer.close()

    async def enter(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        if next(numbers) == refused:
            writer.write(b'INFO {"headers": true, "max_payload": 1048576}\r\n')
            await reader.readuntil(b"PING\r\n")
            writer.write(b"INFO {}\r\n-ERR 'Authorization Violation'\r\n")
            await writer.drain()
            writer.close()
            return
        port = int(server.url.rsplit(":", 1)[1])
        from_server, to_server = await asyncio.open_connection("127.0.0.1", port)
        writers.append(to_server)
        await asyncio.gather(copy(reader, to_server), copy(from_server, writer))

    listener = await asyncio.start_server(enter, "127.0.0.1", 0)
    try:
        port = listener.sockets[0].getsockname()[1]
        yield f"nats://127.0.0.1:{port}", lambda: [one.close() for one in writers].clear()
    finally:
        listener.close()
        for writer in writers:
            writer.close()


async def test_a_refusal_after_a_reconnect_is_not_the_end(nats_server: NatsServer) -> None:
    async with (
        gate(nats_server, refused=2) as (url, cut),
        await connect(url, name="test") as broker,
    ):
        reconnected = asyncio.Event()
        broker.on_reconnect(reconnected.set)
        cut()
        await asyncio.wait_for(reconnected.wait(), PATIENCE_S)
        await broker.retry(
            lambda: broker.api("INFO"), deadline_s=PATIENCE_S, waiting_for="JetStream"
        )


async def test_a_closed_connection_says_so(nats_server: NatsServer) -> None:
    broker = await connect(nats_server.url, name="test")
    await broker.close()
    assert broker.closed.is_set()
    with pytest.raises(BrokerError, match="is closed"):
        await broker.publish("anything")
    with pytest.raises(BrokerError, match="is closed"):
        await broker.retry(lambda: broker.api("INFO"), deadline_s=5, waiting_for="test")


async def test_closing_while_the_server_is_away_leaves_nothing_behind(
    own_server: NatsServer,
) -> None:
    before = len(asyncio.all_tasks())
    for _ in range(5):
        broker = await connect(own_server.url, name="test")
        own_server.kill()
        await asyncio.sleep(0.07)
        async with asyncio.timeout(PATIENCE_S):
            await broker.close()
            await asyncio.sleep(0)  # what was cancelled ends in the next turn of the loop
        assert len(asyncio.all_tasks()) == before
        own_server.start()


async def test_requests_and_reads_leave_nothing_behind(broker: Broker, scope: JobScope) -> None:
    log = RolloutLog(broker, scope)
    await log.append(make_group(0))
    await broker.listen("silent", lambda _: None)
    before = (len(broker.nc._subs), len(broker.nc._resp_map), len(asyncio.all_tasks()))
    for number in range(50):
        await log.find(0)
        await get_all(broker, scope.stream_rollout, scope.rollout("*"))
        with pytest.raises(NoResponders):
            await broker.request(f"nobody.{number}")
        with pytest.raises(TimeoutError):
            await broker.request("silent", timeout_s=0.001)
    await asyncio.sleep(0)
    assert (len(broker.nc._subs), len(broker.nc._resp_map), len(asyncio.all_tasks())) == before
    assert broker._replies.num_waiting == 0
