"""All jobs and quotas in memory, kept up to date by the broker; archived jobs by name and size."""

import asyncio
import contextlib
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from ....broker.client.connection import Broker
from ....broker.client.fair_queue import FairLock
from ....broker.jetstream.kv import Bucket, Entry, Mirror
from ....broker.jobs import JobStore, is_final
from ....broker.presence import presences
from ....broker.user_records import USER
from ....schemas.config.job import JobConfig
from ....schemas.config.load_config import parse_config
from ....schemas.job import (
    ActorPlacement,
    JobRecord,
    RequestRecord,
    SealedSecrets,
    held_slots,
)
from ....schemas.machines import MachineSpending
from ....schemas.metric import EvalRecord, Presence
from ....schemas.node import DamagedRecord, DamagedRecords, NodeStatus, SchedulerLease
from ....schemas.tinker.operation import TrainerOffer
from ....schemas.user import NO_BOUNDS, Quota, UserRecord
from ....schemas.wire import subjects
from ....schemas.wire.errors import (
    ConflictError,
    MessageError,
    NotFoundError,
    QuotaError,
    TinkermqError,
)
from ....schemas.wire.message import Message
from ....schemas.wire.subjects import BUCKET_ARCHIVE, JobScope
from ..placement import Placed, UserShares, is_queued
from .states import (
    ACTIVE,
    check_bucket,
    check_record,
    check_room,
    holdings,
    slots_of,
    stored_bytes,
)

_MOST_HOLDERS = 3
"""So many runs that hold slots are named to a job that waits."""

# -- archived jobs ---------------------------------------------------------------------------------
# Memory holds a few hundred bytes of each archived job; its record is read on request. Only the
# leading scheduler writes archived records, so that memory stays correct.

_AT_ONCE = 64


class ArchivedFields(Message):
    """The fields of a job's record that an archive entry needs."""

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
    """The fields of an archived job that stay in memory."""

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
    """Size of its record."""


class ArchivedJobs:
    """The archived jobs of all users."""

    def __init__(self, broker: Broker) -> None:
        """Start empty; `open` reads the jobs."""
        self._fields = Bucket(broker, BUCKET_ARCHIVE, ArchivedFields)
        self._records = Bucket(broker, BUCKET_ARCHIVE, JobRecord)
        self._jobs: dict[str, ArchivedJob] = {}
        self._of_user: dict[str, dict[str, ArchivedJob]] = {}
        self._names: dict[tuple[str, str], ArchivedJob] = {}
        self._bytes: dict[str, int] = {}
        self.turns = FairLock()
        """Turns of users who request long lists."""

    async def open(self) -> None:
        """Read the archived jobs."""
        async for entry, num_bytes in self._fields.scan():
            self._add(_kept(entry.value, num_bytes))

    def enter(self, record: JobRecord) -> None:
        """Enter a job that has just been archived."""
        self._add(_kept(record, len(record.to_bytes())))

    def drop(self, job: str) -> None:
        """Remove a deleted or restored job; an unknown one is ignored."""
        removed = self._jobs.pop(job, None)
        if removed is not None:
            del self._of_user[removed.user][job]
            self._bytes[removed.user] -= removed.num_bytes
            if self._names.get((removed.user, removed.name)) is removed:
                del self._names[removed.user, removed.name]

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
        """Return the id of the user's archived job with this name, or None."""
        match = self._names.get((user, name))
        return None if match is None else match.job

    def held(self, user: str) -> tuple[int, int]:
        """Return the number of a user's archived jobs, and the bytes of their records."""
        return len(self._of_user.get(user, {})), self._bytes.get(user, 0)

    async def find(self, user: str, name: str, *, of_all: bool = False) -> JobRecord | None:
        """Return a user's archived job by its id or run name, or None.

        With `of_all`, also any user's job by its id.
        """
        known = self._of_user.get(user, {}).get(name) or self._names.get((user, name))
        if known is None and of_all:
            known = self._jobs.get(name)
        return None if known is None else await self._read(known)

    async def read(self, jobs: Iterable[JobRecord | ArchivedJob], reader: str) -> list[JobRecord]:
        """Return the records of jobs, reading archived ones; deleted jobs are left out.

        Records are read in batches, and `reader`s take turns.
        """
        ids = list(jobs)
        archived = [job for job in ids if isinstance(job, ArchivedJob)]
        read: dict[str, JobRecord | None] = {}
        for first in range(0, len(archived), _AT_ONCE):
            some = archived[first : first + _AT_ONCE]
            async with self.turns.turn(reader):
                records = await asyncio.gather(*map(self._read, some))
            read.update(zip((job.job for job in some), records, strict=True))
        matches = (job if isinstance(job, JobRecord) else read[job.job] for job in ids)
        return [record for record in matches if record is not None]

    async def _read(self, job: ArchivedJob) -> JobRecord | None:
        entry = await self._records.find(JobScope(job.user, job.job).key)
        return None if entry is None else entry.value


def _kept(job: ArchivedFields | JobRecord, num_bytes: int) -> ArchivedJob:
    return ArchivedJob(job.job, job.user, job.name, job.created, job.run_dir, num_bytes)


# -- which ended jobs are archived automatically (pure) --------------------------------------------


@dataclass(frozen=True)
class RetentionLimits:
    """Limits on ended jobs that are not archived and keep their streams at the broker."""

    of_user: int = 100
    """Number of newest jobs per user."""
    of_all: int = 1000
    """Number of jobs of all users: the oldest of the user with the most is archived first."""


_Ended = Mapping[str, Mapping[str, float]]
"""Ended jobs and their end times by user and key."""


def beyond(ended: _Ended, keeping: RetentionLimits) -> Iterator[str]:
    """Yield the keys of the jobs to archive, in this order."""
    counts = {user: len(of_user) for user, of_user in ended.items() if of_user}
    oldest: dict[str, Iterator[str]] = {}
    total = sum(counts.values())
    while counts:
        user = max(counts, key=lambda item: (counts[item], item))
        if counts[user] <= keeping.of_user and total <= keeping.of_all:
            return
        if user not in oldest:
            oldest[user] = iter(sorted(ended[user], key=lambda key: (ended[user][key], key)))
        yield next(oldest[user])
        counts[user] -= 1
        total -= 1
        if not counts[user]:
            del counts[user]


# -- all jobs --------------------------------------------------------------------------------------

PAGE_RECORDS, PAGE_BYTES = 1000, 1 << 20
"""Limits of one answer, which has at least one record."""
PAGE_ARCHIVED = 200
"""Limit of archived records in one answer, as each is read before the answer is sent."""


class JobsView:
    """All job records as of the last `refresh`, with this scheduler's own writes since then."""

    def __init__(self, broker: Broker) -> None:
        """Start empty; `open` and `refresh` read the records."""
        self._jobs = Mirror(broker, subjects.BUCKET_JOBS, JobRecord)
        self._users = Mirror(broker, subjects.BUCKET_USERS, UserRecord, prefix=USER)
        self.live: dict[str, JobRecord] = {}
        """Jobs that have not ended, by key."""
        self.waits: dict[str, tuple[int, str]] = {}
        """Queue position (from 1) and reason of each waiting job, by key."""
        self.archive = ArchivedJobs(broker)
        """Archived jobs."""
        self.ended: dict[str, dict[str, float]] = {}
        """Ended jobs that are not archived, with their end times, by user."""
        self._untold: set[str] = set()
        self._removals: set[str] = set()
        self._names: dict[tuple[str, str], str] = {}
        self._name_of: dict[str, tuple[str, str]] = {}
        self._of_user: dict[str, dict[str, int]] = {}
        self._sized: dict[str, int] = {}
        self._places: dict[str, str] = {}
        self._num_bytes = 0
        self.has_users = broker.user != subjects.DEFAULT_USER
        """Whether this is a pool with users."""
        self._configs: dict[str, tuple[int, JobConfig]] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._lost: dict[str, JobRecord] = {}
        self._num_lists = 0

    async def open(self, on_change: Callable[[], None]) -> None:
        """Listen for changes and read everything."""
        await self._jobs.open(on_change)
        await self._users.open(on_change)
        await self.archive.open()
        await self.refresh()

    async def close(self) -> None:
        """Stop listening."""
        await self._jobs.close()
        await self._users.close()

    async def refresh(self) -> None:
        """Read what has changed."""
        changed = await self._jobs.refresh()
        for key in changed:
            entry = self._jobs.entries.get(key)
            if entry is None:
                self._gone(key)
            else:
                self.enter(entry)
        self._lost |= {key: entry.value for key, entry in self._jobs.lost.items()}
        self._jobs.lost = {}
        await self._users.refresh()

    def relist(self) -> None:
        """List all records at the next refresh, as one of them is missing at the broker."""
        self._jobs.relist()

    async def mend(self, jobs: JobStore) -> None:
        """Restore records that the broker's store has lost, after each list of all records.

        Raises BrokerError, DeadlineError; the next call continues.
        """
        if (num_lists := self._jobs.num_lists) == self._num_lists and not self._lost:
            return
        known = {key: entry.value for key, entry in self._jobs.entries.items()}
        lost, self._lost = self._lost, {}
        try:
            await jobs.mend(known, lost)
        except TinkermqError:
            self._lost = lost | self._lost
            raise
        self._num_lists = num_lists

    def _gone(self, key: str) -> None:
        """Remove a job whose record was deleted."""
        self._untold.discard(key)
        self._removals.discard(key)
        self._forget(key)
        self._forget_name(key)
        self._forget_size(key)

    def lock(self, user: str) -> asyncio.Lock:
        """Return the lock of a user's requests, which makes counts of holdings correct."""
        return self._locks.setdefault(user, asyncio.Lock())

    def enter_archived(self, record: JobRecord) -> None:
        """Record that an archived job's record has left the bucket of jobs."""
        key = key_of(record)
        self._jobs.drop(key)
        self._gone(key)
        self.archive.enter(record)

    def enter(self, entry: Entry[JobRecord]) -> None:
        """Add a record that was just read or written, unless a newer one is present."""
        newest = self._jobs.put(entry)
        key, record = newest.key, newest.value
        named = (record.user, record.name)
        if self._names.get(named) != key:
            self._forget_name(key)
            self._names[named], self._name_of[key] = key, named
        if self._sized.get(key) != newest.revision:
            self._forget_size(key)
            self._sized[key] = newest.revision
            self._places[key] = _place(record)
            size = self._of_user.setdefault(record.user, {})[key] = size_of(record)
            self._num_bytes += size
            self.archive.drop(record.job)  # if both buckets have it, this one is valid
        if record.untold and record.has_streams:
            self._untold.add(key)
        else:
            self._untold.discard(key)
        if record.removal == "no":
            self._removals.discard(key)
        else:
            self._removals.add(key)
        if is_final(record):
            self._forget(key)
            ended = record.brought_back or record.finished or record.created
            self.ended.setdefault(record.user, {})[key] = ended
        else:
            self.ended.get(record.user, {}).pop(key, None)
            self.live[key] = record

    def _forget_name(self, key: str) -> None:
        """Release the name of a job."""
        named = self._name_of.pop(key, None)
        if named is not None and self._names.get(named) == key:
            del self._names[named]

    def _forget_size(self, key: str) -> None:
        self._sized.pop(key, None)
        self._places.pop(key, None)
        self._num_bytes -= self._of_user.get(key.partition(".")[0], {}).pop(key, 0)

    def _forget(self, key: str) -> None:
        self.live.pop(key, None)
        self.waits.pop(key, None)
        self._configs.pop(key, None)
        self.ended.get(key.partition(".")[0], {}).pop(key, None)

    def find(self, user: str, name: str) -> JobRecord | None:
        """Return a job of `user` by its id or run name, unless it is archived."""
        key = f"{user}.{name}"
        entry = self._jobs.entries.get(key) or self._jobs.entries.get(
            self._names.get((user, name), key)
        )
        return None if entry is None else entry.value

    async def get(self, user: str, name: str) -> JobRecord:
        """Return a job of `user`, archived or not; raises NotFoundError."""
        record = self.find(user, name) or await self.archive.find(user, name)
        if record is None:
            raise NotFoundError(
                f"user {user!r} has no run {name!r}",
                hint="list them with `tinkermq ps --all`",
            )
        return record

    async def steered(self, user: str, name: str) -> JobRecord:
        """Return a job that `user` may control: an own job, or for an admin any job by its id.

        Raises NotFoundError.
        """
        if self.is_admin(user):
            result = next((item for item in self._every() if item.job == name), None)
            result = result or await self.archive.find(user, name, of_all=True)
            if result is not None:
                return result
        return await self.get(user, name)

    def offers(self) -> list[TrainerOffer]:
        """Return the base models of the running services for the Tinker API."""
        collected: list[TrainerOffer] = []
        for record in self.live.values():
            if record.kind == "tinker" and record.configured and not is_final(record):
                config = self.config(record)
                collected.append(
                    TrainerOffer(
                        job=record.job,
                        base=config.tinker.base,
                        max_context=config.generator.max_context or 0,
                        max_rank=config.tinker.max_rank,
                    )
                )
        return sorted(collected, key=lambda offer: offer.base)

    def records(self, user: str | None = None) -> list[JobRecord]:
        """Return the jobs of a user, or of all users, newest first."""
        entries = self._jobs.entries
        keys = self._places if user is None else self._of_user.get(user, {})
        newest_first = sorted(keys, key=self._places.__getitem__, reverse=True)
        return [entries[key].value for key in newest_first if key in entries]

    def _own(self, user: str) -> Iterator[JobRecord]:
        entries = self._jobs.entries
        return (entries[key].value for key in self._of_user.get(user, {}) if key in entries)

    def with_archived(
        self, records: Iterable[JobRecord], user: str | None
    ) -> list[JobRecord | ArchivedJob]:
        """Return jobs and archived jobs of a user, or of all users, newest first."""
        return sorted((*records, *self.archive.of(user)), key=_place, reverse=True)

    def page(
        self, records: Sequence[JobRecord | ArchivedJob], after: str
    ) -> tuple[list[JobRecord | ArchivedJob], str]:
        """Return the jobs of one page, newest first, and the start of the next page.

        `after` is the start returned with the previous page; empty for the first page. The last
        page returns an empty start.
        """
        collected: list[JobRecord | ArchivedJob] = []
        num_bytes = num_archived = 0
        first = bisect_left(records, True, key=lambda item: _place(item) < after) if after else 0
        for record in islice(records, first, None):
            num_bytes += self._size(record)
            num_archived += isinstance(record, ArchivedJob)
            full = len(collected) >= PAGE_RECORDS or num_archived > PAGE_ARCHIVED
            if collected and (full or num_bytes > PAGE_BYTES):
                return collected, _place(collected[-1])
            collected.append(record)
        return collected, ""

    def _size(self, job: JobRecord | ArchivedJob) -> int:
        if isinstance(job, ArchivedJob):
            return job.num_bytes
        return self._of_user.get(job.user, {}).get(key_of(job), 0)

    def run_folders_of_others(self, user: str) -> list[tuple[str, str]]:
        """Return run folder and owner of each job of other users."""
        every = (*self._every(), *self.archive.of(None))
        return [(item.run_dir, item.user) for item in every if item.user != user]

    def run_folders_of(self, user: str) -> list[Path]:
        """Return the run folders of a user's jobs."""
        every = (*self._every(), *self.archive.of(user))
        return [Path(item.run_dir) for item in every if item.user == user and item.run_dir]

    def _every(self) -> Iterator[JobRecord]:
        return (entry.value for entry in self._jobs.entries.values())

    def owner_of(self, user: str, name: str) -> str | None:
        """Return the id of the user's job with this name, or None if the name is free."""
        key = self._names.get((user, name))
        return self.archive.named(user, name) if key is None else key.partition(".")[2]

    def untold(self) -> list[JobRecord]:
        """Return the jobs with events to publish, including ended jobs."""
        return [self._jobs.entries[key].value for key in self._untold]

    def removals(self) -> list[JobRecord]:
        """Return the jobs to archive, restore or delete."""
        return [self._jobs.entries[key].value for key in sorted(self._removals)]

    @property
    def num_removals(self) -> int:
        """Number of jobs to archive, restore or delete."""
        return len(self._removals)

    def at(self, key: str) -> JobRecord | None:
        """Return the job with this key, unless it is archived."""
        entry = self._jobs.entries.get(key)
        return None if entry is None else entry.value

    def unread(self) -> list[JobRecord]:
        """Return the live jobs with an unparsed configuration."""
        return [
            record
            for key, record in self.live.items()
            if record.configured and self._configs.get(key, (0,))[0] != record.attempt
        ]

    def config(self, record: JobRecord) -> JobConfig:
        """Return the parsed configuration, which does not change within an attempt.

        Raises ConfigError.
        """
        key = key_of(record)
        cached = self._configs.get(key)
        if cached is None or cached[0] != record.attempt:
            cached = self._configs[key] = (record.attempt, parse_config(record.config))
        return cached[1]

    def quota(self, user: str) -> Quota:
        """Return the quota of a user."""
        entry = self._users.entries.get(f"{USER}.{user}")
        unknown = Quota() if self.has_users else NO_BOUNDS
        return unknown if entry is None else entry.value

    def tinker_tokens(self, user: str) -> int:
        """Return the tokens computed for a user by Tinker services, including ended ones."""
        return sum(
            record.tinker_tokens.get(user, 0) + record.tinker_sampled.get(user, 0)
            for record in self._every()
        )

    def held(self, user: str) -> dict[str, int]:
        """Return a user's holdings, by the names of a quota's bounds."""
        held = holdings(self._own(user), self._of_user.get(user, {}))
        num_jobs, num_bytes = self.archive.held(user)
        held["max_jobs"] += num_jobs
        held["max_record_bytes"] += num_bytes
        return held

    def check_priority(self, user: str, priority: int) -> None:
        """Raise QuotaError if a user may not give jobs this priority."""
        highest = self.quota(user).max_priority
        if priority > highest:
            raise QuotaError(
                f"priority {priority} is above the highest that user {user!r} may give, {highest}",
                hint="give a lower one, or ask an admin",
            )

    def check_room(self, user: str, **more: int) -> None:
        """Raise QuotaError if a user may not hold this much more, by the name of the bound."""
        check_room(user, self.quota(user), self.held(user), **more)

    def check_alone(self, user: str, actors: Sequence[ActorPlacement]) -> None:
        """Raise QuotaError if a user without other holdings could not hold these actors."""
        check_room(user, self.quota(user), {}, max_slots=slots_of(actors), max_actors=len(actors))

    def check_growth(self, before: JobRecord | None, after: JobRecord) -> None:
        """Raise QuotaError unless there is room for a record, or for its growth."""
        user, new = after.user, size_of(after)
        more = new - (size_of(before) if before is not None else 0)
        if more > 0:
            check_record(after, new)
            check_bucket(self._num_bytes, more, is_admin=self.may_administer(user))
        self.check_room(
            user,
            max_live_jobs=int(before is None or is_final(before)),
            max_record_bytes=more,
            max_stored_bytes=after.stored_bytes - stored_bytes(before),
        )

    def numbers(self) -> dict[str, float]:
        """Return the numbers of live, ended and archived jobs."""
        return {
            "jobs_live": len(self.live),
            "jobs_ended": sum(map(len, self.ended.values())),
            "jobs_archived": len(self.archive),
        }

    def is_admin(self, user: str) -> bool:
        """Return whether a user may see and control all users' jobs."""
        entry = self._users.entries.get(f"{USER}.{user}")
        return entry is not None and entry.value.role == "admin"

    def may_administer(self, user: str) -> bool:
        """Return whether a user has admin rights; in a pool without users, everyone has."""
        return not self.has_users or self.is_admin(user)

    def shares(self, aging_s: float) -> UserShares:
        """Return all users' holdings and quotas; a waiting job gains a point every `aging_s`.

        Missing actors of a running job count as held, so that its user's other jobs do not take
        their room.
        """
        users = [entry.value for entry in self._users.entries.values()]
        unknown = Quota() if self.has_users else NO_BOUNDS
        quotas = {user.user: user for user in users}
        shares = UserShares(quotas=quotas, unknown=unknown, aging_s=aging_s)
        for record in self.live.values():
            if record.state in ACTIVE:
                shares.add(record.user, slots_of(record.actors), len(record.actors))
        return shares

    def note_waits(self, placed: Placed) -> None:
        """Store the order of the queue, and why each run waits.

        The next run, and the first one of each user, are told who holds slots.
        """
        held: defaultdict[str, dict[str, int]] = defaultdict(dict)
        for record in self.live.values():
            if count := sum(held_slots(record).values()):
                held[record.user][record.name] = count
        total = sum(sum(mine.values()) for mine in held.values())
        self.waits, users = {}, set[str]()
        for key, why in placed.waits.items():
            user = self.live[key].user
            if not is_queued(self.live[key]):
                continue
            if key == placed.head or user not in users:
                why += _holders(held.get(user, {}), total)
            users.add(user)
            self.waits[key] = (len(self.waits) + 1, why)

    def with_queue_place(self, record: JobRecord) -> JobRecord:
        """Return a record with its queue position, if it is queued."""
        if record.state != "QUEUED":
            return record
        place, why = self.waits.get(key_of(record), (0, ""))
        if not place:
            return record
        reason = f"{why} ({place} of {len(self.waits)} in the queue)"
        return record.model_copy(update={"reason": reason, "place": place})


def _holders(own: Mapping[str, int], total: int) -> str:
    """Return which of a user's runs hold slots, and how many others hold; empty: nobody."""
    named = sorted(own.items(), key=lambda item: (-item[1], item[0]))  # alike after a restart
    parts = [f"{name} holds {count}" for name, count in named[:_MOST_HOLDERS]]
    if rest := sum(count for _, count in named[_MOST_HOLDERS:]):
        parts.append(f"other runs hold {rest}")
    if others := total - sum(own.values()):
        parts.append(f"other users hold {others}")
    freed = f" (`tinkermq stop {named[0][0]}` frees them)" if named else ""
    return f"; {', '.join(parts)}{freed}" if parts else ""


def _place(record: JobRecord | ArchivedJob) -> str:
    """Return a key that sorts records by their time, then by their id."""
    return f"{record.created:020.6f} {record.job}"


def key_of(record: JobRecord) -> str:
    """Return the key of a job in the shared buckets."""
    return record.scope.key


def size_of(record: JobRecord) -> int:
    """Return the stored size of a record."""
    return len(record.to_bytes())


# Unreadable records, and records under a wrong key. Readers skip and log them; `DamageReport` lists
# them. It reads whole buckets, so its result is cached for a while.

_BUCKETS: tuple[tuple[str, type[Message], str], ...] = (
    (subjects.BUCKET_JOBS, JobRecord, ""),
    (subjects.BUCKET_ARCHIVE, JobRecord, ""),
    (subjects.BUCKET_NODES, NodeStatus, ""),
    (subjects.BUCKET_ACTORS, Presence, ""),
    (subjects.BUCKET_EVALS, EvalRecord, ""),
    (subjects.BUCKET_REQUESTS, RequestRecord, ""),
    (subjects.BUCKET_SECRETS, SealedSecrets, ""),
    (subjects.BUCKET_LEASES, SchedulerLease, ""),
    (subjects.BUCKET_MACHINES, MachineSpending, ""),
    (subjects.BUCKET_USERS, UserRecord, USER),
)
_TOLD_FOR_S = 10.0
_MAX_TOLD = 100
_MAX_TEXT = 500


class DamageReport:
    """The damaged records, cached for some seconds."""

    def __init__(self, broker: Broker) -> None:
        """There is no report yet."""
        self._broker = broker
        self._damaged: list[DamagedRecord] = []
        self._looked = float("-inf")
        self._lock = asyncio.Lock()

    async def read(self, user: str = "") -> DamagedRecords:
        """Return the damaged records of a user, or of the whole pool."""
        async with self._lock:
            if time.monotonic() - self._looked >= _TOLD_FOR_S:
                self._damaged = await self._read_all()
                self._looked = time.monotonic()
        matches = [item for item in self._damaged if not user or item.key.startswith(f"{user}.")]
        return DamagedRecords(records=matches[:_MAX_TOLD], total=len(matches))

    async def _read_all(self) -> list[DamagedRecord]:
        collected: list[DamagedRecord] = []
        for name, model, prefix in _BUCKETS:
            try:
                _, damaged = await Bucket(self._broker, name, model).read_all(prefix)
            except NotFoundError:  # a pool without users has no bucket of users
                continue
            collected += [
                DamagedRecord(bucket=name, key=error.key, why=error.message[:_MAX_TEXT])
                for error in damaged
            ]
        return collected


# -- policy versions, entered into the records -----------------------------------------------------

_EVERY_S = 2.0


class Versions:
    """Reads the heartbeats of learners."""

    def __init__(self, broker: Broker, jobs: JobStore) -> None:
        """There are no heartbeats yet."""
        self._broker = broker
        self._jobs = jobs
        self._read = float("-inf")

    async def refresh(self, active: Sequence[JobRecord]) -> dict[str, Presence] | None:
        """Store the versions reported by these jobs' learners, every few seconds.

        Returns their heartbeats by job key; None if not due.
        """
        if time.monotonic() - self._read < _EVERY_S:
            return None
        self._read = time.monotonic()
        beats = await asyncio.gather(*map(self._look_at, active))
        pairs = zip(active, beats, strict=True)
        return {key_of(record): beat for record, beat in pairs if beat is not None}

    async def _look_at(self, record: JobRecord) -> Presence | None:
        entry = await presences(self._broker).find(f"{key_of(record)}.learner")
        version = entry.value.version if entry else None
        if version is not None and version > record.version:
            with contextlib.suppress(ConflictError, NotFoundError, MessageError):
                await self._jobs.set_fields(record, version=version)
        return None if entry is None else entry.value
