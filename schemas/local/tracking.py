"""Experiment trackers: console, JSON lines, TensorBoard, wandb, trackio, MLflow.

The packages of the last four are imported when such a tracker is opened. Nothing leaves the machine
unless one of them is configured. A resumed run continues the same run at wandb, trackio and MLflow.

The libraries buffer and retry by themselves. Each works in its own thread (`GuardedTracker`): a
library that raises or hangs neither fails nor blocks the run.
"""

import contextlib
import json
import math
import os
import queue
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any, Literal, TypeAlias

import structlog

from ..wire.errors import ConfigError, StorageError
from .disk import append_lines, remedy

BACKENDS = ("console", "jsonl", "tensorboard", "wandb", "wandb-offline", "trackio", "mlflow")
MLFLOW_URI = "MLFLOW_TRACKING_URI"
_MLFLOW_BATCH = 1000
_OPEN_S = 30.0
"""How long a start waits for a tracker to open, so that it can report a wrong configuration."""
_HANGS_S = 600.0
"""A call that takes longer counts as hanging; libraries retry for some minutes."""
_HANGS_AT_THE_END_S = 30.0
"""The same at the end of a run."""
_HUNG: set[str] = set()
_OPTIONAL: frozenset[str] = frozenset({"config", "episodes"})
"""Calls that may fail without the tracker being given up."""
_MAX_QUEUED = 10_000
_log: structlog.stdlib.BoundLogger = structlog.get_logger()
_SHOWN_CHARACTERS = 300
Outcome: TypeAlias = Literal["FINISHED", "FAILED", "KILLED"]
"""How a run ended, in MLflow's words; KILLED: it was stopped."""
_EXIT_CODES: Mapping[Outcome, int] = {"FINISHED": 0, "FAILED": 1, "KILLED": 255}
"""Exit codes for wandb, which shows 255 as killed."""
_EventKind: TypeAlias = Literal["tracker_lost", "tracker_lacks"]
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
    """Names and labels of a run at its trackers."""

    project: str
    name: str
    id: str = ""
    """Stays the same over restarts and resumes; empty: each start makes a new run."""
    entity: str | None = None
    """Team or user of wandb."""
    group: str = ""
    tags: Sequence[str] = field(default_factory=tuple[str, ...])
    notes: str = ""


class Tracker:
    """An experiment tracker; the methods that it does not support do nothing."""

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Record the effective configuration, once, before the first metrics."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record the metrics of one step; NaN marks a value that could not be computed."""
        raise NotImplementedError

    def log_episodes(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Record episodes of a step, the same columns in each row, as a table."""

    def finish(self, outcome: Outcome = "FINISHED") -> None:
        """Write buffered data, record how the run ended where that can be, and close."""


def make_trackers(
    backends: Iterable[str], run: TrackedRun, *, folder: str | Path, resumes: bool = False
) -> list[Tracker]:
    """Return the trackers named in `backends`; the local ones write under `folder`.

    Raises ConfigError for an unknown name and, unless the run `resumes`, for a package that is not
    installed or a missing key or address.
    """
    place = Path(folder)
    own: dict[str, Callable[[], Tracker]] = {
        "console": ConsoleTracker,
        "jsonl": lambda: JsonlTracker(place),
    }
    makers: dict[str, Callable[[], Tracker]] = {
        "tensorboard": lambda: TensorboardTracker(place / "tensorboard"),
        "wandb": lambda: WandbTracker(place, run),
        "wandb-offline": lambda: WandbTracker(place, run, offline=True),
        "trackio": lambda: TrackioTracker(run),
        "mlflow": lambda: MlflowTracker(run),
    }
    names = list(dict.fromkeys(backends))
    for backend in names:
        if backend not in own and backend not in makers:
            raise ConfigError(
                f"unknown logger backend {backend!r}", hint=f"known are {', '.join(BACKENDS)}"
            )
    return [
        own[backend]()
        if backend in own
        else GuardedTracker(backend, makers[backend], refuses=not resumes)
        for backend in names
    ]


def hung_trackers() -> frozenset[str]:
    """Return the names of the trackers of this process that hang."""
    return frozenset(_HUNG)


@dataclass(frozen=True)
class TrackerEvent:
    """An event of the job: a tracker failed."""

    kind: _EventKind
    message: str
    data: Mapping[str, Any]


@dataclass(frozen=True)
class _Call:
    """One call of a tracker."""

    kind: Literal["open", "config", "metrics", "episodes", "finish"]
    make: Callable[[Tracker], None]
    step: int | None = None
    num_points: int = 0


class GuardedTracker(Tracker):
    """A library's tracker in its own thread, so that its failures affect nothing else.

    Calls return at once. A library that cannot be opened, raises when it logs metrics, or hangs is
    not used again (`tracker_lost`); other failed calls are skipped (`tracker_lacks`). Both are
    reported once.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Tracker],
        *,
        refuses: bool = True,
        hangs_s: float = _HANGS_S,
        ends_s: float = _HANGS_AT_THE_END_S,
        opens_s: float = _OPEN_S,
    ) -> None:
        """Open it with `make`, waiting up to `opens_s`.

        With `refuses`, raises the ConfigError that `make` raises.
        """
        self.name = name
        self._hangs_s, self._ends_s = hangs_s, ends_s
        self._calls: queue.Queue[_Call] = queue.Queue()
        self._running: tuple[_Call, float] = _Call("open", lambda _: None), time.monotonic()
        self._is_running = True
        self._lock = Lock()
        self._is_lost = False
        self._events: list[TrackerEvent] = []
        self._reported: set[str] = set()
        self._refusal: ConfigError | None = None
        self._opened, self._ended = Event(), Event()
        Thread(target=self._work, args=(make,), name=f"tracker {name}", daemon=True).start()
        self._opened.wait(opens_s)
        if self._refusal is not None and refuses:
            raise self._refusal

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Queue the configuration."""
        values = dict(config)
        self._put(_Call("config", lambda tracker: tracker.log_config(values)))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Queue the numbers of a step."""
        values = dict(metrics)
        self._put(_Call("metrics", lambda tracker: tracker.log(values, step), step, len(values)))

    def log_episodes(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Queue a table."""
        self._put(_Call("episodes", lambda tracker: tracker.log_episodes(rows, step), step))

    def finish(self, outcome: Outcome = "FINISHED", within_s: float = math.inf) -> None:
        """Wait until all calls are made, unless one hangs, and close the tracker.

        After `within_s` it counts as hanging.
        """
        deadline = time.monotonic() + within_s
        self._put(_Call("finish", lambda tracker: tracker.finish(outcome)))
        while not self._ended.wait(0.05):
            self._detect_hang(at_the_end=True)
            if time.monotonic() > deadline:
                _HUNG.add(self.name)
                return

    def flush(self, timeout_s: float) -> None:
        """Wait until all calls are made, for at most `timeout_s`; nothing is closed."""
        deadline = time.monotonic() + timeout_s
        while not self._is_idle and not self._is_lost and time.monotonic() < deadline:
            time.sleep(0.01)
        if not self._is_idle:
            _HUNG.add(self.name)

    def take_events(self) -> list[TrackerEvent]:
        """Return the events that were not reported yet."""
        self._detect_hang()
        with self._lock:
            events, self._events = self._events, []
        return events

    @property
    def _is_idle(self) -> bool:
        return self._opened.is_set() and self._calls.unfinished_tasks == 0

    def _put(self, call: _Call) -> None:
        if self._is_lost or self._ended.is_set():
            return
        if self._calls.qsize() >= _MAX_QUEUED:
            self._give_up(f"{_MAX_QUEUED} calls are waiting", None)
            return
        self._calls.put(call)

    def _detect_hang(self, *, at_the_end: bool = False) -> None:
        call, began = self._running
        limit_s = self._ends_s if at_the_end else self._hangs_s
        if self._is_running and time.monotonic() - began > limit_s:
            _HUNG.add(self.name)
            self._give_up(f"no answer within {limit_s:g} s", call)

    def _work(self, make: Callable[[], Tracker]) -> None:
        """Open the tracker and make its calls; runs in a thread."""
        tracker: Tracker | None = None
        try:
            tracker = make()
        except BaseException as error:  # noqa: BLE001  a library may raise anything
            self._refusal = error if isinstance(error, ConfigError) else None
            self._give_up(_describe(error), None)
        self._is_running = False
        self._opened.set()
        while tracker is not None and not self._is_lost:
            call = self._calls.get()
            self._running, self._is_running = (call, time.monotonic()), True
            try:
                call.make(tracker)
            except BaseException as error:  # noqa: BLE001  a library may raise anything
                if call.kind in _OPTIONAL:
                    self._report_lacking(call, error)
                else:
                    with contextlib.suppress(BaseException):
                        tracker.finish("FAILED")
                    self._give_up(_describe(error), call)
            self._is_running = False
            self._calls.task_done()
            if call.kind == "finish":
                self._ended.set()
                return

    def _give_up(self, why: str, failed: _Call | None) -> None:
        """Stop using the tracker and report it as lost."""
        with self._lock:
            if self._is_lost:
                return
            self._is_lost = True
        lost = [] if failed is None else [failed]
        with contextlib.suppress(queue.Empty):
            while True:
                lost.append(self._calls.get_nowait())
                self._calls.task_done()
        steps = [call.step for call in lost if call.kind == "metrics" and call.step is not None]
        num_points = sum(call.num_points for call in lost)
        at = f" at step {failed.step}" if failed is not None and failed.step is not None else ""
        count = f"{len(steps)} steps ({num_points} points)"
        missing = f"{count}, from step {min(steps)} on" if steps else "what was not sent yet"
        self._report(
            "tracker_lost",
            f"{why}{at}; it lacks {missing}, and all that follows",
            error=why,
            steps_lost=len(steps),
            points_lost=num_points,
            from_step=min(steps, default=None),
        )
        self._ended.set()

    def _report_lacking(self, call: _Call, error: BaseException) -> None:
        """Report the first failure of each kind of call."""
        if call.kind in self._reported:
            _log.warning("tracker_lacks", tracker=self.name, kind=call.kind, step=call.step)
            return
        self._reported.add(call.kind)
        of_step = "" if call.step is None else f" of step {call.step}"
        text = f"it lacks the {call.kind}{of_step}: {_describe(error)}"
        self._report("tracker_lacks", text, step=call.step)

    def _report(self, kind: _EventKind, text: str, **data: Any) -> None:
        message = f"tracker {self.name}: {text}; the run's metrics.jsonl has all"
        _log.warning(kind, tracker=self.name, message=message)
        with self._lock:
            self._events.append(TrackerEvent(kind, message, {"tracker": self.name, **data}))


def _describe(error: BaseException) -> str:
    """Return an error as one line of bounded length."""
    try:
        text = " ".join(str(error).split())[:_SHOWN_CHARACTERS]
    except BaseException:  # noqa: BLE001  the class is the library's
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class ConsoleTracker(Tracker):
    """Prints one line per step on a text stream."""

    def __init__(self, write: Callable[[str], object] | None = None) -> None:
        self._write = write or _write_line

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Write the step and its main numbers."""
        shown = [name for name in _ON_CONSOLE if name in metrics]
        shown = shown or [name for name in metrics if not name.startswith("training/")][:5]
        self._write(f"step {step}  " + "  ".join(f"{name} {metrics[name]:.4g}" for name in shown))


class JsonlTracker(Tracker):
    """`metrics.jsonl` and `config.json` in a folder; the last line of a step is valid."""

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
        numbers = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
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

    def finish(self, outcome: Outcome = "FINISHED") -> None:
        """Flush and close the event file, which has no place for the outcome."""
        del outcome
        self._writer.close()

    def _add(self, values: list[dict[str, Any]], *, step: int) -> None:
        summary = self._summaries.Summary()
        for value in values:
            summary.value.add(**value)
        self._writer.add_event(
            self._events.Event(wall_time=time.time(), step=step, summary=summary)
        )
        self._writer.flush()  # otherwise failures are reported minutes later


class WandbTracker(Tracker):
    """A run at Weights & Biases, or, offline, its files in the folder: `wandb sync` sends them.

    Charts are drawn over `step`, so that metrics logged late (a validation) or again (after a
    crash) appear at their step.
    """

    def __init__(self, folder: Path, run: TrackedRun, *, offline: bool = False) -> None:
        with _packages_of("wandb"):
            import wandb

            self._wandb = wandb
            from wandb.errors import AuthenticationError, UsageError

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
        except (AuthenticationError, UsageError) as error:
            raise ConfigError(
                f"wandb cannot start a run: {error}",
                hint="set WANDB_API_KEY where the run is submitted, or name wandb-offline in place "
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

    def finish(self, outcome: Outcome = "FINISHED") -> None:
        """Upload or write what is buffered, and end the run as finished, failed or killed."""
        self._run.finish(exit_code=_EXIT_CODES[outcome])


class TrackioTracker(Tracker):
    """A run in trackio's local store; a run of the same name is continued."""

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

    def finish(self, outcome: Outcome = "FINISHED") -> None:
        """End the run; trackio has no other states."""
        del outcome
        if self._started:
            self._trackio.finish()


class MlflowTracker(Tracker):
    """A run at the MLflow server of `$MLFLOW_TRACKING_URI`; `project` is its experiment."""

    def __init__(self, run: TrackedRun) -> None:
        with _packages_of("mlflow"):
            from mlflow.entities import Metric
            from mlflow.exceptions import MlflowException
            from mlflow.protos.databricks_pb2 import INTERNAL_ERROR, ErrorCode
            from mlflow.tracking import MlflowClient

        uri = os.environ.get(MLFLOW_URI)
        if not uri:
            raise ConfigError(
                f"logger backend mlflow has no server: {MLFLOW_URI} is not set on this machine",
                hint=f"set {MLFLOW_URI} in the environment of the pool's nodes (node.env)",
            )
        self._metric = Metric
        self._client = MlflowClient(tracking_uri=uri)
        try:
            self._id = self._open_run(run)
        except MlflowException as error:
            if error.error_code == ErrorCode.Name(INTERNAL_ERROR):  # also: it does not answer
                raise
            raise ConfigError(f"MLflow at {uri} cannot start a run: {error}") from error

    def _open_run(self, run: TrackedRun) -> str:
        """Return the id of the run, which may exist already and then runs again."""
        known = self._client.get_experiment_by_name(run.project)
        experiment = known.experiment_id if known else self._client.create_experiment(run.project)
        if run.id:
            runs = self._client.search_runs(
                [experiment], f"tags.tinkermq = '{run.id}'", max_results=1
            )
            if runs:
                known_id = str(runs[0].info.run_id)
                self._client.update_run(known_id, status="RUNNING")
                return known_id
        tags = {"tinkermq": run.id, "group": run.group, "mlflow.note.content": run.notes}
        tags["tags"] = ", ".join(run.tags)
        made = self._client.create_run(experiment, run_name=run.name, tags=tags)
        return str(made.info.run_id)

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Store the configuration as a file, since parameters are short and cannot change."""
        self._client.log_dict(self._id, dict(config), "config.json")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the finite numbers at `step`."""
        now = int(time.time() * 1000)
        values = [
            self._metric(_mlflow_name(name), value, now, step)
            for name, value in metrics.items()
            if math.isfinite(value)
        ]
        for first in range(0, len(values), _MLFLOW_BATCH):
            self._client.log_batch(self._id, metrics=values[first : first + _MLFLOW_BATCH])

    def log_episodes(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Store the table as a file."""
        if rows:
            columns = list(rows[0])
            table = {"columns": columns, "data": [[*row.values()] for row in rows]}
            self._client.log_dict(self._id, table, f"rollouts/step_{step:06d}.json")

    def finish(self, outcome: Outcome = "FINISHED") -> None:
        """Mark the run as finished, failed or killed."""
        self._client.set_terminated(self._id, status=outcome)


def _mlflow_name(name: str) -> str:
    """Return a metric's name in the characters that MLflow accepts, as a normalized path."""
    parts = re.sub(r"[^A-Za-z0-9_\-. /]", "_", name).split("/")
    return "/".join("_" if part in ("", ".", "..") else part for part in parts)


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


def _write_line(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
