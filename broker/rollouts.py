"""The rollout log and the batch log of a job.

The rollout log holds finished groups, each task's exactly once. If two generators finish the same
task, the first append wins. An append is confirmed or raises; it may be repeated, because the
stream holds one message per subject and refuses a second. A full log is back-pressure: the append
waits for the learner to trim. A reader yields a malformed entry as such and never ends because of
it.
"""

import asyncio
import hashlib
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

import structlog

from ..schemas.metric import Event
from ..schemas.rollout import Group, largest_parts, with_cut_infos
from ..schemas.task import BatchRecord
from ..schemas.wire.codec import INFO_CUT, most_bytes
from ..schemas.wire.errors import FencedError, MessageError, RewoundError
from ..schemas.wire.subjects import JobScope, number_of
from ..schemas.wire.trace import TRACEPARENT
from .client.connection import Broker
from .feed import publish_event
from .jetstream.appending import Overtaken, append_behind, append_once
from .jetstream.direct_get import (
    StoredMessage,
    StreamReader,
    get_all,
    get_last,
    get_newest,
    get_seq,
)
from .jetstream.streams import numbers_of, stream_info, stream_subjects

T = TypeVar("T")
_log: structlog.stdlib.BoundLogger = structlog.get_logger()

APPEND_DEADLINE_S = 300.0
_API_DEADLINE_S = 60.0
_REPORT_EVERY_S = 30.0
_RECORDS_BACK = 64
"""Batch records that are read first, from the newest backwards."""
CUT_MARKS_BYTES = 1 << 17
"""Bytes that a message reserves for the marks of cuts, and for the error of a failed task."""
_FULL_HINT = (
    "raise limits.rollout_bytes, or see why the learner does not trim the log "
    "(it does so behind each checkpoint: training.save_freq, keep_rollouts)"
)


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One entry of the log; exactly one of `group` and `error` is None."""

    seq: int
    """Sequence in the log."""
    number: int | None
    """Task number; None when the subject does not end in one."""
    payload: bytes
    """The bytes as appended, for digests."""
    group: Group | None
    """The validated group; its arrays are views of `payload`."""
    error: MessageError | None
    """Why the entry cannot be read."""
    traceparent: str = ""
    """W3C trace context of the message."""


class RolloutLog:
    """Appends to and reads the rollout log of one job."""

    def __init__(self, broker: Broker, scope: JobScope) -> None:
        """Name the log; `streams` has made it."""
        self._broker = broker
        self._scope = scope
        self._stream = self.stream = scope.stream_rollout
        self._next_report = 0.0

    @property
    def max_bytes(self) -> int:
        """Largest group that the log accepts, in bytes."""
        return most_bytes(self._broker.max_payload_bytes, Group.max_bytes)

    async def append_fitting(self, group: Group, source: str, *, traceparent: str = "") -> bool:
        """Append a group; if it is too large for a message, cut the `info` of its episodes first.

        A cut `info` is marked (`schemas.rollout.cut_info`), and an event of actor `source` names
        the task. Returns False if the log has a group for the task already. Raises what `append`
        raises: MessageError for a group that is too large without its `info`.
        """
        payload = group.to_bytes()
        if (num_bytes := len(payload)) > self.max_bytes:
            group = with_cut_infos(group, num_bytes, self.max_bytes - CUT_MARKS_BYTES)
            payload = group.to_bytes()
            self.check_fits(group, payload)
            await self._report_cut(group.task.task, num_bytes, source)
        return await self.append_payload(group.task.task, payload, traceparent=traceparent)

    async def _report_cut(self, number: int, num_bytes: int, source: str) -> None:
        """Publish an event about a group whose `info` was cut, at most one in `_REPORT_EVERY_S`."""
        _log.warning("group_cut", task=number, num_bytes=num_bytes)
        if time.monotonic() < self._next_report:
            return
        self._next_report = time.monotonic() + _REPORT_EVERY_S
        text = (
            f"the group of task {number} had {num_bytes:,} bytes: `info` of its episodes was cut "
            f"(key {INFO_CUT}); put less into it"
        )
        data = {"task": number}
        event = Event(kind="group_cut", source=source, message=text, data=data, time=time.time())
        await publish_event(self._broker, self._scope, event)

    def check_fits(self, group: Group, payload: bytes) -> None:
        """Raise MessageError for a group that is too large, naming its large parts."""
        if len(payload) <= self.max_bytes:
            return
        raise MessageError(
            f"the group of task {group.task.task} has {len(payload):,} bytes, the server takes at "
            f"most {self.max_bytes:,} in one message; the largest are "
            f"{', '.join(largest_parts(group))}",
            hint="make those smaller: shorter or fewer episodes (rollout.group_size), less in "
            "`info`, smaller images",
        )

    async def append(
        self, group: Group, *, traceparent: str = "", deadline_s: float = APPEND_DEADLINE_S
    ) -> bool:
        """Append a group; return False if the log has one for this task already.

        Waits while the log is full or the server is away, without a bound on a patient connection.
        Raises MessageError for a group that is larger than the server accepts, BrokerError when the
        log stays full, DeadlineError, NotFoundError when the job is gone.
        """
        payload = group.to_bytes()
        self.check_fits(group, payload)
        return await self.append_payload(
            group.task.task, payload, traceparent=traceparent, deadline_s=deadline_s
        )

    async def append_payload(
        self,
        number: int,
        payload: bytes,
        *,
        traceparent: str = "",
        deadline_s: float = APPEND_DEADLINE_S,
    ) -> bool:
        """Append the bytes of a group; see `append`."""
        self._broker.check_size(len(payload), what=f"the group of task {number}")
        return await append_once(
            self._broker,
            self._scope.rollout(number),
            payload,
            traceparent=traceparent,
            deadline_s=deadline_s,
            what=f"the group of task {number} of job {self._scope.job}",
            place="the rollout log",
            full_hint=_FULL_HINT,
        )

    async def contains(self, number: int) -> bool:
        """Return whether the log has a group of this task."""
        return await self.find(number) is not None

    async def find(self, number: int) -> LogEntry | None:
        """Return the entry of a task, or None."""
        subject = self._scope.rollout(number)
        return await self._one(lambda: get_last(self._broker, self._stream, subject))

    async def get(self, seq: int) -> LogEntry | None:
        """Return the entry at a sequence, or None if it is not there (any more)."""
        if seq < 1:
            return None  # sequences begin at 1, and the server refuses others
        return await self._one(lambda: get_seq(self._broker, self._stream, seq))

    async def numbers(self) -> set[int]:
        """Return the task numbers of all entries, without reading them."""
        return numbers_of(
            await stream_subjects(self._broker, self._stream, self._scope.rollout("*"))
        )

    async def read(self, from_seq: int = 1) -> AsyncGenerator[LogEntry, None]:
        """Yield the entries from `from_seq` on, and new ones as they are appended, for ever.

        Leave it through `contextlib.aclosing`. Raises NotFoundError when the job is gone.
        """
        scope = self._scope
        reader = StreamReader(
            self._broker,
            self._stream,
            [scope.rollout("*")],
            from_seq=from_seq,
            sign=scope.appended,
        )
        async with aclosing(reader.messages()) as messages:
            async for message in messages:
                yield read_entry(message)

    async def last_seq(self) -> int:
        """Return the sequence of the last entry ever appended; 0 for none."""
        return int((await self._state())["last_seq"])

    async def newest_there(self) -> int:
        """Return the sequence of the newest entry still stored; 0 for none."""
        subject = self._scope.rollout("*")
        newest = await self._retry(lambda: get_newest(self._broker, self._stream, subject))
        return 0 if newest is None else newest.seq

    async def first_seq(self) -> int:
        """Return the sequence of the oldest entry still stored; 1 for an empty new log."""
        return max(int((await self._state())["first_seq"]), 1)

    async def holds(self, seq: int, digest: str) -> bool:
        """Return whether the log was not set back: it holds an entry, or has removed it since.

        `digest` is the SHA-256 of the entry's payload, in hexadecimal.
        """
        state = await self._state()
        if int(state["last_seq"]) < seq:
            return False
        if seq < int(state["first_seq"]):
            return True
        entry = await self.get(seq)
        return entry is None or hashlib.sha256(entry.payload).hexdigest() == digest

    async def holds_batch(self, record: BatchRecord) -> bool:
        """Return whether the log holds the groups of a batch record, or has trimmed some."""
        if min(record.seqs) < await self.first_seq():
            return True
        entries = await asyncio.gather(*map(self.get, record.seqs))
        digests = [hashlib.sha256(entry.payload).digest() for entry in entries if entry is not None]
        return hashlib.sha256(b"".join(digests)).hexdigest() == record.digest

    async def lost_seqs(self) -> set[int]:
        """Return the sequences between the first and the last entry that have no entry.

        A learner trims only from the log's beginning: these were in a damaged block.
        """
        details = {"deleted_details": True}
        info = await self._retry(lambda: self._broker.api(f"STREAM.INFO.{self._stream}", details))
        return set(info["state"].get("deleted") or ())

    async def num_bytes(self) -> int:
        """Return the size of the log in bytes."""
        return int((await self._state())["bytes"])

    async def _state(self) -> dict[str, Any]:
        return (await stream_info(self._broker, self._stream))["state"]

    async def trim(self, before_seq: int, *, keep_bytes: int = 0) -> None:
        """Remove all entries before a sequence, except about `keep_bytes` of the newest.

        With `keep_bytes` at least one entry stays, whatever its size.
        """
        if keep_bytes:
            state = await self._state()
            mean = int(state["bytes"]) / max(int(state["messages"]), 1)
            num_kept = max(int(keep_bytes / max(mean, 1.0)), 1)
            before_seq = min(before_seq, int(state["last_seq"]) + 1 - num_kept)
        if before_seq <= 1:  # the server reads 0 as all entries
            return
        await self._retry(
            lambda: self._broker.api(f"STREAM.PURGE.{self._stream}", {"seq": before_seq})
        )

    async def _one(self, attempt: Callable[[], Awaitable[StoredMessage | None]]) -> LogEntry | None:
        message = await self._retry(attempt)
        return None if message is None else read_entry(message)

    async def _retry(self, attempt: Callable[[], Awaitable[T]]) -> T:
        return await self._broker.retry(
            attempt,
            deadline_s=_API_DEADLINE_S,
            waiting_for=f"the rollout log of job {self._scope.job}",
        )


def read_entry(message: StoredMessage) -> LogEntry:
    """Validate one stored message; any message gives an entry."""
    number: int | None = None
    trace = message.headers.get(TRACEPARENT, "")
    try:
        number = number_of(message.subject)
        group = Group.from_bytes(message.payload, at=message.subject)
    except MessageError as error:
        return LogEntry(message.seq, number, message.payload, None, error, trace)
    return LogEntry(message.seq, number, message.payload, group, None, trace)


# -- the batch log ---------------------------------------------------------------------------------
#
# It records which groups each optimiser step trains, before the step. An append names its writer's
# last sequence. If another writer has appended since, this learner no longer owns the job: it is
# fenced off and must end.
#
# If the broker's store was set back, steps that it lost are trained anew from other groups. A
# record replaces those of its step and of later ones that come before it in the log.


class BatchLog:
    """Appends to and reads the batch records of one job."""

    def __init__(self, broker: Broker, scope: JobScope) -> None:
        """Name the log; `streams` has made it."""
        self._broker = broker
        self._scope = scope
        self._stream = self.stream = scope.stream_batch

    async def append(self, record: BatchRecord, expected_last_seq: int) -> int:
        """Append a record behind `expected_last_seq` (0: as the first); return its sequence.

        Raises FencedError when another learner has written since, RewoundError when the log ends
        before `expected_last_seq`, BrokerError, DeadlineError, NotFoundError when the job is gone.
        """
        try:
            return await append_behind(
                self._broker,
                self._stream,
                self._scope.batch,
                record.to_bytes(),
                expected_last_seq,
                deadline_s=_API_DEADLINE_S,
                waiting_for=f"the batch record of step {record.step}",
            )
        except Overtaken as error:
            if (error.last or 0) < expected_last_seq:
                raise self._rewound(error.last or 0, expected_last_seq) from error
            raise FencedError(
                f"another learner of job {self._scope.job} has written to the batch log: step "
                f"{record.step} was to come after entry {expected_last_seq}, the last is "
                f"{error.last}",
                hint="only one learner may run for a job: end this one",
            ) from error

    async def check_owner(self, last_seq: int) -> None:
        """Raise FencedError if another learner has written since `last_seq` (0: ever).

        Raises RewoundError if the log ends before it, DeadlineError, NotFoundError when the job is
        gone.
        """
        if (stored_seq := await self.last_seq()) < last_seq:
            raise self._rewound(stored_seq, last_seq)
        if stored_seq != last_seq:
            raise FencedError(
                f"another learner of job {self._scope.job} has written to the batch log: its last "
                f"entry is {stored_seq}, this learner's last one is {last_seq}",
                hint="only one learner may run for a job: end this one",
            )

    def _rewound(self, last: int, known: int) -> RewoundError:
        return RewoundError(
            f"the batch log of job {self._scope.job} ends at entry {last}, entry {known} was "
            "confirmed: the broker's store was set back"
        )

    async def last_seq(self) -> int:
        """Return the sequence of the last record ever appended; 0 for none."""
        return int((await self._info())["state"]["last_seq"])

    async def made(self) -> float:
        """Return when the log was made, in seconds since the epoch, by the server's clock."""
        return datetime.fromisoformat((await self._info())["created"]).timestamp()

    async def _info(self) -> dict[str, Any]:
        return await self._broker.retry(
            lambda: stream_info(self._broker, self._stream),
            deadline_s=_API_DEADLINE_S,
            waiting_for=f"the batch log of job {self._scope.job}",
        )

    async def read_all(self) -> list[tuple[int, BatchRecord]]:
        """Return all records that hold, with their sequences, in the order of their steps.

        Raises MessageError for an unreadable one: without it a run cannot be replayed.
        """
        return await self._read_from(1)

    async def read_since(self, step: int) -> list[BatchRecord]:
        """Return the records that hold of `step` and later steps, in order.

        The log is read from its end backwards, so that a long run costs no more than a short one.
        Raises MessageError as `read_all`.
        """
        last, num_back = await self.last_seq(), _RECORDS_BACK
        while True:
            from_seq = max(last + 1 - num_back, 1)
            records = [record for _, record in await self._read_from(from_seq)]
            if from_seq == 1 or (records and records[0].step <= step):
                return [record for record in records if record.step >= step]
            num_back *= 4

    async def _read_from(self, from_seq: int) -> list[tuple[int, BatchRecord]]:
        """Return the records that hold from a sequence on; earlier ones do not matter to that."""
        messages = await self._broker.retry(
            partial(self._messages, from_seq),
            deadline_s=_API_DEADLINE_S,
            waiting_for=f"the batch records of job {self._scope.job}",
        )
        records: list[tuple[int, BatchRecord]] = []
        for message in messages:
            record = BatchRecord.from_bytes(message.payload)
            while records and records[-1][1].step >= record.step:
                records.pop()
            records.append((message.seq, record))
        return records

    async def backwards(self, after: int = 0) -> AsyncGenerator[BatchRecord, None]:
        """Yield the records that hold, newest first, down to a sequence; few are in memory.

        Raises MessageError as `read_all`.
        """
        end, before = await self.last_seq(), math.inf
        while end > after:
            start = max(end - _RECORDS_BACK, after)
            for record in reversed(await self.read_some(range(start + 1, end + 1))):
                if record.step < before:
                    before = record.step
                    yield record
            end = start

    async def read_some(self, seqs: Iterable[int]) -> list[BatchRecord]:
        """Return the records at some sequences; missing ones are skipped."""
        reading = (
            self._broker.retry(
                partial(get_seq, self._broker, self._stream, seq),
                deadline_s=_API_DEADLINE_S,
                waiting_for=f"the batch records of job {self._scope.job}",
            )
            for seq in seqs
        )
        records = await asyncio.gather(*reading)
        return [BatchRecord.from_bytes(record.payload) for record in records if record is not None]

    async def _messages(self, from_seq: int) -> list[StoredMessage]:
        """Read records; in a cluster, repeat until a replica has as many as the leader."""
        last = 0
        if self._broker.replication.reads_leader:
            last = int((await stream_info(self._broker, self._stream))["state"]["last_seq"])
        messages = await get_all(self._broker, self._stream, self._scope.batch, from_seq)
        if last >= from_seq and (messages[-1].seq if messages else 0) < last:
            raise TimeoutError  # of this attempt: another follows
        return messages
