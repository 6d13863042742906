"""Enters into the records of jobs which policy version they are at."""

import asyncio
import contextlib
import time
from collections.abc import Sequence

from ....broker.client.connection import Broker
from ....broker.jobs import JobStore
from ....broker.observe.recent import recent_values
from ....broker.presence import presences
from ....schemas.job import JobRecord
from ....schemas.wire.errors import ConflictError, MessageError, NotFoundError
from .view import key_of

_EVERY_S = 2.0


class Versions:
    """Reads the heartbeats of learners."""

    def __init__(self, broker: Broker, jobs: JobStore) -> None:
        """Have read none yet."""
        self._broker = broker
        self._jobs = jobs
        self._read = float("-inf")

    async def look(self, active: Sequence[JobRecord]) -> bool:
        """Enter what the learners of these jobs tell, now and then; whether it did."""
        if time.monotonic() - self._read < _EVERY_S:
            return False
        self._read = time.monotonic()
        await asyncio.gather(*map(self._look_at, active))
        return True

    async def _look_at(self, record: JobRecord) -> None:
        entry = await presences(self._broker).find(f"{key_of(record)}.learner")
        version = entry.value.version if entry else None
        if version is not None and version > record.version:
            with contextlib.suppress(ConflictError, NotFoundError, MessageError):
                await self._jobs.update(
                    record, lambda now: now.model_copy(update={"version": version})
                )


async def last_version(broker: Broker, record: JobRecord) -> int:
    """Return the version at which a job has ended: what its learner last told of a step.

    Its heartbeat is gone, and was read every two seconds only.
    """
    if not record.trains:
        return record.version
    try:
        values = await recent_values(broker, record.scope)
    except (NotFoundError, TimeoutError):
        return record.version
    return max(record.version, int(values.get("step", 0)))
