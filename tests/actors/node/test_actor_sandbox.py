"""The sandbox of hosted games and of learners with functions of users: what it shows, its end."""

import asyncio
import json
import os
import signal
import socket
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import pytest
from tinkermq.actors.node.process import ActorProcess
from tinkermq.actors.node.sandbox import (
    FOLDERS_VARIABLE,
    VARIABLES_VARIABLE,
    SandboxStarter,
    check_programs,
)
from tinkermq.envs.sandbox import bubblewrap
from tinkermq.envs.sandbox.piped import LocalPipedProgram, PipedSettings
from tinkermq.envs.sandbox.sandbox import first_child
from tinkermq.schemas.node import WantedActor
from tinkermq.schemas.wire.errors import SandboxError

from tests.support import hostile
from tests.support.altered_bubblewrap import path_without
from tests.support.processes import alive
from tests.support.waiting import PATIENCE_S, until

pytestmark = pytest.mark.full

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


def source_of(module: ModuleType, of: str = "__main__") -> str:
    """Return what runs a module of the tests where no file of them is shown."""
    assert module.__file__ is not None
    source = Path(module.__file__).read_text()
    return source if of == "__main__" else source.replace("__name__ ==", "'__main__' ==")


def process(wanted: WantedActor, sink: Sink, *command: str) -> ActorProcess:
    """Return a program in a sandbox, watched as a node does."""
    sandboxes = SandboxStarter()
    return ActorProcess(
        wanted,
        start=lambda wanted, given, output: sandboxes.start(command, wanted, given, output),
        nats_url="nats://127.0.0.1:1",
        send=sink,
    )


def host(run_dir: Path, **changes: object) -> WantedActor:
    fields = {"user": "ada", "job": "j1", "name": "environment-0", "role": "environment"}
    return WantedActor.model_validate({**fields, "run_dir": str(run_dir), **changes})


async def test_a_game_sees_its_data_and_nothing_of_the_node_or_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = "saved/data-00000-of-00001.arrow"
    files = ["data.jsonl", shard, "games/lists", "saved/notes", "runs/bob/r/rollouts"]
    files += ["runs/ada/r/own", "node.creds"]
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("ALFWORLD_DATA", "there")
    monkeypatch.setenv(VARIABLES_VARIABLE, "ALFWORLD_DATA")
    monkeypatch.setenv(FOLDERS_VARIABLE, str(tmp_path / "games"))
    wanted = host(
        tmp_path / "runs/ada/r",
        reads=[str(tmp_path / name) for name in ("data.jsonl", "saved", "node.creds", "")],
    )
    paths = [str(tmp_path / name) for name in files]
    paths += [f"/proc/{os.getpid()}/environ", "/etc/shadow"]
    sink = Sink()
    actor = process(wanted, sink, sys.executable, "-c", LOOK, *paths)
    await asyncio.wait_for(actor.run(), PATIENCE_S)
    assert actor.status.exit_code == 0, sink.lines
    seen = json.loads(sink.lines[-1])
    assert seen["read"] == ["data.jsonl", shard, "games/lists", *[None] * 6]
    assert len(seen["pids"]) == 2  # bubblewrap's first one and itself
    assert {"ALFWORLD_DATA", "PATH", "TINKERMQ_NATS_URL"} <= set(seen["environ"])
    assert "HF_TOKEN" not in seen["environ"]
    assert seen["writes"] == [False, False, True]


async def test_actors_start_at_home_where_the_folder_of_their_node_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    (tmp_path / "runs/ada/r").mkdir(parents=True)
    monkeypatch.chdir(gone)
    gone.rmdir()
    tell = (sys.executable, "-c", "import os; print(os.getcwd())")
    sink = Sink()
    actor = process(host(tmp_path / "runs/ada/r", reads=["data.jsonl"]), sink, *tell)
    await asyncio.wait_for(actor.run(), PATIENCE_S)
    assert sink.lines[-1:] == [str(Path.home())]


async def test_the_keys_of_a_job_stand_in_the_environment_of_its_program_alone(
    tmp_path: Path,
) -> None:
    (tmp_path / "run").mkdir()
    told = ["sh", "-c", 'test -n "$TINKERMQ_CREDENTIALS" && exec sleep 60']
    keys = {"TINKERMQ_CREDENTIALS": "the-key"}
    child = await SandboxStarter().start(told, host(tmp_path / "run"), keys, 1)
    try:
        first = 0

        def has_started() -> bool:
            nonlocal first
            first = first_child(child.pid) or 0
            return first > 0 and first_child(first) is not None

        await until(has_started, "the program to start")
        for name in (f"{child.pid}/environ", f"{first}/environ", f"{child.pid}/cmdline"):
            assert b"the-key" not in await asyncio.to_thread(Path("/proc", name).read_bytes)
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        await child.wait()


PROGRAMS = """
import contextlib, json, sys
from tinkermq.envs.sandbox.interpreters import SandboxSettings
from tinkermq.envs.sandbox.served import shared_sandbox
sandbox = shared_sandbox(SandboxSettings(packages=[], processes=6))
with contextlib.closing(sandbox.session()) as session:
    for code in sys.argv[1:]:
        print(json.dumps([session.run(code, 2.0).text]), flush=True)
"""


async def test_programs_of_a_hosted_game_run_in_sandboxes_of_their_own_with_limits(
    tmp_path: Path,
) -> None:
    fork_on = "import os, time\nfor _ in range(50):\n  if not os.fork(): time.sleep(1000)"
    programs = ["x = 41", "x + 1", source_of(hostile, of="program"), fork_on]
    sink = Sink()
    actor = process(host(tmp_path), sink, sys.executable, "-c", PROGRAMS, *programs)
    await asyncio.wait_for(actor.run(), PATIENCE_S)
    assert actor.status.exit_code == 0, sink.lines
    first, second, tries, forked = (json.loads(line)[0] for line in sink.lines)
    assert (first, second, tries) == ("", "42\n", "[]\n")
    assert "BlockingIOError" in forked


PIPED = """
import json, os, socket, sys
from tinkermq.envs.sandbox.piped import PipedSettings
from tinkermq.envs.sandbox.served import start_piped
from tinkermq.schemas.wire.errors import TinkermqError

def tried(said, **settings):
    ours, theirs = socket.socketpair()
    errors = os.open(os.devnull, os.O_WRONLY)
    try:
        program = start_piped(PipedSettings(**settings), theirs.fileno(), errors)
    except TinkermqError as error:
        return [error.message]
    theirs.close()
    ours.sendall(said)
    heard = b""
    while chunk := ours.recv(4096):
        heard += chunk
    return [heard.decode(), program.end(5.0)]

shown, hidden, port = sys.argv[1:]
reads = "import sys; print(sys.stdin.readline()); print(open(sys.argv[1]).read()); sys.exit(3)"
joins = "import socket, sys; socket.create_connection(('127.0.0.1', int(sys.argv[1])))"
for result in (
    tried(b"hello\\n", command=["{python}", "-S", "-c", reads, shown], read=[shown]),
    tried(b"", command=["cat", hidden], read=[hidden]),
    tried(b"", command=["{python}", "-S", "-c", joins, port], network="open"),
    tried(b"", command=["{python}", "-S", "-c", joins, port]),
    tried(b"", command=["no-such-program"]),
):
    print(json.dumps(result), flush=True)
"""


async def test_a_hosted_game_has_programs_run_that_see_what_the_operator_shows_to_games(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown, hidden = tmp_path / "shown", tmp_path / "hidden"
    for folder in (shown, hidden):
        folder.mkdir()
        (folder / "file").write_text(folder.name)
    monkeypatch.setenv(FOLDERS_VARIABLE, str(shown))
    sink = Sink()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        words = [str(shown / "file"), str(hidden / "file"), str(listening.getsockname()[1])]
        actor = process(host(tmp_path), sink, sys.executable, "-c", PIPED, *words)
        await asyncio.wait_for(actor.run(), PATIENCE_S)
    assert actor.status.exit_code == 0, sink.lines
    read, refused, joined, alone, absent = (json.loads(line) for line in sink.lines)
    assert read == ["hello\n\nshown\n", "exited with code 3"]
    assert refused == [f"read: programs of hosted games may not see '{hidden}/file'"]
    assert joined == ["", "exited with code 0"]
    assert alone == ["", "exited with code 1"]
    assert absent == ["the sandbox has no program 'no-such-program'"]


async def test_a_long_temporary_folder_breaks_no_sandbox_of_a_game(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / "a folder" / ("x" * 120) / ("é" * 60)
    long.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    sink = Sink()
    actor = process(host(tmp_path), sink, sys.executable, "-c", PROGRAMS, "print(6 * 7)")
    await asyncio.wait_for(actor.run(), PATIENCE_S)
    assert actor.status.exit_code == 0, sink.lines
    assert json.loads(sink.lines[-1])[0] == "42\n"
    assert list(long.iterdir()) == []


async def test_a_temporary_folder_that_is_gone_is_told_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    sink = Sink()
    actor = process(host(tmp_path, max_restarts=0), sink, "true")
    await asyncio.wait_for(actor.run(), PATIENCE_S)
    assert actor.status.state == "failed"
    assert str(tmp_path / "gone") in actor.status.error


async def test_a_game_that_may_not_read_its_data_is_told_what_helps(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("{}")
    data.chmod(0o600)
    sink = Sink()
    wanted = host(tmp_path / "runs", reads=[str(data)], max_restarts=0)
    actor = process(wanted, sink, "cat", str(data))
    await asyncio.wait_for(actor.run(), PATIENCE_S)
    if os.getuid() == 0:  # an ordinary user's game is that user
        assert f"chmod -R o+rX {data}" in actor.status.error
    else:
        assert sink.lines == ["{}"]


@pytest.mark.parametrize("to", ["node.creds", "runs/bob/r/rows.jsonl"])
async def test_a_data_file_that_leads_to_what_is_nobodys_business_is_refused(
    tmp_path: Path, to: str
) -> None:
    (tmp_path / to).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / to).write_text("secret")
    (tmp_path / "data.jsonl").symlink_to(tmp_path / to)
    runs = tmp_path / "runs"
    reads, roots = [str(tmp_path / "data.jsonl")], [str(runs)]
    wanted = host(runs / "ada/r", reads=reads, output_roots=roots, max_restarts=0)
    sink = Sink()
    actor = process(wanted, sink, "cat", *reads)
    await asyncio.wait_for(actor.run(), PATIENCE_S)
    assert actor.status.state == "failed"
    assert f"leads to {tmp_path / to}, which is not a dataset" in actor.status.error


class Replaced:
    """A data file, in whose place, or that of its folder, a link to another user's appears."""

    def __init__(self, folder: Path, *, whole_folder: bool) -> None:
        folder.chmod(0o755)
        own, secret = folder / "data", folder / "runs/bob/r"
        for place, text in ((own, "own"), (secret, "secret")):
            place.mkdir(parents=True)
            (place / "rows.jsonl").write_text(text)
            (place / "rows.jsonl").chmod(0o644)
        self.file = own / "rows.jsonl"
        self._changed = own if whole_folder else self.file
        self._target = secret if whole_folder else secret / "rows.jsonl"

    @property
    def is_link(self) -> bool:
        return self._changed.is_symlink()

    def replace(self) -> None:
        if not self.is_link:
            self._changed.rename(self._changed.with_name("before"))
            self._changed.symlink_to(self._target)


@pytest.mark.parametrize("whole_folder", [False, True])
@pytest.mark.parametrize("after", ["realpath", "command_line"])
async def test_a_data_file_that_a_link_replaces_after_the_check_shows_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: str, whole_folder: bool
) -> None:
    data = Replaced(tmp_path, whole_folder=whole_folder)
    module = os.path if after == "realpath" else bubblewrap
    first = getattr(module, after)

    def then_replaced(of: object, **options: object) -> object:
        result = first(of, **options)
        if after == "command_line" or str(of) == str(data.file):
            data.replace()
        return result

    monkeypatch.setattr(module, after, then_replaced)
    reads, roots = [str(data.file)], [str(tmp_path / "runs")]
    wanted = host(tmp_path / "runs/ada/r", reads=reads, output_roots=roots, max_restarts=0)
    sink = Sink()
    actor = process(wanted, sink, "cat", *reads)
    await asyncio.wait_for(actor.run(), PATIENCE_S)
    assert data.is_link
    if after == "realpath":
        assert actor.status.state == "failed"
        assert "a part of its path has become a link" in actor.status.error
    else:  # what was opened is mounted
        assert sink.lines == ["own"]


def test_a_program_of_a_game_is_shown_what_was_open_when_it_was_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o755)
    shown, secret = tmp_path / "shown", tmp_path / "secret"
    for folder in (shown, secret):
        folder.mkdir()
        (folder / "file").write_text(folder.name)

    def checked(name: str, real: Path) -> None:
        assert (name, real) == (str(shown), shown)
        shown.rename(tmp_path / "before")
        shown.symlink_to(secret)

    output = tmp_path / "output"
    settings = PipedSettings(command=["cat", str(shown / "file")], read=[str(shown)])
    with output.open("wb") as out:
        program = LocalPipedProgram(settings, out.fileno(), out.fileno(), may_read=checked)
        assert program.end(PATIENCE_S) == "exited with code 0"
    assert output.read_text() == "shown"


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
    actor = process(host(tmp_path), sink, "sh", "-c", f"setsid sleep {_LONG} & sleep {_LONG}")
    running = asyncio.create_task(actor.run())
    await until(lambda: len(sleepers()) == 2, "the program")
    left = sleepers()
    assert actor.status.pid is not None
    actor.stop(kill=True)
    await asyncio.wait_for(running, PATIENCE_S)
    assert actor.status.exit_code == -signal.SIGKILL
    await until(lambda: not [pid for pid in left if alive(pid)], "the end of its processes")


_LONG = 10**6 + os.getpid()
"""Seconds that nobody else on this machine sleeps for."""


def sleepers() -> list[int]:
    found: list[int] = []
    for one in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if one.read_bytes() == b"sleep\0%d\0" % _LONG:
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
async def test_where_there_can_be_no_sandbox_no_game_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, said: str
) -> None:
    monkeypatch.setenv(variable, value.format(tmp=tmp_path))
    sink = Sink()
    actor = process(host(tmp_path / "runs/ada/r", max_restarts=0), sink, "true")
    await asyncio.wait_for(actor.run(), PATIENCE_S)
    assert actor.status.state == "failed"
    assert said.format(tmp=tmp_path) in actor.status.error


async def test_an_actor_does_not_start_in_a_sandbox_that_does_not_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", path_without(tmp_path, "--seccomp", 2))
    wanted = host(tmp_path / "runs")
    with pytest.raises(OSError, match=r"the sandbox does not hold: .*calls are not filtered"):
        await SandboxStarter().start(["true"], wanted, {}, 1)


def test_programs_of_users_are_shown_their_own_runs_and_what_the_operator_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("runs/ada/r1/made", "runs/bob/r2", "agents/coder", "elsewhere"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "runs/ada/r1/link").symlink_to(tmp_path / "runs/bob/r2")
    monkeypatch.setenv(FOLDERS_VARIABLE, str(tmp_path / "agents"))
    shown = {
        "runs/ada/r1/made": True,
        "agents/coder": True,
        sys.prefix: True,
        "runs/bob/r2": False,
        "runs/ada/r1/link": False,
        "runs": False,
        "elsewhere": False,
        "/etc": False,
        "agents/../elsewhere": False,
    }
    for folder, may in shown.items():
        wanted = host(
            tmp_path / "runs/ada/r3",
            output_roots=[str(tmp_path / "runs")],
            programs=[str(tmp_path / folder)],
        )
        if may:
            check_programs(wanted)
            continue
        with pytest.raises(
            SandboxError, match="agent programs of user 'ada' may not be shown"
        ) as no:
            check_programs(wanted)
        assert FOLDERS_VARIABLE in no.value.hint
