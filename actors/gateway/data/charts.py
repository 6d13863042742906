"""Which curves the page of a job shows."""

import math
from collections.abc import Sequence
from typing import NamedTuple

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

NAMES: tuple[str, ...] = tuple(line.name for chart in CHARTS for line in chart.lines)


def job_curves() -> Curves:
    """Return empty curves of what the page draws; of a step that is told again the last counts."""
    return Curves(NAMES, later_counts=True)


def enter(curves: Curves, metrics: Sequence[Metric]) -> None:
    """Enter the metrics of a job."""
    curves.add([one.step for one in metrics], [one.values for one in metrics])


def live_values(metric: Metric) -> dict[str, float]:
    """Return the values of a metric that the page draws, finite ones only."""
    return {
        name: value
        for name, value in metric.values.items()
        if name in NAMES and math.isfinite(value)
    }
