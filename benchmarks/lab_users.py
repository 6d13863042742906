"""Who uses a simulated lab, and what they ask of its scheduler."""

import asyncio
import itertools
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from tinkermq.broker.client.connection import Broker
from tinkermq.broker.client.rpc import call
from tinkermq.broker.user_records import UserStore, create_user_stores
from tinkermq.schemas.job import (
    JobList,
    JobRecord,
    JobReply,
    ListRequest,
    StopRequest,
    SubmitRequest,
)
from tinkermq.schemas.user import QuotaReply, UserRecord
from tinkermq.schemas.wire.errors import (
    BrokerError,
    BusyError,
    ConflictError,
    DeadlineError,
    NobodyAnswersError,
)
from tinkermq.schemas.wire.message import Empty, Message
from tinkermq.schemas.wire.subjects import rpc

R = TypeVar("R", bound=Message)

WIDTHS = (1, 2, 4, 4, 8, 8, 16)
"""Slots of jobs, learner included."""
MEAN_WIDTH = sum(WIDTHS) / len(WIDTHS)
_PAUSE_S = 0.5
_CANCELLED = 0.02
_PASSING = (BrokerError, BusyError, ConflictError, DeadlineError, NobodyAnswersError)


@dataclass(frozen=True)
class Tenant:
    """A user and his habits."""

    name: str
    weight: float = 1.0
    max_slots: int | None = None
    backlog: int = 0
    """Jobs that wait for him at any time; 0: he submits now and then."""
    priority: int = 0


def tenants(slots: int, backlog: int) -> list[Tenant]:
    """Return the users of a lab with so many slots; of the busy ones so many jobs wait."""
    weights = (1, 1, 1, 1, 2, 2, 4, 4)
    return [
        *(Tenant(f"busy{i}", float(w), backlog=backlog) for i, w in enumerate(weights)),
        Tenant("capped", 4.0, max_slots=max(slots // 20, 16), backlog=backlog),
        Tenant("low", 1.0, backlog=max(backlog // 3, 1), priority=-5),
        *(Tenant(f"seldom{i}") for i in range(10)),
    ]


async def make_users(broker: Broker, users: list[Tenant]) -> None:
    """Write the records by which the scheduler knows quotas and weights."""
    await create_user_stores(broker)
    store = UserStore(broker)
    for one in users:
        await store.create(
            UserRecord(
                user=one.name,
                key_hash="0" * 64,
                created=0.0,
                weight=one.weight,
                max_slots=one.max_slots,
                max_live_jobs=2000,
                max_stored_bytes=None,
            )
        )


@dataclass
class Clients:
    """The clients of all users, over one connection."""

    broker: Broker
    folder: Path
    num_jobs: int
    """To be submitted by all together."""
    slots: int
    rng: random.Random
    made: dict[str, str] = field(default_factory=dict[str, str])
    """User by id of each job that was accepted."""
    cancelled: set[str] = field(default_factory=set[str])
    """Jobs that their users have stopped."""
    _awaited: list[tuple[int, asyncio.Event]] = field(
        default_factory=list[tuple[int, asyncio.Event]]
    )
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    @property
    def is_done(self) -> bool:
        """Whether all jobs were submitted."""
        return len(self.made) >= self.num_jobs

    async def busy(self, user: Tenant, total_weight: float) -> None:
        """Keep jobs waiting, whatever runs, and stop some of them."""
        share = self.slots * user.weight / total_weight
        running = min(share, user.max_slots or share) / MEAN_WIDTH
        wanted = int(user.backlog + 1.6 * running)
        while not self.is_done:
            held = (await self._ask(user.name, "quota", Empty(), QuotaReply)).held
            for _ in range(max(wanted - held["max_live_jobs"], 0)):
                job = await self.submit(user, self.rng.choice(WIDTHS))
                if self.rng.random() < _CANCELLED:
                    await self._stop(user.name, job)
            await asyncio.sleep(_PAUSE_S)

    async def seldom(self, user: Tenant, every_s: float) -> None:
        """Submit a job now and then."""
        while not self.is_done:
            await asyncio.sleep(self.rng.expovariate(1 / every_s))
            await self.submit(user, self.rng.choice(WIDTHS))

    async def sweep(self, user: Tenant, count: int) -> None:
        """Submit many small jobs at once, as who searches a grid does, when half is done."""
        await self.until(0.5)
        for _ in range(count):
            await self.submit(user, 1)

    async def submit(self, user: Tenant, width: int) -> str:
        """Submit a job of so many slots, as often as it takes; return its id."""
        number = next(self._numbers)
        if number >= self.num_jobs:
            return ""
        config = {
            "model": {"path": "models/none"},
            "env": {"game": "bandit", "hosts": 0, "num_val": 0},
            "generator": {"count": width - 1},
            "limits": {"max_node_failures": 1000},
            "output_dir": str(self.folder / "outputs" / user.name),
        }
        request = SubmitRequest(
            request_id=f"{user.name}-{number}", config=config, priority=user.priority
        )
        job = (await self._ask(user.name, "submit", request, JobReply)).record.job
        self.made[job] = user.name
        for count, reached in self._awaited:
            if len(self.made) >= count:
                reached.set()
        return job

    async def until(self, share: float) -> None:
        """Wait until this share of the jobs was submitted."""
        reached = asyncio.Event()
        self._awaited.append((int(share * self.num_jobs), reached))
        await reached.wait()

    async def _stop(self, user: str, job: str) -> None:
        if job:
            self.cancelled.add(job)
            await self._ask(user, "stop", StopRequest(job=job, now=True), JobReply)

    async def jobs(self, user: str, *, ended: bool) -> AsyncIterator[JobRecord]:
        """Yield the jobs of a user that have not ended, or all, as the scheduler tells of them."""
        after, more = "", True
        while more:
            request = ListRequest(all=ended, archived=ended, after=after)
            page = await self._ask(user, "list", request, JobList)
            for record in page.records:
                yield record
            after, more = page.after, bool(page.after)

    async def _ask(self, user: str, method: str, request: Message, reply: type[R]) -> R:
        """Ask the scheduler, again while it is not there: it is killed now and then."""
        while True:
            try:
                return await call(
                    self.broker,
                    rpc(user, "scheduler", method),
                    request,
                    reply,
                    timeout_s=10,
                    waiting_for="the scheduler",
                )
            except _PASSING:
                await asyncio.sleep(_PAUSE_S)
