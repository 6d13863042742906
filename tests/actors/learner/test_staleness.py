"""`max_staleness: auto` finds the smallest bound at which nobody waits for the gate."""

import itertools
import random
from dataclasses import dataclass
from typing import Any

import pytest
from tinkermq.actors.learner.staleness import Staleness, choose
from tinkermq.schemas.config.job import JobConfig, TrainingConfig
from tinkermq.schemas.config.load_config import parse_config
from tinkermq.schemas.wire.errors import ConfigError
from tinkermq.schemas.wire.trace import GroupTrace, StepTrace, new_trace


@dataclass
class Pipeline:
    """A learner, its generators and their games in the steady state, in seconds for each batch."""

    train_s: float
    """What the learner needs."""
    generate_s: float
    """What the generators need to compute."""
    rollout_s: float
    """How long a group takes when there is room everywhere."""
    games_s: float = 0.0
    """What the hosts need to play."""
    noise: random.Random | None = None

    def step(self, bound: int) -> StepTrace:
        """Return the trace of a step under a bound, which lets bound + 1 batches be under way."""
        slowest_s = max(self.train_s, self.generate_s, self.games_s)
        gated_s = (self.rollout_s + self.train_s) / (bound + 1)
        step_s = max(slowest_s, gated_s)
        rollout_s = self.rollout_s
        if slowest_s > max(self.train_s, gated_s):  # all that is under way is on that side
            rollout_s = step_s * (bound + 1) - self.train_s
        if self.noise is not None:
            rollout_s *= self.noise.uniform(0.8, 1.2)
            step_s *= self.noise.uniform(1.0, 1.3)
        group = GroupTrace(
            task=0,
            source="g",
            issued=1.0,
            arrived=99.0,
            weights_s=0.0,
            rollout_s=rollout_s,
            generate_s=rollout_s,
            environment_s=0.0,
            answer_s=0.0,
        )
        return StepTrace(
            step=1,
            traceparent=new_trace(),
            formed=100.0,
            ended=101.0,
            learner={"train": self.train_s, "wait": step_s - self.train_s},
            generators={
                "g": {"generate": self.generate_s, "environment": step_s - self.generate_s}
            },
            num_groups=1,
            groups=[group],
        )


def after(staleness: Staleness, pipeline: Pipeline, steps: int) -> list[int]:
    """Return the bounds that are in force over some steps."""
    bounds: list[int] = []
    for _ in range(steps):
        staleness.adapt(pipeline.step(staleness.now))
        bounds.append(staleness.now)
    return bounds


def automatic(limit: int = 8) -> Staleness:
    """A bound that is chosen."""
    return Staleness(TrainingConfig(max_staleness="auto", staleness_limit=limit))


@pytest.mark.parametrize(
    ("pipeline", "bound"),
    [
        (Pipeline(train_s=1.0, generate_s=0.3, rollout_s=0.5), 1),
        (Pipeline(train_s=1.0, generate_s=0.3, rollout_s=3.5), 4),
        (Pipeline(train_s=1.0, generate_s=0.9, rollout_s=6.0), 6),
        # The generators are what is slow: more under way would only be older.
        (Pipeline(train_s=1.0, generate_s=2.0, rollout_s=3.0), 1),
        (Pipeline(train_s=1.0, generate_s=2.0, rollout_s=9.0), 4),
        (Pipeline(train_s=0.1, generate_s=0.1, rollout_s=50.0), 8),
    ],
)
def test_the_smallest_bound_is_found_at_which_nobody_waits_for_the_gate(
    pipeline: Pipeline, bound: int
) -> None:
    staleness = automatic()
    assert staleness.now == 1
    bounds = after(staleness, pipeline, 150)
    assert bounds[-50:] == [bound] * 50
    free = pipeline.step(bound).learner["wait"]
    assert bound == 8 or free == pytest.approx(max(pipeline.generate_s - pipeline.train_s, 0.0))


def test_a_wider_gate_that_brings_nothing_is_taken_back_and_tried_again_later() -> None:
    """Where the games are what is slow, more episodes only wait for one another."""
    staleness = automatic()
    bounds = after(staleness, Pipeline(1.0, 0.1, 3.0, games_s=2.0), 300)
    assert set(bounds) == {1, 2}
    assert bounds.count(2) < 0.2 * len(bounds)
    raised = sum(before < now for before, now in itertools.pairwise(bounds))
    assert raised >= 2


def test_the_bound_follows_when_the_times_change() -> None:
    staleness = automatic()
    after(staleness, Pipeline(1.0, 0.3, 3.5), 100)
    assert staleness.now == 4
    bounds = after(staleness, Pipeline(1.0, 0.3, 0.5), 100)
    assert sorted(set(bounds), reverse=True) == [4, 3, 2, 1]
    assert bounds == sorted(bounds, reverse=True)


@pytest.mark.parametrize("seed", range(3))
def test_noise_does_not_shake_the_bound(seed: int) -> None:
    staleness = automatic()
    noisy = Pipeline(1.0, 0.3, 3.5, noise=random.Random(seed))
    bounds = after(staleness, noisy, 600)[200:]
    assert set(bounds) <= {2, 3, 4, 5}
    assert 3 <= sum(bounds) / len(bounds) <= 5
    changes = sum(before != now for before, now in itertools.pairwise(bounds))
    assert changes <= 12


@pytest.mark.parametrize(
    ("bound", "batches", "chosen"),
    [(1, 2.0, 1), (1, 2.5, 2), (2, 7.0, 4), (4, 9.0, 8), (4, 5.4, 4), (4, 3.7, 4), (4, 3.5, 3)],
)
def test_a_bound_changes_by_steps_and_with_slack(bound: int, batches: float, chosen: int) -> None:
    assert choose(bound, batches) == chosen


def test_a_fixed_bound_stays_and_one_without_measurements_is_the_smallest() -> None:
    fixed = Staleness(TrainingConfig(max_staleness=0))
    assert set(after(fixed, Pipeline(1.0, 0.3, 9.0), 20)) == {0}
    assert (fixed.now, fixed.largest) == (0, 0)
    staleness = automatic(limit=5)
    assert staleness.largest == 5
    nothing = Pipeline(1.0, 0.3, 0.5).step(1).model_copy(update={"groups": [], "generators": {}})
    for _ in range(20):
        staleness.adapt(nothing)
    assert staleness.now == 1


def _config(**training: Any) -> JobConfig:
    return parse_config({"model": {"path": "m"}, "env": {"game": "g"}, "training": training})


def test_keys_that_do_not_fit_auto_are_refused() -> None:
    assert _config(max_staleness="auto").training.largest_staleness == 8
    with pytest.raises(ConfigError, match="staleness_limit has no effect while max_staleness is 2"):
        _config(staleness_limit=4)
    with pytest.raises(ConfigError, match="measures the run's own generators"):
        _config(max_staleness="auto", tasks="external", num_steps=1)
    with pytest.raises(ConfigError, match="max_staleness"):
        _config(max_staleness="some")
