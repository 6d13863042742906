"""What clients ask the scheduler for, over one connection.

Changes are requests to the scheduler; what is known is read from the job records themselves, so
that looking works while the scheduler is down.
"""

from ..broker.connection import Broker
from ..broker.jobs import JobStore
from ..broker.scheduler_calls import SchedulerCalls, new_request_id
from ..schemas.errors import MessageError, NotFoundError
from ..schemas.job import FINAL_STATES, JobRecord
from ..schemas.subjects import token
from .names import did_you_mean

__all__ = ["Pool", "is_token", "new_request_id"]


class Pool(SchedulerCalls):
    """The scheduler and its jobs, on behalf of the connection's user."""

    def __init__(self, broker: Broker) -> None:
        super().__init__(broker)
        self._jobs = JobStore(broker)

    async def find(self, name: str) -> JobRecord:
        """Return a job by its id or the name of its run.

        Raises NotFoundError that names the closest run.
        """
        record = await self._jobs.find(self.broker.user, name) if is_token(name) else None
        if record is not None:
            return record
        records = await self.list_jobs(all=True)
        known = [known for record in records for known in (record.name, record.job)]
        raise NotFoundError(
            f"there is no run {name!r}",
            hint=did_you_mean(name, known, otherwise="list them with `tinkermq ps --all`"),
        )

    async def everybodys_jobs(self, *, all: bool = False) -> list[JobRecord]:
        """Return the jobs of all users as the scheduler tells them to an admin, newest first."""
        records = await self.told_jobs(widest=True)
        return [record for record in records if all or record.state not in FINAL_STATES]

    async def list_jobs(self, *, all: bool = False) -> list[JobRecord]:
        """Return the jobs that have not ended, or all, newest first."""
        records = await self._jobs.list_jobs(self.broker.user)
        return [record for record in records if all or record.state not in FINAL_STATES]


def is_token(name: str) -> bool:
    """Whether a name can be that of a run at all."""
    try:
        token(name, what="run")
    except MessageError:
        return False
    return True
