"""Walls around hosted games: what a program behind them sees, and how it is ended."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest
from tinkermq.actors.node.enclosure import FOLDERS_VARIABLE, VARIABLES_VARIABLE, Enclosure
from tinkermq.actors.node.process import ActorProcess
from tinkermq.schemas.node import WantedActor

from tests.processes import alive
from tests.waiting import PATIENCE_S, until

LOOK = """
import json, os, sys

def read(path):
    try:
        return open(path).read()
    except OSError:
        return None

def write(path):
    try:
        open(path, "w").close()
    except OSError:
        return False
    return True

import tinkermq.actors.environment
pids = [name for name in os.listdir("/proc") if name.isdigit()]
print(json.dumps({
    "read": [read(path) for path in sys.argv[1:]],
    "pids": pids,
    "environ": sorted(os.environ),
    "writes": [write(path) for path in (tinkermq.actors.environment.__file__, "/usr/x", "/tmp/x")],
}))
"""


class Sink:
    """Takes the lines of a program."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    async def __call__(self, lines: object) -> None:
        self.lines += vars(lines)["lines"]


def process(wanted: WantedActor, sink: Sink, *command: str) -> ActorProcess:
    """Return a program behind walls, watched as a node does."""
    walls = Enclosure()
    return ActorProcess(
        wanted,
        start=lambda wanted, given, output: walls.start(command, wanted, given, output),
        nats_url="nats://127.0.0.1:1",
        send=sink,
    )


def host(run_dir: Path, **changes: object) -> WantedActor:
    fields = {"user": "ada", "job": "j1", "name": "environment-0", "role": "environment"}
    return WantedActor.model_validate({**fields, "run_dir": str(run_dir), **changes})


async def test_a_game_sees_its_data_and_nothing_of_the_node_or_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = ["data.jsonl", "games/lists", "runs/bob/r/rollouts", "runs/ada/r/own", "node.creds"]
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("ALFWORLD_DATA", "there")
    monkeypatch.setenv(VARIABLES_VARIABLE, "ALFWORLD_DATA")
    monkeypatch.setenv(FOLDERS_VARIABLE, str(tmp_path / "games"))
    wanted = host(
        tmp_path / "runs/ada/r",
        reads=[str(tmp_path / name) for name in ("data.jsonl", "node.creds", "")],
    )
    paths = [str(tmp_path / name) for name in files]
    paths += [f"/proc/{os.getpid()}/environ", "/etc/shadow"]
    sink = Sink()
    actor = process(wanted, sink, sys.executable, "-c", LOOK, *paths)
    await asyncio.wait_for(actor.run(), PATIENCE_S)
    assert actor.status.exit_code == 0, sink.lines
    seen = json.loads(sink.lines[-1])
    assert seen["read"] == ["data.jsonl", "games/lists", None, None, None, None, None]
    assert len(seen["pids"]) == 2  # bubblewrap's first one and itself
    assert {"ALFWORLD_DATA", "PATH", "TINKERMQ_NATS_URL"} <= set(seen["environ"])
    assert "HF_TOKEN" not in seen["environ"]
    assert seen["writes"] == [False, False, True]


DRAIN = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print("drained"), sys.exit(3)))
print("ready", flush=True)
time.sleep(600)
"""


async def test_it_is_asked_to_drain_as_any_other_actor(tmp_path: Path) -> None:
    sink = Sink()
    actor = process(host(tmp_path), sink, sys.executable, "-c", DRAIN)
    running = asyncio.create_task(actor.run())
    await until(lambda: sink.lines == ["ready"], "the program")
    actor.stop()
    await asyncio.wait_for(running, PATIENCE_S)
    assert (sink.lines, actor.status.exit_code) == (["ready", "drained"], 3)


async def test_what_is_left_of_it_ends_with_it(tmp_path: Path) -> None:
    sink = Sink()
    actor = process(host(tmp_path), sink, "sh", "-c", "echo ready; setsid sleep 4217 & sleep 4217")
    running = asyncio.create_task(actor.run())
    await until(lambda: sink.lines == ["ready"], "the program")
    left = sleepers()
    assert len(left) == 2
    assert actor.status.pid is not None
    actor.stop(kill=True)
    await asyncio.wait_for(running, PATIENCE_S)
    assert actor.status.exit_code == -signal.SIGKILL
    await until(lambda: not [pid for pid in left if alive(pid)], "the end of its processes")


def sleepers() -> list[int]:
    found: list[int] = []
    for one in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if one.read_bytes() == b"sleep\x004217\x00":
                found.append(int(one.parent.name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        (FOLDERS_VARIABLE, "{tmp}", "would see the run folders of all users in {tmp}"),
        ("PATH", "/nowhere", "apt-get install bubblewrap"),
    ],
)
async def test_where_no_game_can_be_enclosed_none_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, said: str
) -> None:
    monkeypatch.setenv(variable, value.format(tmp=tmp_path))
    sink = Sink()
    actor = process(host(tmp_path / "runs/ada/r", max_restarts=0), sink, "true")
    await asyncio.wait_for(actor.run(), PATIENCE_S)
    assert actor.status.state == "failed"
    assert said.format(tmp=tmp_path) in actor.status.error
