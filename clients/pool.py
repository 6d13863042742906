"""The scheduler and the job records of a pool, over one connection.

Changes are requests to the scheduler. Job records are read directly from the broker, so listing
works while the scheduler is down.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from ..broker.calls import SchedulerCalls, new_request_id
from ..broker.client.connection import Broker
from ..broker.jobs import JobStore
from ..schemas.config.algorithm import is_endpoint
from ..schemas.job import (
    FINAL_STATES,
    NOTIFY_URL,
    TEACHER_KEY,
    WANDB_KEY,
    JobRecord,
    SecretName,
)
from ..schemas.wire import errors
from ..schemas.wire.codec import merged
from ..schemas.wire.subjects import DEFAULT_USER, token
from .validation import split_checkpoint_name

# Secrets and wandb settings of the caller's environment that are sent with a job.

_OF_WANDB = {
    "WANDB_ENTITY": ("tracking", "entity"),
    "WANDB_PROJECT": ("project",),
    "WANDB_RUN_GROUP": ("group",),
    "WANDB_TAGS": ("tags",),
    "WANDB_NOTES": ("notes",),
}
_ON_NODES = ("WANDB_BASE_URL",)
_MODES = {"online": "wandb", "offline": "wandb-offline"}


def with_tracker_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with unset wandb keys filled from $WANDB_…, if it logs to wandb.

    Raises ConfigError for a variable that must be set on the learner's machine.
    """
    backends = [str(backend) for backend in config.get("logger_backends") or ()]
    if not {"wandb", "wandb-offline"} & set(backends):
        return dict(config)
    for name in _ON_NODES:
        if os.environ.get(name):
            raise errors.ConfigError(
                f"{name} is set here, but the learner logs to wandb from one of the pool's nodes",
                hint=f"set it in the environment of the nodes (node.env), and unset {name} "
                "here, or log to wandb-offline",
            )
    changes: dict[str, Any] = {"logger_backends": _in_mode(backends)}
    for name, path in _OF_WANDB.items():
        value = os.environ.get(name, "").strip()
        if value and not _is_set(config, path):
            setting: Any = [tag.strip() for tag in value.split(",")] if path == ("tags",) else value
            changes = merged(changes, _nested(path, setting))
    return merged(dict(config), changes)


def _in_mode(backends: list[str]) -> list[str]:
    """Return trackers according to $WANDB_MODE."""
    mode = os.environ.get("WANDB_MODE", "")
    if not mode:
        return backends
    if mode in ("disabled", "dryrun"):
        return [backend for backend in backends if not backend.startswith("wandb")]
    if mode not in _MODES:
        raise errors.ConfigError(
            f"WANDB_MODE={mode!r} is not known for jobs", hint="set online, offline or disabled"
        )
    return [_MODES[mode] if backend.startswith("wandb") else backend for backend in backends]


def _is_set(config: Mapping[str, Any], path: Sequence[str]) -> bool:
    value: Any = config
    for part in path:
        value = cast("Mapping[str, Any]", value).get(part) if isinstance(value, Mapping) else None
    return value is not None


def _nested(path: Sequence[str], value: Any) -> dict[str, Any]:
    return {path[0]: _nested(path[1:], value) if len(path) > 1 else value}


def _asks_endpoint(config: Mapping[str, Any]) -> bool:
    algorithm = config.get("algorithm")
    named = cast("Mapping[str, Any]", algorithm).get("teacher") if algorithm else None
    several = cast("Mapping[str, Any]", named).values() if isinstance(named, Mapping) else [named]
    return any(isinstance(source, str) and is_endpoint(source) for source in several)


def secrets_for(config: Mapping[str, Any], wandb_key: str | None = None) -> dict[SecretName, str]:
    """Return the secrets that a job of this configuration needs, from the environment."""
    secrets: dict[SecretName, str] = {}
    if url := os.environ.get(NOTIFY_URL):
        secrets[NOTIFY_URL] = url
    if (key := os.environ.get(TEACHER_KEY)) and _asks_endpoint(config):
        secrets[TEACHER_KEY] = key
    uses_wandb = "wandb" in (config.get("logger_backends") or ())
    if key := wandb_key or (os.environ.get(WANDB_KEY) if uses_wandb else None):
        secrets[WANDB_KEY] = key
    return secrets


__all__ = ["Pool", "is_token", "new_request_id"]

_REMOVAL_S = 600.0
_LOOK_S = 0.1


class Pool(SchedulerCalls):
    """The scheduler and the jobs of the connection's user."""

    def __init__(self, broker: Broker) -> None:
        super().__init__(broker)
        self._jobs = JobStore(broker)

    @property
    def has_users(self) -> bool:
        """Return whether the pool has users with keys."""
        return self.broker.user != DEFAULT_USER

    async def find(self, name: str) -> JobRecord:
        """Return a job by its id or run name.

        Raises NotFoundError that names the closest run.
        """
        record = await self._jobs.find(self.broker.user, name) if is_token(name) else None
        if record is not None:
            return record
        records = await self.list_jobs(all=True)
        known = [known for record in records for known in (record.name, record.job)]
        raise errors.NotFoundError(
            f"there is no run {name!r}",
            hint=errors.did_you_mean(name, known, otherwise="list them with `tinkermq ps --all`"),
        )

    async def has_run(self, name: str) -> bool:
        """Return whether there is a job with this id or run name."""
        return is_token(name) and await self._jobs.find(self.broker.user, name) is not None

    async def delete_run(self, name: str) -> JobRecord:
        """Delete a run that has ended and wait until it is gone; return its last record.

        Raises NotFoundError, StateError with the reason why it cannot, DeadlineError.
        """
        record = await self.find(name)
        with contextlib.suppress(errors.NotFoundError):  # an earlier request deleted it
            await self.delete(record.job)
        await self._until(record, "delete", lambda now: now is None, _REMOVAL_S)
        return record

    async def resume_run(self, name: str, changes: Mapping[str, Any]) -> JobRecord:
        """Resume a run; one that has ended may have `changes` to its configuration.

        Raises NotFoundError, StateError, ConfigError for a key that cannot change.
        """
        record = await self.find(name)
        secrets = secrets_for(merged(record.config, changes))
        if secrets and record.state in FINAL_STATES:  # its old secrets were removed when it ended
            await self.hand_over(record.job, secrets)
        return await self.resume(record.job, changes)

    async def fork_run(self, source: str, changes: Mapping[str, Any]) -> JobRecord:
        """Start a new run from a checkpoint of another, with `changes` to its configuration.

        `source` is `RUN@STEP` or `RUN@last`. Raises NotFoundError, ConfigError.
        """
        from ..schemas.config.load_config import with_changes  # lists of runs do not need it

        run, step = split_checkpoint_name(source)
        if step is None:
            raise errors.ConfigError(
                f"{source!r} does not name a checkpoint", hint="write RUN@STEP, such as my-run@40"
            )
        origin = await self.find(run)
        inherited = {key: value for key, value in origin.config.items() if key != "name"}
        config = with_tracker_settings(with_changes(inherited, changes))
        return await self.submit(
            config,
            kind="sft" if origin.kind == "sft" else "train",
            fork_of=f"{origin.job}@{step}",
            request_id=new_request_id(),
            secrets=secrets_for(config),
        )

    async def archive_run(self, name: str, *, undo: bool = False) -> JobRecord:
        """Archive a run that has ended, or restore it, and wait for it.

        Raises NotFoundError, StateError with the reason why it cannot, StorageError for a
        damaged archive, DeadlineError.
        """
        record = await self.find(name)
        await (self.unarchive(record.job) if undo else self.archive(record.job))

        def done(now: JobRecord | None) -> bool:
            if undo and now is not None and now.refused:
                raise errors.StorageError(
                    now.refused, hint="restore that folder from a back-up, or delete the run"
                )
            return now is None or (now.removal == "no" and (now.archived is None) == undo)

        return await self._until(record, "archive", done, _REMOVAL_S) or record

    async def wait_until_ended(self, record: JobRecord, deadline_s: float) -> JobRecord:
        """Wait for the end of a stopping job; return its last record.

        Raises DeadlineError.
        """

        def done(now: JobRecord | None) -> bool:
            return now is None or now.state in FINAL_STATES

        return await self._until(record, "stop", done, deadline_s) or record

    async def _until(
        self,
        record: JobRecord,
        what: str,
        done: Callable[[JobRecord | None], bool],
        deadline_s: float,
    ) -> JobRecord | None:
        """Return a job's record, or None, once `done` accepts it."""
        deadline = time.monotonic() + deadline_s
        while not done(now := await self._jobs.find_by_id(record.user, record.job)):
            if time.monotonic() > deadline:
                raise errors.DeadlineError(
                    f"the {what} of run {record.name} is not done after {deadline_s:g} s",
                    hint="the scheduler continues with it; its log names what it waits for",
                )
            await asyncio.sleep(_LOOK_S)
        return now

    async def list_all_users_jobs(self, *, all: bool = False) -> list[JobRecord]:
        """Return the jobs of all users, newest first, as the scheduler lists them to an admin."""
        records = await self.all_jobs(widest=True, archived=all)
        return [record for record in records if all or record.state not in FINAL_STATES]

    async def list_jobs(self, *, all: bool = False) -> list[JobRecord]:
        """Return the jobs that have not ended, or all including archived ones, newest first."""
        records = await self._jobs.list_jobs(self.broker.user)
        if not all:
            return [record for record in records if record.state not in FINAL_STATES]
        archived = {
            record.job: record for record in await self._jobs.list_archived(self.broker.user)
        }
        all_records = archived | {record.job: record for record in records}
        return sorted(all_records.values(), key=lambda record: record.created, reverse=True)


def is_token(name: str) -> bool:
    """Return whether a text is a valid run name."""
    try:
        token(name, what="run")
    except errors.MessageError:
        return False
    return True
