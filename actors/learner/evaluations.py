"""Asking the evaluator for evaluations, and taking in their results."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence

from ...broker.client.connection import Broker
from ...broker.feed import SCORE, best_of, publish_metric
from ...broker.jetstream.kv import Bucket, Entry, KeyChanges
from ...schemas.config.job import JobConfig
from ...schemas.metric import EvalRecord, Metric
from ...schemas.wire.errors import ConflictError
from ...schemas.wire.subjects import BUCKET_EVALS, JobScope

_LOOK_S = 2.0
"""The longest time without a look: what is written is heard, but for what the connection lost."""
_MAX_OPEN = 4
MOST_EVALUATIONS = _MAX_OPEN + 1
"""Versions that may wait for an evaluation at a time: the last one does in any case."""


class Evaluations:
    """The evaluations of a job, as the learner sees them: requested, then reported."""

    def __init__(
        self,
        broker: Broker,
        scope: JobScope,
        tell: Callable[[int, dict[str, float]], Awaitable[None]],
        config: JobConfig,
    ) -> None:
        """`tell` is given the step and values of every result; without validation tasks the job
        has no evaluator, and nothing is ever asked for.
        """
        self._tell = tell
        self._has_evaluator = config.has_evaluator
        self._training = config.training
        self._broker = broker
        self._scope = scope
        self._bucket = Bucket(broker, BUCKET_EVALS, EvalRecord)
        self._waiting: set[int] = set()
        self._scores: dict[int, float] = {}
        self._revision = 0
        """Of the newest write that was read."""
        self._collecting = asyncio.Lock()

    async def load(self) -> None:
        """Take notice of what was asked for before a restart, and report what came meanwhile."""
        await self.collect()

    @property
    def open_versions(self) -> set[int]:
        """Versions whose weights an evaluator still needs."""
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
        if not self._has_evaluator:
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
        return True

    async def follow(self) -> None:
        """Report results as they come, for ever."""
        async with self._changes() as changes:
            while True:
                await self.collect()
                await changes.wait(_LOOK_S)

    async def collect(self) -> None:
        """Report the results that have come; clients may have asked for versions, too."""
        async with self._collecting:
            for entry in await self._bucket.changes(self._scope.key, self._revision):
                self._revision = entry.revision
                version, state = entry.value.version, entry.value.state
                if SCORE in entry.value.values:
                    self._scores[version] = entry.value.values[SCORE]
                if state in ("requested", "running"):
                    self._waiting.add(version)
                    continue
                if state in ("done", "failed"):
                    await self._report(entry)
                self._waiting.discard(version)

    async def wait_all(self) -> None:
        """Wait until every evaluation that was asked for is reported."""
        async with self._changes() as changes:
            await self.collect()
            while self._waiting:
                await changes.wait(_LOOK_S)
                await self.collect()

    def _changes(self) -> KeyChanges:
        return KeyChanges(self._broker, BUCKET_EVALS, self._scope.key)

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
