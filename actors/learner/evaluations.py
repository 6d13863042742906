"""Evaluations of a job's versions: issues tasks, and summarises and reports their results.

Generators or an evaluator play the tasks. Requests are stored in a bucket, tasks and results in a
stream, so a restarted learner continues from there.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal

from ...broker.client.connection import Broker
from ...broker.feed import ValidationScore, best_of, publish_metric
from ...broker.jetstream.kv import Bucket, DamagedEntry, Entry, KeyChanges
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
"""Longest time between two reads of the bucket, as messages may be lost with a connection."""
_MAX_OPEN = 4
_MAX_BLAME_CHARS = 8192
_MAX_VALUES_BYTES = EVALUATION_BYTES - (4 << 10)
"""Size of the metrics of a version; the rest of its record is small."""
MOST_EVALUATIONS = _MAX_OPEN + 1
"""Number of versions that may wait for evaluation at once; the last version is always evaluated."""
MOST_KEPT = 512
"""Number of a job's records kept in the bucket, which all users share, besides the best version's
record; the metrics of older versions are in the job's feed."""


class Evaluations:
    """A job's evaluations on the learner's side: requested, played, then reported."""

    def __init__(
        self,
        broker: Broker,
        scope: JobScope,
        config: JobConfig,
        describe: Callable[[], Awaitable[DescribeReply]],
        report_values: Callable[[int, dict[str, float]], Awaitable[None]],
        publish_event: Callable[..., Awaitable[None]],
        note_progress: Callable[[], None] = lambda: None,
        *,
        most_kept: int = MOST_KEPT,
    ) -> None:
        """Without validation tasks, there are no evaluations.

        `describe` requests the tasks from the job's environment hosts; `report_values` receives the
        step and the values of every result; `publish_event` reports a failed evaluation;
        `note_progress` is called at each result of a task.
        """
        self._describe, self._report_values = describe, report_values
        self._publish_event, self._note_progress = publish_event, note_progress
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
        """Tasks of the versions in evaluation."""
        self._num_missing: dict[int, int] = {}
        self._newest = -1
        self._waiting: set[int] = set()
        self._scores: dict[int, ValidationScore] = {}
        self._ended: set[int] = set()
        """Versions with a record, for which nothing waits."""
        self._most_kept = most_kept
        self._revision = 0
        """Revision of the newest write that was read."""
        self._collecting = asyncio.Lock()
        self._changed, self._reported = asyncio.Event(), asyncio.Event()

    async def load(self) -> None:
        """Read the requests from before a restart, and report the results since then."""
        await self.collect()

    @property
    def open_versions(self) -> set[int]:
        """Versions whose weights are still needed."""
        return set(self._waiting)

    def best(self, steps: Sequence[int]) -> int | None:
        """Return the step with the best known validation; see `keep_best`."""
        return best_of(dict(self._scores), steps) if self._training.keep_best else None

    def spared(self, steps: Sequence[int]) -> set[int]:
        """Return those of these steps whose checkpoints are kept: best ones and candidates."""
        if not self._training.keep_best:
            return set()
        best = self.best(steps)
        return self.open_versions.intersection(steps) | ({best} if best is not None else set())

    def note_version(self, version: int) -> None:
        """Record that a version is published; requests for newer versions wait."""
        self._newest = max(self._newest, version)
        self._changed.set()

    def is_due(self, step: int, last: int) -> bool:
        """Return whether to evaluate the version after `step`; `last` is the job's last step."""
        training = self._training
        if step == 0:
            return training.validate_before_training
        return step == last or bool(training.test_freq and step % training.test_freq == 0)

    async def request_due(self, step: int, last: int) -> bool:
        """Request the evaluation of the version after `step`, if it is due; see `request`."""
        return self.is_due(step, last) and await self.request(step, always=step == last)

    async def request(self, version: int, *, always: bool = False) -> bool:
        """Request an evaluation; return False if it exists already or too many are waiting."""
        if not self._config.validates:
            return False
        if len(self._waiting) >= _MAX_OPEN and not always:
            return False
        record = EvalRecord(version=version, step=version)
        async with self._collecting:
            try:
                self._note_revision(await self._bucket.create(self._key(version), record))
            except ConflictError:
                return False
            self._waiting.add(version)
        self._changed.set()
        return True

    async def follow(self) -> None:
        """Issue the tasks of requested evaluations and report their results, forever."""
        forget = self._broker.on_reconnect(self._look_again)
        async with KeyChanges(self._broker, BUCKET_EVALS, self._scope.key) as changes:
            listening = await self._broker.listen(self._scope.validated, self._note_result)
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

    def _look_again(self) -> None:
        """Read all records and queue missing tasks again: the broker's store may have lost some."""
        self._revision = 0
        self._issued.clear()
        self._changed.set()

    def _note_revision(self, revision: int) -> None:
        """Read all records again if a write is not the newest: the bucket was set back or made
        again."""
        if revision <= self._revision:
            self._revision = 0

    async def _wake(self, changes: KeyChanges) -> None:
        """Read the bucket at each request and periodically."""
        while True:
            await changes.wait(_LOOK_S)
            self._changed.set()

    def _note_result(self, _: Any) -> None:
        self._note_progress()
        self._changed.set()

    async def play(self) -> None:
        """Issue the tasks of requested versions, and finish fully played versions."""
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
            refused = next((item.blame for item in results if item.blame is not None), None)
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
        """Queue the tasks of a version that have no result; return all its tasks."""
        if self._described is None:
            self._described = await self._describe()
        tasks = evaluation_tasks(self._config, self._described, version)
        await publish_validation_tasks(self._queue, await self._log.unplayed(version, tasks))
        return tasks

    def _summary(
        self, tasks: Sequence[Task], results: Sequence[ValidationResult]
    ) -> dict[str, float]:
        """Return the metrics of a version from results in the order of their tasks."""
        assert self._described is not None  # set when the tasks were issued
        by_task = {result.task: result for result in results}
        # In a game with roles, each conversation counts separately.
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
        """Record the outcome of a version; `collect` reports it."""
        if state == "failed":
            await self._publish_event("evaluation_failed", blame, version=version)
        key, entry = self._key(version), None
        try:
            entry = await self._bucket.get(key)
            revision = 0 if entry is None else entry.revision  # 0: a damaged store has lost it
        except DamagedEntry as error:
            revision = error.revision
        record = EvalRecord(version=version, step=version) if entry is None else entry.value
        if record.state in ("requested", "running"):
            changes = {"state": state, "values": values or {}, "blame": blame[:_MAX_BLAME_CHARS]}
            ended = record.model_copy(update=changes)
            with contextlib.suppress(ConflictError):
                if revision:
                    revision = await self._bucket.update(key, ended, revision)
                else:
                    revision = await self._bucket.create(key, ended)
                self._note_revision(revision)
        self._changed.set()

    async def collect(self) -> None:
        """Report the results so far; clients may also have requested versions."""
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
        """Remove the oldest versions' records beyond the bound, except the best version's."""
        ended = self._ended - {best_of(self._scores, self._scores)} - self._waiting
        for version in sorted(ended)[: -self._most_kept]:
            await self._bucket.delete(self._key(version))
            self._ended.discard(version)
            self._scores.pop(version, None)

    async def wait_all(self) -> None:
        """Wait until every requested evaluation is reported, while `follow` runs."""
        await self.collect()
        while self._waiting:
            self._reported.clear()
            await self._reported.wait()

    @property
    def named_wait(self) -> str:
        """Name of the wait for open evaluations: the player, and the number of tasks."""
        left = ", ".join(
            f"version {version} ({self._num_missing[version]} tasks)"
            if version in self._num_missing
            else f"version {version}"
            for version in sorted(self._waiting)
        )
        who = "the evaluator" if self._config.has_evaluator else "generators"
        return f"{who} to validate {left}"

    async def _report(self, entry: Entry[EvalRecord]) -> None:
        """Publish a result, then mark it; after a crash in between, it is published again."""
        record = entry.value
        if record.values:
            metric = Metric(step=record.step, values=record.values, time=time.time())
            await publish_metric(self._broker, self._scope, metric)
            await self._report_values(record.step, record.values)
        reported = record.model_copy(
            update={"state": "reported" if record.state == "done" else "given_up"}
        )
        with contextlib.suppress(ConflictError):  # requested again meanwhile
            await self._bucket.update(self._key(record.version), reported, entry.revision)

    def _key(self, version: int) -> str:
        return f"{self._scope.key}.{version}"
