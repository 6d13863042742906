"""What the broker room adds to nats-py: calls, tasks and groups per second against raw messages.

    python -m benchmarks.broker [--seconds 2] [--rounds 3] [--sync-interval always]

Caller and service are two connections of one process, on uvloop. The peer of a typed call is
nats-py's own request with the same payload, echoed by a bare subscription; the peer of tasks and
groups is one JetStream publish of the same size that is waited for.
"""

import argparse
import asyncio
import itertools
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from statistics import median

import numpy as np
import uvloop
from nats.aio.msg import Msg
from tinkermq.broker.client.connection import Broker, connect
from tinkermq.broker.client.rpc import Service, call
from tinkermq.broker.jetstream.streams import create_job_streams
from tinkermq.broker.nats_server import NatsServer
from tinkermq.broker.rollouts import RolloutLog
from tinkermq.broker.tasks import TaskQueue
from tinkermq.schemas.config.job import LimitsConfig
from tinkermq.schemas.env import StepReply, StepRequest
from tinkermq.schemas.rollout import Group, Trajectory
from tinkermq.schemas.task import Task
from tinkermq.schemas.wire.subjects import JobScope

from benchmarks.report import Report, parser

SCOPE, LONG = JobScope("local", "bench"), JobScope("local", "bench-long")
REQUEST = StepRequest(episodes=["e" * 32], turns=[3], actions=["move left"])
NUM_CALLERS = 32
NUM_LONG_WRITERS = 4
LONG_TOKENS = 4096
RAW_20KB = "raw stored message of 20 kB, 32 writers"
RAW_GROUP = "raw stored message of the size of the following, 32 writers"
APPENDED = "group of 8 × 256 tokens appended, 32 writers"
RAW_LONG = "raw stored message of the size of the following, 4 writers"
APPENDED_LONG = f"group of 8 × {LONG_TOKENS:,} tokens appended, 4 writers"
READ_LONG = f"group of 8 × {LONG_TOKENS:,} tokens read back and checked"
Work = Callable[[int], Awaitable[object]]


def make_group(number: int, episodes: int = 8, num_tokens: int = 256) -> Group:
    """Return a group as a small recipe makes them."""
    generated = np.arange(num_tokens) >= num_tokens // 2
    trajectory = Trajectory(
        token_ids=np.arange(num_tokens, dtype=np.int32),
        mask=generated.astype(np.uint8),
        logprobs=np.where(generated, -0.5, 0).astype(np.float32),
        versions=np.where(generated, 0, -1).astype(np.int32),
        turn_ends=np.array([num_tokens - 1], np.int32),
        rewards=np.array([1.0], np.float32),
    )
    task = Task(task=number, seed=number, group_size=episodes)
    return Group(task=task, trajectories=[trajectory] * episodes, source="benchmark")


@asynccontextmanager
async def serving(broker: Broker) -> AsyncIterator[None]:
    """Answer typed calls, and raw ones with their own payload."""

    async def step(request: StepRequest) -> StepReply:
        return StepReply(observations=[*request.actions], rewards=[0.0], done=[False], infos=[{}])

    async def echo(message: Msg) -> None:
        await broker.nc.publish(message.reply, message.data)

    await broker.nc.subscribe("bench.raw", cb=echo)
    async with await Service.start(broker, name="bench", description="Benchmark") as service:
        await service.endpoint("step", "bench.step", StepRequest, step)
        yield


async def per_second(work: Work, callers: int, seconds: float) -> float:
    """Return how often per second `callers` at once get `work` done."""
    numbers = itertools.count()
    started = time.perf_counter()
    done = 0

    async def repeat() -> None:
        nonlocal done
        while time.perf_counter() - started < seconds:
            await work(next(numbers))
            done += 1

    await asyncio.gather(*(repeat() for _ in range(callers)))
    return done / (time.perf_counter() - started)


async def measure_reading(log: RolloutLog) -> float:
    """Return the groups per second that a reader gets from the log."""
    last = await log.last_seq()
    started = time.perf_counter()
    async with aclosing(log.read()) as entries:
        async for entry in entries:
            if entry.seq == last:
                return last / (time.perf_counter() - started)
    raise AssertionError("a live reader does not end")


async def measure_pulling(queue: TaskQueue) -> float:
    """Return the tasks per second that one generator pulls and ends, until there is none."""
    done = 0
    started = ended = time.perf_counter()
    while leases := await queue.pull(16, 0.5):
        await asyncio.gather(*(lease.done() for lease in leases))
        done += len(leases)
        ended = time.perf_counter()
    return done / (ended - started)


async def run(arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Measure everything in turns; return rates by name."""
    rates: dict[str, list[float]] = {}
    raw_payload = REQUEST.to_bytes()
    offset = 0
    sync_interval = arguments.sync_interval
    with (
        tempfile.TemporaryDirectory(dir=arguments.store) as folder,
        NatsServer(Path(folder) / "nats", sync_interval=sync_interval) as server,
    ):
        async with (
            await connect(server.url, name="service") as broker,
            await connect(server.url, name="caller") as caller,
            serving(broker),
        ):
            for scope in (SCOPE, LONG):
                await create_job_streams(broker, scope, LimitsConfig())
            log, queue = RolloutLog(caller, SCOPE), TaskQueue(caller, SCOPE)
            long_log, long_group = RolloutLog(caller, LONG), make_group(0, 8, LONG_TOKENS)
            long_bytes = bytes(len(long_group.to_bytes()))

            async def typed(_: int) -> None:
                await call(
                    caller, "bench.step", REQUEST, StepReply, timeout_s=9, waiting_for="bench"
                )

            async def raw(_: int) -> None:
                await caller.nc.request("bench.raw", raw_payload, timeout=9)

            async def publish(number: int) -> None:
                await queue.publish(Task(task=offset + number, seed=0, group_size=8))

            group = make_group(0)
            group_bytes = bytes(len(group.to_bytes()))

            async def append(number: int) -> None:
                task = Task(task=offset + number, seed=0, group_size=8)
                await log.append(group.model_copy(update={"task": task}))

            jetstream = caller.nc.jetstream()

            async def stored(_: int) -> None:
                await jetstream.publish(SCOPE.metric, bytes(20_000))

            async def stored_group(_: int) -> None:
                await jetstream.publish(SCOPE.metric, group_bytes)

            async def append_long(number: int) -> None:
                task = Task(task=offset + number, seed=0, group_size=8)
                await long_log.append(long_group.model_copy(update={"task": task}))

            async def stored_long(_: int) -> None:
                await jetstream.publish(LONG.metric, long_bytes)

            works: dict[str, tuple[Work, int]] = {
                "raw request, 1 caller": (raw, 1),
                "typed call, 1 caller": (typed, 1),
                "raw request, 32 callers": (raw, NUM_CALLERS),
                "typed call, 32 callers": (typed, NUM_CALLERS),
                RAW_20KB: (stored, NUM_CALLERS),
                RAW_GROUP: (stored_group, NUM_CALLERS),
                APPENDED: (append, NUM_CALLERS),
                "task published, 32 writers": (publish, NUM_CALLERS),
                RAW_LONG: (stored_long, NUM_LONG_WRITERS),
                APPENDED_LONG: (append_long, NUM_LONG_WRITERS),
            }
            for _ in range(arguments.rounds):
                for name, (work, callers) in works.items():
                    rate = await per_second(work, callers, arguments.seconds)
                    rates.setdefault(name, []).append(rate)
                rates.setdefault("group read back and checked", []).append(
                    await measure_reading(log)
                )
                rates.setdefault(READ_LONG, []).append(await measure_reading(long_log))
                rates.setdefault("task pulled and done, 1 generator", []).append(
                    await measure_pulling(queue)
                )
                offset += 10_000_000
            await queue.close()
    return rates


def main() -> None:
    """Parse the arguments, measure, report."""
    options = parser(__doc__)
    options.add_argument("--seconds", type=float, default=2.0, help="time for each measurement")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--sync-interval", default="2m", help="of the server; always: each write")
    options.add_argument("--store", help="folder on the disk that the server stores to")
    arguments = options.parse_args()
    if arguments.quick:
        arguments.seconds, arguments.rounds = 0.2, 1
    report = Report("broker", "calls, tasks and groups against raw messages", quick=arguments.quick)
    rates = {name: median(values) for name, values in uvloop.run(run(arguments)).items()}
    rows = [[name, f"{rate:,.0f}"] for name, rate in rates.items()]
    report.table("Per second", ["", "rate"], rows)
    for callers in ("1 caller", "32 callers"):
        share = rates[f"typed call, {callers}"] / rates[f"raw request, {callers}"]
        report.at_least(f"typed calls per raw request, {callers}", share, None)
    share = rates[APPENDED] / rates[RAW_20KB]
    report.at_least("groups appended per raw stored message of 20 kB", share, 0.5)
    share = rates[APPENDED] / rates[RAW_GROUP]
    report.at_least("groups appended per raw stored message of their size", share, None)
    share = rates[APPENDED_LONG] / rates[RAW_LONG]
    report.at_least("long groups appended per raw stored message of their size", share, None)
    share = rates[READ_LONG] / rates[RAW_LONG]
    report.at_least("long groups read per raw stored message of their size", share, None)
    size_mb = len(make_group(0, 8, LONG_TOKENS).to_bytes()) / 1e6
    report.note(
        f"A group of 8 × {LONG_TOKENS:,} tokens has {size_mb:.2f} MB: "
        f"{size_mb * rates[APPENDED_LONG]:,.0f} MB/s appended, "
        f"{size_mb * rates[READ_LONG]:,.0f} MB/s read."
    )
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
