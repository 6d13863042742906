"""Writes that wait while a disk is full, appended lines, and reads of disks that may hang."""

import asyncio
import contextlib
import errno
import json
import os
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import structlog

from ..wire.errors import StorageError
from .process import in_daemon_thread

T = TypeVar("T")
P = ParamSpec("P")
Waiting = Callable[[str], AbstractContextManager[object]]
"""Reports a wait in the actor's heartbeat while it lasts."""

PAUSE_S = 1.0
_FULL = (errno.ENOSPC, errno.EDQUOT)
_FORBIDDEN = (errno.EPERM, errno.EACCES, errno.EROFS)
_WHOLE = "earlier checkpoints are whole and training goes on"
FREE_SPACE = f"free some space; {_WHOLE}"
_log: structlog.stdlib.BoundLogger = structlog.get_logger()


def is_full(error: BaseException | None) -> bool:
    """Return whether an error, or its cause, is a full disk."""
    while error is not None:
        if isinstance(error, StorageError) and error.is_full:
            return True
        if isinstance(error, OSError) and error.errno in _FULL:
            return True
        error = error.__cause__
    return False


def remedy(error: BaseException, place: Path) -> str:
    """Return a hint for a failed write to the file or folder `place`.

    Libraries do not report why they failed; a small write to the same folder does.
    """
    number = _errno(error) or _errno_of_writing(place)
    if number in _FORBIDDEN:
        why = "its disk is mounted read-only" if number == errno.EROFS else "rights or attributes"
        return (
            f"user {os.geteuid()} may not write at {place}: {why}; see its owner and mode "
            "(`ls -ld`), attributes (`lsattr -d`) and mount, or name another folder"
        )
    if number in _FULL:
        return FREE_SPACE
    return f"see the disk of {place} and the limits of its user (`ulimit -f`); {_WHOLE}"


def _errno(error: BaseException | None) -> int | None:
    while error is not None:
        if isinstance(error, OSError) and error.errno is not None:
            return error.errno
        error = error.__cause__ or error.__context__
    return None


def _errno_of_writing(place: Path) -> int | None:
    folder = next((path for path in (place, *place.parents) if path.is_dir()), Path("/"))
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.errno
    return None


def in_thread(
    write: Callable[P, T], *arguments: P.args, **named: P.kwargs
) -> Callable[[], Awaitable[T]]:
    """Return a function that calls `write` in a thread, for `with_room`."""
    return lambda: asyncio.to_thread(write, *arguments, **named)


async def with_room(
    write: Callable[[], Awaitable[T]],
    what: str,
    waiting: Waiting = contextlib.nullcontext,
    *,
    first_word: Callable[[str], Awaitable[None]] | None = None,
) -> T:
    """Write `what`, waiting while its disk is full.

    `write` is called again until there is room, so it must leave nothing of a failed attempt.
    `first_word` is called with the message of the first failure.
    """
    try:
        return await write()
    except (OSError, StorageError) as error:
        if not is_full(error):
            raise
        message = f"no room on the disk for {what}: {error}"
    _log.warning("disk_full", what=what, message=message)
    if first_word is not None:
        await first_word(message)
    with waiting(f"room on the disk for {what}"):
        while True:
            await asyncio.sleep(PAUSE_S)
            try:
                written = await write()
            except (OSError, StorageError) as error:
                if not is_full(error):
                    raise
                continue
            _log.info("disk_has_room", what=what)
            return written


# Files whose paths users choose: the disk may hang, or the file may be a pipe.


class DiskThreads:
    """Reads files whose paths users choose, each in a thread of its own.

    A read that hangs does not occupy threads of the event loop or of other users, and does not
    delay the end of the process.
    """

    def __init__(self, most: int, deadline_s: float) -> None:
        """Use at most `most` threads for each user, and wait `deadline_s` for each read."""
        self._most = most
        self._deadline_s = deadline_s
        self._free: dict[str, asyncio.Semaphore] = {}

    async def look(
        self, who: str, read: Callable[P, T], *arguments: P.args, **named: P.kwargs
    ) -> T:
        """Return the result of `read`; raises its exceptions, TimeoutError after the deadline.

        A read that timed out continues, and occupies one of the threads of `who` until it ends.
        """
        free = self._free.setdefault(who, asyncio.Semaphore(self._most))
        async with asyncio.timeout(self._deadline_s):
            await free.acquire()
            looking = in_daemon_thread(partial(read, *arguments, **named), "look at a disk")
            looking.add_done_callback(lambda _: free.release())
            return await asyncio.shield(looking)


# Appends of lines to files, each atomic.
#
# If the disk is full, the file is cut back to its length before the append. A process that dies may
# leave a line without its end: the next append begins a new line, and readers skip and log it.


def append_lines(path: Path, lines: Sequence[str]) -> int:
    """Append lines; create the file and its folder if missing; return the file's size.

    Without lines, only creates the file. Raises OSError if they cannot be written; then the file
    has none of them.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    return append_to(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666), lines)


def append_to(file: int, lines: Sequence[str]) -> int:
    """Append lines to a file opened to read and append, and close it; as `append_lines`."""
    try:
        size = os.fstat(file).st_size
        is_cut = size > 0 and os.pread(file, 1, size - 1) != b"\n"
        data = b"\n" * (is_cut and bool(lines)) + "".join(f"{line}\n" for line in lines).encode()
        try:
            _write(file, data)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(file, size)
            raise
        return size + len(data)
    finally:
        os.close(file)


def read_objects(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a file, one per line; broken lines are skipped and logged."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                value = json.loads(line)
            except ValueError:
                value = None
            if isinstance(value, dict):
                yield cast("dict[str, Any]", value)
            elif line.strip():
                _log.warning("line_cut", file=str(path), line=number, num_bytes=len(line))


def _write(file: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]
