"""`up` and `down`, the quickstart, sweeps and settings of trackers."""

import asyncio
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

import pytest
from tinkermq.broker.client.connection import connect
from tinkermq.broker.jetstream.kv import Bucket
from tinkermq.broker.nats_server import NatsServer
from tinkermq.clients.cli.quickstart import SUMS, write_config
from tinkermq.clients.cli.supervisor import LOG_BYTES, bound_log
from tinkermq.clients.cli.sweep import NumberRange, list_points, parse_space
from tinkermq.clients.home import Home, StackState, default_folder, find_url
from tinkermq.schemas.config.load_config import load_config
from tinkermq.schemas.job import JobRecord
from tinkermq.schemas.wire.errors import BrokerError, ConfigError, StateError, StorageError
from tinkermq.schemas.wire.subjects import BUCKET_JOBS

from tests.clients.command import command, tinkermq
from tests.clients.conftest import Cli
from tests.support.configs import REPOSITORY
from tests.support.processes import alive, halt
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.full


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


def test_init_refuses_a_pool_that_is_up_without_users_and_moves_its_store_aside(
    home: Home, cli: Cli
) -> None:
    words = ("init", "--home", str(home.folder))
    streams = home.store / "jetstream" / "jetstream" / "$G"
    streams.mkdir(parents=True)
    with home.lock():
        refused = cli(*words)
    assert (refused.code, "`tinkermq down`" in refused.err) == (2, True)
    assert cli(*words).code == 0
    assert [path.name for path in home.folder.glob("nats*")] == ["nats-without-users"]


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
    findings = {one["name"]: one for one in json.loads(cli("doctor", "--json").out)["checks"]}
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
    assert cli("up", "--slots", "2", "--port", str(urlsplit(state.url).port)).code == 0
    for other in (["--port", "1"], ["--slots", "3"], ["--gateway-port", "1"], ["--no-gateway"]):
        refused = cli("up", *other)
        assert refused.code == 2
        assert f"and was started without {' '.join(other)}" in " ".join(refused.err.split())

    for name in ("scheduler", "broker"):
        os.kill(state.children[name], signal.SIGKILL)
        until(lambda name=name: state_of(home).restarts[name] == 1, f"{name} is started again")
    assert state_of(home).url == state.url
    until(lambda: cli("ps").code == 0, "the broker answers again")

    children = state_of(home).children
    log = home.logs / "node.log"
    os.truncate(log, LOG_BYTES + 1)
    until(lambda: log.stat().st_size <= LOG_BYTES, "the node's log begins anew")
    assert (home.logs / "node.log.1").stat().st_size > LOG_BYTES  # the node may write meanwhile

    down = cli("down", "--json")
    assert json.loads(down.out)["stopped"]
    assert not any(alive(pid) for pid in children.values())
    assert home.read_running_stack() is None
    assert cli("ps").code == 1
    assert not json.loads(cli("down", "--json").out)["stopped"]


@pytest.mark.parametrize("has_room", [True, False])
def test_a_log_that_grows_beyond_its_bound_begins_anew(tmp_path: Path, has_room: bool) -> None:
    log, older = tmp_path / "node.log", tmp_path / "node.log.1"
    if not has_room:
        older.symlink_to("/dev/full")
    with log.open("ab", buffering=0) as written:
        written.write(b"first\n" + b"\0" * (LOG_BYTES - 6))
        bound_log(log)
        assert log.stat().st_size == LOG_BYTES
        written.write(b"more\n")
        bound_log(log)
        written.write(b"last\n")
    assert log.read_bytes() == b"last\n"
    assert older.exists() == has_room
    if has_room:
        assert older.read_bytes().endswith(b"\0more\n")
    bound_log(tmp_path / "none.log")


def test_a_broker_that_cannot_be_started_again_at_once_ends_no_stack(home: Home, cli: Cli) -> None:
    assert cli("up", "--port", "0", "--slots", "1", "--json").code == 0
    state = state_of(home)
    # a server of before that does not end holds the store
    with (home.store / "server.lock").open("a+") as lock:
        halt(state.pid)  # so that the test gets the store first
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


def test_a_port_in_use_is_named_for_the_dashboard_too(home: Home, cli: Cli) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        outcome = cli("up", "--port", "0", "--gateway-port", str(port))
    assert outcome.code == 2
    assert f"the dashboard cannot listen on port {port}" in outcome.err
    assert not home.is_locked()


def test_a_store_that_cannot_be_written_is_named(home: Home, cli: Cli) -> None:
    (home.store / "nats-server.conf").mkdir(parents=True)  # where a file is written
    outcome = cli("up", "--port", "0", "--no-gateway")
    assert outcome.code == 1
    assert f"the stack in {home.folder} failed: " in outcome.err
    assert "nats-server.conf" in outcome.err


def test_a_supervisor_that_cannot_start_says_why(home: Home, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if 'tinkermq.clients.cli.supervisor' in sys.orig_argv:\n"
        "    sys.exit('a package is broken')\n"
    )
    environment = {"TINKERMQ_HOME": str(home.folder), "PYTHONPATH": str(tmp_path)}
    outcome = tinkermq("up", "--port", "0", env=environment)
    assert outcome.code == 1
    assert "the supervisor of the stack ended with code 1: SystemExit: a package" in outcome.err


def test_files_in_the_folder_of_up_hide_no_module_of_pythons(home: Home, tmp_path: Path) -> None:
    for name in ("json", "queue", "random", "secrets", "token", "numpy", "yaml"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('a game of somebody')\n")
    up = subprocess.run(
        [Path(sys.executable).parent / "tinkermq", *("up", "--port", "0", "--slots", "1")],
        cwd=tmp_path,
        env={**os.environ, "TINKERMQ_HOME": str(home.folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert up.returncode == 0, up.stderr
    assert set(state_of(home).restarts.values()) == {0}


def test_an_interrupted_up_leaves_nothing_running(home: Home) -> None:
    words = command(["up", "--port", "0", "--slots", "1", "--no-gateway"])
    environment = {**os.environ, "TINKERMQ_HOME": str(home.folder)}
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE) as up:
        until(lambda: home.folder.is_dir() and home.is_locked(), "the supervisor runs")
        up.send_signal(signal.SIGINT)
        assert up.wait(PATIENCE_S) == 130
    until(lambda: not home.is_locked(), "the supervisor has ended")


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


def test_the_folder_of_a_stack_may_be_below_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setenv("TINKERMQ_HOME", "~/pool")
    assert default_folder() == Path("/home/ada/pool")
    monkeypatch.delenv("TINKERMQ_HOME")
    assert default_folder() == Path("/home/ada/.local/share/tinkermq")
    monkeypatch.setenv("TINKERMQ_HOME", "~nobody-of-this-name/pool")  # as of a user without a home
    with pytest.raises(StorageError, match="this user has no home"):
        default_folder()


def test_a_folder_has_one_supervisor(tmp_path: Path) -> None:
    home = Home(tmp_path)
    with home.lock():
        assert home.is_locked()
        with pytest.raises(StateError, match="already up"), Home(tmp_path).lock():
            pass
    assert not home.is_locked()


def test_a_stack_whose_folder_was_moved_leaves_alone_what_stands_in_its_place(
    tmp_path: Path,
) -> None:
    state = StackState(url="nats://h:1", pid=1, home=str(tmp_path / "home"), started=0.0)
    moved, new = Home(tmp_path / "home"), Home(tmp_path / "home")
    with moved.lock():
        moved.write(state)
        moved.folder.rename(tmp_path / "elsewhere")
        with pytest.raises(FileNotFoundError, match="has been moved or removed"):
            moved.write(state)
        moved.clear()
        assert not moved.folder.exists()
        with new.lock():
            new.write(state.model_copy(update={"pid": 2}))
            with pytest.raises(FileNotFoundError, match="has been moved or removed"):
                moved.write(state)
            moved.clear()
            assert state_of(new).pid == 2
            new.clear()
            assert not new.state_path.exists()


def test_no_slots_is_wrong_usage(cli: Cli) -> None:
    outcome = cli("up", "--slots", "0")
    assert outcome.code == 2
    assert "--slots is 0" in outcome.err


# -- What the quickstart needs before it trains, and the configuration that it leaves --------------


def test_without_torch_the_quickstart_says_what_to_install(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    told = cli("quickstart", "--output-dir", str(tmp_path / "outputs"))
    assert told.code == 2
    assert "torch is not installed here" in told.err
    assert "pip install 'tinkermq[worker]'" in told.err
    assert not (tmp_path / "outputs").exists()


def test_without_its_extra_up_says_what_to_install(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    told = cli("up", "--store", str(tmp_path / "home"))
    assert told.code == 2
    assert "torch is not installed here pip install 'tinkermq[worker]'" in " ".join(
        told.err.split()
    )
    assert not (tmp_path / "home").exists()


def test_the_example_is_the_configuration_that_the_quickstart_ships() -> None:
    example = load_config(REPOSITORY / "examples" / "calculator.yaml")
    assert example.model.path == "outputs/models/calculator"


def test_in_another_folder_all_paths_of_the_configuration_are_below_it(tmp_path: Path) -> None:
    folder = tmp_path / "it's, [odd]: #1 日本"
    folder.mkdir()
    config = load_config(write_config(folder))
    assert config.model.path == str(folder / "models" / "calculator")
    assert config.env.train_data == [str(folder / "data" / "calculator" / "train.parquet")]
    assert config.env.val_data == [str(folder / "data" / "calculator" / "val.parquet")]
    assert config.output_dir == str(folder)


# -- The points of a sweep: combinations, or drawn ones that are the same each time ----------------


def test_keys_with_several_values_or_a_range_vary_and_the_others_do_not() -> None:
    same, space = parse_space(
        ["a.b=1", "learner.lr=1e-5, 3e-5", "seed=1..9", "tags=[x,y]", "k={a: 1, b: 2},{a: 3}"]
    )
    assert same == ["a.b=1", "tags=[x,y]"]
    assert space == {
        "learner.lr": ["1e-5", "3e-5"],
        "seed": NumberRange(1, 9, whole=True),
        "k": ["{a: 1, b: 2}", "{a: 3}"],
    }


def test_a_grid_is_every_combination() -> None:
    _, space = parse_space(["a=1,2", "b=x,y,z"])
    grid = list_points(space, None, 0)
    assert len(grid) == 6
    assert grid[0] == {"a": "1", "b": "x"}
    assert len({tuple(sorted(point.items())) for point in grid}) == 6


def test_drawn_points_are_the_same_each_time_and_within_their_ranges() -> None:
    _, space = parse_space(["lr=1e-6..1e-4", "n=2..8", "x=a,b"])
    drawn = list_points(space, 200, seed=3)
    assert drawn == list_points(space, 200, seed=3)
    assert drawn[:50] == list_points(space, 50, seed=3)  # more of them begin with the same
    assert drawn != list_points(space, 200, seed=4)
    rates = sorted(float(point["lr"]) for point in drawn)
    assert 1e-6 <= rates[0] < 3e-6
    assert 3e-5 < rates[-1] <= 1e-4
    assert rates[100] == pytest.approx(1e-5, rel=0.5)  # the middle of the logarithms
    assert {point["n"] for point in drawn} == {str(n) for n in range(2, 9)}


@pytest.mark.parametrize(
    ("overrides", "runs", "said"),
    [
        (["a=1"], None, "nothing varies"),
        (["a=1..2"], None, "a is a range, which needs a number of runs"),
        (["a=2..1"], 3, "ends before it begins"),
        (["a=1..2"], 1001, "1 to 1,000 runs, not 1,001"),
        (
            ["a=" + ",".join("12345678"), "b=" + ",".join("x" * 200)],
            None,
            "1 to 1,000 runs, not 1,600",
        ),
    ],
)
def test_what_cannot_be_swept_is_refused(overrides: list[str], runs: int | None, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        list_points(parse_space(overrides)[1], runs, 0)


def test_the_model_of_the_real_example_stays_a_name_and_its_data_lie_below_the_folder(
    tmp_path: Path,
) -> None:
    config = load_config(write_config(tmp_path, SUMS))
    assert config.model.path == SUMS.catalogue_model == "smollm2"
    assert config.env.val_data == [str(tmp_path / "data" / "sums" / "val.parquet")]
