"""A game's host inside the client's own process."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from ...schemas.wire.errors import DeadlineError

if TYPE_CHECKING:
    from ...envs.host import EnvironmentHost

READY_S = 60.0


@contextlib.asynccontextmanager
async def hosted(host: "EnvironmentHost") -> AsyncIterator[None]:
    """Run a host for as long as the block runs, which begins once episodes can be reset.

    Raises GameError or DataError when the game cannot be played, DeadlineError when it does not
    become ready; what ends the host later cancels the block. Comes in an exception group.
    """
    stopping = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        running = group.create_task(host.run(stopping), name="environment host")
        ready = group.create_task(host.ready.wait(), name="host ready")
        await asyncio.wait({running, ready}, timeout=READY_S, return_when=asyncio.FIRST_COMPLETED)
        if not host.ready.is_set() and not running.done():
            raise DeadlineError(
                f"the game was not ready within {READY_S:g} s",
                hint="see what its constructor and its data do",
            )
        try:
            if host.ready.is_set():
                yield
        finally:
            ready.cancel()
            stopping.set()
