"""Waiting until the server has taken all that was sent, whatever becomes of the connection."""

import asyncio
from typing import TYPE_CHECKING

from ..client import faults

if TYPE_CHECKING:
    from ..client.connection import Broker

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
