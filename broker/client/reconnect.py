"""Connecting at first, again after a loss, and flushing whatever becomes of the connection."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar, cast

import nats.errors
import structlog

from ...schemas.wire.errors import BrokerError
from ..fair_queue import FairQueue
from . import faults
from .connection import Broker, connect
from .login import Login

FLUSH_DEADLINE_S = 60.0
_ANSWER_S = 5


async def flush(
    broker: "Broker", *, waiting_for: str, deadline_s: float = FLUSH_DEADLINE_S
) -> None:
    """Wait until the server has taken all that was sent, subscriptions above all.

    nats-py's own flush waits for the answer to a ping; where the connection breaks meanwhile, that
    answer never comes. Here the next connection is asked, on which nats-py has subscribed again.

    Raises DeadlineError, which names `waiting_for`, BrokerError once the connection is closed.
    """

    async def attempt() -> None:
        broken = asyncio.Event()
        forget = broker.on_disconnect(broken.set)
        breaking = asyncio.create_task(broken.wait())
        flushing = asyncio.create_task(broker.nc.flush(_ANSWER_S))
        try:
            await asyncio.wait({flushing, breaking}, return_when=asyncio.FIRST_COMPLETED)
            if not flushing.done():
                raise faults.broken(broker.url, "a flush")
            await flushing
        finally:
            forget()
            flushing.cancel()
            breaking.cancel()

    await broker.retry(attempt, deadline_s=deadline_s, waiting_for=waiting_for)


# The first connection of an actor, which may be started while the broker is away.

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
    a wrong address is reported after half a minute. Raises BrokerError, AuthError; a malformed
    address is reported at once.
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


# A connection for the requests of users alone, which is made anew when a flood has filled it.
#
# What the server holds for a connection is one line of up to `max_pending` bytes. Behind a flood
# of one user the requests of all others wait in it, long after the flood has ended; so would the
# replies that a service itself waits for, its lease among them, if they came over the same
# connection. So the age of the queue is measured while many requests are refused. One
# that is too old is dropped with the connection: it is no longer awaited, and who is not
# flooding asks again.

_CONNECTION_LOOK_S = 1.0
_LATE_S = 2.0
_MANY = 16
"""Requests refused between two looks, from which on the age of the line is measured."""


def request_connection(
    broker: Broker, stopping: asyncio.Event
) -> AbstractAsyncContextManager[Broker | None]:
    """Connect once more, as `broker` did; None when `stopping` was set before it succeeded."""
    name = f"{broker.name}-requests"
    return connected(broker.url, name, stopping, login=broker.login, for_ever=True)


async def drop_old_requests(
    own: Broker, *shares: FairQueue, look_s: float = _CONNECTION_LOOK_S, late_s: float = _LATE_S
) -> None:
    """Make the connection anew whenever a flood has left it `late_s` behind, for ever.

    `shares` take the requests that come over it.
    """
    seen = sum(share.num_refused for share in shares)
    while True:
        await asyncio.sleep(look_s)
        before, seen = seen, sum(share.num_refused for share in shares)
        refused = seen - before
        if refused >= _MANY and own.is_connected and await _is_late(own, late_s):
            _log.warning("requests_dropped", refused=refused, late_s=late_s)
            await own.nc.force_reconnect()


async def _is_late(own: Broker, late_s: float) -> bool:
    """Whether what the server sends now does not arrive for so long."""
    try:
        await own.nc.flush(cast("int", late_s))
    except nats.errors.FlushTimeoutError:
        return True
    except nats.errors.Error:  # closed meanwhile
        return False
    return False
