"""`tinkermq quickstart`: watch a tiny model learn to use a tool, from nothing, on this machine.

It makes a dataset and a warm-started model of 0.4 million parameters, starts broker, scheduler and
node on free ports, trains the two-turn calculator task asynchronously with GRPO at a staleness
bound of 2, and shows the reward before and after. The warm start teaches the model to call the tool
in some of its answers and to guess in the others; reinforcement learning finds out by itself which
of the two pays. All files are below one folder, and no process is left behind.
"""

import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from ....schemas.config.load_config import load_config
from ....schemas.wire.errors import StorageError
from ...home import Home
from ...pool import Pool
from ...progress import RunProgress
from ...validation.paths import resolve_paths
from ..output import note, say
from ..pool.stack import start_detached, stop_detached
from ..pool.supervisor import StackOptions
from ..runs.live import announce
from ..runs.train import show_run
from ..session import with_pool
from .preparing import check_worker, make_model, prepare_data, write_config
from .result import conclude

SLOTS = 2
"""One of the learner, one of the generator."""
INTERRUPTED = 130


def quickstart(*overrides: str, output_dir: Path = Path("outputs")) -> int:
    """Train a tiny model on this machine, from nothing, and watch its reward rise.

    It needs no checkout, no GPU and no pool: it makes a model of 0.4 million parameters and its
    data (once), starts a stack of its own, trains the two-turn calculator task in it, and stops
    the stack. No process is left behind, also not after Ctrl-C.

    Parameters
    ----------
    overrides
        `section.key=value`, such as `training.num_steps=20`.
    output_dir
        Everything is written below this folder: model, data, configuration and run.
    """
    check_worker()
    _make_folder(output_dir)
    try:
        with _terminated_as_interrupted():
            config = write_config(output_dir)
            make_model(output_dir)
            prepare_data(output_dir)
            progress = _train_in_own_stack(output_dir, config, overrides)
    except KeyboardInterrupt:
        note("interrupted; everything was stopped")
        return INTERRUPTED
    return conclude(progress, config)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"the folder {folder} cannot be made: {error.strerror}",
            hint="go where you may write, or give --output-dir DIR",
        ) from error


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Let SIGTERM do what Ctrl-C does: what was started is stopped."""
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _train_in_own_stack(folder: Path, config: Path, overrides: tuple[str, ...]) -> RunProgress:
    """Bring a stack up on free ports, train in it, and take it down whatever happens."""
    given = load_config(config, overrides).model_dump(exclude_unset=True)
    with tempfile.TemporaryDirectory(prefix=".stack-", dir=folder.resolve()) as place:
        home = Home(place)
        options = StackOptions(home=home.folder, slots=SLOTS, node=f"quickstart-{os.getpid()}")
        state = start_detached(options, die_with_parent=True)
        say(f"stack      {state.url}: nats-server, scheduler, one node")
        try:
            return with_pool(state.url, lambda pool: _train(pool, resolve_paths(given, state.url)))
        finally:
            stop_detached(home, state)


async def _train(pool: Pool, config: dict[str, Any]) -> RunProgress:
    record = await pool.submit(config)
    announce(record, commands=False)
    return await show_run(pool, record)
