"""The embedded nats-server, and back-ups of what it stores."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import pytest
from tinkermq.broker.client.connection import Broker, connect
from tinkermq.broker.client.fair_queue import end_tasks
from tinkermq.broker.jetstream.direct_get import get_all
from tinkermq.broker.jetstream.streams import (
    create_job_streams,
    create_shared,
    delete_stream,
    ensure_stream,
    stream_config,
    stream_info,
)
from tinkermq.broker.nats_server import NatsServer
from tinkermq.broker.snapshots import (
    MANIFEST,
    restore_all,
    restore_streams,
    save_all,
    save_streams,
)
from tinkermq.broker.user_records import UserStore
from tinkermq.schemas.config.job import LimitsConfig
from tinkermq.schemas.wire.errors import BrokerError, StateError, StorageError
from tinkermq.schemas.wire.subjects import BUCKET_JOBS, TASK_CONSUMER, JobScope

from tests.support.processes import alive
from tests.support.secured import secured
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.full


def test_a_free_port_is_found_and_kept_over_a_restart(own_server: NatsServer) -> None:
    url, monitor = own_server.url, own_server.monitor_url
    own_server.restart()
    assert own_server.url == url
    assert own_server.monitor_url == monitor


def test_a_port_in_use_is_named(own_server: NatsServer, tmp_path: Path) -> None:
    with pytest.raises(BrokerError, match=f"port {own_server.port} on 127.0.0.1 is already in use"):
        NatsServer(tmp_path / "second", port=own_server.port).start()


def test_a_monitor_port_in_use_is_named(own_server: NatsServer, tmp_path: Path) -> None:
    busy = own_server.monitor_port
    with pytest.raises(BrokerError, match=f"port {busy} on 127.0.0.1 is already in use"):
        NatsServer(tmp_path / "second", monitor_port=busy).start()


def test_a_store_folder_belongs_to_one_server_for_as_long_as_it_lives(
    own_server: NatsServer,
) -> None:
    second = NatsServer(own_server.store_dir)
    with pytest.raises(BrokerError, match=r"in use by another nats-server \(process \d+\)"):
        second.start()
    own_server.kill()
    second.start()
    second.stop()


def test_a_store_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BrokerError, match="cannot be made"):
        NatsServer(tmp_path / "file" / "nats").start()


def test_a_store_folder_may_have_any_name(tmp_path: Path) -> None:
    name = 'José "日本" \\u $HOME #' + os.fsdecode(b"\xff")
    with NatsServer(tmp_path / name) as server:
        assert server.running
        assert (tmp_path / name / f"nats-server_{server.pid}.ports").exists()


async def test_a_server_listens_on_an_address_of_ipv6(tmp_path: Path) -> None:
    with NatsServer(tmp_path, host="::1") as server:
        assert server.url == f"nats://[::1]:{server.port}"
        async with await connect(server.url, name="test") as broker:
            assert not broker.closed.is_set()


def test_what_clients_are_denied_does_not_fill_the_disk(tmp_path: Path) -> None:
    user = '{ user: a, password: b, permissions: { subscribe: { deny: ["denied.>"] } } }'
    config = f"authorization {{ users: [{user}] }}\nlogfile_size_limit: 20000"
    asked = b"".join(b"SUB denied.%d %d\r\n" % (sid, sid) for sid in range(2000))
    with NatsServer(tmp_path, extra_config=config) as server:
        assert server.port is not None
        with socket.create_connection((server.host, server.port)) as client:
            client.sendall(b'CONNECT {"user":"a","pass":"b"}\r\n' + asked + b"PING\r\n")
            with client.makefile("rb") as said:
                while said.readline() != b"PONG\r\n":
                    pass
        logs = list(tmp_path.glob("nats-server.log*"))
        assert 2 <= len(logs) <= 4
        assert sum(path.stat().st_size for path in logs) < 100_000


def test_a_server_that_ends_at_once_says_why(tmp_path: Path) -> None:
    with pytest.raises(BrokerError, match="unknown field") as raised:
        NatsServer(tmp_path, extra_config="no_such_key: 1").start()
    assert "nats-server.log" in raised.value.hint


def test_the_server_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    program = (
        "import sys, time; from tinkermq.broker.nats_server import NatsServer; "
        "server = NatsServer(sys.argv[1]); server.start(); print(server.pid, flush=True); "
        "time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    _until(lambda: not alive(pid))


def test_a_server_may_outlive_the_process_that_started_it(tmp_path: Path) -> None:
    program = (
        "import sys; from tinkermq.broker.nats_server import NatsServer; "
        "server = NatsServer(sys.argv[1], die_with_parent=False); server.start(); "
        "print(server.pid)"
    )
    pid = int(subprocess.check_output([sys.executable, "-c", program, str(tmp_path)], text=True))
    try:
        with pytest.raises(BrokerError, match="in use by another nats-server"):
            NatsServer(tmp_path).start()
    finally:
        os.kill(pid, signal.SIGKILL)


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_server_that_reads_its_store_for_long_is_waited_for(own_server: NatsServer) -> None:
    while True:
        own_server.kill()
        own_server.begin()
        assert own_server.pid is not None
        os.kill(own_server.pid, signal.SIGSTOP)
        if not own_server.is_listening():  # it may have been faster than this process
            break
    os.kill(own_server.pid, signal.SIGCONT)
    _until(own_server.is_listening)


# -- A back-up holds what was stored, under the same sequences; what is no back-up is refused ------


BIG = b"x" * 2_000_000


@pytest.fixture
def other_server(tmp_path: Path) -> Iterator[NatsServer]:
    """The server that a back-up is brought to."""
    with NatsServer(tmp_path / "other") as server:
        yield server


async def test_messages_keep_their_sequences_and_consumers_their_places(
    own_broker: Broker, other_server: NatsServer, tmp_path: Path
) -> None:
    scope = JobScope("local", "saved")
    await create_job_streams(own_broker, scope, LimitsConfig(), ack_wait_s=30)
    for payload in (b"first", b"second", BIG):
        await own_broker.append(scope.batch, payload, deadline_s=PATIENCE_S, waiting_for="the test")
    await own_broker.api(f"STREAM.PURGE.{scope.stream_batch}", {"seq": 2})
    await own_broker.append(scope.task(7), b"task", deadline_s=PATIENCE_S, waiting_for="the test")
    saved = await save_all(own_broker, tmp_path / "backup")
    assert saved[0].name.rpartition("-")[2] == "task"
    assert {one.name for one in saved}.isdisjoint({"KV_tmq-actors", "KV_tmq-leases"})

    async with await connect(other_server.url, name="test") as other:
        await create_shared(other)  # a scheduler was there, and nobody has used the pool yet
        assert await restore_all(other, tmp_path / "backup") == saved
        found = await get_all(other, scope.stream_batch, scope.batch)
        assert [(one.seq, one.payload) for one in found] == [(2, b"second"), (3, BIG)]
        info = await other.api(f"CONSUMER.INFO.{scope.stream_task}.{TASK_CONSUMER}")
        assert info["num_pending"] == 1
        with pytest.raises(StateError, match="the broker holds messages in"):
            await restore_all(other, tmp_path / "backup")
        (tmp_path / "backup" / MANIFEST).write_text('{"format": 2, "streams": []}')
        with pytest.raises(StorageError, match=r"back-up of format 2, and tinkermq .* reads 1"):
            await restore_all(other, tmp_path / "backup")


async def test_a_restore_that_broke_off_is_repeated_and_brings_what_is_missing(
    own_broker: Broker, other_server: NatsServer, tmp_path: Path
) -> None:
    scope, folder = JobScope("local", "again"), tmp_path / "backup"
    await create_job_streams(own_broker, scope, LimitsConfig(), segments=True)
    for subject in (scope.batch, scope.task(1), scope.segment(1, 0), scope.rollout(1)):
        await own_broker.append(subject, b"one", deadline_s=PATIENCE_S, waiting_for="the test")
    saved = await save_all(own_broker, folder)
    archive = folder / f"{scope.stream_batch}.snapshot"
    whole = archive.read_bytes()
    archive.write_bytes(whole[: len(whole) // 2])
    async with await connect(other_server.url, name="test") as other:
        with pytest.raises(BrokerError, match="restored again, it goes on here"):
            await restore_all(other, folder)
        archive.write_bytes(whole)
        rest = await restore_all(other, folder)
        assert rest[0].name == scope.stream_batch
        assert rest == saved[-len(rest) :]
        assert len(rest) < len(saved)
        for one in saved:
            assert (await stream_info(other, one.name))["state"]["messages"] == one.num_messages
        with pytest.raises(StateError, match="all of this back-up is there"):
            await restore_all(other, folder)
        await other.append(scope.task(2), b"new", deadline_s=PATIENCE_S, waiting_for="the test")
        await delete_stream(other, scope.stream_batch)
        with pytest.raises(StateError, match=f"{scope.stream_task} already, and not those of the"):
            await restore_all(other, folder)


@contextlib.asynccontextmanager
async def written(broker: Broker, subjects: Sequence[str]) -> AsyncIterator[None]:
    """Write to all of these in turn, in bursts of a third of the time."""

    async def write() -> None:
        while True:
            began = time.monotonic()
            await write_once(broker, subjects)
            await asyncio.sleep(2 * (time.monotonic() - began))

    await write_once(broker, subjects)
    writing = asyncio.create_task(write())
    try:
        yield
    finally:
        await end_tasks((writing,))


async def write_once(broker: Broker, subjects: Sequence[str]) -> None:
    for subject in subjects:
        await broker.append(subject, b"x" * 1000, deadline_s=30, waiting_for="the test")


async def test_a_back_up_of_a_bucket_that_is_written_meanwhile_has_every_key(
    own_broker: Broker, other_server: NatsServer, tmp_path: Path
) -> None:
    stream = f"KV_{BUCKET_JOBS}"
    keys = [f"$KV.{BUCKET_JOBS}.u.j{number}" for number in range(50)]
    async with await connect(other_server.url, name="test") as other, written(own_broker, keys):
        for number in range(12):
            folder = tmp_path / str(number)
            await save_streams(own_broker, [stream], folder)
            config = (await stream_info(own_broker, stream))["config"]
            await restore_streams(other, [config], folder)
            assert (await stream_info(other, stream))["state"]["messages"] == len(keys)
            await delete_stream(other, stream)


async def test_a_restore_is_repeated_of_a_back_up_that_was_made_while_runs_went_on(
    own_broker: Broker, other_server: NatsServer, tmp_path: Path
) -> None:
    log = stream_config("tmq-local-live-log", "live", ["live.*"], 1 << 30, max_msgs_per_subject=1)
    await ensure_stream(own_broker, log)
    await ensure_stream(own_broker, stream_config("tmq-local-still-log", "still", ["still"], 1000))
    await write_once(own_broker, ["still"])
    async with await connect(other_server.url, name="test") as other:
        async with written(own_broker, [f"live.{number}" for number in range(50)]):
            for number in range(12):
                await save_all(own_broker, tmp_path / str(number))
        for number in range(12):
            await restore_all(other, tmp_path / str(number))
            await delete_stream(other, "tmq-local-still-log")
            again = {one.name for one in await restore_all(other, tmp_path / str(number))}
            assert "tmq-local-still-log" in again
            assert "tmq-local-live-log" not in again
            await delete_stream(other, "tmq-local-still-log")
            await delete_stream(other, "tmq-local-live-log")


async def test_a_job_that_is_deleted_meanwhile_ends_no_back_up(
    own_broker: Broker, tmp_path: Path
) -> None:
    scope = JobScope("local", "deleted")
    await create_job_streams(own_broker, scope, LimitsConfig())
    saving = asyncio.create_task(save_all(own_broker, tmp_path / "backup"))
    while not saving.done() and not list((tmp_path / "backup").glob("*-task.json")):
        await asyncio.sleep(0)
    await delete_stream(own_broker, scope.stream_rollout)  # the last one to be saved
    assert scope.stream_rollout not in {one.name for one in await saving}


async def test_a_folder_in_use_and_one_without_a_manifest_are_refused(
    own_broker: Broker, tmp_path: Path
) -> None:
    folder = tmp_path / "backup"
    await save_all(own_broker, folder)
    with pytest.raises(StateError, match="is not empty"):
        await save_all(own_broker, folder)
    (folder / MANIFEST).unlink()
    with pytest.raises(StorageError, match=r"cannot be used: .*backup\.json"):
        await restore_all(own_broker, folder)


async def test_a_damaged_archive_is_refused_and_leaves_no_stream(
    own_broker: Broker, other_server: NatsServer, tmp_path: Path
) -> None:
    scope = JobScope("local", "damaged")
    await create_job_streams(own_broker, scope, LimitsConfig())
    await save_all(own_broker, tmp_path / "backup")
    (tmp_path / "backup" / f"{scope.stream_batch}.snapshot").write_bytes(b"no archive")
    async with await connect(other_server.url, name="test") as other:
        with pytest.raises(BrokerError):
            await restore_all(other, tmp_path / "backup")
        with pytest.raises(Exception, match="there is no stream"):
            await stream_info(other, scope.stream_batch)


async def test_the_auth_service_saves_users_too_and_users_may_save_nothing(tmp_path: Path) -> None:
    async with secured(tmp_path / "pool") as pool:
        ada = await pool.user("ada")
        with pytest.raises(BrokerError, match="users may not ask for STREAM"):
            await save_all(ada, tmp_path / "of-ada")
        await save_all(await pool.service("auth"), tmp_path / "backup")
    with NatsServer(tmp_path / "new", extra_config=pool.secrets.server_config()) as server:
        credentials = pool.secrets.credentials("auth")
        async with await connect(server.url, name="t", credentials_file=credentials) as auth:
            await restore_all(auth, tmp_path / "backup")
            assert {one.user for one in await UserStore(auth).list()} == {"root", "ada"}
