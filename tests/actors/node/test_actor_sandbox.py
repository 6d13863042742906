"""The sandbox of hosted games and of learners with functions of users: what it shows, its end."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
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
from tinkermq.actors.storage.access import MODELS_VARIABLE
from tinkermq.envs.sandbox.sandbox import first_child
from tinkermq.schemas.node import WantedActor
from tinkermq.schemas.wire.errors import SandboxError

from tests.support import hostile, hostile_learner
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


def learner(run_dir: Path, *reads: Path) -> WantedActor:
    """A learner that runs functions of its job's owner."""
    return host(run_dir, name="learner", role="learner", own_code=[str(one) for one in reads])


async def test_a_learner_with_code_of_its_owner_sees_its_run_and_models_and_writes_its_run_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "the operator's")
    files = ["models/m/weights", "runs/bob/r/rollouts", "runs/ada/other/own", "runs/ada/r/own"]
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    run = tmp_path / "runs/ada/r"
    paths = [*(str(tmp_path / name) for name in files), "/etc/shadow"]
    sink = Sink()
    look = LOOK.replace('"/tmp/x"', f'"/tmp/x", "{run}/new", "{tmp_path}/models/m/new"')
    wanted = learner(run, tmp_path / "models/m")
    actor = process(wanted, sink, sys.executable, "-c", look, *paths)
    await asyncio.wait_for(actor.run(), PATIENCE_S)
    assert actor.status.exit_code == 0, sink.lines
    seen = json.loads(sink.lines[-1])
    assert seen["read"] == ["models/m/weights", None, None, "runs/ada/r/own", None]
    assert seen["writes"] == [False, False, True, True, False]
    assert (run / "new").stat().st_uid == os.getuid()
    assert not {"AWS_SECRET_ACCESS_KEY", "HF_TOKEN"} & set(seen["environ"])


async def test_actors_start_at_home_where_the_folder_of_their_node_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    (tmp_path / "runs/ada/r").mkdir(parents=True)
    monkeypatch.chdir(gone)
    gone.rmdir()
    tell = (sys.executable, "-c", "import os; print(os.getcwd())")
    run_dir, names = tmp_path / "runs/ada/r", [Path("data.jsonl")]
    for wanted in (host(run_dir, reads=["data.jsonl"]), learner(run_dir, *names)):
        sink = Sink()
        actor = process(wanted, sink, *tell)
        await asyncio.wait_for(actor.run(), PATIENCE_S)
        assert sink.lines[-1:] == [str(Path.home())]


@pytest.mark.parametrize("named", ["link", "secrets", "runs/bob/r", "runs/ada/r/m", "runs", ""])
async def test_a_learner_with_code_of_its_owner_is_shown_what_it_may_read_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    for name in ("models/m", "secrets", "runs/bob/r", "runs/ada/r"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "runs/bob/r")
    (tmp_path / "runs/ada/r/m").symlink_to(tmp_path / "secrets")
    monkeypatch.setenv(MODELS_VARIABLE, str(tmp_path / "models"))
    roots = {"output_roots": [str(tmp_path / "runs")]}
    wanted = learner(tmp_path / "runs/ada/r", tmp_path / named).model_copy(update=roots)
    with pytest.raises(OSError, match=r"functions of user 'ada' may not be shown .*MODEL_FOLDERS"):
        await SandboxStarter().start(["true"], wanted, {}, 1)
    allowed = learner(tmp_path / "runs/ada/r", tmp_path / "models/m").model_copy(update=roots)
    assert await (await SandboxStarter().start(["true"], allowed, {}, 1)).wait() == 0


@pytest.mark.parametrize("place", ["fork", "adapters", "models", "."])
async def test_a_run_folder_that_leads_elsewhere_is_not_shown(tmp_path: Path, place: str) -> None:
    (tmp_path / "secrets").mkdir()
    run = tmp_path / "run"
    if place != ".":
        run.mkdir()
    (run / place).symlink_to(tmp_path / "secrets")
    with pytest.raises(OSError, match="cannot be shown to functions of its owner"):
        await SandboxStarter().start(["true"], learner(run), {}, 1)


async def test_a_learner_with_code_of_its_owner_changes_no_copy_that_others_read(
    tmp_path: Path,
) -> None:
    (tmp_path / "run/fork").mkdir(parents=True)
    (tmp_path / "run/fork/weights").write_text("others read them")
    code = f"""
import os
for attempt in (lambda: open("{tmp_path}/run/fork/weights", "w"),
                lambda: os.rename("{tmp_path}/run/fork", "{tmp_path}/run/gone")):
    try:
        attempt()
    except OSError:
        continue
    raise SystemExit(7)
"""
    actor = process(learner(tmp_path / "run"), Sink(), sys.executable, "-c", code)
    await asyncio.wait_for(actor.run(), PATIENCE_S)
    assert actor.status.exit_code == 0
    assert (tmp_path / "run/fork/weights").read_text() == "others read them"


async def test_the_keys_of_a_job_stand_in_the_environment_of_its_program_alone(
    tmp_path: Path,
) -> None:
    (tmp_path / "run").mkdir()
    told = ["sh", "-c", 'test -n "$TINKERMQ_CREDENTIALS" && exec sleep 60']
    keys = {"TINKERMQ_CREDENTIALS": "the-key"}
    child = await SandboxStarter().start(told, learner(tmp_path / "run"), keys, 1)
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


@contextlib.contextmanager
def surroundings(folder: Path) -> Iterator[hostile_learner.Outside]:
    """What lies and runs around the sandbox of a learner, for it to reach for."""
    places = ("runs/ada/r/fork/weights", "runs/bob/r/config.json", "home/secrets/key", "m/weights")
    for name in places:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("secret")
    run, other, secret, model = (str(folder / name) for name in places)
    abstract, named = f"tinkermq-test-{os.getpid()}", f"{Path(secret).parent}/s"
    with contextlib.ExitStack() as stack:
        listening = [stack.enter_context(socket.socket(one)) for one in (socket.AF_INET, 1, 1)]
        for one, address in zip(listening, (("0.0.0.0", 0), f"\0{abstract}", named), strict=True):
            one.bind(address)
            one.listen(64)
        echo = stack.enter_context(socket.socket(type=socket.SOCK_DGRAM))
        echo.bind(("127.0.0.1", 0))
        answering = threading.Thread(target=lambda: echo.sendto(b"!", echo.recvfrom(1)[1]))
        answering.daemon = True
        answering.start()
        outsider = subprocess.Popen(
            ["sh", "-c", "sleep 600 # " + hostile_learner.MARKER],
            env={**os.environ, "SAID": hostile_learner.MARKER},
            start_new_session=True,
        )
        try:
            yield hostile_learner.Outside(
                *(str(Path(run).parents[1]), other, secret, model, outsider.pid),
                *(listening[0].getsockname()[1], echo.getsockname()[1], abstract, named),
            )
        finally:
            os.killpg(outsider.pid, signal.SIGKILL)
            outsider.wait()


async def test_nothing_that_functions_in_a_learner_try_leads_out_of_their_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_API_KEY", "MLFLOW_TRACKING_URI", "https_proxy"):
        monkeypatch.setenv(name, "https://me:secret@tracker")
    with surroundings(tmp_path) as outside:
        words = [sys.executable, "-c", source_of(hostile_learner), json.dumps(outside)]
        without = await asyncio.to_thread(
            subprocess.run, [*words, "no sandbox"], capture_output=True, check=True
        )
        assert len(json.loads(without.stdout)) > 30, "the tries fail without a sandbox, too"
        wanted = learner(Path(outside.run), Path(outside.model))
        sink = Sink()
        actor = process(wanted, sink, *words)
        await asyncio.wait_for(actor.run(), PATIENCE_S)
    assert actor.status.exit_code == 0, sink.lines
    assert json.loads(sink.lines[-1]) == []
    assert await asyncio.to_thread(untouched, outside)


def untouched(outside: hostile_learner.Outside) -> bool:
    """Whether what is outside of a run is as it was made."""
    places = [Path(one) for one in (outside.other, outside.secrets, outside.model)]
    inside = [one.name for place in places for one in place.parent.iterdir()]
    return {one.read_text() for one in places} == {"secret"} and len(inside) == len(places) + 1


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


@pytest.mark.parametrize("role", ["environment", "learner"])
async def test_an_actor_does_not_start_in_a_sandbox_that_does_not_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    monkeypatch.setenv("PATH", path_without(tmp_path, "--seccomp", 2))
    wanted = learner(tmp_path / "runs/ada/r") if role == "learner" else host(tmp_path / "runs")
    (tmp_path / "runs/ada/r").mkdir(parents=True)
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
