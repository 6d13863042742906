"""Moving weights: publish and load against a plain memory copy and the stock object store.

    python -m benchmarks.weights [--mb 500] [--chunk-mb 1] [--rounds 3]

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
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import uvloop
from tinkermq.actors.weights.broadcast_receiver import BroadcastReceiver
from tinkermq.actors.weights.broadcast_sender import Sender
from tinkermq.broker.client.connection import connect
from tinkermq.broker.client.rpc import Service
from tinkermq.broker.jetstream.objects import digest_of
from tinkermq.broker.jetstream.streams import create_job_streams
from tinkermq.broker.nats_server import NatsServer
from tinkermq.broker.weights.history import joined
from tinkermq.broker.weights.payloads import TensorBytes
from tinkermq.broker.weights.shared_memory import sweep
from tinkermq.broker.weights.store import WeightStore
from tinkermq.schemas.config.job import LimitsConfig
from tinkermq.schemas.wire.subjects import JobScope

from benchmarks.report import Report, parser

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
            file_store = WeightStore(learner, SCOPE, "file", folder=Path(folder) / "weights")
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
                "file": (file_store, reader),
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
        share = seconds["SHA-256 alone"] / seconds[name]
        report.at_least(f"{name} against SHA-256 alone", share, None)
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
    total = seconds["object: publish"] + seconds["object: load"]
    report.at_most("publish and load, in memory copies", total / seconds["memory copy"], None)


def _peer(seconds: dict[str, float], name: str) -> float:
    return seconds[f"stock object store: {'put' if 'publish' in name or 'put' in name else 'get'}"]


def main() -> None:
    """Parse the arguments, measure, report."""
    options = parser(__doc__)
    options.add_argument("--mb", type=int, default=500, help="size of the weights")
    options.add_argument("--chunk-mb", type=float, default=1.0, help="size of one message")
    options.add_argument("--rounds", type=int, default=3)
    arguments = options.parse_args()
    if arguments.quick:
        arguments.mb, arguments.rounds = 20, 1
    report = Report("weights", "weights against memory and stock store", quick=arguments.quick)
    write_report(uvloop.run(run(arguments)), arguments.mb, report)
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
