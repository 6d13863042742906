"""Which node gets which actor: pure, first come first served.

A queued job starts whole or not at all, so two jobs never hold half of the pool each and wait for
the other half. A job that fits an idle pool but not this one waits at the head of the queue, and
those behind it wait too: otherwise small jobs would keep a large one out for ever. A job that the
pool of the moment cannot hold even when idle lets the others pass.

Not covered: topology (which GPUs share a link), quotas and priorities; they are further keys of
`_best_node` and a further order of the queue.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ...schemas.errors import PlacementError
from ...schemas.job import ActorPlacement
from .roster import slots_of


@dataclass(frozen=True)
class NodeSlots:
    """What a node has to give."""

    name: str
    total: int
    free: int


@dataclass(frozen=True)
class PlacementRequest:
    """Actors of one job that have no node yet."""

    job: str
    """Key of the job."""
    actors: tuple[ActorPlacement, ...]
    """In the order in which they are placed."""
    home: str | None = None
    """Node of the job's learner: its other actors are put there while there is room."""
    whole: bool = True
    """All at once or none; False for the missing actors of a job that runs."""


@dataclass(frozen=True)
class Assignment:
    """One actor given to one node."""

    job: str
    actor: str
    node: str


def place(queue: Iterable[PlacementRequest], nodes: Sequence[NodeSlots]) -> list[Assignment]:
    """Give out the free slots to the queue, oldest first.

    An over-full node (`free` below 0) gives nothing; an actor without slots needs only a node.
    """
    free = {node.name: node.free for node in nodes}
    total = sum(node.total for node in nodes)
    assignments: list[Assignment] = []
    for request in queue:
        tried = dict(free)
        given = _place_one(request, tried)
        complete = len(given) == len(request.actors)
        if complete or not request.whole:
            assignments += given
            free = tried
        elif slots_of(request.actors) <= total:
            break
    return assignments


def refuse_impossible(need: int, nodes: Sequence[NodeSlots]) -> None:
    """Raise PlacementError if the pool could not hold `need` slots even when idle.

    A pool without any node is one that has not come up yet: everything may wait for it.
    """
    total = sum(node.total for node in nodes)
    if not nodes or need <= total:
        return
    largest = max(nodes, key=lambda node: node.total)
    raise PlacementError(
        f"the job needs {need} slots (1 for the learner, 1 for each generator), the pool has "
        f"{total} on {len(nodes)} node(s), the largest being {largest.name!r} with "
        f"{largest.total}",
        hint=f"set generator.count to {max(total - 1, 0)} or less, or add nodes "
        "(`tinkermq node --slots N`)",
    )


def why_waiting(need: int, nodes: Sequence[NodeSlots]) -> str:
    """Say what a queued job that was not placed waits for."""
    if not nodes:
        return "waits for a node: none has joined the pool (`tinkermq node`)"
    total = sum(node.total for node in nodes)
    free = sum(max(node.free, 0) for node in nodes)
    if need > total:
        return f"waits for {need} slots: the pool has {total} now"
    return f"waits for {need} slots: {free} of {total} are free"


def _place_one(request: PlacementRequest, free: dict[str, int]) -> list[Assignment]:
    """Place what fits of one job, taking the slots out of `free`."""
    need = slots_of(request.actors)
    home = request.home if request.home in free else _best_node(free, need)
    given: list[Assignment] = []
    for actor in request.actors:
        node = home if home and _fits(actor, free[home]) else _best_node(free, actor.slots)
        if node is None or not _fits(actor, free[node]):
            continue
        free[node] -= actor.slots
        given.append(Assignment(request.job, actor.name, node))
    return given


def _fits(actor: ActorPlacement, free: int) -> bool:
    return actor.slots == 0 or actor.slots <= free


def _best_node(free: dict[str, int], need: int) -> str | None:
    """Return the fullest node that still holds `need`, else the emptiest; names break ties."""
    if not free:
        return None
    holding = [name for name, slots in free.items() if slots >= need]
    if holding:
        return min(holding, key=lambda name: (free[name], name))
    return min(free, key=lambda name: (-free[name], name))
