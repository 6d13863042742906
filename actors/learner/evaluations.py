"""Evaluations of a job's versions: tasks are issued, their results summarised and reported.

Who plays the tasks, generators or an evaluator, makes no difference here. What is asked for stands
in a bucket, tasks and results in a stream, so a learner that starts again goes on where it was.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal

from ...broker.client.connection import Broker
from ...broker.feed import ValidationScore, best_of, publish_metric
from ...broker.jetstream.kv import Bucket, Entry, KeyChanges
from ...broker.jetstream.streams import EVALUATION_BYTES
from ...broker.tasks import TaskQueue, ValidationLog, publish_validation_tasks
from ...envs.evaluation import evaluation_tasks, fitting, validation_metrics
from ...schemas.config.job import JobConfig
from ...schemas.env import DescribeReply
from ...schemas.metric import EvalRecord, Metric, ValidationResult
from ...schemas.task import Task
from ...schemas.wire.errors import ConflictError, TinkermqError
from ...schemas.wire.subjects import BUCKET_EVALS, JobScope

_LOOK_S = 2.0
"""The longest time without a look: what is written is heard, but for what the connection lost."""
_MAX_OPEN = 4
_MAX_BLAME_CHARS = 8192
_MAX_VALUES_BYTES = EVALUATION_BYTES - (4 << 10)
"""Of the metrics of a version: its record has little else, as one that failed has no metrics."""
MOST_EVALUATIONS = _MAX_OPEN + 1
"""Versions that may wait for an evaluation at a time: the last one does in any case."""
MOST_KEPT = 512
"""Records of a job that stay in the bucket, which all users share, beside that of the best version;
the metrics of older ones are in the job's feed."""


class Evaluations:
    """The evaluations of a job, as the learner sees them: requested, played, then reported."""

    def __init__(
        self,
        broker: Broker,
        scope: JobScope,
        config: JobConfig,
        describe: Callable[[], Awaitable[DescribeReply]],
        tell: Callable[[int, dict[str, float]], Awaitable[None]],
        event: Callable[..., Awaitable[None]],
        heard: Callable[[], None] = lambda: None,
        *,
        most_kept: int = MOST_KEPT,
    ) -> None:
        """`describe` asks the job's environment hosts for their tasks, `tell` is given the step and
        values of every result, `event` reports one that failed, `heard` is called at each result
        of a task. Without validation tasks nothing is ever asked for.
        """
        self._describe, self._tell, self._event, self._heard = describe, tell, event, heard
        self._config = config
        self._training = config.training
        self._broker = broker
        self._scope = scope
        self._bucket = Bucket(broker, BUCKET_EVALS, EvalRecord)
        self._queue = TaskQueue(
            broker, scope, ack_wait_s=config.generator.ack_wait_s, validation=True
        )
        self._log = ValidationLog(broker, scope)
        self._described: DescribeReply | None = None
        self._issued: dict[int, list[Task]] = {}
        """Tasks of the versions that are being played."""
        self._num_missing: dict[int, int] = {}
        self._newest = -1
        self._waiting: set[int] = set()
        self._scores: dict[int, ValidationScore] = {}
        self._ended: set[int] = set()
        """Versions whose record is there, and that nobody waits for."""
        self._most_kept = most_kept
        self._revision = 0
        """Of the newest write that was read."""
        self._collecting = asyncio.Lock()
        self._changed, self._reported = asyncio.Event(), asyncio.Event()

    async def load(self) -> None:
        """Take notice of what was asked for before a restart, and report what came meanwhile."""
        await self.collect()

    @property
    def open_versions(self) -> set[int]:
        """Versions whose weights are still needed."""
        return set(self._waiting)

    def best(self, steps: Sequence[int]) -> int | None:
        """Return which of these steps has the best validation that is known; see `keep_best`."""
        return best_of(dict(self._scores), steps) if self._training.keep_best else None

    def spared(self, steps: Sequence[int]) -> set[int]:
        """Return those of these steps whose checkpoints stay: the best, and who may become it."""
        if not self._training.keep_best:
            return set()
        best = self.best(steps)
        return self.open_versions.intersection(steps) | ({best} if best is not None else set())

    def note_version(self, version: int) -> None:
        """Take notice that a version is published: what is asked of newer ones waits."""
        self._newest = max(self._newest, version)
        self._changed.set()

    def is_due(self, step: int, last: int) -> bool:
        """Whether the version after `step` is to be evaluated; `last` is the job's last step."""
        training = self._training
        if step == 0:
            return training.validate_before_training
        return step == last or bool(training.test_freq and step % training.test_freq == 0)

    async def request_due(self, step: int, last: int) -> bool:
        """Ask for the evaluation of the version after `step`, if it is due; see `request`."""
        return self.is_due(step, last) and await self.request(step, always=step == last)

    async def request(self, version: int, *, always: bool = False) -> bool:
        """Ask for an evaluation; False when it is there already or too many are waiting."""
        if not self._config.validates:
            return False
        if len(self._waiting) >= _MAX_OPEN and not always:
            return False
        record = EvalRecord(version=version, step=version)
        async with self._collecting:
            try:
                await self._bucket.create(self._key(version), record)
            except ConflictError:
                return False
            self._waiting.add(version)
        self._changed.set()
        return True

    async def follow(self) -> None:
        """Issue the tasks of what is asked for, and report results as they come, for ever."""
        forget = self._broker.on_reconnect(self._changed.set)
        async with KeyChanges(self._broker, BUCKET_EVALS, self._scope.key) as changes:
            listening = await self._broker.listen(self._scope.validated, self._hear)
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._wake(changes), name="requested evaluations")
                    while True:
                        self._changed.clear()
                        await self.collect()
                        await self.play()
                        await self._changed.wait()
            finally:
                forget()
                await listening.stop()

    async def _wake(self, changes: KeyChanges) -> None:
        """Look again at each request, and now and then."""
        while True:
            await changes.wait(_LOOK_S)
            self._changed.set()

    def _hear(self, _: Any) -> None:
        self._heard()
        self._changed.set()

    async def play(self) -> None:
        """Issue the tasks of requested versions, and finish those that are all played."""
        for version in sorted(self._waiting):
            if version <= self._newest:
                await self._play(version)

    async def _play(self, version: int) -> None:
        if not self._config.validates:
            blame = "the run has no validation tasks: env.num_val is 0"
            await self._finish(version, "failed", blame=blame)
            return
        try:
            if version not in self._issued:
                self._issued[version] = await self._issue(version)
            tasks = self._issued[version]
            if missing := await self._log.unplayed(version, tasks):
                self._num_missing[version] = len(missing)
                return
            results = await self._log.read(version)
            refused = next((one.blame for one in results if one.blame is not None), None)
            values = self._summary(tasks, results)
        except TinkermqError as error:
            await self._finish(version, "failed", blame=str(error))
            return
        if refused is not None:
            hint = f"; {refused.hint}" if refused.hint else ""
            await self._finish(version, "failed", blame=f"{refused.message}{hint}")
        else:
            await self._finish(version, "done", values=values)

    async def _issue(self, version: int) -> list[Task]:
        """Queue the tasks of a version that have no result; return all of them."""
        if self._described is None:
            self._described = await self._describe()
        tasks = evaluation_tasks(self._config, self._described, version)
        await publish_validation_tasks(self._queue, await self._log.unplayed(version, tasks))
        return tasks

    def _summary(
        self, tasks: Sequence[Task], results: Sequence[ValidationResult]
    ) -> dict[str, float]:
        """Return the metrics of a version, of results in the order of their tasks."""
        assert self._described is not None  # the tasks were issued
        by_task = {result.task: result for result in results}
        # In a game with roles each conversation counts by itself.
        samples = 1 if self._described.roles else self._config.evaluation.samples
        values = validation_metrics([by_task[task.task].episodes for task in tasks], samples)
        started = min((result.started for result in results), default=0.0)
        finished = max((result.finished for result in results), default=0.0)
        values["timing_s/testing"] = max(finished - started, 0.0)
        return fitting(values, _MAX_VALUES_BYTES)

    async def _finish(
        self,
        version: int,
        state: Literal["done", "failed"],
        *,
        values: dict[str, float] | None = None,
        blame: str = "",
    ) -> None:
        """Write down what became of a version; `collect` reports it."""
        if state == "failed":
            await self._event("evaluation_failed", blame, version=version)
        entry = await self._bucket.find(self._key(version))
        if entry is not None and entry.value.state in ("requested", "running"):
            changes = {"state": state, "values": values or {}, "blame": blame[:_MAX_BLAME_CHARS]}
            with contextlib.suppress(ConflictError):
                record = entry.value.model_copy(update=changes)
                await self._bucket.update(self._key(version), record, entry.revision)
        self._changed.set()

    async def collect(self) -> None:
        """Report the results that have come; clients may have asked for versions, too."""
        async with self._collecting:
            for entry in await self._bucket.changes(self._scope.key, self._revision):
                self._revision = entry.revision
                version, state = entry.value.version, entry.value.state
                if (score := ValidationScore.of(entry.value.values)) is not None:
                    self._scores[version] = score
                if state in ("requested", "running"):
                    self._waiting.add(version)
                    continue
                if state in ("done", "failed"):
                    await self._report(entry)
                    if self._config.validates:
                        await self._log.remove(version)
                self._issued.pop(version, None)
                self._num_missing.pop(version, None)
                self._waiting.discard(version)
                self._ended.add(version)
            await self._forget_oldest()
            self._reported.set()

    async def _forget_oldest(self) -> None:
        """Remove the records of the oldest versions, but that of the best, beyond the bound."""
        ended = self._ended - {best_of(self._scores, self._scores)} - self._waiting
        for version in sorted(ended)[: -self._most_kept]:
            await self._bucket.delete(self._key(version))
            self._ended.discard(version)
            self._scores.pop(version, None)

    async def wait_all(self) -> None:
        """Wait until every evaluation that was asked for is reported; `follow` goes on beside."""
        await self.collect()
        while self._waiting:
            self._reported.clear()
            await self._reported.wait()

    @property
    def named_wait(self) -> str:
        """Who is waited for: what is missing of the open evaluations."""
        left = ", ".join(
            f"version {version} ({self._num_missing[version]} tasks)"
            if version in self._num_missing
            else f"version {version}"
            for version in sorted(self._waiting)
        )
        who = "the evaluator" if self._config.has_evaluator else "generators"
        return f"{who} to validate {left}"

    async def _report(self, entry: Entry[EvalRecord]) -> None:
        """Publish a result, then mark it: after a crash in between it is published again."""
        record = entry.value
        if record.values:
            metric = Metric(step=record.step, values=record.values, time=time.time())
            await publish_metric(self._broker, self._scope, metric)
            await self._tell(record.step, record.values)
        reported = record.model_copy(
            update={"state": "reported" if record.state == "done" else "given_up"}
        )
        with contextlib.suppress(ConflictError):  # asked for again meanwhile
            await self._bucket.update(self._key(record.version), reported, entry.revision)

    def _key(self, version: int) -> str:
        return f"{self._scope.key}.{version}"
