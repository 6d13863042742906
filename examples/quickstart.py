"""The quickstart: watch a tiny model learn to use a tool, from nothing, on this machine.

What `make quickstart` runs. It makes a dataset (parquet) and a warm-started model of 0.4 million
parameters (both kept under outputs/), starts broker, scheduler and node on free ports, trains the
two-turn calculator task asynchronously with GRPO at a staleness bound of 2, and shows the reward
before and after. The warm start teaches the model to call the tool in some of its answers and to
guess in the others; reinforcement learning finds out by itself which of the two pays.
No process is left behind, also not after Ctrl-C.
"""

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.markup import escape
from tinkermq.actors.recipes import is_made
from tinkermq.broker.client.connection import connect
from tinkermq.clients.cli.pool.stack import start_detached, stop_detached
from tinkermq.clients.cli.pool.supervisor import StackOptions
from tinkermq.clients.cli.runs.live import announce
from tinkermq.clients.cli.runs.train import show_run
from tinkermq.clients.home import Home
from tinkermq.clients.pool import Pool
from tinkermq.clients.progress import RunProgress
from tinkermq.clients.text_plot import text_plot
from tinkermq.envs.games.calculator import make_data
from tinkermq.schemas.config.load_config import load_config
from tinkermq.schemas.wire.errors import TinkermqError

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "examples" / "calculator.yaml"
OUTPUTS = ROOT / "outputs"
MODEL = OUTPUTS / "models" / "calculator"
DATA = OUTPUTS / "data" / "calculator"
SMOOTH_STEPS = 5

console = Console(soft_wrap=True)


def main() -> int:
    """Prepare, train, and say what came of it; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("overrides", nargs="*", help="configuration keys: training.num_steps=20")
    overrides = parser.parse_args().overrides
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        make_model()
        train, val = prepare_data()
        progress = train_in_own_stack(
            [
                f"model.path={MODEL}",
                f"env.train_data=[{train}]",
                f"env.val_data=[{val}]",
                f"output_dir={OUTPUTS}",
                # Validate as one trains, by sampling: greedily the warm start looks better.
                "evaluation.temperature=1.0",
                *overrides,
            ]
        )
    except TinkermqError as error:
        console.print(f"[bold red]error:[/] {escape(str(error))}")
        return 1
    except KeyboardInterrupt:
        console.print("interrupted; everything was stopped")
        return 130
    return conclude(progress)


def make_model() -> None:
    """Warm-start the model, unless it is there."""
    if is_made(MODEL, "calculator"):
        console.print(f"model      {_short(MODEL)} (made before)")
        return
    console.print("model      making it on this machine, a minute or two, once")
    MODEL.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "tinkermq.actors.warm_start", "calculator", str(MODEL)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.run(command, check=False, env=environment)
    if process.returncode:
        raise TinkermqError(
            f"the warm start ended with code {process.returncode}",
            hint="its message is above; `tinkermq doctor` checks this machine",
        )


def prepare_data() -> tuple[Path, Path]:
    """Write the dataset, unless it is there."""
    train, val = DATA / "train.parquet", DATA / "val.parquet"
    if not (train.exists() and val.exists()):
        train, val = make_data(DATA)
    console.print(f"data       {_short(train)}, {_short(val)}")
    return train, val


def train_in_own_stack(overrides: list[str]) -> RunProgress:
    """Bring a stack up on free ports, train in it, and take it down whatever happens."""
    config = load_config(CONFIG, overrides).model_dump(exclude_unset=True)
    with tempfile.TemporaryDirectory(prefix="tinkermq-quickstart-") as folder:
        home = Home(folder)
        options = StackOptions(home=home.folder, slots=2, node=f"quickstart-{os.getpid()}")
        state = start_detached(options, die_with_parent=True)
        console.print(f"stack      {state.url}: nats-server, scheduler, one node")
        try:
            return asyncio.run(_train(state.url, config))
        finally:
            stop_detached(home, state)


async def _train(url: str, config: dict[str, object]) -> RunProgress:
    async with await connect(url, name="quickstart") as broker:
        pool = Pool(broker)
        record = await pool.submit(config)
        announce(record, commands=False)
        return await show_run(pool, record)


def conclude(progress: RunProgress) -> int:
    """Print reward before and after, the curve, the run folder, and what to try next."""
    record = progress.record
    if record.state != "COMPLETED":
        console.print(f"[bold red]{record.state}[/]  {escape(record.reason)}")
        console.print(f"logs       {record.run_dir}/logs")
        return 1
    steps = sorted(progress.validation)
    before, after = progress.validation[steps[0]], progress.validation[steps[-1]]
    plot_in_terminal(progress)
    picture = plot_to_file(progress, Path(record.run_dir) / "reward.png")
    took = (record.finished or time.time()) - (record.started or record.created)
    console.print(
        f"\n[bold green]reward {before:.2f} → {after:.2f}[/]  on held-out products, "
        f"{progress.step} steps in {took:.0f} s"
    )
    console.print(f"plot       {_short(picture)}")
    console.print(f"run folder {_short(Path(record.run_dir))}")
    console.print("\ntry next")
    tinkermq = _short(Path(sys.executable).parent / "tinkermq")
    config = _short(CONFIG)
    commands = {
        f"{tinkermq} up": "a stack that stays",
        f"{tinkermq} train {config} training.max_staleness=0": "the same, synchronously",
        f"{tinkermq} env check {config}": "how a game is tested without a model",
    }
    width = max(map(len, commands))
    for command, meaning in commands.items():
        console.print(f"  {command:<{width}}   [dim]{meaning}[/]")
    return 0


def plot_in_terminal(progress: RunProgress) -> None:
    """Draw reward and validation over the steps with characters."""
    curves = {
        "•": list(zip(*_smoothed(progress), strict=True)),
        "x": list(zip(*_validation(progress), strict=True)),
    }
    width = min(console.width - 10, 72)
    console.print(f"\n{'':>8}reward over steps: • trained episodes, x validation")
    console.print(text_plot(curves, width=width), highlight=False, markup=False)


def plot_to_file(progress: RunProgress, path: Path) -> Path:
    """Draw the same into a PNG; return its path."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), dpi=150, layout="constrained")
    rewards = sorted(progress.rewards.items())
    axes.plot(*zip(*rewards, strict=True), color="tab:blue", alpha=0.25)
    axes.plot(*_smoothed(progress), color="tab:blue", label="reward of the trained episodes")
    axes.plot(*_validation(progress), "o--", color="tab:orange", label="validation")
    axes.set(xlabel="optimiser step", ylabel="reward", ylim=(0, 1), title=progress.record.name)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)
    pyplot.close(figure)
    return path


def _smoothed(progress: RunProgress) -> tuple[list[int], list[float]]:
    steps = sorted(progress.rewards)
    means: list[float] = []
    for place in range(len(steps)):
        window = steps[max(0, place - SMOOTH_STEPS + 1) : place + 1]
        means.append(sum(progress.rewards[step] for step in window) / len(window))
    return steps, means


def _validation(progress: RunProgress) -> tuple[list[int], list[float]]:
    steps = sorted(progress.validation)
    return steps, [progress.validation[step] for step in steps]


def _short(path: Path) -> str:
    """Return a path relative to where the user is, if that is shorter."""
    relative = os.path.relpath(path)
    return relative if len(relative) < len(str(path)) else str(path)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
