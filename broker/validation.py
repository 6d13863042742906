"""What validation tasks became: one result per version and task, until the version's is known.

The learner publishes the tasks (`tasks.TaskQueue`). Whoever plays one appends its result before the
task is done, and of two the first counts. So a task is queued or held, or its result is there, and
a learner that starts again sees what is missing.
"""

import asyncio
from collections.abc import Iterable, Sequence

from ..schemas.metric import ValidationResult
from ..schemas.task import Task
from ..schemas.wire.subjects import JobScope
from .client.connection import Broker
from .jetstream.appending import append_once
from .jetstream.direct_get import get_all, get_last
from .jetstream.streams import stream_subjects
from .tasks import TaskQueue

_DEADLINE_S = 60.0
_AT_ONCE = 64
"""Tasks that are published at the same time."""


class ValidationLog:
    """Appends and reads the results of the validation tasks of one job."""

    def __init__(self, broker: Broker, scope: JobScope) -> None:
        """Name the log; `streams` has made it."""
        self._broker = broker
        self._scope = scope
        self._stream = scope.stream_validation

    async def append(self, result: ValidationResult) -> bool:
        """Append a result; return False if there is one of its version and task already.

        Raises MessageError for one that is larger than the server takes, BrokerError,
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
            deadline_s=_DEADLINE_S,
            what=what,
            place="the validation stream",
            full_hint="raise limits.task_bytes",
        )

    async def contains(self, version: int, task: int) -> bool:
        """Whether there is a result of this version and task."""
        subject = self._scope.validation_result(version, task)
        message = await self._broker.retry(
            lambda: get_last(self._broker, self._stream, subject),
            deadline_s=_DEADLINE_S,
            waiting_for=f"the result of validation task {task}",
        )
        return message is not None

    async def unplayed(self, version: int, tasks: Iterable[Task]) -> list[Task]:
        """Return those of the tasks that have no result."""
        subjects = self._scope.validation_result(version, "*")
        played = set(await stream_subjects(self._broker, self._stream, subjects))
        subject = self._scope.validation_result
        return [task for task in tasks if subject(version, task.task) not in played]

    async def read(self, version: int) -> list[ValidationResult]:
        """Return the results of a version; raises MessageError for one that cannot be read."""
        subjects = self._scope.validation_result(version, "*")
        messages = await self._broker.retry(
            lambda: get_all(self._broker, self._stream, subjects),
            deadline_s=_DEADLINE_S,
            waiting_for=f"the results of version {version}",
        )
        return [
            ValidationResult.from_bytes(message.payload, at=message.subject) for message in messages
        ]

    async def remove(self, version: int) -> None:
        """Remove tasks and results of a version whose evaluation is known."""
        for subject in (self._scope.validation_task, self._scope.validation_result):
            request = {"filter": subject(version, "*")}
            await self._broker.retry(
                lambda request=request: self._broker.api(f"STREAM.PURGE.{self._stream}", request),
                deadline_s=_DEADLINE_S,
                waiting_for=f"the validation tasks of version {version} to be removed",
            )


async def publish_tasks(queue: TaskQueue, tasks: Sequence[Task]) -> None:
    """Queue validation tasks, those that are queued or held left as they are.

    Raises what `TaskQueue.publish` raises.
    """
    for start in range(0, len(tasks), _AT_ONCE):
        await asyncio.gather(*(queue.publish(task) for task in tasks[start : start + _AT_ONCE]))
