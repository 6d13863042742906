"""The archived jobs: names and sizes in memory, the rest in a bucket.

Of each job only what other jobs are checked against stays in memory, a few hundred bytes; its
record is read on request. Only the leading scheduler writes there, so what it has read stays true.
"""

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from ....broker.client.connection import Broker
from ....broker.fair_queue import FairLock
from ....broker.jetstream.kv import Bucket
from ....schemas.job import JobRecord
from ....schemas.wire.message import Message
from ....schemas.wire.subjects import BUCKET_ARCHIVE, JobScope

_AT_ONCE = 64


class ArchivedFields(Message):
    """The fields of a job's record of which an archive is made up."""

    job: str
    """Job id."""
    user: str
    """Owner."""
    name: str
    """Name of the run."""
    created: float
    """Seconds since the epoch."""
    run_dir: str = ""
    """Folder of the run."""

    def named_at(self, at: str) -> str:
        """Return the key of the job."""
        return JobScope(self.user, self.job).key


@dataclass(frozen=True, slots=True)
class ArchivedJob:
    """What is kept in memory of an archived job."""

    job: str
    """Job id."""
    user: str
    """Owner."""
    name: str
    """Name of the run."""
    created: float
    """Seconds since the epoch."""
    run_dir: str
    """Folder of the run."""
    num_bytes: int
    """Of its record."""


class ArchivedJobs:
    """The archived jobs of all users."""

    def __init__(self, broker: Broker) -> None:
        """Know none yet; `open` reads them."""
        self._fields = Bucket(broker, BUCKET_ARCHIVE, ArchivedFields)
        self._records = Bucket(broker, BUCKET_ARCHIVE, JobRecord)
        self._jobs: dict[str, ArchivedJob] = {}
        self._of_user: dict[str, dict[str, ArchivedJob]] = {}
        self._names: dict[tuple[str, str], ArchivedJob] = {}
        self._bytes: dict[str, int] = {}
        self.turns = FairLock()
        """Of the users whose long lists are made."""

    async def open(self) -> None:
        """Read which jobs there are."""
        async for entry, num_bytes in self._fields.scan():
            self._add(_kept(entry.value, num_bytes))

    def enter(self, record: JobRecord) -> None:
        """Enter a job whose record has just been put away."""
        self._add(_kept(record, len(record.to_bytes())))

    def drop(self, job: str) -> None:
        """Forget a job that was deleted or brought back; harmless when it is not known."""
        gone = self._jobs.pop(job, None)
        if gone is not None:
            del self._of_user[gone.user][job]
            self._bytes[gone.user] -= gone.num_bytes
            if self._names.get((gone.user, gone.name)) is gone:
                del self._names[gone.user, gone.name]

    def _add(self, job: ArchivedJob) -> None:
        self.drop(job.job)
        self._jobs[job.job] = job
        self._of_user.setdefault(job.user, {})[job.job] = job
        self._names[job.user, job.name] = job
        self._bytes[job.user] = self._bytes.get(job.user, 0) + job.num_bytes

    def of(self, user: str | None) -> Iterable[ArchivedJob]:
        """Return the archived jobs of a user, or of all."""
        return (self._jobs if user is None else self._of_user.get(user, {})).values()

    def __len__(self) -> int:
        return len(self._jobs)

    def named(self, user: str, name: str) -> str | None:
        """Return the id of the archived job of a user that has this name, or None."""
        match = self._names.get((user, name))
        return None if match is None else match.job

    def held(self, user: str) -> tuple[int, int]:
        """Return how many archived jobs a user has, and the bytes of their records."""
        return len(self._of_user.get(user, {})), self._bytes.get(user, 0)

    async def find(self, user: str, name: str, *, of_all: bool = False) -> JobRecord | None:
        """Return an archived job of a user by its id or the name of its run, or None.

        With `of_all` also anybody's by its id.
        """
        known = self._of_user.get(user, {}).get(name) or self._names.get((user, name))
        if known is None and of_all:
            known = self._jobs.get(name)
        return None if known is None else await self._read(known)

    async def read(self, jobs: Iterable[JobRecord | ArchivedJob], reader: str) -> list[JobRecord]:
        """Return the records of jobs, those of archived ones read; what is gone is left out.

        Some are read at once, and then it is another `reader`'s turn.
        """
        wanted = list(jobs)
        archived = [job for job in wanted if isinstance(job, ArchivedJob)]
        read: dict[str, JobRecord | None] = {}
        for first in range(0, len(archived), _AT_ONCE):
            some = archived[first : first + _AT_ONCE]
            async with self.turns.turn(reader):
                records = await asyncio.gather(*map(self._read, some))
            read.update(zip((job.job for job in some), records, strict=True))
        matches = (job if isinstance(job, JobRecord) else read[job.job] for job in wanted)
        return [record for record in matches if record is not None]

    async def _read(self, job: ArchivedJob) -> JobRecord | None:
        entry = await self._records.find(JobScope(job.user, job.job).key)
        return None if entry is None else entry.value


def _kept(job: ArchivedFields | JobRecord, num_bytes: int) -> ArchivedJob:
    return ArchivedJob(job.job, job.user, job.name, job.created, job.run_dir, num_bytes)


# -- which ended jobs are archived automatically (pure) --------------------------------------------


@dataclass(frozen=True)
class RetentionLimits:
    """How many jobs that have ended stay at hand, with their streams at the broker."""

    of_user: int = 100
    """Of each user: the newest."""
    of_all: int = 1000
    """Of all users together: the user with the most gives up the oldest."""


Ended = Mapping[str, Mapping[str, float]]
"""By user, the jobs that have ended and when, by key."""


def beyond(ended: Ended, keeping: RetentionLimits) -> Iterator[str]:
    """Yield the keys of the jobs to archive, in this order."""
    counts = {user: len(of_user) for user, of_user in ended.items() if of_user}
    oldest: dict[str, Iterator[str]] = {}
    total = sum(counts.values())
    while counts:
        user = max(counts, key=lambda one: (counts[one], one))
        if counts[user] <= keeping.of_user and total <= keeping.of_all:
            return
        if user not in oldest:
            oldest[user] = iter(sorted(ended[user], key=lambda key: (ended[user][key], key)))
        yield next(oldest[user])
        counts[user] -= 1
        total -= 1
        if not counts[user]:
            del counts[user]
