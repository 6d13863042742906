"""The staleness gate: bounds, and no deadlock whatever is dropped."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinkermq.actors.learner.staleness import min_version, num_admissible


@pytest.mark.parametrize(
    ("version", "max_staleness", "returned", "total_steps", "expected"),
    [
        (0, 0, 0, None, 4),
        (0, 2, 0, None, 12),
        (5, 2, 3, None, 35),
        (5, 2, 3, 7, 31),
        (7, 2, 0, 7, 28),
    ],
)
def test_each_version_and_each_return_admits_tasks(
    version, max_staleness, returned, total_steps, expected
):
    assert num_admissible(version, max_staleness, 4, returned, total_steps) == expected


@pytest.mark.parametrize(
    ("slot", "max_staleness", "expected"),
    [(0, 0, 0), (3, 0, 0), (4, 0, 1), (11, 2, 0), (12, 2, 1), (15, 2, 1), (16, 2, 2)],
)
def test_a_task_begins_at_most_eta_versions_before_its_turn(slot, max_staleness, expected):
    assert min_version(slot, 4, max_staleness) == expected


@given(
    batch_size=st.integers(1, 5),
    max_staleness=st.integers(0, 4),
    total_steps=st.integers(1, 6),
    fates=st.lists(st.booleans(), max_size=60),
)
def test_the_gate_never_starves_and_never_bursts(batch_size, max_staleness, total_steps, fates):
    """Every group is dropped or kept at random; after the drops run out the job finishes."""
    version = issued = returned = outstanding = ready = 0
    drops = iter(fates)
    while version < total_steps:
        admissible = num_admissible(version, max_staleness, batch_size, returned, total_steps)
        while issued < admissible:
            needed = min_version(issued - returned, batch_size, max_staleness)
            assert needed <= version
            assert max_staleness or needed == version
            issued, outstanding = issued + 1, outstanding + 1
        assert outstanding + ready <= (max_staleness + 1) * batch_size
        assert outstanding + ready >= batch_size  # else this step would wait for ever
        outstanding -= 1
        if next(drops, False):
            returned += 1
        else:
            ready += 1
        if ready >= batch_size:
            ready, version = ready - batch_size, version + 1
    assert issued == total_steps * batch_size + returned
