"""Waiting for room on a disk: a full one is waited for, whatever else is wrong is raised."""

import asyncio
import errno
import os
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import ParamSpec, TypeVar

import structlog

from ...schemas.wire.errors import StorageError

T = TypeVar("T")
P = ParamSpec("P")
Waiting = Callable[[str], AbstractContextManager[None]]
"""Names a wait while it lasts, in the actor's heartbeat."""

PAUSE_S = 1.0
_FULL = (errno.ENOSPC, errno.EDQUOT)
_FORBIDDEN = (errno.EPERM, errno.EACCES, errno.EROFS)
_WHOLE = "earlier checkpoints are whole and training goes on"
FREE_SPACE = f"free some space; {_WHOLE}"
_log: structlog.stdlib.BoundLogger = structlog.get_logger()


def is_full(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, is a disk without room."""
    while error is not None:
        if isinstance(error, StorageError) and error.is_full:
            return True
        if isinstance(error, OSError) and error.errno in _FULL:
            return True
        error = error.__cause__
    return False


def remedy(error: BaseException, place: Path) -> str:
    """Say what to do after `error` met a write at a file or folder `place`.

    Libraries do not tell why they failed: then a small write there tells.
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
    there = next((one for one in (place, *place.parents) if one.is_dir()), Path("/"))
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.errno
    return None


def in_thread(
    write: Callable[P, T], *arguments: P.args, **named: P.kwargs
) -> Callable[[], Awaitable[T]]:
    """Return what calls `write` in a thread, for `with_room`."""
    return lambda: asyncio.to_thread(write, *arguments, **named)


async def with_room(
    write: Callable[[], Awaitable[T]],
    what: str,
    waiting: Waiting,
    *,
    first_word: Callable[[str], Awaitable[None]] | None = None,
) -> T:
    """Write `what` as soon as there is room for it.

    `write` is called again while the disk is full, so it must leave nothing of a failed attempt.
    `first_word` is told once that there is no room.
    """
    try:
        return await write()
    except (OSError, StorageError) as error:
        if not is_full(error):
            raise
        told = f"no room on the disk for {what}: {error}"
    _log.warning("disk_full", what=what, message=told)
    if first_word is not None:
        await first_word(told)
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
