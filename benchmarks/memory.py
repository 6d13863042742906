"""Memory over many training steps: no process of the stack grows.

    python -m benchmarks.memory [--steps 500]

A tiny job runs through the whole stack; the resident memory of every process is read twice a
second (quick: twenty times, because its steps take milliseconds). A straight line through the
second half of the run tells the growth, beside what the process holds: the first half is for
caches and pools to fill. nats-server collects its garbage early here (GOGC), so that what is
seen is what it holds.
"""

import asyncio
import os
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.report import Report, parser
from benchmarks.stack import Run, Stack
from benchmarks.tasks import coin_job, random_model

TARGET_MB = 2.0
TARGET_SHARE = 0.02


def growth(steps: list[float], megabytes: list[float]) -> float:
    """Return the megabytes by which a line through the points rises from their first to last."""
    if len(steps) < 3 or steps[-1] == steps[0]:
        return 0.0
    slope = float(np.polyfit(steps, megabytes, 1)[0])
    return slope * (steps[-1] - steps[0])


def second_half(run: Run) -> dict[str, tuple[list[float], list[float]]]:
    """Return steps and megabytes of every process that lived through the second half."""
    num_steps = run.metrics[-1].step
    samples = [item for item in run.samples if num_steps / 2 <= item.step < num_steps]
    names = set.intersection(*(set(item.rss_mb) for item in samples)) if samples else set[str]()
    return {
        name: (
            [float(item.step) for item in samples],
            [item.rss_mb[name] for item in samples],
        )
        for name in sorted(names)
    }


async def measure(num_steps: int, sample_s: float) -> Run:
    """Run the job; the processes are read every `sample_s` seconds."""
    model = random_model("nano", width=64, layers=2)
    config = coin_job(model, num_steps, tasks=4, group=4, tokens=8)
    config["training"]["save_freq"] = 25
    os.environ["GOGC"] = "10"
    with tempfile.TemporaryDirectory() as folder:
        async with Stack(Path(folder)) as stack:
            return await stack.run(config, sample_s=sample_s)


def tell(run: Run, report: Report) -> None:
    """Print the table and the largest growth."""
    rows, grown = list[list[str]](), dict[str, tuple[float, float]]()
    for name, (steps, megabytes) in second_half(run).items():
        rise = growth(steps, megabytes)
        allowed = max(TARGET_MB, TARGET_SHARE * megabytes[0])
        grown[name] = (rise, allowed)
        row = [megabytes[0], megabytes[-1], max(megabytes), rise, allowed]
        rows.append([name, *(f"{value:.1f}" for value in row)])
    num_steps = run.metrics[-1].step
    columns = ["process", "at half", "at the end", "largest", "growth", "allowed"]
    report.table(f"Resident megabytes, second half of {num_steps} steps", columns, rows)
    worst = max(grown, key=lambda name: grown[name][0] / grown[name][1], default="")
    if worst:
        rise, allowed = grown[worst]
        report.at_most(f"growth of {worst}, the worst", rise, allowed, "MB")
    report.note(f"{num_steps} steps in {run.seconds(after=1):.0f} s.")


def main() -> None:
    """Parse the arguments, run, print and write."""
    options = parser(__doc__)
    options.add_argument("--steps", type=int, help="training steps (500; quick: 60)")
    arguments = options.parse_args()
    report = Report("memory", "Memory over many steps", quick=arguments.quick)
    num_steps = arguments.steps or (60 if arguments.quick else 500)
    tell(asyncio.run(measure(num_steps, 0.05 if arguments.quick else 0.5)), report)
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
