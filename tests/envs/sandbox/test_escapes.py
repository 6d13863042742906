"""What no program in a sandbox can do, whatever the sandbox is used for.

Each test runs the same tries as code of a model, as an agent program, as a hosted game and as a
learner with functions of a user. What only one use has is tested beside that use.
"""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tinkermq.actors.node.sandbox import SandboxStarter
from tinkermq.envs.sandbox.interpreters import LocalCodeSandbox, SandboxSettings
from tinkermq.schemas.node import WantedActor

from tests.envs.agents.programs.conftest import hosting
from tests.envs.sandbox.conftest import LIMITS
from tests.support import hostile, hostile_learner
from tests.support.waiting import PATIENCE_S

RunPython = Callable[[str, Path], Awaitable[str]]
"""Runs a program that writes its answer to standard output; returns what it wrote."""


async def as_code(source: str, folder: Path) -> str:
    """Run a program as code of a model."""
    sandbox = LocalCodeSandbox(SandboxSettings(packages=[], **LIMITS))
    with contextlib.closing(sandbox.session()) as session:
        return (await asyncio.to_thread(session.run, source)).text


async def as_program(source: str, folder: Path, network: str = "model") -> str:
    """Run a program as an agent program."""
    files = folder / "files"
    files.mkdir(exist_ok=True)
    (files / "tries.py").write_text(source)
    ending = "ask(); post('/reward', reward=0)\nexec(open('tries.py').read(), {})"
    async with hosting(
        ending, private=(folder / "runs",), files=str(files), network=network
    ) as host:
        return (await host.play()).info["output"]


async def as_open_program(source: str, folder: Path) -> str:
    """Run a program as an agent program with `agent.network: open`."""
    return await as_program(source, folder, "open")


async def as_actor(source: str, folder: Path, **fields: Any) -> str:
    """Run a program as an actor of a node whose run lies in `folder`."""
    run = folder / "runs/ada/r"
    run.mkdir(parents=True, exist_ok=True)
    about = {"user": "ada", "job": "j1", "name": "a", "run_dir": str(run), **fields}
    reading, writing = os.pipe()
    try:
        child = await SandboxStarter().start(
            [sys.executable, "-S", "-c", source], WantedActor.model_validate(about), {}, writing
        )
    finally:
        os.close(writing)
    with os.fdopen(reading) as output:
        text = await asyncio.wait_for(asyncio.to_thread(output.read), PATIENCE_S)
    assert await asyncio.wait_for(child.wait(), PATIENCE_S) == 0, text
    return text


async def as_game(source: str, folder: Path) -> str:
    """Run a program as a hosted game."""
    return await as_actor(source, folder, role="environment")


async def as_learner(source: str, folder: Path) -> str:
    """Run a program as a learner with functions of a user."""
    return await as_actor(source, folder, role="learner", own_code=[])


USES: dict[str, RunPython] = {
    "code": as_code,
    "program": as_program,
    "open program": as_open_program,
    "game": as_game,
    "learner": as_learner,
}
PYTHON = os.path.realpath(sys.executable)
WITHOUT_NETWORK = ["code", "program", "learner"]
IS_ROOT = os.getuid() == 0


async def answer(use: str, source: str, folder: Path) -> Any:
    """Run a program in the sandbox of a use and return its last line, which is JSON."""
    text = await USES[use](source, folder)
    lines = text.splitlines()
    assert lines, "it said nothing"
    try:
        return json.loads(lines[-1])
    except ValueError:
        pytest.fail(text)


def library(module: ModuleType) -> str:
    """Return the source of a module of the tests, without what it does when it is run."""
    assert module.__file__ is not None
    return Path(module.__file__).read_text().replace('if __name__ == "__main__":', "if False:")


@pytest.mark.parametrize("use", USES)
async def test_no_try_changes_the_machine(use: str, tmp_path: Path) -> None:
    assert hostile.count() > 0, "the tries fail without a sandbox, too"
    source = f"{library(hostile)}\nprint(json.dumps(successes()))"
    # a learner is the node's user in a namespace of its own, and gains nothing by the number
    allowed = ["become root"] if use == "learner" and IS_ROOT else []
    assert await answer(use, source, tmp_path) == allowed


@contextlib.contextmanager
def around(folder: Path) -> Iterator[hostile_learner.Outside]:
    """What lies and runs outside: a secret, a process, a socket that listens."""
    (folder / "home").mkdir()
    (folder / "home/key").write_text("secret")
    abstract = f"tinkermq-test-{os.getpid()}"
    with socket.socket() as port, socket.socket(socket.AF_UNIX) as named:
        for one, address in ((port, ("127.0.0.1", 0)), (named, f"\0{abstract}")):
            one.bind(address)
            one.listen()
        outsider = subprocess.Popen(
            ["sleep", "600"], env={**os.environ, "SAID": hostile_learner.MARKER}
        )
        try:
            secret = str(folder / "home/key")
            yield hostile_learner.Outside(
                *("/tmp", secret, secret, secret, outsider.pid),
                *(port.getsockname()[1], 9, abstract, secret),
            )
        finally:
            outsider.kill()
            outsider.wait()


@pytest.mark.parametrize("use", USES)
async def test_no_system_call_device_or_namespace_leads_out(use: str, tmp_path: Path) -> None:
    with around(tmp_path) as outside:
        calls = f"inner_successes(Outside(*json.loads({json.dumps(outside)!r})))"
        source = f"{library(hostile_learner)}\nprint(json.dumps({calls}))"
        came_off = await answer(use, source, tmp_path)
    network = () if use in WITHOUT_NETWORK else ("reach ", "ask the DNS")
    assert [one for one in came_off if not one.startswith(network or "-")] == []


RIGHTS = """
import json, os
told = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
names = ("CapInh", "CapPrm", "CapEff", "CapAmb", "CapBnd", "NoNewPrivs", "Seccomp", "Groups")
print(json.dumps([*(told[name].strip() for name in names), os.getuid()]))
"""


@pytest.mark.parametrize("use", USES)
async def test_a_program_has_no_rights_and_cannot_gain_any(use: str, tmp_path: Path) -> None:
    *rights, bound, no_new, seccomp, groups, user = await answer(use, RIGHTS, tmp_path)
    again = await answer(use, RIGHTS, tmp_path)
    none = "0" * 16
    assert (rights, no_new, seccomp) == ([none] * 4, "1", "2")
    if IS_ROOT:
        assert (bound, groups) == (none, "")
    if use == "learner":
        assert user == os.getuid()
    else:
        assert user not in (0, again[-1]) if IS_ROOT else user == 65534


DESCRIPTORS = """
import json, os, stat
found = []
for file in range(3, 4096):
    try:
        kind = os.fstat(file).st_mode
    except OSError:
        continue
    if not stat.S_ISFIFO(kind):
        found.append(file)
for file in range(4096):
    try:
        os.stat("../" * 32 + SECRET, dir_fd=file)
        found.append(-file)
    except OSError:
        pass
for process in ("1", str(os.getppid())):
    try:
        held = os.listdir(f"/proc/{process}/fd")
    except OSError:
        continue
    for file in held:
        try:
            os.stat(f"/proc/{process}/fd/{file}/" + "../" * 32 + SECRET)
            found.append(f"{process}: {file}")
        except OSError:
            pass
print(json.dumps(found))
"""


@pytest.mark.parametrize("use", USES)
async def test_a_program_finds_no_open_file_of_the_host(use: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    with secret.open() as held, socket.socket() as other:
        os.set_inheritable(held.fileno(), True)
        os.set_inheritable(other.fileno(), True)
        source = f"SECRET = {str(secret).lstrip('/')!r}\n{DESCRIPTORS}"
        assert await answer(use, source, tmp_path) == []


SEEN = """
import json, os

def read(path):
    try:
        return open(path, "rb").read().decode(errors="replace")
    except OSError:
        return ""

def write(path):
    try:
        open(path, "ab").close()
    except OSError:
        return False
    return True

environments = [read(f"/proc/{one}/environ") for one in os.listdir("/proc") if one.isdigit()]
lines = [read(f"/proc/{one}/cmdline") for one in os.listdir("/proc") if one.isdigit()]
print(json.dumps([
    [one for one in environments + lines + [repr(dict(os.environ))] if "SECRET".lower() in one],
    len([one for one in os.listdir("/proc") if one.isdigit()]),
    [path for path in READ if read(path)],
    [path for path in WRITTEN if write(path)],
]))
"""


@pytest.mark.parametrize("use", USES)
async def test_a_program_sees_no_key_process_or_file_of_the_host(
    use: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_TOKEN", "TINKERMQ_API_KEY", "AWS_SECRET_ACCESS_KEY", "MY_KEY"):
        monkeypatch.setenv(name, "secret")
    (tmp_path / "key").write_text("a key")
    read = [str(tmp_path / "key"), "/etc/shadow", f"/proc/{os.getpid()}/environ"]
    written = ["/usr/x", "/usr/lib/x", "/proc/sys/vm/swappiness", "/proc/sysrq-trigger"]
    written += ["/etc/passwd", PYTHON, "/python/bin/python3", "/dev/x"]
    source = f"READ, WRITTEN = {read!r}, {written!r}\n{SEEN}"
    assert await answer(use, source, tmp_path) == [[], 2, [], []]


REACH = """
import json, socket

def reaches(family, address):
    try:
        with socket.socket(family, socket.SOCK_STREAM) as one:
            one.settimeout(5)
            one.connect(address)
    except OSError:
        return False
    return True

print(json.dumps([
    reaches(socket.AF_INET, ("127.0.0.1", PORT)),
    reaches(socket.AF_INET, (OWN, PORT)),
    reaches(socket.AF_UNIX, chr(0) + ABSTRACT),
]))
"""


@pytest.mark.parametrize("use", WITHOUT_NETWORK)
async def test_a_program_without_a_network_reaches_no_socket_of_the_host(
    use: str, tmp_path: Path
) -> None:
    with around(tmp_path) as outside:
        own = socket.gethostbyname(socket.gethostname())
        facts = f"PORT, OWN, ABSTRACT = {outside.port}, {own!r}, {outside.abstract!r}\n"
        assert await answer(use, facts + REACH, tmp_path) == [False] * 3


LEFT = """
import os, time
if not os.fork():
    os.setsid()
    if not os.fork():
        os.execv(PYTHON, [PYTHON, "-S", "-c", "import time; time.sleep(4218)"])
    os._exit(0)
time.sleep(0.2)
print(1)
"""


@pytest.mark.parametrize("use", USES)
async def test_nothing_that_a_program_leaves_running_outlives_it(use: str, tmp_path: Path) -> None:
    python = "/python/bin/python3" if use == "code" else PYTHON
    assert await answer(use, f"PYTHON = {python!r}\n{LEFT}", tmp_path) == 1
    assert sleepers() == []


def sleepers() -> list[Path]:
    """Return the processes that the tests left running."""
    return [one for one in Path("/proc").glob("[0-9]*/cmdline") if b"sleep(4218)" in _read(one)]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
