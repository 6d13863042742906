"""Where metrics go besides the broker: console, JSON lines, TensorBoard, wandb, trackio, MLflow.

The packages of the last four are imported when such a tracker is made, so that nothing else needs
them; nothing leaves the machine unless one of them is asked for. A run that is resumed, or whose
learner died, goes on under the same run at wandb, trackio and MLflow.
"""

import contextlib
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

from ...schemas.wire.errors import ConfigError, StorageError
from ..disk.lines import append_lines
from ..disk.room import remedy

BACKENDS = ("console", "jsonl", "tensorboard", "wandb", "wandb-offline", "trackio", "mlflow")
MLFLOW_URI = "MLFLOW_TRACKING_URI"
_MLFLOW_BATCH = 1000
_ON_CONSOLE = (
    "training_step_reward",
    "val/mean_score",
    "response_length/mean",
    "actor/pg_loss",
    "staleness/lag_mean",
    "perf/throughput",
    "perf/time_per_step",
)


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker calls a run by."""

    project: str
    name: str
    id: str = ""
    """The same over restarts and resumes; empty: each begins a run of its own."""
    entity: str | None = None
    """Team or user of wandb."""
    group: str = ""
    tags: Sequence[str] = field(default_factory=tuple[str, ...])
    notes: str = ""


class Tracker:
    """An experiment tracker; one leaves out what it has no place for."""

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Record the effective configuration, once, before the first metrics."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record the numbers of one step; NaN marks what could not be computed."""
        raise NotImplementedError

    def log_episodes(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Record episodes of a step, the same columns in each row, as a table."""

    def log_checkpoint(self, folder: Path, step: int) -> None:
        """Keep the files of a checkpoint, which may be removed as soon as this returns."""

    def finish(self) -> None:
        """Write what is still held back and close."""


def make_trackers(backends: Iterable[str], run: TrackedRun, *, folder: str | Path) -> list[Tracker]:
    """Return the trackers named in `backends`; the local ones write under `folder`.

    Raises ConfigError for an unknown name or a package that is not installed.
    """
    place = Path(folder)
    makers: dict[str, Callable[[], Tracker]] = {
        "console": ConsoleTracker,
        "jsonl": lambda: JsonlTracker(place),
        "tensorboard": lambda: TensorboardTracker(place / "tensorboard"),
        "wandb": lambda: WandbTracker(place, run),
        "wandb-offline": lambda: WandbTracker(place, run, offline=True),
        "trackio": lambda: TrackioTracker(run),
        "mlflow": lambda: MlflowTracker(run),
    }
    wanted = list(dict.fromkeys(backends))
    for backend in wanted:
        if backend not in makers:
            raise ConfigError(
                f"unknown logger backend {backend!r}", hint=f"known are {', '.join(BACKENDS)}"
            )
    return [makers[backend]() for backend in wanted]


class ConsoleTracker(Tracker):
    """One line a step on a text stream."""

    def __init__(self, write: Callable[[str], object] | None = None) -> None:
        self._write = write or _write_line

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Write the step and its most telling numbers."""
        shown = [name for name in _ON_CONSOLE if name in metrics]
        shown = shown or [name for name in metrics if not name.startswith("training/")][:5]
        self._write(f"step {step}  " + "  ".join(f"{name} {metrics[name]:.4g}" for name in shown))


class JsonlTracker(Tracker):
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


class TensorboardTracker(Tracker):
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


class WandbTracker(Tracker):
    """A run at Weights & Biases, or, offline, its files in the folder: `wandb sync` sends them.

    Charts are drawn over `step`: what is told late (a validation), or again (after a crash), comes
    to its own place instead of being left out.
    """

    def __init__(self, folder: Path, run: TrackedRun, *, offline: bool = False) -> None:
        with _packages_of("wandb"):
            import wandb

            self._wandb = wandb
            from wandb.errors import Error as WandbError

        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._run = wandb.init(
                project=run.project,
                name=run.name,
                id=run.id or None,
                resume="allow" if run.id and not offline else None,
                entity=run.entity,
                group=run.group or None,
                tags=list(run.tags) or None,
                notes=run.notes or None,
                dir=str(folder),
                reinit="create_new",
                mode="offline" if offline else None,
            )
            self._run.define_metric("*", step_metric="step")
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
        self._run.log({**metrics, "step": step})

    def log_episodes(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Log a table."""
        if rows:
            columns: list[Any] = list(rows[0])
            table = self._wandb.Table(columns=columns, data=[[*row.values()] for row in rows])
            self._run.log({"rollouts": table, "step": step})

    def log_checkpoint(self, folder: Path, step: int) -> None:
        """Log an artifact, a version of `RUN-checkpoint`; wandb copies the files first."""
        artifact = self._wandb.Artifact(f"{self._run.name}-checkpoint", "model")
        artifact.metadata = {"step": step}
        artifact.add_dir(str(folder), policy="mutable")
        self._run.log_artifact(artifact, aliases=["latest", f"step-{step}"])

    def finish(self) -> None:
        """Upload, or write, what is left."""
        self._run.finish()


class TrackioTracker(Tracker):
    """A run in trackio's local store, where one of the same name goes on."""

    def __init__(self, run: TrackedRun) -> None:
        with _packages_of("trackio"):
            import trackio  # pyright: ignore[reportMissingModuleSource]

        self._trackio = trackio
        self._run = run
        self._started = False

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Start the run with its configuration."""
        run = self._run
        self._trackio.init(
            project=run.project,
            name=run.name,
            group=run.group or None,
            config={**config, "tags": list(run.tags), "notes": run.notes},
            resume="allow",
        )
        self._started = True

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the numbers at `step`."""
        if not self._started:
            self.log_config({})
        self._trackio.log(dict(metrics), step=step)

    def log_episodes(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Log a table."""
        if rows:
            table = self._trackio.Table(
                columns=list(rows[0]), data=[[*row.values()] for row in rows]
            )
            self._trackio.log({"rollouts": table}, step=step)

    def finish(self) -> None:
        """End the run."""
        if self._started:
            self._trackio.finish()


class MlflowTracker(Tracker):
    """A run at the MLflow server of `$MLFLOW_TRACKING_URI`; `project` is its experiment."""

    def __init__(self, run: TrackedRun) -> None:
        with _packages_of("mlflow"):
            from mlflow.entities import Metric
            from mlflow.exceptions import MlflowException
            from mlflow.tracking import MlflowClient

        uri = os.environ.get(MLFLOW_URI)
        if not uri:
            raise ConfigError(
                f"logger backend mlflow has no server: {MLFLOW_URI} is not set where this runs",
                hint=f"set {MLFLOW_URI} in the environment of the pool's nodes (node.env)",
            )
        self._metric = Metric
        self._client = MlflowClient(tracking_uri=uri)
        try:
            self._id = self._opened(run)
        except MlflowException as error:
            raise ConfigError(f"MLflow at {uri} cannot start a run: {error}") from error

    def _opened(self, run: TrackedRun) -> str:
        """Return the id of the run, which may have been begun before."""
        known = self._client.get_experiment_by_name(run.project)
        experiment = known.experiment_id if known else self._client.create_experiment(run.project)
        if run.id:
            found = self._client.search_runs(
                [experiment], f"tags.tinkermq = '{run.id}'", max_results=1
            )
            if found:
                return str(found[0].info.run_id)
        tags = {"tinkermq": run.id, "group": run.group, "mlflow.note.content": run.notes}
        tags["tags"] = ", ".join(run.tags)
        made = self._client.create_run(experiment, run_name=run.name, tags=tags)
        return str(made.info.run_id)

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Keep the configuration as a file, since parameters are short and never change."""
        self._client.log_dict(self._id, dict(config), "config.json")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the numbers at `step`, but for those that could not be computed."""
        now = int(time.time() * 1000)
        told = [
            self._metric(_mlflow_name(name), value, now, step)
            for name, value in metrics.items()
            if math.isfinite(value)
        ]
        for first in range(0, len(told), _MLFLOW_BATCH):
            self._client.log_batch(self._id, metrics=told[first : first + _MLFLOW_BATCH])

    def log_episodes(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Keep the table as a file."""
        if rows:
            columns = list(rows[0])
            told = {"columns": columns, "data": [[*row.values()] for row in rows]}
            self._client.log_dict(self._id, told, f"rollouts/step_{step:06d}.json")

    def log_checkpoint(self, folder: Path, step: int) -> None:
        """Upload the files."""
        del step  # the folder is named after it
        self._client.log_artifacts(self._id, str(folder), f"checkpoints/{folder.name}")

    def finish(self) -> None:
        """Say that the run has ended."""
        self._client.set_terminated(self._id)


def _mlflow_name(name: str) -> str:
    """Return a metric's name in the characters that MLflow takes."""
    return re.sub(r"[^A-Za-z0-9_\-. /]", "_", name)


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
            hint=remedy(error, file),
        ) from error


def _json_number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _write_line(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
