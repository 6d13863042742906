"""Nodes of a simulated lab: they come and go, and their actors work for as long as a job lasts.

    python -m benchmarks.lab_nodes NATS_URL COUNT SLOTS MEAN_JOB_S MEAN_LIFE_S DOWN_S SEED

Many nodes in one process, which say over real messages what real nodes say. A node lives for a
random time, vanishes with all that it runs, as one that is preempted does, and comes back under
another name. The learner of a job works for a time that follows from the job's id; what it has done
since its last checkpoint is lost with its node. What became of each job is written down here, by
whoever did the work, so that it can be held against what the scheduler says.
"""

import asyncio
import random
import sys
import time
from collections import Counter

import uvloop
from tinkermq.broker.client.connection import Broker, connect
from tinkermq.broker.client.rpc import Service
from tinkermq.broker.jetstream.kv import Bucket
from tinkermq.schemas.node import ActorStatus, NodeStatus, NodeSync, WantedActor
from tinkermq.schemas.wire.errors import TinkermqError
from tinkermq.schemas.wire.message import Empty, Message
from tinkermq.schemas.wire.subjects import BUCKET_NODES, node

RECORD_S = 2.0
REPORT = "lab.report"
"""Subject on which the ledger is asked for."""
_CHECKPOINTS = 8
_AGAIN_S = 0.1


class LabReport(Message):
    """What the nodes have done so far."""

    done: dict[str, int]
    """The jobs whose learner came to its end, by job id."""
    doubled: list[str]
    """Jobs whose learner ran at two nodes at once, or again after its end."""
    slot_s: dict[str, float]
    """Slot-seconds held so far, by user."""
    most: dict[str, int]
    """The most slots held at once, by user."""
    preempted: int
    """Nodes that vanished."""


class Ledger:
    """What jobs need and what was done of it."""

    def __init__(self, mean_job_s: float) -> None:
        self._mean_job_s = mean_job_s
        self._left: dict[str, float] = {}
        self._at: dict[str, str] = {}
        self.done: Counter[str] = Counter()
        self.doubled: list[str] = []
        self.preempted = 0
        self._unheard: set[str] = set()
        self._held: Counter[str] = Counter()
        self._most: Counter[str] = Counter()
        self._slot_s: dict[str, float] = {}
        self._since = time.monotonic()

    def begin(self, job: str, where: str) -> float:
        """Note that a learner starts; return how long it will work."""
        if job in self._at or (self.done[job] and job not in self._unheard):
            self.doubled.append(job)
        self._at[job] = where
        if self.done[job]:  # it finds its last checkpoint, and ends again
            return _AGAIN_S
        return self._left.setdefault(job, self._need(job))

    def _need(self, job: str) -> float:
        """Return the seconds of work of a job: most are short, some are ten times as long."""
        return min(random.Random(job).lognormvariate(-0.32, 0.8), 8.0) * self._mean_job_s

    def stop(self, job: str, worked_s: float, *, ended: bool) -> None:
        """Note that a learner has ended, or is gone with what it did since its last checkpoint."""
        self._at.pop(job, None)
        if ended:
            self.done[job] = 1
        elif not self.done[job]:
            step = self._need(job) / _CHECKPOINTS
            self._left[job] -= worked_s // step * step

    def forget_end(self, job: str) -> None:
        """Note that a node is gone which had still to tell that a learner has ended."""
        self._unheard.add(job)

    def hold(self, user: str, slots: int) -> None:
        """Note that a user holds so many slots more."""
        now = time.monotonic()
        for one, held in self._held.items():
            self._slot_s[one] = self._slot_s.get(one, 0.0) + held * (now - self._since)
        self._since = now
        self._held[user] += slots
        self._most[user] = max(self._most[user], self._held[user])

    def report(self) -> LabReport:
        """Return all of it as of now."""
        self.hold("", 0)
        return LabReport(
            done=dict(self.done),
            doubled=self.doubled,
            slot_s=dict(self._slot_s),
            most=dict(self._most),
            preempted=self.preempted,
        )


class _Running:
    """An actor at a node."""

    def __init__(self, wanted: WantedActor) -> None:
        self.wanted = wanted
        self.since = time.monotonic()
        self.ended = False
        self.timer: asyncio.TimerHandle | None = None

    def status(self) -> ActorStatus:
        one = self.wanted
        return ActorStatus(
            user=one.user,
            job=one.job,
            name=one.name,
            slots=0 if self.ended else one.slots,
            devices=[] if self.ended else one.devices,
            attempt=one.attempt,
            state="exited" if self.ended else "running",
            exit_code=0 if self.ended else None,
            pid=1,
        )


class LabNode:
    """A node from its coming to its end."""

    def __init__(self, broker: Broker, ledger: Ledger, name: str, slots: int) -> None:
        self.name = name
        self._slots = slots
        self._ledger = ledger
        self._records = Bucket(broker, BUCKET_NODES, NodeStatus)
        self._actors: dict[tuple[str, str], _Running] = {}
        self._changed = asyncio.Event()
        self._epoch = 0

    def status(self) -> NodeStatus:
        """Return what a real node would."""
        half = self._slots // 2
        return NodeStatus(
            node=self.name,
            host=self.name,
            slots=self._slots,
            groups=[list(range(half)), list(range(half, self._slots))],
            actors=[one.status() for one in self._actors.values()],
            time=time.time(),
        )

    async def sync(self, request: NodeSync) -> NodeStatus:
        """Run what is asked for, unless an older scheduler asks."""
        if request.epoch >= self._epoch:
            self._epoch = request.epoch
            wanted = {(one.job, one.name): one for one in request.actors}
            for key in [key for key in self._actors if key not in wanted]:
                self._stop(key)
            for key, one in wanted.items():
                if key not in self._actors:
                    self._start(key, one)
        return self.status()

    def _start(self, key: tuple[str, str], wanted: WantedActor) -> None:
        running = self._actors[key] = _Running(wanted)
        self._ledger.hold(wanted.user, wanted.slots)
        if wanted.role == "learner":
            work_s = self._ledger.begin(wanted.job, self.name)
            loop = asyncio.get_running_loop()
            running.timer = loop.call_later(work_s, self._end, key)
        self._changed.set()

    def _end(self, key: tuple[str, str]) -> None:
        """Let a learner come to the end of its work."""
        running = self._actors[key]
        running.ended = True
        self._ledger.stop(running.wanted.job, 0.0, ended=True)
        self._ledger.hold(running.wanted.user, -running.wanted.slots)
        self._changed.set()

    def _stop(self, key: tuple[str, str]) -> None:
        running = self._actors.pop(key)
        if running.timer is not None:
            running.timer.cancel()
        if not running.ended:
            self._ledger.hold(running.wanted.user, -running.wanted.slots)
            if running.wanted.role == "learner":
                worked_s = time.monotonic() - running.since
                self._ledger.stop(running.wanted.job, worked_s, ended=False)
        self._changed.set()

    async def live(self, broker: Broker, life_s: float) -> None:
        """Answer and write the record for so long, and vanish without a word."""
        service = await Service.start(broker, name=self.name, description="a node of the lab")
        try:
            async with asyncio.timeout(life_s):
                await service.endpoint("sync", node(self.name, "sync"), NodeSync, self.sync)
                await self._tell()
        except TimeoutError:
            self._ledger.preempted += 1
        finally:
            await service.stop(0)
            for key, running in list(self._actors.items()):
                if running.ended:
                    self._ledger.forget_end(running.wanted.job)
                self._stop(key)

    async def _tell(self) -> None:
        while True:
            self._changed.clear()
            try:
                await self._records.put(self.name, self.status())
            except TinkermqError:
                continue
            try:
                async with asyncio.timeout(RECORD_S):
                    await self._changed.wait()
            except TimeoutError:
                continue


async def _place(
    broker: Broker, ledger: Ledger, number: int, slots: int, lives: tuple[float, float], seed: int
) -> None:
    """Be one machine of the cluster: lend a node, take it back, lend another."""
    mean_life_s, down_s = lives
    rng = random.Random(f"{seed} {number}")
    for turn in range(1 << 30):
        name = f"node-{number:03d}-{turn}"
        await LabNode(broker, ledger, name, slots).live(broker, rng.expovariate(1 / mean_life_s))
        await asyncio.sleep(rng.expovariate(1 / down_s))


async def main(
    url: str, count: int, slots: int, mean_job_s: float, lives: tuple[float, float], seed: int
) -> None:
    """Be so many nodes until this process is ended."""
    ledger = Ledger(mean_job_s)

    async def report(_: Empty) -> LabReport:
        return ledger.report()

    async with (
        await connect(url, name="nodes") as broker,
        await Service.start(broker, name="lab", description="What the lab has done") as service,
        asyncio.TaskGroup() as group,
    ):
        await service.endpoint("report", REPORT, Empty, report)
        for number in range(count):
            group.create_task(_place(broker, ledger, number, slots, lives, seed))


if __name__ == "__main__":
    url, *numbers = sys.argv[1:]
    count, slots, mean_job_s, mean_life_s, down_s, seed = map(float, numbers)
    uvloop.run(main(url, int(count), int(slots), mean_job_s, (mean_life_s, down_s), int(seed)))
