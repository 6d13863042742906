"""Pull requests to a consumer: the one way in which messages of a stream arrive live.

A pull request is bounded in messages and bytes, so a reader is never sent more than it asked for.
The inbox lives as long as its owner; a message that arrives after its request was given up stays
in the inbox for the next one. A loss of the connection ends a running request at once.
"""

import json
from typing import Any

from nats.aio.msg import Msg

from ...schemas.wire.errors import BrokerError
from ..client.headers import DESCRIPTION, header, status_of
from ..client.inbox import Inbox

NS = 1_000_000_000
_STATUS_OK = frozenset({"404", "408"})  # nothing there; the request has expired
_HEARTBEAT = "100"
_GONE = frozenset({"503", "409"})


class ConsumerGone(BrokerError):
    """The consumer was deleted, or was lost with its server: it has to be made again."""


class PullInbox(Inbox):
    """Receives what pull requests bring."""

    def take_arrived(self) -> list[Msg]:
        """Return the messages that are here already, without waiting."""
        return [message for message in self.drain() if not _status(message)]

    async def pull(self, stream: str, consumer: str, request: dict[str, Any]) -> None:
        """Send one pull request."""
        place = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        await self.ask(place, json.dumps(request).encode())

    async def next_pulled(self, timeout_s: float) -> Msg | None:
        """Return the next message, or None when the request has ended.

        Raises ConnectionLost, ConsumerGone, TimeoutError when not even a heartbeat comes.
        """
        while True:
            message = await self.next(timeout_s)
            status = _status(message)
            if not status:
                return message
            if status != _HEARTBEAT and not _is_complete(message):
                _check_status(status, message)
                return None


def _status(message: Msg) -> str:
    """Return the status of a message from the server itself, empty for one of the stream."""
    return "" if message.reply else status_of(message)


def _is_complete(message: Msg) -> bool:
    """Whether the server only says that all messages asked for were sent: whoever counts knows."""
    return "batch completed" in header(message, DESCRIPTION).lower()


def _check_status(status: str, message: Msg) -> None:
    description = header(message, DESCRIPTION)
    if status in _STATUS_OK or "maxbytes" in description.lower().replace(" ", ""):
        return
    if status in _GONE:
        raise ConsumerGone(f"the consumer is gone: {status} {description}")
    raise BrokerError(
        f"a pull request was refused: {status} {description}", hint="see `nats consumer info`"
    )
