"""Down-sampling: the curves of a run of any length in at most a thousand points each.

A curve is kept in buckets of equally many steps: mean, least and greatest value of each. When
there are too many buckets their width doubles, so memory and work stay bounded and no extreme is
lost. Pure: no clock, no broker.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ....schemas.metric import Metric

MAX_POINTS = 1000
_DIGITS = 5


class Line(NamedTuple):
    """One line of a chart."""

    name: str
    """Name of the metric."""
    label: str
    """What the chart calls it."""


class Chart(NamedTuple):
    """One chart of the page."""

    key: str
    title: str
    lines: tuple[Line, ...]
    about: str = ""


CHARTS: tuple[Chart, ...] = (
    Chart("reward", "Reward", (Line("training_step_reward", "mean"),), "mean return of a step"),
    Chart("validation", "Validation", (Line("val/mean_score", "score"),), "mean return"),
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
"""The curated page."""

NAMES: tuple[str, ...] = tuple(line.name for chart in CHARTS for line in chart.lines)
_INDEX = {name: place for place, name in enumerate(NAMES)}


class Curves:
    """All curves of one run, down-sampled as they grow."""

    def __init__(self, max_points: int = MAX_POINTS) -> None:
        """Keep at most `max_points` buckets, an even number."""
        self._max_points = max_points
        self.width = 1
        self.last_step = -1
        shape = (len(NAMES), max_points)
        self._sum = np.zeros(shape)
        self._count = np.zeros(shape, dtype=np.int64)
        self._low = np.full(shape, np.inf)
        self._high = np.full(shape, -np.inf)

    def add(self, metrics: Sequence[Metric]) -> None:
        """Enter metrics; a step that is told again counts as well (a run that was resumed)."""
        if not metrics:
            return
        steps = np.array([metric.step for metric in metrics], dtype=np.int64)
        self.last_step = max(self.last_step, int(steps.max()))
        while self.last_step // self.width >= self._max_points:
            self._halve()
        buckets = steps // self.width
        values = np.array(
            [[metric.values.get(name, math.nan) for metric in metrics] for name in NAMES]
        )
        for row in np.flatnonzero(np.isfinite(values).any(axis=1)):
            self._enter(int(row), buckets, values[row])

    def _enter(self, row: int, buckets: NDArray[np.int64], values: NDArray[np.float64]) -> None:
        there = np.isfinite(values)
        at, found = buckets[there], values[there]
        if self.width == 1:  # the later value of a step counts
            self._sum[row, at] = self._low[row, at] = self._high[row, at] = found
            self._count[row, at] = 1
            return
        np.add.at(self._sum[row], at, found)
        np.add.at(self._count[row], at, 1)
        np.minimum.at(self._low[row], at, found)
        np.maximum.at(self._high[row], at, found)

    def _halve(self) -> None:
        """Join each two neighbours."""
        self.width *= 2
        half = self._max_points // 2
        for array, join, empty in (
            (self._sum, np.add, 0),
            (self._count, np.add, 0),
            (self._low, np.minimum, np.inf),
            (self._high, np.maximum, -np.inf),
        ):
            joined = join(array[:, 0::2], array[:, 1::2])
            array[:, :half] = joined
            array[:, half:] = empty

    def points(self) -> dict[str, Any]:
        """Return what is drawn, ready for JSON.

        `x` holds the first step of each bucket in which something was told; `series` by name the
        means `y`, and with more than one step to a bucket also `low` and `high`; null for none.
        """
        used = np.flatnonzero(self._count.any(axis=0))
        series: dict[str, dict[str, list[float | None]]] = {}
        for name, row in _INDEX.items():
            count = self._count[row, used]
            if not count.any():
                continue
            with np.errstate(invalid="ignore"):
                series[name] = {"y": _numbers(self._sum[row, used] / np.maximum(count, 1), count)}
            if self.width > 1:
                series[name]["low"] = _numbers(self._low[row, used], count)
                series[name]["high"] = _numbers(self._high[row, used], count)
        return {"width": self.width, "x": (used * self.width).tolist(), "series": series}


def _numbers(values: NDArray[np.float64], count: NDArray[np.int64]) -> list[float | None]:
    return [
        float(f"{value:.{_DIGITS}g}") if there else None
        for value, there in zip(values.tolist(), count.tolist(), strict=True)
    ]


def live_values(metric: Metric) -> dict[str, float]:
    """Return the values of a metric that the page draws, finite ones only."""
    return {
        name: value
        for name, value in metric.values.items()
        if name in _INDEX and math.isfinite(value)
    }
