"""Tables of the documentation from the results: `python -m benchmarks.evidence.tables`.

Runs of one seed are compared with each other: a difference is of pairs, its interval Student's t
over the seeds. Each table stands in its page between two comments that name it.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from statistics import mean
from typing import NamedTuple

from benchmarks.evidence.caches import BOUND as CACHE_BOUND
from benchmarks.evidence.caches import CHOICES
from benchmarks.evidence.caches import STEPS as CACHE_STEPS
from benchmarks.evidence.cells import SEEDS, STEPS, Result, Results, take_no_arguments
from benchmarks.evidence.comparisons import (
    LEVEL,
    MARGIN,
    Difference,
    Measure,
    Table,
    area,
    final,
    share_until,
    step_until,
)
from benchmarks.evidence.equivalence import MORE_SEEDS
from benchmarks.evidence.kinds import BOUND as KINDS_BOUND
from benchmarks.evidence.kinds import EXPERIMENT as KINDS_OF_LAYERS
from benchmarks.evidence.kinds import GAME as KINDS_GAME
from benchmarks.evidence.kinds import KINDS
from benchmarks.evidence.kinds import SEEDS as KINDS_SEEDS
from benchmarks.evidence.language_model import EXPERIMENT as LANGUAGE_MODEL
from benchmarks.evidence.language_model import GAME, LAGS, LORA, LORA_LAG
from benchmarks.evidence.peer import GAMES as PEER_GAMES
from benchmarks.evidence.peer import PEERS, THEIRS
from benchmarks.evidence.stragglers import BOUND, POLICIES
from benchmarks.evidence.summary import runs as all_runs
from benchmarks.stack import REPOSITORY

DOCS = REPOSITORY / "docs"


def areas() -> Iterator[str]:
    """Each correction at each lag, against a lag of 0."""
    table = Table("staleness")
    lags = [lag for lag in table.lags if lag]
    for game in STEPS:
        synchronous = table.of(game, "none", 0)
        yield ""
        yield f"**{game}**: {mean(map(area, synchronous)):.3f} at η = 0"
        yield ""
        yield _row(["", *(f"η = {lag}" for lag in lags)])
        yield _rule(len(lags) + 1)
        for method in table.methods:
            found = [table.difference(game, (method, lag), ("none", 0), area) for lag in lags]
            if any(found):
                yield _row([method, *("" if one is None else str(one) for one in found)])


def tests() -> Iterator[str]:
    """The equivalence test over all seeds, and the control that must lose."""
    five = Table("staleness")
    twenty = Table("staleness", "equivalence", seeds=(*SEEDS, *MORE_SEEDS))
    heads = ["seeds", "difference of areas", "90% interval", f"within ±{MARGIN}", "worse at 2.5%"]
    yield _row(["", *heads])
    yield _rule(6)
    for method, lag, seeds, table in (
        ("tis", 4, "101 to 120", twenty),
        ("none", 12, "101 to 105", five),
    ):
        for game in STEPS:
            one = table.difference(game, (method, lag), ("none", 0), area)
            if one is not None:
                name = f"{method}, η = {lag}, {game}"
                yield _row([name, seeds, f"{one.mean:+.3f}", *_tested(one)])


def _tested(one: Difference) -> list[str]:
    low, high = one.mean - one.half_90, one.mean + one.half_90
    return [f"{low:+.3f} to {high:+.3f}", _yes(one.is_equivalent), _yes(one.is_worse)]


def choices() -> Iterator[str]:
    """Advantages, losses and LoRA against grpo with ppo and tis."""
    table = Table("choices")
    base, (lag,) = table.methods[0], table.lags
    yield _row(["", *STEPS])
    yield _rule(len(STEPS) + 1)
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
    yield _rule(5)
    for game in STEPS:
        for method in table.methods:
            runs = table.of(game, method, lag)
            reached = [(share, run) for run in runs if (share := share_until(run)) is not None]
            if runs:
                samples = [share * run.samples for share, run in reached]
                seconds = [share * run.train_s for share, run in reached]
                told = [f"{mean(samples):,.0f}", f"{mean(seconds):.1f}"] if reached else ["", ""]
                by = f"{len(reached)} of {len(runs)}"
                yield _row([f"{game}: {method}", *told, by, f"{mean(map(final, runs)):.3f}"])


def peer() -> Iterator[str]:
    """TRL and ours on the same data: samples and CPU seconds until a reward, and differences."""
    table = Table("peer")
    yield _row(["", "reached by", *(line.name for line in _PEER_LINES)])
    yield _rule(len(_PEER_LINES) + 2)
    for game in PEER_GAMES:
        for way in PEERS:
            runs = table.of(game, *way)
            reached = sum(step_until(run) is not None for run in runs)
            means = [line.mean(runs) for line in _PEER_LINES]
            yield _row([f"{game}: {_peer_name(*way)}", f"{reached} of {len(runs)}", *means])
        for way in PEERS[1:]:
            less = [line.less(table, game, way, PEERS[0]) for line in _PEER_LINES]
            yield _row([f"{game}: {_peer_name(*way)}, less TRL", "", *less])


def _peer_name(method: str, lag: int) -> str:
    return method if method == THEIRS else f"{method}, η = {lag}"


def language_model() -> Iterator[str]:
    """Each lag of the language model without a correction and with one."""
    table = Table(LANGUAGE_MODEL)
    yield _row(["", "η = 0", *(f"η = {lag}" for lag in LAGS)])
    yield _rule(len(LAGS) + 2)
    for line in _LANGUAGE_MODEL_LINES[:2]:
        for method in ("none", "tis"):
            means = [line.mean(table.of(GAME, method, lag)) for lag in LAGS]
            synchronous = line.mean(table.of(GAME, "none", 0))
            yield _row([f"{method}: {line.name}", synchronous, *means])
    for line in _LANGUAGE_MODEL_LINES[:2]:
        for method in ("none", "tis"):
            less = [line.less(table, GAME, (method, lag), ("none", 0)) for lag in LAGS]
            yield _row([f"{method}: {line.name}, less η = 0", "", *less])
        recovered = [line.less(table, GAME, ("tis", lag), ("none", lag)) for lag in LAGS]
        yield _row([f"tis less none: {line.name}", "", *recovered])


def language_model_lora() -> Iterator[str]:
    """LoRA against all weights of the language model, with the seeds that both have."""
    every, adapter = ("tis", LORA_LAG), (LORA, LORA_LAG)
    seeds = sorted(run.seed for run in Results(LANGUAGE_MODEL) if run.method == LORA)
    table = Table(LANGUAGE_MODEL, seeds=seeds)
    yield _row([f"{len(seeds)} seeds", "all weights", "LoRA", "difference"])
    yield _rule(4)
    for line in _LANGUAGE_MODEL_LINES:
        means = [line.mean(table.of(GAME, *way)) for way in (every, adapter)]
        yield _row([line.name, *means, line.less(table, GAME, adapter, every)])


def caches() -> Iterator[str]:
    """Caches that are kept at a swap against those that are computed again."""
    table = Table("caches")
    kept, again = ((choice, CACHE_BOUND) for choice in CHOICES)
    yield _row(["", *CHOICES, "difference"])
    yield _rule(4)
    for game in CACHE_STEPS:
        for line in _CACHE_LINES:
            means = [line.mean(table.of(game, *way)) for way in (kept, again)]
            yield _row([f"{game}: {line.name}", *means, line.less(table, game, again, kept)])


def stragglers() -> Iterator[str]:
    """What each policy does with groups over the bound, and what that costs."""
    table = Table("stragglers")
    ways = [(policy, BOUND) for policy in POLICIES]
    yield _row(["", *(f"`{policy}`" for policy in POLICIES)])
    yield _rule(len(POLICIES) + 1)
    for line in _STRAGGLER_LINES:
        yield _row([line.name, *(line.mean(table.of("guess", *way)) for way in ways)])
    for line in _STRAGGLER_LINES[:3]:
        less = [line.less(table, "guess", way, ways[0]) for way in ways[1:]]
        yield _row([f"{line.name}, less `{POLICIES[0]}`", "", *less])


def kinds() -> Iterator[str]:
    """The reward of models with each kind of layers, step by step."""
    table = Table(KINDS_OF_LAYERS, seeds=KINDS_SEEDS)
    kinds_of_runs = {kind: table.of(KINDS_GAME, kind, KINDS_BOUND) for kind in KINDS}
    steps = sorted(kinds_of_runs["qwen3"][0].validation)
    yield _row(["", *(f"step {step}" for step in steps), "area"])
    yield _rule(len(steps) + 2)
    for (kind, layers), runs in zip(KINDS.items(), kinds_of_runs.values(), strict=True):
        curve = [f"{mean(run.validation[step] for run in runs):.2f}" for step in steps]
        yield _row([f"`{kind}`: {layers}", *curve, f"{mean(map(area, runs)):.2f}"])


class Line(NamedTuple):
    """One measure of a table."""

    name: str
    digits: int
    measure: Measure

    def mean(self, runs: Sequence[Result]) -> str:
        """Write the mean over runs; nothing if there are none, or if they did not measure it."""
        found = mean(map(self.measure, runs)) if runs else math.nan
        return "" if math.isnan(found) else f"{found:,.{self.digits}f}"

    def less(self, table: Table, game: str, one: tuple[str, int], other: tuple[str, int]) -> str:
        """Write the difference of one method from another, each with its lag."""
        found = table.difference(game, one, other, self.measure)
        return "" if found is None else found.told(self.digits)


def _told(name: str, scale: float = 1.0) -> Measure:
    return lambda run: scale * run.told.get(name, math.nan)


def _samples_until(run: Result) -> float:
    """Return the samples until the level; of a run that does not reach it, all."""
    return (share_until(run) or 1.0) * run.samples


def _cpu_s_until(run: Result) -> float:
    """Return the CPU seconds until the level; of a run that does not reach it, all."""
    return (share_until(run) or 1.0) * run.told["train_cpu_s"]


_PEER_LINES = (
    Line(f"samples to {LEVEL}", 0, _samples_until),
    Line("CPU seconds to it", 1, _cpu_s_until),
    Line("final reward", 3, final),
)
_LANGUAGE_MODEL_LINES = (
    Line("area", 3, area),
    Line("final reward", 3, final),
    Line("mean distance of log-probs, 10⁻³", 1, _told("abs_log_ratio", 1000)),
    Line("largest ratio of a step", 2, _told("max_ratio")),
)
_CACHE_LINES = (
    Line("area", 3, area),
    Line("mismatch of log-probs at lag 0, 10⁻³", 2, _told("mismatch", 1000)),
    Line("ms paused at a swap", 1, _told("paused_ms")),
    Line("CPU seconds", 1, _told("train_cpu_s")),
)
_STRAGGLER_LINES = (
    Line("area", 3, area),
    Line(f"samples to {LEVEL}", 0, _samples_until),
    Line("seconds of all steps", 0, lambda run: run.train_s),
    Line("% of generated tokens wasted", 1, _told("wasted", 100)),
    Line("trained over generated length", 3, _told("length_ratio")),
    Line("99th percentile of lags", 1, _told("lag_p99")),
)


def _rule(num_columns: int) -> str:
    return f"|{'---|' * num_columns}"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _yes(value: bool) -> str:
    return "yes" if value else "no"


PAGES: dict[str, dict[str, Callable[[], Iterator[str]]]] = {
    "learning.md": {
        "areas": areas,
        "tests": tests,
        "choices": choices,
        "distillation": distillation,
        "peer": peer,
        "language model": language_model,
        "language model, lora": language_model_lora,
        "caches": caches,
        "stragglers": stragglers,
    },
    "models.md": {"kinds": kinds},
    "results.md": {"runs": all_runs},
}
"""The tables of each page by the name that stands in it."""


def filled(name: str) -> str:
    """Return a page with each table as the results say it is."""
    page = (DOCS / name).read_text()
    for title, table in PAGES[name].items():
        text = "\n".join(table()).strip()
        marks = f"<!-- {title} -->", f"<!-- end of {title} -->"
        between = re.compile(f"{re.escape(marks[0])}.*?{re.escape(marks[1])}", re.DOTALL)
        page, count = between.subn(lambda _, t=text, m=marks: f"{m[0]}\n\n{t}\n\n{m[1]}", page)
        assert count == 1, f"{name} has no place for {title}"
    return page


def write_pages() -> None:
    """Write all tables into their pages."""
    for name in PAGES:
        (DOCS / name).write_text(filled(name))


if __name__ == "__main__":
    take_no_arguments(__doc__)
    write_pages()
