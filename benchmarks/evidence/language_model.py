"""What staleness and LoRA do to a language model of 135 million weights that learns sums.

    tinkermq model get smollm2
    python -m benchmarks.evidence.language_model --processes 2

Runs what has no line in results/language_model.jsonl yet, in so many processes, each of which takes
the next run when it has ended one: SmolLM2-135M-Instruct with the lag forced to exactly 0, 1, 2 and
4 versions (lagged.py), with `tis` and without a correction, and with LoRA at a lag of 2, with five
seeds that all share. The task and its keys are examples/sums.yaml's, in float32, with 16 questions
a step; on GPUs products use TF32, as in the product's learner. LoRA has the rank of choices.py and
ten times the rate of all weights. It may be stopped at any time and goes on with what is missing.

On one H200, twelve processes side by side under CUDA MPS take 29 to 36 seconds a run, with LoRA 53
to 57, and up to 9.4 GB of its memory each. Sums may be added up there in any order, so that runs do
not repeat to the bit. On CPUs a run takes about twenty minutes on one core.
"""

import argparse
import asyncio
import gc
import multiprocessing
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from statistics import mean
from typing import Any

import torch
from rich.console import Console
from tinkermq.actors.policy.devices import own_device
from tinkermq.actors.training.numerics import settle_numerics
from tinkermq.actors.training.off_policy import LAG_BUCKETS

from benchmarks.evidence.cells import SEEDS, TEST_EVERY, Cell, Overrides, Results, job_of
from benchmarks.evidence.lagged import Curve, LaggedRun

EXPERIMENT, GAME = "language_model", "sums"
LAGS = (1, 2, 4)
LORA, LORA_LAG = "tis, lora of rank 8", 2
METHODS: dict[str, Overrides] = {
    "none": {"algorithm": {"correction": "none"}},
    "tis": {"algorithm": {"correction": "tis"}},
    LORA: {
        "algorithm": {"correction": "tis"},
        "lora": {"rank": 8, "alpha": 16},
        "learner": {"lr": 1.0e-4},
    },
}
IN_FLOAT32: Overrides = {
    "generator": {"dtype": "float32", "max_requests": 256},
    "learner": {"dtype": "float32"},
    "training": {"batch_size": 16},
}
"""Alike on CPUs and GPUs; all questions of validation are decoded at once."""
GPU_ROWS = {"max_row_tokens": 1024, "microbatch_tokens": 1024}
"""The example's are for the caches of CPUs; the results are the same up to rounding."""
Job = dict[str, Any]


def cells() -> list[Cell]:
    """Return all runs, seed by seed: an early end leaves whole seeds.

    At a lag of 0 all corrections multiply by 1: one of them is run.
    """
    lagged = [(method, lag) for lag in LAGS for method in ("none", "tis")]
    ways = [("none", 0), *lagged, (LORA, LORA_LAG)]
    return [
        Cell(GAME, method, lag, seed, METHODS[method]) for seed in SEEDS for method, lag in ways
    ]


def job(cell: Cell, *, on_gpu: bool) -> Job:
    """Return the configuration of a run."""
    found = job_of(cell)
    for section, keys in IN_FLOAT32.items():
        found[section] |= keys
    if on_gpu:
        found["learner"] |= GPU_ROWS
    return found


async def measure(job: Job, lag: int, test_every: int = TEST_EVERY) -> Curve:
    """Run a job of more steps than the lag; tell beside its curve how far tokens of the full lag
    are from the weights."""
    run = LaggedRun(deepcopy(job), lag=lag, test_every=test_every)
    settle_numerics(run.config.learner, on_gpu=own_device().type == "cuda")
    curve = await run.run()
    for name in ("abs_log_ratio", "max_ratio"):
        key = f"staleness/{name}/{_bucket_of(lag)}"
        curve.told[name] = mean(numbers[key] for numbers in curve.numbers[lag:])
    if torch.cuda.is_available():  # with what torch keeps of earlier runs of this process
        curve.told["gpu_gb"] = torch.cuda.max_memory_reserved() / 1e9
    return curve


def _bucket_of(lag: int) -> str:
    """Name the learner's bucket of a lag."""
    return next(
        name
        for name, (first, last) in LAG_BUCKETS.items()
        if first <= lag and (last is None or lag <= last)
    )


def run_in_processes(
    results: Results,
    missing: Sequence[tuple[Cell, Job]],
    *,
    processes: int,
    test_every: int = TEST_EVERY,
) -> int:
    """Run jobs side by side, and write each result down as soon as it is there.

    Returns how many have no result, since a process ended with an error.
    """
    spawning = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    taken = spawning.Value("i", 0)
    workers = [
        spawning.Process(target=_work, args=(results, missing, taken, test_every), daemon=True)
        for _ in range(min(processes, len(missing)))
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return len(results.missing([cell for cell, _ in missing]))


def _work(results: Results, jobs: Sequence[tuple[Cell, Job]], taken: Any, test_every: int) -> None:
    """Run the next job that no other process has taken, until there is none."""
    console, parent = Console(stderr=True), multiprocessing.parent_process()
    while parent is None or parent.is_alive():
        with taken.get_lock():
            number, taken.value = taken.value, taken.value + 1
        if number >= len(jobs):
            return
        cell, job = jobs[number]
        started = time.perf_counter()
        curve = asyncio.run(measure(job, cell.lag, test_every))
        results.add(cell, curve)
        last = curve.validation[max(curve.validation)]
        told = f"{number + 1} of {len(jobs)}: {cell.key}: {last:.3f} after "
        console.print(f"{told}{time.perf_counter() - started:.0f} s", highlight=False)
        gc.collect()


def run_missing(
    doc: str | None,
    experiment: str,
    cells: Callable[[], Sequence[Cell]],
    job: Callable[..., Job],
    test_every: int = TEST_EVERY,
) -> None:
    """Run what an experiment lacks, in as many processes as its command says."""
    options = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    options.add_argument(
        "--processes", type=int, default=2, help="runs at the same time (default: %(default)s)"
    )
    processes: int = options.parse_args().processes
    if processes < 1:
        options.error(f"--processes is {processes}: give 1 or more")
    results, on_gpu = Results(experiment), own_device().type == "cuda"
    missing = [(cell, job(cell, on_gpu=on_gpu)) for cell in results.missing(cells())]
    for cell, found in missing:  # what is refused is so before hours have gone by
        LaggedRun(found, lag=cell.lag, test_every=test_every)
    if left := run_in_processes(results, missing, processes=processes, test_every=test_every):
        raise SystemExit(f"{left} runs have no result: see the errors above, and start it again")


if __name__ == "__main__":
    run_missing(__doc__, EXPERIMENT, cells, job)
