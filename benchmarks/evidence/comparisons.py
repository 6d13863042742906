"""Runs by seed, and what pairs of one seed say: a mean difference and its interval."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from benchmarks.evidence.cells import SEEDS, Result, Results

MARGIN = 0.03
LEVEL = 0.8
_T_ONE_SIDED = {2: 2.920, 3: 2.353, 4: 2.132, 14: 1.761, 19: 1.729}
"""Student's t by degrees of freedom: 5% above it."""
_T_TWO_SIDED = {2: 4.303, 3: 3.182, 4: 2.776, 14: 2.145, 19: 2.093}
"""2.5% above it."""
Measure = Callable[[Result], float]


@dataclass(frozen=True)
class Difference:
    """Of pairs of runs."""

    mean: float
    half: float
    """Half of the 95% interval."""
    half_90: float
    """Half of the 90% interval: that of two one-sided tests at 5%."""

    @classmethod
    def of(cls, pairs: Sequence[tuple[float, float]]) -> "Difference":
        """Take the second of each pair from the first."""
        found = [one - other for one, other in pairs]
        degrees, error = len(found) - 1, stdev(found) / math.sqrt(len(found))
        return cls(mean(found), _T_TWO_SIDED[degrees] * error, _T_ONE_SIDED[degrees] * error)

    @property
    def is_equivalent(self) -> bool:
        """Whether it is under the margin either way, by two one-sided tests at 5%."""
        return abs(self.mean) + self.half_90 < MARGIN

    @property
    def is_worse(self) -> bool:
        """Whether it is under 0, at 2.5%."""
        return self.mean + self.half < 0

    def __str__(self) -> str:
        return f"{self.mean:+.3f}±{self.half:.3f}"

    def told(self, digits: int) -> str:
        """Write it with so many digits behind the point."""
        return f"{self.mean:+,.{digits}f}±{self.half:,.{digits}f}"


class Table:
    """Runs of experiments by game, method and lag."""

    def __init__(self, *experiments: str, seeds: Sequence[int] = SEEDS) -> None:
        """Read their results; runs of other seeds are left out."""
        self._seeds = seeds
        self._runs: dict[tuple[str, str, int], dict[int, Result]] = {}
        for experiment in experiments:
            for one in Results(experiment):
                self._runs.setdefault((one.game, one.method, one.lag), {})[one.seed] = one

    def of(self, game: str, method: str, lag: int) -> list[Result]:
        """Return the runs of all seeds in their order; none where one is missing."""
        found = self._runs.get((game, method, lag), {})
        return [found[seed] for seed in self._seeds] if set(self._seeds) <= set(found) else []

    @property
    def methods(self) -> list[str]:
        """The methods in the order in which they were run first."""
        return list(dict.fromkeys(method for _, method, _ in self._runs))

    @property
    def lags(self) -> list[int]:
        """The lags that were run."""
        return sorted({lag for _, _, lag in self._runs})

    def difference(
        self, game: str, one: tuple[str, int], other: tuple[str, int], measure: Measure
    ) -> Difference | None:
        """Compare two methods, each with its lag; None where runs are missing."""
        pairs = list(zip(self.of(game, *one), self.of(game, *other), strict=False))
        if not pairs:
            return None
        return Difference.of([(measure(first), measure(second)) for first, second in pairs])


def area(run: Result) -> float:
    """The mean height of the validation curve."""
    return run.area


def final(run: Result) -> float:
    """The mean of the last two validations."""
    return run.final


def step_until(run: Result) -> int | None:
    """Return the first validated step that is at the level, None if there is none."""
    steps = [step for step, value in sorted(run.validation.items()) if value >= LEVEL]
    return steps[0] if steps else None


def share_until(run: Result) -> float | None:
    """Return after which share of its steps a run first validates at the level."""
    step = step_until(run)
    return None if step is None else step / max(run.validation)
