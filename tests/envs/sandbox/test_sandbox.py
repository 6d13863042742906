"""What well-meant programs find in a sandbox, what is kept, and the self-test."""

import contextlib
import gc
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tinkermq.envs.sandbox import bubblewrap
from tinkermq.envs.sandbox.interpreters import (
    MAX_CODE_BYTES,
    LocalCodeSandbox,
    Outcome,
    SandboxSettings,
    code_sandbox,
)
from tinkermq.envs.sandbox.sandbox import descendants, filesystem, num_files
from tinkermq.envs.sandbox.self_test import check_answer, prove
from tinkermq.envs.sandbox.served import listen_at, shared_sandbox
from tinkermq.schemas.wire.errors import ConfigError, SandboxError

from tests.envs.sandbox.conftest import LIMITS, num_open_files
from tests.support.altered_bubblewrap import path_without
from tests.support.processes import Below
from tests.support.waiting import PATIENCE_S


@pytest.mark.parametrize(
    ("code", "text", "status"),
    [
        ("print(2)\n3", "2\n3\n", "ok"),
        ("x = 1", "", "ok"),
        ("'é'", "é\n", "ok"),
        ("None", "", "ok"),
        ("exit()", "", "ok"),
        ("import sys; print(1, file=sys.stderr); sys.exit(2)", "1\n", "error"),
        ("def f(:", '  File "<program 1>", line 1\n', "error"),
        ("\n1/0", '  File "<program 1>", line 2, in <module>\n    1/0\n', "error"),
        ("#" * (MAX_CODE_BYTES + 1), "the program is longer than 60000 bytes", "error"),
        ("import multiprocessing, json, fractions, decimal, random, itertools; 1", "1\n", "ok"),
    ],
)
def test_a_program_runs_as_the_cell_of_a_notebook(run, code, text, status):
    outcome = run(code)
    assert text in outcome.text
    assert outcome.status == status


def test_packages_are_there_with_what_they_need_and_nothing_else_is():
    sandbox = LocalCodeSandbox(SandboxSettings(packages=["sympy"]))
    code = "import sympy, os; sympy.sqrt(8), sorted(os.listdir('/packages'))"
    with contextlib.closing(sandbox.session()) as session:
        outcome = session.run(code)
    assert outcome.text.startswith("(2*sqrt(2), [")
    assert "mpmath" in outcome.text
    assert "torch" not in outcome.text


def test_a_session_keeps_variables_and_files_and_nothing_runs_meanwhile(sandbox):
    with contextlib.closing(sandbox.session()) as session:
        below = Below()
        session.run("import os, threading\nx = 3; open('file', 'w').write('kept')")
        spin = "if not os.fork():\n  while True: pass\n"
        count = "n = [0]\ndef up():\n  while True: n[0] += 1\n"
        session.run(f"{spin}{count}threading.Thread(target=up, daemon=True).start()")
        before = session.run("before = n[0]; x, open('file').read()")
        assert before.text == "(3, 'kept')\n"
        deadline = time.monotonic() + PATIENCE_S
        while "R" in _states(below.pids()):
            assert time.monotonic() < deadline, "something runs between two programs"
        assert session.run("x += 1; x").text == "4\n"


def _states(pids):
    """Return the states of processes that have not ended, by the kernel's letters."""
    states = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            states.add(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0])
    return states


def test_a_program_that_was_stopped_takes_its_state_with_it_and_the_next_begins_anew(sandbox):
    with contextlib.closing(sandbox.session()) as session:
        session.run("x = 3")
        assert session.run("while True: pass", 0.2).lost_state
        assert "NameError" in session.run("x").text


def test_a_session_that_is_forgotten_ends(sandbox):
    session = sandbox.session()
    session.run("1")
    assert len(set(descendants(os.getpid()))) > 1
    del session
    gc.collect()  # the fixture sees that nothing is left


def test_a_session_outlives_the_thread_that_began_it(sandbox):
    session = sandbox.session()
    beginning = threading.Thread(target=session.run, args=("x = 3",))
    beginning.start()
    beginning.join()
    assert session.run("x").text == "3\n"
    session.close()


def test_programs_of_many_threads_run_side_by_side(sandbox):
    outcomes: list[Outcome] = []

    def run_one(number: int) -> None:
        with contextlib.closing(sandbox.session()) as session:
            outcomes.append(session.run(f"import time; time.sleep(0.5); {number}"))

    threads = [threading.Thread(target=run_one, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    most = 0
    while any(thread.is_alive() for thread in threads):
        most = max(most, _num_started())
        time.sleep(0.01)
    assert sorted(outcome.text for outcome in outcomes) == [f"{n}\n" for n in range(8)]
    assert most >= LIMITS["at_once"]


def _num_started():
    """Return how many sandboxes this process has started that have not ended."""
    pids: list[str] = []
    for children in Path(f"/proc/{os.getpid()}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has just ended
            pids += children.read_text().split()
    num_started = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            num_started += Path(f"/proc/{pid}/comm").read_text() == "bwrap\n"
    return num_started


def test_more_sessions_than_allowed_are_refused():
    limits = {**LIMITS, "keep_state": True, "max_sessions": 1}
    sandbox = LocalCodeSandbox(SandboxSettings(packages=[], **limits))
    with contextlib.closing(sandbox.session()) as first:
        first.run("1")
        with pytest.raises(SandboxError, match=r"max_sessions") as refused:
            sandbox.session().run("1")
    assert "raise env.kwargs.sandbox.max_sessions" in refused.value.hint
    with contextlib.closing(sandbox.session()) as second:
        assert second.run("1").status == "ok"


def test_a_machine_without_bubblewrap_is_refused_with_the_remedy(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError, match="bubblewrap is not installed here") as refused:
        LocalCodeSandbox(SandboxSettings(packages=[]))
    assert "apt-get install bubblewrap" in refused.value.hint


@pytest.mark.parametrize(
    ("script", "words", "remedy"),
    [
        (
            "echo 'bwrap: Creating new namespace failed: Operation not permitted' >&2; exit 1",
            "Creating new namespace failed",
            "kernel.unprivileged_userns_clone=1",
        ),
        ("exit 1", "it ended without output", "as the user of the environment host"),
        (
            'exec {bwrap} --ro-bind /etc /etc "$@"',
            "it shows files of the host",
            "no program is run here",
        ),
    ],
)
def test_a_sandbox_that_does_not_enclose_is_refused(monkeypatch, tmp_path, script, words, remedy):
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\n" + script.replace("{bwrap}", str(shutil.which("bwrap"))))
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(SandboxError, match=words) as refused:
        LocalCodeSandbox(SandboxSettings(packages=[], **LIMITS)).self_test()
    assert remedy in refused.value.hint


@pytest.mark.parametrize(
    ("option", "said", "told"),
    [
        ("--hostname", "Can't set hostname to sandbox", "without hostname"),
        ("--proc", "Can't mount proc on /newroot/proc", "without proc"),
    ],
)
def test_what_programs_can_do_without_may_be_refused(monkeypatch, tmp_path, option, said, told):
    fake = tmp_path / "bwrap"
    real = shutil.which("bwrap")
    fake.write_text(
        f'#!/bin/sh\ncase " $* " in *" {option} "*) echo "bwrap: {said}: no" >&2; exit 1;; esac\n'
        f'exec {real} "$@"\n'
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    sandbox = LocalCodeSandbox(SandboxSettings(packages=[], **LIMITS))
    assert told in sandbox.self_test()
    with contextlib.closing(sandbox.session()) as session:
        assert session.run("6 * 7").text == "42\n"


@pytest.mark.parametrize(
    ("option", "number", "words"),
    [
        ("--unshare-net", 1, "it reaches a network"),
        ("--unshare-pid", 1, "it shows processes of the host"),
        ("--seccomp", 2, "system calls are not filtered"),
        ("--size", 2, "its disk is not limited"),
    ],
)
def test_the_self_test_finds_what_bubblewrap_does_not_do(
    monkeypatch, tmp_path, option, number, words
):
    settings = SandboxSettings(packages=[], **LIMITS)
    sandbox = replace(code_sandbox(settings), has_internet_sockets=True)
    prove(sandbox)
    monkeypatch.setenv("PATH", path_without(tmp_path, option, number))
    with pytest.raises(SandboxError, match=words):
        prove(sandbox)


def test_nothing_runs_if_whoever_starts_a_sandbox_ends_before_it_has_given_orders():
    ours, theirs = socket.socketpair()
    with theirs:
        words = [sys.executable, "-c", bubblewrap._INSIDE, str(theirs.fileno())]
        inside = subprocess.Popen(words, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE)
    with ours:
        assert ours.recv(1) == b"R"
    assert b"started the sandbox has ended" in inside.communicate(timeout=PATIENCE_S)[1]
    assert inside.returncode == 1


def test_the_answer_of_the_self_test_names_each_wall_that_is_missing():
    with pytest.raises(SandboxError, match="it reaches a network"):
        check_answer('[["it reaches a network"], []]')


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"memory": 1}, "env.kwargs.sandbox.memory"),
        ({"time_s": 0}, "env.kwargs.sandbox.time_s"),
        ({"backend": "chroot"}, "bubblewrap"),
        ({"max_sessions": 3}, "max_sessions has no effect while keep_state is False"),
    ],
)
def test_settings_that_cannot_be_used_are_named(values, words):
    with pytest.raises(ConfigError, match=words):
        SandboxSettings.parse(values)


def test_a_package_that_is_not_installed_is_named():
    with pytest.raises(ConfigError, match="'left-pad' of the sandbox is not installed"):
        shared_sandbox(SandboxSettings(packages=["left-pad"]))


ALONE = """
import threading
from tinkermq.envs.sandbox.interpreters import LocalCodeSandbox, SandboxSettings
session = LocalCodeSandbox(SandboxSettings(packages=[])).session()
session.run("x = 1")
print("started", flush=True)
session.run("import os\\nos.fork()\\nwhile True: pass")
"""


def test_when_the_host_is_killed_its_programs_are_gone():
    with subprocess.Popen([sys.executable, "-c", ALONE], stdout=subprocess.PIPE) as host:
        assert host.stdout is not None
        assert host.stdout.readline() == b"started\n"
        below = set(descendants(host.pid)) - {host.pid}
        assert len(below) >= 3  # bubblewrap, the first process, the interpreter
        host.kill()
    deadline = time.monotonic() + PATIENCE_S
    while any(True for pid in below for _ in descendants(pid)):
        assert time.monotonic() < deadline, "a program outlives its host"
        time.sleep(0.01)


@pytest.mark.parametrize("length", [40, 106, 107, 108, 109, 250, 1000, 3000])
def test_a_socket_can_lie_in_a_folder_with_a_name_of_any_length(length: int) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as made:
        folder = Path(made)
        while (left := length - len(f"{folder}/socket")) > 1:
            folder /= "x" * min(left - 1, 200) if left != 202 else "x" * 100
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "socket"
        with listen_at(path) as listening, socket.socket(socket.AF_UNIX) as asking:
            assert path.is_socket()
            place = os.open(folder, os.O_PATH)
            asking.connect(f"/proc/self/fd/{place}/socket")
            os.close(place)
            listening.accept()[0].close()


@pytest.mark.parametrize("name", ["spaces in it " * 12, "é" * 100, "日本" * 40, "line\nbreak" * 12])
def test_a_socket_can_lie_in_a_folder_with_any_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    listen_at(tmp_path / name / "socket").close()
    assert (tmp_path / name / "socket").is_socket()


@pytest.mark.parametrize("place", ["{tmp}/nowhere/socket", "{tmp}/{long}/socket", "/proc/socket"])
def test_where_there_can_be_no_socket_the_remedy_is_told(tmp_path: Path, place: str) -> None:
    path = Path(place.format(tmp=tmp_path, long="x" * 200))
    before = num_open_files()
    with pytest.raises(OSError, match=r"no socket .* set TMPDIR to a short folder"):
        listen_at(path)
    assert num_open_files() <= before


# -- What a sandbox is charged with is its own, also while it is still being made ------------------


def test_a_process_among_our_own_folders_is_charged_with_none_of_their_files() -> None:
    assert os.statvfs("/tmp").f_files > os.statvfs("/tmp").f_ffree
    assert filesystem(os.getpid(), "tmp") is None
    assert num_files(os.getpid()) == 0


def test_the_files_of_a_sandbox_are_counted(sandbox) -> None:
    with contextlib.closing(sandbox.session()) as session:
        assert session.run("for n in range(300): open(f'{n}', 'w')").status == "ok"
        assert max(num_files(one) for one in descendants(os.getpid())) >= 300
