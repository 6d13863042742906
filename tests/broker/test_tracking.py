"""Metrics reach each tracker under their own names."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tinkermq.broker.observe.tracking import ConsoleTracker, make_trackers
from tinkermq.schemas.wire.errors import ConfigError, StorageError


def make(backend: str, folder: Path):
    return make_trackers([backend], folder=folder, project="tests", name="run-a")[0]


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
    tracker.log({"training_step_reward": 0.5}, 1)
    tracker.finish()
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb"))


TRACKED = """
import sys
from tinkermq.broker.observe.tracking import make_trackers
make_trackers(["wandb"], folder=sys.argv[1], project="p", name="r")
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
        make("mlflow", tmp_path)
