"""The replies that a connection waits for: one inbox, one future for each request in flight.

nats-py has the same inside, but there a request in flight when the connection breaks waits for its
timeout, and one to a denied subject as well. Here both end at once.
"""

import asyncio
import itertools
from collections.abc import Callable

from nats.aio.msg import Msg

from ..schemas.errors import BrokerError
from .faults import NoResponders

_NO_RESPONDERS = "503"


class Replies:
    """Hands each reply to the request that waits for it."""

    def __init__(self, inbox: str) -> None:
        """`inbox` is the prefix of all reply subjects; somebody else subscribes to `inbox.*`."""
        self._inbox = inbox
        self._numbers = itertools.count()
        self._waiting: dict[str, tuple[str, asyncio.Future[Msg]]] = {}

    def expect(self, subject: str) -> tuple[str, asyncio.Future[Msg]]:
        """Return a fresh reply subject for a request on `subject`, and the future of its reply."""
        reply = f"{self._inbox}.{next(self._numbers)}"
        future: asyncio.Future[Msg] = asyncio.get_running_loop().create_future()
        self._waiting[reply] = (subject, future)
        return reply, future

    @property
    def num_waiting(self) -> int:
        """Requests in flight."""
        return len(self._waiting)

    def forget(self, reply: str) -> None:
        """Wait no longer."""
        self._waiting.pop(reply, None)

    def take(self, message: Msg) -> None:
        """Hand over a reply; one that nobody waits for any more is dropped."""
        subject, future = self._waiting.pop(message.subject, ("", None))
        if future is None or future.done():
            return
        if not message.data and (message.headers or {}).get("Status") == _NO_RESPONDERS:
            future.set_exception(
                NoResponders(
                    f"nobody listens on {subject}",
                    hint="see whether the actor that answers there runs (`nats micro ls`)",
                )
            )
        else:
            future.set_result(message)

    def fail(self, error: Callable[[str], BrokerError]) -> None:
        """End all requests with an error made from their subjects."""
        waiting, self._waiting = self._waiting, {}
        for subject, future in waiting.values():
            if not future.done():
                future.set_exception(error(subject))

    def deny(self, denied: str, error: BrokerError) -> None:
        """End the requests on a subject that the user has no right to (in lower case)."""
        for subject, future in self._waiting.values():
            if subject.lower() == denied and not future.done():
                future.set_exception(error)
