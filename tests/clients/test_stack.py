"""`up` starts a stack that holds itself up; `down` takes it down and leaves nothing."""

import asyncio
import fcntl
import json
import os
import signal
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import pytest
from tinkermq.broker.client.connection import connect
from tinkermq.broker.jetstream.kv import Bucket
from tinkermq.broker.nats_server import NatsServer
from tinkermq.clients.home import Home, StackState, find_url
from tinkermq.schemas.job import JobRecord
from tinkermq.schemas.wire.errors import BrokerError, StateError
from tinkermq.schemas.wire.subjects import BUCKET_JOBS

from tests.clients.conftest import Cli
from tests.support.processes import alive
from tests.support.waiting import PATIENCE_S


@pytest.fixture
def home(tmp_path: Path, cli: Cli) -> Iterator[Home]:
    """The folder of a stack that is down again after the test."""
    found = Home(tmp_path / "home")
    yield found
    assert cli("down").code == 0
    assert not found.is_locked()


def until(condition: Callable[[], bool], what: str, deadline_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.05)


def state_of(home: Home) -> StackState:
    state = home.read_running_stack()
    assert state is not None
    return state


async def _belie_a_key(url: str) -> None:
    """Write a job's record under another key than its own."""
    record = JobRecord(job="j", name="n", user="u", state="QUEUED", config={}, created=0.0)
    async with await connect(url, name="test") as broker:
        await Bucket(broker, BUCKET_JOBS, JobRecord).put("other.key", record)


def test_up_holds_its_children_up_and_down_leaves_nothing(home: Home, cli: Cli) -> None:
    up = cli("up", "--port", "0", "--slots", "2", "--json")
    assert up.code == 0, up.err
    state = StackState.model_validate_json(up.out)
    assert set(state.children) == {"broker", "scheduler", "node", "gateway"}
    assert [one.stat().st_mode & 0o777 for one in (home.logs, home.store)] == [0o700, 0o700]
    assert state.gateway is not None
    with urllib.request.urlopen(f"{state.gateway}/healthz") as reply:
        assert json.load(reply)["status"] == "ok"
    assert find_url() == state.url
    assert json.loads(cli("ps", "--json").out) == []
    asyncio.run(_belie_a_key(state.url))
    findings = {one["name"]: one for one in json.loads(cli("doctor", "--json").out)}
    assert findings["broker"]["ok"]
    assert findings["scheduler"]["ok"]
    assert findings["node"]["ok"]
    assert findings["machines"]["detail"] == "alike"
    assert findings["clocks"]["detail"] == "as the scheduler's"
    assert not findings["records"]["ok"]
    belied = "other.key of tmq-jobs: the JobRecord under 'other.key' says"
    assert belied in findings["records"]["detail"]

    again = cli("up", "--port", "0", "--json")
    assert StackState.model_validate_json(again.out) == state

    for name in ("scheduler", "broker"):
        os.kill(state.children[name], signal.SIGKILL)
        until(lambda name=name: state_of(home).restarts[name] == 1, f"{name} is started again")
    assert state_of(home).url == state.url
    until(lambda: cli("ps").code == 0, "the broker answers again")

    children = state_of(home).children
    down = cli("down", "--json")
    assert json.loads(down.out)["stopped"]
    assert not any(alive(pid) for pid in children.values())
    assert home.read_running_stack() is None
    assert cli("ps").code == 1
    assert not json.loads(cli("down", "--json").out)["stopped"]


def test_a_broker_that_cannot_be_started_again_at_once_ends_no_stack(home: Home, cli: Cli) -> None:
    assert cli("up", "--port", "0", "--slots", "1", "--json").code == 0
    state = state_of(home)
    # a server of before that does not end holds the store
    with (home.store / "server.lock").open("a+") as lock:
        os.kill(state.pid, signal.SIGSTOP)  # so that the test gets the store first
        os.kill(state.children["broker"], signal.SIGKILL)
        until(lambda: _locked(lock), "the store is let go of")
        os.kill(state.pid, signal.SIGCONT)
        log = home.logs / "supervisor.log"
        until(lambda: "cannot be started" in log.read_text(), "a start has failed")
        assert alive(state.pid)
    until(lambda: state_of(home).restarts["broker"] == 1, "the broker is there again")

    async def answers() -> None:
        async with await connect(state.url, name="test"):
            pass

    asyncio.run(answers())
    assert state_of(home).pid == state.pid


def _locked(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def test_a_killed_supervisor_takes_its_children_with_it(home: Home, cli: Cli) -> None:
    state = StackState.model_validate_json(cli("up", "--port", "0", "--json").out)
    os.kill(state.pid, signal.SIGKILL)
    until(lambda: not any(map(alive, state.children.values())), "all children have ended")
    # The state file is still there, and nobody takes it for a stack that runs.
    assert home.state_path.exists()
    assert home.read_running_stack() is None
    with pytest.raises(BrokerError, match="no stack is up"):
        find_url()


def test_a_port_in_use_is_named_and_nothing_is_left_running(home: Home, cli: Cli) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        outcome = cli("up", "--port", str(port))
    assert outcome.code == 1
    assert f"port {port} on 127.0.0.1 is already in use" in outcome.err
    assert "--nats-url" in outcome.err
    assert "Traceback" not in outcome.err
    assert not home.is_locked()


def test_a_server_that_runs_already_is_used_and_survives(
    home: Home, cli: Cli, own_server: NatsServer
) -> None:
    outcome = cli("up", "--nats-url", own_server.url, "--no-gateway", "--json")
    state = StackState.model_validate_json(outcome.out)
    assert state.url == own_server.url
    assert set(state.children) == {"scheduler", "node"}
    assert cli("down").code == 0
    assert own_server.running


def test_a_server_without_jetstream_is_refused_with_the_remedy(
    home: Home, cli: Cli, tmp_path: Path
) -> None:
    with NatsServer(tmp_path / "plain", jetstream=False) as server:
        outcome = cli("up", "--nats-url", server.url)
    assert outcome.code == 1
    assert "JetStream" in outcome.err


def test_a_folder_has_one_supervisor(tmp_path: Path) -> None:
    home = Home(tmp_path)
    with home.lock():
        assert home.is_locked()
        with pytest.raises(StateError, match="already up"), Home(tmp_path).lock():
            pass
    assert not home.is_locked()


def test_no_slots_is_wrong_usage(cli: Cli) -> None:
    outcome = cli("up", "--slots", "0")
    assert outcome.code == 2
    assert "--slots is 0" in outcome.err
