"""What no program in a sandbox can do, and how hostile ones end.

Each test of the first part runs the same tries as code of a model, as an agent program, as a
hosted game and as a function of a user that a learner calls. What only one use has is tested beside
it.
"""

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
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
from tests.support import hostile, hostile_functions
from tests.support.functions import run_in_function
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


async def as_function(source: str, folder: Path) -> str:
    """Run a program as a function of a user that a learner calls."""
    return await asyncio.to_thread(run_in_function, source, folder)


USES: dict[str, RunPython] = {
    "code": as_code,
    "program": as_program,
    "open program": as_open_program,
    "game": as_game,
    "function": as_function,
}
PYTHON = os.path.realpath(sys.executable)
WITHOUT_NETWORK = ["code", "program", "function"]
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


@pytest.mark.parametrize(
    "use", [use if use == "program" else pytest.param(use, marks=pytest.mark.full) for use in USES]
)
async def test_no_try_changes_the_machine(use: str, tmp_path: Path) -> None:
    assert hostile.count() > 0, "the tries fail without a sandbox, too"
    source = f"{library(hostile)}\nprint(json.dumps(successes()))"
    assert await answer(use, source, tmp_path) == []


@contextlib.contextmanager
def around(folder: Path) -> Iterator[hostile_functions.Outside]:
    """What lies and runs outside: a secret, a process, a socket that listens."""
    (folder / "home").mkdir()
    (folder / "home/key").write_text("secret")
    abstract = f"tinkermq-test-{os.getpid()}"
    with socket.socket() as port, socket.socket(socket.AF_UNIX) as named:
        for one, address in ((port, ("127.0.0.1", 0)), (named, f"\0{abstract}")):
            one.bind(address)
            one.listen()
        outsider = subprocess.Popen(
            ["sleep", "600"], env={**os.environ, "SAID": hostile_functions.MARKER}
        )
        try:
            secret = str(folder / "home/key")
            yield hostile_functions.Outside(
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
        source = f"{library(hostile_functions)}\nimport json\nprint(json.dumps({calls}))"
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
        found = await answer(use, source, tmp_path)
    if use == "function":  # the socket of its calls
        assert [one > 2 for one in found] == [True]
    else:
        assert found == []


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


SLEEP = f"sleep(4218{os.getpid()})"
"""As no program of another run of the tests on this machine sleeps."""
LEFT = f"""
import os, time
if not os.fork():
    os.setsid()
    if not os.fork():
        os.execv(PYTHON, [PYTHON, "-S", "-c", "import time; time.{SLEEP}"])
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
    found = Path("/proc").glob("[0-9]*/cmdline")
    return [one for one in found if SLEEP.encode() in _read(one)]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


TRIES = """
import json
_told.append(Outside(*json.loads(sys.argv[1])))
print(json.dumps(successes(inside=False)))
"""


@contextlib.contextmanager
def surroundings(folder: Path) -> Iterator[hostile_functions.Outside]:
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
            ["sh", "-c", "sleep 600 # " + hostile_functions.MARKER],
            env={**os.environ, "SAID": hostile_functions.MARKER},
            start_new_session=True,
        )
        try:
            yield hostile_functions.Outside(
                *(str(Path(run).parents[1]), other, secret, model, outsider.pid),
                *(listening[0].getsockname()[1], echo.getsockname()[1], abstract, named),
            )
        finally:
            os.killpg(outsider.pid, signal.SIGKILL)
            outsider.wait()


async def test_nothing_that_a_function_tries_leads_to_the_run_the_pool_or_the_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_API_KEY", "MLFLOW_TRACKING_URI", "https_proxy"):
        monkeypatch.setenv(name, "https://me:secret@tracker")
    with surroundings(tmp_path) as outside:
        source = library(hostile_functions)
        words = [sys.executable, "-c", f"{source}\n{TRIES}", json.dumps(outside)]
        without = await asyncio.to_thread(subprocess.run, words, capture_output=True, check=True)
        assert len(json.loads(without.stdout)) > 30, "the tries fail without a sandbox, too"
        given = f"import sys\nsys.argv = ['', {json.dumps(outside)!r}]"
        everything = TRIES.replace("inside=False", "inside=True")
        text = await as_function(f"{source}\n{given}\n{everything}", tmp_path)
        assert json.loads(text) == []
        assert await asyncio.to_thread(untouched, outside)


def untouched(outside: hostile_functions.Outside) -> bool:
    """Whether what is outside of a run is as it was made."""
    places = [Path(one) for one in (outside.other, outside.secrets, outside.model)]
    inside = [one.name for place in places for one in place.parent.iterdir()]
    return {one.read_text() for one in places} == {"secret"} and len(inside) == len(places) + 1


# Programs that mean harm: each is stopped, tells what it was refused, and changes nothing outside.
#
# The fixtures see that no process is left of any of them.


CTYPES = """
import ctypes
C = ctypes.CDLL(None, use_errno=True)
def call(name, *arguments):
    return getattr(C, name)(*arguments), ctypes.get_errno()
"""
FORBIDDEN = {
    "ptrace": "ptrace, 16, 1, 0, 0",
    "unshare a user namespace": "unshare, 0x10000000",
    "mount": "mount, b'none', b'/tmp', b'tmpfs', 0, None",
    "memory in a file of none": "memfd_create, b'x', 0",
    "a shared segment": "shmget, 0, 1 << 20, 0o1600",
    "a key of the kernel": "syscall, 250, 0, -3, 0",
    "a socket to the hypervisor": "socket, 40, 1, 0",
    "an internet socket": "socket, 2, 1, 0",
    "a netlink socket": "socket, 16, 3, 0",
    "a packet socket": "socket, 17, 3, 0",
}
STOPPED = {
    "sleeping": ("import time; time.sleep(1000)", "clock"),
    "spinning": ("while True: pass", "time"),
    "stopping itself": ("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", "clock"),
    "a fork bomb": (
        "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass",
        "time",
    ),
    "endless output": ("while True: print('x' * 1000)", "output"),
    "endless output to the errors": ("import os\nwhile True: os.write(2, b'x' * 1000)", "output"),
    "memory of many processes": (
        "import os, time\nfor _ in range(4):\n  if not os.fork(): break\n"
        "held = bytearray(os.urandom(1 << 20)) * 60\ntime.sleep(1000)",
        "memory",
    ),
    "many small files": (
        "import os, itertools\nfor n in itertools.count(): os.close(os.open(f'{n}', os.O_CREAT))",
        "disk",
    ),
    "ending the interpreter": ("import os; os._exit(0)", "exited"),
    "crashing the interpreter": ("import ctypes; ctypes.string_at(0)", "exited"),
    "killing all it can": (
        "import os\ntry: os.kill(-1, 9)\nexcept OSError: pass\nos.kill(os.getpid(), 9)",
        "exited",
    ),
    "forging its end": (
        "import os\nfor n in range(3, 4096):\n"
        "  try: os.write(n, b'.' * 5)\n  except OSError: pass\nwhile True: pass",
        "ok",
    ),
    "closing everything": ("import os; os.closerange(0, 4096)\nwhile True: pass", "exited"),
}
REFUSED = {
    "memory": ("held = bytearray(1 << 30)", "MemoryError"),
    "threads": (
        "import threading, time\nfor _ in range(50):\n"
        "  threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()",
        "can't start new thread",
    ),
    "processes": (
        "import os, time\nfor _ in range(50):\n  if not os.fork(): time.sleep(1000)",
        "BlockingIOError",
    ),
    "a large file": ("open('x', 'wb').write(bytes(32 << 20))", "File too large"),
    "a full disk": (
        "for n in range(4): open(f'{n}', 'wb').write(bytes(8 << 20))",
        "No space left",
    ),
    "writing the root": ("open('/x', 'w')", "Read-only|Permission"),
    "writing libraries": ("open('/usr/lib/x', 'w')", "Read-only|Permission"),
    "writing the interpreter": ("open('/python/bin/python3', 'ab')", "Read-only|Permission"),
    "reading users": ("open('/etc/passwd')", "No such file"),
    "reading the disk": ("import os; os.listdir('/home')", "No such file"),
    "starting a program": ("import subprocess; subprocess.run(['/bin/sh'])", "No such file"),
    "reading on": ("input()", "EOFError"),
    "raising its limits": (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
        "ValueError",
    ),
    "becoming root": ("import os; os.setuid(0); print(os.listdir('/proc/1/root'))", "Error"),
    "writing to the kernel": ("open('/proc/sys/kernel/core_pattern', 'w')", "Error"),
}


@pytest.mark.parametrize("name", STOPPED)
def test_what_does_not_end_by_itself_is_stopped(run, name, many_open_files):
    code, status = STOPPED[name]
    limits = {"time_s": 0.5} if status == "time" else {"clock_s": 0.5} if status == "clock" else {}
    assert run(code, **limits).status == status


def test_time_on_the_clock_is_not_taken_for_computing(run) -> None:
    """A right program on a busy machine, or one that waits, is not stopped by `time_s`."""
    outcome = run("import time; time.sleep(1.5); print(sum(range(10**6)))", time_s=1.0)
    assert (outcome.status, outcome.text) == ("ok", "499999500000\n")
    assert outcome.seconds < 1.0 < outcome.clock_s


def test_the_time_of_all_processes_counts(run) -> None:
    code = "import os\nif os.fork(): os.wait()\nelse:\n  while True: pass"
    assert run(code, time_s=0.4).status == "time"


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_over_a_limit_or_not_there_is_refused(run, name):
    code, words = REFUSED[name]
    outcome = run(code)
    assert outcome.status == "error"
    assert re.search(words, outcome.text)


def test_no_system_call_reaches_out(run):
    calls = "".join(f"print(*call({_quoted(call)}))\n" for call in FORBIDDEN.values())
    lines = run(CTYPES + calls).text.splitlines()
    assert dict(zip(FORBIDDEN, lines, strict=True)) == dict.fromkeys(FORBIDDEN, "-1 1")


def _quoted(call):
    name, _, arguments = call.partition(", ")
    return f"'{name}', {arguments}"


def test_the_host_is_not_to_be_seen(run, tmp_path, monkeypatch):
    monkeypatch.setenv("TINKERMQ_API_KEY", "secret")
    (tmp_path / "file").write_text("secret")
    outcome = run(
        "import os, sys\n"
        "print(sorted(os.listdir('/')), os.listdir('/tmp'), os.listdir('/packages'))\n"
        f"print(os.path.exists({str(tmp_path)!r}), os.path.exists({str(Path.cwd())!r}))\n"
        "print(dict(os.environ), open('/proc/self/mountinfo').read().count(' ext4 ') < 9)\n"
        "print([n for n in os.listdir('/proc') if n.isdigit()], sys.argv, os.getuid() != 0)\n"
        "print(open('/proc/net/tcp').read().count('\\n'), os.uname().nodename)\n"
    )
    assert outcome.status == "ok", outcome.text
    assert "secret" not in outcome.text
    assert "TINKERMQ" not in outcome.text
    seen, paths, _, processes, net = outcome.text.splitlines()
    folders = "['dev', 'lib', 'lib64', 'packages', 'proc', 'python', 'tmp', 'usr'] [] []"
    assert seen == folders
    assert paths == "False False"
    assert processes.startswith("['1', '2']")
    assert net == "1 sandbox"


def test_unix_sockets_of_the_host_are_out_of_reach(run, tmp_path):
    with socket.socket(socket.AF_UNIX) as named, socket.socket(socket.AF_UNIX) as abstract:
        named.bind(str(tmp_path / "socket"))
        abstract.bind(f"\0tinkermq-{os.getpid()}")
        for one in (named, abstract):
            one.listen()
            outcome = run(
                "import socket\ns = socket.socket(socket.AF_UNIX)\n"
                f"s.connect({one.getsockname()!r})"
            )
            assert "Error" in outcome.text


def test_signals_do_not_leave_the_sandbox(run):
    pids = sorted(map(int, _running()))
    outcome = run(
        f"import os\nfor pid in {pids}:\n  if pid != os.getpid():\n"
        "    try: os.kill(pid, 9)\n    except OSError: pass\nprint('tried all')"
    )
    assert outcome.text == "tried all\n"
    assert {os.getpid(), os.getppid()} <= set(map(int, _running()))


def _running():
    return [entry.name for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def test_what_it_writes_is_gone_and_takes_no_disk(run):
    kind = "[one.split()[2] for one in open('/proc/mounts') if one.split()[1] == '/tmp']"
    assert run(kind).text == "['tmpfs']\n"
    assert run("open('/tmp/here', 'wb').write(bytes(15 << 20)); print(1)").status == "ok"
    assert not Path("/tmp/here").exists()
    assert run("import os; print(os.listdir('/tmp'))").text == "[]\n"


def test_a_child_that_hides_ends_with_its_program(run):
    code = "import os, time\nif not os.fork():\n  os.setsid()\n  if not os.fork(): time.sleep(1000)"
    assert run(f"{code}\nelse: print('done')").text == "done\n"


def test_a_child_that_comes_to_the_end_of_the_code_does_not_end_its_program(sandbox):
    with contextlib.closing(sandbox.session()) as session:
        outcome = session.run(
            "import os\nchild = os.fork()\n"
            "if child: print('child:', os.waitpid(child, 0)[1])\nelse: print('forked')"
        )
        assert (outcome.status, outcome.text) == ("ok", "forked\nchild: 0\n")
        assert session.run("print(child > 0)").text == "True\n"
