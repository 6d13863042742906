"""The evidence on learning: exact lags, runs that repeat, a page that says what the data say."""

from collections.abc import Mapping

import pytest

from benchmarks.evidence import gomoku_curve
from benchmarks.evidence.lagged import Curve, LaggedRun
from benchmarks.evidence.tables import PAGE, Difference, filled
from benchmarks.tasks import addition_job, warm_model

STEPS = 4


async def run(lag: int) -> Curve:
    """Train a hardly trained model for some steps."""
    job = addition_job(warm_model("addition", quick=True), STEPS)
    job["env"]["num_val"] = 8
    job["env"]["val_data"] = job["env"]["train_data"]
    return await LaggedRun(job, lag=lag, test_every=2).run()


def lags(numbers: Mapping[str, float]) -> list[str]:
    """Return the lags of a step's tokens."""
    return [key.rpartition("/")[2] for key in numbers if key.startswith("staleness/num_tokens/")]


async def test_the_lag_is_exact_and_a_run_repeats_to_the_bit() -> None:
    curve = await run(2)
    assert [lags(one) for one in curve.numbers] == [["lag_0"], ["lag_1"], ["lag_2"], ["lag_2"]]
    assert list(curve.validation) == [0, 2, 4]
    assert curve.samples == STEPS * 256
    again = await run(2)
    assert (again.rewards, again.numbers) == (curve.rewards, curve.numbers)
    assert [lags(one) for one in (await run(0)).numbers] == [["lag_0"]] * STEPS


def test_the_page_says_what_the_results_say() -> None:
    page = PAGE.read_text()
    assert filled(page) == page, "python -m benchmarks.evidence.tables"


def test_the_page_of_gomoku_says_what_its_results_say() -> None:
    page = gomoku_curve.PAGE.read_text()
    assert gomoku_curve.filled(page) == page, "python -m benchmarks.evidence.gomoku_curve --plot"
    assert gomoku_curve.PICTURE.stat().st_size < 100_000


def test_differences_are_of_pairs_and_tests_need_evidence() -> None:
    small = [0.010, 0.012, 0.008, 0.011, 0.009]
    near = Difference.of([(0.8 + more, 0.8) for more in small])
    assert near.mean == pytest.approx(0.01)
    assert near.half == pytest.approx(2.776 * 0.0015811 / 5**0.5, rel=1e-3)
    assert near.is_equivalent
    assert not near.is_worse
    far = Difference.of([(0.5, 0.8 + more) for more in small])
    assert far.is_worse
    assert not far.is_equivalent
    noisy = Difference.of([(0.8 + more, 0.8) for more in (0.1, -0.1, 0.05, -0.05, 0.0)])
    assert not noisy.is_equivalent
    assert not noisy.is_worse
