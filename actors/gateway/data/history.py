"""The curves of each job, read from its feed once and kept, bounded in number and size.

A long feed is read twice: a sample of it at once, so that the page opens; then all of it, in the
background, so that no extreme is missing. The evaluations of a sampled run come from their own
bucket, because they are too few to be in a sample.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import structlog

from ....broker.client.connection import Broker
from ....broker.jetstream.kv import Bucket
from ....broker.jetstream.reader import StreamReader
from ....broker.jetstream.stored import StoredMessage, get_batch, get_last, stored_message
from ....broker.jetstream.streams import stream_info
from ....schemas.metric import EvalRecord, Metric
from ....schemas.wire.errors import MessageError, NotFoundError, TinkermqError
from ....schemas.wire.subjects import BUCKET_EVALS, JobScope
from ...curves import Curves
from .charts import chart_points, enter, job_curves

MAX_JOBS, MAX_BYTES = 64, 256 << 20
EXACT_ENTRIES = 3000
"""Feeds of up to so many entries are read whole before the page gets its curves."""
SAMPLES = 250
_SAMPLING_AT_ONCE = 64
_DEADLINE_S = 30.0
_ENTER_AT_ONCE = 500
_SETTLE_S = 1.0

_log = structlog.get_logger()


class History:
    """The curves of one job."""

    def __init__(self, scope: JobScope) -> None:
        self._scope = scope
        self._curves = job_curves()
        self._sampled: Curves | None = None
        self._next_seq = 1
        self._lock = asyncio.Lock()
        self._reading: asyncio.Task[None] | None = None

    @property
    def complete(self) -> bool:
        """Whether all of the feed was read, not a sample of it only."""
        return self._sampled is None

    @property
    def nbytes(self) -> int:
        """Memory that the curves hold."""
        return self._curves.nbytes + (self._sampled.nbytes if self._sampled else 0)

    async def curves(self, broker: Broker) -> Curves:
        """Return the curves as of now."""
        async with self._lock:
            if self._reading is None:
                await self._catch_up(broker)
        return self._sampled or self._curves

    async def close(self) -> None:
        """Stop reading."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait({self._reading})

    async def _catch_up(self, broker: Broker) -> None:
        try:
            state = (await stream_info(broker, self._scope.stream_feed))["state"]
        except NotFoundError:
            return  # the job's streams were removed
        first, last = int(state["first_seq"]), int(state["last_seq"])
        start = max(self._next_seq, first)
        if last - start < EXACT_ENTRIES:
            await self._read(broker, start, last)
            self._sampled = None
            return
        if self._next_seq == 1:
            self._sampled = await self._sample(broker, start, last)
        self._reading = asyncio.create_task(
            self._read_on(broker, start), name=f"curves of {self._scope.key}"
        )

    async def _read_on(self, broker: Broker, start: int) -> None:
        try:
            await asyncio.sleep(_SETTLE_S)  # the page comes first
            await self._read_long(broker, start)
            self._sampled = None
        except (TinkermqError, TimeoutError) as error:
            _log.warning("curves_not_read", job=self._scope.job, error=str(error))
        finally:
            self._reading = None

    async def _read(self, broker: Broker, start: int, last: int) -> None:
        """Enter the metrics from `start` to `last`: a few requests."""
        while start <= last:
            messages, more = await broker.retry(
                lambda start=start: get_batch(
                    broker, self._scope.stream_feed, start, self._scope.metric
                ),
                deadline_s=_DEADLINE_S,
                waiting_for=f"the metrics of job {self._scope.job}",
            )
            self._enter(messages)
            if not messages or not more:
                self._next_seq = max(self._next_seq, last + 1)
                return
            start = messages[-1].seq + 1

    async def _read_long(self, broker: Broker, start: int) -> None:
        """Enter all metrics from `start` on through a consumer, leaving others their turn."""
        newest = await get_last(broker, self._scope.stream_feed, self._scope.metric)
        if newest is None:
            return
        reader = StreamReader(broker, self._scope.stream_feed, [self._scope.metric], from_seq=start)
        messages: list[StoredMessage] = []
        async with aclosing(reader.messages()) as stored:
            async for message in stored:
                messages.append(message)
                if len(messages) < _ENTER_AT_ONCE and message.seq < newest.seq:
                    continue
                self._enter(messages)
                messages = []
                if message.seq >= newest.seq:
                    return
                await asyncio.sleep(0)

    def _enter(self, messages: list[StoredMessage]) -> None:
        if messages:
            enter(self._curves, _metrics(messages))
            self._next_seq = messages[-1].seq + 1

    async def _sample(self, broker: Broker, first: int, last: int) -> Curves:
        """Return the curves of metrics at equal distances, and of all evaluations."""
        free = asyncio.Semaphore(_SAMPLING_AT_ONCE)
        stride = max(1, (last - first) // SAMPLES)

        async def one(seq: int) -> StoredMessage | None:
            stream = self._scope.stream_feed
            request = f'{{"seq":{seq},"next_by_subj":"{self._scope.metric}"}}'.encode()
            async with free:
                reply = await broker.request(broker.direct_get(stream), request)
            return stored_message(reply, stream)

        found = await asyncio.gather(*(one(seq) for seq in range(first, last + 1, stride)))
        curves = job_curves()
        enter(curves, _metrics([message for message in found if message is not None]))
        enter(curves, await self._evaluations(broker))
        return curves

    async def _evaluations(self, broker: Broker) -> list[Metric]:
        try:
            entries = await Bucket(broker, BUCKET_EVALS, EvalRecord).items(self._scope.key)
        except TinkermqError:
            return []  # the bucket is not there, or not for this user: the whole feed has them
        told = [entry.value for entry in entries if entry.value.values]
        return [Metric(step=one.step, values=one.values, time=0.0) for one in told]


class Histories:
    """The histories that were looked at last."""

    def __init__(self, max_jobs: int = MAX_JOBS, max_bytes: int = MAX_BYTES) -> None:
        self._max_jobs = max_jobs
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, History] = OrderedDict()

    async def points(
        self,
        broker: Broker,
        scope: JobScope,
        names: Sequence[str] = (),
        *,
        first: int = 0,
        last: int | None = None,
    ) -> dict[str, Any]:
        """Return the curves of a job that the owner of `broker` may read.

        See `chart_points`; `complete` is false while they are of a sample.
        """
        history = self._kept.setdefault(scope.key, History(scope))
        self._kept.move_to_end(scope.key)
        curves = await history.curves(broker)
        while self._too_much():
            _, oldest = self._kept.popitem(last=False)
            await oldest.close()
        shown = chart_points(curves, names, first=first, last=last)
        return {"complete": history.complete, **shown}

    def _too_much(self) -> bool:
        held = sum(history.nbytes for history in self._kept.values())
        return len(self._kept) > max(1, self._max_jobs if held <= self._max_bytes else 1)

    async def close(self) -> None:
        """Stop all reading."""
        for history in self._kept.values():
            await history.close()
        self._kept.clear()


def _metrics(messages: list[StoredMessage]) -> list[Metric]:
    metrics: list[Metric] = []
    for message in messages:
        try:
            metrics.append(Metric.from_bytes(message.payload))
        except MessageError as error:
            _log.error("metric_malformed", seq=message.seq, error=error.message)
    return metrics
