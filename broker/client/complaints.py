"""What nats-py tells only to a callback, turned into errors.

A server that refuses a user who was let in before is asked again more slowly, for its auth service
may be starting; after half a minute the connection is closed for good, unless it is an actor's.
"""

import asyncio
import time
from collections.abc import Callable

import nats.errors
import structlog
from nats.aio.client import Client

from ...schemas.wire.errors import BrokerError
from ..load.rates import Rates
from ..outages.availability import Availability
from . import faults
from .listening import Callbacks
from .replies import Replies

RECONNECT_WAIT_S = 0.05
REFUSED_WAIT_S = 1.0
REFUSED_FOR_S = 30.0
_DROPPED_S = 5.0
"""Between two complaints about messages of one subscription that were dropped."""

_log = structlog.get_logger()


class Complaints:
    """Takes the errors of one connection."""

    def __init__(
        self,
        url: str,
        user: str,
        client: Client,
        replies: Callable[[], Replies],
        availability: Availability,
    ) -> None:
        self._availability = availability
        self.callbacks = Callbacks[Callable[[BrokerError], None]]()
        self.last: Exception | None = None
        """The last error since the connection was up."""
        self.expects: asyncio.Future[BrokerError] | None = None
        """Takes a refusal while the first connect is under way."""
        self._url = url
        self._user = user
        self._client = client
        self._replies = replies
        self._refused_since: float | None = None
        self._closing: asyncio.Task[None] | None = None
        self._dropped = Rates(1 / _DROPPED_S, 1)

    def expect_refusal(self) -> "asyncio.Future[BrokerError]":
        """Return the future of a refusal at the first connect."""
        self.expects = asyncio.get_running_loop().create_future()
        return self.expects

    def forget(self) -> None:
        """Take notice that the connection is up again."""
        self.last = self._refused_since = None
        self._client.options["reconnect_time_wait"] = RECONNECT_WAIT_S

    async def take(self, error: Exception) -> None:
        """Take what nats-py tells only to its error callback."""
        self.last = error
        if denied := faults.denied_subject(error):
            refusal = faults.denied(self._user, *denied)
            self._replies().deny(denied[1], refusal)
            self.report("subject_denied", refusal)
        elif isinstance(error, nats.errors.SlowConsumerError):
            if self._dropped.take(error.subject, time.monotonic()) is not None:
                self.report("messages_dropped", faults.dropped(error.subject))
        elif faults.is_refusal(error):
            self._refuse(error)
        elif self._client.is_connected and not isinstance(error, nats.errors.UnexpectedEOF):
            _log.warning("broker_error", error=repr(error))

    def _refuse(self, error: Exception) -> None:
        refusal = faults.refused(self._url, self._user, error)
        if self.expects is not None:
            if not self.expects.done():
                self.expects.set_result(refusal)
            return
        now = time.monotonic()
        if self._refused_since is None:
            self._refused_since = now
            self._client.options["reconnect_time_wait"] = REFUSED_WAIT_S
            self.report("connection_refused", refusal)
        elif self._availability.outlasts_refusal or self._client.is_closed:
            return
        elif now - self._refused_since > REFUSED_FOR_S:
            self._closing = asyncio.create_task(self._client.close(), name="close refused")

    def report(self, event: str, error: BrokerError) -> None:
        """Log an error and hand it to whoever wants to know."""
        _log.error(event, message=error.message, hint=error.hint)
        for callback in self.callbacks:
            callback(error)
