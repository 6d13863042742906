"""What users hold, as the placing counts it."""

from tinkermq.actors.scheduler.jobs.states import scaled
from tinkermq.actors.scheduler.jobs.view import JobsView
from tinkermq.actors.scheduler.placement import (
    Assignment,
    NodeSlots,
    PlacementRequest,
    UserShares,
    place,
    request_of,
    with_nodes,
)
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.jetstream.kv import Entry
from tinkermq.schemas.job import ActorPlacement, JobRecord
from tinkermq.schemas.user import Quota


def _actors(count: int, node: str | None) -> list[ActorPlacement]:
    names = (f"generator-{i}" for i in range(count))
    return [ActorPlacement(name=name, role="generator", node=node) for name in names]


HELD = [("ann", "a1"), ("ann", "a2"), ("bob", "b1")]
WAITS = [("bob", "b2"), ("ann", "a3"), ("ann", "a4"), ("cleo", "c1")]


async def test_the_first_waiting_run_of_each_user_is_told_who_holds_slots(broker: Broker) -> None:
    view = JobsView(broker)
    for user, name in HELD + WAITS:
        node, state = ("n1", "RUNNING") if (user, name) in HELD else (None, "QUEUED")
        fields = {"job": name, "name": name, "user": user, "state": state, "config": {}}
        record = JobRecord(created=0.0, actors=_actors(1, node), **fields)
        view.enter(Entry(record.scope.key, record, 1))
    requests = [
        PlacementRequest(f"{user}.{name}", tuple(_actors(1, None)), user=user, created=number)
        for number, (user, name) in enumerate(WAITS)
    ]
    view.note_waits(place(requests, [NodeSlots("n1", 3, frozenset())]))
    behind = "waits for 1 slot behind runs before it (`tinkermq ps`)"
    own = "; a1 holds 1, a2 holds 1, other users hold 1 (`tinkermq stop a1` frees them)"
    assert view.waits == {
        "bob.b2": (
            1,
            "is next: slots are kept for it until it has 1; b1 holds 1, other users hold 2 "
            "(`tinkermq stop b1` frees them)",
        ),
        "ann.a3": (2, behind + own),
        "ann.a4": (3, behind),
        "cleo.c1": (4, f"{behind}; other users hold 3"),
    }


async def test_what_a_running_job_has_lost_with_a_node_is_kept_for_it_of_its_users_quota(
    broker: Broker,
) -> None:
    learner = ActorPlacement(name="learner", role="learner", node="n1")
    actors = [learner, *_actors(3, None)]
    record = JobRecord(
        job="j1", name="j1", user="ann", state="RUNNING", config={}, created=0.0, actors=actors
    )
    view = JobsView(broker)
    view.enter(Entry("ann.j1", record, 1))
    shares = view.shares(3600.0)
    shares.quotas = {"ann": Quota(max_slots=5)}
    assert shares.held == {"ann": 4}
    lacking = PlacementRequest("ann.j1", tuple(actors[1:]), user="ann", whole=False)
    second = PlacementRequest("ann.j2", tuple(_actors(2, None)), user="ann")
    nodes = [NodeSlots("n1", 4, frozenset({1, 2, 3})), NodeSlots("n2", 2, frozenset({0, 1}))]
    placed = place([lacking, second], nodes, shares)
    assert {one.job for one in placed.assignments} == {"ann.j1"}
    assert placed.waits == {"ann.j2": "waits for 2 slots of its user's quota of 5"}
    assert shares.held == {"ann": 4}


def test_what_is_added_to_a_running_job_waits_for_its_users_turn() -> None:
    learner = ActorPlacement(name="learner", role="learner", node="n1")
    actors = scaled([learner, *_actors(1, "n1")], "generator", 5, 1)
    record = JobRecord(
        job="j1", name="j1", user="ann", state="RUNNING", config={}, created=0.0, actors=actors
    )
    growth = request_of("ann.j1", record)
    assert growth is not None
    second = PlacementRequest("bob.j2", tuple(_actors(2, None)), user="bob", created=1.0)
    nodes = [NodeSlots("n1", 4, frozenset({2, 3}))]
    placed = place([growth, second], nodes, UserShares(held={"ann": 6}))
    assert {one.job for one in placed.assignments} == {"bob.j2"}
    alone = place([growth], nodes, UserShares(held={"ann": 6}))
    assert [one.actor for one in alone.assignments] == ["generator-1", "generator-2"]


def test_what_was_added_and_is_lost_comes_first() -> None:
    learner = ActorPlacement(name="learner", role="learner", node="n1")
    record = JobRecord(
        job="j1",
        name="j1",
        user="ann",
        state="RUNNING",
        config={},
        created=0.0,
        actors=scaled([learner], "generator", 2, 1),
    )
    placed = with_nodes(record, {"generator-0": Assignment("j1", "generator-0", "n2", (0,))})
    actors = [
        actor.model_copy(update={"node": None}) if actor.name == "generator-0" else actor
        for actor in placed.actors
    ]
    lost = request_of("ann.j1", placed.model_copy(update={"actors": actors}))
    assert lost is not None
    assert (lost.grows, [actor.name for actor in lost.actors]) == (False, ["generator-0"])
