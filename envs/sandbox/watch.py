"""Look after a sandbox from outside: how much memory its processes hold, how many files it made.

The kernel's limits are per process; these are over all processes of a sandbox. Read from /proc,
twenty times a second, only for programs that run longer than that.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from .settings import Status

_PAGE = os.sysconf("SC_PAGE_SIZE")
_PROC = Path("/proc")
MAX_FILES = 20_000
"""Files in the sandbox's /tmp: each takes memory of the kernel, however short it is."""


def descendants(pid: int) -> Iterator[int]:
    """Yield a process and all below it that live; those that end meanwhile may be left out."""
    waiting = [pid]
    while waiting:
        one = waiting.pop()
        try:
            if (_PROC / str(one) / "stat").read_text().rpartition(") ")[2][0] in "ZX":
                continue
            yield one
            for task in (_PROC / str(one) / "task").iterdir():
                waiting += map(int, (task / "children").read_text().split())
        except OSError:
            continue  # it has ended


def first_child(pid: int) -> int | None:
    """Return the oldest child of a process: in a sandbox's first one, the program that it runs."""
    try:
        children = (_PROC / str(pid) / "task" / str(pid) / "children").read_text()
    except OSError:  # it has ended
        return None
    return next(map(int, children.split()), None)


def memory_bytes(pid: int) -> int:
    """Return the resident memory of a process and all below it."""
    total = 0
    for one in descendants(pid):
        try:
            total += int((_PROC / str(one) / "statm").read_text().split()[1]) * _PAGE
        except (OSError, IndexError):
            continue
    return total


def filesystem(pid: int, folder: str) -> os.statvfs_result | None:
    """Return how full a folder of a sandbox is; `pid` is a process inside.

    None for a process that has ended, and for one that is still among our own folders, as the
    first one is until its sandbox has been made.
    """
    root = _PROC / str(pid) / "root"
    try:
        if root.samefile("/"):
            return None
        return os.statvfs(root / folder)
    except OSError:
        return None


def num_files(pid: int) -> int:
    """Return how many files the /tmp of a sandbox holds; `pid` is a process inside."""
    about = filesystem(pid, "tmp")
    return 0 if about is None else about.f_files - about.f_ffree


def exceeded(pid: int, most_memory: int) -> Status | None:
    """Return the limit that the sandbox whose first process is `pid` is beyond, or None."""
    if memory_bytes(pid) > most_memory:
        return "memory"
    return "disk" if num_files(pid) > MAX_FILES else None
