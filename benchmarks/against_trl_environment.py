"""One environment class of TRL, trained by TRL and by tinkermq: samples per second.

    python -m benchmarks.against_trl_environment [--rounds 2]

The class, its rows in the same order, weights, 16 prompts × 16 samples a step, learning rate,
clipping and number of steps are the same (count_environment.py); an episode is one call of a tool
and an answer. Ours is the whole stack as a user has it. Samples per second are counted as in
against_trl.py.
"""

import asyncio
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.against_trl import (
    QUICK_TASKS,
    THREADS,
    WARM,
    Contest,
    Side,
    peer_process,
    run_ours,
    tell,
)
from benchmarks.count_environment import in_training_order, model, write_data
from benchmarks.report import Report, parser
from benchmarks.tasks import CACHE

TARGET = 1.0


def job(num_steps: int, *, quick: bool) -> dict[str, Any]:
    """Return the job that trains the class."""
    name, steps = ("count-quick", 60) if quick else ("count", 400)
    folder = model(CACHE / name, steps=steps)
    return {
        "model": {"path": str(folder)},
        "env": {
            "game": "trl:benchmarks.count_environment:CountEnvironment",
            "train_data": [str(write_data(CACHE / "count.jsonl"))],
            "num_val": 0,
        },
        "rollout": {
            "group_size": 16,
            "max_turns": 2,
            "max_prompt_tokens": 32,
            "max_turn_tokens": 12,
            "max_response_tokens": 32,
        },
        "generator": {"max_episodes": 512, "max_requests": 256},
        "algorithm": {"clip_low": 0.2, "clip_high": 0.28},
        "learner": {
            "lr": 2.5e-4,
            "betas": [0.9, 0.99],
            "max_row_tokens": 1024,
            "microbatch_tokens": 8192,
        },
        "training": {
            "num_steps": num_steps,
            "batch_size": QUICK_TASKS if quick else 16,
            "max_staleness": 2,
        },
    }


def run_trl(contest: Contest) -> Side:
    """Train with TRL, in a process of its own."""
    ours = contest.job
    num_steps, batch = ours["training"]["num_steps"], ours["training"]["batch_size"]
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "way": "count",
            "model": ours["model"]["path"],
            "rows": in_training_order(num_steps * batch),
            "batch_size": batch,
            "group_size": ours["rollout"]["group_size"],
            "max_response_tokens": ours["rollout"]["max_response_tokens"],
            "num_steps": num_steps,
            "lr": ours["learner"]["lr"],
            "threads": THREADS,
            "delay_scale": 0.0,
            "output_dir": f"{folder}/trl",
        }
        result = peer_process(Path(folder), settings)
    seconds = result["ended"][-1] - result["ended"][WARM - 1]
    return Side(contest.samples * (num_steps - WARM) / seconds, result["rewards"])


async def compete(contest: Contest, rounds: int) -> None:
    """Run both sides in turns."""
    for _ in range(rounds):
        contest.sides.setdefault("tinkermq", []).append(await run_ours(contest))
        side = await asyncio.to_thread(run_trl, contest)
        contest.sides.setdefault("TRL", []).append(side)


def main() -> None:
    """Parse the arguments, run both, print and write."""
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, help="runs of each side (2; quick: 1)")
    arguments = options.parse_args()
    quick: bool = arguments.quick
    report = Report("against_trl_environment", "An environment class of TRL", quick=quick)
    contest = Contest("counting", job(WARM + 1 if quick else 60, quick=quick), {}, [])
    asyncio.run(compete(contest, arguments.rounds or (1 if quick else 2)))
    tell(contest, report, TARGET)
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
