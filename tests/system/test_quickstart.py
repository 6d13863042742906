"""The quickstart does what it says, and leaves no process behind, however it ends."""

import os
import re
import shutil
import signal
import subprocess
import time
import uuid
from pathlib import Path

import pytest
from tinkermq.actors.warm_start import digest_of, mark_made

from tests.clients.command import command
from tests.support.configs import REPOSITORY
from tests.support.stack_fixtures import warm_model
from tests.support.waiting import PATIENCE_S
from tests.support.wheel import build_wheel, install_wheel

MARK = "TINKERMQ_TEST_MARK"


def start(mark: str, *overrides: str) -> "subprocess.Popen[str]":
    """Start the quickstart with a mark in its environment, which all it starts inherit."""
    return subprocess.Popen(
        command(["quickstart", *overrides]),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, MARK: mark},
        start_new_session=True,
    )


def marked(mark: str) -> list[str]:
    """Return the command lines of all processes with a mark in their environment."""
    found: list[str] = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue  # it ended meanwhile, or is another user's
    return found


def assert_nothing_left(mark: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while left := marked(mark):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


@pytest.mark.learns
def test_the_quickstart_trains_and_shows_reward_and_plot_and_what_to_try_next(
    tmp_path: Path,
) -> None:
    mark = uuid.uuid4().hex
    process = start(mark, f"output_dir={tmp_path}")
    out, _ = process.communicate()
    assert process.returncode == 0, out
    assert "step 60/60" in out
    told = re.search(r"^reward (0\.\d\d) → (0\.\d\d|1\.00) ", out, re.MULTILINE)
    assert told, out
    assert float(told[1]) <= 0.5
    assert float(told[2]) >= 0.75
    assert "│" in out
    assert "try next" in out
    assert out.count("tinkermq ") >= 3
    picture = next(line.split()[-1] for line in out.splitlines() if line.startswith("plot "))
    assert (REPOSITORY / picture).read_text().count("<polyline") == 2
    folder = next(line.split()[-1] for line in out.splitlines() if line.startswith("run folder"))
    assert (REPOSITORY / folder / "metrics.jsonl").exists()
    *_, last = out.splitlines()
    assert last.startswith("tinkermq verify: passed (steps recorded: 60; "), last
    assert_nothing_left(mark)


@pytest.mark.full
def test_control_c_stops_everything(tmp_path: Path, model: Path) -> None:
    made_before = tmp_path / "models" / "calculator"
    shutil.copytree(model, made_before)  # a random one, as the run is interrupted
    mark_made(made_before, digest_of("calculator"))
    mark = uuid.uuid4().hex
    with start(mark, f"output_dir={tmp_path}", "training.num_steps=500") as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("training_started"):
                break
        assert len(marked(mark)) >= 5
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate()
    assert process.returncode == 130
    assert "interrupted; everything was stopped" in out
    assert_nothing_left(mark)


@pytest.mark.long
@pytest.mark.learns
def test_a_language_model_learns_sums_and_its_answers_are_shown_before_and_after(
    tmp_path: Path,
) -> None:
    mark = uuid.uuid4().hex
    folder = ("--output-dir", str(tmp_path))
    process = start(mark, "--real", *folder, "training.num_steps=10", "training.test_freq=10")
    out, _ = process.communicate()
    assert process.returncode == 0, out
    told = re.search(r"^reward (0\.\d\d) → (0\.\d\d|1\.00) ", out, re.MULTILINE)
    assert told, out
    assert float(told[1]) <= 0.15
    assert float(told[2]) >= float(told[1]) + 0.15
    assert len(re.findall(r"^What is \d\d \+ \d\d\?", out, re.MULTILINE)) == 3
    assert_nothing_left(mark)


@pytest.mark.full
def test_a_killed_quickstart_takes_its_stack_with_it(tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    with start(mark, f"output_dir={tmp_path}", "training.num_steps=500") as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("stack "):
                break
        process.kill()
    assert_nothing_left(mark)


@pytest.mark.full
def test_a_wheel_is_enough_and_all_files_are_below_the_output_folder(tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    programs = install_wheel(build_wheel(tmp_path), tmp_path / "venv")
    empty, user = tmp_path / "empty", tmp_path / "user"
    shutil.copytree(warm_model("calculator"), empty / "a run's #1" / "models" / "calculator")
    user.mkdir()
    left_out = {"PYTHONPATH", "TINKERMQ_HOME", "TINKERMQ_NATS_URL"}
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    words = ["--output-dir", "a run's #1", "training.num_steps=2", "training.test_freq=0"]
    done = subprocess.run(
        [str(programs / "tinkermq"), "quickstart", *words],
        cwd=empty,
        env={**environment, MARK: mark, "HOME": str(user), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "made before" in done.stderr
    assert "step 2/2" in done.stdout
    (told,) = re.findall(r"^run folder (.+)$", done.stdout, re.MULTILINE)
    assert (empty / told / "metrics.jsonl").is_file()
    assert [path.name for path in empty.iterdir()] == ["a run's #1"]
    assert not [path for path in (empty / "a run's #1").iterdir() if path.name.startswith(".")]
    assert not list(user.iterdir())
    assert_nothing_left(mark)
