"""A connection for the requests of users alone, which is made anew when a flood has filled it.

What the server holds for a connection is one line of up to `max_pending` bytes. Behind a flood of
one user the requests of all others wait in it, long after the flood has ended; so would the replies
that a service itself waits for, its lease among them, if they came over the same connection. So it
is measured how old the line is while somebody is refused in great number. One that is too old is
dropped with the connection: nobody waits in it any more, and who is not flooding asks again.
"""

import asyncio
from contextlib import AbstractAsyncContextManager
from typing import cast

import nats.errors
import structlog

from ..client.connection import Broker
from ..outages.first_connection import connected
from .fair_queue import FairQueue

_LOOK_S = 1.0
_LATE_S = 2.0
_MANY = 16
"""Requests refused between two looks, from which on the age of the line is measured."""
_log: structlog.stdlib.BoundLogger = structlog.get_logger()


def request_connection(
    broker: Broker, stopping: asyncio.Event
) -> AbstractAsyncContextManager[Broker | None]:
    """Connect once more, as `broker` did; None when `stopping` was set before it succeeded."""
    name = f"{broker.name}-requests"
    return connected(broker.url, name, stopping, login=broker.login, for_ever=True)


async def drop_old_requests(
    own: Broker, *shares: FairQueue, look_s: float = _LOOK_S, late_s: float = _LATE_S
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
