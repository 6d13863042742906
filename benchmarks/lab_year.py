"""A simulated year of a lab: nodes that come and go, many users, and a scheduler that is killed.

    python -m benchmarks.lab_year [--jobs 10000] [--nodes 200] [--year-s 480]

nats-server, the scheduler and the nodes are processes of their own and talk over real messages; the
nodes (benchmarks/lab_nodes.py) only pretend to work and are preempted at random, the scheduler is
the real one with faster clocks (benchmarks/lab_scheduler.py). Users keep the pool full, submit now
and then, or a thousand jobs at once (benchmarks/lab_users.py). What the scheduler says of each job
is held against what the nodes have done.
"""

import argparse
import asyncio
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import uvloop
from tinkermq.broker.client.connection import Broker, connect
from tinkermq.broker.client.rpc import call
from tinkermq.broker.jetstream.streams import create_shared, stream_info
from tinkermq.broker.nats_server import NatsServer
from tinkermq.broker.presence import presences
from tinkermq.schemas.job import FINAL_STATES, JobRecord
from tinkermq.schemas.local.process import die_with
from tinkermq.schemas.wire.errors import TinkermqError
from tinkermq.schemas.wire.message import Empty
from tinkermq.schemas.wire.subjects import BUCKET_ARCHIVE, BUCKET_JOBS

from benchmarks.lab_nodes import REPORT, LabReport
from benchmarks.lab_users import MEAN_WIDTH, Clients, Tenant, make_users, tenants
from benchmarks.processes import rss_mb
from benchmarks.report import Report, parser

SLOTS = 8
KEEP_ENDED, KEEP_ENDED_OF_ALL = 20, 200
KILLS = (0.08, 0.16, 0.24, 0.32)
"""When the scheduler is killed, as a share of the jobs submitted; then it is left alone."""
SETTLED = 0.45
"""From here on its memory shall stay as it is."""
_SAMPLE_S = 1.0
_DRAIN_S = 900.0


@dataclass
class Sample:
    """What was seen at one moment."""

    submitted: int
    scheduler_mb: float
    server_mb: float
    jobs_bytes: int
    jobs_live: int
    jobs_ended: int
    archive_bytes: int
    archived: int
    decisions: dict[str, float]


@dataclass
class Year:
    """The processes, and what was seen of them."""

    folder: Path
    server: NatsServer
    broker: Broker
    arguments: argparse.Namespace
    samples: list[Sample] = field(default_factory=list[Sample])
    scheduler: "subprocess.Popen[bytes] | None" = None
    kills: int = 0

    def start(self, module: str, *arguments: object) -> "subprocess.Popen[bytes]":
        """Start a process that dies with this one."""
        with (self.folder / f"{module}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", module, *map(str, arguments)],
                stdout=log,
                stderr=log,
                cwd=Path(__file__).parents[1],
                preexec_fn=die_with(os.getpid()),
            )

    def start_scheduler(self) -> None:
        """Start a scheduler in place of the one before."""
        self.scheduler = self.start(
            "benchmarks.lab_scheduler",
            *("--nats", self.server.url, "--year-s", self.arguments.year_s),
            *("--keep-ended", KEEP_ENDED, "--keep-ended-of-all", KEEP_ENDED_OF_ALL),
        )

    async def kill_schedulers(self, clients: Clients) -> None:
        """Kill the scheduler at its times, as a crash would, and start another one."""
        for share in KILLS[:1] if self.arguments.quick else KILLS:
            await clients.until(share)
            assert self.scheduler is not None
            self.scheduler.kill()
            self.scheduler.wait()
            self.kills += 1
            self.start_scheduler()

    async def watch(self, clients: Clients) -> None:
        """Look at processes and buckets, for ever."""
        while True:
            await asyncio.sleep(_SAMPLE_S)
            try:
                self.samples.append(await self._look(clients))
                self._progress(clients.num_jobs)
            except (TinkermqError, TypeError):  # one of them is being started again
                continue

    def _progress(self, num_jobs: int) -> None:
        """Say now and then how far it is, on a terminal's other stream."""
        if len(self.samples) % 10 == 0:
            now = self.samples[-1]
            print(
                f"{now.submitted} of {num_jobs} submitted, {now.jobs_live} live, "
                f"{now.jobs_ended} ended, {now.archived} archived, "
                f"scheduler {now.scheduler_mb:.0f} MB, nats-server {now.server_mb:.0f} MB",
                file=sys.stderr,
                flush=True,
            )

    async def _look(self, clients: Clients) -> Sample:
        jobs = (await stream_info(self.broker, f"KV_{BUCKET_JOBS}"))["state"]
        archive = (await stream_info(self.broker, f"KV_{BUCKET_ARCHIVE}"))["state"]
        told = await presences(self.broker).find("pool.scheduler")
        numbers = told.value.numbers if told is not None else {}
        assert self.scheduler is not None
        return Sample(
            submitted=len(clients.made),
            scheduler_mb=rss_mb(self.scheduler.pid) or 0.0,
            server_mb=rss_mb(self.server.pid or 0) or 0.0,
            jobs_bytes=jobs["bytes"],
            jobs_live=int(numbers.get("jobs_live", 0)),
            jobs_ended=int(numbers.get("jobs_ended", 0)),
            archive_bytes=archive["bytes"],
            archived=archive["messages"],
            decisions={name: ms for name, ms in numbers.items() if name.startswith("decision")},
        )

    async def done(self) -> LabReport:
        """Return what the nodes have done."""
        while True:
            try:
                return await call(
                    self.broker, REPORT, Empty(), LabReport, timeout_s=10, waiting_for="the nodes"
                )
            except TinkermqError:
                await asyncio.sleep(0.1)


async def live_year(year: Year, clients: Clients, users: list[Tenant]) -> tuple[LabReport, ...]:
    """Let all users submit, and return what the nodes had done when all was full, and at the end.

    In between every busy user has jobs that wait, so that each could have had more.
    """
    arguments = year.arguments
    busy = [one for one in users if one.backlog]
    total_weight = sum(one.weight for one in busy)
    async with asyncio.TaskGroup() as group:
        killing = group.create_task(year.kill_schedulers(clients))
        for one in busy:
            group.create_task(clients.busy(one, total_weight))
        for one in users:
            if not one.backlog:
                group.create_task(clients.seldom(one, arguments.year_s / 30))
        group.create_task(clients.sweep(users[-1], arguments.jobs // 10))
        await clients.until(0.15)
        first = await year.done()
        await clients.until(0.95)
        last = await year.done()
        await killing
    return first, last


async def drained(clients: Clients, users: list[Tenant]) -> None:
    """Wait until all that was submitted has ended."""
    deadline = time.monotonic() + _DRAIN_S
    for user in users:
        while [one async for one in clients.jobs(user.name, ended=False)]:
            if time.monotonic() > deadline:
                raise TimeoutError(f"jobs of {user.name} have not ended after {_DRAIN_S:.0f} s")
            await asyncio.sleep(_SAMPLE_S)


def check(clients: Clients, records: list[JobRecord], report: LabReport) -> None:
    """Hold what the scheduler says of all jobs against what was asked for and what was done."""
    told = Counter(one.job for one in records)
    lost = [job for job in clients.made if job not in told]
    assert not lost, f"{len(lost)} jobs are gone: {lost[:5]}"
    assert set(told) == set(clients.made)
    assert max(told.values()) == 1, "a job is told of twice"
    for one in records:
        assert one.state in FINAL_STATES, f"{one.job} is {one.state}"
        stopped = one.job in clients.cancelled
        assert one.state == "COMPLETED" or stopped, f"{one.job} is {one.state}: {one.reason}"
        if one.state == "COMPLETED":
            assert report.done.get(one.job) == 1, f"{one.job} was done {report.done.get(one.job)}×"
    assert not report.doubled, f"ran twice at once, or after their end: {report.doubled[:5]}"
    assert max(report.done.values()) == 1


def deviation(users: list[Tenant], first: LabReport, last: LabReport) -> dict[str, float]:
    """Return how far each busy user's slots are from those due to the weight, as a share."""
    equal = [one for one in users if one.name.startswith("busy")]
    held = {
        one.name: last.slot_s.get(one.name, 0.0) - first.slot_s.get(one.name, 0.0) for one in equal
    }
    weight, total = sum(one.weight for one in equal), sum(held.values()) or 1.0
    return {one.name: held[one.name] / total / (one.weight / weight) - 1 for one in equal}


def tell(
    report: Report,
    year: Year,
    clients: Clients,
    users: list[Tenant],
    reports: tuple[LabReport, ...],
    records: list[JobRecord],
    seconds: float,
) -> None:
    """Print what came of it."""
    first, last, final = reports
    day_s = year.arguments.year_s / 365
    waits = {
        kind: [
            (one.started - one.created)
            for one in records
            if one.started is not None and one.user.startswith(kind)
        ]
        for kind in ("busy", "capped", "low", "seldom")
    }
    report.table(
        "Waits from submission to the first run",
        ["users", "jobs", "median", "longest", "longest in days of the year"],
        [
            [
                kind,
                f"{len(each):,}",
                f"{statistics.median(each):.1f} s",
                f"{max(each):.1f} s",
                f"{max(each) / day_s:.1f}",
            ]
            for kind, each in waits.items()
            if each
        ],
    )
    shares = deviation(users, first, last)
    report.table(
        "Slots held, against those due to the weight",
        ["user", "weight", "deviation"],
        [[one.name, f"{one.weight:g}", f"{shares[one.name]:+.1%}"] for one in users[: len(shares)]],
    )
    settled = [one for one in year.samples if one.submitted >= SETTLED * clients.num_jobs]
    begin, end = settled[: max(len(settled) // 10, 1)], settled[-max(len(settled) // 10, 1) :]
    decisions = [one.decisions for one in year.samples if one.decisions]

    def mean(samples: list[Sample], name: str) -> float:
        return statistics.mean(getattr(one, name) for one in samples)

    rows = [
        ["jobs, all ended as they should", f"{len(records):,}"],
        [
            "of these taken up again after a preemption",
            f"{sum(one.losses > 0 for one in records):,}",
        ],
        ["nodes preempted", f"{final.preempted:,}"],
        ["schedulers killed", str(year.kills)],
        *(
            [
                f"slots of {one.name} at once, most, of a quota of {one.max_slots}",
                str(final.most[one.name]),
            ]
            for one in users
            if one.max_slots is not None and one.name in final.most
        ),
        ["the year took", f"{seconds:.0f} s"],
        ["decision, median", f"{max(one['decision_ms_p50'] for one in decisions):.1f} ms"],
        [
            "scheduler's memory, first and last tenth after the last kill",
            f"{mean(begin, 'scheduler_mb'):.0f} and {mean(end, 'scheduler_mb'):.0f} MB",
        ],
        [
            "nats-server's memory, the same",
            f"{mean(begin, 'server_mb'):.0f} and {mean(end, 'server_mb'):.0f} MB",
        ],
        ["bucket of jobs, most", f"{max(one.jobs_bytes for one in year.samples) / 1e6:.1f} MB"],
        [
            "archive at the end",
            f"{settled[-1].archived:,} records, {settled[-1].archive_bytes / 1e6:.1f} MB",
        ],
        ["ended jobs at hand, most", str(max(one.jobs_ended for one in year.samples))],
    ]
    report.table(
        f"{len(records):,} jobs, {year.arguments.nodes} nodes of {SLOTS} slots", ["", ""], rows
    )
    quick = year.arguments.quick
    report.at_most("jobs lost or done twice", 0.0, 0.0, "")
    worst = max(map(abs, shares.values())) * 100
    report.at_most("fair share, largest deviation", worst, None if quick else 5.0, "%")
    report.at_most(
        "decision, 99th percentile", max(one["decision_ms_p99"] for one in decisions), 50.0, " ms"
    )
    grown = mean(end, "scheduler_mb") / mean(begin, "scheduler_mb")
    report.at_most("scheduler's memory, end over settled", grown, None if quick else 1.1)


async def run(arguments: argparse.Namespace, report: Report) -> None:
    """Live the year, wait for its last jobs, and look at all of them."""
    slots = arguments.nodes * SLOTS
    mean_job_s = 0.9 * slots * arguments.year_s / (arguments.jobs * MEAN_WIDTH)
    users = tenants(slots, max(arguments.jobs // 400, 3))
    with tempfile.TemporaryDirectory() as name, NatsServer(Path(name) / "nats") as server:
        async with await connect(server.url, name="benchmark") as broker:
            await create_shared(broker)
            await make_users(broker, users)
            year = Year(Path(name), server, broker, arguments)
            rng = random.Random(arguments.seed)
            clients = Clients(broker, Path(name), arguments.jobs, slots, rng)
            life_s, down_s = max(arguments.year_s / 4, 40.0), arguments.year_s / 50
            year.start(
                "benchmarks.lab_nodes",
                *(server.url, arguments.nodes, SLOTS, mean_job_s, life_s, down_s, arguments.seed),
            )
            year.start_scheduler()
            started = time.perf_counter()
            watching = asyncio.create_task(year.watch(clients))
            first, last = await live_year(year, clients, users)
            await drained(clients, users)
            seconds = time.perf_counter() - started
            watching.cancel()
            records = [one for user in users async for one in clients.jobs(user.name, ended=True)]
            final = await year.done()
            check(clients, records, final)
            tell(report, year, clients, users, (first, last, final), records, seconds)


def main() -> None:
    """Parse the arguments, simulate, report."""
    options = parser(__doc__)
    options.add_argument("--jobs", type=int, default=10_000)
    options.add_argument("--nodes", type=int, default=200)
    options.add_argument("--year-s", type=float, default=480.0)
    options.add_argument("--seed", type=int, default=17)
    arguments = options.parse_args()
    if arguments.quick:
        arguments.jobs, arguments.nodes, arguments.year_s = 100, 20, 10.0
    report = Report("lab_year", "A simulated year of a lab", quick=arguments.quick)
    uvloop.run(run(arguments, report))
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
