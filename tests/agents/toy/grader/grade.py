"""Tells what share of the tests passes in this folder."""

import sys
from pathlib import Path

import pytest


class Counts:
    """How the tests ended."""

    passed = total = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test."""
        if report.when == "call":
            self.total += 1
            self.passed += report.passed


counts = Counts()
sys.path.insert(0, str(Path.cwd()))
checks = Path(__file__).parent / "check_adding.py"
pytest.main(["-q", "-p", "no:cacheprovider", "--import-mode=importlib", str(checks)], [counts])
print(counts.passed / max(1, counts.total))
