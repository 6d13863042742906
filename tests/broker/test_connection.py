"""The connection: what it says when it fails, how it heals, encryption, and waits for a broker."""

import asyncio
import contextlib
import gc
import itertools
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import uvloop
from tinkermq.actors.weights.store import WeightStore
from tinkermq.actors.weights.tensors import TensorBytes
from tinkermq.broker.client.connection import (
    Broker,
    connect,
    first_connection,
    flush,
    give_up_at,
)
from tinkermq.broker.client.faults import ConnectionLost, NoResponders, shown_url
from tinkermq.broker.client.keys import new_api_key
from tinkermq.broker.client.login import CA_VARIABLE, CREDENTIALS_VARIABLE, find_login
from tinkermq.broker.client.nats_internals import CarefulClient
from tinkermq.broker.credentials import PoolSecrets
from tinkermq.broker.jetstream.direct_get import get_all
from tinkermq.broker.jetstream.kv import Bucket
from tinkermq.broker.jetstream.streams import create_job_streams
from tinkermq.broker.nats_server import NatsServer
from tinkermq.broker.rollouts import RolloutLog
from tinkermq.schemas.config.job import LimitsConfig
from tinkermq.schemas.job import RequestRecord
from tinkermq.schemas.wire.errors import (
    AuthError,
    BrokerError,
    DeadlineError,
    MessageError,
    NotFoundError,
)
from tinkermq.schemas.wire.subjects import BUCKET_REQUESTS, JobScope

from tests.support.certificates import Certificate, self_signed
from tests.support.models import bytes_of
from tests.support.secured import environment, secured
from tests.support.strategies import make_group
from tests.support.waiting import AFTER_PATIENCE_S, PATIENCE_S, until

pytestmark = pytest.mark.full

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


def test_the_end_of_a_file_s_line_is_no_part_of_a_key() -> None:
    key = new_api_key("ada")
    assert find_login("local", f"{key}\r\n").options["password"] == key


def test_a_file_holds_the_credentials_of_a_service_or_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = PoolSecrets(tmp_path / "secrets")
    key = secrets.create("ada", 0)
    assert find_login("local", None, secrets.credentials("node")).user == "node"
    file = tmp_path / "ada.key"
    monkeypatch.setenv(CREDENTIALS_VARIABLE, str(file))
    file.write_text(f"{key}\n")
    assert find_login("local", None).options["password"] == key
    for text in ("", "node", "nobody SUAM", "node SUAM more"):
        file.write_text(text)
        with pytest.raises(AuthError):
            find_login("local", None)
    file.unlink()
    with pytest.raises(BrokerError, match=r"ada\.key cannot be read: .*No such file"):
        find_login("local", None)


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
            await broker.request("secret.thing", timeout_s=PATIENCE_S)
        with pytest.raises(NoResponders, match=r"no service listens on free.thing"):
            await broker.request("free.thing", timeout_s=PATIENCE_S)


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
        await broker.append("nowhere", b"", deadline_s=PATIENCE_S, waiting_for="test")


@pytest.mark.parametrize("overheard", [False, True])
async def test_reading_where_no_stream_is_says_so_whoever_listens(
    own_broker: Broker, own_server: NatsServer, overheard: bool
) -> None:
    bucket = Bucket(own_broker, "none", RequestRecord)
    async with await connect(own_server.url, name="tool") as tool:
        if overheard:  # nats sub '>'
            await tool.listen(">", lambda _: None)
            await flush(tool, waiting_for="test")
        for reading in (bucket.get("a"), bucket.items()):
            with pytest.raises(NotFoundError, match="there is no stream KV_none"):
                await reading


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
    with pytest.raises(DeadlineError, match=r"the list of jobs: no answer in time through "):
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
        await until(lambda: bool(errors), "an error")
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


async def test_a_connection_that_is_cut_off_as_it_is_made_is_an_error_of_the_broker() -> None:
    places = itertools.cycle((b"", b"PONG\r\n", b"-ERR 'Authorization Violation'\r\n"))

    async def enter(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"headers": true, "max_payload": 1048576}\r\n')
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"PING\r\n")
            writer.write(next(places))
            await asyncio.sleep(0)
        writer.transport.abort()

    listener = await asyncio.start_server(enter, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    for _ in range(6):
        with pytest.raises(BrokerError):
            await connect(f"nats://127.0.0.1:{port}", name="test", deadline_s=0.1)
    listener.close()
    gc.collect()  # nats-py leaves tasks with an error that nobody asks for


async def test_a_connection_whose_socket_is_gone_is_closed_in_every_event_loop(
    nats_server: NatsServer,
) -> None:
    async def lose_and_close() -> bool:
        client = CarefulClient()
        await client.connect(nats_server.url)
        await client.publish("a", b"never sent")
        cast("Any", client)._transport._io_writer.transport.abort()
        await client.close()
        return client.is_closed

    assert await asyncio.to_thread(uvloop.run, lose_and_close())
    assert await lose_and_close()


async def test_a_closed_connection_says_so(nats_server: NatsServer) -> None:
    broker = await connect(nats_server.url, name="test")
    await broker.close()
    assert broker.closed.is_set()
    with pytest.raises(BrokerError, match="is closed"):
        await broker.publish("anything")
    with pytest.raises(BrokerError, match="is closed"):
        await broker.retry(lambda: broker.api("INFO"), deadline_s=PATIENCE_S, waiting_for="test")


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
        await until(lambda: len(asyncio.all_tasks()) <= before, "the tasks to end")
        own_server.start()


async def test_requests_and_reads_leave_nothing_behind(broker: Broker, scope: JobScope) -> None:
    log = RolloutLog(broker, scope)
    await log.append(make_group(0))
    await broker.listen("silent", lambda _: None)

    def held() -> tuple[int, int, int]:
        return len(broker.nc._subs), len(broker.nc._resp_map), len(asyncio.all_tasks())

    before = held()
    for number in range(50):
        await log.find(0)
        await get_all(broker, scope.stream_rollout, scope.rollout("*"))
        with pytest.raises(NoResponders):
            await broker.request(f"nobody.{number}")
        with pytest.raises(TimeoutError):
            await broker.request("silent", timeout_s=0.001)
    await until(lambda: held() == before, "what was held to be let go")
    assert broker._replies.num_waiting == 0


# -- Encrypted connections: checked against an authority, and never without ------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    """A certificate for this machine."""
    return self_signed(tmp_path_factory.mktemp("tls"))


async def test_users_connect_encrypted_and_large_objects_are_read_so(
    tmp_path: Path, certificate: Certificate
) -> None:
    with environment(**{CA_VARIABLE: str(certificate.certificate)}):
        async with secured(tmp_path, tls=certificate) as pool:
            assert pool.server.url.startswith("tls://")
            ada = await pool.user("ada")
            scope = await pool.job("ada", "01tls")
            learner = await pool.process(scope, "learner")
            data = np.arange(1_000_000, dtype=np.float32)
            tensors = {"w": TensorBytes("float32", (1_000_000,), data.data)}
            manifest = await WeightStore(learner, scope).publish(1, tensors)
            fetched = await WeightStore(ada, scope).fetch(manifest)
            assert bytes_of(fetched["w"]) == data.tobytes()


async def test_a_server_of_an_unknown_authority_is_refused(
    tmp_path: Path, certificate: Certificate
) -> None:
    with NatsServer(tmp_path / "nats", tls=certificate) as server:
        with pytest.raises(BrokerError, match=r"(?i)certificate|no NATS server"):
            await connect(server.url, name="test", deadline_s=3)
        with environment(**{CA_VARIABLE: str(certificate.certificate)}):
            async with await connect(server.url, name="test") as broker:
                await create_job_streams(broker, JobScope("local", "j"), LimitsConfig())


async def test_a_key_is_not_sent_in_clear_text_to_a_url_that_demands_encryption(
    tmp_path: Path,
) -> None:
    with NatsServer(tmp_path / "nats") as server:
        url = server.url.replace("nats://", "tls://")
        with pytest.raises(BrokerError, match="does not encrypt"):
            await connect(url, name="test", api_key="tmq_ada_" + "x" * 43, deadline_s=3)


async def test_an_authority_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with (
        environment(**{CA_VARIABLE: str(tmp_path / "missing.pem")}),
        pytest.raises(BrokerError, match=r"missing\.pem cannot be read"),
    ):
        await connect("tls://127.0.0.1:1", name="test", deadline_s=3)


# -- Whoever is patient waits for a broker that is away, stores nothing, or has no room ------------


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
        assert "the storage of nats-server is full" in _told(patient)
        await other.api("STREAM.PURGE.other")
        await waiting
        assert _told(patient) == ""


async def test_a_generator_waits_for_room_in_a_full_rollout_log(
    own_server: NatsServer, patient: Broker, own_broker: Broker
) -> None:
    scope = JobScope("local", "full")
    await create_job_streams(own_broker, scope, LimitsConfig(rollout_bytes=2**20))
    log = RolloutLog(patient, scope)
    assert await log.append_payload(0, bytes(2**20 - 2**10))
    waiting = asyncio.create_task(log.append_payload(1, bytes(2**19), deadline_s=2.0))
    with pytest.raises(BrokerError, match=r"waited 2 s for room"):
        await RolloutLog(own_broker, scope).append_payload(2, bytes(2**19), deadline_s=2.0)
    assert not waiting.done()
    await log.trim(2)
    assert await waiting
