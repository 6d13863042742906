"""The sanity test of arXiv 2510.26788: what a model solves half of the time, it must learn.

    tinkermq model get smollm2
    python -m benchmarks.evidence.sanity --processes 2

Prompts that a model always solves teach nothing, and some that it never solves cannot be learned.
Those between can all be: an algorithm and an implementation that are sound bring the reward on them
near 1, and what stays below is a defect, such as engine and learner that disagree. Here
SmolLM2-135M-Instruct answers every sum of examples/sums.yaml that is not held out 16 times. Those
with 3 to 13 right answers are the candidates (116 of 1,280, none with more than 7), and 32 of them,
drawn at random, the dataset: results/sanity_prompts.jsonl. It is trained with the keys of
language_model.py and 8 questions a step, and validated on the same prompts, 4 answers each, at
temperature 1. Runs what has no line in results/sanity.jsonl yet: three seeds at the example's lag
of 2. On one core of a CPU the selection takes about twenty minutes, and a run about ten.
"""

import asyncio
import json
import random
from collections.abc import Iterable, Sequence
from typing import Any

from tinkermq.envs.games.sums import is_held_out, question
from tinkermq.envs.write_data import verl_row, write_rows

from benchmarks.evidence import language_model
from benchmarks.evidence.cells import RESULTS, SEEDS, Cell, Overrides
from benchmarks.evidence.lagged import LaggedRun
from benchmarks.evidence.language_model import GAME, METHODS, Job, run_missing
from benchmarks.tasks import CACHE

EXPERIMENT = "sanity"
PROMPTS = RESULTS / "sanity_prompts.jsonl"
NUM_PROMPTS, NUM_ANSWERS, LEAST_RIGHT = 32, 16, 3
"""A prompt is kept with `LEAST_RIGHT` right answers or more, and as many wrong ones."""
LAG, STEPS, BATCH, TEST_EVERY, NUM_SEEDS = 2, 40, 8, 10, 3
NUM_PLAYED = 4
"""Answers to each prompt in a validation."""
FOLDER = CACHE / "sanity"
Row = dict[str, Any]
Pair = Sequence[int]


def rows_of(pairs: Iterable[Pair], split: str) -> list[Row]:
    """Return the rows of sums, in the game's columns."""
    return [
        verl_row(question(*pair), str(sum(pair)), data_source=GAME, split=split, index=index)
        for index, pair in enumerate(pairs)
    ]


def select() -> list[Row]:
    """Let the model answer all sums that training may see; return some that it often solves.

    Returns the numbers of each sum and how many of its answers are right.
    """
    numbers = range(10, 50)
    pairs = [(one, two) for one in numbers for two in numbers if not is_held_out(one, two)]
    found = language_model.job(Cell(GAME, "tis", 0, 0, METHODS["tis"]), on_gpu=False)
    file = write_rows(FOLDER / "all.jsonl", rows_of(pairs, "train"))
    found["env"]["train_data"] = [str(file)]
    found["rollout"]["group_size"] = NUM_ANSWERS
    right = {
        pairs[group.task.sample or 0]: round(sum(item.reward for item in group.sampled))
        for group in asyncio.run(LaggedRun(found, lag=0, test_every=1).sample())
    }
    most = NUM_ANSWERS - LEAST_RIGHT
    between = [pair for pair in pairs if LEAST_RIGHT <= right[pair] <= most]
    chosen = sorted(random.Random(0).sample(between, NUM_PROMPTS))
    return [{"sum": pair, "right": right[pair]} for pair in chosen]


def cells() -> list[Cell]:
    """Return all runs; selects the prompts if there are none."""
    if not PROMPTS.is_file():
        write_rows(PROMPTS, select())
    pairs = [tuple(json.loads(line)["sum"]) for line in PROMPTS.read_text().splitlines()]
    train = write_rows(FOLDER / "train.jsonl", rows_of(pairs, "train"))
    val = write_rows(FOLDER / "val.jsonl", rows_of(pairs * NUM_PLAYED, "val"))
    data = {"train_data": [str(train)], "val_data": [str(val)], "num_val": NUM_PROMPTS * NUM_PLAYED}
    overrides: Overrides = {**METHODS["tis"], "env": data}
    return [Cell(GAME, "tis", LAG, seed, overrides) for seed in SEEDS[:NUM_SEEDS]]


def job(cell: Cell, *, on_gpu: bool) -> Job:
    """Return the configuration of a run."""
    found = language_model.job(cell, on_gpu=on_gpu)
    found["training"] |= {"num_steps": STEPS, "batch_size": BATCH}
    return found


if __name__ == "__main__":
    run_missing(__doc__, EXPERIMENT, cells, job, test_every=TEST_EVERY)
