"""Programs that mean harm: each is stopped, tells what it was refused, and changes nothing outside.

The fixtures see that no process is left of any of them.
"""

import contextlib
import os
import re
import socket
from pathlib import Path

import pytest

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
    "sleeping": ("import time; time.sleep(1000)", "time"),
    "spinning": ("while True: pass", "time"),
    "stopping itself": ("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", "time"),
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
        "  try: os.write(n, b'.' * 5)\n  except OSError: pass\n"
        "while True: pass",
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
    assert run(code, time_s=0.5 if status == "time" else None).status == status


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
