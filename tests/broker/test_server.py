"""The embedded nats-server."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tinkermq.broker.client.connection import connect
from tinkermq.broker.jetstream.streams import create_shared, stream_info
from tinkermq.broker.nats_server import NatsServer
from tinkermq.schemas.wire.errors import BrokerError

from tests.support.processes import alive
from tests.support.waiting import PATIENCE_S


def test_a_free_port_is_found_and_kept_over_a_restart(own_server: NatsServer) -> None:
    url, monitor = own_server.url, own_server.monitor_url
    own_server.restart()
    assert own_server.url == url
    assert own_server.monitor_url == monitor


async def test_what_was_stored_is_there_after_a_kill(own_server: NatsServer) -> None:
    async with await connect(own_server.url, name="test") as broker:
        await create_shared(broker)
        own_server.kill()
        own_server.start()
        assert await stream_info(broker, "KV_tmq-jobs")


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


def test_a_server_that_ends_at_once_says_why(tmp_path: Path) -> None:
    with pytest.raises(BrokerError, match="unknown field") as raised:
        NatsServer(tmp_path, extra_config="no_such_key: 1").start()
    assert "nats-server.log" in raised.value.hint


def test_the_server_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    program = (
        "import sys, time; from tinkermq.broker.nats_server import NatsServer; "
        "server = NatsServer(sys.argv[1]); server.start(); print(server.pid, flush=True); "
        "time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    assert _ends(pid)


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


def _ends(pid: int) -> bool:
    for _ in range(200):
        if not alive(pid):
            return True
        time.sleep(0.01)
    return False


def test_a_server_that_reads_its_store_for_long_is_waited_for(own_server: NatsServer) -> None:
    own_server.kill()
    own_server.begin()
    assert own_server.pid is not None
    os.kill(own_server.pid, signal.SIGSTOP)
    assert not own_server.is_listening()
    os.kill(own_server.pid, signal.SIGCONT)
    deadline = time.monotonic() + PATIENCE_S
    while not own_server.is_listening():
        assert time.monotonic() < deadline
        time.sleep(0.02)
