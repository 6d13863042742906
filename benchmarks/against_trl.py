"""End to end against TRL's GRPOTrainer: samples per second at equal reward.

    python -m benchmarks.against_trl [--task addition|tool] [--rounds 2]

Same weights, same prompts in the same order, 16 prompts × 16 samples a step, same learning rate,
clipping and number of steps; both sides may use both cores, and they run in turns. Ours is the
whole stack as a user has it: nats-server, scheduler, node, learner, one generator and one
environment host as processes. Samples per second are counted from the end of step `WARM` to the
end of the last one; reward is the mean over the first and the last ten steps.

On the tool task every step of the environment takes 100 ms with a heavy tail (slow_game.py). TRL
meets it twice: by a `rollout_func` that steps the games of all episodes at the same time, and by
its own environments, whose tool calls it makes one episode after the other.
"""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.report import Report, parser
from benchmarks.stack import REPOSITORY, Run, Stack
from benchmarks.tasks import (
    Row,
    addition_job,
    in_training_order,
    slow_calculator_job,
    warm_model,
)

WARM = 5
QUICK_TASKS = 4
ENDS = 10
THREADS = 2


@dataclass
class Side:
    """What one side did in one run."""

    samples_per_s: float
    rewards: list[float]
    run: Run | None = None


@dataclass
class Contest:
    """One task, and the runs of both sides."""

    name: str
    job: dict[str, Any]
    ways: dict[str, tuple[str, int]]
    """Name of a peer to its way to meet the environment, and how many steps it trains."""
    rows: list[Row]
    """Questions in the order of training."""
    delay_scale: float = 1.0
    warm: int = WARM
    """Steps before the clock starts."""
    peer_warm: int | None = None
    """The same for the peer; None: as many."""
    ends: int = ENDS
    """Steps whose mean reward is that before, or after."""
    pass_samples: int | None = None
    """Samples that the peer computes at once as it trains; None: those of the step."""
    num_counted: int | None = None
    """Steps of ours that count; more keep the generator busy until then. None: all."""
    more: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    """Further settings of a peer, by its name."""
    keep: Path | None = None
    """Where the model that ours has trained is kept."""
    sides: dict[str, list[Side]] = field(default_factory=dict[str, list[Side]])

    @property
    def samples(self) -> int:
        return self.job["training"]["batch_size"] * self.job["rollout"]["group_size"]

    def median(self, side: str) -> float:
        """Return the median rate of one side."""
        return median(item.samples_per_s for item in self.sides[side])


async def run_ours(contest: Contest) -> Side:
    """Train with the whole stack."""
    with tempfile.TemporaryDirectory() as folder:
        async with Stack(Path(folder)) as stack:
            run = await stack.run(contest.job)
        if contest.keep is not None:
            ignored = shutil.ignore_patterns("learner")  # the optimiser's state
            shutil.copytree(Path(run.record.run_dir) / "latest", contest.keep, ignore=ignored)
    if contest.num_counted is not None:
        del run.metrics[contest.num_counted :]
    return Side(run.samples_per_s(after=contest.warm), run.values("training_step_reward"), run)


def run_trl(contest: Contest, name: str) -> Side:
    """Train with a peer, in a process of its own."""
    job, (way, num_steps) = contest.job, contest.ways[name]
    warm = min(contest.warm if contest.peer_warm is None else contest.peer_warm, num_steps - 1)
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "way": way,
            "model": job["model"]["path"],
            "rows": contest.rows[: num_steps * job["training"]["batch_size"]],
            "batch_size": job["training"]["batch_size"],
            "group_size": job["rollout"]["group_size"],
            "max_response_tokens": job["rollout"]["max_response_tokens"],
            "num_steps": num_steps,
            "lr": job["learner"]["lr"],
            "pass_samples": contest.pass_samples,
            "threads": THREADS,
            "delay_scale": contest.delay_scale,
            "env_workers": job["env"].get("workers", 4),
            "output_dir": f"{folder}/trl",
            **contest.more.get(name, {}),
        }
        result = peer_process(Path(folder), settings)
    seconds = result["ended"][-1] - result["ended"][warm - 1]
    return Side(contest.samples * (num_steps - warm) / seconds, result["rewards"])


def peer_process(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Run TRL with these settings; return when each step ended, and its reward."""
    files = [folder / "settings.json", folder / "result.json"]
    files[0].write_text(json.dumps(settings))
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(THREADS),
        "PYTHONWARNINGS": "ignore",
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    with (folder / "log").open("w+") as log:
        command = [sys.executable, "-m", "benchmarks.trl_peer", *map(str, files)]
        done = subprocess.run(
            command, cwd=REPOSITORY, env=environment, stdout=log, stderr=log, check=False
        )
        if done.returncode:
            log.seek(0)
            raise RuntimeError(f"TRL failed:\n{log.read()[-2000:]}")
    return json.loads(files[1].read_text())


async def compete(contest: Contest, rounds: int) -> None:
    """Run all sides in turns."""
    for number in range(rounds):
        contest.sides.setdefault("tinkermq", []).append(await run_ours(contest))
        for name, (_, num_steps) in contest.ways.items():
            if number and num_steps < contest.job["training"]["num_steps"]:
                continue  # the slow peer runs once
            side = await asyncio.to_thread(run_trl, contest, name)
            contest.sides.setdefault(name, []).append(side)


def tell(contest: Contest, report: Report, target: float) -> None:
    """Print the contest's table and ratios."""
    rows = [
        [
            name,
            shown_rate(contest.median(name)),
            " ".join(shown_rate(side.samples_per_s) for side in sides),
            f"{contest.samples / contest.median(name):.3f} s",
            f"{mean(mean(side.rewards[: contest.ends]) for side in sides):.2f}",
            f"{mean(mean(side.rewards[-contest.ends :]) for side in sides):.2f}",
            str(len(sides[0].rewards)),
        ]
        for name, sides in contest.sides.items()
    ]
    columns = ["side", "samples/s", "runs", "per step", "reward before", "after", "steps"]
    report.table(contest.name, columns, rows)
    ours = contest.median("tinkermq")
    for number, name in enumerate(name for name in contest.sides if name != "tinkermq"):
        wanted = None if number else target
        report.at_least(f"{contest.name}, against {name}", ours / contest.median(name), wanted)
    tell_costs(contest, report)


def shown_rate(samples_per_s: float) -> str:
    """Return a rate with two digits at least."""
    return f"{samples_per_s:,.{0 if samples_per_s >= 10 else 2}f}"


def tell_costs(contest: Contest, report: Report) -> None:
    """Print what our processes cost per step."""
    run = contest.sides["tinkermq"][-1].run
    assert run is not None
    warm = contest.warm
    costs = run.cpu_ms_per_step(after=warm)
    rows = [[name, f"{loop:.1f}", f"{other:.1f}"] for name, (loop, other) in sorted(costs.items())]
    rows.append(["sum", *(f"{sum(item[i] for item in costs.values()):.1f}" for i in (0, 1))])
    columns = ["process", "main thread", "other threads"]
    report.table(f"{contest.name}: CPU milliseconds per step of ours", columns, rows)
    waited = mean(run.values("timing_s/wait", after=warm))
    model = mean(run.values("timing_s/update_actor", after=warm))
    wasted = run.metrics[-1].values.get("rollout/wasted_share", 0.0)
    report.note(
        f"Of a step of {run.step_s(after=warm) * 1e3:.0f} ms the learner waited "
        f"{waited * 1e3:.0f} ms for groups and computed {model * 1e3:.0f} ms; the engine was busy "
        f"{run.busy_share(after=warm):.0%}; {wasted:.0%} of the generated tokens were not trained."
    )


def contests(task: str | None, *, quick: bool) -> list[tuple[Contest, float]]:
    """Return what is measured, each with its target."""
    num_steps = WARM + 1 if quick else 80
    slow = 0.1 if quick else 1.0
    found = list[tuple[Contest, float]]()
    if task in (None, "addition"):
        job = addition_job(warm_model("addition", quick=quick), num_steps)
        rows = in_training_order("addition", num_steps * job["training"]["batch_size"])
        found.append((Contest("addition", job, {"TRL": ("none", num_steps)}, rows), 1.3))
    if task in (None, "tool"):
        num_steps = WARM + 1 if quick else 30
        job = slow_calculator_job(warm_model("calculator", quick=quick), num_steps, slow)
        ways = {"TRL, rollout_func": ("rollout", num_steps), "TRL, environments": ("tools", 2)}
        rows = in_training_order("calculator", num_steps * job["training"]["batch_size"])
        found.append((Contest("tool, slow environment", job, ways, rows, slow), 3.0))
    for contest, _ in found if quick else []:
        contest.job["training"]["batch_size"] = QUICK_TASKS
    return found


def main() -> None:
    """Parse the arguments, run all, print and write."""
    options = parser(__doc__)
    options.add_argument("--task", choices=["addition", "tool"], help="only this one")
    options.add_argument("--rounds", type=int, help="runs of each side (2; quick: 1)")
    arguments = options.parse_args()
    report = Report("against_trl", "End to end against TRL 1.16", quick=arguments.quick)
    for contest, target in contests(arguments.task, quick=arguments.quick):
        asyncio.run(compete(contest, arguments.rounds or (1 if arguments.quick else 2)))
        tell(contest, report, target)
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
