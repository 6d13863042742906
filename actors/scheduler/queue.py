"""In which order waiting jobs are placed. Pure.

Higher priority first; between equals the user who would hold the least for their weight with half
a job more; between those the oldest. Half a job, of the mean size of those that are next, is given
too much on the average, and weighs most for who has little (Sainte-Laguë's rule). Who holds nothing
comes before all who hold something.

Every hour of waiting counts as one more point of priority, so nobody waits for ever because others
keep coming. Between users it counts up to the highest priority that anybody waits with and no
further: age makes up for a lower priority and leaves it to the shares who is next. Who has much
waiting would otherwise push aside whoever has just come, by the age of his jobs alone.
"""

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from ...schemas.job import ActorPlacement
from ...schemas.user import NO_BOUNDS, Quota
from .jobs.actors import slots_of


@dataclass(frozen=True)
class PlacementRequest:
    """Actors of one job that have no node yet."""

    job: str
    """Key of the job."""
    actors: tuple[ActorPlacement, ...]
    """In the order in which they are placed."""
    user: str = ""
    """Owner of the job."""
    priority: int = 0
    """Of the job."""
    created: float = 0.0
    """When the job was submitted, in seconds since the epoch."""
    home: str | None = None
    """Node of the job's learner: its other actors are put there while there is room."""
    whole: bool = True
    """All at once or none; False for the missing actors of a job that runs, which come first."""

    @cached_property
    def need(self) -> int:
        """Slots that the actors hold together."""
        return slots_of(self.actors)

    @cached_property
    def shape(self) -> tuple[tuple[int, ...], ...]:
        """Slots of each actor, and over how many nodes the ranks of a learner may lie."""
        return shape_of(self.actors)


def shape_of(actors: Iterable[ActorPlacement]) -> tuple[tuple[int, ...], ...]:
    """Return what decides whether actors fit: slots of each, and how ranks may be spread."""
    return tuple((actor.slots, *actor.spread) for actor in actors)


@dataclass
class UserShares:
    """What each user holds, and may hold."""

    held: dict[str, int] = field(default_factory=dict[str, int])
    """Slots by user."""
    quotas: Mapping[str, Quota] = field(default_factory=dict[str, Quota])
    """Quotas by user."""
    unknown: Quota = NO_BOUNDS
    """That of everybody else."""
    actors: dict[str, int] = field(default_factory=dict[str, int])
    """Actors that have a node, by user."""
    aging_s: float = 3600.0
    """A wait of so long counts as one more point of priority."""

    def quota(self, user: str) -> Quota:
        """Return the quota of a user."""
        return self.quotas.get(user, self.unknown)

    def take(self, user: str, slots: int, actors: int) -> None:
        """Count what a user was given."""
        self.held[user] = self.held.get(user, 0) + slots
        self.actors[user] = self.actors.get(user, 0) + actors

    def points(self, request: "PlacementRequest", now: float) -> int:
        """Return the priority of a job, its age included."""
        return request.priority + int(max(now - request.created, 0) // self.aging_s)

    def room(self, user: str) -> float:
        """Return the slots that a user may still be given."""
        bound = self.quota(user).max_slots
        return float("inf") if bound is None else bound - self.held.get(user, 0)

    def actor_room(self, user: str) -> float:
        """Return the actors that a user may still be given."""
        bound = self.quota(user).max_actors
        return float("inf") if bound is None else bound - self.actors.get(user, 0)

    def usage(self, user: str, more: float = 0.0) -> float:
        """Return what a user holds for their weight, with so many slots more; 0 for nothing."""
        held = self.held.get(user, 0)
        return (held + more) / self.quota(user).weight if held else 0.0


def in_order(
    queue: Iterable[PlacementRequest], shares: UserShares, now: float
) -> Iterator[PlacementRequest]:
    """Yield the requests in the order of placing, which follows what `shares` says by then.

    The caller counts in `shares` what it gives before it asks for the next one.
    """
    by_user: dict[str, list[tuple[int, float, int, PlacementRequest]]] = defaultdict(list)
    for number, request in enumerate(queue):
        if not request.whole:
            yield request
            continue
        points = -shares.points(request, now)
        by_user[request.user].append((points, request.created, number, request))
    for waiting in by_user.values():
        waiting.sort(reverse=True)

    highest = max((one.priority for each in by_user.values() for *_, one in each), default=0)

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
