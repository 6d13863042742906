"""The whole stack as processes, as a user has it: nats-server, scheduler, node, and a job's actors.

A benchmark submits a configuration and gets back what the job told about itself, and what each of
its processes cost meanwhile. Nothing of the system runs in the benchmark's own process but the
client that follows the job.
"""

import asyncio
import os
import subprocess
import sys
import time
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from tinkermq.broker.client.connection import Broker, connect
from tinkermq.broker.nats_server import NatsServer
from tinkermq.broker.presence import list_presences
from tinkermq.clients.follow import follow_run
from tinkermq.clients.pool import Pool
from tinkermq.schemas.config.load_config import parse_config
from tinkermq.schemas.job import FINAL_STATES, JobRecord
from tinkermq.schemas.local.process import die_with
from tinkermq.schemas.metric import Event, Metric, Presence
from tinkermq.schemas.wire.errors import TinkermqError

from benchmarks.processes import Cpu, cpu, rss_mb

REPOSITORY = Path(__file__).resolve().parents[1]
_START_S = 60.0
_END_S = 25.0
_SAMPLE_S = 0.5


@dataclass(frozen=True)
class Sample:
    """One look at all processes of a run."""

    time: float
    step: int
    cpu: dict[str, Cpu]
    rss_mb: dict[str, float]
    presences: dict[str, Presence]


@dataclass
class Run:
    """What a job told, and what it cost."""

    record: JobRecord
    metrics: list[Metric] = field(default_factory=list[Metric])
    """Of the training steps, in order."""
    events: list[Event] = field(default_factory=list[Event])
    samples: list[Sample] = field(default_factory=list[Sample])

    def values(self, name: str, *, after: int = 0) -> list[float]:
        """Return one metric of every step over `after`."""
        return [item.values[name] for item in self.metrics if item.step > after]

    def seconds(self, *, after: int) -> float:
        """Return the time from the end of step `after` to the end of the last one."""
        first = next(item for item in self.metrics if item.step == after)
        return self.metrics[-1].time - first.time

    def step_s(self, *, after: int) -> float:
        """Return the mean time of a step, from the end of step `after` on."""
        return self.seconds(after=after) / (self.metrics[-1].step - after)

    def samples_per_s(self, *, after: int) -> float:
        """Return trained episodes per second, from the end of step `after` on."""
        return sum(self.values("rollout/episodes", after=after)) / self.seconds(after=after)

    def cpu_ms_per_step(self, *, after: int) -> dict[str, tuple[float, float]]:
        """Return CPU milliseconds per step by process: its loop's thread, and its others."""
        seen = [sample for sample in self.samples if after <= sample.step < self.metrics[-1].step]
        costs = dict[str, tuple[float, float]]()
        for name in {name for sample in seen for name in sample.cpu}:
            known = [sample for sample in seen if name in sample.cpu]
            steps = known[-1].step - known[0].step
            if steps:
                used = known[-1].cpu[name] - known[0].cpu[name]
                costs[name] = (1e3 * used.loop_s / steps, 1e3 * used.other_s / steps)
        return costs

    def busy_share(self, *, after: int) -> float:
        """Return the share of time in which the generators' engines computed."""
        shares = [
            presence.numbers["busy_share"]
            for sample in self.samples
            if sample.step > after
            for presence in sample.presences.values()
            if "busy_share" in presence.numbers
        ]
        return sum(shares) / max(len(shares), 1)


class Stack:
    """nats-server, scheduler and node; leave it and all have ended."""

    def __init__(self, folder: Path, *, slots: int = 16) -> None:
        """Keep everything below `folder`; nothing is started yet."""
        self.folder = folder
        self.server = NatsServer(folder / "nats")
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._slots = slots
        self._broker: Broker | None = None

    @property
    def connection(self) -> Broker:
        """The benchmark's own connection."""
        assert self._broker is not None, "the stack was not entered"
        return self._broker

    async def __aenter__(self) -> Self:
        try:
            self.server.start()
            python = (sys.executable, "-m")
            self.start("scheduler", *python, "tinkermq.actors.scheduler")
            slots = ("--name", "node", "--slots", str(self._slots))
            self.start("node", *python, "tinkermq.actors.node", *slots)
            self._broker = await connect(self.server.url, name="benchmark")
            await self._until_ready()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._broker is not None:
            await self._broker.close()
        for name in reversed(list(self.processes)):
            await asyncio.to_thread(self._end, name)
        self.server.stop()

    @property
    def pool(self) -> Pool:
        """The client's view of the stack."""
        assert self._broker is not None, "the stack was not entered"
        return Pool(self._broker)

    def start(self, name: str, *command: str, stdout: int | None = None) -> subprocess.Popen[bytes]:
        """Start a process that ends with the stack; it finds the broker in its environment.

        `stdout` is where its output goes, by default a log in the stack's folder.
        """
        environment = {
            **os.environ,
            "TINKERMQ_NATS_URL": self.server.url,
            "TINKERMQ_LOG_FORMAT": "json",
            "OMP_NUM_THREADS": "1",
        }
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                command,
                cwd=REPOSITORY,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log if stdout is None else stdout,
                stderr=log,
                preexec_fn=die_with(os.getpid()),
            )
        self.processes[name] = process
        return process

    async def run(
        self, config: dict[str, Any], *, deadline_s: float = 600, sample_s: float = _SAMPLE_S
    ) -> Run:
        """Submit a job and follow it to its end; raises RuntimeError unless it completes.

        The processes are read every `sample_s` seconds.
        """
        tree = {"output_dir": str(self.folder / "runs"), **config}
        parse_config(tree)
        run = Run(await self.pool.submit(tree))
        sampling = asyncio.create_task(self._sample(run, sample_s))
        try:
            async with asyncio.timeout(deadline_s):
                await self._follow(run)
        finally:
            sampling.cancel()
        if run.record.state != "COMPLETED":
            raise RuntimeError(f"the job is {run.record.state}: {run.record.reason}")
        return run

    async def presences(self, record: JobRecord) -> dict[str, Presence]:
        """Return the heartbeats of a job's actors by name."""
        assert self._broker is not None
        entries = await list_presences(self._broker, f"{record.user}.{record.job}.")
        return {entry.value.actor: entry.value for entry in entries}

    async def _follow(self, run: Run) -> None:
        async with aclosing(follow_run(self.pool, run.record)) as updates:
            async for update in updates:
                if isinstance(update, JobRecord):
                    run.record = update
                elif isinstance(update, Event):
                    run.events.append(update)
                elif isinstance(update, Metric) and "training_step_reward" in update.values:
                    run.metrics.append(update)

    async def _sample(self, run: Run, sample_s: float) -> None:
        """Read all processes every `sample_s` seconds, until cancelled."""
        while run.record.state not in FINAL_STATES:
            presences = await self.presences(run.record)
            pids = {name: presence.pid for name, presence in presences.items()}
            pids |= {name: process.pid for name, process in self.processes.items()}
            pids |= {"nats-server": self.server.pid or 0, "client": os.getpid()}
            run.samples.append(
                Sample(
                    time=time.time(),
                    step=run.metrics[-1].step if run.metrics else 0,
                    cpu=_known({name: cpu(pid) for name, pid in pids.items()}),
                    rss_mb=_known({name: rss_mb(pid) for name, pid in pids.items()}),
                    presences=presences,
                )
            )
            await asyncio.sleep(sample_s)

    async def _until_ready(self) -> None:
        deadline = time.monotonic() + _START_S
        while True:
            try:
                if await self.pool.nodes():
                    return
            except TinkermqError:
                if time.monotonic() > deadline:
                    raise
            if time.monotonic() > deadline:
                raise RuntimeError(f"no node within {_START_S:.0f} s, see {self.folder}/*.log")
            await asyncio.sleep(0.1)

    def _end(self, name: str) -> None:
        process = self.processes[name]
        if process.poll() is not None:
            return
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _known(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
