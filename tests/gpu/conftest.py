"""Tests of a machine with GPUs: `make test-gpu` runs them, `make test-gpu DEVICE=cpu` a small form.

What a test measures it gives to `record`: it is printed at once, and appended to the file that
FIGURES names, of which `tests.gpu.report` makes the report.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.material import RandomPolicy
from tests.gpu.report import Recorder, append, as_text, figure


def pytest_itemcollected(item: pytest.Item) -> None:
    """Let libraries warn: which of their code runs, and of which version, is a machine's matter."""
    item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session")
def on_gpu() -> bool:
    """Return whether the tests run on GPUs, else on the CPU with tiny sizes."""
    if os.environ.get("DEVICE", "gpu") == "cpu":
        return False
    assert torch.cuda.is_available(), "torch finds no GPU; `tinkermq doctor --gpu` says why"
    return True


@pytest.fixture
def policy(tmp_path: Path, on_gpu: bool) -> RandomPolicy:
    """Return a small random model, whose heads any attention kernel of the device takes."""
    return RandomPolicy.make(tmp_path / "model", on_gpu=on_gpu)


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Recorder:
    """Return `record(name, value, unit="")`, which prints a figure at once and keeps it."""
    capture: Any = request.config.pluginmanager.getplugin("capturemanager")

    def keep(name: str, value: Any, unit: str = "") -> None:
        line = figure(name, value, unit)
        with capture.global_and_fixture_disabled():
            print(as_text(line), flush=True)
        if path := os.environ.get("FIGURES"):
            append(Path(path), test=request.node.nodeid, **line)

    return keep


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep the outcome of a test for the report."""
    path = os.environ.get("FIGURES")
    if path and (report.when == "call" or not report.passed):
        append(
            Path(path),
            test=report.nodeid,
            outcome=report.outcome,
            seconds=report.duration,
            reason=_reason(report),
        )


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Keep why a module could not be imported, or was skipped."""
    path = os.environ.get("FIGURES")
    if path and not report.passed:
        append(Path(path), test=report.nodeid, outcome=report.outcome, reason=_reason(report))


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Return why a test was skipped, or the last line of its error."""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = (crash.message if crash else report.longreprtext).splitlines()
    return lines[0 if crash else -1] if lines else ""
