"""The whole stack as real processes: nats-server, scheduler, node, and the jobs they run.

A test submits configurations as a client would, waits for what the broker says, and may kill any
process by its role or name. Every wait has a deadline; one that runs out tells the job's record,
its last events and the ends of its actors' logs.
"""

import asyncio
import os
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from tinkermq.broker.client.connection import Broker, connect
from tinkermq.broker.client.faults import ConnectionLost
from tinkermq.broker.client.rpc import call
from tinkermq.broker.nats_server import NatsServer
from tinkermq.schemas.config.load_config import parse_config
from tinkermq.schemas.job import FINAL_STATES, JobReply, SubmitRequest
from tinkermq.schemas.local.process import die_with
from tinkermq.schemas.node import NodeList
from tinkermq.schemas.wire.errors import DeadlineError, NobodyAnswersError
from tinkermq.schemas.wire.message import Empty, Message
from tinkermq.schemas.wire.subjects import rpc

from tests.support.configs import REPOSITORY
from tests.support.jobs import Job
from tests.support.namespaces import Network
from tests.support.waiting import PATIENCE_S, eventually

T = TypeVar("T", bound=Message)


class Stack:
    """A broker, a scheduler and a node of our own; leave it and all of them have ended."""

    def __init__(
        self,
        folder: Path,
        *,
        slots: int = 32,
        node_options: Sequence[str] | None = None,
        apart: Path | None = None,
        network: Network | None = None,
    ) -> None:
        """Keep everything below `folder`; nothing is started yet.

        `node_options` say what nodes give away, in place of `slots`.

        Below `apart` each node sees files of its own (needs root): they share no disk. With a
        `network` each node is on a machine of its own name there, and the broker is on the bridge.
        """
        self.folder = folder
        host = "127.0.0.1" if network is None else network.outside
        self.server = NatsServer(folder / "nats", host=host)
        self.jobs: list[Job] = []
        self._node_options = ["--slots", str(slots)] if node_options is None else node_options
        self._apart = apart
        self._network = network
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._broker: Broker | None = None

    async def __aenter__(self) -> Self:
        try:
            self.server.start()
            self.start("scheduler")
            self.start("node")
            self._broker = await connect(self.server.url, name="test")
            await self.until_nodes()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._broker is not None:
            await self._broker.close()
        for process in self._processes.values():  # the actors die with their node
            process.kill()
            process.wait()
        self.server.stop()

    @property
    def broker(self) -> Broker:
        """The test's own connection."""
        assert self._broker is not None, "the stack was not entered"
        return self._broker

    # -- processes ---------------------------------------------------------------------------

    def url_for(self, name: str) -> str:
        """Return how a service reaches the broker, and with a node all its actors."""
        return self.server.url

    def start(self, role: str, name: str = "", variables: Mapping[str, str] | None = None) -> int:
        """Start the scheduler or a node, by default of the role's name; return its process id."""
        name = name or role
        command = [sys.executable, "-m", f"tinkermq.actors.{role}", "--nats", self.url_for(name)]
        if role == "node":
            command += ["--name", name, *self._node_options]
            command = [*self._with_own_files(name), *command]
            if self._network is not None:
                if not self._network.has(name):
                    self._network.add(name)
                command = self._network.on(name, *command)
        self._processes[name] = self._popen(command, name, variables)
        return self._processes[name].pid

    def _with_own_files(self, name: str) -> list[str]:
        """Return what a node's command begins with, so that it has a disk of its own."""
        if self._apart is None:
            return []
        own = self.folder / f"disk-{name}"
        own.mkdir(exist_ok=True)
        script = 'mount --bind "$0" "$1" && shift && exec "$@"'
        return ["unshare", "--mount", "sh", "-c", script, str(own), str(self._apart)]

    def start_by_hand(self, role: str, job: "Job", name: str) -> subprocess.Popen[bytes]:
        """Start an actor of a job outside any node; the caller ends it."""
        command = [sys.executable, "-m", f"tinkermq.actors.{role}", "--nats", self.server.url]
        return self._popen([*command, "--job", job.scope.job, "--name", name], name)

    @property
    def pids(self) -> list[int]:
        """Scheduler and node."""
        return [process.pid for process in self._processes.values()]

    def kill(self, role: str) -> None:
        """SIGKILL the scheduler, the node or nats-server."""
        if role == "nats-server":
            self.server.kill()
            return
        process = self._processes[role]
        process.kill()
        process.wait()

    def terminate(self, role: str) -> None:
        """SIGTERM the scheduler or a node."""
        self._processes[role].terminate()

    async def restart(
        self, role: str, name: str = "", variables: Mapping[str, str] | None = None
    ) -> None:
        """Stop the scheduler, a node or nats-server as systemd does, and start it again."""
        if role == "nats-server":
            await asyncio.to_thread(self.server.stop)
            self.server.start()
            return
        process = self._processes[name or role]
        process.terminate()
        await asyncio.to_thread(process.wait, PATIENCE_S)
        self.start(role, name, variables)

    def _popen(
        self, command: list[str], name: str, variables: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            "TINKERMQ_LOG_FORMAT": "json",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]),
            **(variables or {}),
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

    # -- requests ----------------------------------------------------------------------------

    async def submit(
        self,
        config: Mapping[str, Any],
        *,
        fork_of: str | None = None,
        weights_only: bool = False,
        configured: bool = True,
        kind: Literal["train", "infer"] = "train",
    ) -> "Job":
        """Submit a configuration; runs go below the stack's folder."""
        tree = {"output_dir": str(self.folder / "runs"), **config}
        if configured:
            parse_config(tree)
        request = SubmitRequest(
            request_id=uuid.uuid4().hex,
            kind=kind,
            config=tree,
            fork_of=fork_of,
            weights_only=weights_only,
            configured=configured,
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
                    rpc(self.broker.user, "scheduler", method),
                    request,
                    reply,
                    timeout_s=15,
                    waiting_for="the scheduler",
                )
            except (NobodyAnswersError, DeadlineError, ConnectionLost):
                return None

        return await eventually(answer, "an answer of the scheduler")

    async def until_nodes(self, count: int = 1) -> None:
        """Wait until the scheduler knows so many nodes."""

        async def known() -> bool:
            return len((await self.ask("nodes", Empty(), NodeList)).nodes) == count

        await eventually(known, f"the scheduler to know {count} nodes")

    async def stop_all(self) -> None:
        """End all jobs at once, without checkpoints."""
        jobs, self.jobs = self.jobs, []
        for job in jobs:
            if (await job.read()).state not in FINAL_STATES:
                await job.stop(now=True)
        for job in jobs:
            await job.until("COMPLETED", "FAILED", "CANCELLED")
