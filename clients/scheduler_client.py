"""A pool's jobs and its users: `SchedulerClient` and `PoolUsers`, each with an async form."""

import asyncio
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from ..broker.calls import all_users, ask_users, new_request_id, write_checkpoint
from ..broker.feed import read_metrics
from ..schemas.config.load_config import check_keys
from ..schemas.job import WANDB_KEY, JobRecord
from ..schemas.user import (
    AddUser,
    NameUser,
    NewKey,
    RotateKey,
    SetQuota,
    UserInfo,
    UserReply,
)
from ..schemas.wire.codec import merged
from ..schemas.wire.errors import ConfigError, DeadlineError, JobFailedError, did_you_mean
from . import base, validation
from .opentinker import as_tree, translate
from .pool import Pool, secrets_for, with_tracker_settings

if TYPE_CHECKING:
    from .run import Run

CANCEL_S = 60.0
ScaledRole: TypeAlias = Literal["generator", "environment", "server"]
"""Kinds of actors whose number can change in a live job."""
_STARTED = frozenset({"RUNNING", "PAUSED", "COMPLETED"})
_ENDED_BADLY = frozenset({"FAILED", "CANCELLED"})


class AsyncSchedulerClient(base.PoolClient):
    """The scheduler of a pool, for async code; see `SchedulerClient`."""

    def __init__(
        self,
        scheduler_url: str = "",
        api_key: str | None = None,
        timeout: float = 600.0,
        poll_interval: float = 2.0,
        url: str = "",
    ) -> None:
        """Name the pool's broker, `nats://host:port`, as `scheduler_url` or as `url`."""
        self.scheduler_url = base.parse_broker_url(scheduler_url or url)
        super().__init__(self.scheduler_url, api_key)
        self.timeout = timeout
        self.poll_interval = poll_interval
        self._submitted: JobRecord | None = None

    async def submit_job(
        self,
        config: Any,
        enable_agent_loop: bool = False,
        wandb_key: str | None = None,
        num_gpus: int | None = None,
        from_run: str | None = None,
    ) -> dict[str, Any]:
        """Submit a training job; return a dict with `job_id`, `status` and `server_url`.

        `config` is a tree of our keys (`learner.lr`), of OpenTinker's (`adv_estimator`,
        `rollout_n` …), or both, as a dict, namespace or OmegaConf tree. A complete one starts at
        once, and this returns when the job runs. One without a model or a game waits for
        `ServiceClient.set_config` and `fit`. `num_gpus` counts learner and generators together.
        A job with `sft.data` trains on conversations, with slots for the learner only.
        `from_run` names the run whose weights the job starts from: `RUN@STEP`, or `RUN` for its
        newest checkpoint.
        `wandb_key` is for the trackers of this process and of the job, and is sent encrypted; the
        default is $WANDB_API_KEY.

        Raises ConfigError for a key that is unknown or has no effect, PlacementError for a job
        that can never fit, JobFailedError, DeadlineError after `timeout`.
        """
        del enable_agent_loop  # every job runs the agent loop
        values = as_tree(config)
        wandb_key = wandb_key or values.pop("wandb_key", None)
        if wandb_key:  # for trackers of this process; the job gets it encrypted
            os.environ[WANDB_KEY] = wandb_key
        self._submitted = None
        tree = translate(values)
        if num_gpus is not None and not (
            num_gpus == 1 and validation.section_value(tree, "sft", "data")
        ):
            tree = merged(tree, translate({"num_gpus": num_gpus}))
        if from_run is not None:
            tree = merged(tree, {"model": {"path": from_run}})
        tree = with_tracker_settings(tree)
        check_keys(tree)
        validation.check_files_exist(tree, self.scheduler_url, has_model=from_run is not None)
        complete = validation.is_complete(tree)
        pool = await self._connected()
        record = await pool.submit(
            validation.resolve_paths(tree, pool.broker.url, has_users=pool.has_users),
            configured=complete,
            fork_of=from_run and validation.full_checkpoint_name(from_run),
            weights_only=from_run is not None,
            request_id=new_request_id(),
            secrets=secrets_for(tree, wandb_key),
        )
        self._submitted = record
        if complete:
            record = await self._started(pool, record)
        return self._summary(record)

    def describe_detached(self) -> str:
        """Describe the job that an interrupted `submit_job` leaves in the pool, or return ""."""
        record = self._submitted
        if record is None:
            return ""
        return (
            f"detached: run {record.name} is submitted and starts when slots are free\n"
            f"  watch it  job_status({record.job!r}), or `tinkermq watch {record.name}`\n"
            f"  stop it   cancel_job({record.job!r}), or `tinkermq stop {record.name}`"
        )

    async def job_status(self, job_id: str) -> dict[str, Any]:
        """Return state, reason, times and server_url of a job, by id or run name."""
        return self._summary((await self._found(job_id))[1])

    async def list_jobs(self, all: bool = True) -> list[dict[str, Any]]:
        """Return the jobs, newest first; without `all` only those that have not ended."""
        pool = await self._connected()
        return [self._summary(record) for record in await pool.list_jobs(all=all)]

    async def cancel_job(self, job_id: str) -> dict[str, Any]:
        """Stop a job at once and wait until it is CANCELLED; return its state.

        Harmless when it has ended. Raises DeadlineError if no scheduler does it.
        """
        pool, record = await self._found(job_id)
        await pool.stop(record.job, now=True)
        return self._summary(await pool.wait_until_ended(record, CANCEL_S))

    async def complete_job(self, job_id: str) -> dict[str, Any]:
        """Stop a job after a checkpoint; it ends as COMPLETED. Harmless when it has ended.

        Returns at once with the current state; poll `job_status` for the end.
        """
        pool, record = await self._found(job_id)
        return self._summary(await pool.stop(record.job, complete=True))

    async def delete_job(self, job_id: str) -> dict[str, Any]:
        """Delete a job that has ended, with its run folder and all its data.

        Returns its last state. Raises StateError for a job that has not ended or that another job
        uses, NotFoundError, DeadlineError.
        """
        return self._summary(await (await self._connected()).delete_run(job_id))

    async def archive_job(self, job_id: str, undo: bool = False) -> dict[str, Any]:
        """Move the data of a job that has ended from the broker into its run folder, or back.

        An archived job can still be forked and served. Raises what `delete_job` raises.
        """
        pool = await self._connected()
        return self._summary(await pool.archive_run(job_id, undo=undo))

    async def save_checkpoint(self, job_id: str) -> str:
        """Write a checkpoint of a training job after the current step; return its folder.

        Raises StateError for a job that does not train, StorageError when the disk is full.
        """
        pool, record = await self._found(job_id)
        return await write_checkpoint(pool.broker, record)

    async def pause_job(self, job_id: str) -> dict[str, Any]:
        """Pause a running job; its actors keep their slots until `resume_job`.

        Raises StateError for a job that does not run.
        """
        pool, record = await self._found(job_id)
        return self._summary(await pool.pause(record.job))

    async def resume_job(self, job_id: str, changes: Any = None) -> dict[str, Any]:
        """Resume a job after a pause or from its last checkpoint; harmless while it runs.

        A job that has ended takes `changes`, a tree of keys: `{"training": {"num_steps": 80}}`.
        Raises ConfigError for a key that cannot change, StateError for changes to a live job.
        """
        pool = await self._connected()
        return self._summary(await pool.resume_run(job_id, _changes(changes)))

    async def fork_job(self, source: str, changes: Any = None) -> dict[str, Any]:
        """Start a new run from a checkpoint of another, `RUN@STEP` or `RUN@last`.

        Its configuration is the other's with `changes` merged in. Returns once it is queued. Raises
        NotFoundError that lists the existing checkpoints, ConfigError.
        """
        pool = await self._connected()
        return self._summary(await pool.fork_run(source, _changes(changes)))

    async def scale_job(self, job_id: str, role: ScaledRole, count: int) -> dict[str, Any]:
        """Change how many generators, environment hosts or servers a live job has.

        Raises StateError for a job that has ended, PlacementError, QuotaError.
        """
        pool, record = await self._found(job_id)
        return self._summary(await pool.scale(record.job, role, count))

    async def label_job(
        self,
        job_id: str,
        tags: str | Sequence[str] | None = None,
        group: str | None = None,
        notes: str | None = None,
    ) -> dict[str, Any]:
        """Change tags, group and notes of a job; None keeps a value, "" removes the group.

        Raises MessageError for an invalid tag or group.
        """
        pool, record = await self._found(job_id)
        named = None if tags is None else base.listed(tags)
        return self._summary(await pool.label(record.job, tags=named, group=group, notes=notes))

    async def metrics(self, job_id: str) -> list[dict[str, float]]:
        """Return the metrics of a run, one dict per step, in order.

        Each has `step`; rows of validated steps also have the validation scores. Pass it to
        `pandas.DataFrame(…)`. Raises NotFoundError for a run without a feed (not started, or
        archived).
        """
        pool, record = await self._found(job_id)
        metrics = await read_metrics(pool.broker, record.scope)
        rows: dict[int, dict[str, float]] = {}
        for metric in metrics:
            rows.setdefault(metric.step, {"step": metric.step}).update(metric.values)
        return [rows[step] for step in sorted(rows)]

    async def _found(self, job_id: str) -> tuple[Pool, JobRecord]:
        pool = await self._connected()
        return pool, await pool.find(job_id)

    async def _started(self, pool: Pool, record: JobRecord) -> JobRecord:
        """Wait until the job runs.

        Raises JobFailedError, or DeadlineError with the reason.
        """
        deadline = asyncio.get_running_loop().time() + self.timeout
        while record.state not in _STARTED:
            if record.state in _ENDED_BADLY:
                raise job_failure(record)
            if asyncio.get_running_loop().time() > deadline:
                raise DeadlineError(
                    f"run {record.name} is {record.state} after {self.timeout:g} s: "
                    f"{record.reason}",
                    hint=f"it stays in the queue; cancel it with cancel_job({record.job!r})",
                )
            await asyncio.sleep(min(self.poll_interval, 0.2))
            record = await pool.find(record.job)
        return record

    def _summary(self, record: JobRecord) -> dict[str, Any]:
        address = base.JobAddress(self.scheduler_url, record.scope)
        return {
            "job_id": record.job,
            "name": record.name,
            "status": record.state,
            "message": record.reason,
            "server_url": address.server_url,
            "created_at": record.created,
            "started_at": record.started,
            "completed_at": record.finished,
            "error_message": record.reason if record.state == "FAILED" else None,
            "run_dir": record.run_dir,
            "tags": record.tags,
            "group": record.group,
            "notes": record.notes,
        }


class SchedulerClient(base.SyncTwin[AsyncSchedulerClient]):
    """The scheduler of a pool: submit, inspect and stop jobs.

    `scheduler_url` is the broker's `nats://host:port`, which `tinkermq up` prints. Works inside a
    running event loop (a notebook), too; async code takes `AsyncSchedulerClient`.
    """

    def __init__(
        self,
        scheduler_url: str = "",
        api_key: str | None = None,
        timeout: float = 600.0,
        poll_interval: float = 2.0,
        url: str = "",
    ) -> None:
        """Name the pool; `timeout` bounds the wait for a job to start, in seconds."""
        super().__init__(AsyncSchedulerClient(scheduler_url, api_key, timeout, poll_interval, url))

    @property
    def scheduler_url(self) -> str:
        """URL of the broker."""
        return self.aio.scheduler_url

    submit_job = base.make_sync(
        AsyncSchedulerClient.submit_job, AsyncSchedulerClient.describe_detached
    )
    submit_job_future = base.make_future(AsyncSchedulerClient.submit_job)
    job_status = base.make_sync(AsyncSchedulerClient.job_status)
    list_jobs = base.make_sync(AsyncSchedulerClient.list_jobs)
    cancel_job = base.make_sync(AsyncSchedulerClient.cancel_job)
    complete_job = base.make_sync(AsyncSchedulerClient.complete_job)
    delete_job = base.make_sync(AsyncSchedulerClient.delete_job)
    archive_job = base.make_sync(AsyncSchedulerClient.archive_job)
    save_checkpoint = base.make_sync(AsyncSchedulerClient.save_checkpoint)
    pause_job = base.make_sync(AsyncSchedulerClient.pause_job)
    resume_job = base.make_sync(AsyncSchedulerClient.resume_job)
    fork_job = base.make_sync(AsyncSchedulerClient.fork_job)
    scale_job = base.make_sync(AsyncSchedulerClient.scale_job)
    label_job = base.make_sync(AsyncSchedulerClient.label_job)

    def run(self, job_id: str) -> "Run":
        """Return a run by id or name: its metrics, episodes, logs and evaluations."""
        from .run import Run

        return Run(job_id, self.scheduler_url, self.aio.api_key)

    metrics = base.make_sync(AsyncSchedulerClient.metrics)


def _changes(changes: Any) -> dict[str, Any]:
    tree = translate(as_tree(changes or {}))
    check_keys(tree)
    return tree


def job_failure(record: JobRecord) -> JobFailedError:
    """Return the error of a job that has failed or was stopped."""
    how = "failed" if record.state == "FAILED" else "was stopped"
    return JobFailedError(
        f"run {record.name} {how}: {record.reason or 'no reason was given'}",
        hint=f"see `tinkermq logs {record.name}`; `tinkermq resume {record.name}` goes on from "
        "its last checkpoint",
    )


# -- the users of a pool with authentication -------------------------------------------------------


class AsyncPoolUsers(base.PoolClient):
    """The users of a pool, for async code; see `PoolUsers`."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """Name the pool's broker."""
        super().__init__(base.parse_broker_url(url), api_key)

    async def list(self) -> list[UserInfo]:
        """Return all users by name: role, expiry of the key, quota."""
        return await all_users((await self._connected()).broker)

    async def add(
        self,
        user: str,
        role: Literal["user", "admin"] = "user",
        days: float = 365.0,
        slots: int | None = None,
        weight: float = 1.0,
    ) -> str:
        """Add a user; return the key, which is not stored. With `days` 0 it never expires."""
        request = AddUser(user=user, role=role, days=days, max_slots=slots, weight=weight)
        return (await self._request("add", request, NewKey)).secret

    async def rotate(self, user: str, days: float = 365.0) -> str:
        """Replace a user's key and return the new one; the old one ends now."""
        return (await self._request("rotate", RotateKey(user=user, days=days), NewKey)).secret

    async def revoke(self, user: str) -> UserInfo:
        """Revoke a user's key for good. Running jobs are not stopped."""
        return (await self._request("revoke", NameUser(user=user), UserReply)).user

    async def quota(self, user: str, bounds: dict[str, float]) -> UserInfo:
        """Change a user's quota (`{"max_slots": 8, "weight": 2}`) and return the user.

        -1 means no limit. Raises ConfigError for an unknown limit.
        """
        known = SetQuota.model_fields.keys() - {"user"}
        if unknown := sorted(bounds.keys() - known):
            raise ConfigError(
                f"there is no limit {unknown[0]!r}",
                hint=did_you_mean(unknown[0], sorted(known)),
            )
        request = SetQuota.model_validate({"user": user, **bounds})
        return (await self._request("quota", request, UserReply)).user

    async def _request(self, method: str, request: Any, reply: Any) -> Any:
        return await ask_users((await self._connected()).broker, method, request, reply)


class PoolUsers(base.SyncTwin[AsyncPoolUsers]):
    """The users of a pool with authentication, for admins; the same as `tinkermq user`.

    Raises AuthError for users without the role admin, BrokerError for a pool without users.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """Name the pool's broker; the key is $TINKERMQ_API_KEY unless it is given."""
        super().__init__(AsyncPoolUsers(url, api_key))

    list = base.make_sync(AsyncPoolUsers.list)
    add = base.make_sync(AsyncPoolUsers.add)
    rotate = base.make_sync(AsyncPoolUsers.rotate)
    revoke = base.make_sync(AsyncPoolUsers.revoke)
    quota = base.make_sync(AsyncPoolUsers.quota)
