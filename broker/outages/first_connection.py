"""The first connection of an actor, which may be started while the broker is away."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

import structlog

from ...schemas.wire.errors import BrokerError
from ..client import faults
from ..client.connection import Broker, connect
from ..client.login import Login

T = TypeVar("T")

DEADLINE_S = 30.0
_PAUSE_S = 1.0
_log: structlog.stdlib.BoundLogger = structlog.get_logger()


@contextlib.asynccontextmanager
async def connected(
    url: str,
    name: str,
    stopping: asyncio.Event,
    *,
    login: Login | None = None,
    for_ever: bool,
) -> AsyncGenerator[Broker | None, None]:
    """Yield the connection of `first_connection`, patient until `stopping` is set, and close it."""
    broker = await first_connection(url, name, stopping, login=login, for_ever=for_ever)
    if broker is None:
        yield None
        return
    giving_up = asyncio.create_task(give_up_at(stopping, broker), name="end of patience")
    try:
        yield broker
    finally:
        giving_up.cancel()
        await broker.close()


async def first_connection(
    url: str,
    name: str,
    stopping: asyncio.Event,
    *,
    login: Login | None = None,
    for_ever: bool,
) -> Broker | None:
    """Connect patiently; None when `stopping` was set before a broker answered.

    With `for_ever` a broker that is away, or refuses because who checks keys is away, is waited
    for: an actor of a job was given the address by its node, which is connected there. Else
    whoever typed the address is told after half a minute. Raises BrokerError, AuthError; what is
    no address at all is told at once.
    """
    faults.check_url(url)
    while not stopping.is_set():
        try:
            connecting = connect(url, name=name, login=login, deadline_s=DEADLINE_S)
            broker = await _unless(stopping, connecting)
        except BrokerError as error:
            if not for_ever:
                raise
            _log.warning("broker_awaited", message=error.message)
            await _unless(stopping, asyncio.sleep(_PAUSE_S))
            continue
        if broker is not None:
            broker.availability.set_patient(True)
            broker.availability.outlasts_refusal = True
        return broker
    return None


async def give_up_at(stopping: asyncio.Event, broker: Broker) -> None:
    """Let waits for the broker end at their deadlines once `stopping` is set."""
    await stopping.wait()
    broker.availability.set_patient(False)


async def _unless(stopping: asyncio.Event, awaited: Coroutine[Any, Any, T]) -> T | None:
    """Await something, but no longer than until `stopping` is set; None if that came first."""
    work, stop = asyncio.create_task(awaited), asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else None
    finally:
        for task in (work, stop):
            task.cancel()
        await asyncio.wait({work, stop})
