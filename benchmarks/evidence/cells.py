"""Runs of an experiment: which job each is, and where their results are kept.

The games are the examples with the examples' own keys; nothing was tuned on the seeds that the
results are of (`SEEDS`).
"""

import argparse
import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import yaml
from rich.console import Console
from tinkermq.envs.registry import companion, load_game
from tinkermq.schemas.model_catalogue import find_model
from tinkermq.schemas.wire.errors import GameError

from benchmarks.evidence.lagged import Curve, LaggedRun
from benchmarks.stack import REPOSITORY
from benchmarks.tasks import CACHE, warm_model

SEEDS = (101, 102, 103, 104, 105)
STEPS = {"addition": 40, "calculator": 40, "guess": 60}
TEST_EVERY, NUM_VAL = 5, 256
RESULTS = Path(__file__).parent / "results"
Overrides = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Cell:
    """One run of an experiment."""

    game: str
    method: str
    """What the experiment calls it."""
    lag: int
    seed: int
    overrides: Overrides = field(default_factory=dict[str, Mapping[str, Any]], compare=False)
    """Section to key to value of its configuration, over the example's; None removes a key."""

    @property
    def key(self) -> str:
        """Name it among the results."""
        return f"{self.game} {self.method} {self.lag} {self.seed}"


@dataclass(frozen=True)
class Result:
    """What is kept of one run."""

    game: str
    method: str
    lag: int
    seed: int
    validation: dict[int, float]
    """Step to the mean reward over the validation episodes."""
    samples: int
    """Episodes that were trained."""
    seconds: float
    """Of the run with its validations, on one core."""
    train_s: float = 0.0
    """Of generation and training alone."""
    told: dict[str, float] = field(default_factory=dict[str, float])
    """What else the experiment measures."""

    @property
    def area(self) -> float:
        """Mean height of the validation curve, by trapezoids: its area over its length."""
        points = sorted(self.validation.items())
        parts = [
            (right - left) * (low + high) / 2 for (left, low), (right, high) in pairwise(points)
        ]
        return sum(parts) / (points[-1][0] - points[0][0])

    @property
    def final(self) -> float:
        """Mean of the last two validations."""
        return mean(value for _, value in sorted(self.validation.items())[-2:])


def job_of(cell: Cell) -> dict[str, Any]:
    """Return the configuration of a run: the example's, validated at temperature 1."""
    job = yaml.safe_load((REPOSITORY / "examples" / f"{cell.game}.yaml").read_text())
    job["env"] |= data_of(cell.game) | {"num_val": NUM_VAL}
    if cell.game in STEPS:
        job["model"]["path"] = str(warm_model(cell.game))
        job["training"]["num_steps"] = STEPS[cell.game]
    else:  # a model that was pretrained, and steps of its own
        job["model"]["path"] = find_model(job["model"]["path"])
    job["seed"] = cell.seed
    for section, keys in cell.overrides.items():
        merged = job.get(section, {}) | deepcopy(dict(keys))
        job[section] = {key: value for key, value in merged.items() if value is not None}
    return job


def data_of(game: str) -> dict[str, list[str]]:
    """Return the data files of a game that has some, made as the example says."""
    try:
        make_data = companion(load_game(game), "make_data")
    except GameError:  # it generates its states
        return {}
    train, val = make_data(CACHE / "data" / game, 2048, NUM_VAL, 0)
    return {"train_data": [str(train)], "val_data": [str(val)]}


class Results:
    """The results of one experiment: a file of JSON lines that grows by one with each run."""

    def __init__(self, experiment: str, folder: Path = RESULTS) -> None:
        """Read what is there, and add to it."""
        self.path = folder / f"{experiment}.jsonl"

    def __iter__(self) -> Iterator[Result]:
        """Go through what was measured."""
        for line in self.path.read_text().splitlines() if self.path.is_file() else []:
            row = json.loads(line)
            curve = {int(step): value for step, value in row.pop("validation").items()}
            yield Result(**row, validation=curve)

    def missing(self, cells: Sequence[Cell]) -> list[Cell]:
        """Return what was not measured, in its order."""
        there = {f"{one.game} {one.method} {one.lag} {one.seed}" for one in self}
        return [cell for cell in cells if cell.key not in there]

    def add(self, cell: Cell, curve: Curve) -> None:
        """Write down what a run measured, at once; several processes may."""
        row: dict[str, Any] = {
            "game": cell.game,
            "method": cell.method,
            "lag": cell.lag,
            "seed": cell.seed,
            "validation": {step: round(value, 5) for step, value in curve.validation.items()},
            "samples": curve.samples,
            "seconds": round(curve.seconds, 1),
            "train_s": round(curve.train_s, 1),
        }
        if curve.told:
            row["told"] = {name: float(f"{value:.5g}") for name, value in curve.told.items()}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:  # one write: lines of other processes stay whole
            file.write(json.dumps(row) + "\n")


def take_no_arguments(doc: str | None) -> None:
    """Refuse arguments but `--help`, which tells what an experiment is: it takes hours."""
    summary = (doc or "").partition("\n")[0]
    argparse.ArgumentParser(description=summary).parse_args()


def run_cells(
    experiment: str,
    cells: Sequence[Cell],
    *,
    test_every: int = TEST_EVERY,
    measure: Callable[[Cell], Curve] | None = None,
) -> None:
    """Run what has no result yet, one after the other; by default with its lag forced."""
    results, console = Results(experiment), Console(stderr=True)
    missing = results.missing(cells)

    def lagged(cell: Cell) -> LaggedRun:
        return LaggedRun(job_of(cell), lag=cell.lag, test_every=test_every)

    for cell in missing:  # what is refused is so before hours have gone by
        lagged(cell)
    for number, cell in enumerate(missing, 1):
        curve = measure(cell) if measure else asyncio.run(lagged(cell).run())
        results.add(cell, curve)
        last = curve.validation[max(curve.validation)]
        told = f"{number} of {len(missing)}: {cell.key}: {last:.3f} after {curve.seconds:.0f} s"
        console.print(told, highlight=False)
