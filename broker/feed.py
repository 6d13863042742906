"""Metrics, events and log lines, from the actors of a job to its followers.

They are stored in two bounded streams that drop their oldest entries, so a client that connects
late or reconnects can read earlier entries.
"""

import asyncio
import math
import time
import uuid
from collections.abc import AsyncGenerator, Collection, Hashable, Iterable, Mapping
from contextlib import aclosing
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import structlog

from ..schemas.job import FINAL_STATES, JobRecord
from ..schemas.metric import EvalRecord, Event, LogLines, Metric
from ..schemas.task import DeadLetter
from ..schemas.wire.errors import MessageError, NotFoundError
from ..schemas.wire.message import Message
from ..schemas.wire.subjects import BUCKET_EVALS, JobScope
from ..schemas.wire.trace import StepTrace
from .client.connection import Broker
from .client.fair_queue import end_tasks
from .client.nats_internals import MESSAGE_ID
from .jetstream.direct_get import StoredMessage, StreamReader, get_all, get_batch, get_last
from .jetstream.kv import Bucket
from .jetstream.streams import stream_info

FeedKind: TypeAlias = Literal["metric", "event", "log"]
FeedMessage: TypeAlias = Metric | Event | LogLines
ALL_KINDS: tuple[FeedKind, ...] = ("metric", "event", "log")
PUBLISH_DEADLINE_S = 30.0
_API_DEADLINE_S = 30.0
_QUEUE_LENGTH = 256

VALIDATION = "val/mean_score"
"""Metric: mean return of a validation's finished episodes."""
M = TypeVar("M", bound=Message)
K = TypeVar("K", bound=Hashable)

_log = structlog.get_logger()


async def publish_metric(broker: Broker, scope: JobScope, metric: Metric) -> None:
    """Store the metrics of one step."""
    await _publish(broker, scope.metric, metric)


async def publish_event(
    broker: Broker, scope: JobScope, event: Event, *, message_id: str = ""
) -> None:
    """Store an event of the job; a repeated `message_id` is stored once.

    The server remembers ids for some minutes, and they stay in the messages' headers.
    """
    await _publish(broker, scope.event, event, message_id)


async def publish_trace(broker: Broker, scope: JobScope, trace: StepTrace) -> None:
    """Send the trace of a step, without waiting: training does not depend on it."""
    await broker.publish(scope.trace, trace.to_bytes())


async def publish_log(broker: Broker, scope: JobScope, lines: LogLines) -> None:
    """Store an actor's log lines."""
    await _publish(broker, scope.log(lines.actor), lines)


async def publish_dead(broker: Broker, scope: JobScope, letter: DeadLetter) -> None:
    """Store a failed task with its last error."""
    await _publish(broker, scope.dead, letter)


async def _publish(broker: Broker, subject: str, message: Message, message_id: str = "") -> None:
    """Store a message; a repeated id is stored once."""
    await broker.append(
        subject,
        message.to_bytes(),
        headers={MESSAGE_ID: message_id or uuid.uuid4().hex},
        deadline_s=PUBLISH_DEADLINE_S,
        waiting_for=f"a message on {subject} to be stored",
    )


async def read_metrics(broker: Broker, scope: JobScope) -> list[Metric]:
    """Return all stored metrics, in order; malformed ones are skipped and logged."""
    return await _read_all(broker, scope.stream_feed, scope.metric, Metric)


async def read_events(broker: Broker, scope: JobScope) -> list[Event]:
    """Return all stored events, in order; malformed ones are skipped and logged."""
    return await _read_all(broker, scope.stream_feed, scope.event, Event)


async def read_traces(broker: Broker, scope: JobScope, newest: int) -> list[StepTrace]:
    """Return at most `newest` last traces, in order; malformed ones are skipped and logged."""
    state = (await stream_info(broker, scope.stream_trace))["state"]
    first = max(int(state["last_seq"]) - newest + 1, 1)
    return await _read_all(broker, scope.stream_trace, scope.trace, StepTrace, first)


async def read_dead(broker: Broker, scope: JobScope) -> list[DeadLetter]:
    """Return the failed tasks, in order; malformed ones are skipped and logged."""
    return await _read_all(broker, scope.stream_dead, scope.dead, DeadLetter)


async def read_failed(broker: Broker, scope: JobScope) -> list[DeadLetter]:
    """Return the tasks that failed for good and about which nothing was decided, by number."""
    failed: dict[int, DeadLetter] = {}
    for letter in await read_dead(broker, scope):
        if letter.decision is not None:
            failed.pop(letter.task.task, None)
        elif letter.is_final:
            failed[letter.task.task] = letter
    return [letter for _, letter in sorted(failed.items())]


async def _read_all(
    broker: Broker, stream: str, subject: str, model: type[M], from_seq: int = 1
) -> list[M]:
    messages = await broker.retry(
        lambda: get_all(broker, stream, subject, from_seq),
        deadline_s=_API_DEADLINE_S,
        waiting_for=f"stream {stream}",
    )
    return parse_all(messages, model)


async def stored_metrics(
    broker: Broker, scope: JobScope, from_seq: int = 1
) -> AsyncGenerator[tuple[int, Metric], None]:
    """Yield sequence and content of each metric stored by now, in bounded batches.

    For feeds too long for `read_metrics`. Malformed ones are skipped and logged.
    """
    newest = await get_last(broker, scope.stream_feed, scope.metric)
    last = newest.seq if newest is not None else 0
    stored = _stored(broker, scope.stream_feed, scope.metric, from_seq, last)
    async with aclosing(stored) as messages:
        async for message in messages:
            metric = parse_message(message, Metric)
            if metric is not None:
                yield message.seq, metric


async def stored_lines(broker: Broker, scope: JobScope) -> AsyncGenerator[LogLines, None]:
    """Yield the log lines stored by now; malformed ones are skipped and logged.

    Raises NotFoundError for a run without a log.
    """
    state = (await stream_info(broker, scope.stream_log))["state"]
    if not state["messages"]:
        return
    stored = _stored(broker, scope.stream_log, scope.log("*"), 1, int(state["last_seq"]))
    async with aclosing(stored) as messages:
        async for message in messages:
            lines = parse_message(message, LogLines)
            if lines is not None:
                yield lines


async def _stored(
    broker: Broker, stream: str, subject: str, from_seq: int, last_seq: int
) -> AsyncGenerator[StoredMessage, None]:
    """Yield the messages of a stream from one sequence to another."""
    if last_seq < from_seq:
        return
    reader = StreamReader(broker, stream, [subject], from_seq=from_seq)
    async with aclosing(reader.messages()) as messages:
        async for message in messages:
            if message.seq <= last_seq:
                yield message
            if message.seq >= last_seq:
                return


async def follow(
    broker: Broker,
    scope: JobScope,
    kinds: Collection[FeedKind] = ALL_KINDS,
    *,
    stop: asyncio.Event | None = None,
) -> AsyncGenerator[FeedMessage, None]:
    """Yield metrics, events and log lines, stored and new ones, and end once `stop` is set.

    Entries stored before `stop` are still yielded. Each kind is complete and in order, also across
    server restarts; an event reports entries (of a log, or metrics and events) that were discarded
    before they were read. Leave it through `contextlib.aclosing`.

    Raises NotFoundError when the job is gone.
    """
    queue: asyncio.Queue[FeedMessage] = asyncio.Queue(_QUEUE_LENGTH)
    readers = _readers(broker, scope, kinds)
    tasks: set[asyncio.Task[object]] = {
        asyncio.create_task(_pump(reader, scope, queue, is_whole), name=f"follow {scope.key}")
        for reader, is_whole in readers
    }
    if stop is not None:
        end = _until_read([reader for reader, _ in readers], stop)
        tasks.add(asyncio.create_task(end, name=f"end of following {scope.key}"))
    try:
        while (message := await _next(queue, tasks)) is not None:
            yield message
    finally:
        await end_tasks(tasks)


async def _until_read(readers: list[StreamReader], stop: asyncio.Event) -> None:
    """Wait for `stop`, and until all entries stored by then have been yielded."""
    await stop.wait()
    for reader in readers:
        await reader.catch_up()


async def _next(
    queue: "asyncio.Queue[FeedMessage]", tasks: "set[asyncio.Task[object]]"
) -> FeedMessage | None:
    """Return the next message, or None at the end; raise a reader's exception."""
    if not queue.empty():
        return queue.get_nowait()
    getting = asyncio.create_task(queue.get())
    try:
        await asyncio.wait({getting, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        if getting.done():
            return getting.result()
        for task in tasks:
            if task.done():
                task.result()
        return None if queue.empty() else queue.get_nowait()
    finally:
        getting.cancel()


async def _pump(
    reader: StreamReader, scope: JobScope, queue: "asyncio.Queue[FeedMessage]", is_whole: bool
) -> None:
    """Queue a reader's messages; if it reads a whole stream, an event reports missing ones."""
    expected = 1
    async with aclosing(reader.messages()) as messages:
        async for stored in messages:
            if is_whole and stored.seq > expected:
                await queue.put(_discarded(stored.seq - expected))
            expected = stored.seq + 1
            message = parse_feed_message(stored, scope)
            if message is not None:
                await queue.put(message)


def _discarded(num: int) -> Event:
    message = f"{num:,} entries had been discarded before they were read; see limits.log_bytes"
    return Event(kind="entries_discarded", source="client", message=message, time=time.time())


def _readers(
    broker: Broker, scope: JobScope, kinds: Collection[FeedKind]
) -> list[tuple[StreamReader, bool]]:
    """Return readers, and whether each reads its whole stream."""
    by_kind = {"metric": scope.metric, "event": scope.event}
    subjects = [subject for kind, subject in by_kind.items() if kind in kinds]
    readers: list[tuple[StreamReader, bool]] = []
    if subjects:
        feed = StreamReader(broker, scope.stream_feed, subjects)
        readers.append((feed, len(subjects) == len(by_kind)))
    if "log" in kinds:
        log = StreamReader(broker, scope.stream_log, [scope.log("*")])
        readers.append((log, True))
    return readers


def parse_feed_message(stored: StoredMessage, scope: JobScope) -> FeedMessage | None:
    """Parse a message of a job's feed or log; None for a malformed one."""
    models: dict[str, type[Metric | Event]] = {scope.metric: Metric, scope.event: Event}
    return parse_message(stored, models.get(stored.subject, LogLines))


def parse_all(messages: Iterable[StoredMessage], model: type[M]) -> list[M]:
    """Parse messages; malformed ones are skipped and logged."""
    parsed = (parse_message(message, model) for message in messages)
    return [message for message in parsed if message is not None]


def parse_message(stored: StoredMessage, model: type[M]) -> M | None:
    """Parse a message; None for a malformed one, which is logged."""
    try:
        return model.from_bytes(stored.payload, at=stored.subject)
    except MessageError as error:
        _log.error("feed_malformed", subject=stored.subject, seq=stored.seq, error=error.message)
        return None


# Scores of evaluations, by version.


class ValidationScore(NamedTuple):
    """The score of a version's validation."""

    mean: float
    """Mean return of the finished episodes."""
    worst: float
    """Lowest return of the finished episodes."""
    num_episodes: float
    num_missing: float
    """Episodes that failed, or had not finished at the deadline."""

    @classmethod
    def of(cls, values: Mapping[str, float]) -> "ValidationScore | None":
        """Return the score in a version's metrics; None if no episode finished."""
        if VALIDATION not in values:
            return None
        mean = values[VALIDATION]
        return cls(
            mean,
            values.get("val/min_score", mean),
            values.get("val/num_episodes", 1.0),
            values.get("val/failed_episodes", 0.0),
        )

    @property
    def text(self) -> str:
        """The mean, and how many episodes are missing from it."""
        total = self.num_episodes + self.num_missing
        missing = f" ({self.num_missing:.0f} of {total:.0f} failed)" if self.num_missing else ""
        return f"{self.mean:.3f}{missing}"


async def read_scores(broker: Broker, scope: JobScope) -> dict[int, ValidationScore]:
    """Return the validation score of each evaluated version of a run.

    Raises BrokerError, NotFoundError if there is no bucket of evaluations.
    """
    entries = await Bucket(broker, BUCKET_EVALS, EvalRecord).items(scope.key)
    scores = {entry.value.version: ValidationScore.of(entry.value.values) for entry in entries}
    return {version: score for version, score in scores.items() if score is not None}


def best_of(scores: Mapping[int, ValidationScore], versions: Iterable[int]) -> int | None:
    """Return the version with the highest score, the earliest of equals; None if there is none.

    A score that is not a number is ignored.
    """
    known = whole_means(scores)
    scored = [version for version in versions if version in known]
    return max(scored, key=lambda version: (known[version], -version), default=None)


def whole_means(scores: Mapping[K, ValidationScore]) -> dict[K, float]:
    """Return the mean over all episodes of each score, except those that are not numbers.

    Missing episodes count as the worst return in any score: a deadline cuts off long episodes, so
    the mean of the others is biased.
    """
    known = {key: score for key, score in scores.items() if not math.isnan(score.mean)}
    worst = min((score.worst for score in known.values()), default=0.0)
    return {
        key: (mean * done + worst * missing) / (done + missing) if missing else mean
        for key, (mean, _, done, missing) in known.items()
    }


# The newest metrics, without reading all of them.

RECENT_ENTRIES = 40


async def recent_values(broker: Broker, scope: JobScope) -> dict[str, float]:
    """Return the newest value of each metric among the last entries of a run's feed.

    `step` is that of the newest entry, even if a metric has this name. Raises NotFoundError when
    the run's streams are gone.
    """
    state = (await stream_info(broker, scope.stream_feed))["state"]
    first = max(int(state["first_seq"]), int(state["last_seq"]) - RECENT_ENTRIES, 1)
    messages, _ = await get_batch(broker, scope.stream_feed, first, scope.metric)
    values: dict[str, float] = {}
    metrics = parse_all(messages, Metric)
    for metric in metrics:
        values.update(metric.values)
    if metrics:
        values["step"] = float(max(metric.step for metric in metrics))
    return values


_LISTED = (
    "step",
    "training_step_reward",
    VALIDATION,
    "val/failed_episodes",
    "training/total_steps",
)


def listed(values: Mapping[str, float]) -> dict[str, float]:
    """Return the values that lists of runs show."""
    known = {name: values[name] for name in _LISTED if name in values}
    return {name: value for name, value in known.items() if math.isfinite(value)}


async def list_values(broker: Broker, record: JobRecord) -> dict[str, float]:
    """Return the newest values of a run for lists; those of an ended run are in its record.

    So a list costs the broker nothing for the runs of the past. Empty if its streams are gone.
    """
    ended = record.state in FINAL_STATES and not record.untold
    if record.archived is not None or (ended and (record.figures or not record.has_streams)):
        return dict(record.figures)
    try:
        return await recent_values(broker, record.scope)
    except NotFoundError:
        return {}


def run_row(record: JobRecord, values: Mapping[str, float]) -> dict[str, Any]:
    """Return a run's columns for lists, from its record and its newest values."""
    live = record.state not in FINAL_STATES
    return {
        "job": record.job,
        "kind": record.kind,
        "trains": record.trains,
        "state": record.state,
        "reason": record.reason,
        "step": int(values.get("step", record.version)),
        "reward": values.get("training_step_reward"),
        "validation": values.get(VALIDATION),
        "validation_failed": values.get("val/failed_episodes", 0.0),
        "slots": sum(actor.slots for actor in record.actors if actor.node is not None)
        if live
        else 0,
        "age_s": (record.finished or time.time()) - record.created,
        "restarts": sum(actor.restarts for actor in record.actors),
        "attempt": record.attempt,
        "tags": record.tags,
        "group": record.group,
    }
