"""Curves of any length become at most a thousand points, and no extreme is lost."""

import json
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinkermq.actors.curves import MAX_NAMES, MAX_POINTS, Curves
from tinkermq.actors.gateway.data.metrics import (
    CHARTS,
    add_point,
    chart_points,
    finite_values,
    job_curves,
)
from tinkermq.schemas.metric import Metric

REWARD = "training_step_reward"


def metric(step: int, **values: float) -> Metric:
    return Metric(step=step, values={REWARD: float(step), **values}, time=0.0)


def test_a_short_run_is_shown_step_by_step() -> None:
    curves = job_curves()
    add_point(curves, [metric(1), metric(2), metric(4)])
    points = curves.points()
    assert points["width"] == 1
    assert points["x"] == [1, 2, 4]
    assert points["series"] == {REWARD: {"y": [1.0, 2.0, 4.0]}}


def test_a_step_that_is_told_again_counts_as_it_was_told_last() -> None:
    curves = job_curves()
    add_point(curves, [metric(3), Metric(step=3, values={REWARD: 7.0}, time=1.0)])
    assert curves.points()["series"][REWARD]["y"] == [7.0]


def test_values_that_are_no_numbers_are_left_out() -> None:
    curves = job_curves()
    told = Metric(step=1, values={REWARD: math.nan, "actor/entropy": 2.0}, time=0)
    add_point(curves, [told])
    assert chart_points(curves)["series"] == {"actor/entropy": {"y": [2.0]}}
    assert finite_values(told) == {"actor/entropy": 2.0}


def test_every_metric_is_there_by_its_name_or_a_pattern_and_by_its_steps() -> None:
    curves = job_curves()
    names = {"critic/score/mean": 1.0, "critic/score/max": 2.0, "game/arm": 3.0}
    add_point(curves, [metric(step, **names) for step in range(1, 11)])
    every = chart_points(curves)
    assert every["names"] == sorted([REWARD, *names])
    assert set(every["series"]) == set(every["names"])
    some = chart_points(curves, ["critic/*", "no/such"], first=4, last=6)
    assert some["x"] == [4, 5, 6]
    assert some["names"] == every["names"]
    assert set(some["series"]) == {"critic/score/mean", "critic/score/max"}


def test_curves_may_be_drawn_over_time_and_tokens() -> None:
    curves = job_curves()
    tokens = "perf/total_num_tokens"
    told = [Metric(step=n, values={REWARD: 1.0, tokens: 10.0 * n}, time=1.7e9 + n) for n in (1, 2)]
    add_point(curves, [Metric(step=0, values={"val/mean_score": 0.0}, time=1.7e9 - 5), *told])
    points = chart_points(curves, [REWARD])
    assert points["time"] == [0.0, 6.0, 7.0]
    assert points["tokens"] == [0.0, 10.0, 30.0]
    assert list(points["series"]) == [REWARD]


def test_tokens_of_a_long_run_add_up_over_its_points() -> None:
    curves, steps = job_curves(), 4000
    told = {"perf/total_num_tokens": 8.0}
    add_point(curves, [Metric(step=n, values=told, time=float(n)) for n in range(steps)])
    points = chart_points(curves, ["perf/*"])
    assert points["width"] > 1
    assert points["tokens"][-1] == 8.0 * steps


def test_nothing_is_drawn_of_a_run_without_metrics() -> None:
    assert job_curves().points() == {"width": 1, "x": [], "series": {}}


@pytest.mark.parametrize("steps", [999, 1000, 1001, 5000, 100_000])
def test_a_long_run_has_at_most_a_thousand_points_and_keeps_its_extremes(steps: int) -> None:
    curves, spike = job_curves(), steps // 3
    values = [random.Random(step).random() for step in range(steps)]
    values[spike] = 99.0
    batch = [Metric(step=step, values={REWARD: values[step]}, time=0.0) for step in range(steps)]
    for start in range(0, steps, 1000):
        add_point(curves, batch[start : start + 1000])
    points = curves.points()
    assert len(points["x"]) <= MAX_POINTS
    assert points["x"][-1] <= steps - 1 < points["x"][-1] + points["width"]
    series = points["series"][REWARD]
    assert max(series.get("high", series["y"])) == 99.0
    if points["width"] > 1:
        first = values[: points["width"]]
        assert series["y"][0] == pytest.approx(sum(first) / len(first), rel=1e-3)
        assert series["low"][0] == pytest.approx(min(first), rel=1e-3)


@given(st.lists(st.tuples(st.integers(0, 300), st.floats(-5, 5)), max_size=80))
def test_low_mean_and_high_are_in_order_however_the_steps_come(
    told: list[tuple[int, float]],
) -> None:
    curves = Curves(max_points=8)
    for step, value in told:
        curves.add([step], [{REWARD: value}])
    points = curves.points()
    assert len(points["x"]) <= 8
    one = points["series"].get(REWARD, {})
    for low, mean, high in zip(
        one.get("low", []), one.get("y", []), one.get("high", []), strict=False
    ):
        assert low - 1e-3 <= mean <= high + 1e-3


def test_no_chart_shows_a_name_twice() -> None:
    names = [line.name for chart in CHARTS for line in chart.lines]
    assert len(set(names)) == len(names)


def test_names_are_taken_as_they_come_and_their_number_is_bounded() -> None:
    curves = Curves()
    curves.add([0, 1], [{"loss:sum": 2.0}, {"loss:sum": 4.0, "late": 1.0}])
    curves.add([1], [{f"name-{number}": 0.0 for number in range(2 * MAX_NAMES)}])
    series = curves.points()["series"]
    assert series["loss:sum"] == {"y": [2.0, 4.0]}
    assert series["late"] == {"y": [None, 1.0]}
    assert len(series) == MAX_NAMES


@given(st.lists(st.tuples(st.integers(0, 300), st.floats(-5, 5)), max_size=40), st.integers(0, 40))
def test_what_is_written_down_goes_on_as_if_it_had_not_been(
    told: list[tuple[int, float]], at: int
) -> None:
    whole, half = Curves(max_points=8), Curves(max_points=8)
    for number, (step, value) in enumerate(told):
        if number == at:
            kept = json.loads(json.dumps(half.to_map()))
            half = Curves(max_points=8)
            half.restore(kept)
        for one in (whole, half):
            one.add([step], [{"a": value, "b": -value} if step % 3 else {"a": value}])
    assert half.points() == whole.points()
    assert half.to_map() == whole.to_map()
