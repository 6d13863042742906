"""On-policy distillation against GRPO: samples and seconds until the teacher's reward is reached.

    python -m benchmarks.evidence.distillation

The teacher of each game is its warm start after 100 steps of GRPO with a seed of its own. The
student is the warm start again, trained at a lag of 2 by GRPO, by the teacher alone (one episode of
a task, no rewards), or by both. Five seeds that all share; each step trains as many episodes.
"""

import asyncio
from pathlib import Path

from benchmarks.evidence.cells import (
    SEEDS,
    Cell,
    Overrides,
    job_of,
    run_cells,
    take_no_arguments,
)
from benchmarks.evidence.lagged import LaggedRun
from benchmarks.tasks import CACHE

EXPERIMENT = "distillation"
GAMES = ("addition", "calculator")
LAG, TEST_EVERY = 2, 2
TEACHER_SEED, TEACHER_STEPS = 7, 100
BATCHES = {"addition": 16 * 16, "calculator": 16 * 8}
"""Episodes of a step, as in the examples."""


def teacher(game: str) -> Path:
    """Return the folder of a game's teacher, trained if it is not there."""
    folder = CACHE / "teachers" / game
    if not folder.is_dir():
        steps: Overrides = {"training": {"num_steps": TEACHER_STEPS}}
        job = job_of(Cell(game, "teacher", 0, TEACHER_SEED, steps))
        asyncio.run(LaggedRun(job, lag=0, test_every=TEACHER_STEPS).run(folder))
    return folder


def methods(game: str) -> dict[str, Overrides]:
    """Return the name and the keys of each way to train the student."""
    taught = {"teacher": str(teacher(game))}
    return {
        "grpo": {},
        "teacher alone": {
            "algorithm": taught | {"reward_coef": 0.0},
            "rollout": {"group_size": 1},
            "training": {"batch_size": BATCHES[game]},
        },
        "grpo and teacher": {"algorithm": taught},
    }


def cells() -> list[Cell]:
    """Return all runs."""
    return [
        Cell(game, name, LAG, seed, overrides)
        for game in GAMES
        for name, overrides in methods(game).items()
        for seed in SEEDS
    ]


if __name__ == "__main__":
    take_no_arguments(__doc__)
    run_cells(EXPERIMENT, cells(), test_every=TEST_EVERY)
