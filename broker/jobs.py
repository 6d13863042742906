"""Job records: stored in a KV bucket, changed by compare-and-set, with an event per state change.

The record holds the whole state of a job: a restarted scheduler reads it and continues. Only moves
of `MAY_FOLLOW` are allowed. A move writes its event into the record, which is removed from there
once published, so that a kill in between does not lose it.

Records of archived jobs are in a separate bucket without watchers, so that they cost live jobs
nothing. A move between buckets writes first and then deletes; if both have a record, the one in the
bucket of jobs counts.

Each record is copied into a third bucket when what a user decided, or its state, has changed: from
there the leading scheduler restores records of which a damaged store has lost the block.
"""

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import structlog

from ..schemas.job import (
    FINAL_STATES,
    MAY_FOLLOW,
    JobRecord,
    JobState,
    Removal,
    RequestRecord,
    metered,
)
from ..schemas.metric import Event
from ..schemas.wire.errors import ConflictError, NotFoundError, StateError, TinkermqError
from ..schemas.wire.subjects import (
    BUCKET_ARCHIVE,
    BUCKET_COPIES,
    BUCKET_JOBS,
    BUCKET_REQUESTS,
    JobScope,
)
from .client.connection import Broker
from .feed import listed, publish_event
from .jetstream.kv import Bucket, DamagedEntry, Entry

_MAX_REASON_CHARS = 8192
_COPY_DEADLINE_S = 2.0
_COPIED = ("state", "attempt", "config", "configured", "priority", "stop", "removal", "secrets")
"""Fields whose change is copied at once; others come with the next copy."""
_log: structlog.stdlib.BoundLogger = structlog.get_logger()


Wrote = Callable[[Entry[JobRecord]], None]
"""Called with each record that a store has written, or found already written."""


def _forget(_: Entry[JobRecord]) -> None:
    """Ignore a written record."""


def _ignore() -> None:
    """Ignore a missing record."""


class JobStore:
    """The job records of a broker."""

    def __init__(
        self,
        broker: Broker,
        wrote: Wrote = _forget,
        missed: Callable[[], None] = _ignore,
    ) -> None:
        """Work on the shared buckets, which `create_shared` has made.

        `missed` is called when a record to be changed is not there.
        """
        self._broker = broker
        self._wrote = wrote
        self._missed = missed
        self._jobs = Bucket(broker, BUCKET_JOBS, JobRecord)
        self._archive = Bucket(broker, BUCKET_ARCHIVE, JobRecord)
        self._copies = Bucket(broker, BUCKET_COPIES, JobRecord, deadline_s=_COPY_DEADLINE_S)
        self._requests = Bucket(broker, BUCKET_REQUESTS, RequestRecord)

    async def asked_before(self, user: str, request_id: str) -> str | None:
        """Return the id of the job that this submission has already made, or None."""
        entry = await self._requests.get(f"{user}.{request_id}")
        return None if entry is None else entry.value.job

    async def job_of_request(self, user: str, request_id: str, job: str) -> str:
        """Return the id of a submission's job: `job` for a new submission, else the first one's.

        Two submissions with the same id may race: the first key written wins for both.
        """
        key = f"{user}.{request_id}"
        try:
            await self._requests.create(key, RequestRecord(job=job))
        except ConflictError:
            entry = await self._requests.get(key)
            return job if entry is None else entry.value.job
        return job

    async def create(self, record: JobRecord, who: str) -> JobRecord:
        """Write the record of a new job, with its first event.

        Raises ConflictError if the id is taken.
        """
        record = record.model_copy(update={"untold": [_event(record, None, who)]})
        key = record.scope.key
        self._wrote(Entry(key, record, await self._jobs.create(key, record)))
        await self._copy(record)
        return record

    async def get(self, user: str, name: str) -> JobRecord:
        """Return a job of `user` by its id or its run's name.

        Raises NotFoundError.
        """
        record = await self.find(user, name)
        if record is None:
            raise NotFoundError(
                f"user {user!r} has no run {name!r}",
                hint="list them with `tinkermq ps --all`",
            )
        return record

    async def find_by_id(self, user: str, job: str) -> JobRecord | None:
        """Return a job of `user`, archived or not, or None."""
        key = JobScope(user, job).key
        for bucket in (self._jobs, self._archive, self._jobs):  # it may be unarchived meanwhile
            entry = await bucket.get(key)
            if entry is not None:
                return entry.value
        return None

    async def find(self, user: str, name: str) -> JobRecord | None:
        """Return a job of `user`, archived or not, by its id or its run's name, or None."""
        record = await self.find_by_id(user, name)
        if record is not None:
            return record
        for read in (self.list_jobs, self.list_archived):
            match = next((record for record in await read(user) if record.name == name), None)
            if match is not None:
                return match
        return None

    async def list_jobs(self, user: str = "") -> list[JobRecord]:
        """Return all jobs, or those of one user, newest first, without archived ones."""
        return await _newest_first(self._jobs, user)

    async def list_archived(self, user: str = "") -> list[JobRecord]:
        """Return all archived jobs, or those of one user, newest first."""
        return await _newest_first(self._archive, user)

    async def live(self) -> list[JobRecord]:
        """Return the jobs that have not ended, oldest first."""
        return [record for record in reversed(await self.list_jobs()) if not is_final(record)]

    async def transition(
        self, record: JobRecord, state: JobState, reason: str, who: str, **changes: Any
    ) -> JobRecord:
        """Move a job from the state of `record` to another, with an event to be published.

        `changes` are further fields to set. Raises StateError for a move that is not allowed, and
        ConflictError if the job is no longer in the state of `record`.
        """
        _check_move(record, state)

        def move(current: JobRecord) -> JobRecord:
            if (current.state, current.attempt) != (record.state, record.attempt):
                raise ConflictError(
                    f"job {record.job} is {current.state} by now, not {record.state}",
                    hint="read it again and decide anew",
                )
            update = {"state": state, "reason": _short(reason)}
            fields = {**update, **_times(current, state), **changes}
            moved = current.model_copy(update=fields)
            events = [*current.untold, _event(moved, record.state, who)]
            return moved.model_copy(update={"untold": events})

        return await self.update(record, move)

    async def publish_events(self, record: JobRecord) -> None:
        """Publish the events in a record; a repeated event is stored once.

        Raises BrokerError, DeadlineError.
        """
        for event in record.untold:
            once = f"{event.kind} {event.time!r}"
            try:
                await publish_event(self._broker, record.scope, event, message_id=once)
            except NotFoundError as error:  # its streams were deleted: the record is still updated
                _log.warning("event_lost", job=record.job, kind=event.kind, error=error.message)

    async def mark_published(
        self,
        record: JobRecord,
        values: Mapping[str, float] | None = None,
        stored_bytes: int = 0,
    ) -> JobRecord:
        """Remove the published events of `record` from the job's record.

        For an ended job also sets the newest `values` of its metrics, and `stored_bytes`, the size
        of its streams.
        """

        def take_out(current: JobRecord) -> JobRecord:
            left = [event for event in current.untold if event not in record.untold]
            update: dict[str, object] = {"untold": left}
            if values is not None and is_final(current):
                version = int(values.get("step", 0)) if current.trains else 0
                update["version"] = max(version, current.version)
                update["figures"] = listed(values)
                update["stored_bytes"] = stored_bytes
            return current.model_copy(update=update)

        return await self.update(record, take_out)

    async def update(
        self, record: JobRecord, change: Callable[[JobRecord], JobRecord]
    ) -> JobRecord:
        """Replace a record by `change` of it; repeat this after conflicts; return the new one.

        Nothing is written when `change` returns its argument. Only `transition` changes the state.
        """
        key = record.scope.key
        before = record

        def changed(current: JobRecord | None) -> JobRecord:
            nonlocal before
            if current is None:
                self._missed()
                raise NotFoundError(f"the record of job {key} was deleted", hint="submit it again")
            before, changed_record = current, change(current)
            if changed_record == current:
                return current
            return metered(current, changed_record, time.time())

        entry = await self._jobs.change(key, changed)
        self._wrote(entry)
        if any(getattr(before, name) != getattr(entry.value, name) for name in _COPIED):
            await self._copy(entry.value)
        return entry.value

    async def set_fields(self, record: JobRecord, **fields: Any) -> JobRecord:
        """Replace fields of a record, other than its state, as `update` does."""
        return await self.update(record, lambda now: now.model_copy(update=fields))

    async def _copy(self, record: JobRecord) -> bool:
        """Write the copy of a record, without events; return whether it was written.

        A failure does not hinder the change of the record itself.
        """
        try:
            await self._copies.put(record.scope.key, record.model_copy(update={"untold": []}))
        except TinkermqError as error:
            _log.warning("record_not_copied", job=record.job, error=error.message)
            return False
        return True

    async def mend(self, known: Mapping[str, JobRecord], lost: Mapping[str, JobRecord]) -> None:
        """Restore records that the broker's store has lost, and write missing copies.

        `known` are all records that are there, by key; `lost` those that were there before, or are
        newer than what is there. Others are restored from their copies. An event reports each.
        Raises BrokerError, DeadlineError.
        """
        copies = dict[str, JobRecord]()
        with contextlib.suppress(NotFoundError):  # it was deleted, and is made again
            copies = {entry.key: entry.value for entry in await self._copies.items()}
        unlisted = {key: record for key, record in copies.items() if key not in known}
        for key, record in {**unlisted, **lost}.items():
            await self._restore(key, record, replaces_older=key in lost)
        for key in set(known) - set(copies):
            if not await self._copy(known[key]):
                return  # the next call writes the others

    async def _restore(self, key: str, record: JobRecord, *, replaces_older: bool) -> None:
        """Write a lost record, unless it was deleted or archived, or another one is there.

        `replaces_older`: it is newer than what is there. An unreadable one stays, as a later
        release may have written it.
        """
        try:
            if await self._jobs.was_deleted(key) or await self._archive.find(key) is not None:
                await self._copies.purge(key)
                return
            older = await self._jobs.get(key)
            if older is not None and (not replaces_older or older.value == record):
                return
            event = Event(
                kind="record_restored",
                source="scheduler",
                message="the broker's store had lost what it held of this run's record, which is "
                f"{record.state} again",
                time=time.time(),
            )
            back = record.model_copy(update={"untold": [*record.untold, event]})
            revision = 0 if older is None else older.revision
            self._wrote(Entry(key, back, await self._jobs.update(key, back, revision)))
        except (ConflictError, DamagedEntry) as error:
            _log.warning("record_not_restored", key=key, error=error.message)
            return
        _log.warning("record_restored", job=record.job, state=record.state)
        await self._copy(back)

    async def move_to_archive(self, record: JobRecord) -> JobRecord | None:
        """Move the record of an archived job out of the bucket of jobs.

        Returns the archived record, None if it was deleted. Raises ConflictError if another writer
        changed it or requested something else meanwhile.
        """
        entry = await self._jobs.get(record.scope.key)
        if entry is None:
            return None
        if entry.value.removal != "archive" or not is_final(entry.value):
            raise ConflictError(
                f"job {record.job} is not to be archived any more", hint="read it again"
            )
        archived = entry.value.archived or time.time()
        away = entry.value.model_copy(update={"removal": "no", "archived": archived})
        await self._archive.put(entry.key, away)
        await self._copies.purge(entry.key)
        await self._jobs.delete(entry.key, revision=entry.revision)
        return away

    async def rename(self, record: JobRecord, name: str) -> JobRecord:
        """Give a run that has ended, archived or not, another name."""
        named = {"name": name, "config": {**record.config, "name": name}}
        if record.archived is None:
            return await self.update(record, lambda now: now.model_copy(update=named))

        def changed(archived: JobRecord | None) -> JobRecord:
            if archived is None:
                raise NotFoundError(f"job {record.job} is not archived any more", hint="try again")
            return archived.model_copy(update=named)

        return (await self._archive.change(record.scope.key, changed)).value

    async def take_back(self, record: JobRecord, removal: Removal) -> JobRecord:
        """Move the record of an archived job back, marked with the request `removal`.

        Harmless when repeated.
        """
        marked = record.model_copy(update={"removal": removal, "refused": ""})
        key = record.scope.key
        try:
            self._wrote(Entry(key, marked, await self._jobs.create(key, marked)))
        except ConflictError:  # an earlier attempt of the same request
            marked = await self.set_fields(record, removal=removal)
        await self._archive.purge(key)
        await self._copy(marked)
        return marked

    async def remove(self, record: JobRecord) -> None:
        """Remove the record of a job and its submissions; harmless when gone."""
        await self._archive.purge(record.scope.key)
        await self._copies.purge(record.scope.key)
        for entry in await self._requests.items(record.user):
            if entry.value.job == record.job:
                await self._requests.purge(entry.key)
        entry = await self._jobs.find(record.scope.key)
        if entry is not None:
            await self._jobs.delete(entry.key, revision=entry.revision)


async def _newest_first(bucket: Bucket[JobRecord], user: str) -> list[JobRecord]:
    records = [entry.value for entry in await bucket.items(user)]
    return sorted(records, key=lambda record: record.created, reverse=True)


def _event(record: JobRecord, before: JobState | None, who: str) -> Event:
    """Return the event for a job's new state."""
    return Event(
        kind=f"job_{record.state.lower()}",
        source=who,
        message=record.reason,
        data={"state": record.state, "before": before, "attempt": record.attempt},
        time=time.time(),
    )


def _short(reason: str) -> str:
    """Return a reason, cut to the record's limit: an error's text may have any length."""
    return reason if len(reason) <= _MAX_REASON_CHARS else f"{reason[:_MAX_REASON_CHARS]}…"


def is_final(record: JobRecord) -> bool:
    """Return whether the job has ended."""
    return record.state in FINAL_STATES


def _check_move(record: JobRecord, state: JobState) -> None:
    if state in MAY_FOLLOW[record.state]:
        return
    allowed = ", ".join(sorted(MAY_FOLLOW[record.state]))
    raise StateError(
        f"job {record.job} ({record.name}) is {record.state} and cannot become {state}",
        hint=f"from {record.state} it can become: {allowed}",
    )


def _times(record: JobRecord, state: JobState) -> dict[str, Any]:
    """Return the timestamps that a move sets."""
    if state == "RUNNING" and record.started is None:
        return {"started": time.time()}
    if state in FINAL_STATES:
        return {"finished": time.time()}
    return {"finished": None} if is_final(record) else {}
