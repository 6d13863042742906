"""The curves of each job, read from its feed once and cached, bounded in number and size.

A long feed is read twice: first a sample, so that the page opens quickly, then all of it in the
background, so that no extreme is missing. The evaluations of a sampled run are read from their own
bucket, since a sample would miss them.
"""

import asyncio
import json
import math
from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import numpy as np
import structlog

from ....broker.client.connection import Broker
from ....broker.feed import parse_all, stored_metrics
from ....broker.jetstream.direct_get import StoredMessage, get_all, stored_message
from ....broker.jetstream.kv import Bucket
from ....broker.jetstream.streams import stream_info
from ....schemas.metric import EvalRecord, Metric
from ....schemas.wire.errors import NotFoundError, TinkermqError
from ....schemas.wire.subjects import BUCKET_EVALS, JobScope
from ...curves import Curves

# -- curves of a job's page ------------------------------------------------------------------------


class Line(NamedTuple):
    """One line of a chart."""

    name: str
    """Name of the metric."""
    label: str
    """Its label in the chart."""


class Chart(NamedTuple):
    """One chart of the page."""

    key: str
    title: str
    lines: tuple[Line, ...]
    about: str = ""


CHARTS: tuple[Chart, ...] = (
    Chart(
        "reward",
        "Reward",
        (Line("training_step_reward", "training"), Line("val/mean_score", "validation")),
        "mean return",
    ),
    Chart(
        "length",
        "Response length",
        (Line("response_length/mean", "mean"), Line("response_length/max", "longest")),
        "tokens",
    ),
    Chart(
        "kl",
        "KL and mismatch",
        (
            Line("actor/ppo_kl", "policy KL"),
            Line("actor/reference_kl", "KL to reference"),
            Line("staleness/k3/lag_0", "engine mismatch"),
        ),
        "nats",
    ),
    Chart("entropy", "Entropy", (Line("actor/entropy", "entropy"),), "nats per token"),
    Chart(
        "lag",
        "Lag",
        (Line("staleness/lag_mean", "mean"), Line("staleness/lag_max", "greatest")),
        "versions",
    ),
    Chart(
        "speed",
        "Tokens per second",
        (Line("perf/throughput", "trained"), Line("rollout/tokens_per_s", "generated")),
    ),
    Chart("loss", "Policy loss", (Line("actor/pg_loss", "loss"),)),
    Chart("norm", "Gradient norm", (Line("actor/grad_norm", "norm"),), "before clipping"),
    Chart(
        "step",
        "Seconds per step",
        (Line("perf/time_per_step", "step"), Line("timing_s/wait", "waiting")),
    ),
    Chart(
        "wait", "Learner waits", (Line("perf/learner_wait_share", "share"),), "share of the time"
    ),
    Chart("turns", "Turns", (Line("num_turns/mean", "mean"),), "per episode"),
)
"""The charts of the page."""

TIME, TOKENS = "time", "tokens"
"""Axes besides steps: seconds and tokens since the start of the run."""
_WRITTEN_AT = "written at"
"""Name of the curve with the time of metrics; no metric's name has a space."""
_TRAINED = "perf/total_num_tokens"
MAX_NAMES = 512


def job_curves() -> Curves:
    """Return empty curves of a job; later values of a repeated step replace the earlier ones."""
    return Curves(later_counts=True, max_names=MAX_NAMES)


def add_point(curves: Curves, metrics: Sequence[Metric]) -> None:
    """Enter the metrics of a job."""
    curves.add(
        [item.step for item in metrics],
        [{_WRITTEN_AT: item.time or math.nan, **finite_values(item)} for item in metrics],
    )


def names_of(curves: Curves) -> list[str]:
    """Return the names of a job's metrics."""
    return [name for name in curves.names if name != _WRITTEN_AT]


def is_wanted(name: str, patterns: Sequence[str]) -> bool:
    """Return whether a metric matches a name or pattern; without any, all match."""
    return not patterns or any(fnmatchcase(name, item) for item in patterns)


def chart_points(
    curves: Curves, patterns: Sequence[str] = (), *, first: int = 0, last: int | None = None
) -> dict[str, Any]:
    """Return the points that the page draws; see `Curves.points`.

    `patterns` are names of metrics or patterns (`critic/*`); empty: all. `names` are all
    metrics; `time` and `tokens` are each point's seconds and trained tokens since the run's
    start, as far as known.
    """
    names = names_of(curves)
    shown = {name for name in names if is_wanted(name, patterns)}
    points = curves.points(shown, first=first, last=last)
    at = np.array(points["x"], dtype=np.int64) // curves.width
    times, tokens = curves.means(_WRITTEN_AT), np.nan_to_num(curves.means(_TRAINED)) * curves.width
    begun = times[np.isfinite(times)][:1].sum()
    axes = {TIME: times[at] - begun, TOKENS: np.cumsum(tokens)[at]}
    fields = {name: np.round(values, 1).tolist() for name, values in axes.items()}
    return {"names": sorted(names), **fields, **points}


def finite_values(metric: Metric) -> dict[str, float]:
    """Return the finite values of a metric."""
    return {name: value for name, value in metric.values.items() if math.isfinite(value)}


MAX_JOBS, MAX_BYTES = 64, 256 << 20
EXACT_ENTRIES = 3000
"""Maximum number of entries of a feed that is read completely before the page gets curves."""
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
        """Whether the whole feed was read, not only a sample."""
        return self._sampled is None

    @property
    def nbytes(self) -> int:
        """Memory of the curves."""
        return self._curves.nbytes + (self._sampled.nbytes if self._sampled else 0)

    async def curves(self, broker: Broker) -> Curves:
        """Return the current curves."""
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
        """Enter the metrics from `start` on, of a feed that ended at `last`."""
        messages = await broker.retry(
            lambda: get_all(broker, self._scope.stream_feed, self._scope.metric, start),
            deadline_s=_DEADLINE_S,
            waiting_for=f"the metrics of job {self._scope.job}",
        )
        add_point(self._curves, parse_all(messages, Metric))
        self._next_seq = max([last, *(message.seq for message in messages[-1:])]) + 1

    async def _read_long(self, broker: Broker, start: int) -> None:
        """Enter all metrics from `start` on through a consumer, yielding to other work."""
        metrics: list[Metric] = []
        async with aclosing(stored_metrics(broker, self._scope, start)) as stored:
            async for seq, metric in stored:
                metrics.append(metric)
                self._next_seq = seq + 1
                if len(metrics) >= _ENTER_AT_ONCE:
                    add_point(self._curves, metrics)
                    metrics = []
                    await asyncio.sleep(0)
        add_point(self._curves, metrics)

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

        results = await asyncio.gather(*(one(seq) for seq in range(first, last + 1, stride)))
        curves = job_curves()
        add_point(curves, parse_all(filter(None, results), Metric))
        add_point(curves, await self._evaluations(broker))
        return curves

    async def _evaluations(self, broker: Broker) -> list[Metric]:
        try:
            entries = await Bucket(broker, BUCKET_EVALS, EvalRecord).items(self._scope.key)
        except TinkermqError:
            return []  # no bucket, or no right to read it: the whole feed has them
        shown = [entry.value for entry in entries if entry.value.values]
        return [Metric(step=item.step, values=item.values, time=0.0) for item in shown]


class Histories:
    """The most recently used histories."""

    def __init__(self) -> None:
        self._histories: OrderedDict[str, History] = OrderedDict()

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

        See `chart_points`; `complete` is false while the curves are from a sample.
        """
        history = self._histories.setdefault(scope.key, History(scope))
        self._histories.move_to_end(scope.key)
        curves = await history.curves(broker)
        while self._has_too_many():
            _, oldest = self._histories.popitem(last=False)
            await oldest.close()
        shown = chart_points(curves, names, first=first, last=last)
        return {"complete": history.complete, **shown}

    def _has_too_many(self) -> bool:
        held = sum(history.nbytes for history in self._histories.values())
        return len(self._histories) > (MAX_JOBS if held <= MAX_BYTES else 1)

    async def close(self) -> None:
        """Stop all reading."""
        for history in self._histories.values():
            await history.close()
        self._histories.clear()


# -- exact metrics of each step, for own analysis --------------------------------------------------


async def exact_lines(
    broker: Broker, scope: JobScope, names: Sequence[str], first: int, last: int | None
) -> AsyncGenerator[bytes, None]:
    """Yield a line of JSON for each metric message stored by now: step, time and values.

    `names` are names or patterns; empty: all. Values that are not finite are left out. A step that
    was trained again after a resumption has two lines; the later one counts.
    """
    async with aclosing(stored_metrics(broker, scope)) as stored:
        async for _, metric in stored:
            line = _line(metric, names, first, last)
            if line:
                yield line


def _line(metric: Metric, names: Sequence[str], first: int, last: int | None) -> bytes:
    if metric.step < first or (last is not None and metric.step > last):
        return b""
    values = {
        name: value for name, value in finite_values(metric).items() if is_wanted(name, names)
    }
    fields = {"step": metric.step, "time": metric.time, "values": values}
    return json.dumps(fields).encode() + b"\n" if values else b""
