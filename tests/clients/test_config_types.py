"""Editors find keys and values of a configuration that there are not."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
ROOMS = ("schemas", "broker", "envs", "actors", "clients")
GOOD = """
from tinkermq.clients import JobConfigDict

config: JobConfigDict = {
    "model": {"path": "m"},
    "env": {"game": "bandit", "on_step_timeout": "penalty"},
    "learner": {"lr": 1e-5, "betas": [0.9, 0.99]},
    "algorithm": {"correction_masks": [{"over": "token", "high": 2.0}]},
}
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("", "", "0 errors"),
        ('"lr"', '"lrr"', '"lrr" is an undefined item'),
        ('"penalty"', '"punish"', "Literal['punish']"),
    ],
)
def test_a_type_checker_knows_the_keys(tmp_path: Path, old: str, new: str, told: str) -> None:
    (tmp_path / "tinkermq").mkdir()
    for room in ROOMS:  # pyright does not follow what an editable installation does
        (tmp_path / "tinkermq" / room).symlink_to(ROOT / room)
    file = tmp_path / "mine.py"
    file.write_text(GOOD.replace(old, new) if old else GOOD)
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, str(file)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_S, cwd=tmp_path, check=False
    )
    assert told in done.stdout, done.stdout
