"""Metrics reach each tracker under their own names."""

import json
import math
import os
import sqlite3
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tinkermq.broker.observe.tracking import ConsoleTracker, TrackedRun, make_trackers
from tinkermq.schemas.wire.errors import ConfigError, StorageError

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


def make(backend: str, folder: Path):
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
    checkpoint = tmp_path / "step_000001"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text("{}")
    tracker = make("wandb-offline", tmp_path / "run")
    tracker.log_config({"seed": 3})
    tracker.log({"training_step_reward": 0.5}, 2)
    tracker.log({"val/mean_score": 0.25}, 1)  # told late
    tracker.log_episodes(ROWS, 2)
    tracker.log_checkpoint(checkpoint, 1)
    (checkpoint / "config.json").unlink()
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
    assert any("job-1" in str(one) or "run-a-checkpoint" in str(one) for one in records)


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
    with pytest.raises(ConfigError, match="MLFLOW_TRACKING_URI is not set where this runs"):
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


def test_trackio_goes_on_with_the_run_of_the_same_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("trackio")
    script = """
import sys
from tests.broker.test_tracking import ROWS, make
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
from tinkermq.broker.observe.tracking import TrackedRun, make_trackers
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
