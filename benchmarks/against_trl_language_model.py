"""A language model of 135 million weights, end to end against TRL's GRPOTrainer.

    python -m benchmarks.against_trl_language_model [--task sums|slow]

SmolLM2-135M-Instruct learns the sums of `tinkermq quickstart --real` with that configuration, but
16 questions × 8 answers a step. Weights, questions in their order, learning rate, clipping and
float32 are the same on both sides, and both may use both cores. Ours is the whole stack as a user
has it, with a staleness bound of 1: the generator needs less time than the learner.

- `sums` begins with the model as it is: answers are long, and differ.
- `slow` goes on with what ours has learnt there. Every judgement takes 100 ms with a heavy tail
  (slow_game.py); TRL judges all answers at the same time.

TRL generates with transformers in one batch, and trains in passes of `PASS_SAMPLES` samples: passes
of 8 and 16 took it more CPU time.

Samples per second are counted from the end of TRL's first step, and of our step `WARM`, by when our
generator is as far ahead as `max_staleness` lets it be; it works beyond the last counted step, so
that no step is counted without its generation. Rewards are compared step by step: both sides then
trained equally often, on the same questions.
"""

import asyncio
import shutil
from importlib.resources import files
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import yaml
from tinkermq.clients.cli.quickstart import get_catalogue_model
from tinkermq.envs.games.sums import make_data
from tinkermq.schemas.config.load_config import parse_config
from tinkermq.schemas.model_catalogue import catalogue_folder

from benchmarks.against_trl import Contest, compete, run_ours, tell
from benchmarks.report import Report, parser
from benchmarks.tasks import CACHE, rows_of_job

MODEL = "smollm2"
WARM = 2
TASKS = {"sums": ("sums", 5.0), "slow": ("sums that were trained, slow environment", 8.0)}
"""Name of a task to its title and the target."""
STEPS = {"sums": (9, 4), "slow": (9, 3)}
"""Counted steps of ours, and steps of TRL."""
QUICK_STEPS = (WARM + 1, WARM + 1)
STALENESS = 1
QUESTIONS = 16
PASS_SAMPLES = 32
SLOW_GAME = "benchmarks.slow_game:SlowSumsGame"


def sums_job(num_steps: int, *, quick: bool) -> dict[str, Any]:
    """Return the quickstart's job without validation, with data of its own."""
    text = (files("tinkermq.clients") / "cli" / "sums.yaml").read_text(encoding="utf-8")
    job = yaml.safe_load(text)
    get_catalogue_model(MODEL)
    train, _ = make_data(CACHE / "sums")
    job["model"]["path"] = str(catalogue_folder(MODEL))
    job["env"] = {"game": "sums", "train_data": [str(train)], "num_val": 0}
    job["algorithm"]["clip_low"] = 0.2
    job["training"] = {"num_steps": num_steps, "batch_size": QUESTIONS, "max_staleness": STALENESS}
    del job["evaluation"]
    if quick:
        job["rollout"]["group_size"] = 4
        job["training"]["batch_size"] = 2
    return job


def trained_model(*, quick: bool) -> Path:
    """Return where the model lies that ours trains in the task `sums`."""
    return CACHE / ("sums-trained-quick" if quick else "sums-trained")


def make_contest(task: str, *, quick: bool) -> Contest:
    """Return what is measured of a task."""
    counted, peer_steps = QUICK_STEPS if quick else STEPS[task]
    job = sums_job(counted, quick=quick)
    job["training"]["num_steps"] += STALENESS
    scale = 0.0
    if task == "slow":
        scale = 0.1 if quick else 1.0
        job["model"]["path"] = str(trained_model(quick=quick))
        job["env"] |= {"game": SLOW_GAME, "kwargs": {"scale": scale}, "workers": 128}
        job["seed"] = 1  # other questions than it has learnt from
    return Contest(
        TASKS[task][0],
        job,
        {"TRL": ("sums", peer_steps)},
        rows_of_job(parse_config(job), peer_steps * job["training"]["batch_size"]),
        delay_scale=scale,
        warm=WARM,
        peer_warm=1,
        ends=1 if quick else 2,
        pass_samples=None if quick else PASS_SAMPLES,
        num_counted=counted,
        keep=trained_model(quick=quick) if task == "sums" else None,
    )


def tell_rewards(contest: Contest, report: Report) -> None:
    """Print the mean difference of the rewards of equal steps, and its standard error."""
    ours, theirs = (contest.sides[name][0].rewards for name in ("tinkermq", "TRL"))
    differences = [one - other for one, other in zip(ours, theirs, strict=False)]
    error = stdev(differences) / len(differences) ** 0.5
    report.note(
        f"{contest.name}: reward of ours less TRL's over {len(differences)} equal steps, "
        f"{mean(differences):+.3f} ± {error:.3f} (standard error of the mean). Ours trains answers "
        f"of weights up to {STALENESS} step old."
    )


def main() -> None:
    """Parse the arguments, run both sides, print and write."""
    options = parser(__doc__)
    options.add_argument("--task", choices=TASKS, help="only this one")
    arguments = options.parse_args()
    quick: bool = arguments.quick
    title = "A language model of 135 M weights against TRL 1.16"
    report = Report("against_trl_language_model", title, quick=quick)
    shutil.rmtree(trained_model(quick=quick), ignore_errors=True)
    if arguments.task == "slow":
        asyncio.run(run_ours(make_contest("sums", quick=quick)))
    for task in [arguments.task] if arguments.task else TASKS:
        contest = make_contest(task, quick=quick)
        asyncio.run(compete(contest, rounds=1))
        tell(contest, report, TASKS[task][1])
        tell_rewards(contest, report)
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
