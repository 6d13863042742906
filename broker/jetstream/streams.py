"""The streams and buckets of each job, the shared buckets, and their bounds.

Every stream has a byte bound and a description. Streams of work and results (tasks, rollouts, batch
records) refuse messages when full, which makes the publisher wait; metrics, events and log lines
drop their oldest. Making an existing stream updates its configuration.
"""

import asyncio
import contextlib
import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nats.aio.msg import Msg

from ...schemas.wire import errors
from ...schemas.wire.codec import MAX_MESSAGE_BYTES
from ...schemas.wire.subjects import (
    BUCKET_ACTORS,
    BUCKET_ARCHIVE,
    BUCKET_COPIES,
    BUCKET_EVALS,
    BUCKET_JOBS,
    BUCKET_LEASES,
    BUCKET_MACHINES,
    BUCKET_NODES,
    BUCKET_REQUESTS,
    BUCKET_SECRETS,
    TASK_CONSUMER,
    VALIDATION_CONSUMER,
    JobScope,
    number_of,
)
from ..client.connection import Broker
from ..client.faults import ConnectionLost, NoResponders, Refused
from ..client.nats_internals import DESCRIPTION, header, status_of
from ..client.parts import Inbox

if TYPE_CHECKING:
    from ...schemas.config.job import LimitsConfig


# Pull requests to a consumer: the only live delivery of stream messages.
#
# A pull request is bounded in messages and bytes, so a reader receives no more than it requested.
# The inbox lives as long as its owner; a message that arrives after its request was abandoned stays
# in the inbox for the next one. A loss of the connection ends a running request at once.

NS = 1_000_000_000
_STATUS_OK = frozenset({"404", "408"})  # no message; the request has expired
_HEARTBEAT = "100"
_GONE = frozenset({"503", "409"})


class ConsumerGone(errors.BrokerError):
    """The consumer was deleted, or was lost with its server: it has to be made again."""


class PullInbox(Inbox):
    """Receives the messages of pull requests."""

    def take_arrived(self) -> list[Msg]:
        """Return the messages that have arrived, without waiting."""
        return [message for message in self.drain() if not _status(message)]

    async def pull(self, stream: str, consumer: str, request: dict[str, Any]) -> None:
        """Send one pull request."""
        place = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        await self.ask(place, json.dumps(request).encode())

    async def next_pulled(self, timeout_s: float) -> Msg | None:
        """Return the next message, or None when the request has ended.

        Raises ConnectionLost, ConsumerGone, TimeoutError without a heartbeat.
        """
        while True:
            message = await self.next(timeout_s)
            status = _status(message)
            if not status:
                return message
            if status != _HEARTBEAT and not _is_complete(message):
                _check_status(status, message)
                return None


def _status(message: Msg) -> str:
    """Return the status of the server's own message, empty for a message of the stream."""
    return "" if message.reply else status_of(message)


def _is_complete(message: Msg) -> bool:
    """Return whether the server reports that it has sent all requested messages."""
    return "batch completed" in header(message, DESCRIPTION).lower()


def _check_status(status: str, message: Msg) -> None:
    description = header(message, DESCRIPTION)
    if status in _STATUS_OK or "maxbytes" in description.lower().replace(" ", ""):
        return
    if status in _GONE:
        raise ConsumerGone(f"the consumer no longer exists: {status} {description}")
    raise errors.BrokerError(
        f"a pull request was refused: {status} {description}", hint="see `nats consumer info`"
    )


PRESENCE_TTL_S = 10
REQUEST_TTL_S = RESULT_TTL_S = SEGMENT_TTL_S = 24 * 3600
REPLICAS_VARIABLE = "TINKERMQ_REPLICAS"
BATCH_BYTES = 1 << 30
DEAD_BYTES, MANIFEST_BYTES = 64 << 20, 256 << 20
WEIGHTS_BYTES = 1 << 30
"""Bound on published versions until the learner reports what its model needs; see `bound_weights`.
"""
BUCKET_BYTES = 256 << 20
PRESENCE_BYTES, EVALUATION_BYTES = 16 << 10, 64 << 10
REQUEST_BYTES, SECRETS_BYTES = 4 << 10, 64 << 10
"""Bounds on one value of a shared bucket, including its headers."""
MAX_LEASES = 8192
_DEADLINE_S, _LOOK_S = 30.0, 0.1
_PURGE_DEADLINE_S = 60.0
_NAME_IN_USE = 10058
_NO_SPACE = (10028, 10047)
_LAST_WORDS_BYTES = 1 << 20

StreamConfig = Mapping[str, Any]


async def create_job_streams(
    broker: Broker,
    scope: JobScope,
    limits: "LimitsConfig",
    *,
    weights_bytes: int = WEIGHTS_BYTES,
    ack_wait_s: float | None = None,
    segments: bool = False,
    operations: bool = False,
    checkpoints: bool = False,
    validation: bool = False,
) -> None:
    """Make all streams of a job; harmless when they exist.

    With `ack_wait_s` also makes the consumers of its tasks, which generators may not make;
    arguments add streams of running episodes, users' operations, checkpoints and validation tasks.

    Raises BrokerError when the server refuses one, DeadlineError.
    """
    is_made = {scope.stream_segment: segments, f"OBJ_{scope.object_checkpoints}": checkpoints}
    is_made |= dict.fromkeys((scope.stream_operation, scope.stream_result), operations)
    is_made[scope.stream_validation] = validation
    configs = job_streams(scope, limits, weights_bytes)
    made = (
        ensure_stream(broker, config) for config in configs if is_made.get(config["name"], True)
    )
    await asyncio.gather(*made)
    if ack_wait_s is not None:
        await ensure_task_consumer(broker, scope, ack_wait_s)
        if validation:
            await ensure_task_consumer(broker, scope, ack_wait_s, validation=True)


async def bound_weights(broker: Broker, scope: JobScope, num_bytes: int) -> None:
    """Bound the bytes of a running job's published versions.

    Raises BrokerError when the server has no room for them, NotFoundError, DeadlineError.
    """
    name = f"OBJ_{scope.object_weights}"
    config = (await stream_info(broker, name))["config"] | {"max_bytes": num_bytes}
    try:
        await _request(broker, f"STREAM.UPDATE.{name}", config)
    except Refused as error:
        hint = "look at it with `nats stream info`"
        if error.err_code in _NO_SPACE:
            hint = (
                "raise max_file_store of nats-server, delete old jobs, set "
                "learner.publish_dtype=bfloat16, or weights.transport=file or nccl"
            )
        raise errors.BrokerError(
            f"the versions of weights of job {scope.job} need {num_bytes:,} bytes, for which the "
            f"server has no room: {error.description}",
            hint=hint,
        ) from error


async def settle_job_streams(broker: Broker, scope: JobScope) -> int:
    """Bound an ended job's streams by their contents, to free the reserved space.

    Segments of running episodes are removed. Returns the number of bytes stored.

    Events and log lines keep some room: draining actors still send their last lines.
    `create_job_streams` restores all bounds.

    Raises BrokerError for a stream that the server does not change, DeadlineError.
    """
    stored = 0
    for config in _default_streams(scope):
        name = str(config["name"])
        try:
            info = await stream_info(broker, name)
            room = _LAST_WORDS_BYTES if name in {scope.stream_feed, scope.stream_log} else 0
            bound = max(int(info["state"]["bytes"]) + room, 1)
            if name == scope.stream_segment and info["state"]["messages"]:
                await _request(broker, f"STREAM.PURGE.{name}", None)
            stored += int(info["state"]["bytes"])
            if bound < info["config"]["max_bytes"]:
                change = {"max_bytes": bound}
                await _request(broker, f"STREAM.UPDATE.{name}", info["config"] | change)
        except errors.NotFoundError:  # the job never started, or was just removed
            continue
    return stored


async def ensure_task_consumer(
    broker: Broker,
    scope: JobScope,
    ack_wait_s: float,
    max_leases: int = MAX_LEASES,
    *,
    validation: bool = False,
) -> None:
    """Make or update the consumer from which generators pull tasks.

    With `validation`, the consumer of validation tasks. Raises NotFoundError when the job's streams
    are gone, BrokerError, DeadlineError.
    """
    stream, name, subjects = scope.stream_task, TASK_CONSUMER, scope.task("*")
    if validation:
        stream, name = scope.stream_validation, VALIDATION_CONSUMER
        subjects = scope.validation_task("*", "*")
    config = {
        "durable_name": name,
        "description": f"Generators of job {scope.job}",
        "ack_policy": "explicit",
        "ack_wait": int(ack_wait_s * NS),
        "max_deliver": -1,
        "max_ack_pending": max_leases,
        "max_waiting": 4096,
        "deliver_policy": "all",
        "filter_subject": subjects,
    }
    verb = f"CONSUMER.CREATE.{stream}.{name}.{subjects}"
    await _request(broker, verb, {"stream_name": stream, "config": config})


async def delete_job_streams(broker: Broker, scope: JobScope) -> None:
    """Delete all streams of a job with their contents; harmless when they are gone."""
    names = [config["name"] for config in _default_streams(scope)]
    await asyncio.gather(*(delete_stream(broker, name) for name in names))


def _shared_buckets() -> list[StreamConfig]:
    """Return the configurations of the buckets that all jobs share."""
    buckets = (
        (BUCKET_JOBS, "Job records, by <user>.<job>", 0, MAX_MESSAGE_BYTES),
        (BUCKET_ARCHIVE, "Records of archived jobs, by <user>.<job>", 0, MAX_MESSAGE_BYTES),
        (BUCKET_COPIES, "Copies of job records, by <user>.<job>", 0, MAX_MESSAGE_BYTES),
        (BUCKET_NODES, "Nodes of the pool and their slots", 0, MAX_MESSAGE_BYTES),
        (BUCKET_ACTORS, "Heartbeats of actors that are there", PRESENCE_TTL_S, PRESENCE_BYTES),
        (BUCKET_EVALS, "Evaluations, by <user>.<job>.<version>", 0, EVALUATION_BYTES),
        (BUCKET_REQUESTS, "Submissions, by request id", REQUEST_TTL_S, REQUEST_BYTES),
        (BUCKET_SECRETS, "Secrets of jobs, sealed, by <user>.<job>", 0, SECRETS_BYTES),
        (BUCKET_MACHINES, "What machines of clusters have used", 0, MAX_MESSAGE_BYTES),
        (BUCKET_LEASES, "Leases of roles that one actor at a time may have", 0, REQUEST_BYTES),
    )
    return [
        {**bucket_config(name, description, ttl_s=ttl_s), "max_msg_size": max_value_bytes}
        for name, description, ttl_s, max_value_bytes in buckets
    ]


async def create_shared(broker: Broker) -> None:
    """Make the buckets that all jobs share; harmless when they exist.

    Raises StateError when the bucket of job records is gone while there are jobs.
    """
    await _refuse_without_records(broker)
    for config in _shared_buckets():
        await ensure_stream(broker, config)


async def mend_shared(broker: Broker) -> list[str]:
    """Make deleted buckets that all jobs share again, empty; return their streams' names.

    Not those of job records, which only a back-up brings back.
    """
    made: list[str] = []
    for config in _shared_buckets():
        name = config["name"]
        if name in (f"KV_{BUCKET_JOBS}", f"KV_{BUCKET_ARCHIVE}"):
            continue
        try:
            await stream_info(broker, name)
        except errors.NotFoundError:
            await ensure_stream(broker, config)
            made.append(name)
    return made


async def _refuse_without_records(broker: Broker) -> None:
    """Raise StateError if jobs have streams but the bucket of their records is gone.

    With an empty bucket instead, all nodes would stop all actors. Without streams of jobs the pool
    begins anew, also without copies of records.
    """
    try:
        await stream_info(broker, f"KV_{BUCKET_JOBS}")
    except errors.NotFoundError:
        answer = await _request(broker, "STREAM.NAMES", {"subject": JobScope.all_batches()})
        if names := answer.get("streams"):
            raise errors.StateError(
                f"there is no stream KV_{BUCKET_JOBS}, which held the records of all jobs, and "
                f"{answer.get('total', len(names))} jobs have streams, such as {names[0]}",
                hint="restore a back-up (`tinkermq restore`); to begin anew without these jobs, "
                "remove their streams (`nats stream rm`)",
            ) from None
        await delete_stream(broker, f"KV_{BUCKET_COPIES}")


async def wait_for_shared(broker: Broker, deadline_s: float) -> None:
    """Wait until the scheduler has made the shared buckets; raises DeadlineError."""
    deadline = broker.clock() + deadline_s
    key = f"$KV.{BUCKET_ACTORS}.pool.scheduler"
    while True:
        try:
            await broker.request(f"{broker.direct_get(f'KV_{BUCKET_ACTORS}')}.{key}")
        except (NoResponders, ConnectionLost, TimeoutError) as error:
            if broker.clock() > deadline:
                raise errors.DeadlineError(
                    f"the buckets of the pool were not made within {deadline_s:g} s",
                    hint="start a scheduler: `tinkermq up`",
                ) from error
        else:
            return
        await asyncio.sleep(_LOOK_S)


def _default_streams(scope: JobScope) -> list[StreamConfig]:
    from ...schemas.config.job import LimitsConfig

    return job_streams(scope, LimitsConfig(), WEIGHTS_BYTES)


def job_streams(scope: JobScope, limits: "LimitsConfig", weights_bytes: int) -> list[StreamConfig]:
    """Return the configuration of every stream of a job."""
    job, checkpoints = f"job {scope.job} of {scope.user}", scope.object_checkpoints
    once = {"max_msgs_per_subject": 1, "discard": "new", "discard_new_per_subject": True}
    return [
        stream_config(
            scope.stream_task,
            f"Tasks of {job} that no generator has finished",
            [scope.task("*")],
            limits.task_bytes,
            retention="workqueue",
            **once,
        ),
        stream_config(
            scope.stream_rollout,
            f"Finished groups of {job}, one per task",
            [scope.rollout("*")],
            limits.rollout_bytes,
            # readers receive a notice, not the group itself a second time
            republish={"src": scope.rollout("*"), "dest": scope.appended, "headers_only": True},
            **once,
        ),
        stream_config(
            scope.stream_validation,
            f"Validation tasks of {job}, and their results until the version's is known",
            [scope.validation_task("*", "*"), scope.validation_result("*", "*")],
            limits.task_bytes,
            retention="workqueue",
            republish={
                "src": scope.validation_result("*", "*"),
                "dest": scope.validated,
                "headers_only": True,
            },
            **once,
        ),
        stream_config(
            scope.stream_segment,
            f"Episodes of {job} that are being played",
            [scope.segment("*")],
            limits.segment_bytes,
            discard="new",
            max_age=SEGMENT_TTL_S * NS,
        ),
        stream_config(
            scope.stream_batch,
            f"Batch records of {job}, one per optimiser step",
            [scope.batch],
            BATCH_BYTES,
            discard="new",
        ),
        stream_config(
            scope.stream_operation,
            f"Operations on models of {job} behind their states",
            [scope.all_operations],
            limits.operation_bytes,
            **once,
        ),
        stream_config(
            scope.stream_result,
            f"Results of operations of {job}",
            [scope.all_results],
            limits.operation_bytes,
            max_age=RESULT_TTL_S * NS,
        ),
        stream_config(scope.stream_dead, f"Tasks of {job} given up", [scope.dead], DEAD_BYTES),
        stream_config(
            scope.stream_feed,
            f"Metrics and events of {job}",
            [scope.metric, scope.event],
            limits.log_bytes,
        ),
        stream_config(scope.stream_trace, f"Traces of {job}", [scope.trace], limits.log_bytes),
        stream_config(scope.stream_log, f"Log lines of {job}", [scope.log("*")], limits.log_bytes),
        bucket_config(scope.bucket_weights, f"Weight manifests of {job}", max_bytes=MANIFEST_BYTES),
        object_store_config(scope.object_weights, f"Weights of {job}", weights_bytes),
        object_store_config(checkpoints, f"Checkpoints of {job}", limits.checkpoint_bytes),
    ]


def stream_config(
    name: str, description: str, subjects: list[str], max_bytes: int, **more: Any
) -> StreamConfig:
    """Return the configuration of a stream; `more` are further keys of the server's."""
    return {
        "name": name,
        "description": description,
        "subjects": subjects,
        "storage": "file",
        "retention": "limits",
        "discard": "old",
        "max_bytes": max_bytes,
        "num_replicas": num_replicas(),
        "allow_direct": True,
        **more,
    }


def num_replicas() -> int:
    """Return the number of replicas of new streams in a cluster: `$TINKERMQ_REPLICAS`, or 1."""
    text = os.environ.get(REPLICAS_VARIABLE, "1")
    if text not in ("1", "3", "5"):
        raise errors.BrokerError(
            f"{REPLICAS_VARIABLE}={text!r} must be 1, 3 or 5",
            hint="set it to 3 for a cluster of three servers, or leave it out",
        )
    return int(text)


def bucket_config(
    bucket: str, description: str, *, ttl_s: int = 0, max_bytes: int = BUCKET_BYTES
) -> StreamConfig:
    """Return the stream of a KV bucket in the layout of ADR-8; `ttl_s` 0 keeps keys for ever."""
    return stream_config(
        f"KV_{bucket}",
        description,
        [f"$KV.{bucket}.>"],
        max_bytes,
        discard="new",
        max_msgs_per_subject=1,
        max_age=ttl_s * NS,
        duplicate_window=min(ttl_s or 120, 120) * NS,
        allow_rollup_hdrs=True,
        allow_msg_ttl=True,
        deny_delete=True,
    )


def object_store_config(bucket: str, description: str, max_bytes: int) -> StreamConfig:
    """Return the stream of an object store in the layout of ADR-20."""
    return stream_config(
        f"OBJ_{bucket}",
        description,
        [f"$O.{bucket}.C.>", f"$O.{bucket}.M.>"],
        max_bytes,
        discard="new",
        allow_rollup_hdrs=True,
    )


async def ensure_stream(broker: Broker, config: StreamConfig) -> None:
    """Make a stream, or update the configuration of an existing one.

    Its number of replicas is never reduced.
    """
    name = config["name"]
    try:
        await _request(broker, f"STREAM.CREATE.{name}", config)
    except Refused as error:
        if error.err_code != _NAME_IN_USE:
            raise _refused(name, config, error) from error
        try:
            present = await stream_info(broker, name)
            replicas = max(config["num_replicas"], int(present["config"]["num_replicas"]))
            await _request(broker, f"STREAM.UPDATE.{name}", {**config, "num_replicas": replicas})
        except Refused as update_error:
            raise _refused(name, config, update_error) from update_error


async def delete_stream(broker: Broker, name: str) -> None:
    """Delete a stream with its contents; harmless when it is gone."""
    with contextlib.suppress(errors.NotFoundError):
        await _request(broker, f"STREAM.DELETE.{name}", None)


async def stream_info(broker: Broker, name: str) -> dict[str, Any]:
    """Return the server's description of a stream; raises NotFoundError when it is gone."""
    return await _request(broker, f"STREAM.INFO.{name}", None)


async def has_batches(broker: Broker, scope: JobScope) -> bool:
    """Return whether a run has recorded a step; False for one without streams."""
    try:
        info = await stream_info(broker, scope.stream_batch)
    except errors.NotFoundError:
        return False
    return bool(info["state"]["last_seq"])


async def purge(broker: Broker, name: str, subject: str) -> None:
    """Remove a stream's messages on a subject; raises NotFoundError when the stream is gone."""
    await broker.retry(
        lambda: broker.api(f"STREAM.PURGE.{name}", {"filter": subject}),
        deadline_s=_PURGE_DEADLINE_S,
        waiting_for=f"messages on {subject} to be removed",
    )


async def stream_subjects(broker: Broker, name: str, subjects: str) -> list[str]:
    """Return every subject below `subjects` with stored messages, without reading them."""
    subject_names: list[str] = []
    while True:
        request = {"subjects_filter": subjects, "offset": len(subject_names)}
        answer = await _request(broker, f"STREAM.INFO.{name}", request)
        page: dict[str, int] = answer["state"].get("subjects") or {}
        subject_names += page
        if not page or len(subject_names) >= int(answer.get("total", 0)):
            return subject_names


async def num_messages(broker: Broker, name: str, subject: str) -> int:
    """Return the number of stored messages on one subject."""
    answer = await _request(broker, f"STREAM.INFO.{name}", {"subjects_filter": subject})
    held: dict[str, int] = answer["state"].get("subjects") or {}
    return held.get(subject, 0)


def numbers_of(subjects: list[str]) -> set[int]:
    """Return the task numbers in subjects; those without one are skipped."""
    numbers: set[int] = set()
    for subject in subjects:
        with contextlib.suppress(errors.MessageError):  # an entry of another program
            numbers.add(number_of(subject))
    return numbers


async def _request(broker: Broker, verb: str, request: StreamConfig | None) -> dict[str, Any]:
    return await broker.retry(
        lambda: broker.api(verb, request), deadline_s=_DEADLINE_S, waiting_for=f"$JS.API.{verb}"
    )


def _refused(name: str, config: StreamConfig, error: Refused) -> errors.BrokerError:
    hint = "look at it with `nats stream info`"
    if error.err_code in _NO_SPACE:
        hint = (
            f"its bound of {config['max_bytes']:,} bytes does not fit: raise max_file_store of "
            "nats-server, lower `limits` in the job's configuration, or delete old jobs"
        )
    return errors.BrokerError(
        f"the server refuses the stream {name}: {error.description}", hint=hint
    )
