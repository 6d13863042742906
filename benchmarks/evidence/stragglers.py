"""What to do with groups that are older than the bound, where episodes last unevenly.

    python -m benchmarks.evidence.stragglers

Runs what has no line in results/stragglers.jsonl yet: guess with steps that take their time from
a heavy tail (benchmarks/tailed_game.py), in a real pool with a bound of 2, each policy with five
seeds in turns. Validation does not wait. Some fifteen minutes of one core, and half an hour for
the waiting.
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

EXPERIMENT = "stragglers"
POLICIES = ("drop", "train", "wait", "mask")
BOUND, NUM_STEPS, TEST_EVERY = 2, 60, 10


def overrides(policy: str) -> Overrides:
    """Return the keys of a run over the example's."""
    return {
        "env": {"game": "benchmarks.tailed_game:TailedGuessGame", "workers": 512},
        "evaluation": {"reset_kwargs": {"waits": False}},
        "training": {
            "num_steps": NUM_STEPS,
            "max_staleness": BOUND,
            "staleness_policy": policy,
            "test_freq": TEST_EVERY,
        },
    }


def cells() -> list[Cell]:
    """Return all runs, every seed's together."""
    return [
        Cell("guess", policy, BOUND, seed, overrides(policy))
        for seed in SEEDS
        for policy in POLICIES
    ]


def measure(cell: Cell) -> Curve:
    """Run one of them."""
    return asyncio.run(run_pooled(job_of(cell)))


if __name__ == "__main__":
    take_no_arguments(__doc__)
    run_cells(EXPERIMENT, cells(), measure=measure)
