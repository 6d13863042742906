"""The learning rate at chosen steps."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinkermq.actors.training.optimizer import learning_rate
from tinkermq.schemas.wire.errors import ConfigError


def rates(steps, **options):
    return [learning_rate(step, base=2.0, **options) for step in steps]


def test_constant_stays():
    assert rates([0, 1, 1000]) == [2.0, 2.0, 2.0]


def test_the_warm_up_reaches_the_peak_at_its_last_step():
    assert rates(range(6), warmup_steps=4) == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]


def test_linear_falls_to_its_share_of_the_peak_at_the_last_step():
    options = {"kind": "linear", "total_steps": 5, "min_ratio": 0.5}
    assert rates(range(6), **options) == [2.0, 1.75, 1.5, 1.25, 1.0, 1.0]


def test_cosine_is_half_way_down_in_the_middle():
    options = {"kind": "cosine", "total_steps": 5, "min_ratio": 0.2}
    values = rates([0, 1, 2, 4, 9], **options)
    assert values == pytest.approx([2.0, 2 * (0.2 + 0.8 * 0.8535534), 1.2, 0.4, 0.4])


@given(
    st.sampled_from(["constant", "linear", "cosine"]),
    st.integers(0, 50),
    st.integers(1, 100),
    st.floats(0, 1),
)
def test_the_rate_rises_once_then_never_again(kind, warmup_steps, total_steps, min_ratio):
    values = [
        learning_rate(
            step,
            base=1.0,
            kind=kind,
            warmup_steps=warmup_steps,
            total_steps=total_steps,
            min_ratio=min_ratio,
        )
        for step in range(total_steps)
    ]
    assert 0 < values[0] <= 1
    rising, falling = values[: warmup_steps + 1], values[warmup_steps:]
    assert rising == sorted(rising)
    assert all(b <= a + 1e-12 for a, b in pairwise(falling))
    assert all(value >= min_ratio - 1e-12 for value in falling)


def test_a_falling_schedule_needs_an_end():
    with pytest.raises(ConfigError, match="schedule=cosine needs a known number of steps"):
        learning_rate(5, base=1.0, kind="cosine")


def test_an_unknown_schedule_is_refused():
    with pytest.raises(ConfigError, match="schedule=step") as caught:
        learning_rate(5, base=1.0, kind="step", total_steps=10)
    assert "cosine" in caught.value.hint
