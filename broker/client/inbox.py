"""Where the answers to a request come that has more than one: in order, for one who waits.

A loss of the connection and a denied request end the wait at once, not at its timeout.
"""

import asyncio
import itertools
from collections.abc import Callable

from nats.aio.msg import Msg

from ...schemas.wire.errors import BrokerError, DeniedError
from . import faults
from .connection import Broker
from .listening import Listening


class SharedInbox:
    """One subscription for the answers to many requests: each `Inbox` made with it is cheap."""

    def __init__(self, broker: Broker, prefix: str = "") -> None:
        """Prepare; the first request subscribes, below `prefix` or the connection's own."""
        self._broker = broker
        own = broker.nc.new_inbox()
        self._prefix = f"{prefix}.{own.rpartition('.')[2]}" if prefix else own
        self._numbers = itertools.count(1)
        self._takers: dict[str, Callable[[Msg], None]] = {}
        self._listening: Listening | None = None
        self._subscribing = asyncio.Lock()

    async def new_subject(self, take: Callable[[Msg], None]) -> str:
        """Return a subject whose messages `take` gets until it is forgotten."""
        if self._listening is None:
            async with self._subscribing:
                if self._listening is None:
                    self._listening = await self._broker.listen(f"{self._prefix}.*", self._take)
        subject = f"{self._prefix}.{next(self._numbers)}"
        self._takers[subject] = take
        return subject

    def forget(self, subject: str) -> None:
        """Drop what else comes there."""
        self._takers.pop(subject, None)

    async def close(self) -> None:
        """Unsubscribe."""
        listening, self._listening = self._listening, None
        if listening is not None:
            await listening.stop()

    def _take(self, message: Msg) -> None:
        if taker := self._takers.get(message.subject):
            taker(message)


class Inbox:
    """Receives the answers to one request after the other."""

    def __init__(
        self,
        broker: Broker,
        *,
        ends_with_connection: bool = True,
        shared: SharedInbox | None = None,
    ) -> None:
        """Prepare; the first request subscribes, or takes a subject of the `shared` subscription.

        Without `ends_with_connection` answers may go on coming after a reconnect.
        """
        self._broker = broker
        self._shared = shared
        self._subjects: list[str] = []
        self._prefix = "" if shared is not None else broker.nc.new_inbox()
        self._number = 0
        self._asked = ""
        self._arrived: asyncio.Queue[Msg | BrokerError] = asyncio.Queue()
        self._listening: Listening | None = None
        self._removals = [broker.on_error(self._denied)]
        if ends_with_connection:
            self._removals.append(broker.on_disconnect(self._lost))

    async def new_subject(self) -> str:
        """Return a subject whose messages come here, of one request."""
        if self._shared is not None:
            subject = await self._shared.new_subject(self._arrived.put_nowait)
            self._subjects.append(subject)
            return subject
        if self._listening is None:
            self._listening = await self._broker.listen(
                f"{self._prefix}.*", self._arrived.put_nowait
            )
        self._number += 1
        return f"{self._prefix}.{self._number}"

    async def only_subject(self) -> str:
        """Return the one subject whose messages come here, subscribed to by its own name.

        A server that looks whether anybody listens there finds no wildcard, and would wait for one
        who does.
        """
        self._listening = await self._broker.listen(self._prefix, self._arrived.put_nowait)
        return self._prefix

    async def ask(self, subject: str, payload: bytes) -> str:
        """Send a request; return the subject of its answers. Raises what `Broker.send` raises."""
        reply = await self.new_subject()
        self._asked = subject
        await self._broker.send(subject, payload, reply=reply)
        return reply

    async def next(self, timeout_s: float) -> Msg:
        """Return the next message, of whichever request.

        Raises ConnectionLost, DeniedError, TimeoutError.
        """
        if self._arrived.empty():
            async with asyncio.timeout(timeout_s):
                arrived = await self._arrived.get()
        else:
            arrived = self._arrived.get_nowait()
        if isinstance(arrived, BrokerError):
            raise arrived
        return arrived

    def drain(self) -> list[Msg]:
        """Return the messages that are here already, without waiting."""
        found: list[Msg] = []
        while not self._arrived.empty():
            arrived = self._arrived.get_nowait()
            if not isinstance(arrived, BrokerError):
                found.append(arrived)
        return found

    async def close(self) -> None:
        """Unsubscribe."""
        for remove in self._removals:
            remove()
        if self._shared is not None:
            for subject in self._subjects:
                self._shared.forget(subject)
        listening, self._listening = self._listening, None
        if listening is not None:
            await listening.stop()

    def _lost(self) -> None:
        self._arrived.put_nowait(faults.broken(self._broker.url, self._asked))

    def _denied(self, error: BrokerError) -> None:
        if isinstance(error, DeniedError) and error.subject == self._asked.lower():
            self._arrived.put_nowait(error)
