"""Archive or delete the data of ended jobs.

The job's record holds the request, and is changed last: after a crash the next scheduler continues,
and every part may run again.
"""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import structlog

from ....broker.client.connection import Broker
from ....broker.client.rpc import call
from ....broker.jetstream.kv import Bucket
from ....broker.jetstream.streams import (
    WEIGHTS_BYTES,
    StreamConfig,
    delete_job_streams,
    has_batches,
    job_streams,
)
from ....broker.jobs import JobStore, is_final
from ....broker.snapshots import restore_streams, save_streams
from ....schemas.config.job import LimitsConfig
from ....schemas.job import JobRecord, SealedSecrets
from ....schemas.metric import EvalRecord, Presence
from ....schemas.node import NodeStatus, RemoveRun
from ....schemas.wire.errors import (
    ConflictError,
    MessageError,
    NotFoundError,
    StorageError,
    TinkermqError,
)
from ....schemas.wire.message import Empty
from ....schemas.wire.subjects import BUCKET_ACTORS, BUCKET_EVALS, BUCKET_SECRETS, JobScope
from ....schemas.wire.subjects import node as node_subject
from ...storage.checkpoints import free_stored
from ...storage.run_folders import (
    archive_of,
    begin_archive,
    digest_of_archive,
    drop_archive,
    is_archive,
    remove_run_folder,
    remove_weights,
)
from ..nodes import Nodes
from .view import JobsView, RetentionLimits, beyond, key_of

# Marks the oldest ended jobs for archiving, as a user's request does; `Remover` does the work.

_AGAIN_S = 600.0
_MOST = 16
_log: structlog.stdlib.BoundLogger = structlog.get_logger()


class Tidier:
    """Marks the oldest ended jobs beyond the bounds for archiving, some jobs at a time."""

    def __init__(self, jobs: JobStore, view: JobsView, keeping: RetentionLimits) -> None:
        """`keeping` limits the jobs that are not archived."""
        self._jobs = jobs
        self._view = view
        self._keeping = keeping
        self._task: asyncio.Task[None] | None = None
        self._not_before: dict[str, float] = {}

    def mark_old(self, group: asyncio.TaskGroup) -> None:
        """Mark jobs for archiving, in a task of `group`."""
        if self._task is not None and not self._task.done():
            return
        result = list(self._candidates())
        if result:
            self._task = group.create_task(self._mark(result), name="jobs to archive")

    def _candidates(self) -> Iterator[JobRecord]:
        """Yield the next jobs to archive; those that are being archived count as archived."""
        left = _MOST - self._view.num_removals
        if left <= 0:
            return
        followed = {item.follow for item in self._view.live.values()}
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
            if not await asyncio.to_thread(_has_folder, record):  # on another machine, or removed
                self._not_before[record.scope.key] = time.monotonic() + _AGAIN_S
                continue
            try:
                async with self._view.lock(record.user):
                    await self._jobs.update(record, _marked)
            except TinkermqError as error:  # another writer won, or the broker is unreachable
                _log.info("tidying_waits", job=record.job, error=error.message)


def _may_go(record: JobRecord) -> bool:
    """Return whether an ended job can be archived: nothing needs its data any more.

    A service for the Tinker API is not archived: its record counts its users' tokens.
    """
    return record.kind != "tinker" and not (record.untold and record.has_streams)


def _marked(record: JobRecord) -> JobRecord:
    if not is_final(record) or record.removal != "no":
        return record
    return record.model_copy(update={"removal": "archive"})


def _has_folder(record: JobRecord) -> bool:
    """Return whether the job's data at the broker can go to its run folder, if it has one."""
    return not record.has_streams or (bool(record.run_dir) and Path(record.run_dir).is_dir())


_PAUSE_S = 5.0
_NODE_S = 60.0
_AT_ONCE = 12


class Remover:
    """Archives and deletes jobs, several at a time."""

    def __init__(
        self, broker: Broker, jobs: JobStore, view: JobsView, pool: Nodes, keeping: RetentionLimits
    ) -> None:
        """`keeping` limits the ended jobs that are not archived."""
        self._tidier = Tidier(jobs, view, keeping)
        self._broker = broker
        self._jobs = jobs
        self._view = view
        self._pool = pool
        self._busy: set[str] = set()
        self._not_before: dict[str, float] = {}

    def start_removals(self, group: asyncio.TaskGroup) -> None:
        """Start due removals, in tasks of `group`."""
        self._tidier.mark_old(group)
        for record in self._view.removals():
            key = key_of(record)
            if len(self._busy) >= _AT_ONCE:
                return
            if key in self._busy or time.monotonic() < self._not_before.get(key, 0.0):
                continue
            self._busy.add(key)
            group.create_task(self._do(key, record), name=f"{record.removal} of {key}")

    async def _do(self, key: str, record: JobRecord) -> None:
        self._not_before.pop(key, None)
        try:
            await self._carry_out(record)
        except (ConflictError, NotFoundError, MessageError) as error:  # retried in the next turn
            _log.info("removal_again", job=record.job, error=error.message)
        except (TinkermqError, OSError, TimeoutError) as error:
            _log.warning("removal_waits", job=record.job, what=record.removal, error=str(error))
            self._not_before[key] = time.monotonic() + _PAUSE_S
        except Exception:  # noqa: BLE001  what one job has left must not end the scheduler of all
            _log.exception("removal_failed", job=record.job, what=record.removal)
            self._not_before[key] = time.monotonic() + _AGAIN_S
        finally:
            self._busy.discard(key)

    async def _carry_out(self, record: JobRecord) -> None:
        """Complete one job's removal, after its actors have ended and its events are sent."""
        if not is_final(record) or self._runs_somewhere(record):
            return
        if record.untold and record.has_streams:
            return
        if record.removal == "delete":
            await self._delete(record)
        elif record.removal == "archive":
            await self._archive(record)
        else:
            await self._unarchive(record)
        _log.info("job_removed", job=record.job, what=record.removal)

    def _runs_somewhere(self, record: JobRecord) -> bool:
        mine = (record.user, record.job)
        return any(
            (actor.user, actor.job) == mine for node in self._pool.nodes() for actor in node.actors
        )

    async def _delete(self, record: JobRecord) -> None:
        await self._drop_weights(record)
        await delete_job_streams(self._broker, record.scope)
        await self._drop_keys(record.scope)
        if record.run_dir:
            for node in self._pool.nodes():  # one by one: they may share the disk
                await self._request_removal(node, record)
            if await self._is_still(record):
                await asyncio.to_thread(remove_run_folder, record.run_dir, record.job)
                await asyncio.to_thread(drop_archive, record.run_dir, record.job)
        if await self._is_still(record):
            await _free_stored(record)
        await self._jobs.remove(record)

    async def _request_removal(self, node: NodeStatus, record: JobRecord) -> None:
        """Request a node to remove its copy of a run folder; a node that has left is skipped."""
        await call(
            self._broker,
            node_subject(node.node, "remove"),
            RemoveRun(user=record.user, job=record.job, run_dir=record.run_dir),
            Empty,
            timeout_s=_NODE_S,
            waiting_for=f"node {node.node}",
            idempotent=True,
        )

    async def _is_still(self, record: JobRecord) -> bool:
        """Return whether the job is still to be deleted, in case the scheduler was suspended."""
        now = await self._jobs.find_by_id(record.user, record.job)
        return now is not None and now.removal == "delete"

    async def _archive(self, record: JobRecord) -> None:
        if record.has_streams and not record.archive_digest:
            folder = await asyncio.to_thread(begin_archive, record.run_dir, record.job)
            await save_streams(self._broker, _kept_names(record.scope), folder)
            digest = await asyncio.to_thread(digest_of_archive, record.run_dir, record.job)
            has_begun = int(await has_batches(self._broker, record.scope))
            # from here on the archive is valid, and the streams may be removed
            record = await self._jobs.update(
                record,
                lambda now: now.model_copy(
                    update={"archive_digest": digest, "version": max(now.version, has_begun)}
                ),
            )
        await self._drop_weights(record)
        await delete_job_streams(self._broker, record.scope)
        await self._drop_keys(record.scope, evaluations=False)
        away = await self._jobs.move_to_archive(record)
        if away is not None:
            self._view.enter_archived(away)

    async def _unarchive(self, record: JobRecord) -> None:
        if record.has_streams:
            place = (record.run_dir, record.job)
            if not await asyncio.to_thread(is_archive, *place, record.archive_digest):
                await self._refuse(record, f"{archive_of(*place)} differs from what was written")
                return
            await restore_streams(self._broker, kept_streams(record), archive_of(*place))
        await self._jobs.set_fields(
            record, removal="no", archived=None, brought_back=time.time(), archive_digest=""
        )
        if record.has_streams:
            await asyncio.to_thread(drop_archive, record.run_dir, record.job)

    async def _refuse(self, record: JobRecord, why: str) -> None:
        """Keep a job in the archive, with the reason."""
        reason = f"run {record.name} stays archived: {why}"
        _log.warning("removal_refused", job=record.job, what=record.removal, error=reason)
        away = await self._jobs.set_fields(record, removal="archive", refused=reason)
        if (archived := await self._jobs.move_to_archive(away)) is not None:
            self._view.enter_archived(archived)

    async def _drop_weights(self, record: JobRecord) -> None:
        """Remove published versions that are files; versions in the broker go with the streams."""
        weights: dict[str, Any] = record.config.get("weights") or {}
        folder = str(weights.get("folder") or "")
        await asyncio.to_thread(remove_weights, record.run_dir, folder, record.scope)

    async def _drop_keys(self, scope: JobScope, *, evaluations: bool = True) -> None:
        """Remove the job's entries in shared buckets, except its record."""
        await Bucket(self._broker, BUCKET_SECRETS, SealedSecrets).purge(scope.key)
        heartbeats = Bucket(self._broker, BUCKET_ACTORS, Presence)
        for key in await heartbeats.keys(scope.key):
            await heartbeats.purge(key)
        if evaluations:
            results = Bucket(self._broker, BUCKET_EVALS, EvalRecord)
            for key in await results.keys(scope.key):
                await results.purge(key)


async def _free_stored(record: JobRecord) -> None:
    """Remove a job's data from its store, unless the store refuses this scheduler."""
    try:
        await asyncio.to_thread(free_stored, record)
    except StorageError as error:
        if error.may_pass:
            raise
        _log.warning("store_not_freed", job=record.job, error=str(error))


def _kept_names(scope: JobScope) -> list[str]:
    """Return the streams kept in an archive: the trained groups, and events."""
    checkpoints = f"OBJ_{scope.object_checkpoints}"
    streams = [scope.stream_dead, scope.stream_feed]
    return [scope.stream_rollout, scope.stream_batch, *streams, checkpoints]


def kept_streams(record: JobRecord) -> list[StreamConfig]:
    """Return the streams to restore, with default settings instead of those in a file."""
    every = job_streams(record.scope, LimitsConfig(), WEIGHTS_BYTES)
    names = _kept_names(record.scope)
    return [config for config in every if config["name"] in names]
