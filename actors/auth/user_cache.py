"""The records of users in memory, for what must be cheap: whose line is this, what is the quota.

Who is let in is decided from the record itself (`callout`); a change is here a moment later.
"""

import asyncio

import structlog

from ...broker.client.connection import Broker
from ...broker.fair_queue import DEFAULT_BOUND
from ...broker.jetstream.kv import Mirror
from ...broker.user_records import USER
from ...schemas.user import UserRecord
from ...schemas.wire.errors import BrokerError, DeadlineError
from ...schemas.wire.subjects import BUCKET_USERS

_RETRY_S = 1.0
_log: structlog.stdlib.BoundLogger = structlog.get_logger()


class KnownUsers:
    """The users as of a moment ago."""

    def __init__(self, broker: Broker) -> None:
        """Know nobody yet; `open` reads all."""
        self._mirror = Mirror(broker, BUCKET_USERS, UserRecord, prefix=USER)
        self._changed = asyncio.Event()

    async def open(self) -> None:
        """Listen for changes and read everything."""
        await self._mirror.open(self._changed.set)
        await self._mirror.refresh()

    async def close(self) -> None:
        """Stop listening."""
        await self._mirror.close()

    async def run(self) -> None:
        """Read what changes, for ever."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                await self._mirror.refresh()
            except (BrokerError, DeadlineError) as error:
                _log.warning("users_not_read", error=error.message)
                self._changed.set()
                await asyncio.sleep(_RETRY_S)

    def get(self, user: str) -> UserRecord | None:
        """Return a user, or None."""
        entry = self._mirror.entries.get(f"{USER}.{user}")
        return None if entry is None else entry.value

    def requests(self, user: str) -> int | None:
        """Return how many requests of a user may run at once."""
        record = self.get(user)
        return DEFAULT_BOUND if record is None else record.max_requests
