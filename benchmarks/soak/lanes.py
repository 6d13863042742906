"""Lanes: each runs jobs of one kind, one after another, until the kills are over."""

import asyncio
import random
import time
import uuid
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgpack
import nats
from tinkermq.clients.base import JobAddress
from tinkermq.schemas.job import JobReply, SubmitRequest
from tinkermq.schemas.wire.errors import BrokerError, DeadlineError

from benchmarks.soak.pool import Pool
from benchmarks.soak.recipes import Recipe
from tests.support.jobs import Job

T = TypeVar("T")

STUCK_S = 420.0
"""A running job without a new step for so long is stuck; the longest default deadline is 300 s."""
_PATIENCE_S = 300.0
_LOOK_S = 1.0


class Watcher:
    """Hears on the plain subjects of all jobs what is issued, appended and recorded."""

    def __init__(self) -> None:
        self.issued: defaultdict[str, set[int]] = defaultdict(set)
        self.steps: defaultdict[str, int] = defaultdict(int)
        self._waiting: defaultdict[tuple[str, str], list[asyncio.Future[None]]] = defaultdict(list)
        self._connection: Any = None

    async def open(self, url: str) -> None:
        """Listen from now on; while the broker is away nothing is heard."""
        self._connection = await nats.connect(
            url, max_reconnect_attempts=-1, reconnect_time_wait=0.2, error_cb=_ignore
        )
        for tail in ("task.*", "rollout.*", "batch"):
            await self._connection.subscribe(f"tmq.v1.job.*.*.{tail}", cb=self._hear)

    async def close(self) -> None:
        """Listen no longer."""
        await self._connection.close()

    async def next(self, job: str, kind: str) -> None:
        """Wait for the next message of a kind: `task`, `rollout` or `batch`."""
        future = asyncio.get_running_loop().create_future()
        self._waiting[job, kind].append(future)
        await future

    async def _hear(self, message: Any) -> None:
        _, _, _, _, job, kind, *number = message.subject.split(".")
        if kind == "task":
            self.issued[job].add(int(number[0]))
        elif kind == "batch":
            self.steps[job] = max(self.steps[job], msgpack.unpackb(message.data)["step"])
        for future in self._waiting.pop((job, kind), []):
            if not future.done():
                future.set_result(None)


async def _ignore(_: Exception) -> None:
    """The broker is killed on purpose."""


@dataclass
class Finished:
    """A job that a lane is done with."""

    job: Job
    recipe: Recipe
    problems: list[str] = field(default_factory=list)
    resumed: bool = False
    """It was resumed once more after it had COMPLETED."""


@dataclass
class Lane:
    """Runs the jobs of one recipe."""

    number: int
    recipe: Recipe
    pool: Pool
    watcher: Watcher
    model: Path
    steps: int
    rng: random.Random
    say: Callable[[str], None]
    done: "asyncio.Queue[Finished | None]"
    """Where jobs go with which the lane is done."""
    num_jobs: int = 0
    _job: Job | None = None
    _hosting: bool = False

    @property
    def job(self) -> Job:
        """The job that runs now."""
        assert self._job is not None, "no job was submitted yet"
        return self._job

    @property
    def job_id(self) -> str:
        """Its id; empty before the first."""
        return self._job.record.job if self._job else ""

    @property
    def state(self) -> str:
        """Its state when it was last looked at."""
        return self._job.record.state if self._job else "QUEUED"

    @property
    def losses(self) -> int:
        """How often it has lost its node."""
        return self._job.record.losses if self._job else 0

    @property
    def step(self) -> int:
        """The newest step that is recorded."""
        return self.watcher.steps[self.job_id]

    @property
    def client(self) -> str:
        """Name of the user's program that hosts the game; empty where the pool hosts it."""
        return f"client-{self.number}" if self.recipe.hosted else ""

    async def next(self, kind: str) -> None:
        """Wait for the next message of a kind of the job that runs now."""
        await self.watcher.next(self.job_id, kind)

    async def run(self, over: asyncio.Event) -> None:
        """Run one job after another; none is begun once the kills are over."""
        while not over.is_set():
            await self._submit()
            done = Finished(self.job, self.recipe)
            self.num_jobs += 1
            await self._watch(done)
            if self.client:
                self._hosting = False
                await self.pool.end(self.client)
                self.pool.forget(self.client)
            self.done.put_nowait(done)

    async def patiently(self, attempt: Callable[[], Awaitable[T]], what: str) -> T:
        """Ask again while broker and scheduler are away, or the answer is not true yet."""
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                answer = await attempt()
                if answer is not False:
                    return answer
            except (BrokerError, DeadlineError, TimeoutError) as error:
                if time.monotonic() > deadline:
                    raise AssertionError(f"{what} was not answered: {error}") from error
            if time.monotonic() > deadline:
                raise AssertionError(f"waited {_PATIENCE_S:g} s for {what}")
            await asyncio.sleep(_LOOK_S / 2)

    def start_client(self) -> None:
        """Start the program that hosts the game, unless it runs or is no longer wanted."""
        if not self._hosting or self.pool.runs(self.client):
            return
        address = JobAddress(self.pool.server.url, self.job.scope)
        self.pool.start_client(self.client, address.server_url)

    async def _submit(self) -> None:
        config = self.recipe.make(self.model, self.pool.folder, self.steps)
        name = f"soak-{self.recipe.name}-{self.number}-{self.num_jobs}"
        tree = {**config, "name": name, "output_dir": str(self.pool.folder / "runs")}
        request = SubmitRequest(
            request_id=uuid.UUID(int=self.rng.getrandbits(128)).hex, config=tree
        )
        reply = await self.patiently(
            lambda: self.pool.ask("submit", request, JobReply), "the submission"
        )
        self._job = Job(self.pool, reply.record)
        self.say(f"  {name} is job {self.job_id}")
        if self.client:
            self._hosting = True
            self.start_client()

    async def _watch(self, done: Finished) -> None:
        """Wait until the job has COMPLETED, resumed once more perhaps; or is given up."""
        job, seen, since = done.job, None, time.monotonic()
        while True:
            record = await self.patiently(job.read, "the job's record")
            now = (record.state, record.attempt, self.step)
            if now != seen:
                seen, since = now, time.monotonic()
            if record.state == "FAILED":
                await self._give_up(done, f"FAILED: {record.reason}")
                return
            if time.monotonic() - since > STUCK_S:
                await self._give_up(done, f"stuck for {STUCK_S:g} s at {now}")
                return
            if record.state == "COMPLETED":
                if done.resumed or self.rng.random() > 0.25:
                    self.say(f"  {record.name} has completed: {record.reason}")
                    return
                done.resumed = True
                self.say(f"  {record.name} has completed and is resumed")
                await self.patiently(job.resume, "resume")
            await asyncio.sleep(_LOOK_S)

    async def _give_up(self, done: Finished, why: str) -> None:
        done.problems.append(why)
        story = await self.patiently(done.job.story, "the job's story")
        file = self.pool.folder / f"{done.job.record.name}.story"
        file.write_text(story)
        self.say(f"  {done.job.record.name} is {why}; see {file}")
        if done.job.record.state != "FAILED":
            await self.patiently(lambda: done.job.stop(now=True), "stop")
