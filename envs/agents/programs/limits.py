"""Limits over all processes of a program: one thread looks after all programs of a host.

The kernel bounds what a single process and a user may do (`walls.py`). How much memory a program's
processes hold together, and how much its folders take, is read here, often enough that what is
over a limit is over it for moments: ten times a second, or as often as takes a tenth of the time.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from ...sandbox.watch import descendants, filesystem, memory_bytes
from .folders import ProgramFolder

Limit: TypeAlias = Literal["memory", "disk"]
_LOOK_S = 0.1
_LEAST_DISK_LOOK_S = 0.3
_SHARE = 10
_LEAST_FILES = 20_000
_MIB = 1 << 20


@dataclass(eq=False)
class Watched:
    """A program that is looked after."""

    first: int
    """The first process of its walls."""
    folder: ProgramFolder
    memory_mb: int
    disk_mb: int
    over: Callable[[Limit], None]
    """Called once, in the thread, when it is over a limit."""
    next_disk_look: float = 0.0

    def exceeded(self, now: float) -> Limit | None:
        """Return the limit that it is over."""
        if _holds_more(self.first, self.memory_mb * _MIB):
            return "memory"
        if now < self.next_disk_look:
            return None
        most_files = max(_LEAST_FILES, self.disk_mb << 8)  # each takes room of its own
        used = self.folder.usage(most_files)
        took_s = time.monotonic() - now
        self.next_disk_look = now + max(_LEAST_DISK_LOOK_S, _SHARE * took_s)
        too_much = used.num_bytes > self.disk_mb * _MIB or used.num_files > most_files
        return "disk" if too_much else None


class LimitWatch:
    """The thread that looks after programs."""

    def __init__(self) -> None:
        self._watched: list[Watched] = []
        self._changed = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._watch, name="program-limits", daemon=True)
        self._thread.start()

    def add(self, watched: Watched) -> None:
        """Look after a program from now on."""
        self._watched = [*self._watched, watched]
        self._changed.set()

    def remove(self, watched: Watched) -> None:
        """Look after it no more; harmless when repeated."""
        self._watched = [one for one in self._watched if one is not watched]

    def stop(self) -> None:
        """End the thread."""
        self._stopping = True
        self._changed.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stopping:
            if not self._watched:
                self._changed.wait()
                self._changed.clear()
            began = time.thread_time()  # a loaded machine is no reason to look seldom
            for one in self._watched:
                if (limit := one.exceeded(time.monotonic())) is not None:
                    self.remove(one)
                    one.over(limit)
            time.sleep(max(_LOOK_S, _SHARE * (time.thread_time() - began)))


def _holds_more(first: int, most: int) -> bool:
    """Whether the processes below `first` hold more memory than they may.

    What they share is first counted for each, which is cheap, and exactly only if that is too much.
    """
    shared = _shared_memory(first)
    if memory_bytes(first) + shared <= most:
        return False
    return sum(_proportional(one) for one in descendants(first)) + shared > most


def _shared_memory(first: int) -> int:
    """Return what lies in the /dev/shm of the walls."""
    about = filesystem(first, "dev/shm")
    return 0 if about is None else (about.f_blocks - about.f_bfree) * about.f_frsize


def _proportional(pid: int) -> int:
    """Return a process's memory, with its share of what it has in common with others."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    except (OSError, StopIteration):
        return 0  # it has ended
