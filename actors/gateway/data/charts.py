"""Which curves the page of a job shows."""

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import numpy as np

from ....schemas.metric import Metric
from ...curves import Curves


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

TIME, TOKENS = "time", "tokens"
"""Beside the steps, what curves may be drawn over: seconds and tokens since the run began."""
_TOLD_AT = "told at"
"""Stands among the curves for when a metric was told: no name of a metric has a space."""
_TRAINED = "perf/total_num_tokens"
MAX_NAMES = 512


def job_curves() -> Curves:
    """Return empty curves of a job; of a step that is told again the last counts."""
    return Curves(later_counts=True, max_names=MAX_NAMES)


def enter(curves: Curves, metrics: Sequence[Metric]) -> None:
    """Enter the metrics of a job."""
    curves.add(
        [one.step for one in metrics],
        [{_TOLD_AT: one.time or math.nan, **finite_values(one)} for one in metrics],
    )


def names_of(curves: Curves) -> list[str]:
    """Return the names of a job's metrics."""
    return [name for name in curves.names if name != _TOLD_AT]


def is_wanted(name: str, wanted: Sequence[str]) -> bool:
    """Whether a metric is one of those named, by itself or by a pattern; none named: all."""
    return not wanted or any(fnmatchcase(name, one) for one in wanted)


def chart_points(
    curves: Curves, wanted: Sequence[str] = (), *, first: int = 0, last: int | None = None
) -> dict[str, Any]:
    """Return what the page draws; see `Curves.points`.

    `wanted` names metrics, or all of a kind by a pattern (`critic/*`); empty: all. `names` are all
    that there are; `time` and `tokens` tell for each point how many seconds and trained tokens the
    run had behind it, as far as it was told.
    """
    names = names_of(curves)
    shown = {name for name in names if is_wanted(name, wanted)}
    points = curves.points(shown, first=first, last=last)
    at = np.array(points["x"], dtype=np.int64) // curves.width
    times, tokens = curves.means(_TOLD_AT), np.nan_to_num(curves.means(_TRAINED)) * curves.width
    begun = times[np.isfinite(times)][:1].sum()
    axes = {TIME: times[at] - begun, TOKENS: np.cumsum(tokens)[at]}
    told = {name: np.round(values, 1).tolist() for name, values in axes.items()}
    return {"names": sorted(names), **told, **points}


def finite_values(metric: Metric) -> dict[str, float]:
    """Return the values of a metric that can be drawn."""
    return {name: value for name, value in metric.values.items() if math.isfinite(value)}
