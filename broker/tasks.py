"""The queues of a job's training tasks and validation tasks.

Each is a work-queue stream with one message per subject: a queued or held number is not queued
twice. Generators hold tasks on a lease; a lease that is not renewed within `ack_wait_s` passes to
another generator. Calls do not raise while the server restarts, but take longer. A task is done
only after its group is in the rollout log, so a late `done` of an expired lease is harmless.
"""

import asyncio
import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog

from ..schemas.metric import ValidationResult
from ..schemas.task import Task
from ..schemas.wire.errors import MessageError
from ..schemas.wire.subjects import TASK_CONSUMER, VALIDATION_CONSUMER, JobScope
from ..schemas.wire.trace import TRACEPARENT
from .client.availability import RETRY_PAUSE_S
from .client.connection import Broker, Msg
from .client.faults import ConnectionLost, NoResponders
from .client.nats_internals import header
from .jetstream import streams
from .jetstream.appending import append_once
from .jetstream.direct_get import get_all, get_last
from .jetstream.streams import stream_subjects

PUBLISH_DEADLINE_S = 60.0
_PULL_EXPIRES_S = 5.0
_PULL_GRACE_S = 1.0
_NEXT_S = 0.05  # the rest of a batch arrives at once, if at all: the number of leases is bounded
_ACK_TIMEOUT_S = 2.0
_API_DEADLINE_S = 60.0
_MALFORMED_DELAY_S = 3600

_log = structlog.get_logger()


@dataclass
class Lease:
    """A task, held until `done` or `give_back`, or until it is not renewed in time."""

    task: Task
    num_delivered: int
    """Number of deliveries of the task, including this one."""
    _message: Msg = field(repr=False)
    _broker: Broker = field(repr=False)

    @property
    def traceparent(self) -> str:
        """W3C trace context of the task; empty for none."""
        return header(self._message, TRACEPARENT)

    def replace(self, newer: "Lease") -> None:
        """Continue with a later delivery of the same task to the same holder.

        This happens when the lease expired, for example while the broker was away.
        """
        self.num_delivered, self._message = newer.num_delivered, newer._message

    async def keep(self) -> None:
        """Renew the lease; call it every third of `ack_wait_s`."""
        await self._answer_server(b"+WPI")

    async def done(self) -> None:
        """Remove the task from the queue; call it after its group is confirmed in the log.

        Does not raise when the message is lost: the lease expires, and the next holder finds the
        group in the log.
        """
        try:
            await self._broker.request(self._message.reply, b"+ACK", timeout_s=_ACK_TIMEOUT_S)
        except (ConnectionLost, NoResponders, TimeoutError) as error:
            _log.info("ack_lost", task=self.task.task, reason=str(error))

    async def give_back(self, delay_s: float = 0.0) -> None:
        """Return the task to the queue, after `delay_s`."""
        await self._answer_server(b'-NAK {"delay": %d}' % int(delay_s * streams.NS))

    async def _answer_server(self, answer: bytes) -> None:
        await self._broker.publish(self._message.reply, answer)


class TaskQueue:
    """Publishes and pulls the training tasks or the validation tasks of one job."""

    def __init__(
        self,
        broker: Broker,
        scope: JobScope,
        ack_wait_s: float = 30.0,
        *,
        max_leases: int = streams.MAX_LEASES,
        pull_expires_s: float = _PULL_EXPIRES_S,
        validation: bool = False,
    ) -> None:
        """`max_leases` bounds the tasks that all generators together hold.

        An unanswered pull is repeated every `pull_expires_s`. With `validation`, the queue has the
        validation tasks, which name a version.
        """
        self._broker = broker
        self._scope = scope
        self._validation = validation
        self._stream = scope.stream_validation if validation else scope.stream_task
        self._consumer = VALIDATION_CONSUMER if validation else TASK_CONSUMER
        self._ack_wait_s = ack_wait_s
        self._max_leases = max_leases
        self._pull_expires_s = pull_expires_s
        self._inbox = streams.PullInbox(broker)
        self._has_consumer = False

    async def publish(
        self, task: Task, *, traceparent: str = "", deadline_s: float = PUBLISH_DEADLINE_S
    ) -> bool:
        """Queue a task; return False if its number is queued or held already.

        Waits while the queue is full, without a bound on a patient connection. Raises
        DeadlineError, BrokerError when it stays full, NotFoundError when the job is gone.
        """
        return await append_once(
            self._broker,
            self._subject(task),
            task.to_bytes(),
            traceparent=traceparent,
            deadline_s=deadline_s,
            what=f"task {task.task} of job {self._scope.job}",
            place="the task queue",
            full_hint="raise limits.task_bytes or start more generators",
        )

    async def pull(self, num: int, timeout_s: float) -> list[Lease]:
        """Return up to `num` tasks as soon as there is one; none after `timeout_s`.

        Raises NotFoundError when the job is gone, DeadlineError when the server stays away for a
        minute.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while True:
            try:
                messages = await self._pull(num, deadline - loop.time())
            except (ConnectionLost, TimeoutError) as error:
                _log.info("pull_repeated", stream=self._stream, reason=repr(error))
            except (streams.ConsumerGone, NoResponders):
                self._has_consumer = False
            else:
                leases = [lease for m in messages if (lease := await self._lease(m))]
                if leases or loop.time() >= deadline:
                    return leases
                continue
            if loop.time() >= deadline:
                return []
            await asyncio.sleep(RETRY_PAUSE_S)

    def _subject(self, task: Task) -> str:
        if task.version is None:
            return self._scope.task(task.task)
        return self._scope.validation_task(task.version, task.task)

    async def find(self, number: int) -> Task | None:
        """Return the queued or held training task with a number; raises MessageError."""
        message = await self._broker.retry(
            lambda: get_last(self._broker, self._stream, self._scope.task(number)),
            deadline_s=_API_DEADLINE_S,
            waiting_for=f"task {number} of job {self._scope.job}",
        )
        return None if message is None else Task.from_bytes(message.payload, at=message.subject)

    async def remove(self, number: int) -> None:
        """Remove a task from the queue; its holder is not notified.

        Raises NotFoundError when the job is gone, DeadlineError.
        """
        await streams.purge(self._broker, self._stream, self._scope.task(number))

    async def pending_numbers(self) -> set[int]:
        """Return the numbers of all queued or held training tasks."""
        return streams.numbers_of(
            await streams.stream_subjects(self._broker, self._stream, self._scope.task("*"))
        )

    async def close(self) -> None:
        """Return received but not pulled tasks to the queue."""
        for message in self._inbox.take_arrived():
            await self._broker.publish(message.reply, b"-NAK")
        await self._inbox.close()

    async def _pull(self, num: int, timeout_s: float) -> list[Msg]:
        """Pull available tasks at once; if there are none, wait for the first and pull again."""
        await self._broker.wait_connected(
            self._broker.clock() + _API_DEADLINE_S,
            waiting_for=f"tasks of job {self._scope.job}",
        )
        if not self._has_consumer:
            await self._make_consumer()
        messages = await self._request({"batch": num, "no_wait": True}, num, 0.0)
        if messages or timeout_s <= 0:
            return messages
        wait_s = min(timeout_s, self._pull_expires_s)
        messages = await self._request({"batch": 1, "expires": int(wait_s * streams.NS)}, 1, wait_s)
        if messages and num > 1:
            with contextlib.suppress(ConnectionLost, TimeoutError):
                rest = num - 1
                messages += await self._request({"batch": rest, "no_wait": True}, rest, 0.0)
        return messages

    async def _request(self, request: dict[str, Any], num: int, wait_s: float) -> list[Msg]:
        """Send one pull request and return its messages; the next pull returns late ones."""
        await self._inbox.pull(self._stream, self._consumer, request)
        messages: list[Msg] = []
        try:
            while len(messages) < num:
                patience_s = _NEXT_S if messages else wait_s + _PULL_GRACE_S
                message = await self._inbox.next_pulled(patience_s)
                if message is None:
                    break
                messages.append(message)
        except (ConnectionLost, streams.ConsumerGone, TimeoutError):
            if not messages:  # received messages are leased all the same
                raise
        return messages

    async def _lease(self, message: Msg) -> Lease | None:
        """Make a lease of a message; a malformed one is logged and delayed for long."""
        num_delivered = int(message.reply.split(".")[-5])
        try:
            task = Task.from_bytes(message.data, at=message.subject)
            if (task.version is not None) != self._validation:
                raise MessageError(f"task {task.task} names version {task.version}")
        except MessageError as error:
            _log.error("task_malformed", subject=message.subject, error=str(error))
            delay = b'-NAK {"delay": %d}' % (_MALFORMED_DELAY_S * streams.NS)
            await self._broker.publish(message.reply, delay)
            return None
        return Lease(task, num_delivered, message, self._broker)

    async def _make_consumer(self) -> None:
        """Make the consumer, or, without the right to, check that the stream exists."""
        if self._broker.is_limited:
            await streams.stream_info(self._broker, self._stream)
        else:
            await streams.ensure_task_consumer(
                self._broker,
                self._scope,
                self._ack_wait_s,
                self._max_leases,
                validation=self._validation,
            )
        self._has_consumer = True


# -- results of validation tasks -------------------------------------------------------------------
#
# One result per version and task, until the version's evaluation is known. The learner publishes
# the tasks. The generator that plays a task appends its result before the task is done; only the
# first result counts. So a task is queued or held, or has a result, and a restarted learner finds
# the missing ones.

_AT_ONCE = 64
"""Number of tasks that are published concurrently."""


class ValidationLog:
    """Appends and reads the results of the validation tasks of one job."""

    def __init__(self, broker: Broker, scope: JobScope) -> None:
        """Name the log; `streams` has made it."""
        self._broker = broker
        self._scope = scope
        self._stream = scope.stream_validation

    async def append(self, result: ValidationResult) -> bool:
        """Append a result; return False if its version and task have one already.

        Raises MessageError for one that is larger than the server accepts, BrokerError,
        DeadlineError, NotFoundError when the job is gone.
        """
        payload = result.to_bytes()
        what = f"the result of validation task {result.task} of version {result.version}"
        self._broker.check_size(len(payload), what=what)
        return await append_once(
            self._broker,
            self._scope.validation_result(result.version, result.task),
            payload,
            traceparent="",
            deadline_s=_API_DEADLINE_S,
            what=what,
            place="the validation stream",
            full_hint="raise limits.task_bytes",
        )

    async def contains(self, version: int, task: int) -> bool:
        """Return whether this version and task have a result."""
        subject = self._scope.validation_result(version, task)
        message = await self._broker.retry(
            lambda: get_last(self._broker, self._stream, subject),
            deadline_s=_API_DEADLINE_S,
            waiting_for=f"the result of validation task {task}",
        )
        return message is not None

    async def unplayed(self, version: int, tasks: Iterable[Task]) -> list[Task]:
        """Return the tasks that have no result."""
        subjects = self._scope.validation_result(version, "*")
        played = set(await stream_subjects(self._broker, self._stream, subjects))
        subject = self._scope.validation_result
        return [task for task in tasks if subject(version, task.task) not in played]

    async def read(self, version: int) -> list[ValidationResult]:
        """Return the results of a version; raises MessageError for an unreadable one."""
        subjects = self._scope.validation_result(version, "*")
        messages = await self._broker.retry(
            lambda: get_all(self._broker, self._stream, subjects),
            deadline_s=_API_DEADLINE_S,
            waiting_for=f"the results of version {version}",
        )
        return [
            ValidationResult.from_bytes(message.payload, at=message.subject) for message in messages
        ]

    async def remove(self, version: int) -> None:
        """Remove tasks and results of a version whose evaluation is known."""
        for subject in (self._scope.validation_task, self._scope.validation_result):
            await streams.purge(self._broker, self._stream, subject(version, "*"))


async def publish_validation_tasks(queue: TaskQueue, tasks: Sequence[Task]) -> None:
    """Queue validation tasks; queued or held ones are left unchanged.

    Raises what `TaskQueue.publish` raises.
    """
    for start in range(0, len(tasks), _AT_ONCE):
        await asyncio.gather(*(queue.publish(task) for task in tasks[start : start + _AT_ONCE]))
