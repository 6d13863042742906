"""Kills and stops at random over all roles, and every group of every run accounted for.

The long form, by hand: `python -m tests.faults.soak --kills 200 --seed 1`.
"""

import random
from pathlib import Path

import pytest

from tests.faults.soak.__main__ import Options, soak

pytestmark = [pytest.mark.long, pytest.mark.faults]


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("users", [False, True], ids=["open", "users"])
async def test_a_soak_of_twenty_kills_loses_no_group_and_trains_none_twice(
    tmp_path: Path, model: Path, users: bool
) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    options = Options(kills=20, seed=seed, folder=tmp_path, steps=24, users=users)
    outcome = await soak(options, model)
    print(outcome.table)
    again = f"tests.faults.soak --kills 20 --seed {seed}{' --users' if users else ''}"
    assert outcome.is_clean, f"{outcome.table}\nagain: {again}"
