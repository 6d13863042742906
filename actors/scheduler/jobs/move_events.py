"""Tells the events of jobs' moves, which their records hold until they are told.

Each job is told of in a task of its own, so that a stream that takes nothing holds up nobody else;
what fails is left to the next turn. The streams of a job that has ended shrink once its end was
told, and only then its record is done with: whoever is killed on the way leaves the rest to the
next scheduler. Some jobs at a time do so, those first that ended first: a server that is slow would
finish none of a thousand in time, and be asked for all of them anew.
"""

import asyncio
import contextlib
from collections.abc import Iterable

import structlog

from ....broker.client.connection import Broker
from ....broker.jetstream.streams import settle_job_streams, stream_info
from ....broker.jobs import JobStore, is_final
from ....schemas.job import JobRecord
from ....schemas.wire.errors import NotFoundError, TinkermqError
from .versions import last_version

_TELL_S = 10.0
_CLOSING = 8
_LATER = (TinkermqError, TimeoutError)
_log: structlog.stdlib.BoundLogger = structlog.get_logger()


class MoveEvents:
    """Empties the records of what was not told."""

    def __init__(self, broker: Broker, jobs: JobStore) -> None:
        """Be telling nothing."""
        self._broker = broker
        self._jobs = jobs
        self._telling: dict[str, JobRecord] = {}

    def tell(self, records: Iterable[JobRecord], group: asyncio.TaskGroup) -> None:
        """Tell what these records hold, in tasks of `group`, unless that is under way."""
        for record in sorted(records, key=lambda one: one.finished or 0.0):
            key = record.scope.key
            if key in self._telling or (is_final(record) and self.num_closing >= _CLOSING):
                continue
            self._telling[key] = record
            group.create_task(self._tell(key, record), name=f"events of {key}")

    @property
    def num_closing(self) -> int:
        """How many jobs that have ended are being told of just now."""
        return sum(map(is_final, self._telling.values()))

    def closes(self, key: str) -> bool:
        """Whether the streams of a job are being shrunk: it cannot be started again just now."""
        record = self._telling.get(key)
        return record is not None and is_final(record)

    async def _tell(self, key: str, record: JobRecord) -> None:
        try:
            version = record.version
            async with asyncio.timeout(_TELL_S):
                await self._jobs.tell(record)
                stored = None
                if is_final(record):
                    stored = await settle_job_streams(self._broker, record.scope)
                    version = await last_version(self._broker, record)
                await self._jobs.told(record, version, stored)
        except NotFoundError as error:
            await self._give_up(record, error)
        except _LATER as error:  # next turn
            _log.warning("events_wait", job=record.job, error=str(error))
        finally:
            del self._telling[key]

    async def _give_up(self, record: JobRecord, error: NotFoundError) -> None:
        """Forget events whose stream somebody has deleted; they would wait for ever."""
        _log.warning("events_wait", job=record.job, error=error.message, hint=error.hint)
        with contextlib.suppress(*_LATER):
            try:
                await stream_info(self._broker, record.scope.stream_feed)
            except NotFoundError:
                await self._jobs.told(record)
