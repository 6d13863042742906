"""Pull requests to a consumer: the one way in which messages of a stream arrive live.

A pull request is bounded in messages and bytes, so a reader is never sent more than it asked for.
The inbox lives as long as its owner; a message that arrives after its request was given up stays
in the inbox for the next one. A loss of the connection ends a running request at once.
"""

import asyncio
import json
from typing import Any

from nats.aio.msg import Msg

from ...schemas.wire.errors import BrokerError
from ..client.connection import Broker, ConnectionLost, Listening

NS = 1_000_000_000
_STATUS_OK = frozenset({"404", "408"})  # nothing there; the request has expired
_HEARTBEAT = "100"
_GONE = frozenset({"503", "409"})


class ConsumerGone(BrokerError):
    """The consumer was deleted, or was lost with its server: it has to be made again."""


class PullInbox:
    """Receives what pull requests bring."""

    def __init__(self, broker: Broker) -> None:
        """Prepare; `open` subscribes."""
        self._broker = broker
        self._inbox = broker.nc.new_inbox()
        self._arrived: asyncio.Queue[Msg | None] = asyncio.Queue()
        self._listening: Listening | None = None
        self._remove = broker.on_disconnect(lambda: self._arrived.put_nowait(None))

    async def open(self) -> None:
        """Subscribe to the inbox, once."""
        if self._listening is None:
            self._listening = await self._broker.listen(self._inbox, self._arrived.put_nowait)

    async def close(self) -> None:
        """Unsubscribe."""
        self._remove()
        listening, self._listening = self._listening, None
        if listening is not None:
            await listening.stop()

    def forget(self) -> None:
        """Throw away what arrived for an earlier consumer."""
        while not self._arrived.empty():
            self._arrived.get_nowait()

    def take_arrived(self) -> list[Msg]:
        """Return the messages that are here already, without waiting."""
        messages: list[Msg] = []
        while not self._arrived.empty():
            message = self._arrived.get_nowait()
            if message is not None and _status(message) is None:
                messages.append(message)
        return messages

    async def ask(self, stream: str, consumer: str, request: dict[str, Any]) -> None:
        """Send one pull request."""
        await self._broker.send(
            f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}",
            json.dumps(request).encode(),
            reply=self._inbox,
        )

    async def next(self, timeout_s: float) -> Msg | None:
        """Return the next message, or None when the request has ended.

        Raises ConnectionLost, ConsumerGone, TimeoutError when not even a heartbeat comes.
        """
        while True:
            if self._arrived.empty():
                async with asyncio.timeout(timeout_s):
                    message = await self._arrived.get()
            else:
                message = self._arrived.get_nowait()
            if message is None:
                raise ConnectionLost("the connection broke during a pull", hint="try again")
            status = _status(message)
            if status is None:
                return message
            if status != _HEARTBEAT and not _is_complete(message):
                _check_status(status, message)
                return None


def _status(message: Msg) -> str | None:
    """Return the status of a message from the server itself, None for one of the stream."""
    if message.data or not message.headers or message.reply:
        return None
    return message.headers.get("Status")


def _is_complete(message: Msg) -> bool:
    """Whether the server only says that all messages asked for were sent: whoever counts knows."""
    return "batch completed" in (message.headers or {}).get("Description", "").lower()


def _check_status(status: str, message: Msg) -> None:
    description = (message.headers or {}).get("Description", "")
    if status in _STATUS_OK or "maxbytes" in description.lower().replace(" ", ""):
        return
    if status in _GONE:
        raise ConsumerGone(f"the consumer is gone: {status} {description}")
    raise BrokerError(
        f"a pull request was refused: {status} {description}", hint="see `nats consumer info`"
    )
