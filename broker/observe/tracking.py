"""Where metrics go besides the broker: console, JSON lines, TensorBoard, wandb, trackio.

A tracker is anything with the three methods of `Tracker`. The packages of the last three are
imported when such a tracker is made, so that nothing else needs them; nothing leaves the machine
unless one of them is asked for.
"""

import contextlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

from ...schemas.wire.errors import ConfigError, StorageError
from ..disk.lines import append_lines

BACKENDS = ("console", "jsonl", "tensorboard", "wandb", "wandb-offline", "trackio")
_ON_CONSOLE = (
    "training_step_reward",
    "val/mean_score",
    "response_length/mean",
    "actor/pg_loss",
    "staleness/lag_mean",
    "perf/throughput",
    "perf/time_per_step",
)


class Tracker(Protocol):
    """An experiment tracker."""

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Record the effective configuration, once, before the first metrics."""
        ...

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record the numbers of one step; NaN marks what could not be computed."""
        ...

    def finish(self) -> None:
        """Write what is still held back and close."""
        ...


def make_trackers(
    backends: Iterable[str], *, folder: str | Path, project: str, name: str
) -> list[Tracker]:
    """Return the trackers named in `backends`; the local ones write under `folder`.

    Raises ConfigError for an unknown name or a package that is not installed.
    """
    place = Path(folder)
    makers: dict[str, Callable[[], Tracker]] = {
        "console": ConsoleTracker,
        "jsonl": lambda: JsonlTracker(place),
        "tensorboard": lambda: TensorboardTracker(place / "tensorboard"),
        "wandb": lambda: WandbTracker(place, project=project, name=name),
        "wandb-offline": lambda: WandbTracker(place, project=project, name=name, offline=True),
        "trackio": lambda: TrackioTracker(project=project, name=name),
    }
    wanted = list(dict.fromkeys(backends))
    for backend in wanted:
        if backend not in makers:
            raise ConfigError(
                f"unknown logger backend {backend!r}", hint=f"known are {', '.join(BACKENDS)}"
            )
    return [makers[backend]() for backend in wanted]


class ConsoleTracker:
    """One line a step on a text stream."""

    def __init__(self, write: Callable[[str], object] | None = None) -> None:
        self._write = write or _write_line

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Say nothing: the configuration is in the run folder."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Write the step and its most telling numbers."""
        shown = [name for name in _ON_CONSOLE if name in metrics]
        shown = shown or [name for name in metrics if not name.startswith("training/")][:5]
        self._write(f"step {step}  " + "  ".join(f"{name} {metrics[name]:.4g}" for name in shown))

    def finish(self) -> None:
        """Nothing is held back."""


class JsonlTracker:
    """`metrics.jsonl` and `config.json` in a folder; the later line of a step counts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = folder / "metrics.jsonl"
        self._lock = Lock()
        _check_writable(self._file)

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Write `config.json`."""
        text = json.dumps(config, indent=2, sort_keys=False, default=str)
        (self._folder / "config.json").write_text(text + "\n", encoding="utf-8")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Append one line; NaN and infinity become null. Raises OSError."""
        numbers = {name: _json_number(value) for name, value in metrics.items()}
        line = json.dumps({"step": step, "time": time.time(), **numbers}, allow_nan=False)
        with self._lock:
            append_lines(self._file, [line])

    def finish(self) -> None:
        """Nothing is held back."""


class TensorboardTracker:
    """TensorBoard event files, written without torch or TensorFlow."""

    def __init__(self, folder: Path) -> None:
        with _packages_of("tensorboard"):
            from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._events, self._summaries, self._tensors = event_pb2, summary_pb2, tensor_pb2
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(folder))

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Write the configuration as a text card."""
        text = "```json\n" + json.dumps(config, indent=2, default=str) + "\n```"
        metadata = self._summaries.SummaryMetadata(
            plugin_data=self._summaries.SummaryMetadata.PluginData(plugin_name="text")
        )
        tensor = self._tensors.TensorProto(dtype="DT_STRING", string_val=[text.encode()])
        self._add([{"tag": "config", "metadata": metadata, "tensor": tensor}], step=0)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Write one scalar for each number."""
        self._add(
            [{"tag": name, "simple_value": value} for name, value in metrics.items()], step=step
        )

    def finish(self) -> None:
        """Flush and close the event file."""
        self._writer.close()

    def _add(self, values: list[dict[str, Any]], *, step: int) -> None:
        summary = self._summaries.Summary()
        for value in values:
            summary.value.add(**value)
        self._writer.add_event(
            self._events.Event(wall_time=time.time(), step=step, summary=summary)
        )


class WandbTracker:
    """A run at Weights & Biases, or, offline, its files in the folder: `wandb sync` sends them."""

    def __init__(self, folder: Path, *, project: str, name: str, offline: bool = False) -> None:
        with _packages_of("wandb"):
            import wandb
            from wandb.errors import Error as WandbError

        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._run = wandb.init(
                project=project,
                name=name,
                dir=str(folder),
                reinit="create_new",
                mode="offline" if offline else None,
            )
        except WandbError as error:
            raise ConfigError(
                f"wandb cannot start a run: {error}",
                hint="set WANDB_API_KEY where the job is submitted, or name wandb-offline in place "
                "of wandb in logger_backends: the files stay in the run's folder, to be sent "
                "later by `wandb sync`",
            ) from error

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Record the configuration with the run."""
        recorded: Any = self._run.config
        recorded.update(dict(config), allow_val_change=True)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the numbers at `step`."""
        self._run.log(dict(metrics), step=step)

    def finish(self) -> None:
        """Upload, or write, what is left."""
        self._run.finish()


class TrackioTracker:
    """A run in trackio's local store."""

    def __init__(self, *, project: str, name: str) -> None:
        with _packages_of("trackio"):
            import trackio  # pyright: ignore[reportMissingModuleSource]

        self._trackio = trackio
        self._names = {"project": project, "name": name}
        self._started = False

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Start the run with its configuration."""
        self._trackio.init(config=dict(config), **self._names)
        self._started = True

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the numbers at `step`."""
        if not self._started:
            self.log_config({})
        self._trackio.log(dict(metrics), step=step)

    def finish(self) -> None:
        """End the run."""
        if self._started:
            self._trackio.finish()


@contextlib.contextmanager
def _packages_of(extra: str) -> Iterator[None]:
    """Import packages of an extra; raises ConfigError with the command that installs them."""
    try:
        yield
    except ImportError as error:
        raise ConfigError(
            f"logger backend {extra!r} needs a package that cannot be imported: {error}",
            hint=f"pip install 'tinkermq[{extra}]', or leave {extra} out of logger_backends",
        ) from error


def _check_writable(file: Path) -> None:
    try:
        append_lines(file, [])
    except OSError as error:
        raise StorageError(
            f"cannot write {file}: {error.strerror}",
            hint="choose another output_dir, or free the disk",
        ) from error


def _json_number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _write_line(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
