"""Simulated H100s behind real messages: which part of a pool holds a training step up.

    python -m benchmarks.gpu_pool [--speed 20] [--steps 40]

Tasks, groups and the staleness gate are the real ones, over a real nats-server; what a GPU would do
is slept, `--speed` times as fast. An engine decodes its sequences together: a token takes as long
as reading the weights and the cached keys and values takes, so it is slower per sequence and faster
in all the more sequences run. Answers have a heavy tail, as those of reasoning models have.

The times follow from the data sheet of an H100 (3.35 TB/s, 990 TFLOP/s in bfloat16) and the
efficiencies below, which nobody has measured for this system: they say where the time of a step
goes, not how fast the system is. `files` is the way of weights by the broker (a copy down, through
the store, and up, while decoding stands still), `nccl` the way from GPU to GPU.

At the end: what it is worth that episodes follow an engine's cache, and that conversations stay
with the server that holds them (`benchmarks.gpu_cache`).
"""

import asyncio
import heapq
import math
import random
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean

import uvloop
from nats.aio.msg import Msg
from tinkermq.actors.learner.intake import Intake
from tinkermq.actors.learner.staleness import min_version, num_admissible
from tinkermq.actors.learner.tasks import Ledger
from tinkermq.actors.training.state import LearnerState
from tinkermq.broker.client.connection import Broker, connect
from tinkermq.broker.jetstream.streams import create_job_streams, delete_job_streams
from tinkermq.broker.nats_server import NatsServer
from tinkermq.broker.rollouts import RolloutLog
from tinkermq.broker.tasks import Lease, TaskQueue
from tinkermq.schemas.config.job import LimitsConfig
from tinkermq.schemas.task import Task
from tinkermq.schemas.wire.subjects import JobScope

from benchmarks.broker import make_group
from benchmarks.gpu_cache import (
    FLOPS,
    MODELS,
    MULTIPLYING,
    Model,
    report_caches,
)
from benchmarks.report import Report, parser

SCOPE = JobScope("local", "gpu-pool")
NEW_VERSION = "bench.version"
BOUNDS = (0, 1, 2, 4)
WARM = 8
BATCH, GROUP = 64, 8
PROMPT, ANSWER, LONGEST = 512, 1500, 8192
TAIL = 0.8
"""Standard deviation of the logarithm of an answer's length."""
STALLED_S = 120.0


@dataclass(frozen=True)
class WeightsPath:
    """How new weights come to the engines, in seconds per 10^9 weights."""

    name: str
    hold: float
    """While the learner does nothing else."""
    travel: float
    """Behind the learner, and while engines decode on."""
    swap: float
    """While an engine stands still."""


FILES = WeightsPath("files", 0.8, 2.6, 1.7)
NCCL = WeightsPath("nccl", 0.07, 0.0, 0.13)


@dataclass(frozen=True)
class Pool:
    """Some GPUs, divided between learner and generators."""

    model: Model
    generator_gpus: int
    learner_gpus: int
    path: WeightsPath
    bound: int

    @property
    def num_engines(self) -> int:
        """Engines that the generators' GPUs make."""
        return self.generator_gpus // self.model.tensor_parallel

    @property
    def train_s(self) -> float:
        """Seconds of a step: six products of a weight per token, on the learner's GPUs."""
        tokens = BATCH * GROUP * (PROMPT + ANSWER)
        rate = self.learner_gpus * FLOPS * MULTIPLYING
        return 6 * self.model.weights * tokens / rate

    @property
    def prefill_s(self) -> float:
        """Seconds of an engine for the prompt of a group, which its sequences share."""
        return self.model.prefill_s(PROMPT)

    def token_s(self, num_sequences: int) -> float:
        """Seconds for the next token of so many sequences that are half done on average."""
        return self.model.token_s(num_sequences * (PROMPT + ANSWER / 2))

    def weights_s(self, per_billion: float) -> float:
        """Seconds for a part of the weights' way."""
        return per_billion * self.model.weights / 1e9


class Clock:
    """Simulated seconds."""

    def __init__(self, speed: float) -> None:
        self._speed = speed
        self._loop = asyncio.get_running_loop()

    def now(self) -> float:
        """Return the time."""
        return self._loop.time() * self._speed

    async def sleep(self, seconds: float) -> None:
        """Let so many simulated seconds pass."""
        await asyncio.sleep(max(seconds, 0.0) / self._speed)


class Engine:
    """Sequences that advance together, each by a token in `token_s` of their number."""

    def __init__(self, pool: Pool, clock: Clock) -> None:
        self._pool, self._clock = pool, clock
        self.version = 0
        self.new_version = asyncio.Event()
        self._tokens = 0.0
        self._seen = clock.now()
        self._stands_until = 0.0
        self._ends: list[tuple[float, int, asyncio.Event]] = []
        self._changed = asyncio.Event()
        self._count = 0
        self.decoding_s = self.swapping_s = self.sequence_s = 0.0
        """Seconds in which it decodes, and stands still for weights, and their sum per sequence."""

    async def play(self, lengths: list[int]) -> None:
        """Decode a group's answers."""
        self._advance()
        self._stand_still(self._pool.prefill_s)
        ended = [asyncio.Event() for _ in lengths]
        for length, event in zip(lengths, ended, strict=True):
            self._count += 1
            heapq.heappush(self._ends, (self._tokens + length, self._count, event))
        self._changed.set()
        for event in ended:
            await event.wait()

    def seconds(self) -> tuple[float, float, float]:
        """Return the seconds of decoding and of swapping until now, and of all sequences."""
        self._advance()
        return self.decoding_s, self.swapping_s, self.sequence_s

    def take(self, version: int) -> None:
        """Stand still for new weights; sequences go on with them."""
        self._advance()
        seconds = self._pool.weights_s(self._pool.path.swap)
        self._stand_still(seconds)
        self.swapping_s += seconds
        self.version = version
        self.new_version.set()
        self.new_version = asyncio.Event()
        self._changed.set()

    async def run(self) -> None:
        """End sequences when their time has come."""
        while True:
            self._changed.clear()
            self._advance()
            while self._ends and self._ends[0][0] <= self._tokens + 1e-6:
                heapq.heappop(self._ends)[2].set()
            waiting = asyncio.create_task(self._changed.wait())
            if self._ends:
                left = (self._ends[0][0] - self._tokens) * self._pool.token_s(len(self._ends))
                left += max(self._stands_until - self._clock.now(), 0.0)
                sleeping = asyncio.create_task(self._clock.sleep(left))
                await asyncio.wait({waiting, sleeping}, return_when=asyncio.FIRST_COMPLETED)
                sleeping.cancel()
            else:
                await waiting
            waiting.cancel()

    def _stand_still(self, seconds: float) -> None:
        self._stands_until = max(self._stands_until, self._clock.now()) + seconds

    def _advance(self) -> None:
        """Count the tokens since the last look."""
        now = self._clock.now()
        seconds = max(now - max(self._seen, self._stands_until), 0.0)
        self._seen = now
        if self._ends:
            self.decoding_s += seconds
            self.sequence_s += seconds * len(self._ends)
            self._tokens += seconds / self._pool.token_s(len(self._ends))


@dataclass
class Times:
    """What a run showed, in simulated seconds, without its first steps."""

    steps: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    lags: list[float] = field(default_factory=list)
    decoding: list[float] = field(default_factory=list)
    swapping: list[float] = field(default_factory=list)
    sequences: list[float] = field(default_factory=list)

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return mean(self.steps)

    @property
    def learner_busy(self) -> float:
        """Share of its time in which the learner trains or hands weights over."""
        return 1 - sum(self.waits) / sum(self.steps)

    @property
    def generators_busy(self) -> float:
        """Share of their time in which the engines decode."""
        return mean(self.decoding) / sum(self.steps)

    @property
    def generators_swapping(self) -> float:
        """Share of their time in which they stand still for new weights."""
        return mean(self.swapping) / sum(self.steps)

    @property
    def mean_sequences(self) -> float:
        """Sequences of an engine that advance together, on average over the time."""
        return mean(self.sequences) / sum(self.steps)


def lengths(rng: random.Random, count: int) -> list[int]:
    """Draw lengths of answers with the mean `ANSWER`, cut at `LONGEST`."""
    middle = math.log(ANSWER) - TAIL**2 / 2
    return [min(int(rng.lognormvariate(middle, TAIL)) + 1, LONGEST) for _ in range(count)]


async def generate(broker: Broker, engine: Engine, seed: int) -> None:
    """Pull tasks while the engine has room, play them, append their groups."""
    queue, log = TaskQueue(broker, SCOPE), RolloutLog(broker, SCOPE)
    template = make_group(0, GROUP, 4)
    rng = random.Random(seed)
    room = asyncio.Semaphore(256 // GROUP)

    async def play(lease: Lease) -> None:
        try:
            while engine.version < lease.task.min_version:
                await engine.new_version.wait()
            began = engine.version
            await engine.play(lengths(rng, GROUP))
            group = template.model_copy(
                update={"task": lease.task, "source": str(began), "trajectories": template.sampled}
            )
            await log.append(group)
            await lease.done()
        finally:
            room.release()

    async with asyncio.TaskGroup() as playing:
        while True:
            await room.acquire()
            leases = await queue.pull(1, 5.0)
            for lease in leases:
                playing.create_task(play(lease))
            if not leases:
                room.release()


async def learn(
    broker: Broker, pool: Pool, clock: Clock, num_steps: int, engines: list[Engine]
) -> Times:
    """Issue tasks under the gate, wait for batches, train them, send weights."""
    queue, log = TaskQueue(broker, SCOPE), RolloutLog(broker, SCOPE)
    intake = Intake(
        log,
        Ledger(LearnerState(next_task=1 << 40)),
        vocab_size=1 << 20,
        max_tokens=1 << 20,
        group_size=GROUP,
        greedy_baseline=False,
    )
    reading = asyncio.create_task(intake.read_log())
    times = Times()
    issued = 0
    sending: asyncio.Task[None] | None = None
    before: list[tuple[float, float, float]] = []
    for version in range(num_steps):
        started = clock.now()
        if version == WARM:
            before = [engine.seconds() for engine in engines]
        wanted = num_admissible(version, pool.bound, BATCH, 0)
        async with asyncio.TaskGroup() as issuing:
            for number in range(issued, wanted):
                task = Task(
                    task=number,
                    seed=number,
                    group_size=GROUP,
                    min_version=min_version(number, BATCH, pool.bound),
                )
                issuing.create_task(queue.publish(task))
        issued = wanted
        while len(intake.candidates()) < BATCH:
            intake.changed.clear()
            async with asyncio.timeout(STALLED_S):
                await intake.changed.wait()
        batch = [intake[candidate.seq] for candidate in intake.candidates()[:BATCH]]
        waited = clock.now() - started
        intake.forget(entry.seq for entry in batch)
        await log.trim(intake.first_undecided())
        await clock.sleep(pool.train_s + pool.weights_s(pool.path.hold))
        if sending is not None:
            await sending
        sending = asyncio.create_task(send(broker, pool, clock, version + 1))
        if version >= WARM:
            times.steps.append(clock.now() - started)
            times.waits.append(waited)
            times.lags += [version - int(entry.group.source) for entry in batch if entry.group]
    for engine, earlier in zip(engines, before, strict=True):
        spent = [now - then for now, then in zip(engine.seconds(), earlier, strict=True)]
        for kept, value in zip(
            (times.decoding, times.swapping, times.sequences), spent, strict=True
        ):
            kept.append(value)
    reading.cancel()
    with suppress(asyncio.CancelledError):
        await reading
    return times


async def send(broker: Broker, pool: Pool, clock: Clock, version: int) -> None:
    """Let a version reach the engines."""
    await clock.sleep(pool.weights_s(pool.path.travel))
    await broker.nc.publish(NEW_VERSION, str(version).encode())


@asynccontextmanager
async def generators(url: str, pool: Pool, clock: Clock) -> AsyncIterator[list[Engine]]:
    """Run the engines with the generators in front of them, each with its connection."""
    engines = [Engine(pool, clock) for _ in range(pool.num_engines)]

    async def run(number: int, engine: Engine) -> None:
        async def take(message: Msg) -> None:
            engine.take(int(message.data))

        async with await connect(url, name=f"generator-{number}") as broker:
            await broker.nc.subscribe(NEW_VERSION, cb=take)
            async with asyncio.TaskGroup() as both:
                both.create_task(engine.run())
                both.create_task(generate(broker, engine, number))

    running = [asyncio.create_task(run(*item)) for item in enumerate(engines)]
    try:
        yield engines
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def simulate(url: str, pool: Pool, num_steps: int, speed: float) -> Times:
    """Run a pool for some steps."""
    clock = Clock(speed)
    async with await connect(url, name="learner") as broker:
        await delete_job_streams(broker, SCOPE)
        await create_job_streams(broker, SCOPE, LimitsConfig(task_bytes=1 << 28))
        async with generators(url, pool, clock) as engines:
            return await learn(broker, pool, clock, num_steps, engines)


def row(pool: Pool, times: Times) -> tuple[str, ...]:
    """Describe a run for a table."""
    swapping = times.generators_swapping
    holds = "learner" if times.learner_busy > times.generators_busy + swapping else "generators"
    return (
        f"{pool.generator_gpus} + {pool.learner_gpus}",
        pool.path.name,
        f"η = {pool.bound}",
        f"{times.step_s:.1f} s",
        f"{times.learner_busy:.0%}",
        f"{times.generators_busy:.0%}",
        f"{swapping:.0%}",
        f"{times.mean_sequences:.0f}",
        f"{mean(times.lags):.2f}",
        "both in turn" if pool.bound == 0 else holds,
    )


COLUMNS = (
    "GPUs",
    "weights",
    "bound",
    "step",
    "learner busy",
    "generators decode",
    "swap",
    "sequences",
    "mean lag",
    "held up by",
)


def main() -> None:
    """Parse the arguments, simulate, report."""
    options = parser(__doc__)
    options.add_argument("--speed", type=float, default=20.0, help="simulated seconds in one")
    options.add_argument("--steps", type=int, default=40, help="of a run")
    arguments = options.parse_args()
    if arguments.quick:
        arguments.speed, arguments.steps = 100.0, WARM + 1
    report = Report("gpu_pool", "Simulated H100s: what holds a step up", quick=arguments.quick)
    models = MODELS[:1] if arguments.quick else MODELS
    bounds = (2,) if arguments.quick else BOUNDS
    with tempfile.TemporaryDirectory() as folder, NatsServer(Path(folder)) as server:

        def run(pool: Pool) -> Times:
            return uvloop.run(simulate(server.url, pool, arguments.steps, arguments.speed))

        for model, gpus in zip(models, (8, 32), strict=False):
            even = Pool(model, gpus // 2, gpus // 2, NCCL, 0)
            pools = [replace(even, path=way, bound=eta) for way in (FILES, NCCL) for eta in bounds]
            done = [(pool, run(pool)) for pool in pools]
            report.table(f"{model.name}, {gpus} GPUs", COLUMNS, [row(*one) for one in done])
            by_pool = dict(done)
            step_s = [by_pool[replace(even, path=way, bound=2)].step_s for way in (FILES, NCCL)]
            report.at_least(f"{model.name}: files over nccl, η = 2", step_s[0] / step_s[1], None)
            part = model.tensor_parallel
            splits = [
                replace(even, generator_gpus=some, learner_gpus=gpus - some, bound=2)
                for some in range(part, gpus - part + 1, part)
                if abs(some - gpus / 2) <= gpus / 4
            ]
            shares = [(pool, by_pool.get(pool) or run(pool)) for pool in splits]
            title = f"{model.name}: other divisions of {gpus} GPUs"
            report.table(title, COLUMNS, [row(*one) for one in shares])
            best = min(shares, key=lambda one: one[1].step_s)[1]
            for who, share in (("learner", best.learner_busy), ("engines", best.generators_busy)):
                what = f"{model.name}: {who} busy in the best division"
                report.at_least(what, 100 * share, 95, "%")
    report_caches(report, models[0], quick=arguments.quick)
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
