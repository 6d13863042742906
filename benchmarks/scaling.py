"""Hundreds of generators, one learner, three servers: what the learner and the broker pay.

    python -m benchmarks.scaling [--groups 100000] [--short 6000] [--rounds 3] [--tokens 256]

Three nats-servers in a cluster keep every stream on all of them. A learner without a model and
generators without one (benchmarks/simulated.py) send real tasks and real groups through it: 10
generators, 50 and 500 take turns in short runs, each from an empty log, then 500 in a long one.
What a learner pays per group, CPU time of its process, shall not depend on how many generators
there are; the machine's speed changes from minute to minute, so runs of one round are compared,
and the median round counts. What the broker carries is read from the servers' own statistics of
their connections.
"""

import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import uvloop
from tinkermq.broker.client.connection import connect
from tinkermq.broker.jetstream.streams import (
    REPLICAS_VARIABLE,
    create_job_streams,
    delete_job_streams,
)
from tinkermq.broker.nats_server import NatsServer
from tinkermq.schemas.config.job import LimitsConfig
from tinkermq.schemas.task import Task
from tinkermq.schemas.wire.errors import TinkermqError

from benchmarks.broker import make_group
from benchmarks.processes import rss_mb
from benchmarks.report import Report, parser
from benchmarks.simulated import GROUP_SIZE, SCOPE

GENERATORS = (10, 50, 500)
PER_PROCESS = 125
IN_FLIGHT = 1024
NUM_SERVERS = 3
_CLUSTER_S = 60.0


@dataclass
class Seen:
    """One run."""

    lines: list[dict[str, float]]
    """What the learner told, a line every two thousand groups."""
    in_bytes: int
    """Bytes that the servers took from generators."""
    out_bytes: int
    """Bytes that they sent to the learner."""
    rss_mb: dict[str, tuple[float, float]]
    """Memory by kind of process, per process, at half of the run and at its end."""

    @property
    def groups(self) -> int:
        """Groups that the learner took."""
        return int(self.lines[-1]["groups"])

    @property
    def cpu_ms(self) -> float:
        """CPU milliseconds of the learner per group, without the first groups."""
        first, last = self.lines[0], self.lines[-1]
        return 1000 * (last["cpu_s"] - first["cpu_s"]) / (last["groups"] - first["groups"])

    @property
    def per_s(self) -> float:
        """Groups per second."""
        first, last = self.lines[0], self.lines[-1]
        return (last["groups"] - first["groups"]) / (last["time"] - first["time"])


@contextmanager
def cluster(folder: Path) -> Iterator[list[NatsServer]]:
    """Run servers that know each other, on free ports of this machine."""
    with ExitStack() as holding:
        held = [holding.enter_context(socket.socket()) for _ in range(NUM_SERVERS)]
        for one in held:
            one.bind(("127.0.0.1", 0))
        ports = [one.getsockname()[1] for one in held]
    routes = ", ".join(f'"nats://127.0.0.1:{port}"' for port in ports)
    servers = [
        NatsServer(
            folder / f"server-{number}",
            extra_config=f"server_name: n{number}\n"
            f'cluster {{ name: scaling, listen: "127.0.0.1:{port}", routes: [{routes}] }}',
        )
        for number, port in enumerate(ports)
    ]
    with ExitStack() as running:
        for server in servers:
            running.enter_context(server)
        yield servers


async def make_streams(urls: str) -> None:
    """Make the job's streams, once the servers have found a leader."""
    deadline = time.monotonic() + _CLUSTER_S
    async with await connect(urls, name="bench") as broker:
        await delete_job_streams(broker, SCOPE)
        while True:
            try:
                await create_job_streams(broker, SCOPE, LimitsConfig(task_bytes=1 << 28))
                return
            except TinkermqError:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(1.0)


def connections(servers: list[NatsServer], field: str, name: str) -> int:
    """Sum a field over the connections whose name begins so, those that have ended included."""
    total = 0
    for server in servers:
        url = f"{server.monitor_url}/connz?limit=4096&state=any"
        with urllib.request.urlopen(url, timeout=10) as answer:
            listed: list[dict[str, Any]] = json.load(answer)["connections"]
        total += sum(one[field] for one in listed if one.get("name", "").startswith(name))
    return total


def started(*words: str, stdout: int) -> "subprocess.Popen[str]":
    """Start a simulated process."""
    command = [sys.executable, "-m", "benchmarks.simulated", *words]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=stdout, text=True)


def run(servers: list[NatsServer], count: int, groups: int, tokens: int) -> Seen:
    """Let `count` generators make `groups` groups."""
    urls = ",".join(server.url for server in servers)
    uvloop.run(make_streams(urls))
    marks = {name: connections(servers, field, name) for name, field in _COUNTED.items()}
    shares = [min(PER_PROCESS, count - start) for start in range(0, count, PER_PROCESS)]
    log = sys.stderr.fileno()
    generators = [
        started("generators", urls, str(share), str(tokens), stdout=log) for share in shares
    ]
    learner = started("learner", urls, str(groups), str(IN_FLIGHT), stdout=subprocess.PIPE)
    pids = {
        "learner": [learner.pid],
        "nats-server": [one.pid for one in servers if one.pid],
        "generator": [one.pid for one in generators],
    }
    lines: list[dict[str, float]] = []
    half: dict[str, float] = {}
    now: dict[str, float] = {}
    assert learner.stdout is not None
    for text in learner.stdout:
        lines.append(json.loads(text))
        now = {kind: sum(rss_mb(one) or 0 for one in some) for kind, some in pids.items()}
        if not half and lines[-1]["groups"] >= groups / 2:
            half = now
    counted = {
        name: connections(servers, field, name) - marks[name] for name, field in _COUNTED.items()
    }
    for process in generators:
        process.communicate()
    if learner.wait() or any(process.returncode for process in generators):
        raise SystemExit("a simulated process failed: see above")
    sizes = {"learner": 1, "nats-server": NUM_SERVERS, "generator": count}
    memory = {kind: (half[kind] / size, now[kind] / size) for kind, size in sizes.items()}
    return Seen(lines, counted["generator"], counted["learner"], memory)


_COUNTED = {"generator": "in_bytes", "learner": "out_bytes"}


def main() -> None:
    """Parse the arguments, measure, report."""
    options = parser(__doc__)
    options.add_argument("--groups", type=int, default=100_000, help="of the long run")
    options.add_argument("--short", type=int, default=6_000, help="groups of a short run")
    options.add_argument("--rounds", type=int, default=3, help="short runs of each number")
    options.add_argument("--tokens", type=int, default=256, help="of an episode; 4 make a group")
    arguments = options.parse_args()
    os.environ[REPLICAS_VARIABLE] = str(NUM_SERVERS)
    counts = GENERATORS
    if arguments.quick:
        arguments.groups, arguments.short, arguments.rounds, counts = 1200, 1200, 1, (2, 4)
    report = Report("scaling", "one learner and hundreds of generators", quick=arguments.quick)
    task = Task(task=10_000, seed=10_000, group_size=GROUP_SIZE)
    group = make_group(0, GROUP_SIZE, arguments.tokens).model_copy(update={"task": task})
    payload = len(group.to_bytes())
    with tempfile.TemporaryDirectory() as folder, cluster(Path(folder)) as servers:
        rounds = [
            {count: run(servers, count, arguments.short, arguments.tokens) for count in counts}
            for _ in range(arguments.rounds)
        ]
        many = run(servers, counts[-1], arguments.groups, arguments.tokens)
    runs = [(count, [one[count] for one in rounds]) for count in counts] + [(counts[-1], [many])]
    report.table(
        f"Groups of {GROUP_SIZE} × {arguments.tokens} tokens, {payload:,} bytes, on three servers",
        (
            "generators",
            "runs",
            "groups of each",
            "groups/s",
            "learner CPU per group",
            "to servers",
            "to learner",
        ),
        [
            (
                str(count),
                str(len(some)),
                f"{some[0].groups:,}",
                f"{median(one.per_s for one in some):,.0f}",
                f"{median(one.cpu_ms for one in some):.2f} ms",
                f"{median(one.in_bytes / one.groups for one in some) / payload:.2f}×",
                f"{median(one.out_bytes / one.groups for one in some) / payload:.2f}×",
            )
            for count, some in runs
        ],
    )
    report.table(
        "Resident megabytes of a process, at half of a run and at its end",
        ("generators", "groups", *many.rss_mb),
        [
            (
                str(count),
                f"{some[-1].groups:,}",
                *(f"{half:.1f}, {end:.1f}" for half, end in some[-1].rss_mb.values()),
            )
            for count, some in runs
        ],
    )
    report.at_most(
        f"learner's CPU per group, {counts[-1]} generators over {counts[0]}, median round",
        median(one[counts[-1]].cpu_ms / one[counts[0]].cpu_ms for one in rounds),
        1.1,
    )
    for what, num_bytes in (("taken from generators", many.in_bytes), ("sent", many.out_bytes)):
        ratio = num_bytes / many.groups / payload
        report.at_most(f"bytes {what} per group over its payload", ratio, 1.1)
    half, end = many.rss_mb["learner"]
    report.at_most("growth of the learner's memory in the second half", end / half, 1.1)
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
