"""Moving weights: publish and load against a plain memory copy and the stock object store.

    python -m benchmarks.weights [--mb 500] [--chunk-mb 1] [--rounds 3] [--part language|stores]

With a language model of 135 million weights: the time from the moment when the learner begins to
copy its weights until the engine of a generator, a process of its own on the same machine, has
drawn the first token with them, while it was idle and while it decoded 16 requests. The limit in
the same run is to write as many bytes to shared memory and to read them once.

With random weights:

One process publishes and loads as learner and generator do, over two connections to a real
nats-server with file storage. Peers in the same run: one copy within memory, BLAKE3 alone (the
digest that every transfer is checked by), SHA-256 alone (by which the stock tools check; on
processors without instructions for it it limits publishing), and put and get of nats-py's
ObjectStore. On one machine the learner leaves what it publishes in shared memory, where the
generator maps it; from memory to memory it goes by gloo, in the place of NCCL. The last column is
the longest time for which the event loop stood still.
"""

import argparse
import asyncio
import hashlib
import io
import itertools
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import uvloop
from tinkermq.actors.engine.engine import Engine, Sampling
from tinkermq.actors.engine.transformers.transformers_engine import TransformersEngine
from tinkermq.actors.policy.model_folder import load_causal_lm
from tinkermq.actors.policy.policies import MAIN
from tinkermq.actors.training.parallel import snapshot
from tinkermq.actors.weights.broadcast import BroadcastReceiver, Sender
from tinkermq.actors.weights.follower import WeightFollower
from tinkermq.actors.weights.history import joined
from tinkermq.actors.weights.shared_memory import sweep
from tinkermq.actors.weights.store import NEWEST, WeightStore
from tinkermq.actors.weights.tensors import TensorBytes
from tinkermq.broker.client.connection import connect
from tinkermq.broker.client.rpc import Service
from tinkermq.broker.jetstream.objects import digest_of
from tinkermq.broker.jetstream.streams import create_job_streams
from tinkermq.broker.nats_server import NatsServer
from tinkermq.schemas.config.job import LimitsConfig
from tinkermq.schemas.wire.subjects import JobScope
from transformers import PreTrainedModel

from benchmarks.engine import CONTEXT, SMALL, save
from benchmarks.report import Report, parser
from benchmarks.sizes import ALL_CORES, language_model

SCOPE = JobScope("local", "bench")
NUM_TENSORS = 50
Timed = tuple[float, float]  # seconds, longest standstill of the loop


@asynccontextmanager
async def loop_lag() -> AsyncIterator[list[float]]:
    """Measure the longest standstill of the event loop."""
    lags = [0.0]

    async def watch() -> None:
        while True:
            started = time.perf_counter()
            await asyncio.sleep(0.001)
            lags[0] = max(lags[0], time.perf_counter() - started - 0.001)

    watching = asyncio.create_task(watch())
    try:
        yield lags
    finally:
        watching.cancel()


async def timed(work: Callable[[], Awaitable[Any]]) -> tuple[Timed, Any]:
    """Return how long `work` took, how long it held up the loop, and its result."""
    async with loop_lag() as lags:
        started = time.perf_counter()
        result = await work()
        return (time.perf_counter() - started, lags[0]), result


def make_tensors(num_bytes: int) -> dict[str, TensorBytes]:
    """Return random weights cut into tensors."""
    size = num_bytes // NUM_TENSORS // 4 * 4
    rng = np.random.default_rng(0)
    return {
        f"layer.{i}": TensorBytes("float32", (size // 4,), memoryview(rng.bytes(size)))
        for i in range(NUM_TENSORS)
    }


async def run_store(store: WeightStore, reader: WeightStore, version: int, tensors: Any) -> Any:
    """Publish and load one version; return both times."""
    published, manifest = await timed(lambda: store.publish(version, tensors))
    loaded, fetched = await timed(lambda: reader.fetch(manifest))
    assert fetched["layer.7"].data == tensors["layer.7"].data
    await store.remove(version)
    del fetched
    sweep(0.0)
    return published, loaded


async def run_stock(broker: Any, payload: bytes) -> Any:
    """Put and get with nats-py's own object store, reading into memory through a buffer."""
    objects = await broker.nc.jetstream().object_store(SCOPE.object_weights)
    put, _ = await timed(lambda: objects.put("stock", payload))
    got, _ = await timed(lambda: objects.get("stock", writeinto=io.BytesIO()))
    await objects.delete("stock")
    return put, got


def whole(tensors: Mapping[str, TensorBytes]) -> memoryview:
    """Return a version as it would travel whole; it must be in the machine's memory."""
    views: list[memoryview] = []
    for name, tensor in tensors.items():
        assert isinstance(tensor.data, memoryview), f"{name} is on an accelerator"
        views.append(tensor.data)
    return joined(views)


def run_memory(payload: bytes) -> dict[str, float]:
    """Return the seconds of one copy into memory that is there, and of one digest."""
    source = np.frombuffer(payload, np.uint8)
    target = np.zeros_like(source)
    started = time.perf_counter()
    target[:] = source
    copied = time.perf_counter()
    hashlib.sha256(payload).hexdigest()
    stock = time.perf_counter()
    digest_of([memoryview(payload)])
    return {
        "memory copy": copied - started,
        "SHA-256 alone": stock - copied,
        "BLAKE3 alone": time.perf_counter() - stock,
    }


async def run(arguments: argparse.Namespace) -> dict[str, list[Timed]]:
    """Run all peers in turns; return their times by name."""
    times: dict[str, list[Timed]] = {}
    tensors = make_tensors(arguments.mb << 20)
    payload = whole(tensors).tobytes()
    with tempfile.TemporaryDirectory() as folder, NatsServer(Path(folder) / "nats") as server:
        async with (
            await connect(server.url, name="learner") as learner,
            await connect(server.url, name="generator") as generator,
        ):
            await create_job_streams(learner, SCOPE, LimitsConfig(), weights_bytes=64 << 30)
            chunk_bytes = int(arguments.chunk_mb * 2**20)
            room = 4 * len(payload)
            reader = WeightStore(generator, SCOPE)
            beside = WeightStore(generator, SCOPE, shared_bytes=room)
            object_store = WeightStore(learner, SCOPE, chunk_bytes=chunk_bytes)
            shared = WeightStore(learner, SCOPE, chunk_bytes=chunk_bytes, shared_bytes=room)
            fast = WeightStore(learner, SCOPE, chunk_bytes=chunk_bytes, sha256=False)
            fast_shared = WeightStore(
                learner, SCOPE, chunk_bytes=chunk_bytes, shared_bytes=room, sha256=False
            )
            files = Path(folder) / "weights"
            file_store = WeightStore(learner, SCOPE, "file", folder=files)
            file_reader = WeightStore(generator, SCOPE, "file", folder=files)
            sender = Sender(learner, SCOPE, Path(folder) / "held")
            service = await Service.start(learner, name="learner", description="a learner")
            await sender.open(service)
            serving = asyncio.create_task(sender.serve())
            memory_store = WeightStore(learner, SCOPE, "nccl", holder=sender)
            member = WeightStore(generator, SCOPE, receiver=BroadcastReceiver(generator, SCOPE))
            stores = {
                "object": (object_store, reader),
                "one machine": (shared, beside),
                "no SHA-256": (fast, reader),
                "one machine, no SHA-256": (fast_shared, beside),
                "file": (file_store, file_reader),
                "memory to memory": (memory_store, member),
            }
            for version in range(arguments.rounds):
                for name, seconds in run_memory(payload).items():
                    times.setdefault(name, []).append((seconds, 0.0))
                for name, (store, taking) in stores.items():
                    published, loaded = await run_store(store, taking, version, tensors)
                    times.setdefault(f"{name}: publish", []).append(published)
                    times.setdefault(f"{name}: load", []).append(loaded)
                put, got = await run_stock(learner, payload)
                times.setdefault("stock object store: put", []).append(put)
                times.setdefault("stock object store: get", []).append(got)
            serving.cancel()
            await service.stop(0)
    return times


def write_report(times: dict[str, list[Timed]], mb: int, report: Report) -> None:
    """Write the table, medians over the rounds, and the figures."""
    seconds = {name: median(taken for taken, _ in rows) for name, rows in times.items()}
    rows: list[list[str]] = []
    for name, taken in seconds.items():
        row = [name, f"{mb / taken:,.0f}", f"{seconds['memory copy'] / taken:.2f}"]
        if ":" in name:
            standstill_s = max(lag for _, lag in times[name])
            row += [f"{_peer(seconds, name) / taken:.1f}", f"{standstill_s * 1000:.0f} ms"]
        rows.append(row + [""] * (5 - len(row)))
    columns = ["", "MB/s", "of a memory copy", "times the stock store", "loop stood still"]
    report.table(f"{mb} MB of weights", columns, rows)
    for what in ("publish", "load"):
        name = f"object: {what}"
        report.at_least(f"{name} against the stock store", _peer(seconds, name) / seconds[name], 1)
    stock_s = seconds["stock object store: put"] + seconds["stock object store: get"]
    ways = {
        "object": "on two machines",
        "no SHA-256": "on two machines, no SHA-256",
        "one machine": "on one machine",
        "one machine, no SHA-256": "on one machine, no SHA-256",
    }
    for way, where in ways.items():
        total = seconds[f"{way}: publish"] + seconds[f"{way}: load"]
        report.at_least(f"publish and load {where}, against the stock store", stock_s / total, 10)


def _peer(seconds: dict[str, float], name: str) -> float:
    return seconds[f"stock object store: {'put' if 'publish' in name or 'put' in name else 'get'}"]


# -- from the learner's weights to the first token -------------------------------------------------

NUM_RUNNING = 16
WAYS: dict[str, tuple[Any, int]] = {
    "object, idle": ("object", 0),
    f"object, {NUM_RUNNING} requests decoding": ("object", NUM_RUNNING),
    "file, idle": ("file", 0),
}
"""Transport, and how many requests the generator decodes meanwhile."""
ROOM_BYTES = 4 << 30


@dataclass
class Arrival:
    """When one version was where, in seconds since the learner began to copy its weights."""

    copied: float
    published: float
    loaded: float
    first_token: float


async def serve_generator(url: str, folder: str, num_running: int, weights: str | None) -> None:
    """Follow the versions, and print when each has come and drawn its first token, for ever."""
    torch.set_num_threads(ALL_CORES)
    slots = num_running + 1
    engine = await TransformersEngine.start(folder, max_slots=slots, max_context=CONTEXT)
    async with await connect(url, name="generator") as broker, asyncio.TaskGroup() as tasks:
        transport = "file" if weights else "object"
        store = WeightStore(broker, SCOPE, transport, folder=weights, shared_bytes=ROOM_BYTES)
        follower = WeightFollower(store, {MAIN: engine}, "keep")
        tasks.create_task(follower.follow_versions())
        for number in range(num_running):
            tasks.create_task(decode_on(engine, f"running-{number}"))
        print("ready", flush=True)
        for version in itertools.count():
            await follower.wait_for(version)
            loaded = time.time()
            drawn = await engine.generate([9, 10, 11], Sampling(1), request_id="first")
            assert drawn.versions[0] == version
            told = {"version": version, "loaded": loaded, "first_token": drawn.first_token}
            print(json.dumps(told), flush=True)


async def decode_on(engine: Engine, name: str) -> None:
    """Keep one request running, for ever."""
    while True:
        await engine.generate([9, 10, 11], Sampling(CONTEXT - 3), request_id=name)


async def publish_versions(
    url: str, model: PreTrainedModel, folder: str, way: str, rounds: int
) -> list[Arrival]:
    """Publish versions to a generator of its own process, one after the other."""
    transport, num_running = WAYS[way]
    weights = tempfile.mkdtemp()
    generator = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "benchmarks.weights", "--serve-generator", url),
        *("--model", folder, "--running", str(num_running)),
        *(("--weights", weights) if transport == "file" else ()),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": str(ALL_CORES)},
    )
    assert generator.stdout is not None
    try:
        assert await generator.stdout.readline() == b"ready\n"
        async with await connect(url, name="learner") as learner:
            await create_job_streams(learner, SCOPE, LimitsConfig(), weights_bytes=64 << 30)
            store = WeightStore(learner, SCOPE, transport, folder=weights, shared_bytes=ROOM_BYTES)
            return [
                await publish_one(store, model, version, generator.stdout)
                for version in range(rounds)
            ]
    finally:
        if generator.returncode is None:
            generator.kill()
        await generator.wait()
        shutil.rmtree(weights)


async def publish_one(
    store: WeightStore, model: PreTrainedModel, version: int, told: asyncio.StreamReader
) -> Arrival:
    """Publish one version as a learner does; return when it was where."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1 + 1e-6)
    began = time.time()
    tensors = await asyncio.to_thread(snapshot, {MAIN: model}, torch.float32)
    copied = time.time()
    await store.make_room(tensors, set())
    await store.publish(version, tensors)
    published = time.time()
    await store.keep(set(), newest=NEWEST)
    arrived = json.loads(await told.readline())
    assert arrived["version"] == version
    return Arrival(
        copied - began,
        published - began,
        arrived["loaded"] - began,
        arrived["first_token"] - began,
    )


def write_and_read(num_bytes: int) -> float:
    """Return the seconds in which so many bytes are written to shared memory and read once."""
    payload = np.ones(num_bytes, np.uint8).data
    into = np.zeros(num_bytes, np.uint8).data
    with tempfile.TemporaryFile(dir="/dev/shm", buffering=0) as file:
        started = time.perf_counter()
        written = read = 0
        while written < num_bytes:
            written += file.write(payload[written : written + (16 << 20)]) or 0
        file.seek(0)
        while read < num_bytes:
            read += file.readinto(into[read : read + (16 << 20)]) or 0
        return time.perf_counter() - started


def first_tokens(report: Report, *, quick: bool) -> None:
    """Measure the time to the first token of a version, of a language model unless `quick`."""
    torch.set_num_threads(ALL_CORES)
    rounds = 2 if quick else 5
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory() as root:
        folder = save(Path(root) / "small", **SMALL) if quick else language_model()
        model = load_causal_lm(folder, dtype=torch.float32)
        num_bytes = sum(weight.nbytes for weight in model.parameters())
        limit_s = median(write_and_read(num_bytes) for _ in range(3))
        for way in WAYS:
            with NatsServer(Path(root) / way) as server:
                arrivals = uvloop.run(publish_versions(server.url, model, folder, way, rounds))
            later = arrivals[1:]  # the first finds memory that was never used
            rows.append([way, *_stages(later)])
            total = median(one.first_token for one in later)
            goal = 1.0 if way == "object, idle" else None
            report.at_most(f"{way}: publish to first new token", total, goal, "s")
    columns = ["transport, generator", "copied", "published", "loaded", "first token", "runs"]
    title = f"Seconds until a version of {num_bytes / 1e6:,.0f} MB was where"
    report.table(title, columns, rows)
    report.note(f"Writing as many bytes to shared memory and reading them: {limit_s:.2f} s.")


def _stages(arrivals: list[Arrival]) -> list[str]:
    stages = ("copied", "published", "loaded", "first_token")
    medians = [median(getattr(one, stage) for one in arrivals) for stage in stages]
    runs = " ".join(f"{one.first_token:.2f}" for one in arrivals)
    return [*(f"{seconds:.2f}" for seconds in medians), runs]


def main() -> None:
    """Parse the arguments, measure, report."""
    options = parser(__doc__)
    options.add_argument("--part", choices=["language", "stores"], help="only this one")
    options.add_argument("--mb", type=int, default=500, help="size of the random weights")
    options.add_argument("--chunk-mb", type=float, default=1.0, help="size of one message")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--serve-generator", help=argparse.SUPPRESS)
    options.add_argument("--model", help=argparse.SUPPRESS)
    options.add_argument("--running", type=int, default=0, help=argparse.SUPPRESS)
    options.add_argument("--weights", help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.serve_generator:
        told = arguments.model, arguments.running, arguments.weights
        uvloop.run(serve_generator(arguments.serve_generator, *told))
        return
    if arguments.quick:
        arguments.mb, arguments.rounds = 20, 1
    report = Report("weights", "weights against memory and stock store", quick=arguments.quick)
    if arguments.part != "stores":
        first_tokens(report, quick=arguments.quick)
    if arguments.part != "language":
        write_report(uvloop.run(run(arguments)), arguments.mb, report)
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
