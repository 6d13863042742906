"""The whole stack as real processes: nats-server, scheduler, node, and the jobs they run.

A test submits configurations as a client would, waits for what the broker says, and may kill any
process by its role or name. Every wait has a deadline; one that runs out tells the job's record,
its last events and the ends of its actors' logs.
"""

import asyncio
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from tinkermq.broker.batches import BatchLog
from tinkermq.broker.connection import Broker, connect
from tinkermq.broker.feed import follow, read_dead, read_events, read_metrics
from tinkermq.broker.jobs import JobStore
from tinkermq.broker.presence import list_presences
from tinkermq.broker.process import die_with
from tinkermq.broker.rollouts import LogEntry, RolloutLog
from tinkermq.broker.rpc import call
from tinkermq.broker.server import NatsServer
from tinkermq.schemas.batch import BatchRecord
from tinkermq.schemas.errors import DeadlineError, NotFoundError
from tinkermq.schemas.job import (
    FINAL_STATES,
    JobRecord,
    JobReply,
    JobRequest,
    ScaleRequest,
    StopRequest,
    SubmitRequest,
)
from tinkermq.schemas.load_config import load_config, parse_config
from tinkermq.schemas.message import Empty, Message
from tinkermq.schemas.metric import Event, Metric, Presence
from tinkermq.schemas.node import NodeList
from tinkermq.schemas.subjects import JobScope, rpc
from tinkermq.schemas.task import DeadLetter

from tests.processes import alive

REPOSITORY = Path(__file__).parents[1]
DEADLINE_S = 120.0
_POLL_S = 0.05
_STOP_S = 25.0
_LOG_LINES = 25

T = TypeVar("T")


class Stack:
    """A broker, a scheduler and a node of our own; leave it and all of them have ended."""

    def __init__(self, folder: Path, *, slots: int = 32) -> None:
        """Keep everything below `folder`; nothing is started yet."""
        self.folder = folder
        self.server = NatsServer(folder / "nats")
        self.jobs: list[Job] = []
        self._slots = slots
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._broker: Broker | None = None

    async def __aenter__(self) -> Self:
        try:
            self.server.start()
            self.start("scheduler")
            self.start("node")
            self._broker = await connect(self.server.url, name="test")
            await self.until_node()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._broker is not None:
            await self._broker.close()
        for role in ("node", "scheduler"):
            await asyncio.to_thread(self._end, role)
        self.server.stop()

    @property
    def broker(self) -> Broker:
        """The test's own connection."""
        assert self._broker is not None, "the stack was not entered"
        return self._broker

    # -- processes ---------------------------------------------------------------------------

    def start(self, role: str) -> int:
        """Start the scheduler or the node; return its process id."""
        command = [sys.executable, "-m", f"tinkermq.actors.{role}", "--nats", self.server.url]
        if role == "node":
            command += ["--name", "node", "--slots", str(self._slots)]
        self._processes[role] = self._popen(command, role)
        return self._processes[role].pid

    def start_by_hand(self, role: str, job: "Job", name: str) -> subprocess.Popen[bytes]:
        """Start an actor of a job outside any node; the caller ends it."""
        command = [sys.executable, "-m", f"tinkermq.actors.{role}", "--nats", self.server.url]
        return self._popen([*command, "--job", job.scope.job, "--name", name], name)

    def kill(self, role: str) -> None:
        """SIGKILL the scheduler, the node or nats-server."""
        if role == "nats-server":
            self.server.kill()
            return
        process = self._processes[role]
        process.kill()
        process.wait()

    def _popen(self, command: list[str], name: str) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            "TINKERMQ_LOG_FORMAT": "json",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]),
        }
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                command,
                cwd=REPOSITORY,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=die_with(os.getpid()),
            )

    def _end(self, role: str) -> None:
        process = self._processes.pop(role, None)
        if process is None or process.poll() is not None:
            return
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    # -- requests ----------------------------------------------------------------------------

    async def submit(
        self, config: Mapping[str, Any], *, fork_of: str | None = None, configured: bool = True
    ) -> "Job":
        """Submit a configuration; runs go below the stack's folder."""
        tree = {"output_dir": str(self.folder / "runs"), **config}
        if configured:
            parse_config(tree)
        request = SubmitRequest(
            request_id=uuid.uuid4().hex, config=tree, fork_of=fork_of, configured=configured
        )
        job = Job(self, (await self.ask("submit", request, JobReply)).record)
        self.jobs.append(job)
        return job

    async def ask(self, method: str, request: Message, reply: type[T]) -> T:
        """Ask the scheduler, waiting for one that leads."""

        async def answer() -> T | None:
            try:
                return await call(
                    self.broker,
                    rpc("local", "scheduler", method),
                    request,
                    reply,  # pyright: ignore
                    timeout_s=15,
                    waiting_for="the scheduler",
                )
            except (NotFoundError, DeadlineError) as error:
                if isinstance(error, NotFoundError) and "nobody answers" not in error.message:
                    raise
                return None

        return await eventually(answer, "an answer of the scheduler", 30)

    async def until_node(self) -> None:
        """Wait until the scheduler knows the node."""

        async def known() -> bool:
            return bool((await self.ask("nodes", Empty(), NodeList)).nodes)

        await eventually(known, "the scheduler to know the node", 60)

    async def stop_all(self) -> None:
        """End all jobs at once, without checkpoints."""
        jobs, self.jobs = self.jobs, []
        for job in jobs:
            if (await job.read()).state not in FINAL_STATES:
                await job.stop(now=True)
        for job in jobs:
            await job.until("COMPLETED", "FAILED", "CANCELLED")


@dataclass
class Job:
    """One submitted job, as a test sees it."""

    stack: Stack
    record: JobRecord

    @property
    def scope(self) -> JobScope:
        """The names of the job."""
        return JobScope(self.record.user, self.record.job)

    @property
    def run_dir(self) -> Path:
        """Folder of the run."""
        return Path(self.record.run_dir)

    @property
    def batches_log(self) -> BatchLog:
        """The job's batch records."""
        return BatchLog(self.stack.broker, self.scope)

    @property
    def rollout_log(self) -> RolloutLog:
        """The job's rollout log."""
        return RolloutLog(self.stack.broker, self.scope)

    # -- reading -----------------------------------------------------------------------------

    async def read(self) -> JobRecord:
        """Return the job's record as it is now."""
        self.record = await JobStore(self.stack.broker).get(self.record.user, self.record.job)
        return self.record

    async def batches(self) -> list[BatchRecord]:
        """Return all batch records, in order."""
        return [record for _, record in await self.batches_log.read_all()]

    async def entries(self, after: int = 0) -> list[LogEntry]:
        """Return what the rollout log holds now, behind a sequence."""
        last, found = await self.rollout_log.last_seq(), list[LogEntry]()
        if last <= after or last < await self.rollout_log.first_seq():
            return found
        async with aclosing(self.rollout_log.read(after + 1)) as entries:
            async for entry in entries:
                found.append(entry)
                if entry.seq >= last:
                    break
        return found

    async def metrics(self) -> list[Metric]:
        """Return all metrics of training steps, in order."""
        metrics = await read_metrics(self.stack.broker, self.scope)
        return [metric for metric in metrics if "training_step_reward" in metric.values]

    async def validations(self) -> dict[int, dict[str, float]]:
        """Return the results of the evaluations by step."""
        metrics = await read_metrics(self.stack.broker, self.scope)
        return {
            metric.step: metric.values for metric in metrics if "val/mean_score" in metric.values
        }

    async def events(self, kind: str = "") -> list[Event]:
        """Return the events of one kind, or all, in order."""
        events = await read_events(self.stack.broker, self.scope)
        return [event for event in events if kind in ("", event.kind)]

    async def dead(self) -> list[DeadLetter]:
        """Return the tasks that were given up."""
        return await read_dead(self.stack.broker, self.scope)

    async def actors(self) -> dict[str, Presence]:
        """Return the heartbeats of the actors whose processes live, by name."""
        entries = await list_presences(self.stack.broker, f"{self.scope.key}.")
        return {entry.value.actor: entry.value for entry in entries if alive(entry.value.pid)}

    async def pid(self, actor: str) -> int:
        """Return the process id of an actor, waiting until it is there."""

        async def there() -> int | None:
            presence = (await self.actors()).get(actor)
            return presence.pid if presence else None

        return await self.eventually(there, f"actor {actor}")

    # -- waiting -----------------------------------------------------------------------------

    async def until(self, *states: str, deadline_s: float = DEADLINE_S) -> JobRecord:
        """Wait for one of these states; another final one fails at once."""

        async def there() -> bool:
            record = await self.read()
            if record.state in FINAL_STATES and record.state not in states:
                raise AssertionError(f"the job is {record.state}\n{await self.story()}")
            return record.state in states

        await self.eventually(there, f"state {' or '.join(states)}", deadline_s)
        return self.record

    async def until_step(self, step: int, deadline_s: float = DEADLINE_S) -> Metric:
        """Return the metrics of a training step as soon as they are told."""
        async with aclosing(self.follow(deadline_s)) as feed:
            async for message in feed:
                if (
                    isinstance(message, Metric)
                    and "training_step_reward" in message.values
                    and message.step >= step
                ):
                    return message
        raise AssertionError("the feed ended")

    async def until_event(self, kind: str, count: int = 1, deadline_s: float = DEADLINE_S) -> Event:
        """Return the `count`-th event of a kind as soon as it is told."""
        async with aclosing(self.follow(deadline_s)) as feed:
            async for message in feed:
                if isinstance(message, Event) and message.kind == kind:
                    count -= 1
                    if count == 0:
                        return message
        raise AssertionError("the feed ended")

    async def follow(self, deadline_s: float = DEADLINE_S) -> AsyncGenerator[Any, None]:
        """Yield metrics and events from the start; fails when the job fails or time runs out."""
        try:
            async with (
                asyncio.timeout(deadline_s),
                aclosing(follow(self.stack.broker, self.scope, ("metric", "event"))) as feed,
            ):
                async for message in feed:
                    yield message
                    if isinstance(message, Event) and message.kind == "job_failed":
                        raise AssertionError(f"the job failed\n{await self.story()}")
        except TimeoutError:
            raise AssertionError(f"it did not come\n{await self.story()}") from None

    async def eventually(
        self, attempt: Callable[[], Awaitable[T]], what: str, deadline_s: float = DEADLINE_S
    ) -> T:
        """Wait until `attempt` returns something true, telling the job's story if it never does."""
        try:
            return await eventually(attempt, what, deadline_s)
        except TimeoutError as error:
            raise AssertionError(f"{error}\n{await self.story()}") from None

    # -- doing -------------------------------------------------------------------------------

    async def kill(self, actor: str) -> int:
        """SIGKILL the process of an actor; return the id it had."""
        pid = await self.pid(actor)
        os.kill(pid, signal.SIGKILL)
        return pid

    async def stop(self, *, now: bool = False, complete: bool = False) -> None:
        """Ask for the job's end."""
        request = StopRequest(job=self.scope.job, now=now, complete=complete)
        await self.stack.ask("stop", request, JobReply)

    async def resume(self) -> None:
        """Let the job go on after its end."""
        await self.stack.ask("resume", JobRequest(job=self.scope.job), JobReply)

    async def scale(self, role: str, count: int) -> None:
        """Change the number of generators or environment hosts."""
        request = ScaleRequest(job=self.scope.job, role=role, count=count)  # pyright: ignore
        await self.stack.ask("scale", request, JobReply)

    # -- telling -----------------------------------------------------------------------------

    async def story(self) -> str:
        """Tell the job's record, its last events and the ends of its actors' logs."""
        record = await self.read()
        lines = [f"job {record.name} is {record.state}: {record.reason}"]
        lines += [
            f"  {event.kind} ({event.source}) {event.message[:500]}"
            for event in (await self.events())[-_LOG_LINES:]
        ]
        lines += [
            f"  {name} waits for {presence.waits_for!r}, is {presence.state}"
            for name, presence in (await self.actors()).items()
        ]
        for file in sorted(self.run_dir.glob("logs/*/*.log")):
            lines += [f"--- {file.relative_to(self.run_dir)}", *tail(file)]
        for file in sorted(self.stack.folder.glob("*.log")):
            lines += [f"--- {file.name}", *tail(file)]
        return "\n".join(lines)


def tail(file: Path) -> list[str]:
    """Return the last lines of a log."""
    return file.read_text(errors="replace").splitlines()[-_LOG_LINES:]


async def eventually(
    attempt: Callable[[], Awaitable[T | None]], what: str, deadline_s: float = DEADLINE_S
) -> T:
    """Wait until `attempt` returns something true; TimeoutError names what did not come."""
    deadline = asyncio.get_running_loop().time() + deadline_s
    while not (found := await attempt()):
        if asyncio.get_running_loop().time() > deadline:
            raise TimeoutError(f"waited {deadline_s:g} s for {what}")
        await asyncio.sleep(_POLL_S)
    return found


# -- configurations ----------------------------------------------------------------------------


def small_job(model: Path, **sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return a job that runs in seconds: the bandit with a random model; sections are laid over."""
    config: dict[str, Any] = {
        "model": {"path": str(model)},
        "env": {"game": "bandit", "num_val": 0},
        "rollout": {
            "group_size": 4,
            "max_prompt_tokens": 32,
            "max_turn_tokens": 6,
            "max_response_tokens": 24,
        },
        "generator": {"max_episodes": 64, "max_requests": 64, "ack_wait_s": 3},
        "learner": {"lr": 1e-3, "row_tokens": 512, "microbatch_tokens": 2048},
        "training": {
            "num_steps": 12,
            "batch_size": 4,
            "max_staleness": 2,
            "save_freq": 3,
            "keep_rollouts": True,
        },
    }
    for name, section in sections.items():
        config[name] = {**config.get(name, {}), **section}
    return config


def example(name: str, *overrides: str) -> dict[str, Any]:
    """Return the configuration of an example as a user's client sends it."""
    config = load_config(REPOSITORY / "examples" / f"{name}.yaml", list(overrides))
    return config.model_dump(mode="json", exclude_unset=True)
