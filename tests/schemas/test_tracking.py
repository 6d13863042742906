"""Metrics reach each tracker under their own names, and what trackers do wrong ends nothing."""

import asyncio
import json
import math
import os
import shutil
import sqlite3
import struct
import subprocess
import sys
import time
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from tinkermq.schemas.local.tracking import (
    ConsoleTracker,
    GuardedTracker,
    Outcome,
    TrackedRun,
    Tracker,
    TrackerEvent,
    hung_trackers,
    make_trackers,
)
from tinkermq.schemas.wire.errors import ConfigError, StorageError

from tests.support.waiting import PATIENCE_S, until

pytestmark = pytest.mark.full

RUN = TrackedRun(
    project="tests",
    name="run-a",
    id="job-1",
    entity="our-lab",
    group="sweep-3",
    tags=["baseline", "seed=3"],
    notes="the first of them",
)
ROWS = [{"reward": 0.5, "messages": "user: <b>hi</b>"}, {"reward": 1.0, "messages": "user: ho"}]


def make(backend: str, folder: Path) -> Any:
    return make_trackers([backend], RUN, folder=folder)[0]


def test_jsonl_writes_one_line_a_step_and_nan_as_null(tmp_path: Path) -> None:
    tracker = make("jsonl", tmp_path / "run")
    tracker.log_config({"seed": 3})
    tracker.log({"training_step_reward": 0.5, "actor/kl_loss": math.nan}, 1)
    tracker.finish()
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert line["step"] == 1
    assert line["training_step_reward"] == 0.5
    assert line["actor/kl_loss"] is None
    assert json.loads((tmp_path / "run" / "config.json").read_text()) == {"seed": 3}


def test_jsonl_appends_to_what_an_earlier_attempt_wrote(tmp_path: Path) -> None:
    for step in (1, 2):
        tracker = make("jsonl", tmp_path)
        tracker.log({"a": 1.0}, step)
        tracker.finish()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(StorageError, match="run"):
        make("jsonl", tmp_path / "run")


def test_the_console_shows_the_telling_numbers() -> None:
    lines: list[str] = []
    tracker = ConsoleTracker(lines.append)
    tracker.log({"training_step_reward": 0.25, "actor/lr": 1e-6}, 4)
    assert lines == ["step 4  training_step_reward 0.25"]


def test_tensorboard_files_can_be_read_by_tensorboard(tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    tracker = make("tensorboard", tmp_path)
    tracker.log_config({"seed": 3})
    for step, reward in ((1, 0.25), (2, 0.75)):
        tracker.log({"val/mean_score": reward}, step)
    tracker.finish()
    events = reader.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    scalars = events.Scalars("val/mean_score")
    assert [(scalar.step, scalar.value) for scalar in scalars] == [(1, 0.25), (2, 0.75)]
    assert b'"seed": 3' in events.Tensors("config")[0].tensor_proto.string_val[0]


def test_wandb_offline_keeps_the_run_in_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    tracker = make("wandb-offline", tmp_path / "run")
    tracker.log_config({"seed": 3})
    tracker.log({"training_step_reward": 0.5}, 2)
    tracker.log({"val/mean_score": 0.25}, 1)  # told late
    tracker.log_episodes(ROWS, 2)
    tracker.finish()
    (file,) = (tmp_path / "run" / "wandb").glob("offline-run-*/run-job-1.wandb")
    records = read_wandb(file)
    run = next(one.run for one in records if one.WhichOneof("record_type") == "run")
    told = (run.project, run.display_name, run.run_id, run.entity, run.run_group, run.notes)
    assert told == ("tests", "run-a", "job-1", "our-lab", "sweep-3", "the first of them")
    assert list(run.tags) == ["baseline", "seed=3"]
    items = [
        {item.key or "/".join(item.nested_key): item.value_json for item in one.history.item}
        for one in records
        if one.WhichOneof("record_type") == "history"
    ]
    assert {"val/mean_score": "0.25", "step": "1"}.items() <= items[1].items()
    assert any("table-file" in json.dumps(one) for one in items)
    assert any("job-1" in str(one) for one in records)


def read_wandb(file: Path) -> list[Any]:
    """Return the records of a run's file: LevelDB's log format behind a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    messages: Any = wandb_internal_pb2

    data, place, held = file.read_bytes(), 7, b""
    records: list[Any] = []
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        if place + 7 + length > len(data):
            break  # it is being written
        held += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = messages.Record()
            record.ParseFromString(held)
            records.append(record)
            held = b""
    return records


def test_mlflow_goes_on_with_the_run_of_the_same_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow.tracking")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(ConfigError, match="MLFLOW_TRACKING_URI is not set on this machine"):
        make("mlflow", tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/store")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    for step in (1, 2):
        tracker = make("mlflow", tmp_path)
        tracker.log_config({"seed": 3})
        tracker.log({"val/pass@4": step / 4, "actor/kl": math.nan}, step)
        tracker.log_episodes(ROWS, step)
        tracker.finish()
    client = mlflow.MlflowClient(tracking_uri=f"file://{tmp_path}/store")
    experiment = client.get_experiment_by_name("tests")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.data.tags["group"]) == ("run-a", "sweep-3")
    values = client.get_metric_history(run.info.run_id, "val/pass_4")
    assert [(one.step, one.value) for one in values] == [(1, 0.25), (2, 0.5)]
    files = [one.path for one in client.list_artifacts(run.info.run_id, "rollouts")]
    assert files == ["rollouts/step_000001.json", "rollouts/step_000002.json"]


def test_mlflow_has_the_state_of_the_run_also_after_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow.tracking")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/store")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = mlflow.MlflowClient(tracking_uri=f"file://{tmp_path}/store")

    def state() -> str:
        experiment = client.get_experiment_by_name("tests")
        (run,) = client.search_runs([experiment.experiment_id])
        return run.info.status

    outcomes: list[Outcome] = ["FAILED", "KILLED", "FINISHED"]
    for outcome in outcomes:
        tracker = make("mlflow", tmp_path)
        assert state() == "RUNNING"
        tracker.finish(outcome)
        assert state() == outcome


@pytest.mark.parametrize(("outcome", "code"), [("FINISHED", 0), ("FAILED", 1), ("KILLED", 255)])
async def test_wandb_is_told_how_a_run_ended(
    outcome: Outcome, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    tracker = make("wandb-offline", tmp_path)
    tracker.log({"training_step_reward": 0.5}, 1)
    tracker.finish(outcome)
    (file,) = (tmp_path / "wandb").glob("offline-run-*/run-job-1.wandb")

    def exit_codes() -> list[int]:
        records = (one for one in read_wandb(file) if one.WhichOneof("record_type") == "exit")
        return [one.exit.exit_code for one in records]

    await until(lambda: bool(exit_codes()), "wandb's service to write the end")
    assert exit_codes() == [code]


def test_mlflow_takes_what_a_game_names_like_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow.tracking")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/store")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    tracker = make("mlflow", tmp_path)
    tracker.log({"a/": 1, "game/https://x/..": 2, "game/../../y": 3, "game/z/.": 4}, 1)
    tracker.finish()
    assert tracker.take_events() == []
    client = mlflow.MlflowClient(tracking_uri=f"file://{tmp_path}/store")
    experiment = client.get_experiment_by_name("tests")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.metrics == {
        "a/_": 1,
        "game/https_/_/x/_": 2,
        "game/_/_/y": 3,
        "game/z/_": 4,
    }


def test_trackio_goes_on_with_the_run_of_the_same_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("trackio")
    script = """
import sys
from tests.schemas.test_tracking import ROWS, make
from pathlib import Path
step = int(sys.argv[1])
tracker = make("trackio", Path("."))
tracker.log_config({"seed": 3})
tracker.log({"val/mean_score": step / 4}, step)
tracker.log_episodes(ROWS, step)
tracker.finish()
"""
    for step in ("1", "2"):
        subprocess.run(
            [sys.executable, "-c", script, step],
            env={**os.environ, "TRACKIO_DIR": str(tmp_path), "HOME": str(tmp_path)},
            check=True,
            capture_output=True,
        )
    (database,) = tmp_path.glob("tests*.db")
    with sqlite3.connect(database) as found:
        rows = found.execute("select step, metrics from metrics order by step").fetchall()
    scores = [json.loads(told).get("val/mean_score") for _, told in rows]
    assert [one for one in scores if one is not None] == [0.25, 0.5]


TRACKED = """
import sys
from tinkermq.schemas.local.tracking import TrackedRun, make_trackers
make_trackers(["wandb"], TrackedRun(project="p", name="r"), folder=sys.argv[1])
"""


def test_wandb_without_a_key_is_refused_with_what_works_without_one(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    kept = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    done = subprocess.run(  # wandb remembers how it first began in a process
        [sys.executable, "-c", TRACKED, str(tmp_path / "run")],
        env={**kept, "HOME": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "wandb cannot start a run" in done.stderr
    assert "name wandb-offline in place of wandb in logger_backends" in done.stderr


def test_a_missing_package_is_named_with_the_command_that_installs_it(tmp_path: Path) -> None:
    try:
        import trackio  # noqa: F401
    except ImportError:
        with pytest.raises(ConfigError, match=r"pip install 'tinkermq\[trackio\]'"):
            make("trackio", tmp_path)
    else:
        pytest.skip("trackio is installed")


def test_an_unknown_backend_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="known are console, jsonl"):
        make("comet", tmp_path)


class Faulty(Tracker):
    """A library that fails by what `faults` says of a method, as often as there are faults."""

    def __init__(self, **faults: list[Any]) -> None:
        self.faults = faults
        self.told: list[tuple[str, Any]] = []

    def open(self) -> "Faulty":
        self._do("open", None)
        return self

    def _do(self, name: str, what: Any) -> None:
        for fault in self.faults.get(name, [])[:1]:
            del self.faults[name][0]
            if isinstance(fault, Event):
                fault.wait()
            else:
                raise fault
        self.told.append((name, what))

    def log_config(self, config: Any) -> None:
        self._do("config", dict(config))

    def log(self, metrics: Any, step: int) -> None:
        self._do("log", step)

    def log_episodes(self, rows: Any, step: int) -> None:
        self._do("episodes", step)

    def finish(self, outcome: Outcome = "FINISHED") -> None:
        self._do("finish", None)


class Unspeakable(BaseException):
    """Says nothing of itself, and raises when it is asked."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


OF_TENSORBOARD = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnhandledThreadExceptionWarning"  # its thread ends with a traceback
)
FAULTS = [
    OSError(32, "Broken pipe"),
    ConnectionResetError("Connection lost"),
    RuntimeError("x" * 10_000),
    SystemExit(1),
    KeyboardInterrupt(),
    GeneratorExit(),
    asyncio.CancelledError(),
    MemoryError(),
    Unspeakable(),
    StopIteration(),
]


def guard(library: Faulty, **options: Any) -> GuardedTracker:
    patient = {"ends_s": PATIENCE_S, "opens_s": PATIENCE_S}
    return GuardedTracker("lib", library.open, **{**patient, **options})


def log_steps(tracker: GuardedTracker, *steps: int) -> list[TrackerEvent]:
    for step in steps:
        tracker.log({"a": 1.0, "b": 2.0}, step)
    tracker.finish()
    return tracker.take_events()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__)
def test_whatever_a_tracker_raises_it_is_left_out_and_told_once(
    fault: BaseException, tmp_path: Path
) -> None:
    gate = Event()
    tracker = guard(Faulty(log=[gate, *[fault] * 100]))
    for step in range(4):
        tracker.log({"a": 1.0, "b": 2.0}, step)
    gate.set()
    (news,) = log_steps(tracker)
    assert news.kind == "tracker_lost"
    assert f"tracker lib: {type(fault).__name__}" in news.message
    assert "at step 1; it lacks 3 steps (6 points), from step 1 on" in news.message
    assert news.data["points_lost"] == 6
    assert len(news.message) < 600


@pytest.mark.parametrize("where", ["open", "log", "finish"])
def test_a_tracker_that_hangs_holds_nobody(where: str, tmp_path: Path) -> None:
    release = Event()
    faults: dict[str, list[Any]] = {where: [release]}
    tracker = guard(Faulty(**faults), opens_s=0.05, ends_s=0.2)
    (news,) = log_steps(tracker, 1, 2)
    release.set()
    assert news.kind == "tracker_lost"
    assert "no answer within 0.2 s" in news.message
    assert "lib" in hung_trackers()


def test_a_tracker_that_hangs_in_a_long_run_is_left_out_in_the_middle(tmp_path: Path) -> None:
    release = Event()
    tracker, news = guard(Faulty(log=[release]), hangs_s=0.1), list[TrackerEvent]()
    step = 0
    while not news:
        tracker.log({"a": 1.0}, step := step + 1)
        news = tracker.take_events()
        time.sleep(0.01)
    release.set()
    assert [one.kind for one in news] == ["tracker_lost"]
    assert news[0].data["steps_lost"] == step
    tracker.log({"a": 1.0}, step + 1)  # nobody takes it, and nobody waits
    tracker.finish()
    assert tracker.take_events() == []


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__)
def test_a_tracker_that_cannot_be_opened_is_told_and_left_out(
    fault: BaseException, tmp_path: Path
) -> None:
    (news,) = log_steps(guard(Faulty(open=[fault] * 100)), 1)
    assert news.kind == "tracker_lost"


def test_a_mistake_refuses_a_run_at_its_start_and_never_ends_one_that_goes_on(
    tmp_path: Path,
) -> None:
    mistake = ConfigError("no key", hint="set one")
    with pytest.raises(ConfigError, match="no key"):
        guard(Faulty(open=[mistake]))
    (news,) = log_steps(guard(Faulty(open=[mistake]), refuses=False), 7)
    assert news.kind == "tracker_lost"
    assert "no key" in news.message


@pytest.mark.parametrize("what", ["config", "episodes"])
def test_a_tracker_that_refuses_something_else_is_told_numbers_nevertheless(
    what: str, tmp_path: Path
) -> None:
    library = Faulty(**{what: [ValueError("no such thing")] * 6})
    tracker = guard(library)
    for step in (1, 2):
        tracker.log_config({"seed": 3})
        tracker.log_episodes(ROWS, step)
    news = log_steps(tracker, 1, 2)
    assert "tracker_lost" not in [one.kind for one in news]
    assert [step for name, step in library.told if name == "log"] == [1, 2]
    assert any("no such thing" in one.message for one in news)


@OF_TENSORBOARD
def test_tensorboard_whose_folder_became_a_file_is_left_out(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    tracker = make("tensorboard", tmp_path)
    tracker.log({"a": 1.0}, 1)
    tracker.flush(PATIENCE_S)
    shutil.rmtree(tmp_path / "tensorboard")
    (tmp_path / "tensorboard").write_text("no folder")
    (news,) = log_steps(tracker, 2, 3)
    assert news.kind == "tracker_lost"
    assert news.data["steps_lost"] == 2


OUTLIVES = """
import sys
from pathlib import Path
import psutil
from tests.schemas.test_tracking import PATIENCE_S, log_steps, make
tracker = make("wandb-offline", Path(sys.argv[1]))
tracker.log({"a": 1.0}, 1)
tracker.flush(PATIENCE_S)
killed = psutil.Process().children(recursive=True)
for one in killed:
    one.kill()
psutil.wait_procs(killed, timeout=PATIENCE_S)  # a zombie that nobody reaps is dead, too
print(len(killed), [news.kind for news in log_steps(tracker, 2, 3)])
"""


def test_a_service_of_wandb_that_dies_costs_a_run_nothing(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    kept = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    done = subprocess.run(
        [sys.executable, "-c", OUTLIVES, str(tmp_path / "run")],
        env={**kept, "HOME": str(tmp_path), "WANDB_SILENT": "true"},
        capture_output=True,
        text=True,
        check=True,
    )
    num_killed, kinds = done.stdout.splitlines()[-1].split(maxsplit=1)
    assert int(num_killed) > 0
    assert kinds == "['tracker_lost']"


def test_mlflow_whose_server_is_not_there_costs_a_run_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    (news,) = log_steps(make("mlflow", tmp_path), 1)
    assert news.kind == "tracker_lost"
    assert "MlflowException" in news.message
