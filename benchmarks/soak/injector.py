"""Kills and stops at random, one after another, from a seed.

The seed decides what is drawn: roles, pairs, moments, how long what was killed stays away. Which
process a draw meets depends on what runs then. Limits are those of a user who sets none: an actor
that fails more than five times within ten minutes fails its job by design, so none is killed more
often than `PER_ACTOR` times in that while, however often it is drawn.
"""

import asyncio
import contextlib
import os
import random
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field

import psutil
from tinkermq.schemas.job import FINAL_STATES
from tinkermq.schemas.wire.errors import StateError, TinkermqError

from benchmarks.soak.lanes import Lane
from benchmarks.soak.pool import BROKER, SILENCE_S, Pool, Target, family
from tests.support.jobs import Job

WEIGHTS = {
    "generator": 28,
    "learner": 22,
    "environment": 14,
    "evaluator": 6,
    "client": 8,
    "scheduler": 8,
    BROKER: 5,
    "node": 4,
    "gateway": 5,
    "auth": 8,
}
"""How often each role is drawn."""
STOPS = {
    "sigterm": 4,
    "sigstop": 4,
    "job stop": 2,
    "job pause": 2,
    "cut actor": 6,
    "cut node": 9,
    "freeze": 4,
}
"""How often each way to stop something, for a while or until it is started again, is drawn."""
_CUTS_S = (3.0, 8.0, 14.0, 20.0, 26.0, 36.0)
_ACTORS = frozenset({"learner", "generator", "environment", "evaluator"})
_SHIFTS_S = (0.0, 0.0, -20.0, -3600.0, -86_400.0, 3600.0)
"""By how much the clock of a scheduler that starts may be wrong."""
_AGAIN_SHARE = 0.4
"""How often a broker that starts again is killed while it does."""
_AWAY_S = (0.0, 0.5, 2.0, 5.0, 15.0)
PER_ACTOR = 4
PER_JOB_LOSSES = 3
"""Losses of a node that a job may have had before nodes are left to rest: its limit is five."""
_WINDOW_S = 600.0
_PAIR_SHARE = 0.2
_STOPS_PER_KILL = 0.4
_MOMENT_S = 5.0
_TRIES = 60
_LOOK_S = 0.5
_UNNOTICED_S = 5 * SILENCE_S
"""A frozen actor is found by then, even where the broker was away meanwhile."""
_LOST_S = 8.0
"""A node that is away for longer may lose its jobs."""


@dataclass
class Injector:
    """Draws and does what is done to a pool."""

    pool: Pool
    lanes: list[Lane]
    rng: random.Random
    roles: frozenset[str]
    num_kills: int
    pause_s: float
    say: Callable[[str], None]
    killed: Counter[str] = field(default_factory=Counter)
    stopped: Counter[str] = field(default_factory=Counter)
    num_pairs: int = 0
    faults: list[str] = field(default_factory=list)
    """What was asked of the system and refused."""
    _times: defaultdict[tuple[str, str], list[float]] = field(
        default_factory=lambda: defaultdict(list)
    )
    _later: set[asyncio.Task[None]] = field(default_factory=set)
    _busy: set[str] = field(default_factory=set)
    """What is stopped and will go on, and jobs that are being stopped."""
    _ready: asyncio.Event = field(default_factory=asyncio.Event)
    _stops_due: float = 0.0

    async def run(self) -> None:
        """Kill `num_kills` times, with stops between; return when all is up again."""
        while self.killed.total() < self.num_kills:
            await asyncio.sleep(self.rng.uniform(0.2, 1.8) * self.pause_s)
            await self._moment()
            is_pair = self.rng.random() < _PAIR_SHARE
            left = self.num_kills - self.killed.total()
            targets = self._draw(min(2 if is_pair else 1, left))
            if not targets:
                continue
            self._kill(targets)
            self._stops_due += _STOPS_PER_KILL * len(targets)
            while self._stops_due >= 1:
                self._stops_due -= 1
                await asyncio.sleep(self.rng.uniform(0.1, 1.0) * self.pause_s)
                await self._stop()
        while self._later:
            await asyncio.wait(self._later)

    # -- drawing -------------------------------------------------------------------------------

    async def _moment(self) -> None:
        """Wait for something that happens in a job, so that kills fall just behind it."""
        kind = self.rng.choice(["any", "batch", "task", "rollout"])
        lane = self.rng.choice(self.lanes)
        after_s = self.rng.random() ** 3 * 0.5
        if kind != "any":
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(lane.next(kind), _MOMENT_S)
            await asyncio.sleep(after_s)

    def _draw(self, count: int) -> list[Target]:
        """Draw different processes that may be killed now."""
        drawn: list[Target] = []
        for _ in range(_TRIES):
            if len(drawn) == count:
                break
            target = self._draw_one()
            if target is not None and all(target.pid != one.pid for one in drawn):
                drawn.append(target)
        return drawn

    def _draw_one(self) -> Target | None:
        roles = sorted(self.roles)
        role = self.rng.choices(roles, [WEIGHTS[one] for one in roles])[0]
        place = self.rng.random()
        found = [one for one in self.pool.targets() if one.role == role and self._may(one)]
        return found[int(place * len(found))] if found else None

    def _may(self, target: Target) -> bool:
        """Whether limits at their defaults let this process be killed now."""
        if str(target.pid) in self._busy or target.job in self._busy or target.role in self._busy:
            return False
        if target.role == "node" and not self._may_lose():
            return False
        now = time.monotonic()
        recent = [one for one in self._times[target.job, target.name] if now - one < _WINDOW_S]
        return not target.job or len(recent) < PER_ACTOR

    def _may_lose(self) -> bool:
        return all(lane.losses < PER_JOB_LOSSES for lane in self.lanes)

    def _note(self, target: Target) -> None:
        self._times[target.job, target.name].append(time.monotonic())

    # -- killing -------------------------------------------------------------------------------

    def _kill(self, targets: list[Target]) -> None:
        """SIGKILL at the same moment; what nobody else starts again is started again later."""
        for target in targets:
            if not target.job and target.role != BROKER:
                self.pool.away(target.name)
        for target in targets:
            with contextlib.suppress(ProcessLookupError):
                os.kill(target.pid, signal.SIGKILL)
        pair = " with the next" if len(targets) > 1 else ""
        for target in targets:
            self.killed[target.role] += 1
            self._note(target)
            count = f"kill {self.killed.total()} of {self.num_kills}"
            self.say(f"{count}: {target}{self._step(target)}{pair}")
            self._start_again(target)
        self.num_pairs += len(targets) > 1

    def _start_again(self, target: Target) -> None:
        """Do what systemd, an operator or a user does: actors of jobs are their node's affair."""
        if target.job:
            return
        away_s = self.rng.choice(_AWAY_S)
        if target.role == BROKER:
            again_s = self.rng.uniform(0.0, 0.4) if self.rng.random() < _AGAIN_SHARE else None
            self._do_later(self._start_broker(min(away_s, 5.0), again_s))
            return
        self._do_later(self._start(target, away_s, self._shift_s(target.name)))

    async def _start_broker(self, away_s: float, again_s: float | None) -> None:
        """Start it, and after `again_s` of that kill it again."""
        self._busy.add(BROKER)
        try:
            self.pool.server.kill()  # reaps it
            await asyncio.sleep(away_s)
            if again_s is not None:
                self.pool.server.begin()
                await asyncio.sleep(again_s)
                self.pool.server.kill()
                self.stopped["broker killed in its restart"] += 1
                self.say(f"  {BROKER} killed {again_s:.2f} s after its start")
                await asyncio.sleep(away_s)
            await asyncio.to_thread(self.pool.server.start, 60.0)
        finally:
            self._busy.discard(BROKER)

    def _shift_s(self, name: str) -> float:
        return self.rng.choice(_SHIFTS_S) if name.startswith("scheduler") else 0.0

    async def _start(self, target: Target, away_s: float, shift_s: float) -> None:
        await self.pool.until_gone(target.name)
        await asyncio.sleep(away_s)
        self.start_now(target.name, shift_s)

    def start_now(self, name: str, shift_s: float = 0.0) -> None:
        """Start a service, or a user's program while its job runs; `shift_s` of its clock."""
        for lane in self.lanes:
            if lane.client == name:
                lane.start_client()
                return
        if not name.startswith("client"):
            if shift_s:
                self.stopped["scheduler with a wrong clock"] += 1
                self.say(f"  {name} starts with a clock that is wrong by {shift_s:g} s")
            self.pool.start(name, shift_s=shift_s)

    def _step(self, target: Target) -> str:
        steps = [lane.step for lane in self.lanes if lane.job_id == target.job]
        return f" at step {steps[0]}" if steps else ""

    # -- stopping ------------------------------------------------------------------------------

    async def _stop(self) -> None:
        """Stop something in a way that is meant to be gone on from."""
        kinds = sorted(STOPS)
        kind = self.rng.choices(kinds, [STOPS[one] for one in kinds])[0]
        lane = self.rng.choice(self.lanes)
        rest_s = self.rng.choice([0.5, 2.0, 5.0, 12.0])
        if kind in ("job stop", "job pause"):
            now = self.rng.random() < 0.3
            await self._stop_job(lane, kind, rest_s, now=now)
            return
        if kind in ("cut actor", "cut node", "freeze"):
            self._draw_fault(kind, lane)
            return
        drawn = self._draw(1)
        if not drawn:
            return
        [target] = drawn
        self.stopped[kind] += 1
        if kind == "sigterm":
            self.say(f"  SIGTERM to {target}{self._step(target)}")
            self._terminate(target)
        else:
            if target.role in ("node", BROKER) and not self._may_lose():
                rest_s = min(rest_s, _LOST_S / 2)
            self.say(f"  SIGSTOP to {target}{self._step(target)} for {rest_s:g} s")
            self._do_later(self._halt(target, rest_s))

    def _terminate(self, target: Target) -> None:
        if target.job:
            self._note(target)  # it may not have learnt yet to drain
            with contextlib.suppress(ProcessLookupError):
                os.kill(target.pid, signal.SIGTERM)
            return
        self._busy.add(str(target.pid))
        self._do_later(self._end(target, self._shift_s(target.name)))

    async def _end(self, target: Target, shift_s: float) -> None:
        try:
            if target.role == BROKER:
                await asyncio.to_thread(self.pool.server.stop)
                self.pool.server.start()
                return
            await self.pool.end(target.name)
            self.start_now(target.name, shift_s)
        finally:
            self._busy.discard(str(target.pid))

    async def _halt(self, target: Target, rest_s: float) -> None:
        self._busy.add(str(target.pid))
        try:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(target.pid)
                process.suspend()
                await asyncio.sleep(rest_s)
                process.resume()
        finally:
            self._busy.discard(str(target.pid))

    # -- partitions and frozen actors ----------------------------------------------------------

    def _draw_fault(self, kind: str, lane: Lane) -> None:
        """Draw an actor of a job to cut off or to freeze, or the node of its learner."""
        place, rest_s = self.rng.random(), self.rng.choice(_CUTS_S)
        is_learner, is_behind, lost = (self.rng.random() < 0.5 for _ in range(3))
        found = [
            one
            for one in self.pool.targets()
            if one.job == lane.job_id
            and one.role in _ACTORS
            and (one.role == "learner" or not (is_learner or kind == "cut node"))
            and self._may(one)
        ]
        if not found:
            return
        target = found[int(place * len(found))]
        if kind == "freeze":
            self.stopped[kind] += 1
            self.say(f"  freeze of {target}{self._step(target)}")
            self._do_later(self._freeze(target))
            return
        if kind == "cut node":
            if target.node in self._busy:
                return
            rest_s = rest_s if self._may_lose() else _LOST_S / 2
        behind = lane.job.scope.batch if is_behind and target.role == "learner" else ""
        self.stopped[kind] += 1
        self._do_later(self._cut(kind, target, rest_s, behind, lost=lost))

    async def _cut(
        self, kind: str, target: Target, rest_s: float, behind: str, *, lost: bool
    ) -> None:
        """Cut an actor or its node off for a while, at once or just behind a batch record."""
        partitions = self.pool.partitions[target.node]
        what = target.node if kind == "cut node" else str(target.pid)
        self._busy.add(what)
        try:
            if behind:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(partitions.cut_behind(behind), 4 * _MOMENT_S)
            pids = family(target.pid)
            if kind == "cut node":
                partitions.cut_all()
            else:
                self._note(target)
                partitions.cut(pids)
            where = f"node {target.node} of {target}" if kind == "cut node" else str(target)
            moment = " behind a batch record" if behind else ""
            self.say(
                f"  {where} is cut off{self._step(target)}{moment} for {rest_s:g} s, what it says "
                f"is {'lost' if lost else 'late'}"
            )
            await asyncio.sleep(rest_s)
            partitions.heal(None if kind == "cut node" else pids, lost=lost)
        finally:
            self._busy.discard(what)

    async def _freeze(self, target: Target) -> None:
        """Stop an actor for good: its node must find out, and start it again."""
        self._note(target)
        self._busy.add(str(target.pid))
        try:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(target.pid)
                for pid in family(target.pid):
                    psutil.Process(pid).suspend()
                began = time.monotonic()
                while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    if time.monotonic() - began > _UNNOTICED_S:
                        self.faults.append(f"nobody ended {target}, which was frozen")
                        process.kill()
                        return
                    await asyncio.sleep(_LOOK_S)
                self.say(f"  {target} was ended after {time.monotonic() - began:.0f} s")
        finally:
            self._busy.discard(str(target.pid))

    async def _stop_job(self, lane: Lane, kind: str, rest_s: float, *, now: bool) -> None:
        if lane.state != "RUNNING" or lane.job_id in self._busy:
            return
        self.stopped[kind] += 1
        self.say(f"  {kind} of {lane.job_id} for {rest_s:g} s at step {lane.step}")
        work = self._stop_and_resume(lane, now=now) if kind == "job stop" else self._pause(lane)
        self._do_later(self._with_job(lane, kind, rest_s, work))

    async def _with_job(
        self, lane: Lane, kind: str, rest_s: float, work: Callable[[float], Awaitable[None]]
    ) -> None:
        job = lane.job_id
        self._busy.add(job)
        try:
            await work(rest_s)
        except (TinkermqError, AssertionError) as error:
            self.faults.append(f"{kind} of {job}: {error}")
        finally:
            self._busy.discard(job)

    def _stop_and_resume(self, lane: Lane, *, now: bool) -> Callable[[float], Awaitable[None]]:
        async def work(rest_s: float) -> None:
            job = lane.job
            await lane.patiently(lambda: job.stop(now=now), "stop")
            await lane.patiently(lambda: _ended(job), "the job's end")
            await asyncio.sleep(rest_s)
            if job.record.state == "CANCELLED":  # else it was done before it was stopped
                await lane.patiently(job.resume, "resume")

        return work

    def _pause(self, lane: Lane) -> Callable[[float], Awaitable[None]]:
        async def work(rest_s: float) -> None:
            job = lane.job
            try:
                await lane.patiently(job.pause, "pause")
            except StateError:  # it has ended, or is being queued again, just now
                return
            await asyncio.sleep(rest_s)
            if (await lane.patiently(job.read, "the record")).state == "PAUSED":
                await lane.patiently(job.resume, "resume")

        return work

    def _do_later(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._later.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._later.discard(task)
        if (error := task.exception()) is not None:
            self.faults.append(f"{type(error).__name__}: {error}")


async def _ended(job: Job) -> bool:
    if (await job.read()).state not in FINAL_STATES:
        await asyncio.sleep(_LOOK_S)
        return False
    return True
