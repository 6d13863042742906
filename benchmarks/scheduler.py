"""The scheduler with many jobs and nodes: submitting, placing, and coming back after a kill.

    python -m benchmarks.scheduler [--jobs 1000] [--nodes 200]

nats-server, the scheduler and the nodes are processes of their own and talk over real messages;
the nodes are simulated (benchmarks/many_nodes.py), their actors are not started. First the pool is
filled, then the jobs are submitted into its queue by four users at once, each as fast as it is
answered; then some more, ten a second, while all those wait. A decision to place is timed inside a
process of its own on the queue and the pool as the scheduler has them then. At the end the
scheduler is killed, and a new one must say the same.
"""

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import uvloop
from tinkermq.actors.scheduler.jobs.states import unplaced
from tinkermq.actors.scheduler.placement import (
    NodeSlots,
    PlacementRequest,
    UserShares,
    place,
)
from tinkermq.broker.client.connection import Broker, connect
from tinkermq.broker.client.rpc import call
from tinkermq.broker.jetstream.streams import create_shared
from tinkermq.broker.nats_server import NatsServer
from tinkermq.schemas.job import (
    JobList,
    JobRecord,
    JobReply,
    ListRequest,
    StopRequest,
    SubmitRequest,
)
from tinkermq.schemas.local.process import die_with
from tinkermq.schemas.node import NodeList
from tinkermq.schemas.wire.errors import TinkermqError
from tinkermq.schemas.wire.message import Empty
from tinkermq.schemas.wire.subjects import rpc

from benchmarks.report import Report, parser

SLOTS = 8
USERS = ("ann", "bob", "cyd", "dan")
DEADLINE_S = 120.0


class Bench:
    """The processes, and a client's connection."""

    def __init__(self, folder: Path, server: NatsServer, broker: Broker) -> None:
        self.folder = folder
        self.broker = broker
        self._server = server

    def start(self, module: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a process that dies with this one."""
        with (self.folder / f"{module}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdout=log,
                stderr=log,
                cwd=Path(__file__).parents[1],
                preexec_fn=die_with(os.getpid()),
            )

    def start_scheduler(self) -> subprocess.Popen[bytes]:
        """Start a scheduler."""
        return self.start("tinkermq.actors.scheduler", "--nats", self._server.url)

    async def submit(self, user: str, number: int, generators: int) -> float:
        """Submit a job; return the seconds until the answer."""
        config = {
            "model": {"path": "models/none"},
            "env": {"game": "bandit", "hosts": 0, "num_val": 0},
            "generator": {"count": generators},
            "output_dir": str(self.folder / "outputs"),
        }
        request = SubmitRequest(request_id=f"{user}-{number}", config=config)
        started = time.perf_counter()
        await call(
            self.broker,
            rpc(user, "scheduler", "submit"),
            request,
            JobReply,
            timeout_s=30,
            waiting_for="the scheduler",
        )
        return time.perf_counter() - started

    async def stop(self, record: JobRecord) -> None:
        """Stop a job at once."""
        await call(
            self.broker,
            rpc(record.user, "scheduler", "stop"),
            StopRequest(job=record.job, now=True),
            JobReply,
            timeout_s=30,
            waiting_for="the scheduler",
        )

    async def jobs(self) -> list[JobRecord]:
        """Return the jobs of all users that have not ended."""
        records: list[JobRecord] = []
        for user in USERS:
            reply = await call(
                self.broker,
                rpc(user, "scheduler", "list"),
                ListRequest(),
                JobList,
                timeout_s=30,
                waiting_for="the scheduler",
            )
            records += reply.records
        return records

    async def nodes(self) -> NodeList:
        """Return the nodes as the scheduler knows them."""
        return await call(
            self.broker,
            rpc(USERS[0], "scheduler", "nodes"),
            Empty(),
            NodeList,
            timeout_s=30,
            waiting_for="the scheduler",
        )


async def until(condition: Callable[[], Awaitable[bool]], what: str) -> float:
    """Wait until a condition holds; return the seconds it took."""
    started = time.perf_counter()
    while time.perf_counter() - started < DEADLINE_S:
        try:
            if await condition():
                return time.perf_counter() - started
        except TinkermqError:  # the scheduler does not lead yet
            pass
        await asyncio.sleep(0.2)
    raise TimeoutError(f"waited {DEADLINE_S:.0f} s for {what}")


async def at_a_pace(bench: Bench, count: int) -> list[float]:
    """Submit ten jobs a second; return the sorted seconds that each submission took."""
    started = time.perf_counter()

    async def one(number: int) -> float:
        await asyncio.sleep(started + number / 10 - time.perf_counter())
        return await bench.submit(USERS[number % len(USERS)], 1_000_000 + number, number % 4)

    return sorted(await asyncio.gather(*map(one, range(count))))


def _rank(times: list[float], share: float) -> float:
    """Return the time in ms that `share` of the sorted times do not exceed."""
    return times[min(int(len(times) * share), len(times) - 1)] * 1e3


def decisions_ms(records: list[JobRecord], num_nodes: int, rounds: int) -> tuple[float, float]:
    """Return how long one decision takes with a full pool, and with one where a job ends."""
    queue = [
        PlacementRequest(
            f"{one.user}.{one.job}",
            tuple(unplaced(one.actors)),
            user=one.user,
            created=one.created,
        )
        for one in records
    ]
    full = [NodeSlots(f"node-{i:04d}", SLOTS, frozenset()) for i in range(num_nodes)]
    ended = [*full[1:], NodeSlots("node-0000", SLOTS, frozenset(range(SLOTS)))]
    worst: list[float] = []
    for nodes in (full, ended):
        times: list[float] = []
        for _ in range(rounds):
            started = time.perf_counter()
            place(queue, nodes, UserShares(), time.time(), most=1)
            times.append((time.perf_counter() - started) * 1e3)
        worst.append(max(times))
    return worst[0], worst[1]


def told(records: list[JobRecord]) -> list[tuple[object, ...]]:
    """Return what must be the same before and after a restart."""
    return sorted(
        (
            one.user,
            one.job,
            one.name,
            one.state,
            one.priority,
            one.attempt,
            one.reason,
            str([(a.name, a.node, a.devices) for a in one.actors]),
        )
        for one in records
    )


async def run(arguments: argparse.Namespace, report: Report) -> None:
    """Fill the pool, fill the queue, end some jobs, kill the scheduler."""
    num_nodes, num_jobs = arguments.nodes, arguments.jobs
    with tempfile.TemporaryDirectory() as name, NatsServer(Path(name) / "nats") as server:
        async with await connect(server.url, name="benchmark") as broker:
            await create_shared(broker)
            bench = Bench(Path(name), server, broker)
            scheduler = bench.start_scheduler()
            nodes = bench.start("benchmarks.many_nodes", server.url, str(num_nodes), str(SLOTS))

            async def all_there() -> bool:
                return len((await bench.nodes()).nodes) == num_nodes

            await until(all_there, "the nodes")
            started = time.perf_counter()
            fillers = num_nodes // 4
            for number in range(fillers):  # each holds four whole nodes
                await bench.submit("ann", -1 - number, 4 * SLOTS - 1)

            async def filled() -> bool:
                return sum(one.state == "RUNNING" for one in await bench.jobs()) == fillers

            await until(filled, "the pool to be full")
            fill_s = time.perf_counter() - started

            async def client(user: str) -> list[float]:
                count = num_jobs // len(USERS)
                return [await bench.submit(user, number, number % 4) for number in range(count)]

            started = time.perf_counter()
            asked = await asyncio.gather(*map(client, USERS))
            times = sorted(one for mine in asked for one in mine)
            submit_s = time.perf_counter() - started

            async def explained() -> bool:
                return all(
                    "in the queue" in one.reason for one in await bench.jobs() if not one.started
                )

            await until(explained, "a reason for each job that waits")
            paced = await at_a_pace(bench, num_jobs // 10)
            await until(explained, "a reason for each job that waits")
            records = await bench.jobs()
            waiting = [one for one in records if one.state == "QUEUED"]
            assert len(waiting) == num_jobs + len(paced)
            full_ms, ended_ms = decisions_ms(waiting, num_nodes, rounds=5)

            before = told(records)
            scheduler.kill()
            scheduler.wait()
            killed = time.perf_counter()
            scheduler = bench.start_scheduler()

            async def same() -> bool:
                return told(await bench.jobs()) == before

            await until(same, "the state to be as before")
            back_s = time.perf_counter() - killed

            victim = next(one for one in await bench.jobs() if one.state == "RUNNING")
            started = time.perf_counter()
            await bench.stop(victim)

            async def another() -> bool:
                return any(one.started for one in await bench.jobs() if one.job not in ran)

            ran = {one.job for one in records if one.started}
            next_s = await until(another, "a waiting job to run")
            for process in (scheduler, nodes):
                process.terminate()
                process.wait()

    rows = [
        [f"{fillers} jobs that fill {num_nodes} nodes, submitted and running", f"{fill_s:.1f} s"],
        [f"{num_jobs} jobs submitted by {len(USERS)} clients", f"{submit_s:.1f} s"],
        ["submit in this throng, median", f"{_rank(times, 0.5):.1f} ms"],
        ["submit in this throng, 99th percentile", f"{_rank(times, 0.99):.1f} ms"],
        ["submit, ten a second, median", f"{_rank(paced, 0.5):.1f} ms"],
        ["scheduler killed → a new one tells the same of all jobs", f"{back_s:.1f} s"],
        ["a running job stopped → the next one runs", f"{next_s:.2f} s"],
    ]
    report.table(f"{num_jobs} queued jobs, {num_nodes} nodes of {SLOTS} slots", ["", ""], rows)
    report.at_most("submit, ten a second, 99th percentile", _rank(paced, 0.99), 100, " ms")
    report.at_most("one decision over the whole queue, full pool", full_ms, 50, " ms")
    report.at_most("one decision over the whole queue, after a job has ended", ended_ms, 50, " ms")


def main() -> None:
    """Parse the arguments, measure, report."""
    options = parser(__doc__)
    options.add_argument("--jobs", type=int, default=1000)
    options.add_argument("--nodes", type=int, default=200)
    arguments = options.parse_args()
    if arguments.quick:
        arguments.jobs, arguments.nodes = 40, 8
    report = Report("scheduler", "The scheduler with many jobs and nodes", quick=arguments.quick)
    uvloop.run(run(arguments, report))
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
