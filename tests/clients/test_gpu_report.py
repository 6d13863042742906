"""`tinkermq plan --measured` reads the report with which `make test-gpu` ends."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import Cli
from tests.gpu.__main__ import FIRST
from tests.gpu.report import LINES, MAX_TABLE_LINES, append, figure, main
from tests.support.configs import REPOSITORY

GSM8K = REPOSITORY / "examples" / "gsm8k.yaml"
RUNNER = [sys.executable, "-m", "tests.gpu", "--device", "cpu"]


def recorded(folder: Path, **figures: Any) -> Path:
    """Write what tests recorded, in order; return the folder."""
    folder.mkdir(exist_ok=True)
    for name, value in figures.items():
        append(folder / "figures.jsonl", test="a", **figure(name, value))
    return folder


def report_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "report.json").read_text())


@pytest.mark.full
def test_a_plan_takes_the_efficiencies_that_a_step_reached(cli: Cli, tmp_path: Path) -> None:
    command = [*RUNNER, "--folder", str(tmp_path), "--budget", "600", "step_speed"]
    ran = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert ran.returncode == 1  # of a CPU no figure may be missing
    assert "not measured: send_idle_s" in ran.stdout
    report = report_of(tmp_path)
    assert report["efficiencies"]["learner_of_peak"] > 0
    assert {test["outcome"] for test in report["tests"]} == {"passed"}
    told = cli("plan", str(GSM8K), "--gpus", "2xH100", "--measured", str(tmp_path / "report.json"))
    assert told.code == 0
    assert f"efficiencies that are measured, {tmp_path / 'report.json'}" in told.out


@pytest.mark.full
def test_what_the_budget_leaves_out_is_named_with_the_reason(tmp_path: Path) -> None:
    command = [*RUNNER, "--folder", str(tmp_path), "--budget", "0", "copies", "weights"]
    ran = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert "left out: the budget of 0 s was spent — test_copies.py, test_weights.py" in ran.stdout
    assert [test["outcome"] for test in report_of(tmp_path)["tests"]] == ["left out"] * 2


def test_every_module_of_tests_has_its_place() -> None:
    there = {path.stem.removeprefix("test_") for path in REPOSITORY.glob("tests/gpu/test_*.py")}
    assert set(FIRST) == there


def test_the_last_value_of_a_name_counts(tmp_path: Path) -> None:
    recorded(tmp_path, learner_of_peak=0.2)
    main([str(recorded(tmp_path, learner_of_peak=0.3))])
    assert report_of(tmp_path)["efficiencies"] == {"learner_of_peak": 0.3}


@pytest.mark.parametrize(
    ("name", "value", "verdict"),
    [
        ("full_16k_tokens_per_s", 11_900, "ok"),
        ("full_16k_tokens_per_s", 11_899.0, "low"),
        ("swap_pause_s", 1.5, "high"),
        ("send_idle_s", 1.0, "-"),
        ("by", "NCCL", "-"),
    ],
)
def test_a_figure_of_a_gpu_is_compared_with_what_is_expected(
    name: str, value: object, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEVICE", "gpu")
    assert figure(name, value)["verdict"] == verdict
    monkeypatch.setenv("DEVICE", "cpu")
    assert figure(name, value)["verdict"] == "-"


def test_the_table_is_short_and_ends_with_what_failed_or_was_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = recorded(tmp_path, **dict.fromkeys(LINES, 0.5), other=1)
    for number in range(9):
        outcome = {"outcome": "failed" if number == 8 else "skipped", "reason": f"why {number}"}
        append(folder / "figures.jsonl", test=f"tests/gpu/test_{number}.py", **outcome)
    main([str(folder)])
    *table, report = capsys.readouterr().out.splitlines()
    assert report == f"report: {folder / 'report.json'}"
    assert len(table) == MAX_TABLE_LINES
    assert table[0].split()[:3] == ["send_idle_s", "0.5", "s"]
    assert table[-5:] == [
        "failed: why 8 — test_8.py",
        *[f"skipped: why {number} — test_{number}.py" for number in range(3)],
        "5 reasons more: the report",
    ]


@pytest.mark.parametrize("lacking", LINES)
def test_without_a_gpu_no_figure_may_be_missing(
    lacking: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("DEVICE", "cpu")
    figures = {name: 0.5 for name, line in LINES.items() if line.anywhere}
    assert main([str(recorded(tmp_path / "all", **figures))]) == 0
    figures.pop(lacking, None)
    assert main([str(recorded(tmp_path / "fewer", **figures))]) == int(LINES[lacking].anywhere)
    assert (f"not measured: {lacking}" in capsys.readouterr().out) is LINES[lacking].anywhere


def test_a_report_of_nothing_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DEVICE", raising=False)
    assert main([str(tmp_path)]) == 1
    assert "no test has written to" in capsys.readouterr().err
    (tmp_path / "figures.jsonl").write_text("")
    assert main([str(tmp_path)]) == 1
    assert report_of(tmp_path)["efficiencies"] == {}


@pytest.mark.full
def test_a_bare_tree_has_the_package_its_version_and_its_games(tmp_path: Path) -> None:
    """A Python in which tinkermq is not installed finds all three."""
    program = (
        "import sys, tomllib; sys.path.insert(0, '.'); from pathlib import Path;"
        "from tests.gpu.__main__ import linked;"
        "tree = linked(Path(sys.argv[1]), tomllib.loads(Path('pyproject.toml').read_text()));"
        "sys.path[:] = [str(tree), *(p for p in sys.path if 'site-packages' not in p)];"
        "import tinkermq; from importlib.metadata import entry_points, version;"
        "from tinkermq.schemas.plan import cards;"
        "print(version('tinkermq') == tinkermq.__version__, cards.__file__,"
        " {one.name for one in entry_points(group='tinkermq.envs')} >= {'bandit', 'mcp'})"
    )
    command = [sys.executable, "-S", "-c", program, str(tmp_path)]
    ran = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    place = f"{tmp_path}/tinkermq/schemas/plan/cards.py"
    assert ran.stdout.split() == ["True", place, "True"], ran.stderr
