"""What guests may read and store of what is stored: the table of the store proxy."""

import re
from typing import NamedTuple

from ...schemas.wire.subjects import (
    BUCKET_ACTORS,
    BUCKET_ARCHIVE,
    BUCKET_EVALS,
    BUCKET_JOBS,
    PREFIX,
    JobScope,
)

STREAMS = ("task", "rollout", "segment", "batch", "dead", "feed", "trace", "log", "op", "result")
"""Kinds of streams that a job has."""
_JOB_KINDS = frozenset({*STREAMS, "weights", "checkpoints"})
SHARED = (BUCKET_JOBS, BUCKET_ARCHIVE, BUCKET_ACTORS, BUCKET_EVALS)
"""Buckets that all jobs share."""
_NUMBER = re.compile(r"[0-9]{1,18}")


class Guest(NamedTuple):
    """Who asks the store proxy, as the subject of the request tells."""

    user: str
    job: str = ""
    """Empty for the user himself."""
    role: str = ""
    """Role of a process of the job."""


def may_read(guest: Guest, stream: str, subject: str) -> bool:
    """Whether a guest may read messages on `subject` (wildcards allowed) of a stream."""
    for bucket in SHARED:
        if stream == f"KV_{bucket}":
            return _below(subject, f"$KV.{bucket}", _keys(guest, bucket))
    return not guest.job and is_stream_of(guest.user, stream)


def may_store(guest: Guest, subject: str) -> str | None:
    """Return the stream in which a guest may store a message on `subject`, or None."""
    parts = subject.split(".")
    if any(part in ("", "*", ">") for part in parts):
        return None
    if guest.job:
        scope = JobScope(guest.user, guest.job)
        if guest.role == "environment" and subject == scope.event:
            return scope.stream_feed
        is_beat = subject.startswith(f"$KV.{BUCKET_ACTORS}.{scope.key}.") and len(parts) == 5
        return f"KV_{BUCKET_ACTORS}" if guest.role == "environment" and is_beat else None
    if len(parts) == 5 and parts[:3] == ["$KV", BUCKET_EVALS, guest.user]:
        return f"KV_{BUCKET_EVALS}"
    own = [*PREFIX.split("."), "job", guest.user]
    if (
        len(parts) == 7
        and parts[:4] == own
        and parts[5] == "rollout"
        and _NUMBER.fullmatch(parts[6])
    ):
        return JobScope(guest.user, parts[4]).stream_rollout
    return None


def is_stream_of(user: str, stream: str) -> bool:
    """Whether a stream, bucket or object store belongs to a job of the user."""
    plain = stream.removeprefix("KV_").removeprefix("OBJ_")
    head, _, kind = plain.rpartition("-")
    return head.startswith(f"tmq-{user}-") and kind in _JOB_KINDS and "." not in stream


def _keys(guest: Guest, bucket: str) -> tuple[str, ...]:
    """Return the keys, as leading tokens, that a guest may read in a shared bucket."""
    if guest.job:
        readable = {
            "environment": (BUCKET_JOBS,),
            "learner": (BUCKET_JOBS, BUCKET_ACTORS, BUCKET_EVALS),
            "rank": (BUCKET_JOBS,),
            "generator": (BUCKET_JOBS,),
            "evaluator": (BUCKET_JOBS, BUCKET_EVALS),
            "server": (BUCKET_JOBS,),
            "trainer": (BUCKET_JOBS,),
            "sampler": (BUCKET_JOBS,),
        }.get(guest.role, ())
        own_beat = bucket == BUCKET_ACTORS
        kind = BUCKET_JOBS if bucket == BUCKET_ARCHIVE else bucket
        return (f"{guest.user}.{guest.job}",) if kind in readable or own_beat else ()
    return (guest.user, "pool") if bucket == BUCKET_ACTORS else (guest.user,)


def _below(subject: str, bucket: str, keys: tuple[str, ...]) -> bool:
    return any(
        subject == f"{bucket}.{key}" or subject.startswith(f"{bucket}.{key}.") for key in keys
    )
