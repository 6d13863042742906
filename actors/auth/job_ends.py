"""Closes what the processes of a job leave open when the job has ended.

A node ends them, unless it is cut off; what was started by hand, or runs on, would keep reading and
writing with a key that opens no new connection. The connections themselves are looked through, and
the time is counted here from when a job was first seen to be over, so clocks need not agree, a
restart costs a delay only, and several auth services may do it.
"""

import asyncio
import time
from typing import NamedTuple

import structlog
from nats.aio.client import Client
from nats.errors import Error as NatsError

from ...broker.client.keys import JobIdentity
from ...broker.jobs import JobStore, is_final
from ...schemas.wire.errors import BrokerError, DeadlineError
from .kicks import connected, kick

EVERY_S = 10.0
GRACE_S = 30.0
"""Longer than a node lets actors drain."""
_log: structlog.stdlib.BoundLogger = structlog.get_logger()


class JobConnection(NamedTuple):
    """Whom the connection of a job's process, or of one of its programs, is named after."""

    user: str
    job: str
    attempt: int
    episode: str = ""
    """Of a program: its episode; empty for the job's own processes."""

    @classmethod
    def of(cls, identity: JobIdentity) -> "JobConnection":
        """Return it for whoever was let in with a job key."""
        return cls(identity.user, identity.job, identity.attempt)

    @classmethod
    def read(cls, name: str) -> "JobConnection | None":
        """Return it from the name, or None for that of a user or a service."""
        parts = name.split(".")
        if len(parts) not in (3, 4) or not parts[2].isdecimal():
            return None
        return cls(parts[0], parts[1], int(parts[2]), *parts[3:])

    @property
    def name(self) -> str:
        """The name under which the server lists the connection."""
        name = f"{self.user}.{self.job}.{self.attempt}"
        return f"{name}.{self.episode}" if self.episode else name


class JobEnds:
    """Looks for connections whose job has ended, again and again."""

    def __init__(
        self, system: Client, jobs: JobStore, *, every_s: float = EVERY_S, grace_s: float = GRACE_S
    ) -> None:
        """Close through the server's `system` account, `grace_s` after a job is seen to be over."""
        self._over_since: dict[str, float] = {}
        self._system = system
        self._jobs = jobs
        self._every_s = every_s
        self._grace_s = grace_s

    async def run(self) -> None:
        """Look every few seconds, for ever."""
        while True:
            await asyncio.sleep(self._every_s)
            try:
                await self._look()
            except (BrokerError, DeadlineError, NatsError) as error:  # the next look does it
                _log.warning("connections_not_seen", error=str(error))

    async def _look(self) -> None:
        known, self._over_since = self._over_since, {}
        seen: dict[tuple[str, str, int], bool] = {}  # a job may have many programs
        for name in sorted(await connected(self._system)):
            connection = JobConnection.read(name)
            if connection is None:
                continue
            attempt = connection[:3]
            if attempt not in seen:
                seen[attempt] = await self._is_over(connection)
            if seen[attempt]:
                since = self._over_since[name] = known.get(name, time.monotonic())
                if time.monotonic() - since >= self._grace_s:
                    await kick(self._system, name)

    async def _is_over(self, connection: JobConnection) -> bool:
        """Whether that attempt of the job has ended."""
        record = await self._jobs.find_by_id(connection.user, connection.job)
        return record is None or record.attempt != connection.attempt or is_final(record)
