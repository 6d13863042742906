"""Whether `tis` at a lag of four is as good as no lag at all, over twenty seeds.

    python -m benchmarks.evidence.equivalence

Runs what has no line in results/equivalence.jsonl yet: fifteen seeds beside the five of
staleness.py, no lag and four versions, all seeds' pairs in turn. Some twenty minutes of one core.
"""

from benchmarks.evidence.cells import STEPS, Cell, run_cells, take_no_arguments
from benchmarks.evidence.staleness import METHODS

EXPERIMENT = "equivalence"
MORE_SEEDS = tuple(range(106, 121))
PAIR = (("none", 0), ("tis", 4))


def cells() -> list[Cell]:
    """Return all runs, every seed's together: what is there at any time is of pairs."""
    return [
        Cell(game, method, lag, seed, METHODS[method])
        for seed in MORE_SEEDS
        for game in STEPS
        for method, lag in PAIR
    ]


if __name__ == "__main__":
    take_no_arguments(__doc__)
    run_cells(EXPERIMENT, cells())
