"""A pool for tests: a server of its own, a scheduler, and nodes whose actors are toy processes.

Scheduler and nodes run in the test's process, each with a connection of its own; tests that kill
them start them as processes.
"""

import asyncio
import contextlib
import os
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
import structlog
from tinkermq.actors.node.children import programs
from tinkermq.actors.node.node import Node
from tinkermq.actors.runtime import ActorContext
from tinkermq.actors.scheduler import scheduler
from tinkermq.actors.scheduler.jobs.view import RetentionLimits
from tinkermq.actors.scheduler.lease import Timing
from tinkermq.broker.client.connection import Broker, connect
from tinkermq.broker.client.rpc import Service, call
from tinkermq.broker.feed import read_events
from tinkermq.broker.jobs import JobStore
from tinkermq.broker.nats_server import NatsServer
from tinkermq.schemas.control import ControlReply, ControlRequest
from tinkermq.schemas.job import (
    JobList,
    JobRecord,
    JobReply,
    JobRequest,
    ListRequest,
    SubmitRequest,
)
from tinkermq.schemas.metric import Event, Presence
from tinkermq.schemas.node import ActorStatus, NodeList, NodeStatus
from tinkermq.schemas.wire.errors import DeadlineError, NobodyAnswersError
from tinkermq.schemas.wire.message import Empty, Message
from tinkermq.schemas.wire.subjects import rpc

from tests.actors.scheduler.toy_node import toy_command
from tests.support.hollow_model import hollow_model
from tests.support.waiting import AFTER_PATIENCE_S, PATIENCE_S, eventually, until

TOY_NODE = Path(__file__).with_name("toy_node.py")
FAST = Timing(turn_s=0.1, renew_s=0.3, stale_s=2.0)
KEEPING = RetentionLimits()


R = TypeVar("R", bound=Message)


class Inside:
    """A service actor that runs in the test's process."""

    def __init__(self, task: asyncio.Task[None], context: ActorContext) -> None:
        self.task = task
        self.context = context

    @classmethod
    async def start(
        cls, url: str, role: str, main: Callable[[ActorContext], Awaitable[None]]
    ) -> "Inside":
        broker = await connect(url, name=role)
        service = await Service.start(broker, name=f"tinkermq-{role}", description=role)
        presence = Presence(actor=role, role=role, host="h", pid=1, state="starting", time=0.0)
        context = ActorContext(
            broker=broker,
            role=role,
            name=role,
            log=structlog.get_logger(),
            stopping=asyncio.Event(),
            service=service,
            presence=presence,
        )

        async def run() -> None:
            try:
                await main(context)
            finally:
                await service.stop(0)
                await broker.close()

        return cls(asyncio.create_task(run()), context)

    async def drain(self) -> None:
        """End it as SIGTERM does."""
        self.context.stopping.set()
        await asyncio.wait_for(self.task, PATIENCE_S)


class Stack:
    """A scheduler and nodes, and a client's view of them."""

    def __init__(self, broker: Broker, folder: Path) -> None:
        self.broker = broker
        self.folder = folder
        self.jobs = JobStore(broker)
        self.told: list[str] = []
        self._inside: list[Inside] = []
        self._processes: list[asyncio.subprocess.Process] = []
        self._services: list[Service] = []

    async def scheduler(self, timing: Timing = FAST, keeping: RetentionLimits = KEEPING) -> Inside:
        async def main(context: ActorContext) -> None:
            await scheduler.run(context, timing, keeping)

        actor = await Inside.start(self.broker.url, "scheduler", main)
        self._inside.append(actor)
        return actor

    async def node(self, name: str = "n1", slots: int = 2) -> Inside:
        async def main(context: ActorContext) -> None:
            node = Node(
                context.broker,
                name,
                slots,
                start=programs(toy_command),
                stop_deadline_s=AFTER_PATIENCE_S,
            )
            await node.run(context.service, context.stopping)

        actor = await Inside.start(self.broker.url, f"node-{name}", main)
        self._inside.append(actor)
        return actor

    async def scheduler_process(self) -> asyncio.subprocess.Process:
        return await self._start("-m", "tinkermq.actors.scheduler", log="scheduler")

    async def node_process(self, name: str = "n1") -> asyncio.subprocess.Process:
        return await self._start(str(TOY_NODE), "--name", name, log=f"node-{name}")

    async def _start(self, *command: str, log: str) -> asyncio.subprocess.Process:
        with (self.folder / f"{log}.log").open("ab") as file:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *command,
                "--nats",
                self.broker.url,
                stderr=file,
                env={**os.environ, "TINKERMQ_LOG_FORMAT": "json", "TINKERMQ_LOG_LEVEL": "debug"},
            )
        self._processes.append(process)
        return process

    async def running(self, slots: int = 2, **config: Any) -> JobRecord:
        """Start a scheduler, a node and a job that runs on it."""
        await self.scheduler()
        await self.node(slots=slots)
        await self.until_nodes(1)
        return await self.until(await self.submit(**config), "RUNNING")

    async def running_under_process(self) -> tuple[JobRecord, asyncio.subprocess.Process]:
        """Start a scheduler that can be killed, a node and a job that runs on it."""
        process = await self.scheduler_process()
        await self.node()
        await self.until_nodes(1)
        return await self.until(await self.submit(), "RUNNING"), process

    async def answer_as_learner(self, job: JobRecord) -> None:
        """Answer control requests to the learner: note them, drain on a stop."""
        service = await Service.start(self.broker, name="learner", description="a toy learner")
        self._services.append(service)

        async def control(request: ControlRequest) -> ControlReply:
            self.told.append(request.verb)
            if request.verb == "stop":
                self.do(job, "learner", "done")
            return ControlReply(actor="learner")

        subject = job.scope.control("learner")
        await service.endpoint("control", subject, ControlRequest, control)

    async def ask(self, method: str, request: Message, user: str = "local") -> JobRecord:
        """Ask as soon as a scheduler leads."""
        return (await self.ask_for(method, request, JobReply, user)).record

    async def ask_for(
        self, method: str, request: Message, reply: type[R], user: str = "local"
    ) -> R:
        """Ask for another reply than a job's, as soon as a scheduler leads."""
        subject = rpc(user, "scheduler", method)
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    return await call(
                        self.broker,
                        subject,
                        request,
                        reply,
                        timeout_s=PATIENCE_S,
                        waiting_for="the scheduler",
                    )
                except NobodyAnswersError:
                    await asyncio.sleep(0.05)

    async def submit(self, **changes: Any) -> JobRecord:
        return await self.ask("submit", self.request(**changes))

    def request(self, **changes: Any) -> SubmitRequest:
        request_id = changes.pop("request_id", uuid.uuid4().hex)
        configured = changes.pop("configured", True)
        fork_of = changes.pop("fork_of", None)
        kind, weights_only = changes.pop("kind", "train"), changes.pop("weights_only", False)
        adapters = changes.pop("adapters", [])
        config = {
            "model": {"path": hollow_model()},
            "env": {"game": "bandit", "hosts": 0, "num_val": 0},
            "output_dir": str(self.folder / "outputs"),
        }
        return SubmitRequest(
            request_id=request_id,
            config={**config, **changes},
            configured=configured,
            fork_of=fork_of,
            kind=kind,
            weights_only=weights_only,
            adapters=adapters,
        )

    async def list_jobs(self, request: ListRequest) -> list[JobRecord]:
        subject = rpc("local", "scheduler", "list")
        reply = await call(
            self.broker,
            subject,
            request,
            JobList,
            timeout_s=PATIENCE_S,
            waiting_for="the scheduler",
        )
        return reply.records

    async def nodes(self) -> list[NodeStatus]:
        subject = rpc("local", "scheduler", "nodes")
        with contextlib.suppress(NobodyAnswersError, DeadlineError):
            reply = await call(
                self.broker, subject, Empty(), NodeList, timeout_s=30, waiting_for="the scheduler"
            )
            return reply.nodes
        return []

    async def until_nodes(self, count: int) -> list[NodeStatus]:
        async def there() -> list[NodeStatus] | None:
            nodes = await self.nodes()
            return nodes if len(nodes) == count else None

        return await eventually(there, f"{count} nodes")

    async def actors(self) -> dict[str, ActorStatus]:
        """What the nodes say of all actors."""
        return {actor.name: actor for node in await self.nodes() for actor in node.actors}

    async def until_actors(self, *names: str) -> dict[str, ActorStatus]:
        """Wait until exactly these actors are on the nodes."""

        async def there() -> tuple[dict[str, ActorStatus]] | None:
            nodes = await self.nodes()  # none, too, while no scheduler answers
            actors = {actor.name: actor for node in nodes for actor in node.actors}
            return (actors,) if nodes and set(actors) == set(names) else None

        (actors,) = await eventually(there, f"the actors {names}")
        return actors

    async def until(
        self,
        job: JobRecord,
        condition: str | Callable[[JobRecord], bool],
    ) -> JobRecord:
        """Wait for a state, or for a condition on the record."""
        record = job
        try:
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    record = await self.jobs.get(job.user, job.job)
                    if (
                        record.state == condition
                        if isinstance(condition, str)
                        else condition(record)
                    ):
                        return record
                    await asyncio.sleep(0.03)
        except TimeoutError:
            raise AssertionError(f"still {record}\n{self.logs()}") from None

    async def events(self, job: JobRecord) -> list[Event]:
        """Return what happened to a job that has started, all its moves included."""
        await self.until(job, lambda now: not now.untold)
        return await read_events(self.broker, job.scope)

    async def get(self, job: JobRecord) -> JobRecord:
        return await self.ask("get", JobRequest(job=job.job))

    def do(self, job: JobRecord, actor: str, what: str) -> None:
        """Tell a toy actor what to do."""
        path = Path(job.run_dir) / f"{actor}.do"
        hidden = path.with_suffix(".writing")
        hidden.write_text(what)
        hidden.rename(path)

    async def until_obeyed(self, job: JobRecord, actor: str) -> None:
        """Wait until a toy actor has read what it was told to do."""
        order = Path(job.run_dir) / f"{actor}.do"
        await until(lambda: not order.exists(), f"{actor} to obey")

    async def until_logged(
        self, job: JobRecord, actor: str, lines: Sequence[str], attempt: int = 1
    ) -> None:
        """Wait until an actor has written these lines, which reach its file a moment later."""
        log = Path(job.run_dir) / f"logs/attempt_{attempt}/{actor}.log"
        await until(
            lambda: log.exists() and log.read_text().splitlines() == [*lines],
            f"{actor} to have written {', '.join(lines)}",
        )

    def logs(self) -> str:
        files = sorted(self.folder.rglob("*.log"))
        return "\n".join(f"--- {file.name}\n{file.read_text()[-4000:]}" for file in files)

    async def close(self) -> None:
        for actor in self._inside:
            actor.context.stopping.set()
        for service in self._services:
            await service.stop(0)
        await asyncio.gather(*(actor.task for actor in self._inside), return_exceptions=True)
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


@pytest.fixture
async def stack(own_server: NatsServer, own_broker: Broker, tmp_path: Path) -> AsyncIterator[Stack]:
    """An empty pool whose clocks run faster; tests start what they need."""
    pool = Stack(own_broker, tmp_path)
    yield pool
    await pool.close()
