"""The order of the queue, and the placement of actors on nodes and slots. Pure.

Order: higher priority first; between equals, the user who would hold the least for their weight
with half a job more (Sainte-Laguë's rule, with the mean size of the next jobs), a user without
slots before all others; then the oldest. Every hour of waiting counts as one point of priority, so
no job starves. Between users age counts only up to the highest priority in the queue: otherwise a
user with many waiting jobs would displace newcomers by age alone.

A queued job starts whole or not at all, so two jobs never hold half of the pool each. The first
waiting job reserves slots: the free ones that it can use, and more as they become free. Later jobs
are placed on the rest (backfill), so they never delay it.

Learner and generator of one slot each share a slot if configured, or if the pool is a single GPU.

A job is packed onto one node if one can hold it, learner and generators together, within one group
of linked slots if possible. An actor of several slots gets them on one node, and within one group
wherever the pool has a group of that size; the same holds for the ranks of a learner, as one actor
or in the allowed number of equal parts on several nodes, linked nodes first. All parts are on nodes
with the same packages: other versions compute other gradients, or hang.
"""

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice

from ...schemas.job import ActorPlacement, JobRecord
from ...schemas.node import MUST_MATCH, ActorStatus, NodeStatus, WantedActor, differences
from ...schemas.user import NO_BOUNDS, Quota
from ...schemas.wire.errors import PlacementError, counted
from .jobs.states import ACTIVE, slots_of, unplaced

# -- the order of the queue ------------------------------------------------------------------------


@dataclass(frozen=True)
class PlacementRequest:
    """Actors of a job that have no node yet."""

    job: str
    """Key of the job."""
    actors: tuple[ActorPlacement, ...]
    """Actors in the order of placement."""
    user: str = ""
    """Owner of the job."""
    priority: int = 0
    """Priority of the job."""
    created: float = 0.0
    """When the job was submitted, in seconds since the epoch."""
    home: str | None = None
    """Node of the job's learner: its other actors are placed there while there is room."""
    whole: bool = True
    """Place all actors or none; False for missing actors of a running job. Lost actors come
    first."""
    grows: bool = False
    """Whether they were added to a running job, and wait for their user's turn like a queued
    job."""

    @cached_property
    def need(self) -> int:
        """Number of slots of the actors."""
        return slots_of(self.actors)

    @cached_property
    def shape(self) -> tuple[tuple[int, ...], ...]:
        """Slots of each actor, and the number of nodes for the ranks of a learner."""
        return shape_of(self.actors)


def shape_of(actors: Iterable[ActorPlacement]) -> tuple[tuple[int, ...], ...]:
    """Return what decides whether actors fit: slots of each, and the spread of ranks."""
    return tuple((actor.slots, *actor.spread) for actor in actors)


@dataclass
class UserShares:
    """The holdings and quotas of users."""

    held: dict[str, int] = field(default_factory=dict[str, int])
    """Slots by user."""
    quotas: Mapping[str, Quota] = field(default_factory=dict[str, Quota])
    """Quotas by user."""
    unknown: Quota = NO_BOUNDS
    """Quota of users without one."""
    actors: dict[str, int] = field(default_factory=dict[str, int])
    """Number of placed actors by user."""
    aging_s: float = 3600.0
    """Waiting time that adds one point of priority."""

    def quota(self, user: str) -> Quota:
        """Return the quota of a user."""
        return self.quotas.get(user, self.unknown)

    def add(self, user: str, slots: int, actors: int) -> None:
        """Count slots and actors assigned to a user."""
        self.held[user] = self.held.get(user, 0) + slots
        self.actors[user] = self.actors.get(user, 0) + actors

    def points(self, request: "PlacementRequest", now: float) -> int:
        """Return the priority of a job, including its age."""
        return request.priority + int(max(now - request.created, 0) // self.aging_s)

    def room(self, user: str) -> float:
        """Return the number of slots that a user may still get."""
        bound = self.quota(user).max_slots
        return float("inf") if bound is None else bound - self.held.get(user, 0)

    def actor_room(self, user: str) -> float:
        """Return the number of actors that a user may still get."""
        bound = self.quota(user).max_actors
        return float("inf") if bound is None else bound - self.actors.get(user, 0)

    def usage(self, user: str, more: float = 0.0) -> float:
        """Return a user's holdings per weight, with this many more slots; 0 for none."""
        held = self.held.get(user, 0)
        return (held + more) / self.quota(user).weight if held else 0.0


def in_order(
    queue: Iterable[PlacementRequest], shares: UserShares, now: float
) -> Iterator[PlacementRequest]:
    """Yield the requests in the order of placement, by the current `shares`.

    The caller adds its assignments to `shares` before it takes the next request.
    """
    by_user: dict[str, list[tuple[int, float, int, PlacementRequest]]] = defaultdict(list)
    for number, request in enumerate(queue):
        if not (request.whole or request.grows):
            yield request
            continue
        points = -shares.points(request, now)
        by_user[request.user].append((points, request.created, number, request))
    for waiting in by_user.values():
        waiting.sort(reverse=True)

    highest = max((item.priority for each in by_user.values() for *_, item in each), default=0)

    ahead = sum(each[-1][-1].need for each in by_user.values()) / max(len(by_user), 1) / 2

    def key(user: str) -> tuple[int, float, float, str]:
        points, created, *_ = by_user[user][-1]
        return (max(points, -highest), shares.usage(user, ahead), created, user)

    heads = [key(user) for user in by_user]
    heapq.heapify(heads)
    while heads:
        *_, user = heads[0]
        yield by_user[user].pop()[-1]
        if by_user[user]:
            heapq.heapreplace(heads, key(user))
        else:
            heapq.heappop(heads)


@dataclass(frozen=True)
class NodeSlots:
    """The free slots of a node."""

    name: str
    total: int
    free: frozenset[int]
    """Numbers of the free slots, from 0 to `total` - 1."""
    groups: tuple[frozenset[int], ...] = ()
    """Closely linked slots; empty: all are alike."""
    link: str = ""
    """Name of its fast network; nodes with the same name share one."""
    are_gpus: bool = False
    """Whether a slot is a GPU, or an instance of one."""
    alone: frozenset[int] = frozenset()
    """Slots that cannot work together with others: MIG instances."""
    packages: tuple[tuple[str, str], ...] = ()
    """Packages with versions that the ranks of a learner must share; empty: unknown."""

    @property
    def linked(self) -> tuple[frozenset[int], ...]:
        """The groups, covering all slots."""
        return self.groups or (frozenset(range(self.total)),)


@dataclass(frozen=True)
class Assignment:
    """The placement of one actor on one node."""

    job: str
    actor: str
    node: str
    devices: tuple[int, ...] = ()
    """Numbers of its slots on the node."""
    shares: bool = False
    """Whether the slots belong to another actor of its job."""
    are_gpus: bool = False
    """Whether the slots are whole GPUs."""


@dataclass
class Placed:
    """The placements of one pass over the queue."""

    assignments: list[Assignment] = field(default_factory=list[Assignment])
    waits: dict[str, str] = field(default_factory=dict[str, str])
    """The reason for each waiting job, in the order of the queue."""
    head: str = ""
    """The job for which slots are reserved; empty: none."""


_Slots = dict[str, set[int]]
_Unit = tuple[ActorPlacement, ...]
"""Actors on one node whose slots are chosen together."""


def place(
    queue: Iterable[PlacementRequest],
    nodes: Sequence[NodeSlots],
    shares: UserShares | None = None,
    now: float = 0.0,
    most: int = 1 << 30,
) -> Placed:
    """Assign free slots to at most `most` jobs of the queue, and update `shares`."""
    shares = shares or UserShares()
    pool = _Pool(nodes)
    result = Placed()
    free: _Slots = {node.name: set(node.free) for node in nodes}
    num_free = sum(map(len, free.values()))
    head: PlacementRequest | None = None
    for waiting in in_order(queue, shares, now):
        if most <= 0:
            break
        request = pool.settle(waiting)
        why = _refusal(request, nodes, shares, pool)
        assigned: list[Assignment] = []
        if not why and (request.need <= num_free or not request.whole):
            assigned = pool.assign(request, free)
            num_free = sum(map(len, free.values())) if assigned else num_free
            if request.whole:  # missing actors already count as held
                held = sum(len(item.devices) for item in assigned if not item.shares)
                shares.add(request.user, held, len(assigned))
            result.assignments += assigned
            most -= bool(assigned)
        if len(assigned) == len(request.actors):
            continue
        if not why and head is None:
            head, result.head = request, request.job
            pool.reserve(request, assigned, free)
            num_free = sum(map(len, free.values()))
            why = f"is next: slots are kept for it until it has {request.need}"
        needs = f"waits for {counted(request.need, 'slot')}"
        result.waits[request.job] = why or f"{needs} behind runs before it (`tinkermq ps`)"
    return result


_COUNTED = ("generator", "sampler")
"""Roles with the number `generator.count`."""
_SECTIONS = {"trainer": "learner", "sampler": "generator"}
"""Sections of the configuration with the slots of differently named roles."""


def refuse_impossible(actors: Sequence[ActorPlacement], nodes: Sequence[NodeSlots]) -> None:
    """Raise PlacementError if idle nodes could not hold the actors.

    A pool without nodes has not started yet: all jobs may wait for it.
    """
    if not nodes:
        return
    if place([PlacementRequest("", tuple(actors))], nodes).assignments:
        return
    need = sum(actor.slots for actor in actors)
    total = sum(node.total for node in nodes)
    _refuse_instances(actors, nodes)
    largest = max(nodes, key=lambda node: node.total)
    widest = max(actors, key=lambda actor: actor.slots)
    if gang := _ranks_of(actors):
        if place([PlacementRequest("", tuple(actors))], _as_if_alike(nodes)).assignments:
            raise _unlike(gang, nodes)
        raise _no_place_for(gang, nodes, need, total)
    text = (
        f"the run needs {counted(need, 'slot')} ({widest.name} alone {widest.slots} on one node), "
        f"the pool has {total} on {counted(len(nodes), 'node')}, the largest being "
        f"{largest.name!r} with {largest.total}"
    )
    sizes = [actor.slots for actor in actors if actor.role in _COUNTED]
    fitting = (total - need + sum(sizes)) // max(sizes, default=1)
    hint = "add nodes"
    if sizes and fitting > 0:
        hint = f"set generator.count to {fitting} or less, or {hint}"
    if widest.slots > largest.total:
        section = _SECTIONS.get(widest.role, widest.role)
        hint = f"set {section}.slots to {largest.total} or less, or add a larger node"
    elif need <= total:
        hint = "its parts fit no combination of nodes: ask for fewer slots per actor"
    raise PlacementError(text, hint=f"{hint} (`tinkermq node --slots N`)")


def _refuse_instances(actors: Sequence[ActorPlacement], nodes: Sequence[NodeSlots]) -> None:
    """Raise PlacementError for actors that would fit if MIG instances could be combined."""
    whole = [replace(node, alone=frozenset()) for node in nodes]
    if whole == list(nodes) or not place([PlacementRequest("", tuple(actors))], whole).assignments:
        return
    widest = max(actors, key=lambda actor: actor.slots)
    raise PlacementError(
        f"{widest.name} needs {widest.slots} GPUs that work together, and the pool has MIG "
        "instances, of which a process sees one",
        hint="set generator.slots, generator.tensor_parallel, learner.slots and learner.ranks to "
        "1, or add a node with whole GPUs",
    )


def _as_if_alike(nodes: Sequence[NodeSlots]) -> list[NodeSlots]:
    """Return the nodes as if they had the same packages."""
    return [replace(node, packages=()) for node in nodes]


def _unlike(gang: Sequence[ActorPlacement], nodes: Sequence[NodeSlots]) -> PlacementError:
    return PlacementError(
        f"the learner's {len(gang)} ranks fit on no nodes with the same packages: "
        + _differences(nodes),
        hint="install the same versions on all nodes and restart the changed ones, or lower "
        "learner.ranks and learner.slots until equal nodes can hold them",
    )


def _differences(nodes: Sequence[NodeSlots]) -> str:
    return ", ".join(differences((node.name, dict(node.packages)) for node in nodes))


def _no_place_for(
    gang: Sequence[ActorPlacement], nodes: Sequence[NodeSlots], need: int, total: int
) -> PlacementError:
    slots, most = gang[0].slots, max(gang[0].spread)
    largest = max(node.total for node in nodes)
    return PlacementError(
        f"the learner's {len(gang)} ranks of {counted(slots, 'slot')} each lie on "
        f"{counted(most, 'node')} at most, in equal parts, and the run needs {need} slots: the "
        f"pool has {total} on {counted(len(nodes), 'node')}, the largest with {largest}",
        hint="raise learner.machines, lower learner.ranks and learner.slots or generator.count, or "
        "add nodes (`tinkermq node --slots N`)",
    )


def _refusal(
    request: PlacementRequest, nodes: Sequence[NodeSlots], shares: UserShares, pool: "_Pool"
) -> str:
    """Return why a request is skipped other than for lack of slots; empty: it is not."""
    if not nodes:
        return "waits for a node: none has joined the pool (`tinkermq node`)"
    needs = f"waits for {counted(request.need, 'slot')}"
    if request.need > pool.total:
        return f"{needs}: the pool has {pool.total} now"
    quota = shares.quota(request.user)
    if request.whole and quota.max_slots is not None and request.need > shares.room(request.user):
        return f"{needs} of its user's quota of {quota.max_slots}"
    count = len(request.actors)
    if request.whole and quota.max_actors is not None and count > shares.actor_room(request.user):
        return f"waits for {counted(count, 'process')} of its user's quota of {quota.max_actors}"
    if pool.could_hold(request):
        return ""
    if _ranks_of(request.actors) and _Pool(_as_if_alike(nodes)).could_hold(request):
        return f"waits for nodes with the same packages for its ranks: {_differences(nodes)}"
    return f"{needs}: the pool's nodes cannot hold its parts together"


class _Pool:
    """The nodes while slots are assigned."""

    def __init__(self, nodes: Sequence[NodeSlots]) -> None:
        self._nodes = {node.name: node for node in nodes}
        self.total = sum(node.total for node in nodes)
        self._largest_group = max((len(g) for node in nodes for g in node.linked), default=0)
        self._holds: dict[tuple[tuple[int, ...], ...], bool] = {}

    def settle(self, request: PlacementRequest) -> PlacementRequest:
        """Return a request adapted to this pool: on a single GPU, actors share if allowed."""
        if self.total != 1 or not all(node.are_gpus for node in self._nodes.values()):
            return request
        actors = tuple(
            actor.model_copy(update={"slots": 0}) if actor.shares and request.whole else actor
            for actor in request.actors
        )
        return replace(request, actors=actors)

    def could_hold(self, request: PlacementRequest) -> bool:
        """Return whether the pool could hold a request if idle."""
        if not request.whole:
            return True
        holds = self._holds.get(request.shape)
        if holds is None:
            idle = {name: set(range(node.total)) for name, node in self._nodes.items()}
            holds = self._holds[request.shape] = bool(self.assign(request, idle))
        return holds

    def assign(self, request: PlacementRequest, free: _Slots) -> list[Assignment]:
        """Place a request, taking its slots from `free`: all of it, or what fits if not `whole`."""
        assigned, left = self._fit(request, free, lambda name: (len(free[name]), name))
        if request.whole and len(assigned) < len(request.actors):
            return []
        free.update(left)
        return assigned

    def reserve(
        self, request: PlacementRequest, assigned: Sequence[Assignment], free: _Slots
    ) -> None:
        """Remove from `free` the slots that a waiting request reserves.

        It reserves all free slots that fit now on any node, and the rest on the nodes that can
        serve it first.
        """
        names = {item.actor for item in assigned}
        for nodes in (free, {name: set(range(node.total)) for name, node in self._nodes.items()}):
            rest = tuple(actor for actor in request.actors if actor.name not in names)
            waiting = PlacementRequest(request.job, rest, home=request.home, whole=False)
            reserved, _ = self._fit(
                waiting, nodes, lambda name: (-len(free[name]), name), prefer=free
            )
            for entry in reserved:
                free[entry.node] -= set(entry.devices)
            names |= {item.actor for item in reserved}

    def _fit(
        self,
        request: PlacementRequest,
        available: _Slots,
        rank: Callable[[str], tuple[int, str]],
        prefer: _Slots | None = None,
    ) -> tuple[list[Assignment], _Slots]:
        """Return the assignments that fit, and the free slots left on their nodes."""
        best: tuple[list[Assignment], _Slots] = [], {}
        for units in _units_of(request.actors):
            for alike in self._alike(request, units, available):
                result = self._fit_units(request, units, available, rank, prefer, alike)
                if len(result[0]) == len(request.actors):
                    return result
                best = max(best, result, key=lambda item: len(item[0]))
        return best

    def _alike(
        self, request: PlacementRequest, units: Sequence[_Unit], available: _Slots
    ) -> Iterable[_Slots]:
        """Yield sets of nodes that can hold parts of a learner, those with most slots first."""
        of_home = self._nodes[request.home].packages if request.home in available else ()
        kinds = {self._nodes[name].packages for name in available} - {()}
        parts = sum(bool(_ranks_of(unit)) for unit in units) + (request.home is not None)
        if parts < 2 or len(kinds) < 2:
            return [available]
        matches = [
            {
                name: slots
                for name, slots in available.items()
                if self._nodes[name].packages in ((), kind)
            }
            for kind in ({of_home} if of_home else kinds)
        ]
        return sorted(matches, key=lambda nodes: (-sum(map(len, nodes.values())), min(nodes)))

    def _fit_units(
        self,
        request: PlacementRequest,
        units: Sequence[_Unit],
        available: _Slots,
        rank: Callable[[str], tuple[int, str]],
        prefer: _Slots | None,
        alike: _Slots,
    ) -> tuple[list[Assignment], _Slots]:
        left: _Slots = {}
        mine: _Slots = {}
        home = request.home if request.home in available else None
        home = home or self._home(request, alike, rank)

        def choose(count: int, name: str) -> tuple[int, ...] | None:
            slots = left.get(name, available[name])
            liked = slots if prefer is None else prefer[name]
            return self._choose(count, name, slots, liked, mine.get(name, set()), need)

        def full(name: str) -> tuple[bool, int, str]:
            linked = home is None or self._nodes[name].link == self._nodes[home].link
            return not linked, len(left.get(name, available[name])), name

        assigned: list[Assignment] = []
        need = request.need
        for unit in sorted(units, key=_slots_of, reverse=True):
            count = _slots_of(unit)
            node, devices = home, choose(count, home) if home else None
            if devices is None:
                others = [
                    name
                    for name, slots in (alike if _ranks_of(unit) else available).items()
                    if name != home and len(left.get(name, slots)) >= count
                ]
                node, devices = self._first(count, others, full, choose)
            if node is None or devices is None:
                continue
            left[node] = left.get(node, available[node]) - set(devices)
            mine.setdefault(node, set()).update(devices)
            need -= count
            assigned += _assignments(request.job, unit, self._nodes[node], devices)
        return assigned, left

    @staticmethod
    def _first(
        count: int,
        names: list[str],
        rank: Callable[[str], tuple[bool, int, str]],
        choose: Callable[[int, str], tuple[int, ...] | None],
    ) -> tuple[str | None, tuple[int, ...] | None]:
        """Return the first node, by rank, that has the slots; usually the very first."""
        best = min(names, key=rank, default=None)
        devices = None if best is None else choose(count, best)
        if best is None or devices is not None:
            return best, devices
        matches = ((name, choose(count, name)) for name in sorted(names, key=rank))
        return next((item for item in matches if item[1] is not None), (None, None))

    def _home(
        self, request: PlacementRequest, available: _Slots, rank: Callable[[str], tuple[int, str]]
    ) -> str | None:
        """Return the best node that holds all actors, else the one with the most slots."""
        if not available:
            return None
        holding = [name for name, slots in available.items() if len(slots) >= request.need]
        if holding:
            return min(holding, key=rank)
        return min(available, key=lambda name: (-len(available[name]), name))

    def _choose(
        self, count: int, node: str, slots: set[int], liked: set[int], near: set[int], need: int
    ) -> tuple[int, ...] | None:
        """Choose slots of one node, linked ones if the pool has enough; None: they do not fit.

        Among groups, in this order: the one with the most `liked` slots, the one with `near` slots,
        the smallest that holds all slots still needed, the largest.
        """
        if count == 0:
            return ()
        if count > 1:
            slots = slots - self._nodes[node].alone
        fitting = [
            (slots & group, group)
            for group in self._nodes[node].linked
            if len(slots & group) >= count
        ]
        if fitting:
            chosen, _ = min(
                fitting,
                key=lambda item: (
                    -min(len(item[0] & liked), count),
                    not item[1] & near,
                    len(item[0]) if len(item[0]) >= need else (1 << 20) - len(item[0]),
                    min(item[0]),
                ),
            )
        elif count > self._largest_group and len(slots) >= count:
            chosen = slots
        else:
            return None
        return tuple(sorted(sorted(chosen, key=lambda slot: (slot not in liked, slot))[:count]))


def _units_of(actors: Sequence[ActorPlacement]) -> Iterator[list[_Unit]]:
    """Yield groupings of actors on nodes, best first: ranks in one or several equal parts.

    Each other actor forms a unit with the actors that share its slots; so do incomplete ranks.
    """
    ranks = _ranks_of(actors)
    spread = ranks[0].spread if ranks else []
    rest: list[_Unit] = [
        (actor, *(other for other in actors if _uses_slots_of(other, actor)))
        for actor in actors
        if not (spread and actor in ranks) and not _is_guest(actor, actors)
    ]
    for parts in spread or [1]:
        size = len(ranks) // parts
        cut = [tuple(ranks[at : at + size]) for at in range(0, len(ranks), size)] if spread else []
        yield [*cut, *rest]


def _ranks_of(actors: Iterable[ActorPlacement]) -> list[ActorPlacement]:
    """Return the ranks of a learner with several ranks, rank 0 included."""
    return [actor for actor in actors if actor.spread or actor.role == "rank"]


def _uses_slots_of(actor: ActorPlacement, other: ActorPlacement) -> bool:
    return not actor.slots and actor.shares == other.name


def _is_guest(actor: ActorPlacement, actors: Sequence[ActorPlacement]) -> bool:
    return any(_uses_slots_of(actor, other) for other in actors)


def _slots_of(unit: _Unit) -> int:
    return sum(actor.slots for actor in unit)


def _assignments(
    job: str, unit: _Unit, node: NodeSlots, devices: tuple[int, ...]
) -> Iterator[Assignment]:
    """Assign a unit's slots to its actors, adjacent slots to adjacent actors."""
    left = iter(devices)
    held: dict[str, tuple[int, ...]] = {}
    for actor in unit:
        shares = not actor.slots and actor.shares in held
        mine = held[actor.shares] if shares else tuple(islice(left, actor.slots))
        held[actor.name] = mine
        are_gpus = node.are_gpus and bool(mine) and not node.alone.intersection(mine)
        yield Assignment(job, actor.name, node.name, mine, shares, are_gpus)


# -- requests and free slots, from the records of jobs and nodes -----------------------------------


def request_of(key: str, record: JobRecord) -> PlacementRequest | None:
    """Return the request of a job that waits for slots, or None."""
    grows = False
    if is_queued(record) and record.configured and record.stop == "no":
        actors, home, whole = unplaced(record.actors), None, True
    elif record.state in ACTIVE and record.actors:
        without_node = [actor for actor in record.actors if actor.node is None]
        lost = [actor for actor in without_node if not actor.added]
        actors, grows = lost or without_node, not lost
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
        grows=grows,
    )


def with_nodes(record: JobRecord, by_actor: Mapping[str, Assignment]) -> JobRecord:
    """Return the record with nodes for actors that had none."""
    actors = [_on_its_node(actor, by_actor.get(actor.name)) for actor in record.actors]
    return record.model_copy(update={"actors": actors})


def _on_its_node(actor: ActorPlacement, assigned: Assignment | None) -> ActorPlacement:
    if assigned is None or actor.node is not None:
        return actor
    slots = 0 if assigned.shares else actor.slots
    return actor.model_copy(
        update={
            "node": assigned.node,
            "devices": list(assigned.devices),
            "gpus": assigned.are_gpus,
            "slots": slots,
            "added": False,
        }
    )


def is_queued(record: JobRecord) -> bool:
    """Return whether a job waits for nodes."""
    return record.state == "QUEUED"


def free_slots(
    node: NodeStatus, desired: Sequence[WantedActor], *, idle: bool = False, closed: bool = False
) -> NodeSlots:
    """Return the slots of a node that are neither assigned nor still held by ending actors.

    A draining node, or one `closed` before its release, has none.
    """
    held = {slot for actor in desired for slot in actor.devices}
    leaving = [] if idle else unwanted(node, desired)
    held |= {slot for status in leaving for slot in status.devices}
    return NodeSlots(
        node.node,
        node.slots,
        frozenset() if closed or node.draining else frozenset(range(node.slots)) - held,
        tuple(frozenset(group) for group in node.groups),
        node.link,
        node.slot_kind == "gpu",
        frozenset(slot for slot, gpu in enumerate(node.gpus) if gpu.is_instance),
        tuple((name, node.packages.get(name, "none")) for name in MUST_MATCH)
        if node.packages
        else (),
    )


def unwanted(node: NodeStatus, desired: Sequence[WantedActor]) -> list[ActorStatus]:
    """Return the actors that run on a node without being placed there."""
    names = {(actor.user, actor.job, actor.name) for actor in desired}
    return [status for status in node.actors if (status.user, status.job, status.name) not in names]
