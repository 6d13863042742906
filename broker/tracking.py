"""Where metrics go besides the broker: console, JSON lines, TensorBoard, wandb, trackio, MLflow.

The packages of the last four are imported when such a tracker is made, so that nothing else needs
them; nothing leaves the machine unless one of them is asked for. A run that is resumed, or whose
learner died, goes on under the same run at wandb, trackio and MLflow.

What those libraries raise, and how long they hang, is their own loss: each works in a thread of its
own (`GuardedTracker`), and who trains waits for none of them.
"""

import contextlib
import json
import math
import os
import queue
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any, Literal, TypeAlias

import structlog

from ..schemas.local.disk import append_lines, remedy
from ..schemas.wire.errors import ConfigError, StorageError

BACKENDS = ("console", "jsonl", "tensorboard", "wandb", "wandb-offline", "trackio", "mlflow")
MLFLOW_URI = "MLFLOW_TRACKING_URI"
_MLFLOW_BATCH = 1000
_OPEN_S = 30.0
"""So long a start waits for a tracker, to hear of a mistake in the configuration."""
_HANGS_S = 600.0
"""A call that takes longer never ends: libraries try for some minutes to reach their server."""
_HANGS_AT_THE_END_S = 30.0
"""The same at a run's end, but for uploads."""
_UPLOADS: frozenset[str] = frozenset({"checkpoint", "finish"})
_UPLOAD_AT_THE_END_S = 600.0
_HUNG: set[str] = set()
_BY_THEMSELVES: frozenset[str] = frozenset({"config", "episodes", "checkpoint"})
"""What a tracker may lack and still get numbers."""
_PAUSES_S = (1.0, 5.0, 25.0, 125.0)
"""Before each further try of a call that failed."""
_MAX_REOPENED = 12
_MANY_GOOD = 100
"""After so many calls that went well, failures count from none."""
_MAX_BEHIND = 10_000
_log: structlog.stdlib.BoundLogger = structlog.get_logger()
_SHOWN_CHARACTERS = 300
_NewsKind: TypeAlias = Literal["tracker_lost", "tracker_reopened", "tracker_lacks"]
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

    def abandon(self, error: BaseException) -> None:
        """Let go of what broke by `error`, so that another can be opened in its place."""


def make_trackers(
    backends: Iterable[str], run: TrackedRun, *, folder: str | Path, goes_on: bool = False
) -> list[Tracker]:
    """Return the trackers named in `backends`; the local ones write under `folder`.

    Raises ConfigError for an unknown name, a package that is not installed, or a missing key or
    address; but for the first not for a run that `goes_on`, which a tracker never ends.
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
    wanted = list(dict.fromkeys(backends))
    for backend in wanted:
        if backend not in own and backend not in makers:
            raise ConfigError(
                f"unknown logger backend {backend!r}", hint=f"known are {', '.join(BACKENDS)}"
            )
    scratch = place / ".trackers"
    return [
        own[backend]()
        if backend in own
        else GuardedTracker(backend, makers[backend], scratch / backend, refuses=not goes_on)
        for backend in wanted
    ]


def hung_trackers() -> frozenset[str]:
    """Return the trackers of this process in which a call never came back."""
    return frozenset(_HUNG)


@dataclass(frozen=True)
class TrackerNews:
    """What to report of a tracker that failed."""

    kind: _NewsKind
    """An event of the job."""
    message: str
    data: Mapping[str, Any]


@dataclass(frozen=True)
class _Call:
    """One call of a tracker."""

    what: Literal["open", "config", "metrics", "episodes", "checkpoint", "finish"]
    make: Callable[[Tracker], None]
    step: int | None = None
    num_points: int = 0
    held: Path | None = None
    """A folder that is removed behind it."""


class GuardedTracker(Tracker):
    """A library's tracker in its own thread, so that its failures affect nothing else.

    Calls return at once. One that fails is tried again, by a tracker that is opened anew; where
    that does not help, or a call hangs, the tracker is left out from then on. Both are news, once.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Tracker],
        scratch: Path,
        *,
        refuses: bool = True,
        pauses_s: Sequence[float] = _PAUSES_S,
        hangs_s: float = _HANGS_S,
        ends_s: float = _HANGS_AT_THE_END_S,
        opens_s: float = _OPEN_S,
    ) -> None:
        """Open it by `make`, waiting for it up to `opens_s`; checkpoints are held in `scratch`.

        Raises the ConfigError that `make` raises, where it `refuses`.
        """
        self.name = name
        self._make, self._scratch = make, scratch
        self._pauses_s, self._hangs_s, self._ends_s = pauses_s, hangs_s, ends_s
        self._tracker: Tracker | None = None
        self._config: Mapping[str, Any] | None = None
        self._calls: queue.Queue[_Call] = queue.Queue()
        self._running: tuple[_Call, float] | None = None
        self._lock = Lock()
        self._is_lost = False
        self._news: list[TrackerNews] = []
        self._num_reopened = self._num_good = self._num_held = 0
        self._could_open = False
        self._once_told: set[str] = set()
        self._refusal: ConfigError | None = None
        self._tried, self._closing, self._ended = Event(), Event(), Event()
        shutil.rmtree(scratch, ignore_errors=True)
        self._put(_Call("open", lambda _: None))
        Thread(target=self._work, name=f"tracker {name}", daemon=True).start()
        self._tried.wait(opens_s)
        if self._refusal is not None and refuses:
            raise self._refusal

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Hand on the configuration."""
        config_values = dict(config)

        def tell(tracker: Tracker) -> None:
            tracker.log_config(config_values)
            self._config = config_values

        self._put(_Call("config", tell))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Hand on the numbers of a step."""
        values = dict(metrics)
        self._put(_Call("metrics", lambda tracker: tracker.log(values, step), step, len(values)))

    def log_episodes(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Hand on a table."""
        self._put(_Call("episodes", lambda tracker: tracker.log_episodes(rows, step), step))

    def log_checkpoint(self, folder: Path, step: int) -> None:
        """Hand on a checkpoint: its files are linked, so that they stay until they are kept."""
        self._num_held += 1
        place = self._scratch / str(self._num_held)
        held = place / folder.name
        try:
            shutil.copytree(folder, held, copy_function=_link)
        except OSError as error:
            shutil.rmtree(place, ignore_errors=True)
            self._tell_lacking(_Call("checkpoint", lambda _: None, step), error)
            return

        def keep(tracker: Tracker) -> None:
            tracker.log_checkpoint(held, step)

        self._put(_Call("checkpoint", keep, step, held=place))

    def finish(self) -> None:
        """Wait until all is handed on, unless it hangs, and close the tracker."""
        self._put(_Call("finish", lambda tracker: tracker.finish()))
        self._closing.set()  # no pause between the tries any more
        while not self._ended.wait(0.05):
            self._look(at_the_end=True)
        shutil.rmtree(self._scratch, ignore_errors=True)

    def flush(self, most_s: float) -> None:
        """Wait until all is handed on, but no longer than `most_s`; nothing is closed."""
        deadline = time.monotonic() + most_s
        while not self._is_idle and not self._is_lost and time.monotonic() < deadline:
            time.sleep(0.01)
        if not self._is_idle:
            _HUNG.add(self.name)

    def take_news(self) -> list[TrackerNews]:
        """Return what was not reported yet."""
        self._look()
        with self._lock:
            taken, self._news = self._news, []
        return taken

    @property
    def _is_idle(self) -> bool:
        return self._calls.unfinished_tasks == 0

    def _put(self, call: _Call) -> None:
        if self._is_lost:
            return
        if self._calls.qsize() >= _MAX_BEHIND:
            self._lose(f"it is {_MAX_BEHIND} calls behind", None)
            return
        self._calls.put(call)

    def _look(self, *, at_the_end: bool = False) -> None:
        """Give up a call that hangs."""
        running = self._running
        if running is None:
            return
        call, began = running
        most_s = self._hangs_s
        if at_the_end:
            uploads = self._num_held and call.what in _UPLOADS
            most_s = _UPLOAD_AT_THE_END_S if uploads else self._ends_s
        if time.monotonic() - began > most_s:
            _HUNG.add(self.name)
            self._lose(f"it hangs: nothing came back for {most_s:g} s", call)

    def _work(self) -> None:
        while not self._is_lost:
            call = self._calls.get()
            try:
                self._deliver(call)
            finally:
                if call.held is not None:
                    shutil.rmtree(call.held, ignore_errors=True)
                self._calls.task_done()
            if call.what == "finish":
                self._ended.set()
                return

    def _deliver(self, call: _Call) -> None:
        """Make a call, trying it again by a tracker that is opened anew."""
        failure = self._try(call)
        for pause_s in self._pauses_s:
            if failure is None or isinstance(failure, ConfigError) or self._is_lost:
                break
            if self._num_reopened >= _MAX_REOPENED:
                break
            self._closing.wait(pause_s)
            self._num_reopened += 1
            before, failure = failure, self._try(call)
            if failure is None:
                self._tell_reopened(before, call)
        if failure is None:
            return
        if call.what in _BY_THEMSELVES and self._could_open:
            self._tell_lacking(call, failure)
        else:
            self._lose(_shown(failure), call)

    def _try(self, call: _Call) -> BaseException | None:
        """Make a call once; return what it raised."""
        self._running = call, time.monotonic()
        self._could_open, failure = False, None
        try:
            call.make(self._opened())
        except BaseException as error:  # noqa: BLE001  a library may raise what Python can
            failure = error
            self._let_go(error)
        if not self._is_lost:  # one that was given up meanwhile stays marked as one that hung
            self._running = None
        self._num_good = self._num_good + 1 if failure is None else 0
        if self._num_good >= _MANY_GOOD:
            self._num_reopened = 0
        self._tried.set()
        return failure

    def _opened(self) -> Tracker:
        """Return the tracker, opening it where need be."""
        if self._tracker is None:
            try:
                tracker = self._make()
            except ConfigError as error:
                self._refusal = error
                raise
            self._tracker = tracker
            if self._config is not None:  # the previous one was reported
                tracker.log_config(self._config)
        self._could_open = True
        return self._tracker

    def _let_go(self, error: BaseException) -> None:
        broken, self._tracker = self._tracker, None
        if broken is None:
            return
        try:
            broken.abandon(error)
        except BaseException as raised:  # noqa: BLE001  a library may raise what Python can
            _log.warning("tracker_not_closed", tracker=self.name, error=_shown(raised))

    def _lose(self, why: str, call: _Call | None) -> None:
        """Leave the tracker out from now on, and report what it lacks."""
        with self._lock:
            if self._is_lost:
                return
            self._is_lost = True
        lacks = [] if call is None else [call]
        with contextlib.suppress(queue.Empty):
            while True:
                lacks.append(self._calls.get_nowait())
                self._calls.task_done()
        steps = [lack.step for lack in lacks if lack.what == "metrics" and lack.step is not None]
        points = sum(lack.num_points for lack in lacks)
        at = f" at step {call.step}" if call is not None and call.step is not None else ""
        lost = f"{len(steps)} steps ({points} points)"
        since = f"{lost}, from step {min(steps)} on" if steps else "what was not sent yet"
        self._tell(
            "tracker_lost",
            f"{why}{at}; it lacks {since}, and all that follows",
            error=why,
            steps_lost=len(steps),
            points_lost=points,
            from_step=min(steps, default=None),
        )
        shutil.rmtree(self._scratch, ignore_errors=True)
        self._ended.set()

    def _tell_reopened(self, error: BaseException, call: _Call) -> None:
        """Tell of the first time only."""
        _log.warning("tracker_reopened", tracker=self.name, error=_shown(error), step=call.step)
        if "reopened" in self._once_told:
            return
        self._once_told.add("reopened")
        why = f"{_shown(error)}; it was opened again, and may lack what it had not written yet"
        self._tell("tracker_reopened", why, error=_shown(error), step=call.step)

    def _tell_lacking(self, call: _Call, error: BaseException) -> None:
        """Tell of the first of a kind only: numbers go on."""
        _log.warning("tracker_lacks", tracker=self.name, what=call.what, error=_shown(error))
        if call.what not in self._once_told:
            self._once_told.add(call.what)
            of = (
                "the configuration" if call.step is None else f"the {call.what} of step {call.step}"
            )
            self._tell("tracker_lacks", f"it lacks {of}: {_shown(error)}", step=call.step)

    def _tell(self, kind: _NewsKind, why: str, **data: Any) -> None:
        message = f"tracker {self.name}: {why}; the run's metrics.jsonl has all"
        _log.warning(kind, tracker=self.name, message=message)
        with self._lock:
            self._news.append(TrackerNews(kind, message, {"tracker": self.name, **data}))


def _shown(error: BaseException) -> str:
    """Return an error in one line, bounded: what a library says may be a page."""
    try:
        text = " ".join(str(error).split())[:_SHOWN_CHARACTERS]
    except BaseException:  # noqa: BLE001  it is the library's own class
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _link(source: str, target: str) -> str:
    """Link a file, or copy it where the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target


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

    def abandon(self, error: BaseException) -> None:
        """End the writer's thread."""
        del error
        with contextlib.suppress(OSError):
            self._writer.close()

    def _add(self, values: list[dict[str, Any]], *, step: int) -> None:
        summary = self._summaries.Summary()
        for value in values:
            summary.value.add(**value)
        self._writer.add_event(
            self._events.Event(wall_time=time.time(), step=step, summary=summary)
        )
        self._writer.flush()  # else failures are reported minutes later


class WandbTracker(Tracker):
    """A run at Weights & Biases, or, offline, its files in the folder: `wandb sync` sends them.

    Charts are drawn over `step`: what is logged late (a validation), or again (after a crash),
    comes to its own place instead of being left out.
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

    def abandon(self, error: BaseException) -> None:
        """Forget the library's service process once it has died: else no run can begin."""
        if isinstance(error, ConnectionError):
            with contextlib.suppress(ConnectionError):
                self._wandb.teardown()


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
            from mlflow.protos.databricks_pb2 import INTERNAL_ERROR, ErrorCode
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
            if error.error_code == ErrorCode.Name(INTERNAL_ERROR):  # also: it does not answer
                raise
            raise ConfigError(f"MLflow at {uri} cannot start a run: {error}") from error

    def _opened(self, run: TrackedRun) -> str:
        """Return the id of the run, which may have been begun before."""
        known = self._client.get_experiment_by_name(run.project)
        experiment = known.experiment_id if known else self._client.create_experiment(run.project)
        if run.id:
            runs = self._client.search_runs(
                [experiment], f"tags.tinkermq = '{run.id}'", max_results=1
            )
            if runs:
                return str(runs[0].info.run_id)
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
        values = [
            self._metric(_mlflow_name(name), value, now, step)
            for name, value in metrics.items()
            if math.isfinite(value)
        ]
        for first in range(0, len(values), _MLFLOW_BATCH):
            self._client.log_batch(self._id, metrics=values[first : first + _MLFLOW_BATCH])

    def log_episodes(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Keep the table as a file."""
        if rows:
            columns = list(rows[0])
            table = {"columns": columns, "data": [[*row.values()] for row in rows]}
            self._client.log_dict(self._id, table, f"rollouts/step_{step:06d}.json")

    def log_checkpoint(self, folder: Path, step: int) -> None:
        """Upload the files."""
        del step  # the folder is named after it
        self._client.log_artifacts(self._id, str(folder), f"checkpoints/{folder.name}")

    def finish(self) -> None:
        """Say that the run has ended."""
        self._client.set_terminated(self._id)


def _mlflow_name(name: str) -> str:
    """Return a metric's name as MLflow takes it: in its characters, as a path without detours."""
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


def _json_number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _write_line(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
