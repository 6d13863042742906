"""`tinkermq plan --measured` reads the report with which `make test-gpu` ends."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import Cli
from tests.gpu.report import EFFICIENCIES, RATIOS, main
from tests.support.configs import REPOSITORY

GSM8K = REPOSITORY / "examples" / "gsm8k.yaml"


def lines(path: Path, *figures: dict[str, Any]) -> Path:
    """Write what tests recorded, a line each."""
    tests = [
        {"test": "a", "outcome": "passed", "seconds": 1.0, "figures": each} for each in figures
    ]
    path.write_text("".join(json.dumps(test) + "\n" for test in tests))
    return path


@pytest.mark.full
def test_a_plan_takes_the_efficiencies_that_a_step_reached(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEVICE", "gpu")  # on which tests may be skipped
    figures, report = tmp_path / "figures", tmp_path / "report.json"
    environment = os.environ | {
        "DEVICE": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "FIGURES": str(figures),
    }
    module = "tests/gpu/test_step_speed.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu_machine"]
    subprocess.run([*command, module], cwd=REPOSITORY, env=environment, check=True)
    assert main([str(figures), str(report)]) == 0
    written = json.loads(report.read_text())
    assert written["efficiencies"]["learner_of_peak"] > 0
    assert set(written["ratios"]) == {"learner_of_matrix_product", "step_over_transformers"}
    assert {test["outcome"] for test in written["tests"]} == {"passed"}
    told = cli("plan", str(GSM8K), "--gpus", "2xH100", "--measured", str(report))
    assert told.code == 0
    assert f"efficiencies that are measured, {report}" in told.out


def test_the_last_value_of_a_name_counts(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    main(
        [
            str(lines(tmp_path / "f", {"learner_of_peak": 0.2}, {"learner_of_peak": 0.3})),
            str(report),
        ]
    )
    assert json.loads(report.read_text())["efficiencies"] == {"learner_of_peak": 0.3}


@pytest.mark.parametrize("lacking", [*RATIOS, *EFFICIENCIES])
def test_without_a_gpu_no_figure_may_be_missing(
    lacking: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("DEVICE", "cpu")
    figures = dict.fromkeys((*RATIOS, *EFFICIENCIES), 0.5)
    report = str(tmp_path / "report.json")
    assert main([str(lines(tmp_path / "all", figures)), report]) == 0
    assert f"report: {report}" in capsys.readouterr().out
    del figures[lacking]
    assert main([str(lines(tmp_path / "fewer", figures)), report]) == 1
    assert f"not measured: {lacking}" in capsys.readouterr().out


def test_a_report_of_nothing_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.json"
    assert main([str(tmp_path / "none"), str(report)]) == 1
    assert "no test has written to" in capsys.readouterr().err
    assert main([str(lines(tmp_path / "empty", {})), str(report)]) == 1
    assert json.loads(report.read_text())["efficiencies"] == {}
