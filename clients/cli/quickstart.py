"""`tinkermq quickstart`: watch a model learn, from nothing, on this machine.

It makes a dataset and a model, starts broker, scheduler and node on free ports, trains
asynchronously with GRPO at a staleness bound of 2, and shows the reward before and after. There are
two examples. The calculator trains a model of 0.4 million parameters, warm-started to call a tool
in some of its answers and to guess in the others, which learns to call it. Sums
(`--real`) train SmolLM2-135M-Instruct, a language model, and show its answers before and after. All
files but that model are below one folder, and no process is left behind.

`tinkermq model get`, `model check` and `model list` are here, too.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from ...schemas.config.load_config import load_config
from ...schemas.job import JobRecord
from ...schemas.local.process import die_with
from ...schemas.model_catalogue import CATALOGUE, catalogue_folder, find_model
from ...schemas.wire.errors import ConfigError, ModelError, StorageError
from ..follow import RunProgress, curve_svg, text_plot
from ..home import Home
from ..pool import Pool
from ..validation import resolve_paths
from ..verify import Verification, verify
from .checks import check_model_kind, print_checks
from .live import print_submitted
from .output import (
    literal,
    print_commands,
    print_note,
    print_plain,
    print_rows,
    print_table,
    print_text,
    stdout,
)
from .session import with_pool
from .stack import check_worker, start_detached, stop_detached
from .supervisor import StackOptions
from .train import show_run

# Before training: configuration, model and data.


@dataclass(frozen=True)
class QuickstartExample:
    """A task for the quickstart."""

    game: str
    """Its configuration is `<game>.yaml` beside this module."""
    validated_on: str
    catalogue_model: str | None = None
    """Model of the catalogue; None: one that is warm-started here."""
    num_questions: int = 0
    """Questions whose answers are shown before and after."""


CALCULATOR = QuickstartExample("calculator", "held-out products")
SUMS = QuickstartExample("sums", "held-out sums", catalogue_model="smollm2", num_questions=3)
_OUTPUTS = re.compile(r"\boutputs/[\w./-]+")
"""The paths in the packaged configuration."""
_HEAD = "# Written by `tinkermq quickstart`, which writes it again: change a copy.\n"


def write_config(folder: Path, example: QuickstartExample = CALCULATOR) -> Path:
    """Write the example's configuration, with its paths below `folder`; return the file."""
    text = (files("tinkermq.clients") / "cli" / f"{example.game}.yaml").read_text(encoding="utf-8")

    def below(match: re.Match[str]) -> str:
        # JSON strings are valid YAML, whatever characters the folder's name has.
        return json.dumps(str(folder / match[0].removeprefix("outputs/")), ensure_ascii=False)

    if folder != Path("outputs"):
        text = _OUTPUTS.sub(below, text)
        text += f"output_dir: {json.dumps(str(folder), ensure_ascii=False)}\n"
    file = folder / "quickstart.yaml"
    file.write_text(_HEAD + text, encoding="utf-8")
    return file


def get_catalogue_model(name: str) -> None:
    """Fetch a model of the catalogue, unless it exists; raises ModelError."""
    model = catalogue_folder(name)
    if (model / "config.json").is_file():
        print_plain(f"model      {model} (fetched before)")
    elif code := run_module("tinkermq.actors.get_model", name, str(model)):
        raise ModelError(
            f"model {name} could not be fetched: exit code {code}", hint="its message is above"
        )


def make_model(folder: Path, game: str) -> None:
    """Warm-start the model, unless it exists; raises ModelError."""
    model = folder / "models" / game
    print_plain(f"model      {model} (made once, in a minute or two)")
    model.parent.mkdir(parents=True, exist_ok=True)
    code = run_module("tinkermq.actors.warm_start", game, str(model))
    if code:
        raise ModelError(
            f"the warm start ended with code {code}",
            hint="its message is above; `tinkermq doctor` checks this machine",
        )


def run_module(module: str, *words: str) -> int:
    """Run a module of the actors in a process of its own, which needs torch; return its code."""
    with subprocess.Popen(
        [sys.executable, "-P", "-m", module, *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        # Ctrl-C reaches only this process, which then ends the module; if this process is killed,
        # the kernel ends the module.
        start_new_session=True,
        preexec_fn=die_with(os.getpid(), signal.SIGTERM),
    ) as process:
        try:
            return process.wait()
        except BaseException:
            process.terminate()  # the module removes its unfinished files
            raise


def prepare_data(folder: Path, game: str) -> None:
    """Write the dataset, unless it exists."""
    place = folder / "data" / game
    train, val = place / "train.parquet", place / "val.parquet"
    if not (train.exists() and val.exists()):
        import_module(f"tinkermq.envs.games.{game}").make_data(place)
    print_plain(f"data       {train}, {val}")


# After training: reward before and after, its curve, and next commands.

SMOOTH_STEPS = 5
_MAX_WIDTH = 72

Points = list[tuple[float, float]]


def print_outcome(
    progress: RunProgress,
    verification: Verification | None,
    config: Path,
    example: QuickstartExample,
) -> int:
    """Print reward before and after, the curve, the run folder, next commands, and what is proved.

    `verification` is that of a run that has completed.
    """
    record = progress.record
    if verification is None:
        print_text(f"[bold red]{record.state}[/]  {literal(record.reason)}")
        print_plain(f"logs       {record.run_dir}/logs")
        return 1
    smoothed, validation = smoothed_rewards(progress), sorted(progress.validation.items())
    width = min(stdout().width - 10, _MAX_WIDTH)
    print_plain(f"\n{'':>8}reward over steps: • trained episodes, x validation")
    print_plain(text_plot({"•": smoothed, "x": validation}, width=width))
    picture = Path(record.run_dir) / "reward.svg"
    curves = {"reward of the trained episodes": smoothed, "validation": validation}
    picture.write_text(curve_svg(curves), encoding="utf-8")
    took = (record.finished or time.time()) - (record.started or record.created)
    print_text(
        f"\n[bold green]reward {validation[0][1]:.2f} → {validation[-1][1]:.2f}[/]  "
        f"on {example.validated_on}, {progress.step} steps in {took:.0f} s"
    )
    if example.num_questions:
        _print_answers(record, example.num_questions)
    print_plain(f"plot       {_short(picture)}")
    print_plain(f"run folder {_short(Path(record.run_dir))}")
    print_plain("\ntry next")
    _print_next(config)
    print_plain(f"\ntinkermq verify: {verification}")
    return 0 if verification.passed else 1


def _print_answers(record: JobRecord, count: int) -> None:
    """Print answers of the model before and after, to questions of the validation set.

    They are the first questions of the set; decoding is greedy.
    """
    model, data = record.config["model"]["path"], record.config["env"]["val_data"][0]
    words = [model, str(Path(record.run_dir) / "latest"), data, str(count)]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "tinkermq.actors.show_answers", *words],
        check=False,
        capture_output=True,
        text=True,
        start_new_session=True,
        preexec_fn=die_with(os.getpid()),
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        print_note(f"the answers cannot be shown: {last}")
        return
    rows = [tuple(map(str, json.loads(line))) for line in done.stdout.splitlines()]
    print_plain("")
    print_table(("question", "before", "after"), rows)


def smoothed_rewards(progress: RunProgress) -> Points:
    """Return a moving average of the rewards by step."""
    rewards = sorted(progress.rewards.items())
    points: Points = []
    for end, (step, _) in enumerate(rewards, 1):
        window = [reward for _, reward in rewards[max(0, end - SMOOTH_STEPS) : end]]
        points.append((step, sum(window) / len(window)))
    return points


def _print_next(config: Path) -> None:
    tinkermq, written = shlex.quote(_program()), shlex.quote(str(config))
    print_commands(
        {
            f"{tinkermq} up": "a stack that stays",
            f"{tinkermq} train {written} training.max_staleness=0": "the same, synchronously",
            f"{tinkermq} env check {written}": "how a game is tested without a model",
            f"{tinkermq} env new my-game": "a game of your own",
        }
    )


def _program() -> str:
    """Return the command for users: its name if it is on the PATH, else its full path."""
    here = Path(sys.executable).parent / "tinkermq"
    path = shutil.which("tinkermq")
    same = path is not None and Path(path).resolve() == here.resolve()
    return "tinkermq" if same else _short(here)


def _short(path: Path) -> str:
    """Return a path relative to the working folder if that is shorter."""
    relative = os.path.relpath(path)
    return relative if len(relative) < len(str(path)) else str(path)


CPU_SLOTS = 2
"""One slot for the learner and one for the generator, each with half of the cores."""
INTERRUPTED = 130


def quickstart(*overrides: str, real: bool = False, output_dir: Path = Path("outputs")) -> int:
    """Train a model on this machine, from scratch, and watch its reward rise.

    It needs no checkout, no GPU and no pool. It creates a model of 0.4 million parameters and its
    data (once), starts its own stack, trains the two-turn calculator task, and stops the stack.
    No process is left behind, also after Ctrl-C.

    Parameters
    ----------
    overrides
        `section.key=value`, such as `training.num_steps=20`.
    real
        Train a language model of 135 million parameters on sums instead, in six to eight minutes
        on two cores; fetches 93 MB once, and shows its answers before and after.
    output_dir
        Folder for model, data, configuration and run.
    """
    check_worker()
    example = SUMS if real else CALCULATOR
    _make_folder(output_dir)
    try:
        with _terminated_as_interrupted():
            config = write_config(output_dir, example)
            if example.catalogue_model:
                get_catalogue_model(example.catalogue_model)
            else:
                make_model(output_dir, example.game)
            prepare_data(output_dir, example.game)
            progress, verification = _train_in_own_stack(output_dir, config, overrides)
    except KeyboardInterrupt:
        print_note("interrupted; everything was stopped")
        return INTERRUPTED
    return print_outcome(progress, verification, config, example)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"the folder {folder} cannot be made: {error.strerror}",
            hint="change to a writable folder, or give --output-dir DIR",
        ) from error


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Handle SIGTERM like Ctrl-C: stop everything that was started."""
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _train_in_own_stack(
    folder: Path, config: Path, overrides: tuple[str, ...]
) -> tuple[RunProgress, Verification | None]:
    """Start a stack on free ports, train in it, and always stop it."""
    values = load_config(config, overrides).model_dump(exclude_unset=True)
    with tempfile.TemporaryDirectory(
        prefix=".stack-", dir=folder.resolve(), ignore_cleanup_errors=True
    ) as place:  # after a second interrupt, the broker may still write
        home = Home(place)
        options = StackOptions(
            home=home.folder, cpu_slots=CPU_SLOTS, node=f"quickstart-{os.getpid()}"
        )
        state = start_detached(options, die_with_parent=True)
        print_text(f"stack      {state.url}: nats-server, scheduler, one node")
        try:
            return with_pool(state.url, lambda pool: _train(pool, resolve_paths(values, state.url)))
        finally:
            stop_detached(home, state)


async def _train(pool: Pool, config: dict[str, Any]) -> tuple[RunProgress, Verification | None]:
    record = await pool.submit(config)
    print_submitted(record, commands=False)
    progress = await show_run(pool, record)
    has_completed = progress.record.state == "COMPLETED"
    return progress, await verify(pool.broker, progress.record) if has_completed else None


# -- models by short names, as folders on this machine ---------------------------------------------


def get_model(
    source: str,
    *,
    output: Annotated[Path | None, Parameter(alias="-o")] = None,
    dtype: Literal["float32", "bfloat16"] = "float32",
) -> int:
    """Write a model as an ordinary Hugging Face folder.

    `model.path: NAME` then names a model of the catalogue in configurations, and NAME serves it.

    Parameters
    ----------
    source
        A name of `tinkermq model list`, a GGUF file, a folder, or a model of the hub (owner/name).
    output
        The new folder. Default for the catalogue: below $TINKERMQ_CACHE (`~/.cache/tinkermq`).
    dtype
        Format of the weights.
    """
    target = _target(source, output)
    if (target / "config.json").is_file():
        if output is not None:
            raise StorageError(f"{target} holds a model", hint="remove it, or name another folder")
        print_plain(f"model      {target} (fetched before)")
        return 0
    if target.exists():
        raise StorageError(f"{target} exists", hint="remove it, or name another folder")
    check_worker("models are converted on this machine")
    return run_module("tinkermq.actors.get_model", source, str(target), "--dtype", dtype)


def _target(source: str, output: Path | None) -> Path:
    if output is not None:
        return output.absolute()
    if source in CATALOGUE:
        return catalogue_folder(source)
    raise ConfigError(
        f"{source!r} is not in the catalogue ({', '.join(CATALOGUE)}), and no folder is named",
        hint=f"tinkermq model get {source} --output FOLDER",
    )


def check_model(
    model: str, /, *, engine: Literal["transformers", "vllm"] = "transformers", json: bool = False
) -> int:
    """Check whether a model can be trained and served here, by its configuration alone.

    Tells its family and kinds of layers, how the learner and the engine compute it, the layers that
    LoRA adapts, whether it takes images, and its memory. No weights are read: a folder with
    config.json is enough. Submissions check the same.

    Parameters
    ----------
    model
        A folder, a name of `tinkermq model list`, or a model of the hub (owner/name).
    engine
        The engine that generates.
    json
        Print JSON.
    """
    check_worker("models are checked on this machine")
    path = str(Path(find_model(model)).expanduser())
    return print_checks(check_model_kind(path, engine), as_json=json, model=model)


def list_models(*, json: bool = False) -> int:
    """List the models that have short names."""
    rows = [
        {
            "name": name,
            "title": model.title,
            "weights": model.num_weights,
            "source": model.requirement,
            "folder": str(folder) if (folder := catalogue_folder(name)).is_dir() else None,
        }
        for name, model in CATALOGUE.items()
    ]
    shown = [
        (
            row["name"],
            row["title"],
            f"{int(str(row['weights'])) / 1e6:,.0f} M",
            row["source"],
            row["folder"] or "tinkermq model get " + str(row["name"]),
        )
        for row in rows
    ]
    return print_rows(rows, ("name", "model", "weights", "from", "folder"), shown, as_json=json)
