"""What processes cost, read from /proc: memory, and CPU time by thread."""

import os
from dataclasses import dataclass
from pathlib import Path

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Cpu:
    """CPU seconds of one process so far."""

    loop_s: float
    """Its main thread: the event loop, in an actor."""
    other_s: float
    """All other threads: torch, games, files."""

    def __sub__(self, before: "Cpu") -> "Cpu":
        return Cpu(self.loop_s - before.loop_s, self.other_s - before.other_s)


def cpu(pid: int) -> Cpu | None:
    """Return the CPU time of a process, None when it has ended."""
    try:
        total_s = _stat_s(Path(f"/proc/{pid}/stat"))
        loop_s = _stat_s(Path(f"/proc/{pid}/task/{pid}/stat"))
    except (FileNotFoundError, ProcessLookupError):
        return None
    return Cpu(loop_s, total_s - loop_s)


def rss_mb(pid: int) -> float | None:
    """Return the resident memory of a process in megabytes, None when it has ended."""
    try:
        text = Path(f"/proc/{pid}/statm").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(text.split()[1]) * _PAGE / 1e6


def pss_mb(pid: int) -> float | None:
    """Return the memory of a process with shared pages divided among their users, in megabytes."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024 / 1e6


def _stat_s(file: Path) -> float:
    fields = file.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * _TICK_S
