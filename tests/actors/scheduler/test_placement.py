"""Which node gets which actor, and which of its slots."""

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinkermq.actors.scheduler.jobs.states import actors_for, unplaced
from tinkermq.actors.scheduler.placement import (
    Assignment,
    NodeSlots,
    PlacementRequest,
    UserShares,
    free_slots,
    place,
    refuse_impossible,
    request_of,
    with_nodes,
)
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.job import ActorPlacement, JobRecord
from tinkermq.schemas.node import ActorStatus, NodeStatus
from tinkermq.schemas.user import Quota
from tinkermq.schemas.wire.errors import PlacementError

HOST = ActorPlacement(name="environment-0", role="environment", slots=0)
OTHER_HOST = ActorPlacement(name="environment-1", role="environment", slots=0)


def learner(slots: int = 1) -> ActorPlacement:
    return ActorPlacement(name="learner", role="learner", slots=slots)


def generators(count: int, slots: int = 1) -> tuple[ActorPlacement, ...]:
    return tuple(
        ActorPlacement(name=f"generator-{i}", role="generator", slots=slots) for i in range(count)
    )


def job(key: str, num_generators: int, **more: object) -> PlacementRequest:
    actors = (learner(), *generators(num_generators), HOST, OTHER_HOST)
    return PlacementRequest(key, actors, **{"user": "ann", **more})


def node(name: str, total: int, free: int | None = None, group: int = 0) -> NodeSlots:
    groups = [frozenset(range(i, i + group)) for i in range(0, total, group)] if group else ()
    return NodeSlots(name, total, frozenset(range(total if free is None else free)), tuple(groups))


def given_to(assignments: list[Assignment], key: str) -> dict[str, str]:
    return {one.actor: one.node for one in assignments if one.job == key}


def started(queue: list[PlacementRequest], nodes: list[NodeSlots], **more: Any) -> list[str]:
    found = [one.job for one in place(queue, nodes, **more).assignments]
    return list(dict.fromkeys(found))


def test_a_laptop_with_two_slots_runs_learner_generator_and_two_hosts() -> None:
    placed = place([job("a", 1)], [node("laptop", 2)])
    assert given_to(placed.assignments, "a") == dict.fromkeys(
        ["learner", "generator-0", "environment-1", "environment-0"], "laptop"
    )
    assert {one.actor: one.devices for one in placed.assignments} == {
        "learner": (0,),
        "generator-0": (1,),
        "environment-1": (),
        "environment-0": (),
    }


def test_a_job_stays_on_one_node_if_it_fits_there() -> None:
    given = given_to(place([job("a", 2)], [node("one", 2), node("three", 3)]).assignments, "a")
    assert set(given.values()) == {"three"}


def test_the_fullest_node_that_fits_is_taken_so_that_large_ones_stay_free() -> None:
    given = given_to(place([job("a", 1)], [node("big", 8), node("small", 2)]).assignments, "a")
    assert set(given.values()) == {"small"}


def test_a_job_too_large_for_one_node_spreads() -> None:
    given = given_to(place([job("a", 3)], [node("one", 2), node("two", 2)]).assignments, "a")
    assert sorted(given.values()).count("one") == 4  # two slots, two hosts
    assert sorted(given.values()).count("two") == 2


def test_a_job_starts_whole_or_not_at_all() -> None:
    assert place([job("a", 2)], [node("n", 3, free=2)]).assignments == []


def test_learner_and_generators_share_a_group_of_linked_slots() -> None:
    nodes = [NodeSlots("n", 8, frozenset({1, 2, 4, 5, 6}), node("n", 8, group=4).groups)]
    placed = place([job("a", 2)], nodes)
    used = {slot for one in placed.assignments for slot in one.devices}
    assert used == {4, 5, 6}


def test_a_tensor_parallel_generator_gets_linked_slots_or_waits_for_them() -> None:
    request = PlacementRequest("a", (learner(), *generators(1, slots=4)), user="ann")
    apart = [NodeSlots("n", 8, frozenset({0, 1, 2, 4, 5, 6}), node("n", 8, group=4).groups)]
    placed = place([request], apart)
    assert placed.assignments == []
    assert "is next" in placed.waits["a"]
    together = [NodeSlots("n", 8, frozenset({0, 1, 2, 3, 6}), node("n", 8, group=4).groups)]
    assert {one.actor: one.devices for one in place([request], together).assignments} == {
        "learner": (6,),
        "generator-0": (0, 1, 2, 3),
    }


def test_where_no_slots_are_linked_so_closely_any_of_one_node_do() -> None:
    request = PlacementRequest("a", (learner(), *generators(1, slots=3)), user="ann")
    placed = place([request], [node("n", 4, group=2)])
    assert len(placed.assignments) == 2


def test_jobs_behind_one_that_waits_fill_what_it_cannot_use() -> None:
    nodes = [node("n", 4, free=1), node("m", 2)]
    wide = PlacementRequest("wide", (learner(4),), user="ann")
    assert started([wide, job("small", 1)], nodes) == ["small"]
    assert started([job("large", 3), job("small", 1)], nodes) == []  # it may lie on both
    nodes = [node("n", 4, free=3)]
    placed = place([job("large", 3), job("small", 1)], nodes)
    assert placed.assignments == []
    assert placed.waits == {
        "large": "is next: slots are kept for it until it has 4",
        "small": "waits for 2 slots behind runs before it (`tinkermq ps`)",
    }


def test_a_large_job_is_not_starved_by_small_ones_that_keep_coming() -> None:
    rng, running, clock = random.Random(5), dict[str, tuple[int, list[Assignment]]](), 0
    nodes = [node("n", 8), node("m", 4)]
    queue: list[PlacementRequest] = []
    for clock in range(400):
        running = {key: one for key, one in running.items() if one[0] > clock}
        queue += [job(f"s{clock}-{i}", 1, created=clock) for i in range(2)]
        if clock == 50:
            queue.append(job("large", 7, created=clock, priority=1))
        busy = {
            (g.node, slot) for _, given in running.values() for g in given for slot in g.devices
        }
        now = [
            NodeSlots(n.name, n.total, frozenset(s for s in n.free if (n.name, s) not in busy))
            for n in nodes
        ]
        placed = place(queue, now)
        for key in {one.job for one in placed.assignments}:
            given = [one for one in placed.assignments if one.job == key]
            running[key] = (clock + rng.randint(3, 15), given)
        queue = [one for one in queue if one.job not in running]
        if "large" in running:
            break
        assert clock < 50 or any(one.job == "large" for one in queue)
    assert "large" in running
    assert clock <= 50 + 15


def test_a_job_over_the_whole_pool_lets_the_others_pass() -> None:
    placed = place([job("huge", 9), job("small", 1)], [node("n", 2)])
    assert {one.job for one in placed.assignments} == {"small"}
    assert placed.waits["huge"] == "waits for 10 slots: the pool has 2 now"


def test_slots_given_to_the_first_job_are_gone_for_the_second() -> None:
    assert started([job("a", 1), job("b", 1)], [node("n", 3)]) == ["a"]


def test_missing_actors_of_a_running_job_come_first_and_as_far_as_there_is_room() -> None:
    missing = PlacementRequest("a", generators(3), home="n", whole=False)
    placed = place([missing, job("b", 0)], [node("n", 4, free=1), node("m", 2, free=1)])
    assert given_to(placed.assignments, "a") == {"generator-0": "n", "generator-1": "m"}
    assert given_to(placed.assignments, "b") == {}


def test_an_actor_without_slots_needs_only_a_node() -> None:
    request = PlacementRequest("a", (HOST,), whole=False)
    placed = place([request], [node("n", 1, free=0)])
    assert given_to(placed.assignments, "a") == {"environment-0": "n"}
    assert place([request], []).assignments == []


def test_priority_goes_before_age_and_age_becomes_priority() -> None:
    two = [node("n", 2)]
    assert started([job("old", 1), job("urgent", 1, priority=3, created=9.0)], two) == ["urgent"]
    late = {"now": 4 * 3600.0}
    assert started(
        [job("old", 1), job("urgent", 1, priority=3, created=4 * 3600.0)], two, **late
    ) == ["old"]


def test_old_jobs_of_a_user_who_holds_much_do_not_push_aside_who_has_just_come() -> None:
    now = 100 * 3600.0
    queue = [job(f"a{i}", 1, user="ann", created=float(i)) for i in range(4)]
    queue += [job("b0", 1, user="bob", created=now - 60)]
    shares = UserShares(held={"ann": 8})
    assert started(queue, [node("n", 2)], shares=shares, now=now) == ["b0"]


def test_age_makes_up_for_a_lower_priority_and_then_the_shares_decide() -> None:
    now = 100 * 3600.0
    high = [job(f"a{i}", 1, user="ann", created=now - 60) for i in range(3)]
    old = [job(f"b{i}", 1, user="bob", priority=-5, created=0.0) for i in range(3)]
    late = [job(f"b{i}", 1, user="bob", priority=-5, created=now - 60) for i in range(3)]
    assert started([*high, *old], [node("n", 8)], now=now) == ["b0", "a0", "b1", "a1"]
    assert started([*high, *late], [node("n", 8)], now=now) == ["a0", "a1", "a2", "b0"]


def test_between_users_the_one_who_holds_less_for_their_weight_comes_first() -> None:
    queue = [job(f"a{i}", 1, created=float(i)) for i in range(4)]
    queue += [job(f"b{i}", 1, user="bob", created=10.0 + i) for i in range(4)]
    assert started(queue, [node("n", 8)]) == ["a0", "b0", "a1", "b1"]
    heavy = UserShares(quotas={"bob": Quota(weight=3)})
    assert started(queue, [node("n", 8)], shares=heavy) == ["a0", "b0", "b1", "b2"]


def test_the_job_to_come_counts_half_unless_a_user_holds_nothing() -> None:
    quotas = {"light": Quota(weight=1), "heavy": Quota(weight=4)}
    queue = [job(user, 7, user=user) for user in ("light", "heavy")]
    shares = UserShares(held={"light": 6, "heavy": 26}, quotas=quotas)  # with 4 more: 10 and 7.5
    assert started(queue, [node("n", 8)], shares=shares) == ["heavy"]
    shares = UserShares(held={"heavy": 4}, quotas=quotas)
    assert started(queue, [node("n", 8)], shares=shares) == ["light"]


def test_a_quota_bounds_what_a_user_holds_and_lets_others_pass() -> None:
    shares = UserShares(held={"ann": 2}, quotas={"ann": Quota(max_slots=3)})
    placed = place([job("a", 1), job("b", 1, user="bob", created=1.0)], [node("n", 8)], shares)
    assert {one.job for one in placed.assignments} == {"b"}
    assert placed.waits == {"a": "waits for 2 slots of its user's quota of 3"}


def test_a_quota_counts_the_processes_that_hold_no_slot_too() -> None:
    shares = UserShares(actors={"ann": 2}, quotas={"ann": Quota(max_actors=5)})
    placed = place([job("a", 1), job("b", 1, user="bob", created=1.0)], [node("n", 8)], shares)
    assert {one.job for one in placed.assignments} == {"b"}
    assert placed.waits == {"a": "waits for 4 processes of its user's quota of 5"}


def test_a_job_that_can_never_fit_is_refused_with_need_largest_and_remedy() -> None:
    with pytest.raises(PlacementError) as raised:
        refuse_impossible(job("", 4).actors, [node("a", 2), node("b", 1)])
    text = str(raised.value)
    assert "needs 5 slots" in text
    assert "has 3 on 2 nodes" in text
    assert "'a' with 2" in text
    assert "generator.count to 2 or less" in text


def test_an_actor_wider_than_every_node_is_refused() -> None:
    with pytest.raises(PlacementError, match=r"set generator\.slots to 2 or less"):
        refuse_impossible((learner(), *generators(1, slots=4)), [node(n, 2) for n in "abcd"])


def test_a_tinker_service_is_told_what_it_can_be_given() -> None:
    def refused(total: int, samplers: int = 1, slots: int = 1, trainer: int = 1) -> str:
        parts = [ActorPlacement(name="trainer", role="trainer", slots=trainer)]
        parts += [
            ActorPlacement(name=f"sampler-{n}", role="sampler", slots=slots)
            for n in range(samplers)
        ]
        with pytest.raises(PlacementError) as raised:
            refuse_impossible(parts, [node("a", total)])
        return raised.value.hint

    assert refused(1) == "add nodes (`tinkermq node --slots N`)"
    assert refused(3, samplers=4).startswith("set generator.count to 2 or less, or add nodes")
    assert refused(6, samplers=4, slots=2).startswith("set generator.count to 2 or less")
    assert refused(2, slots=4).startswith("set generator.slots to 2 or less")
    assert refused(2, trainer=4).startswith("set learner.slots to 2 or less")


def test_a_pool_that_has_no_node_yet_refuses_nothing() -> None:
    refuse_impossible(job("", 98).actors, [])
    assert "none has joined" in place([job("a", 1)], []).waits["a"]


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3)), max_size=6),
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(0, 3)), max_size=4),
)
def test_no_slot_is_given_twice_and_jobs_are_whole(
    wanted: list[tuple[int, int]], sizes: list[tuple[int, int, int]]
) -> None:
    queue = [
        PlacementRequest(f"j{i}", (learner(), *generators(count, slots), HOST), user=f"u{i % 2}")
        for i, (count, slots) in enumerate(wanted)
    ]
    nodes = [
        node(f"n{i}", total, min(free, total), group)
        for i, (total, free, group) in enumerate(sizes)
    ]
    placed = place(queue, nodes)
    given = [(one.node, slot) for one in placed.assignments for slot in one.devices]
    assert len(given) == len(set(given))
    assert all(slot in n.free for n in nodes for name, slot in given if n.name == name)
    by_job = {request.job: request for request in queue}
    for key in {one.job for one in placed.assignments}:
        mine = {one.actor: one for one in placed.assignments if one.job == key}
        assert set(mine) == {actor.name for actor in by_job[key].actors}
        for actor in by_job[key].actors:
            assert len(mine[actor.name].devices) == actor.slots
    assert set(placed.waits) == set(by_job) - {one.job for one in placed.assignments}


def ranks(count: int, *spread: int, slots: int = 1) -> tuple[ActorPlacement, ...]:
    rest = (ActorPlacement(name=f"rank-{i}", role="rank", slots=slots) for i in range(1, count))
    return (learner(slots).model_copy(update={"spread": list(spread)}), *rest)


def gang(count: int, *spread: int, slots: int = 1) -> PlacementRequest:
    return PlacementRequest("a", (*ranks(count, *spread, slots=slots), *generators(1)))


def parts_of(assignments: list[Assignment]) -> list[list[str]]:
    """Name the ranks on each node, in the order in which nodes were taken."""
    parts: dict[str, list[str]] = {}
    for one in assignments:
        if not one.actor.startswith("generator"):
            parts.setdefault(one.node, []).append(one.actor)
    return list(parts.values())


def test_the_ranks_of_a_learner_lie_on_one_node_and_linked_slots_where_they_can() -> None:
    placed = place([gang(4, 1, 2)], [node("small", 4), node("large", 8, group=4)])
    assert parts_of(placed.assignments) == [["learner", "rank-1", "rank-2", "rank-3"]]
    slots = {one.devices[0] for one in placed.assignments if one.actor != "generator-0"}
    assert slots in ({0, 1, 2, 3}, {4, 5, 6, 7})
    assert {one.node for one in placed.assignments} == {"large"}


def test_ranks_that_fit_no_node_lie_on_several_in_equal_parts() -> None:
    placed = place([gang(4, 1, 2, 4)], [node("a", 3), node("b", 3), node("c", 1)])
    assert parts_of(placed.assignments) == [["learner", "rank-1"], ["rank-2", "rank-3"]]
    assert place([gang(4, 1)], [node("a", 3), node("b", 3)]).assignments == []
    assert place([gang(4, 1, 2)], [node("a", 3), node("b", 1), node("c", 1)]).assignments == []


def test_parts_of_a_learner_lie_on_nodes_that_are_linked_to_each_other() -> None:
    nodes = [NodeSlots(name, 4, frozenset(range(4)), link=link) for name, link in LINKS.items()]
    nodes[1] = NodeSlots("b", 4, frozenset(range(3)), link="west")  # fuller, and far away
    placed = place([gang(8, 1, 2)], [*nodes, node("generators", 1)])
    assert {one.node for one in placed.assignments if one.actor != "generator-0"} == {"a", "c"}


LINKS = {"a": "east", "b": "west", "c": "east"}


def test_ranks_of_several_slots_get_neighbours_each() -> None:
    placed = place([gang(2, 1, slots=2)], [node("a", 8, group=4)])
    slots = {one.actor: one.devices for one in placed.assignments}
    assert (slots["learner"], slots["rank-1"]) == ((0, 1), (2, 3))


def test_ranks_that_no_set_of_nodes_can_hold_are_refused_with_what_to_change() -> None:
    with pytest.raises(PlacementError, match=r"4 ranks of 2 slots each lie on 1 node") as raised:
        refuse_impossible([*ranks(4, 1, slots=2), *generators(1)], [node("a", 4), node("b", 5)])
    assert "raise learner.machines" in raised.value.hint
    refuse_impossible([*ranks(4, 1, 2, slots=2), *generators(1)], [node("a", 4), node("b", 5)])


OLD, NEW = ({"torch": "2.5.1"}, {"torch": "2.6.0"})


def of_packages(name: str, total: int, packages: dict[str, str]) -> NodeSlots:
    return NodeSlots(name, total, frozenset(range(total)), packages=tuple(packages.items()))


def test_parts_of_a_learner_lie_on_nodes_with_the_same_packages() -> None:
    nodes = [of_packages("a", 3, OLD), of_packages("b", 2, NEW), of_packages("c", 2, NEW)]
    placed = place([gang(4, 1, 2)], nodes)
    where = {one.actor: one.node for one in placed.assignments}
    assert {where.pop("generator-0")} == {"a"}  # who is no rank may lie anywhere
    assert set(where.values()) == {"b", "c"}
    whole = place([gang(3, 1, 3)], nodes)  # one part is alike with itself
    assert {one.node for one in whole.assignments if one.actor != "generator-0"} == {"a"}


def test_a_node_that_does_not_tell_its_packages_may_hold_any_part() -> None:
    nodes = [of_packages("a", 2, OLD), of_packages("b", 3, {}), of_packages("c", 1, NEW)]
    assert parts_of(place([gang(4, 1, 2)], nodes).assignments) != []


def test_ranks_that_only_unlike_nodes_could_hold_are_refused_with_the_versions() -> None:
    nodes = [of_packages("a", 3, OLD), of_packages("b", 2, NEW)]
    with pytest.raises(PlacementError) as raised:
        refuse_impossible([*ranks(4, 1, 2), *generators(1)], nodes)
    told = (
        "the learner's 4 ranks fit on no nodes with the same packages: torch 2.5.1 on a; 2.6.0 on b"
    )
    assert raised.value.message == told
    assert "install the same versions on all nodes" in raised.value.hint
    waiting = place([gang(4, 1, 2), job("b", 1)], nodes)
    assert waiting.waits["a"].endswith("same packages for its ranks: torch 2.5.1 on a; 2.6.0 on b")
    assert started([gang(4, 1, 2), job("b", 1)], nodes) == ["b"]


# -- learner and generator on one GPU --------------------------------------------------------------


def gpus(name: str, total: int, alone: int = 0) -> NodeSlots:
    """Return a node of GPUs, of which the last so many are MIG instances."""
    instances = frozenset(range(total - alone, total))
    return replace(node(name, total), are_gpus=True, alone=instances)


def pair(placement: str) -> PlacementRequest:
    """Return a job of one learner and one generator as its configuration makes it."""
    config = JobConfig.model_validate(
        {"model": {"path": "m"}, "env": {"game": "g"}, "placement": placement}
    )
    return PlacementRequest("a", tuple(actors_for(config, "train")), user="ann")


def devices_of(assignments: list[Assignment]) -> dict[str, tuple[int, ...]]:
    return {
        one.actor: one.devices
        for one in assignments
        if one.actor.startswith(("learner", "generator"))
    }


def test_learner_and_generator_share_the_only_gpu_of_a_pool() -> None:
    shares = UserShares()
    placed = place([pair("auto")], [gpus("one", 1)], shares)
    assert devices_of(placed.assignments) == {"learner": (0,), "generator-0": (0,)}
    assert shares.held == {"ann": 1}
    assert len(placed.assignments) == 3  # and an environment host


def test_the_same_job_takes_two_gpus_where_there_are_more() -> None:
    placed = place([pair("auto")], [gpus("one", 8)])
    assert devices_of(placed.assignments) == {"learner": (0,), "generator-0": (1,)}
    placed = place([pair("auto")], [gpus("one", 1), gpus("two", 1)])
    assert devices_of(placed.assignments) == {"learner": (0,), "generator-0": (0,)}
    assert set(given_to(placed.assignments, "a").values()) == {"one", "two"}


def test_a_job_that_asks_for_it_shares_one_of_many_slots() -> None:
    for nodes in ([gpus("one", 8)], [node("one", 2)]):  # CPU shares as well
        placed = place([pair("colocated")], nodes)
        assert devices_of(placed.assignments) == {"learner": (0,), "generator-0": (0,)}


@pytest.mark.parametrize("placement", ["separate", "auto"])
def test_a_job_does_not_share_a_cpu_share_or_where_it_is_told_not_to(placement: str) -> None:
    where = gpus("one", 1) if placement == "separate" else node("one", 1)
    placed = place([pair(placement)], [where])
    assert not placed.assignments
    assert placed.waits == {"a": "waits for 2 slots: the pool has 1 now"}
    with pytest.raises(PlacementError, match="the run needs 2 slots"):
        refuse_impossible(pair(placement).actors, [where])


def test_two_jobs_do_not_share_a_gpu() -> None:
    second = replace(pair("auto"), job="b")
    placed = place([pair("auto"), second], [gpus("one", 1)])
    assert {one.job for one in placed.assignments} == {"a"}
    assert "b" in placed.waits


def test_a_record_says_who_shares_and_a_job_that_is_queued_again_may_get_two_gpus() -> None:
    actors = list(pair("auto").actors)
    record = JobRecord(job="a", name="a", user="ann", state="QUEUED", config={}, created=0.0)
    record = record.model_copy(update={"actors": actors})
    placed = place([pair("auto")], [gpus("one", 1)])
    started = with_nodes(record, {one.actor: one for one in placed.assignments})
    assert started.is_colocated
    assert [actor.slots for actor in started.actors[:2]] == [1, 0]
    again = request_of("a", started.model_copy(update={"state": "QUEUED"}))
    assert again is not None
    placed = place([again], [gpus("two", 2)])
    assert devices_of(placed.assignments) == {"learner": (0,), "generator-0": (1,)}
    assert [one.are_gpus for one in placed.assignments] == [True, True, False]  # a host has none
    fresh = started.model_copy(update={"actors": unplaced(started.actors)})
    assert not with_nodes(fresh, {one.actor: one for one in placed.assignments}).is_colocated


def test_a_gpu_is_not_free_while_one_of_those_who_shared_it_leaves() -> None:
    leaving = ActorStatus(
        user="ann", job="a", name="generator-0", attempt=1, state="running", devices=[0]
    )
    status = NodeStatus(node="one", host="h", slots=1, slot_kind="gpu", time=0.0, actors=[leaving])
    assert free_slots(status, []).free == frozenset()


def test_instances_of_a_gpu_are_given_to_actors_of_one_slot_only() -> None:
    mixed = gpus("one", 4, alone=2)
    placed = place([PlacementRequest("a", (learner(), *generators(1, slots=2)))], [mixed])
    assert devices_of(placed.assignments) == {"learner": (2,), "generator-0": (0, 1)}
    with pytest.raises(
        PlacementError, match=r"generator-0 needs 2 GPUs that work together, and .* MIG instances"
    ):
        refuse_impossible((learner(), *generators(1, slots=2)), [gpus("one", 4, alone=4)])
    with pytest.raises(PlacementError, match="MIG instances"):
        refuse_impossible((*ranks(2, 1), *generators(1)), [gpus("one", 4, alone=4)])
