"""Whether a tiny model learns gomoku on two CPU cores: against opponents, and against itself.

    python -m benchmarks.evidence.gomoku_curve [--plot]

Runs what has no line in results/gomoku.jsonl yet: the two examples for a small board, through the
whole stack, with three seeds each. Nothing was tuned on these seeds. Every validation plays half of
its games against the random player and half against the one-ply opponent. `--plot` draws the
curves and fills the page's table from the results alone.
"""

import argparse
import asyncio
import json
import tempfile
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from tinkermq.clients.follow import follow_run
from tinkermq.schemas.job import JobRecord
from tinkermq.schemas.metric import Metric

from benchmarks.evidence.cells import RESULTS
from benchmarks.stack import REPOSITORY, Stack
from benchmarks.tasks import warm_model

SEEDS = (101, 102, 103)
EXAMPLES = {"opponents": "gomoku_small", "self-play": "gomoku_small_self_play"}
OPPONENTS, COLOURS = ("random", "one_ply"), ("tab:blue", "tab:orange")
FILE = RESULTS / "gomoku.jsonl"
PAGE = REPOSITORY / "docs" / "games" / "gomoku.md"
PICTURE = REPOSITORY / "docs" / "images" / "gomoku-learning.png"
DEADLINE_S = 1800.0


def job_of(name: str, seed: int) -> dict[str, Any]:
    """Return the configuration of a run: the example's with its own seed."""
    job: dict[str, Any] = yaml.safe_load((REPOSITORY / "examples" / f"{name}.yaml").read_text())
    job["model"]["path"] = str(warm_model("gomoku"))
    return job | {"seed": seed}


async def learn(job: dict[str, Any]) -> dict[str, Any]:
    """Run a job on a stack of its own; return win rates by step, and the seconds that it took."""
    with tempfile.TemporaryDirectory() as folder:
        async with Stack(Path(folder), slots=4) as stack, asyncio.timeout(DEADLINE_S):
            started = time.time()
            record = await stack.pool.submit({"output_dir": f"{folder}/runs", **job})
            points: list[dict[str, float]] = []
            async with aclosing(follow_run(stack.pool, record)) as updates:
                async for update in updates:
                    if isinstance(update, Metric) and "val/mean_score" in update.values:
                        points.append(point(update, started))
                    elif isinstance(update, JobRecord):
                        record = update
            if record.state != "COMPLETED":
                raise RuntimeError(f"the job is {record.state}: {record.reason}")
    points.sort(key=lambda one: one["step"])
    return {"seconds": round(time.time() - started, 1), "points": points}


def point(metric: Metric, started: float) -> dict[str, float]:
    """Return what one validation says."""
    values = metric.values
    return {
        "step": metric.step,
        "after_s": round(metric.time - started, 1),
        **{name: round(values[f"val_type/{name}/success_rate"], 4) for name in OPPONENTS},
        "invalid_moves": round(values["val_game/invalid_moves"], 4),
        "moves": round(values["val_game/steps"], 3),
    }


def results() -> list[dict[str, Any]]:
    """Return what was measured."""
    return [json.loads(line) for line in FILE.read_text().splitlines()] if FILE.is_file() else []


def measure(console: Console) -> None:
    """Run what is missing, one after the other."""
    there = {(row["way"], row["seed"]) for row in results()}
    for seed in SEEDS:
        for way, name in EXAMPLES.items():
            if (way, seed) in there:
                continue
            row: dict[str, Any] = {"way": way, "seed": seed} | asyncio.run(
                learn(job_of(name, seed))
            )
            with FILE.open("a") as file:
                file.write(json.dumps(row) + "\n")
            console.print(f"{way} {seed}: {row['points'][-1]} after {row['seconds']} s")


def plot() -> None:
    """Draw the win rates of all runs over the steps, a panel for each way to learn."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(EXAMPLES), figsize=(9, 3.6), sharey=True)
    for panel, way in zip(panels, EXAMPLES, strict=True):
        runs = [row for row in results() if row["way"] == way]
        for opponent, colour in zip(OPPONENTS, COLOURS, strict=True):
            for row in runs:
                steps, rates = zip(*((p["step"], p[opponent]) for p in row["points"]), strict=True)
                label = f"against {opponent}" if row is runs[0] else None
                panel.plot(steps, rates, color=colour, linewidth=1.4, alpha=0.75, label=label)
        panel.set(title=f"learning from {way}", xlabel="step", ylim=(0, 1))
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("win rate")
    panels[0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=90)


def filled(page: str) -> str:
    """Return the page with its table as the results say it is."""
    head, first, rest = page.partition("<!-- curves -->\n")
    last = "<!-- end of curves -->"
    assert last in rest, f"{PAGE} has no place for the table"
    return f"{head}{first}\n{table()}\n\n{last}{rest.partition(last)[2]}"


def table() -> str:
    """Return a row for each run: win rates and invalid moves, before and after."""
    heads = [f"against {name}" for name in OPPONENTS]
    lines = [["learns from", "seed", *heads, "invalid moves a game", "seconds"]]
    for row in sorted(results(), key=lambda row: (row["way"], row["seed"])):
        before, after = row["points"][0], row["points"][-1]
        rates = [f"{before[name]:.0%} → {after[name]:.0%}" for name in OPPONENTS]
        invalid = f"{before['invalid_moves']:.2f} → {after['invalid_moves']:.2f}"
        lines.append([row["way"], str(row["seed"]), *rates, invalid, f"{row['seconds']:.0f}"])
    head, *body = (f"| {' | '.join(line)} |" for line in lines)
    return "\n".join([head, f"|{'---|' * len(lines[0])}", *body])


def main() -> None:
    """Parse the command line; measure or draw."""
    options = argparse.ArgumentParser(prog="python -m benchmarks.evidence.gomoku_curve")
    options.add_argument("--plot", action="store_true", help="tell what was measured")
    if not options.parse_args().plot:
        measure(Console(stderr=True))
    PAGE.write_text(filled(PAGE.read_text()))
    plot()


if __name__ == "__main__":
    main()
