"""What came of the quickstart: reward before and after, its curve, and what to try next."""

import os
import shutil
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from ...progress import RunProgress
from ...runs.curve import curve_svg
from ...text_plot import text_plot
from ..output import literal, print_commands, say, say_plain, stdout

SMOOTH_STEPS = 5
_MAX_WIDTH = 72

Points = list[tuple[float, float]]


def conclude(progress: RunProgress, config: Path) -> int:
    """Print reward before and after, the curve, the run folder, and what to try next."""
    record = progress.record
    if record.state != "COMPLETED":
        say(f"[bold red]{record.state}[/]  {literal(record.reason)}")
        say_plain(f"logs       {record.run_dir}/logs")
        return 1
    smoothed, validation = smoothed_rewards(progress), _points(progress.validation.items())
    width = min(stdout().width - 10, _MAX_WIDTH)
    say_plain(f"\n{'':>8}reward over steps: • trained episodes, x validation")
    say_plain(text_plot({"•": smoothed, "x": validation}, width=width))
    picture = Path(record.run_dir) / "reward.svg"
    curves = {"reward of the trained episodes": smoothed, "validation": validation}
    picture.write_text(curve_svg(curves), encoding="utf-8")
    took = (record.finished or time.time()) - (record.started or record.created)
    say(
        f"\n[bold green]reward {validation[0][1]:.2f} → {validation[-1][1]:.2f}[/]  "
        f"on held-out products, {progress.step} steps in {took:.0f} s"
    )
    say_plain(f"plot       {_short(picture)}")
    say_plain(f"run folder {_short(Path(record.run_dir))}")
    say_plain("\ntry next")
    _print_next(config)
    return 0


def smoothed_rewards(progress: RunProgress) -> Points:
    """Return for each step the mean of its reward and of those of some steps before."""
    rewards = sorted(progress.rewards.items())
    points: Points = []
    for end, (step, _) in enumerate(rewards, 1):
        window = [reward for _, reward in rewards[max(0, end - SMOOTH_STEPS) : end]]
        points.append((step, sum(window) / len(window)))
    return points


def _points(values: Iterable[tuple[int, float]]) -> Points:
    return [(step, value) for step, value in sorted(values)]


def _print_next(config: Path) -> None:
    tinkermq = _program()
    print_commands(
        {
            f"{tinkermq} up": "a stack that stays",
            f"{tinkermq} train {config} training.max_staleness=0": "the same, synchronously",
            f"{tinkermq} env check {config}": "how a game is tested without a model",
            f"{tinkermq} env new my-game": "a game of your own",
        }
    )


def _program() -> str:
    """Return how this command line is typed: by its name where that finds this one."""
    here = Path(sys.executable).parent / "tinkermq"
    found = shutil.which("tinkermq")
    same = found is not None and Path(found).resolve() == here.resolve()
    return "tinkermq" if same else _short(here)


def _short(path: Path) -> str:
    """Return a path relative to where the user is, if that is shorter."""
    relative = os.path.relpath(path)
    return relative if len(relative) < len(str(path)) else str(path)
