"""What the system says of processes."""

import contextlib
import os
import signal
import time
from pathlib import Path

from tinkermq.envs.sandbox.sandbox import descendants

from tests.support.waiting import PATIENCE_S

_LISTENS = "0A"


class Below:
    """Processes that a test starts below this one.

    Not those that other tests left there, a stack or a browser, nor what these start meanwhile.
    """

    def __init__(self) -> None:
        """Take those that are there now as those of others."""
        self._others = set(descendants(os.getpid())) - {os.getpid()}

    def pids(self) -> set[int]:
        """Return those that run now."""
        mine = set(descendants(os.getpid())) - {os.getpid()}
        return mine - {pid for other in self._others for pid in descendants(other)}


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        state = _state(Path(f"/proc/{pid}/stat"))
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def halt(pid: int) -> None:
    """Stop a process by SIGSTOP; return once each of its threads stands still."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + PATIENCE_S
    while not all(_state(file) == "T" for file in Path(f"/proc/{pid}/task").glob("*/stat")):
        assert time.monotonic() < deadline, f"process {pid} does not stop"
        time.sleep(0.001)


def _state(stat: Path) -> str:
    return stat.read_text().rpartition(")")[2].split()[0]


def listening_ports(pid: int) -> set[int]:
    """Return the TCP ports on which a process listens."""
    held, ports = set[str](), set[int]()
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            held.add(file.readlink().name)
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == _LISTENS and f"socket:[{rest[5]}]" in held:
                ports.add(int(local.rpartition(":")[2], 16))
    return ports


def peak_mb(pid: int) -> float:
    """Return the largest memory that a process ever had."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))
