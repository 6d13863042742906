"""What a user holds, by the names of the bounds of `Quota`, and the refusal of what is over them.

Pure. A part of the bucket of jobs is kept back: what users submit ends before it is full, so that
stops, repairs and the scheduler's own moves always find room there.
"""

from collections.abc import Iterable, Mapping

from ....broker.jetstream.streams import BUCKET_BYTES
from ....broker.jobs import is_final
from ....schemas.config.job import JobConfig
from ....schemas.config.sections import BROKER
from ....schemas.job import MAX_RECORD_BYTES, JobRecord
from ....schemas.user import Quota
from ....schemas.wire.errors import QuotaError
from .actors import slots_of

USERS_BYTES = BUCKET_BYTES * 3 // 4
"""Of the bucket of jobs, for the records of users."""
ADMINS_BYTES = BUCKET_BYTES * 7 // 8
"""Of the bucket of jobs, for what admins submit; the rest is for changes of what is there."""
_DELETE = "delete old runs (`tinkermq delete`)"
_WAIT = "wait for the end of others, or stop some (`tinkermq stop`)"
_ADVICE = {
    "max_slots": ("slots", "ask for fewer (generator.count), or stop other runs"),
    "max_jobs": ("runs, ended ones included", _DELETE),
    "max_live_jobs": ("runs that have not ended", _WAIT),
    "max_actors": (
        "processes, environment hosts included",
        "ask for fewer (generator.count, env.hosts), or stop other runs",
    ),
    "max_stored_bytes": ("bytes of streams", f"lower `limits`, or {_DELETE}"),
    "max_record_bytes": ("bytes of job records", f"keep configurations small, and {_DELETE}"),
}


def reserved_bytes(config: JobConfig) -> int:
    """Return what the limits of a job let its streams hold."""
    limits = config.limits
    segments = limits.segment_bytes if config.keeps_segments else 0
    checkpoints = limits.checkpoint_bytes if config.storage.url == BROKER else 0
    streams = limits.task_bytes + limits.rollout_bytes + 3 * limits.log_bytes
    return streams + segments + checkpoints


def stored_bytes(record: JobRecord | None) -> int:
    """Return what counts of what the streams of a job hold: none before they are made."""
    counts = record is not None and (not is_final(record) or record.has_streams)
    return record.stored_bytes if record is not None and counts else 0


def holdings(records: Iterable[JobRecord], num_bytes: Mapping[str, int]) -> dict[str, int]:
    """Return what the jobs of one user hold; `num_bytes` are the sizes of records by key."""
    held = dict.fromkeys(_ADVICE, 0)
    for record in records:
        held["max_jobs"] += 1
        held["max_record_bytes"] += num_bytes.get(record.scope.key, 0)
        held["max_stored_bytes"] += stored_bytes(record)
        if not is_final(record):
            held["max_live_jobs"] += 1
            placed = [actor for actor in record.actors if actor.node is not None]
            held["max_slots"] += slots_of(placed)
            held["max_actors"] += len(placed)
    return held


def check_room(user: str, quota: Quota, held: Mapping[str, int], **more: int) -> None:
    """Raise QuotaError if a user who holds that may not hold so much more, by name of the bound."""
    for name, number in more.items():
        most, has = getattr(quota, name), held.get(name, 0)
        what, advice = _ADVICE[name]
        if most is not None and number > 0 and has + number > most:
            text = f"user {user!r} has {has:,} {what}, and this asks for {number:,} more: the quota"
            if not has:
                text = f"the job needs {number:,} {what}, the quota of user {user!r}"
            raise QuotaError(
                f"{text} is {most:,}",
                hint=f"{advice}, or ask an admin for more (`tinkermq user quota {user}`)",
            )


def check_bucket(total_bytes: int, more: int, *, is_admin: bool) -> None:
    """Raise QuotaError if the records of all users leave no room for one of `more` bytes."""
    most = ADMINS_BYTES if is_admin else USERS_BYTES
    if total_bytes + more > most:
        raise QuotaError(
            f"the records of all jobs of the pool take {total_bytes:,} bytes, with this one more "
            f"than the {most:,} that submissions may take",
            hint="let everybody delete old runs (`tinkermq delete`); running ones go on and can be "
            "stopped",
        )


def check_record(record: JobRecord, num_bytes: int) -> None:
    """Raise QuotaError for a record that is larger than one may be."""
    if num_bytes > MAX_RECORD_BYTES:
        raise QuotaError(
            f"the record of job {record.name} would have {num_bytes:,} bytes, one may have "
            f"{MAX_RECORD_BYTES:,}",
            hint="keep the configuration small: name files instead of data; or submit a new job",
        )


def check_priority(user: str, priority: int, quota: Quota) -> None:
    """Raise QuotaError if a user may not give jobs this priority."""
    if priority > quota.max_priority:
        raise QuotaError(
            f"priority {priority} is above the highest that user {user!r} may give, "
            f"{quota.max_priority}",
            hint="give a lower one, or ask an admin",
        )
