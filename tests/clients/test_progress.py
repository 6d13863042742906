"""What a display shows is computed from metrics and events alone."""

import io
import math

import pytest
from rich.console import Console
from tinkermq.clients.cli.live import LineDisplay, render, step_line
from tinkermq.clients.follow import RunProgress, sparkline
from tinkermq.clients.plots import text_plot
from tinkermq.schemas.metric import Event, Metric, Presence
from tinkermq.schemas.wire.subjects import JobScope

from tests.clients.conftest import new_record


def metric(step: int, time: float = 0.0, **values: float) -> Metric:
    return Metric(step=step, values={"training_step_reward": step / 10, **values}, time=time)


@pytest.fixture
def progress() -> RunProgress:
    return RunProgress(new_record(JobScope("local", "a")))


def test_the_time_left_follows_the_pace_of_the_last_steps(progress: RunProgress) -> None:
    progress.total_steps = 10
    assert progress.seconds_left is None
    for step in (1, 2, 3, 4):
        progress.add_metric(metric(step, time=2.0 * step))
    assert progress.seconds_left == pytest.approx(12.0)


def test_the_total_comes_from_the_learner_or_else_from_the_configuration(
    progress: RunProgress,
) -> None:
    assert progress.total_steps == 3
    progress.add_metric(metric(1, **{"training/total_steps": 40.0}))
    assert progress.total_steps == 40


def test_a_validation_alone_is_no_step(progress: RunProgress) -> None:
    assert not progress.add_metric(Metric(step=0, values={"val/mean_score": 0.25}, time=0))
    assert progress.add_metric(metric(1))
    assert progress.last_validation() == (0, 0.25)
    assert progress.step == 1


def test_numbers_that_could_not_be_computed_are_left_out(progress: RunProgress) -> None:
    progress.add_metric(metric(1, **{"staleness/lag_mean": math.nan}))
    assert progress.value("staleness/lag_mean") is None
    assert "lag" not in step_line(progress)


def test_success_entropy_and_length_stand_before_the_speed(progress: RunProgress) -> None:
    numbers = {
        "game/success_rate": 0.25,
        "val/success_rate": 0.5,
        "actor/entropy": 0.731,
        "response_length/mean": 212.4,
        "perf/throughput": 10.0,
    }
    progress.add_metric(metric(2, **numbers))
    assert step_line(progress) == (
        "step 2/3  reward 0.200  success 25%  validated success 50%  entropy 0.73  length 212  "
        "tokens/s 10"
    )


def test_the_best_validation_is_told_where_it_is_not_the_last(progress: RunProgress) -> None:
    for step, score in ((0, 0.1), (1, 0.8), (2, 0.8)):
        progress.add_metric(Metric(step=step, values={"val/mean_score": score}, time=0))
    assert progress.best_validation() == (1, 0.8)
    out = io.StringIO()
    Console(file=out, width=120).print(render(progress, []))
    assert "0.800 at step 2, best 0.800 at 1" in out.getvalue()


def test_a_line_tells_the_step_and_its_figures(progress: RunProgress) -> None:
    progress.add_metric(Metric(step=0, values={"val/mean_score": 0.25}, time=0))
    progress.add_metric(metric(2, **{"staleness/lag_mean": 1.5, "perf/throughput": 12345.0}))
    expected = "step 2/3  reward 0.200  validation 0.250  lag 1.50  tokens/s 12,345"
    assert step_line(progress) == expected


def test_the_live_display_shows_bar_curves_figures_and_bottleneck(progress: RunProgress) -> None:
    for step in (1, 2):
        progress.add_metric(metric(step, time=step, **{"staleness/lag_mean": 0.5}))
    hint = "the learner waits 71 % of the time: add generators"
    progress.add_event(Event(kind="bottleneck", source="learner", message=hint, time=0))
    text = shown(progress)
    assert "run-of-a  RUNNING" in text
    assert "2/3" in text
    assert "▁" in text
    assert "lag 0.50" in text
    assert hint in text


def test_the_live_display_shows_lags_and_episodes_by_phase(progress: RunProgress) -> None:
    shares = {"0": 0.75, "1": 0.25, "2": 0.0}
    progress.add_metric(
        metric(1, **{f"staleness/lag_share/{lag}": share for lag, share in shares.items()})
    )
    progress.add_actors(
        [
            presence("generator", running=5.0, waiting=2.0),
            presence("evaluator", running=1.0),
            presence("environment", episodes=10.0),
        ]
    )
    text = shown(progress)
    assert "0 ████████ 75%  1 ██ 25%" in text
    assert "6 generating   2 waiting for the engine   2 in the environment" in text


def presence(role: str, **numbers: float) -> Presence:
    return Presence(
        actor=role, role=role, host="h", pid=1, state="working", numbers=numbers, time=0.0
    )


def shown(progress: RunProgress) -> str:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(render(progress, []))
    return console.export_text()


def test_a_bottleneck_that_stays_the_same_is_told_once(
    progress: RunProgress, capsys: pytest.CaptureFixture[str]
) -> None:
    display = LineDisplay(progress)
    for _ in range(3):
        display.show(Event(kind="bottleneck", source="learner", message="the engine", time=0))
    assert capsys.readouterr().out == "bottleneck: the engine\n"


def test_rewards_are_averaged_to_the_width_of_the_display(progress: RunProgress) -> None:
    for step in range(1, 101):
        progress.add_metric(metric(step))
    smoothed = progress.smoothed_rewards(10)
    assert len(smoothed) == 10
    assert smoothed == sorted(smoothed)
    assert sum(smoothed) / 10 == pytest.approx(5.05)


def test_a_sparkline_rises_with_its_values() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([1.0, 1.0]) == "▁▁"
    assert sparkline([]) == ""


def test_a_text_plot_has_its_curve_from_corner_to_corner() -> None:
    rows = text_plot({"o": [(0, 0.0), (10, 1.0)]}, width=20, height=5).splitlines()
    assert rows[0].startswith("  1.00 │")
    assert rows[0].endswith("o")
    assert rows[4] == "  0.00 │o" + " " * 19
    assert rows[6].split() == ["0", "10"]
