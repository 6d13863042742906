"""Thousands of steps: is one at the end as cheap as one at the beginning?

    python -m benchmarks.long_run [--steps 5000]

A tiny job runs through the whole stack, with evaluations and checkpoints on the way. At every tenth
of the run all that a step costs is read: time, CPU time and memory of every process, messages and
bytes at the broker, and what each stream and bucket holds. What the last tenth cost is compared
with what the second cost; the first is for caches and pools to fill. Messages that are sent by the
clock (heartbeats) count with the steps, so a machine that slows down sends more of them per step.

Streams are of two kinds. Those that hold what is needed (tasks, rollouts, weights, evaluations'
requests, records) must not grow. Those that are the run's history (batch records, metrics and
events, traces, log lines, evaluations' results) gain as many bytes with each step, until their
bounds.
"""

import asyncio
import json
import tempfile
import time
import urllib.request
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinkermq.broker.client.connection import connect
from tinkermq.clients.follow import follow_run
from tinkermq.schemas.job import JobRecord
from tinkermq.schemas.metric import Metric
from tinkermq.schemas.wire.subjects import BUCKET_EVALS

from benchmarks.processes import Cpu, cpu, rss_mb
from benchmarks.report import Report, parser
from benchmarks.stack import Stack
from benchmarks.tasks import coin_job, random_model

PARTS = 10
SERVER = "nats-server"
SERVER_MB = 160.0
"""It collects its garbage eagerly from 128 MiB on only, so a ratio says nothing of it."""
SLACK_BYTES = 256 * 1024
"""What a stream that must not grow may hold more: more of the same at the moment of reading."""


@dataclass(frozen=True)
class Mark:
    """All that is read at one place of the run."""

    step: int
    time: float
    cpu: dict[str, Cpu]
    rss_mb: dict[str, float]
    messages: int
    """In and out of the broker since its start."""
    num_bytes: int
    streams: dict[str, int]
    """Bytes by stream or bucket."""


async def measure(num_steps: int) -> list[Mark]:
    """Run the job; return what was read at each tenth of it."""
    model = random_model("nano", width=64, layers=2)
    config = coin_job(model, num_steps + 5, tasks=2, group=2, tokens=2)
    config["training"] |= {"save_freq": 25, "test_freq": max(num_steps // 100, 5)}
    config["env"] |= {"num_val": 2}
    config["generator"] |= {"count": 1}
    marks = list[Mark]()
    with tempfile.TemporaryDirectory() as folder:
        async with Stack(Path(folder)) as stack:
            record = await stack.pool.submit({"output_dir": f"{folder}/runs", **config})
            async with aclosing(follow_run(stack.pool, record)) as updates:
                async for update in updates:
                    if isinstance(update, JobRecord):
                        record = update
                    elif isinstance(update, Metric) and "training_step_reward" in update.values:
                        due = len(marks) * num_steps // PARTS
                        if update.step >= max(due, 1) and len(marks) <= PARTS:
                            marks.append(await _mark(stack, record, update.step))
            if record.state != "COMPLETED":
                raise RuntimeError(f"the job is {record.state}: {record.reason}")
    return marks


async def _mark(stack: Stack, record: JobRecord, step: int) -> Mark:
    presences = await stack.presences(record)
    pids = {name: presence.pid for name, presence in presences.items()}
    pids |= {name: process.pid for name, process in stack.processes.items()}
    pids |= {SERVER: stack.server.pid or 0}
    told = await asyncio.to_thread(_varz, f"{stack.server.monitor_url}/varz")
    return Mark(
        step=step,
        time=time.monotonic(),
        cpu={name: found for name, pid in pids.items() if (found := cpu(pid)) is not None},
        rss_mb={name: found for name, pid in pids.items() if (found := rss_mb(pid)) is not None},
        messages=told["in_msgs"] + told["out_msgs"],
        num_bytes=told["in_bytes"] + told["out_bytes"],
        streams=await _streams(stack.server.url),
    )


def _varz(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url, timeout=10) as reply:
        return json.load(reply)


async def _streams(url: str) -> dict[str, int]:
    """Return the bytes of every stream, without the user and the job in its name."""
    async with await connect(url, name="benchmark") as broker:
        found = (await broker.api("STREAM.LIST"))["streams"]
    sizes = dict[str, int]()
    for one in found:
        name: str = one["config"]["name"]
        kind = name[: name.index("tmq-")] + name.rpartition("-")[2]
        sizes[kind] = int(one["state"]["bytes"])
    return sizes


def history(stream: str) -> bool:
    """Whether a stream is the run's history, which gains with each step."""
    evals = BUCKET_EVALS.removeprefix("tmq-")
    return stream in {"batch", "feed", "trace", "log", "dead", f"KV_{evals}"}


def tell(marks: list[Mark], report: Report) -> None:
    """Print what the second and the last tenth cost, and the ratios."""
    a, b, y, z = marks[1], marks[2], marks[-2], marks[-1]
    early, late = b.step - a.step, z.step - y.step
    rows = list[list[str]]()

    def row(what: str, first: float, last: float) -> float:
        ratio = last / max(first, 1e-9)
        rows.append([what, f"{first:,.2f}", f"{last:,.2f}", f"{ratio:.2f}×"])
        return ratio

    seconds = row("seconds", (b.time - a.time) / early, (z.time - y.time) / late)
    messages = row("messages", (b.messages - a.messages) / early, (z.messages - y.messages) / late)
    kilobytes = row(
        "kilobytes at the broker",
        (b.num_bytes - a.num_bytes) / early / 1e3,
        (z.num_bytes - y.num_bytes) / late / 1e3,
    )
    spent = list[float]()
    for name in sorted(set(a.cpu) & set(z.cpu)):
        first, last = b.cpu[name] - a.cpu[name], z.cpu[name] - y.cpu[name]
        costs = [(one.loop_s + one.other_s) * 1e3 for one in (first, last)]
        ratio = row(f"CPU ms of {name}", costs[0] / early, costs[1] / late)
        spent += [ratio] if name in ("learner", SERVER, "generator-0") else []
    columns = ["per step", f"steps {a.step} to {b.step}", f"steps {y.step} to {z.step}", "ratio"]
    report.table("What a step costs", columns, rows)
    held = [
        [name, f"{b.rss_mb[name]:.1f}", f"{z.rss_mb[name]:.1f}"]
        for name in sorted(set(b.rss_mb) & set(z.rss_mb))
    ]
    columns = ["process", f"after {b.step} steps", f"after {z.step}"]
    report.table("Resident megabytes", columns, held)
    sizes, grown = list[list[str]](), 0.0
    for name in sorted(set(b.streams) & set(z.streams)):
        first, last = b.streams[name], z.streams[name]
        gains = [
            (b.streams[name] - a.streams.get(name, 0)) / early,
            (last - y.streams[name]) / late,
        ]
        kind = "history" if history(name) else "kept small"
        told = [f"{one:,.0f}" for one in (first, last, *gains)]
        sizes.append([name, kind, *told])
        if not history(name):
            grown = max(grown, (last + SLACK_BYTES) / (first + SLACK_BYTES))
    columns = ["stream", "kind", f"bytes after {b.step}", f"after {z.step}"]
    columns += ["gained per step early", "late"]
    report.table("Streams and buckets", columns, sizes)
    report.at_most("time of a step, late over early", seconds, 1.25)
    report.at_most("messages of a step, late over early", messages, 1.25)
    report.at_most("bytes of a step at the broker, late over early", kilobytes, 1.15)
    report.at_most("CPU time of a step, late over early, the worst", max(spent), 1.25)
    actors = (set(b.rss_mb) & set(z.rss_mb)) - {SERVER}
    worst = max(z.rss_mb[name] / b.rss_mb[name] for name in actors)
    report.at_most("memory of an actor, late over early, the worst", worst, 1.1)
    report.at_most("memory of nats-server at the end", z.rss_mb[SERVER], SERVER_MB, "MB")
    report.at_most("a stream that must not grow, late over early, the worst", grown, 1.5)
    report.note(f"{z.step} steps in {z.time - marks[0].time:.0f} s.")


def main() -> None:
    """Parse the arguments, run, print and write."""
    options = parser(__doc__)
    options.add_argument("--steps", type=int, help="training steps (5000; quick: 40)")
    arguments = options.parse_args()
    report = Report("long_run", "Thousands of steps", quick=arguments.quick)
    num_steps = arguments.steps or (40 if arguments.quick else 5000)
    tell(asyncio.run(measure(num_steps)), report)
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
