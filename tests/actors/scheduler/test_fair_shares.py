"""Shares of users over many jobs of all widths, in a pool that is always full. Pure."""

import heapq
import random
from dataclasses import dataclass, field

import pytest
from tinkermq.actors.scheduler.placement import (
    Assignment,
    NodeSlots,
    PlacementRequest,
    UserShares,
    place,
)
from tinkermq.schemas.job import ActorPlacement
from tinkermq.schemas.user import Quota

WEIGHTS = (1, 1, 1, 1, 2, 2, 4, 4)
WIDTHS = (1, 2, 4, 4, 8, 8, 16)
NUM_NODES, SLOTS, TURN, END, SETTLED = 100, 8, 0.01, 25.0, 5.0
WAITING = 40


@dataclass
class Lab:
    """Nodes, and users each of whom has jobs that wait; a job lasts one on the average."""

    rng: random.Random = field(default_factory=lambda: random.Random(3))
    now: float = 0.0
    queue: list[PlacementRequest] = field(default_factory=list[PlacementRequest])
    running: list[tuple[float, int, PlacementRequest, list[Assignment]]] = field(
        default_factory=list[tuple[float, int, PlacementRequest, list[Assignment]]]
    )
    held: dict[str, int] = field(default_factory=dict[str, int])
    used: dict[str, float] = field(default_factory=dict[str, float])
    longest: dict[int, float] = field(default_factory=dict[int, float])
    number: int = 0

    def __post_init__(self) -> None:
        self.quotas = {f"u{i}": Quota(weight=weight) for i, weight in enumerate(WEIGHTS)}
        self.free = {f"n{i:03}": set(range(SLOTS)) for i in range(NUM_NODES)}

    def submit(self) -> None:
        for user in self.quotas:
            for _ in range(WAITING - sum(one.user == user for one in self.queue)):
                self.number += 1
                actors = [ActorPlacement(name="learner", role="learner")]
                more = range(self.rng.choice(WIDTHS) - 1)
                actors += [ActorPlacement(name=f"g{i}", role="generator") for i in more]
                self.queue.append(
                    PlacementRequest(f"j{self.number}", tuple(actors), user=user, created=self.now)
                )

    def start(self) -> None:
        nodes = [NodeSlots(name, SLOTS, frozenset(free)) for name, free in self.free.items()]
        shares = UserShares(held=dict(self.held), quotas=self.quotas, aging_s=0.001)
        given: dict[str, list[Assignment]] = {}
        for one in place(self.queue, nodes, shares, self.now, most=32).assignments:
            given.setdefault(one.job, []).append(one)
        for job in [one for one in self.queue if one.job in given]:
            self.queue.remove(job)
            self.take(job, given[job.job])

    def take(self, job: PlacementRequest, given: list[Assignment]) -> None:
        for one in given:
            self.free[one.node] -= set(one.devices)
        self.held[job.user] = self.held.get(job.user, 0) + job.need
        self.longest[job.need] = max(self.longest.get(job.need, 0.0), self.now - job.created)
        ends = self.now + min(self.rng.lognormvariate(-0.32, 0.8), 8)
        heapq.heappush(self.running, (ends, int(job.job[1:]), job, given))

    def pass_time(self) -> None:
        step = max(self.running[0][0] - self.now, TURN)
        self.now += step
        for user, slots in self.held.items():
            self.used[user] = self.used.get(user, 0.0) + slots * step * (self.now > SETTLED)
        while self.running and self.running[0][0] <= self.now:
            *_, job, given = heapq.heappop(self.running)
            self.held[job.user] -= job.need
            for one in given:
                self.free[one.node] |= set(one.devices)


@pytest.mark.full
def test_a_full_pool_is_divided_by_weight_and_wide_jobs_wait_no_longer_than_narrow_ones() -> None:
    lab = Lab()
    while lab.now < END:
        lab.submit()
        lab.start()
        lab.pass_time()
    whole = sum(lab.used.values())
    assert whole > 0.97 * NUM_NODES * SLOTS * (END - SETTLED)
    for user, quota in lab.quotas.items():
        due = quota.weight / sum(WEIGHTS)
        assert lab.used[user] / whole == pytest.approx(due, rel=0.05), user
    assert lab.longest[16] < 2 * lab.longest[1]
