"""Whether the caches of running requests are better kept or computed again when weights change.

    python -m benchmarks.evidence.caches

Runs what has no line in results/caches.jsonl yet: guess and the calculator in a real pool, five
seeds with either choice. Steps are small (4 tasks, not 16) and the bound is 8, so that new weights
come often and in the middle of many turns: the engine computes a cache anew at each turn's begin if
weights have changed since, so a choice there is within a turn alone.
Some ten minutes of one core.
"""

import asyncio

from benchmarks.evidence.cells import (
    SEEDS,
    Cell,
    Overrides,
    job_of,
    run_cells,
    take_no_arguments,
)
from benchmarks.evidence.lagged import Curve
from benchmarks.evidence.pooled import run_pooled

EXPERIMENT = "caches"
CHOICES = ("keep", "recompute")
BOUND, TEST_EVERY = 8, 20
STEPS = {"calculator": 120, "guess": 120}
RATES = {"calculator": 2.5e-4, "guess": 1.5e-4}
"""Half of the examples': a step has a quarter of their episodes."""


def overrides(game: str, choice: str) -> Overrides:
    """Return the keys of a run over the example's."""
    return {
        "generator": {"kv_on_swap": choice},
        "learner": {"lr": RATES[game]},
        "training": {
            "num_steps": STEPS[game],
            "batch_size": 4,
            "max_staleness": BOUND,
            "test_freq": TEST_EVERY,
        },
    }


def cells() -> list[Cell]:
    """Return all runs, every seed's together."""
    return [
        Cell(game, choice, BOUND, seed, overrides(game, choice))
        for seed in SEEDS
        for game in STEPS
        for choice in CHOICES
    ]


def measure(cell: Cell) -> Curve:
    """Run one of them."""
    return asyncio.run(run_pooled(job_of(cell)))


if __name__ == "__main__":
    take_no_arguments(__doc__)
    run_cells(EXPERIMENT, cells(), measure=measure)
