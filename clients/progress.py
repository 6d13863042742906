"""How far a run is: a pure summary of its metrics and events, for displays."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..schemas.job import FINAL_STATES, JobRecord
from ..schemas.metric import Event, Metric, Presence

REWARD = "training_step_reward"
LOSS = "actor/pg_loss"
VALIDATION = "val/mean_score"
SUCCESS = "game/success_rate"
VALIDATED_SUCCESS = "val/success_rate"
_RECENT_STEPS = 10
_BARS = "▁▂▃▄▅▆▇█"
_LAG_SHARE = "staleness/lag_share/"
_QUIET_EVENTS = frozenset({"bottleneck"})


@dataclass
class RunProgress:
    """What is known of a run so far; `take_*` bring it up to date."""

    record: JobRecord
    step: int = 0
    total_steps: int | None = None
    rewards: dict[int, float] = field(default_factory=dict[int, float])
    """By step; of a run that learns from conversations, the loss."""
    validation: dict[int, float] = field(default_factory=dict[int, float])
    values: dict[str, float] = field(default_factory=dict[str, float])
    bottleneck: str = ""
    event: Event | None = None
    phases: dict[str, int] = field(default_factory=dict[str, int])
    """Episodes under way by what they wait for; empty before anybody told."""
    _times: dict[int, float] = field(default_factory=dict[int, float])

    def __post_init__(self) -> None:
        training: dict[str, Any] = self.record.config.get("training") or {}
        self.total_steps = training.get("num_steps")

    @property
    def measure(self) -> str:
        """What `rewards` holds: reward or loss."""
        return "loss" if self.record.kind == "sft" else "reward"

    @property
    def ended(self) -> bool:
        """Whether the run has come to its last state."""
        return self.record.state in FINAL_STATES

    @property
    def seconds_left(self) -> float | None:
        """Estimate from the pace of the last steps, or None before two steps."""
        steps = sorted(self._times)
        if self.total_steps is None or len(steps) < 2:
            return None
        pace = (self._times[steps[-1]] - self._times[steps[0]]) / (steps[-1] - steps[0])
        return max(0.0, (self.total_steps - self.step) * pace)

    def take_record(self, record: JobRecord) -> None:
        """Take the job's newest record."""
        self.record = record

    def take_event(self, event: Event) -> None:
        """Take an event."""
        if event.kind == "bottleneck":
            self.bottleneck = event.message
        if event.kind not in _QUIET_EVENTS:
            self.event = event

    def take_crew(self, crew: Sequence[Presence]) -> None:
        """Take what generators, evaluators and environment hosts say of their episodes."""

        def total(name: str, *roles: str) -> int:
            return int(sum(one.numbers.get(name, 0.0) for one in crew if one.role in roles))

        generating = total("running", "generator", "evaluator")
        queued = total("waiting", "generator", "evaluator")
        opened = total("episodes", "environment")
        self.phases = {
            "generating": generating,
            "waiting for the engine": queued,
            "in the environment": max(opened - generating - queued, 0),
        }

    def take_metric(self, metric: Metric) -> bool:
        """Take the numbers of a step; return whether they tell of a new training step."""
        self.values.update(metric.values)
        total = metric.values.get("training/total_steps")
        if total is not None and math.isfinite(total):
            self.total_steps = int(total)
        score = metric.values.get(VALIDATION)
        if score is not None and math.isfinite(score):
            self.validation[metric.step] = score
        reward = metric.values.get(LOSS if self.measure == "loss" else REWARD)
        if reward is None:
            return False
        self.rewards[metric.step] = reward
        self._times[metric.step] = metric.time
        if len(self._times) > _RECENT_STEPS + 1:
            del self._times[min(self._times)]
        self.step = max(self.step, metric.step)
        return True

    def value(self, name: str) -> float | None:
        """Return the newest finite value of a metric."""
        value = self.values.get(name)
        return value if value is not None and math.isfinite(value) else None

    def lag_shares(self) -> dict[str, float]:
        """Return the share of the newest step's tokens by lag in versions, smallest lag first."""
        return {
            name.removeprefix(_LAG_SHARE): value
            for name, value in self.values.items()
            if name.startswith(_LAG_SHARE)
        }

    def last_validation(self) -> tuple[int, float] | None:
        """Return step and score of the newest validation."""
        return max(self.validation.items(), default=None)

    def best_validation(self) -> tuple[int, float] | None:
        """Return step and score of the best validation, the first of equal ones."""
        return max(self.validation.items(), key=lambda item: (item[1], -item[0]), default=None)

    def smoothed_rewards(self, width: int) -> list[float]:
        """Return at most `width` means of consecutive rewards, oldest first."""
        values = [value for _, value in sorted(self.rewards.items()) if math.isfinite(value)]
        if not values:
            return []
        count = min(width, len(values))
        edges = [round(place * len(values) / count) for place in range(count + 1)]
        parts = [values[start:end] for start, end in itertools.pairwise(edges)]
        return [sum(part) / len(part) for part in parts]


def sparkline(values: list[float]) -> str:
    """Return a line of bars from the smallest to the largest value."""
    if not values:
        return ""
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    return "".join(_BARS[min(7, int((value - low) / span * 8))] for value in values)
