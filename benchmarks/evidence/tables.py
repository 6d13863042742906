"""The tables of docs/learning.md from the results: `python -m benchmarks.evidence.tables`.

Runs of one seed are compared with each other: a difference is of pairs, its interval Student's t
over the seeds. Each table stands in the page between two comments that name it.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from benchmarks.evidence.cells import SEEDS, STEPS, Result, Results, take_no_arguments
from benchmarks.stack import REPOSITORY

PAGE = REPOSITORY / "docs" / "learning.md"
MARGIN = 0.03
LEVEL = 0.8
_T_ONE_SIDED = {2: 2.920, 3: 2.353, 4: 2.132}
"""Student's t by degrees of freedom: 5% above it."""
_T_TWO_SIDED = {2: 4.303, 3: 3.182, 4: 2.776}
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
        return f"{self.mean:+.3f} ± {self.half:.3f}"


class Table:
    """Runs of an experiment by game, method and lag."""

    def __init__(self, experiment: str) -> None:
        """Read its results."""
        self._runs: dict[tuple[str, str, int], dict[int, Result]] = {}
        for one in Results(experiment):
            self._runs.setdefault((one.game, one.method, one.lag), {})[one.seed] = one

    def of(self, game: str, method: str, lag: int) -> list[Result]:
        """Return the runs of all seeds in their order; none where one is missing."""
        found = self._runs.get((game, method, lag), {})
        return [found[seed] for seed in SEEDS] if set(SEEDS) <= set(found) else []

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


def staleness(measure: Measure) -> Iterator[str]:
    """Each correction at each lag, against a lag of 0."""
    table = Table("staleness")
    lags = [lag for lag in table.lags if lag]
    for game in STEPS:
        synchronous = table.of(game, "none", 0)
        yield ""
        yield f"**{game}**: {mean(map(measure, synchronous)):.3f} at η = 0"
        yield ""
        yield _row(["", *(f"η = {lag}" for lag in lags)])
        yield _row(["---"] * (len(lags) + 1))
        for method in table.methods:
            found = [table.difference(game, (method, lag), ("none", 0), measure) for lag in lags]
            if any(found):
                yield _row([method, *("" if one is None else str(one) for one in found)])


def tests() -> Iterator[str]:
    """The equivalence test, and the control that must lose."""
    table = Table("staleness")
    yield _row(["", "difference of areas", "90% interval", f"within ±{MARGIN}", "worse at 2.5%"])
    yield _row(["---"] * 5)
    for method, lag in (("tis", 4), ("none", 12)):
        for game in STEPS:
            one = table.difference(game, (method, lag), ("none", 0), area)
            if one is not None:
                low, high = one.mean - one.half_90, one.mean + one.half_90
                told = [f"{low:+.3f} to {high:+.3f}", _yes(one.is_equivalent), _yes(one.is_worse)]
                yield _row([f"{method}, η = {lag}, {game}", f"{one.mean:+.3f}", *told])


def choices() -> Iterator[str]:
    """Advantages, losses and LoRA against grpo with ppo and tis."""
    table = Table("choices")
    base, (lag,) = table.methods[0], table.lags
    yield _row(["", *STEPS])
    yield _row(["---"] * (len(STEPS) + 1))
    heights = [mean(map(area, table.of(game, base, lag))) for game in STEPS]
    yield _row([f"{base}: area", *(f"{height:.3f}" for height in heights)])
    for method in table.methods[1:]:
        found = [table.difference(game, (method, lag), (base, lag), area) for game in STEPS]
        yield _row([method, *("" if one is None else str(one) for one in found)])


def distillation() -> Iterator[str]:
    """Samples and seconds until a reward is reached."""
    table = Table("distillation")
    (lag,) = table.lags
    yield _row(["", f"samples to {LEVEL}", "seconds to it", "reached by", "final reward"])
    yield _row(["---"] * 5)
    for game in STEPS:
        for method in table.methods:
            runs = table.of(game, method, lag)
            reached = [(share, run) for run in runs if (share := _share_until(run)) is not None]
            if runs:
                samples = [share * run.samples for share, run in reached]
                seconds = [share * run.train_s for share, run in reached]
                told = [f"{mean(samples):,.0f}", f"{mean(seconds):.1f}"] if reached else ["", ""]
                by = f"{len(reached)} of {len(runs)}"
                yield _row([f"{game}: {method}", *told, by, f"{mean(map(final, runs)):.3f}"])


def _share_until(run: Result) -> float | None:
    """Return after which share of its steps a run first validates at the level."""
    steps = [step for step, value in sorted(run.validation.items()) if value >= LEVEL]
    return steps[0] / max(run.validation) if steps else None


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _yes(value: bool) -> str:
    return "yes" if value else "no"


TABLES: dict[str, Callable[[], Iterator[str]]] = {
    "areas": lambda: staleness(area),
    "finals": lambda: staleness(final),
    "tests": tests,
    "choices": choices,
    "distillation": distillation,
}
"""By the name that stands in the page."""


def filled(page: str) -> str:
    """Return the page with each table as the results say it is."""
    for name, table in TABLES.items():
        text = "\n".join(table()).strip()
        marks = f"<!-- {name} -->", f"<!-- end of {name} -->"
        between = re.compile(f"{re.escape(marks[0])}.*?{re.escape(marks[1])}", re.DOTALL)
        page, count = between.subn(lambda _, t=text, m=marks: f"{m[0]}\n\n{t}\n\n{m[1]}", page)
        assert count == 1, f"{PAGE} has no place for {name}"
    return page


if __name__ == "__main__":
    take_no_arguments(__doc__)
    PAGE.write_text(filled(PAGE.read_text()))
