"""What staleness does to learning, and what corrections do about it.

    python -m benchmarks.evidence.staleness

Runs what has no line in results/staleness.jsonl yet: each game with the lag forced to exactly 0, 1,
2, 4, 8 and 12 versions (lagged.py) under each correction, with five seeds that all share. About two
hours on one core; a run repeats to the bit.
"""

from benchmarks.evidence.cells import (
    SEEDS,
    STEPS,
    Cell,
    Overrides,
    run_cells,
    take_no_arguments,
)

EXPERIMENT = "staleness"
LAGS = (0, 1, 2, 4, 8, 12)
METHODS: dict[str, Overrides] = {
    "none": {"algorithm": {"correction": "none"}},
    "tis": {"algorithm": {"correction": "tis"}},
    "decoupled": {"algorithm": {"correction": "decoupled"}},
    "icepop": {"algorithm": {"correction": "icepop"}},
    "m2po": {"algorithm": {"correction": "m2po"}},
    "tis of sequences": {"algorithm": {"correction": "tis", "correction_level": "sequence"}},
    "dppo": {"algorithm": {"correction": "none", "loss": "dppo"}},
}
"""Name to keys; the bounds are the defaults."""


def cells() -> list[Cell]:
    """Return all runs, those first that most depends on.

    At a lag of 0 all corrections multiply by 1: one of them is run.
    """
    return [
        Cell(game, method, lag, seed, overrides)
        for method, overrides in METHODS.items()
        for lag in LAGS
        if lag or method == "none"
        for game in STEPS
        for seed in SEEDS
    ]


if __name__ == "__main__":
    take_no_arguments(__doc__)
    run_cells(EXPERIMENT, cells())
