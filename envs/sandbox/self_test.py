"""The self-test of a sandbox: a program inside tries forbidden actions.

Every process that starts programs in a sandbox runs it once for each kind of sandbox, before any
untrusted program.
"""

import contextlib
import json
import os
import select
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from ...schemas.wire.errors import SandboxError
from .bubblewrap import Program, start
from .sandbox import Sandbox

_DEADLINE_S = 60.0
_PROCESSES = 8
_MAX_BYTES = 1 << 16
_HINT = "no program is run here; a newer kernel or bubblewrap (0.8) may help"
_HINTS = {
    "processes are not limited": "the kernel bounds no processes of root: let an ordinary user run "
    "the node"
}
PROBE = """
import json, os, sys
expected = json.loads(sys.argv[1])

def is_refused(call, *arguments):
    try:
        call(*arguments)
    except (OSError, MemoryError):
        return True
    return False

def write_root():
    open("/written", "w").close()

def fill_folder():
    for name in ("one", "two"):
        with open(f"{expected['folder']}/{name}", "wb") as file:
            os.posix_fallocate(file.fileno(), 0, (expected["disk"] >> 1) + 4096)

def fork_on():
    ends = os.pipe()
    children = []
    try:
        for _ in range(expected["processes"] + 1):
            child = os.fork()
            if not child:
                os.read(ends[0], 1)
                os._exit(0)
            children.append(child)
    finally:
        os.write(ends[1], b"." * (len(children) + 1))
        for child in children:
            os.waitpid(child, 0)

def reaches_out():
    import socket
    try:
        names = {name for _, name in socket.if_nameindex()} - {"lo"}
    except OSError:
        names = set()
    if names:
        return True
    for address in (("127.0.0.1", 9), ("192.0.2.1", 9)):
        try:
            socket.create_connection(address, timeout=1).close()
            return True
        except ConnectionRefusedError:
            if address[0] != "127.0.0.1":
                return True
        except OSError:
            pass
    return False

def status(name):
    try:
        lines = open("/proc/self/status").read().splitlines()
    except OSError:
        return None
    return next(line.split()[1] for line in lines if line.startswith(name + ":"))

def is_open(file):
    try:
        os.fstat(file)
    except OSError:
        return False
    return True

def processes():
    try:
        return [name for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []

root = expected["root"]
failed = [
    name
    for name, holds in (
        ("it shows files of the host", root is None or set(os.listdir("/")) <= set(root)),
        ("it shows what is hidden", not any(os.path.lexists(one) for one in expected["hidden"])),
        ("it shows processes of the host", len(processes()) <= 2),
        ("files of the host are open in it", not any(is_open(file) for file in range(3, 256))),
        ("it runs programs as root", os.getuid() != 0),
        ("programs have rights", status("CapEff") in (None, "0" * 16)),
        ("programs may gain rights", status("NoNewPrivs") in (None, "1")),
        ("system calls are not filtered", status("Seccomp") in (None, "2")),
        ("its root can be written", not expected["is_read_only"] or is_refused(write_root)),
        ("memory is not limited", not expected["memory"]
            or is_refused(bytearray, expected["memory"] + 1)),
        ("its disk is not limited", not expected["disk"] or is_refused(fill_folder)),
        ("processes are not limited", not expected["processes"] or is_refused(fork_on)),
        ("it reaches a network", expected["has_network"] or not reaches_out()),
    )
    if not holds
]
absent = []
if expected["commands"]:
    import shutil
    absent = [one for one in expected["commands"] if shutil.which(one) is None]
print(json.dumps([failed, absent]), flush=True)
"""
"""Runs inside; prints failures and absent commands as JSON."""


def prove(sandbox: Sandbox, *, hidden: Sequence[Path] = ()) -> None:
    """Run the probe in a sandbox; blocks.

    `hidden` paths must not exist inside. Raises SandboxError with what fails and what to do.
    """
    absent_commands(sandbox, (), {}, hidden=hidden)


def absent_commands(
    sandbox: Sandbox,
    commands: Sequence[str],
    environment: dict[str, str] | None,
    *,
    hidden: Sequence[Path] = (),
) -> list[str]:
    """Run the probe, as `prove`; return the commands that programs do not find."""
    limits = dict(sandbox.limits)
    if "NPROC" in limits:
        limits["NPROC"] = min(limits["NPROC"], _PROCESSES)  # they keep the probe quick
    expected = _expected(sandbox, limits, commands, hidden)
    program = Program(source=PROBE, arguments=[json.dumps(expected)], environment=environment)
    return check_answer(_answer(replace(sandbox, limits=limits), program))


def check_answer(answer: str) -> list[str]:
    """Return the absent commands; SandboxError if anything else failed."""
    try:
        failed, absent = cast("list[list[str]]", json.loads(answer))
    except ValueError:
        raise SandboxError(
            f"the self-test of the sandbox ended early: {answer.strip()[-1000:]!r}", hint=_HINT
        ) from None
    if failed:
        hint = next((_HINTS[failure] for failure in failed if failure in _HINTS), _HINT)
        raise SandboxError(f"the sandbox does not hold: {'; '.join(failed)}", hint=hint)
    return absent


def _expected(
    sandbox: Sandbox, limits: dict[str, int], commands: Sequence[str], hidden: Sequence[Path]
) -> dict[str, Any]:
    """Return the expectations of the probe."""
    shown = {Path(mount.path).parts[1] for mount in sandbox.mounts if mount.path != "/"}
    sizes = (mount.size_bytes for mount in sandbox.mounts if mount.path == sandbox.folder)
    return {
        "root": None if sandbox.root is not None else sorted(shown | {"proc", "dev"}),
        "hidden": [str(path) for path in hidden],
        "commands": list(commands),
        "is_read_only": sandbox.is_read_only,
        "has_network": sandbox.has_network,
        "memory": limits.get("AS", 0),
        "processes": limits.get("NPROC", 0),
        "disk": next(sizes, 0),
        "folder": sandbox.folder,
    }


def _answer(sandbox: Sandbox, program: Program) -> str:
    """Run a program to its end, and return its output."""
    reading, writing = os.pipe()
    try:
        try:
            process = start(sandbox, program, stdout=writing, stderr=writing)
        finally:
            os.close(writing)
        for socket in process.sockets:
            socket.close()
        try:
            return _read(reading)
        finally:
            process.kill()
            process.wait()
            process.close()
    finally:
        os.close(reading)


def _read(file: int) -> str:
    """Read to the end, for a bounded time."""
    deadline, data = time.monotonic() + _DEADLINE_S, b""
    poll = select.poll()
    poll.register(file, select.POLLIN)
    with contextlib.suppress(BlockingIOError):
        while len(data) < _MAX_BYTES and (left_s := deadline - time.monotonic()) > 0:
            if not poll.poll(left_s * 1000):
                break
            chunk = os.read(file, _MAX_BYTES)
            if not chunk:
                break
            data += chunk
    return data.decode(errors="replace")
