"""Asynchronous against synchronous training in this system: staleness bound 2 against 0.

    python -m benchmarks.asynchrony [--rounds 2]

The same job twice, learner and generator on a core each. With a bound of 0 a step generates, then
trains; with 2 both go on at the same time, at best twice as fast where both phases take equal
time. They are made equal first, by the number of requests that decode together, from some
synchronous steps; the table tells both phases as measured in the synchronous runs.
"""

import asyncio
import tempfile
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.report import Report, parser
from benchmarks.stack import Run, Stack
from benchmarks.tasks import Shape, coin_job, random_model

WARM = 3
TASKS, GROUP, TOKENS = 8, 8, 32
SHAPE: Shape = {"width": 256, "layers": 4, "heads": 4, "kv_heads": 2, "mlp_width": 672}
NANO: Shape = {"width": 64, "layers": 2}
SMALLEST = 4


def job(model: Path, num_steps: int, staleness: int, requests: int) -> dict[str, Any]:
    """Return the job with one bound, `requests` of its episodes decoding together."""
    config = coin_job(
        model,
        num_steps,
        tasks=TASKS,
        group=GROUP,
        tokens=TOKENS,
        staleness=staleness,
    )
    config["generator"]["max_requests"] = requests
    return config


def phases(run: Run) -> tuple[float, float]:
    """Return the seconds per step in which the learner waits, and in which it trains."""
    train_s = mean(run.values("timing_s/update_actor", after=WARM))
    return mean(run.values("timing_s/wait", after=WARM)), train_s


async def equalise(stack: Stack, model: Path, num_steps: int, tries: int) -> int:
    """Return how many requests shall decode together so that both phases take equal time."""
    requests = TASKS * GROUP
    for _ in range(tries):
        generate_s, train_s = phases(await stack.run(job(model, num_steps, 0, requests)))
        wanted = round(requests * generate_s / train_s)
        requests = min(max(wanted, SMALLEST), TASKS * GROUP)
    return requests


async def measure(
    model: Path, *, num_steps: int, calibration: int, rounds: int
) -> dict[int, list[Run]]:
    """Run both bounds in turns; return the runs by bound."""
    runs: dict[int, list[Run]] = {0: [], 2: []}
    with tempfile.TemporaryDirectory() as folder:
        async with Stack(Path(folder)) as stack:
            requests = await equalise(stack, model, calibration, 2 if rounds > 1 else 1)
            for _ in range(rounds):
                for staleness, done in runs.items():
                    done.append(await stack.run(job(model, num_steps, staleness, requests)))
    return runs


def tell(runs: dict[int, list[Run]], report: Report) -> None:
    """Print the table and the ratio."""
    rates = {bound: [run.samples_per_s(after=WARM) for run in done] for bound, done in runs.items()}
    rows = [
        [
            f"η = {bound}",
            f"{median(rates[bound]):,.1f}",
            " ".join(f"{rate:,.1f}" for rate in rates[bound]),
            f"{median(run.step_s(after=WARM) for run in done):.3f} s",
            f"{median(phases(run)[0] for run in done):.3f} s",
            f"{median(phases(run)[1] for run in done):.3f} s",
            f"{mean(mean(run.values('staleness/lag_mean', after=WARM)) for run in done):.2f}",
        ]
        for bound, done in runs.items()
    ]
    columns = ["bound", "samples/s", "runs", "per step", "learner waits", "trains", "mean lag"]
    report.table("Staleness bound 2 against 0", columns, rows)
    times = [phases(run) for run in runs[0]]
    generate_s, train_s = (median(item[i] for item in times) for i in (0, 1))
    report.note(
        f"Synchronous phases: generating {generate_s:.3f} s, training {train_s:.3f} s per step; "
        f"at best {(generate_s + train_s) / max(generate_s, train_s):.2f}× can be won by overlap "
        f"({runs[0][0].record.config['generator']['max_requests']} requests decode together)."
    )
    report.at_least("asynchronous over synchronous", median(rates[2]) / median(rates[0]), 1.6)


def main() -> None:
    """Parse the arguments, run, print and write."""
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, help="runs of each bound (2; quick: 1)")
    arguments = options.parse_args()
    quick = arguments.quick
    report = Report("asynchrony", "Asynchronous against synchronous training", quick=quick)
    measuring = measure(
        random_model("nano", **NANO) if quick else random_model("tiny", **SHAPE),
        num_steps=WARM + (2 if quick else 25),
        calibration=WARM + (1 if quick else 6),
        rounds=arguments.rounds or (1 if quick else 2),
    )
    tell(asyncio.run(measuring), report)
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
