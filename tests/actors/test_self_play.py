"""Which earlier versions are played against, and who learns in a task."""

from collections import Counter

import pytest
from tinkermq.actors.rollout.self_play import learning_roles, pool
from tinkermq.schemas.config.sections import SelfPlayConfig


@pytest.mark.parametrize(
    ("version", "expected"),
    [(0, [0]), (1, [0]), (10, [0]), (11, [0, 10]), (35, [10, 20, 30]), (41, [20, 30, 40])],
)
def test_the_pool_holds_the_newest_kept_versions_before_the_present_one(
    version: int, expected: list[int]
) -> None:
    config = SelfPlayConfig(past_share=0.5, pool_every=10, pool_size=3)
    assert pool(config, version) == expected


def test_without_a_share_nothing_is_kept() -> None:
    assert pool(SelfPlayConfig(), 100) == []


def test_a_version_stays_in_the_pool_until_newer_ones_push_it_out() -> None:
    config = SelfPlayConfig(past_share=1.0, pool_every=4, pool_size=2)
    for version in range(1, 40):
        gone = set(pool(config, version)) - set(pool(config, version + 1))
        assert gone <= {min(pool(config, version))}


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_that_share_of_the_tasks_has_one_learning_role_and_each_role_its_turn(share: float) -> None:
    config = SelfPlayConfig(past_share=share)
    found = [tuple(learning_roles(config, ["x", "o"], seed)) for seed in range(2000)]
    assert found == [tuple(learning_roles(config, ["x", "o"], seed)) for seed in range(2000)]
    counts = Counter(found)
    assert counts[("x", "o")] / 2000 == pytest.approx(1 - share, abs=0.04)
    assert counts[("x",)] == pytest.approx(counts[("o",)], abs=120)
