"""Which node gets which actor."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinkermq.actors.scheduler.placement import (
    Assignment,
    NodeSlots,
    PlacementRequest,
    place,
    refuse_impossible,
    why_waiting,
)
from tinkermq.schemas.errors import PlacementError
from tinkermq.schemas.job import ActorPlacement

LEARNER = ActorPlacement(name="learner", role="learner", slots=1)
EVALUATOR = ActorPlacement(name="evaluator-0", role="evaluator", slots=0)
HOST = ActorPlacement(name="environment-0", role="environment", slots=0)


def generators(count: int) -> tuple[ActorPlacement, ...]:
    return tuple(
        ActorPlacement(name=f"generator-{i}", role="generator", slots=1) for i in range(count)
    )


def job(key: str, num_generators: int) -> PlacementRequest:
    return PlacementRequest(key, (LEARNER, *generators(num_generators), EVALUATOR, HOST))


def node(name: str, total: int, free: int | None = None) -> NodeSlots:
    return NodeSlots(name, total, total if free is None else free)


def nodes_of(assignments: list[Assignment], key: str) -> dict[str, str]:
    return {given.actor: given.node for given in assignments if given.job == key}


def test_a_laptop_with_two_slots_runs_learner_generator_evaluator_and_host() -> None:
    given = nodes_of(place([job("a", 1)], [node("laptop", 2)]), "a")
    assert given == dict.fromkeys(
        ["learner", "generator-0", "evaluator-0", "environment-0"], "laptop"
    )


def test_a_job_stays_on_one_node_if_it_fits_there() -> None:
    given = nodes_of(place([job("a", 2)], [node("one", 2), node("three", 3)]), "a")
    assert set(given.values()) == {"three"}


def test_the_fullest_node_that_fits_is_taken_so_that_large_ones_stay_free() -> None:
    given = nodes_of(place([job("a", 1)], [node("big", 8), node("small", 2)]), "a")
    assert set(given.values()) == {"small"}


def test_a_job_too_large_for_one_node_spreads() -> None:
    given = nodes_of(place([job("a", 3)], [node("one", 2), node("two", 2)]), "a")
    assert sorted(given.values()).count("one") == 4  # two slots, evaluator and host
    assert sorted(given.values()).count("two") == 2


def test_a_job_starts_whole_or_not_at_all() -> None:
    assert place([job("a", 2)], [node("n", 3, free=2)]) == []


def test_those_behind_a_job_that_waits_for_slots_wait_too() -> None:
    assert place([job("large", 2), job("small", 1)], [node("n", 3, free=2)]) == []


def test_a_job_over_the_whole_pool_lets_the_others_pass() -> None:
    given = place([job("huge", 9), job("small", 1)], [node("n", 2)])
    assert {one.job for one in given} == {"small"}


def test_slots_given_to_the_first_job_are_gone_for_the_second() -> None:
    given = place([job("a", 1), job("b", 1)], [node("n", 3)])
    assert {one.job for one in given} == {"a"}


def test_missing_actors_of_a_running_job_come_as_far_as_there_is_room() -> None:
    request = PlacementRequest("a", generators(3), home="n", whole=False)
    given = nodes_of(place([request], [node("n", 4, free=1), node("m", 2, free=1)]), "a")
    assert given == {"generator-0": "n", "generator-1": "m"}


def test_an_actor_without_slots_needs_only_a_node() -> None:
    request = PlacementRequest("a", (EVALUATOR,), whole=False)
    assert nodes_of(place([request], [node("n", 1, free=0)]), "a") == {"evaluator-0": "n"}
    assert place([request], []) == []


def test_a_job_that_can_never_fit_is_refused_with_need_largest_and_remedy() -> None:
    with pytest.raises(PlacementError) as raised:
        refuse_impossible(5, [node("a", 2), node("b", 1)])
    text = str(raised.value)
    assert "needs 5 slots" in text
    assert "has 3 on 2 node(s)" in text
    assert "'a' with 2" in text
    assert "generator.count to 2 or less" in text


def test_a_pool_that_has_no_node_yet_refuses_nothing() -> None:
    refuse_impossible(99, [])
    assert "none has joined" in why_waiting(2, [])


def test_the_wait_of_a_queued_job_says_what_is_free() -> None:
    assert why_waiting(2, [node("n", 2, free=1)]) == "waits for 2 slots: 1 of 2 are free"
    assert why_waiting(4, [node("n", 2)]) == "waits for 4 slots: the pool has 2 now"


@given(
    st.lists(st.integers(0, 5), max_size=6),
    st.lists(st.tuples(st.integers(0, 6), st.integers(-2, 6)), max_size=4),
)
def test_no_slot_is_given_twice_and_jobs_are_whole(
    counts: list[int], sizes: list[tuple[int, int]]
) -> None:
    queue = [job(f"j{i}", count) for i, count in enumerate(counts)]
    nodes = [node(f"n{i}", total, free=min(free, total)) for i, (total, free) in enumerate(sizes)]
    given = place(queue, nodes)
    slots = {(r.job, a.name): a.slots for r in queue for a in r.actors}
    for one in nodes:
        used = sum(slots[a.job, a.actor] for a in given if a.node == one.name)
        assert used <= max(one.free, 0)
    for request in queue:
        assert len(nodes_of(given, request.job)) in {0, len(request.actors)}
