"""Archives the oldest of the jobs that have ended, so that what is at hand stays bounded.

It only writes into the records what shall be done, as a user's request does; the remover does it.
"""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import structlog

from ....broker.jobs import JobStore, is_final
from ....schemas.job import JobRecord
from ....schemas.wire.errors import TinkermqError
from .keeping import Keeping, beyond
from .view import JobsView

_AGAIN_S = 600.0
_MOST = 16
_log: structlog.stdlib.BoundLogger = structlog.get_logger()


class Tidier:
    """Finds what is beyond the bounds, some jobs at a time."""

    def __init__(self, jobs: JobStore, view: JobsView, keeping: Keeping) -> None:
        """Let `keeping` say how much stays."""
        self._jobs = jobs
        self._view = view
        self._keeping = keeping
        self._task: asyncio.Task[None] | None = None
        self._not_before: dict[str, float] = {}

    def look(self, group: asyncio.TaskGroup) -> None:
        """Mark what is to be archived, in a task of `group`."""
        if self._task is not None and not self._task.done():
            return
        found = list(self._candidates())
        if found:
            self._task = group.create_task(self._mark(found), name="jobs to archive")

    def _candidates(self) -> Iterator[JobRecord]:
        """Yield the next jobs to archive; those that are being archived count as gone."""
        left = _MOST - self._view.num_removals
        if left <= 0:
            return
        followed = {one.follow for one in self._view.live.values()}
        now = time.monotonic()
        for key in beyond(self._view.ended, self._keeping):
            record = self._view.at(key)
            if record is None or record.job in followed or now < self._not_before.get(key, now):
                continue
            if record.removal == "no" and _may_go(record):
                yield record
                left -= 1
                if left <= 0:
                    return

    async def _mark(self, records: list[JobRecord]) -> None:
        self._not_before = {
            key: until for key, until in self._not_before.items() if until > time.monotonic()
        }
        for record in records:
            if not await asyncio.to_thread(_has_folder, record):  # not on this machine, or removed
                self._not_before[record.scope.key] = time.monotonic() + _AGAIN_S
                continue
            try:
                async with self._view.lock(record.user):
                    await self._jobs.update(record, _marked)
            except TinkermqError as error:  # somebody wrote it first, or the broker is away
                _log.info("tidying_waits", job=record.job, error=error.message)


def _may_go(record: JobRecord) -> bool:
    """Whether a job that has ended needs nothing any more of what an archive puts away.

    A service for the Tinker API stays: its record counts its users' tokens.
    """
    return record.kind != "tinker" and not (record.untold and record.has_streams)


def _marked(record: JobRecord) -> JobRecord:
    if not is_final(record) or record.removal != "no":
        return record
    return record.model_copy(update={"removal": "archive"})


def _has_folder(record: JobRecord) -> bool:
    """Whether what the broker stores of a job can be put into its run folder, if there is any."""
    return not record.has_streams or (bool(record.run_dir) and Path(record.run_dir).is_dir())
