"""Asking the evaluator for evaluations, and taking in their results."""

import asyncio
import time
from collections.abc import Callable

from ...broker.connection import Broker
from ...broker.feed import publish_metric
from ...broker.kv import Bucket
from ...schemas.errors import ConflictError
from ...schemas.metric import EvalRecord, Metric
from ...schemas.subjects import BUCKET_EVALS, JobScope

_POLL_S = 0.5
_MAX_OPEN = 4


class Evaluations:
    """The evaluations of a job, as the learner sees them: requested, then reported."""

    def __init__(
        self,
        broker: Broker,
        scope: JobScope,
        tell: Callable[[int, dict[str, float]], None],
        *,
        num_val: int,
    ) -> None:
        """`tell` is given the step and values of every result; without validation tasks the job
        has no evaluator, and nothing is ever asked for.
        """
        self._tell = tell
        self._has_evaluator = num_val > 0
        self._broker = broker
        self._scope = scope
        self._bucket = Bucket(broker, BUCKET_EVALS, EvalRecord)
        self._open: dict[int, int] = {}
        self._reported: set[int] = set()
        self.results: dict[int, dict[str, float]] = {}
        """Results by version."""

    async def load(self) -> None:
        """Take notice of what was asked for before a restart."""
        for entry in await self._bucket.items(f"{self._scope.key}."):
            record = entry.value
            if record.state in ("requested", "running"):
                self._open[record.version] = record.step
            else:
                self._reported.add(record.version)
                self.results[record.version] = record.values

    @property
    def open_versions(self) -> set[int]:
        """Versions whose weights an evaluator still needs."""
        return set(self._open)

    async def request(self, version: int, *, always: bool = False) -> bool:
        """Ask for an evaluation; False when it is there already or too many are waiting."""
        if not self._has_evaluator:
            return False
        if version in self._open or version in self._reported:
            return False
        if len(self._open) >= _MAX_OPEN and not always:
            return False
        record = EvalRecord(version=version, step=version)
        try:
            await self._bucket.create(f"{self._scope.key}.{version}", record)
        except ConflictError:
            return False
        self._open[version] = version
        return True

    async def follow(self) -> None:
        """Report results as they come, for ever."""
        while True:
            await self.collect()
            await asyncio.sleep(_POLL_S)

    async def collect(self) -> None:
        """Report the results that have come."""
        for version in sorted(self._open):
            entry = await self._bucket.get(f"{self._scope.key}.{version}")
            if entry is None or entry.value.state not in ("done", "failed"):
                continue
            step = self._open.pop(version, None)
            if step is None:
                continue  # `follow` and `wait_all` both collect: the other one was first
            self._reported.add(version)
            self.results[version] = entry.value.values
            if entry.value.values:
                metric = Metric(step=step, values=entry.value.values, time=time.time())
                await publish_metric(self._broker, self._scope, metric)
                await asyncio.to_thread(self._tell, step, entry.value.values)

    async def wait_all(self) -> None:
        """Wait until every evaluation that was asked for is reported."""
        while self._open:
            await self.collect()
            await asyncio.sleep(_POLL_S / 5)
