"""How busy a machine's cores are is the difference between two looks at the kernel's counters."""

from pathlib import Path

import pytest
from tinkermq.actors.learner.reporter import CoreUse


def test_the_busy_share_is_that_since_the_last_look(tmp_path: Path) -> None:
    counters = tmp_path / "stat"
    counters.write_text("cpu  100 0 50 800 50 0 0 0 0 0\ncpu0 1 2 3\n")
    cores = CoreUse(counters)
    counters.write_text("cpu  170 0 70 805 55 0 0 0 70 0\ncpu0 1 2 3\n")
    assert cores.busy_share() == pytest.approx(0.9)
    assert cores.busy_share() == 0.0


def test_nothing_is_said_of_a_system_without_counters(tmp_path: Path) -> None:
    assert CoreUse(tmp_path / "none").busy_share() == 0.0
