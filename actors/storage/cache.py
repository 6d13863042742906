"""Folders that this machine has fetched, bounded in bytes, shared by its processes.

An entry is named by its content: `<key>/` is the folder, `<key>.held` beside it has its size and is
locked (flock) by who uses it, shared, or who fetches or removes it, alone. Its time is when the
entry was last asked for: those longest ago leave first, those in use never. Locks end with their
process, so a kill leaves nothing but a half folder, which the next one removes.
"""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from ...schemas.wire.errors import StorageError

FOLDER_VARIABLE = "TINKERMQ_CACHE"
"""Of the environment of nodes: the folder; default `~/.cache/tinkermq`."""
BYTES_VARIABLE = "TINKERMQ_CACHE_BYTES"
"""Of the environment of nodes: how much it may hold."""
_DEFAULT_BYTES = 200 << 30
_HELD = ".held"


class CacheEntry(NamedTuple):
    """What a cache holds under one key."""

    asked: float
    num_bytes: int
    lock: Path


class FolderCache:
    """The cache of a machine."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._held: dict[str, int] = {}

    @classmethod
    def of_machine(cls) -> "FolderCache":
        """Open the cache that the environment names. Raises StorageError for an odd bound."""
        folder = os.environ.get(FOLDER_VARIABLE) or Path.home() / ".cache" / "tinkermq"
        bound = os.environ.get(BYTES_VARIABLE) or str(_DEFAULT_BYTES)
        if not bound.isdecimal() or not int(bound):
            raise StorageError(
                f"${BYTES_VARIABLE} is {bound!r}",
                hint="write a number of bytes, such as 200000000000",
            )
        return cls(Path(folder).expanduser(), int(bound))

    def hold(self, key: str, num_bytes: int, fetch: Callable[[Path], None]) -> Path:
        """Return the folder under a key, which stays as long as this process, or until `release`.

        `fetch` writes it where it is missing; others who ask meanwhile wait. Raises StorageError
        when there is no room beside what is in use, and what `fetch` raises.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        place = self._folder / key
        while key not in self._held:
            lock = os.open(f"{place}{_HELD}", os.O_RDWR | os.O_CREAT, 0o600)
            try:
                self._fill(lock, place, num_bytes, fetch)
                fcntl.flock(lock, fcntl.LOCK_SH)
                if place.is_dir():  # else it was removed between the two locks
                    self._held[key] = lock
                    lock = -1
            finally:
                if lock >= 0:
                    os.close(lock)
        return place

    def release(self, key: str) -> None:
        """Let an entry be removed when room is needed."""
        os.close(self._held.pop(key))

    def _fill(self, lock: int, place: Path, num_bytes: int, fetch: Callable[[Path], None]) -> None:
        fcntl.flock(lock, fcntl.LOCK_SH)
        if not place.is_dir():
            fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.is_dir():
            self._make_room(lock, num_bytes, place.name)
            try:
                fetch(place)
            except BaseException:
                os.ftruncate(lock, 0)
                raise
        os.utime(lock)

    def _make_room(self, lock: int, num_bytes: int, key: str) -> None:
        """Remove what was asked for longest ago until so much fits, and write down that it is ours.

        One process at a time.
        """
        with _locked(self._folder / ".room"):
            entries = [one for one in self._entries() if one.lock.stem != key]
            total = num_bytes + sum(one.num_bytes for one in entries)
            for one in sorted(entries):
                if total <= self._max_bytes:
                    break
                total -= one.num_bytes * _remove(one)
            if total > self._max_bytes:
                raise StorageError(
                    f"the cache {self._folder} has no room for {num_bytes:,} bytes: it may hold "
                    f"{self._max_bytes:,}, and {total - num_bytes:,} are in use",
                    hint=f"raise ${BYTES_VARIABLE} in the environment of this node, or end jobs",
                )
            os.pwrite(lock, str(num_bytes).encode(), 0)

    def _entries(self) -> Iterator[CacheEntry]:
        for lock in self._folder.glob(f"*{_HELD}"):
            text = lock.read_text()
            if text:
                yield CacheEntry(lock.stat().st_mtime, int(text), lock)


def _remove(entry: CacheEntry) -> bool:
    """Remove an entry unless somebody uses it; return whether it has gone."""
    with contextlib.suppress(BlockingIOError), _locked(entry.lock, fcntl.LOCK_NB) as lock:
        place = entry.lock.with_suffix("")
        shutil.rmtree(place, ignore_errors=True)
        shutil.rmtree(place.with_name(f".{place.name}.half"), ignore_errors=True)
        os.ftruncate(lock, 0)  # the file stays: who waits for its lock has it open
        return True
    return False


@contextlib.contextmanager
def _locked(file: Path, how: int = 0) -> Iterator[int]:
    lock = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | how)
        yield lock
    finally:
        os.close(lock)
