"""What users hold, as the placing counts it."""

from tinkermq.actors.scheduler.jobs.view import JobsView
from tinkermq.actors.scheduler.placement import NodeSlots, PlacementRequest, place
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.jetstream.kv import Entry
from tinkermq.schemas.job import ActorPlacement, JobRecord
from tinkermq.schemas.user import Quota


def _actors(count: int, node: str | None) -> list[ActorPlacement]:
    names = (f"generator-{i}" for i in range(count))
    return [ActorPlacement(name=name, role="generator", node=node) for name in names]


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
