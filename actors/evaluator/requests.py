"""The evaluations that are asked for, done one after the other."""

from collections.abc import Awaitable, Callable, Mapping

import structlog

from ...broker.jetstream.key_changes import KeyChanges
from ...broker.jetstream.kv import Bucket
from ...broker.weights.store import TensorBytes
from ...schemas.metric import EvalRecord
from ...schemas.wire.errors import ConflictError, NotFoundError, TinkermqError
from ...schemas.wire.subjects import BUCKET_EVALS
from ..job_weights import open_weights
from ..runtime import JobContext

Measure = Callable[[int, Mapping[str, TensorBytes]], Awaitable[dict[str, float]]]
"""Measures a version, of which it is given the weights."""

_LOOK_S = 2.0
"""The longest time without a look for what is asked, or for weights that are not there yet."""
_MAX_BLAME_CHARS = 8192
_log = structlog.get_logger()


class Requests:
    """What is asked of an evaluator, oldest version first."""

    def __init__(self, context: JobContext, measure: Measure, check: Callable[[], None]) -> None:
        """`check` raises what ends the evaluator, where a version could not be measured."""
        self._context = context
        self._measure = measure
        self._check = check
        self._store = open_weights(context)
        self._bucket = Bucket(context.broker, BUCKET_EVALS, EvalRecord)
        self._asked: dict[int, EvalRecord] = {}
        """What is asked for and has no result, by version."""
        self._revision = 0
        """Of the newest write to the job's evaluations that was read."""

    async def serve(self) -> None:
        """Take requested evaluations until `stopping` is set."""
        context = self._context
        context.set_state("waiting")
        async with KeyChanges(context.broker, BUCKET_EVALS, context.scope.key) as changes:
            while not context.stopping.is_set():
                record = await self._next()
                if record is None:
                    with context.waiting("the learner to ask for an evaluation"):
                        await context.unless_stopping(changes.wait(_LOOK_S), None)
                    continue
                context.set_state("working", version=record.version)
                await context.unless_stopping(self._evaluate(record), None)
                context.set_state("waiting")

    async def _next(self) -> EvalRecord | None:
        for entry in await self._bucket.changes(self._context.scope.key, self._revision):
            self._revision = entry.revision
            record = entry.value
            if record.state in ("requested", "running"):
                self._asked[record.version] = record
            else:
                self._asked.pop(record.version, None)
        return self._asked[min(self._asked)] if self._asked else None

    async def _evaluate(self, record: EvalRecord) -> None:
        try:
            values = await self._measure(record.version, await self._fetch(record.version))
            done = record.model_copy(update={"state": "done", "values": values})
        except TinkermqError as error:
            self._check()
            await self._context.event("evaluation_failed", str(error), version=record.version)
            blame = str(error)[:_MAX_BLAME_CHARS]
            done = record.model_copy(update={"state": "failed", "blame": blame})
        await self._finish(done)

    async def _finish(self, record: EvalRecord) -> None:
        """Write a result, unless another evaluator was first."""
        self._asked.pop(record.version, None)
        key = f"{self._context.scope.key}.{record.version}"
        entry = await self._bucket.find(key)
        if entry is None or entry.value.state not in ("requested", "running"):
            return
        self._context.progressed()
        try:
            await self._bucket.update(key, record, entry.revision)
        except ConflictError:
            _log.info("evaluation_was_there", version=record.version)

    async def _fetch(self, version: int) -> Mapping[str, TensorBytes]:
        manifest = await self._store.manifest(version)
        while manifest is None:
            latest = await self._store.latest()
            if latest is not None and latest.version > version:
                raise NotFoundError(
                    f"the weights of version {version} were removed, the newest is "
                    f"{latest.version}",
                    hint="ask for the newest version, or evaluate a checkpoint",
                )
            with self._context.waiting(f"the weights of version {version}"):
                await self._store.wait_newer(version - 1, timeout_s=_LOOK_S)
            manifest = await self._store.manifest(version)
        return await self._store.fetch(manifest)
