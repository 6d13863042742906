"""Tests of a machine with GPUs: `make test-gpu` runs them, `make test-gpu DEVICE=cpu` a small form.

What a test measures it records with `record_property`; the figures follow behind the results, and
are appended to the file that FIGURES names, of which `tests.gpu.report` makes the report.
"""

import os
from pathlib import Path

import pytest
import torch

from tests.gpu.material import RandomPolicy
from tests.gpu.report import append_figures


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


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep what was measured for the report."""
    path = os.environ.get("FIGURES")
    if path and (report.when == "call" or not report.passed):
        append_figures(Path(path), report)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what was measured."""
    for outcome in ("passed", "failed"):
        for report in terminalreporter.getreports(outcome):
            if report.when == "call" and report.user_properties:
                terminalreporter.write_line(report.nodeid.rpartition("::")[2])
                for name, value in report.user_properties:
                    shown = f"{value:.4g}" if isinstance(value, float) else value
                    terminalreporter.write_line(f"    {name}: {shown}")
