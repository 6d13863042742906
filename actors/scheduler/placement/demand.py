"""What follows from records of jobs and answers of nodes for the placing. Pure."""

from collections.abc import Mapping, Sequence

from ....schemas.job import ActorPlacement, JobRecord
from ....schemas.node import MUST_MATCH, ActorStatus, NodeStatus, WantedActor
from ..jobs.actors import unplaced
from ..jobs.states import ACTIVE
from .placement import Assignment, NodeSlots
from .queue import PlacementRequest


def request_of(key: str, record: JobRecord) -> PlacementRequest | None:
    """Return what a job waits to be given, or None."""
    if is_queued(record) and record.configured and record.stop == "no":
        actors, home, whole = unplaced(record.actors), None, True
    elif record.state in ACTIVE and record.actors:
        actors = [actor for actor in record.actors if actor.node is None]
        home, whole = record.actors[0].node, False
    else:
        return None
    if not actors:
        return None
    return PlacementRequest(
        key,
        tuple(actors),
        user=record.user,
        priority=record.priority,
        created=record.created,
        home=home,
        whole=whole,
    )


def with_nodes(record: JobRecord, by_actor: Mapping[str, Assignment]) -> JobRecord:
    """Return the record with nodes for those of its actors that have none."""
    actors = [_on_its_node(actor, by_actor.get(actor.name)) for actor in record.actors]
    return record.model_copy(update={"actors": actors})


def _on_its_node(actor: ActorPlacement, given: Assignment | None) -> ActorPlacement:
    if given is None or actor.node is not None:
        return actor
    return actor.model_copy(update={"node": given.node, "devices": list(given.devices)})


def is_queued(record: JobRecord) -> bool:
    """Whether a job waits for its nodes."""
    return record.state == "QUEUED"


def free_slots(
    node: NodeStatus, wanted: Sequence[WantedActor], *, idle: bool = False, closed: bool = False
) -> NodeSlots:
    """Return the slots of a node that are neither promised nor still held by what leaves.

    A node that drains, or is `closed` because it is about to be given back, has none.
    """
    held = {slot for actor in wanted for slot in actor.devices}
    leaving = [] if idle else [status for status in unwanted(node, wanted) if status.slots]
    held |= {slot for status in leaving for slot in status.devices}
    return NodeSlots(
        node.node,
        node.slots,
        frozenset() if closed or node.draining else frozenset(range(node.slots)) - held,
        tuple(frozenset(group) for group in node.groups),
        node.link,
        tuple((name, node.packages.get(name, "none")) for name in MUST_MATCH)
        if node.packages
        else (),
    )


def unwanted(node: NodeStatus, wanted: Sequence[WantedActor]) -> list[ActorStatus]:
    """Return the actors that run on a node without being wanted there (any more)."""
    names = {(actor.user, actor.job, actor.name) for actor in wanted}
    return [status for status in node.actors if (status.user, status.job, status.name) not in names]
