"""What guests may add to the buckets that all share: of known kinds, of bounded size and number."""

import time

from ...broker.client.connection import Broker
from ...broker.jetstream.streams import PRESENCE_BYTES, stream_subjects
from ...broker.jobs import JobStore
from ...broker.users.guests import Guest
from ...schemas.job import JobRecord
from ...schemas.wire.errors import MessageError, NotFoundError, QuotaError
from ...schemas.wire.subjects import BUCKET_ACTORS, BUCKET_EVALS
from .known import KnownUsers

ASKED_BYTES = 4 << 10
"""Of an evaluation that a user asks for; what comes of it the job's own processes write."""
_COUNTED_S = 30.0
_KNOWN_S = 5.0
_MAX_KNOWN = 10_000


class StorageBounds:
    """Looks whether there is room for what a guest stores."""

    def __init__(self, broker: Broker, known: KnownUsers) -> None:
        """Count with this connection; quotas are those of `known` users."""
        self._broker = broker
        self._known = known
        self._jobs = JobStore(broker)
        self._keys: dict[str, tuple[float, set[str]]] = {}
        self._records: dict[str, tuple[float, JobRecord]] = {}

    async def check(self, guest: Guest, subject: str, num_bytes: int) -> None:
        """Raise MessageError, NotFoundError or QuotaError for what a guest may not add."""
        parts = subject.split(".")
        if parts[0] != "$KV":
            return
        bucket, user, job, name = parts[1], parts[2], parts[3], parts[4]
        most = {BUCKET_EVALS: ASKED_BYTES, BUCKET_ACTORS: PRESENCE_BYTES // 2}[bucket]
        if num_bytes > most:
            raise MessageError(f"{num_bytes:,} bytes for {subject}, where {most:,} may be stored")
        record = await self._record(user, job)
        if bucket == BUCKET_ACTORS:
            if not any((one.name, one.role) == (name, guest.role) for one in record.actors):
                raise MessageError(f"job {job} has no {guest.role} of the name {name!r}")
            return
        quota = self._known.get(user)
        bound = quota.max_evaluations if quota is not None else None
        if bound is not None:
            await self._count(user, subject, bound)

    async def _count(self, user: str, subject: str, bound: int) -> None:
        counted, keys = self._keys.get(user, (float("-inf"), set[str]()))
        if time.monotonic() - counted > _COUNTED_S:
            found = await stream_subjects(
                self._broker, f"KV_{BUCKET_EVALS}", f"$KV.{BUCKET_EVALS}.{user}.>"
            )
            keys = set(found)
            self._keys[user] = (time.monotonic(), keys)
        if subject not in keys and len(keys) >= bound:
            raise QuotaError(
                f"user {user!r} has {len(keys)} evaluations, the quota is {bound}",
                hint="delete old runs (`tinkermq delete`), or ask an admin for more",
            )
        keys.add(subject)

    async def _record(self, user: str, job: str) -> JobRecord:
        """Return a job, as of some seconds ago."""
        key, now = f"{user}.{job}", time.monotonic()
        if key in self._records and now - self._records[key][0] < _KNOWN_S:
            return self._records[key][1]
        record = await self._jobs.find_by_id(user, job)
        if record is None:
            raise NotFoundError(f"user {user!r} has no job {job}", hint="submit it first")
        if len(self._records) >= _MAX_KNOWN:
            self._records.clear()
        self._records[key] = (now, record)
        return record
