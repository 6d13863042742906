"""Kills and stops at random over all roles, and every group of every run accounted for.

The long form, by hand: `python -m tests.faults.soak --kills 200 --seed 1`.
"""

import random
from pathlib import Path

import pytest

from tests.faults.soak.__main__ import Options, soak

pytestmark = [pytest.mark.long, pytest.mark.faults]


@pytest.mark.timeout(1500)
async def test_a_soak_of_twenty_kills_loses_no_group_and_trains_none_twice(
    tmp_path: Path, model: Path
) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    outcome = await soak(Options(kills=20, seed=seed, folder=tmp_path, steps=24), model)
    print(outcome.table)
    assert outcome.is_clean, f"{outcome.table}\nagain: tests.faults.soak --kills 20 --seed {seed}"
