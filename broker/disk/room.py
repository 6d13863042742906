"""Waiting for room on a disk: a full one is waited for, whatever else is wrong is raised."""

import asyncio
import errno
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from typing import ParamSpec, TypeVar

import structlog

from ...schemas.wire.errors import StorageError

T = TypeVar("T")
P = ParamSpec("P")
Waiting = Callable[[str], AbstractContextManager[None]]
"""Names a wait while it lasts, in the actor's heartbeat."""

PAUSE_S = 1.0
_FULL = (errno.ENOSPC, errno.EDQUOT)
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
