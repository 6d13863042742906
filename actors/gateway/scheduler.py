"""What the gateway asks the scheduler for, on behalf of one visitor."""

import time
from typing import TypeVar

from ...broker.calls.scheduler import SchedulerCalls
from ...schemas.job import JobRecord
from ...schemas.wire.errors import AuthError
from ...schemas.wire.message import Message
from .sessions import Visitor

R = TypeVar("R", bound=Message)

LIST_AGE_S = 1.0


class Scheduler(SchedulerCalls):
    """The scheduler, as one visitor sees it."""

    def __init__(self, visitor: Visitor) -> None:
        super().__init__(visitor.broker)
        self._visitor = visitor
        self.share = visitor.share

    async def get(self, job: str) -> JobRecord:
        """Return a job of the visitor; raises NotFoundError, AuthError for that of another.

        The scheduler tells admins of it, but this connection cannot read what the job has stored.
        """
        record = await super().get(job)
        if record.user != self._visitor.user:
            raise AuthError(
                f"job {record.job} is {record.user}'s, and only its owner sees into it here",
                hint=f"as an admin: TINKERMQ_AS={record.user} tinkermq logs {record.name}",
            )
        return record

    async def list_jobs(self, *, archived: bool = False) -> list[JobRecord]:
        """Return all jobs of the visitor, newest first; as of a second ago at the oldest.

        Those that were archived are among them only when they are asked for: there may be many.
        """
        if archived:
            return await self.told_jobs(archived=True)
        kept = self._visitor.listed
        if kept is not None and kept[0] + LIST_AGE_S > time.monotonic():
            return kept[1]
        records = await self.told_jobs()
        self._visitor.listed = (time.monotonic(), records)
        return records

    async def _ask(self, method: str, request: Message, reply: type[R]) -> R:
        if method not in ("get", "list", "nodes", "trainers"):
            self._visitor.listed = None
        return await super()._ask(method, request, reply)
