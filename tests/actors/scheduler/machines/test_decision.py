"""What is asked for and given back, by tables computed by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinkermq.actors.scheduler.machines.keeper import (
    Decision,
    Demand,
    decide,
    machines_needed,
    machines_of,
)
from tinkermq.actors.scheduler.placement import (
    NodeSlots,
    PlacementRequest,
    UserShares,
    refuse_impossible,
)
from tinkermq.schemas.job import ActorPlacement
from tinkermq.schemas.machines import MachinesConfig, MachineState
from tinkermq.schemas.user import Quota

BOUNDS = MachinesConfig(least=0, most=3, slots=2, idle_s=60)


def job(name: str, *slots: int, user: str = "ada") -> PlacementRequest:
    roles = ["learner", *["generator"] * (len(slots) - 1)]
    actors = tuple(
        ActorPlacement(name=f"a{number}", role=role, slots=count)  # type: ignore[arg-type]
        for number, (role, count) in enumerate(zip(roles, slots, strict=True))
    )
    return PlacementRequest(name, actors, user=user)


def demand(
    *queue: PlacementRequest, free: int = 0, shares: UserShares | None = None, busy: str = ""
) -> Demand:
    nodes = [NodeSlots("n", 2, frozenset(range(free)))]
    return Demand(queue, nodes, shares or UserShares(), frozenset(busy.split()), 0.0)


@pytest.mark.parametrize(
    ("queue", "free", "room", "needed"),
    [
        ([], 0, 9, 0),
        ([job("a", 1, 1)], 2, 9, 0),
        ([job("a", 1, 1)], 0, 9, 1),
        ([job("a", 1, 1), job("b", 1, 1)], 0, 9, 2),
        ([job("a", 1, 1), job("b", 1, 1)], 0, 1, 1),
        ([job("a", 1, 1, 1)], 1, 9, 1),
        ([job("a", 1, 1, 1, 1, 1)], 1, 9, 2),
        ([job("wide", 4)], 0, 9, 0),
        ([job("a", 1, 1)], 0, 0, 0),
    ],
)
def test_the_queue_needs_what_it_would_use(
    queue: list[PlacementRequest], free: int, room: int, needed: int
) -> None:
    assert machines_needed(demand(*queue, free=free), 2, room) == needed


def test_a_single_machine_with_one_gpu_is_asked_for_though_learner_and_generator_share_it() -> None:
    learner = ActorPlacement(name="learner", role="learner", slots=1)
    generator = ActorPlacement(name="g", role="generator", slots=1, shares="learner")
    queue = [PlacementRequest("a", (learner, generator), user="ada")]
    waiting = Demand(queue, [], UserShares(), frozenset(), 0.0)
    assert machines_needed(waiting, 1, 1, gpus=True) == 1
    assert machines_needed(waiting, 1, 1) == 0
    refuse_impossible(queue[0].actors, machines_of(1, 1, gpus=True))


def test_who_is_over_a_quota_brings_no_machines() -> None:
    shares = UserShares(quotas={"ada": Quota(max_slots=2)})
    queue = demand(job("a", 1, 1), job("b", 1, 1), job("c", 1, 1), shares=shares)
    assert machines_needed(queue, 2, 9) == 1


@pytest.mark.parametrize(
    ("machines", "needed", "idle", "expected"),
    [
        ("", 0, "", Decision()),
        ("", 2, "", Decision(ask=2)),
        ("asked coming", 2, "", Decision()),
        ("asked coming", 1, "", Decision(give_back=("m2",))),
        ("asked asked here", 0, "", Decision(give_back=("m2", "m1"))),
        ("here", 1, "", Decision(ask=1)),
        ("here here", 0, "m2", Decision(give_back=("m2",))),
        ("here here", 1, "m2", Decision(ask=1)),
    ],
)
def test_what_is_missing_is_asked_for_and_what_is_spare_given_back(
    machines: str, needed: int, idle: str, expected: Decision
) -> None:
    assert decide(BOUNDS, named(machines), needed, dict.fromkeys(idle.split(), 60.0), 0) == expected


def test_a_machine_stays_until_it_was_idle_long_enough() -> None:
    assert decide(BOUNDS, named("here"), 0, {"m1": 59.0}, 0) == Decision()


def test_a_machine_that_starts_again_is_kept_for_the_run_that_it_will_lose() -> None:
    again = frozenset({"m1"})
    assert decide(BOUNDS, named("asked asked"), 0, {}, 0, again) == Decision(give_back=("m2",))
    assert decide(BOUNDS, named("coming"), 1, {}, 0, again) == Decision(ask=1)


def test_no_more_are_asked_for_than_there_may_be_and_leaving_ones_count() -> None:
    decision = decide(BOUNDS, named("here draining"), 2, {}, 0)
    assert decision == Decision(ask=1, why="the pool may have at most 3 machines")


def test_the_least_are_kept_and_asked_for() -> None:
    bounds = MachinesConfig(least=2, most=3, slots=2, idle_s=60)
    assert decide(bounds, {}, 0, {}, 0) == Decision(ask=2)
    idle = {"m1": 99.0, "m2": 99.0, "m3": 99.0}
    assert decide(bounds, named("here here here"), 0, idle, 0) == Decision(give_back=("m1",))


def test_a_day_whose_budget_is_used_up_has_no_machines() -> None:
    bounds = MachinesConfig(least=1, most=3, slots=2, idle_s=60, slot_hours_per_day=10)
    assert decide(bounds, named("here"), 1, {}, 9.99).ask == 1
    decision = decide(bounds, named("here asked draining"), 1, {}, 10.0)
    assert decision.give_back == ("m1", "m2")
    assert decision.ask == 0
    assert "budget of 10 slot-hours is used up" in decision.why


@given(
    st.lists(st.sampled_from(["asked", "coming", "here", "draining"]), max_size=6),
    st.integers(0, 6),
    st.integers(0, 3),
)
def test_bounds_hold_whatever_is_there(states: list[str], needed: int, least: int) -> None:
    bounds = MachinesConfig(least=least, most=4, slots=2, idle_s=0)
    machines = named(" ".join(states))
    idle = {name: 1.0 for name, state in machines.items() if state == "here"}
    decision = decide(bounds, machines, needed, idle, 0)
    staying = sum(state != "draining" for state in states)
    assert decision.ask == 0 or len(states) + decision.ask <= 4
    assert not decision.give_back or staying - len(decision.give_back) >= least
    assert not (decision.ask and any(machines[name] != "here" for name in decision.give_back))


def named(states: str) -> dict[str, MachineState]:
    return {f"m{number}": state for number, state in enumerate(states.split(), 1)}  # type: ignore[misc]
