"""How many machines to ask for, and which to give back. Pure.

The queue is placed as it would be if more machines were there: what it then uses of them is what is
missing. So quotas, priorities and slots kept for the job that is next count as they do for nodes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ....schemas.machines.status import MachineState
from ..placement.placement import NodeSlots, place
from ..placement.queue import PlacementRequest, UserShares

_NEW = "~new-"


@dataclass(frozen=True)
class Bounds:
    """What a pool may ask for."""

    least: int
    most: int
    slots: int
    """Of one machine."""
    idle_s: float
    slot_hours_per_day: float | None = None


@dataclass(frozen=True)
class Demand:
    """The queue and the nodes, as the scheduler sees them at one moment."""

    queue: Sequence[PlacementRequest]
    nodes: Sequence[NodeSlots]
    shares: UserShares
    busy: frozenset[str]
    """Nodes that run something, or shall."""
    now: float


@dataclass(frozen=True)
class Decision:
    """What to do now."""

    ask: int = 0
    give_back: tuple[str, ...] = ()
    """Names of machines."""
    why: str = ""
    """Why no more are asked for than that; empty if more are not needed."""


def machines_needed(demand: Demand, slots: int, room: int) -> int:
    """Return how many machines of `slots` slots, at most `room`, the queue needs beside the nodes.

    Work: one placing of the whole queue, and none where nothing waits.
    """
    if not demand.queue or room <= 0:
        return 0
    new = machines_of(slots, room)
    placed = place(demand.queue, [*demand.nodes, *new], demand.shares, demand.now)
    return len({one.node for one in placed.assignments if one.node.startswith(_NEW)})


def machines_of(slots: int, count: int) -> list[NodeSlots]:
    """Return idle nodes as machines that have not come would be."""
    names = (f"{_NEW}{number:05d}" for number in range(count))
    return [NodeSlots(name, slots, frozenset(range(slots))) for name in names]


def decide(
    bounds: Bounds,
    machines: Mapping[str, MachineState],
    needed: int,
    idle_s: Mapping[str, float],
    slot_hours: float,
) -> Decision:
    """Decide by what is there (`machines`, by name in order of age) and what is `needed` beside it.

    `needed` counts machines beyond those that are here; `idle_s` says how long nothing ran on those
    of which nothing does; `slot_hours` were used today.
    """
    budget = bounds.slot_hours_per_day
    staying = [name for name, state in machines.items() if state != "draining"]
    if budget is not None and slot_hours >= budget:
        why = f"the day's budget of {budget:g} slot-hours is used up: {slot_hours:.2f} were used"
        return Decision(0, tuple(staying), why)
    pending = [name for name in staying if machines[name] != "here"]
    idle = [name for name in staying if idle_s.get(name, -1.0) >= bounds.idle_s]
    spare = pending[needed:][::-1] + ([] if needed else idle)
    given = spare[: max(len(staying) - bounds.least, 0)]
    wanted = max(needed - len(pending), bounds.least - len(staying), 0)
    room = max(bounds.most - len(machines), 0)
    why = f"{bounds.most} machines are the most there may be" if wanted > room else ""
    return Decision(min(wanted, room), tuple(given), why)
