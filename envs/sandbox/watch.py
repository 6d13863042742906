"""What a sandbox uses, seen from outside: the memory of all its processes, and its files.

The kernel's limits are per process and user; these are over all processes of a sandbox. All is read
from /proc, without control groups, as often as those who start a sandbox look.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, TypeAlias

Limit: TypeAlias = Literal["memory", "disk"]
"""A limit over all processes of a sandbox."""
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
    return sum(_resident(one) for one in descendants(pid))


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


def holds_more(first: int, most_bytes: int) -> bool:
    """Whether the processes below `first`, a sandbox's first one, hold more memory than that.

    What they share is first counted for each, which is cheap, and exactly only if that is too much.
    """
    shared = _shared_memory(first)
    if memory_bytes(first) + shared <= most_bytes:
        return False
    return sum(_proportional(one) for one in descendants(first)) + shared > most_bytes


def exceeded(first: int, most_bytes: int) -> Limit | None:
    """Return the limit that the sandbox whose first process is `first` is over, or None."""
    if holds_more(first, most_bytes):
        return "memory"
    return "disk" if num_files(first) > MAX_FILES else None


def _shared_memory(first: int) -> int:
    """Return what lies in the /dev/shm of a sandbox."""
    about = filesystem(first, "dev/shm")
    return 0 if about is None else (about.f_blocks - about.f_bfree) * about.f_frsize


def _resident(pid: int) -> int:
    """Return the resident memory of one process, 0 for one that has ended."""
    try:
        return int((_PROC / str(pid) / "statm").read_text().split()[1]) * _PAGE
    except (OSError, IndexError):
        return 0


def _proportional(pid: int) -> int:
    """Return a process's memory, with its share of what it has in common with others.

    Where the kernel does not tell that, what it shares counts in full.
    """
    try:
        lines = (_PROC / str(pid) / "smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    except (OSError, StopIteration):
        return _resident(pid)
