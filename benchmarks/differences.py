"""New weights as differences: bytes under real training, speed of the codec, time to receivers.

    python -m benchmarks.differences [--width 768] [--layers 14] [--steps 8]

A model of about 100 million parameters is trained in float32 with AdamW on random text at two
rates, and each version is published in bfloat16 as a learner does. Peers in the same run: the whole
version, zstandard alone on it, and a copy within memory. Receivers are connections of their own to
a real nats-server, each of which holds the version before; they read each for itself, as on so many
machines, or as actors of one machine, of which one reads for all. The `nccl` transport, here gloo,
brings them the same versions whole, over the loopback interface.
"""

import argparse
import asyncio
import gc
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow
import torch
import uvloop
from tinkermq.actors.policy.tiny_models import make_model
from tinkermq.actors.training.parallel import snapshot
from tinkermq.actors.weights.broadcast import BroadcastReceiver, Sender
from tinkermq.actors.weights.history import apply, encode
from tinkermq.actors.weights.shared_memory import sweep
from tinkermq.actors.weights.store import WeightStore
from tinkermq.actors.weights.tensors import TensorBytes
from tinkermq.broker.client.connection import Broker, connect
from tinkermq.broker.client.rpc import Service
from tinkermq.broker.jetstream.streams import create_job_streams
from tinkermq.broker.nats_server import NatsServer
from tinkermq.schemas.config.job import LimitsConfig
from tinkermq.schemas.config.sections import LearnerConfig
from tinkermq.schemas.weights import Manifest
from tinkermq.schemas.wire.subjects import JobScope

from benchmarks.report import Report, parser
from benchmarks.weights import whole

RATES = {1e-6: 40.0, 1e-5: 10.0}
"""Rate, and how many times smaller than whole weights its differences shall be."""
RECEIVERS = (1, 4, 16)
SHARED_BYTES = 8 << 30
SOONER = 5.0
"""How many times sooner 16 receivers on one machine shall have a difference at the lower rate."""
ROWS, TOKENS = 4, 64


@dataclass
class Trained:
    """Versions of one training run, and what was seen of them."""

    versions: list[memoryview] = field(default_factory=list[memoryview])
    """bfloat16 payloads, of which the last two are kept."""
    changed: list[float] = field(default_factory=list[float])
    """Share of the weights that a step changed."""
    ratios: list[float] = field(default_factory=list[float])
    """How many times smaller its difference is."""


def train(arguments: argparse.Namespace, lr: float) -> Trained:
    """Train some steps, and make the difference of each from the one before."""
    torch.manual_seed(0)
    model = make_model(kind="qwen3", width=arguments.width, layers=arguments.layers, heads=8)
    model.train()
    learner = LearnerConfig()
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=lr,
        betas=learner.betas,
        eps=learner.eps,
        weight_decay=learner.weight_decay,
        fused=True,
    )
    found = Trained([payload_of(model)])
    vocabulary = int(model.config.vocab_size)
    for _ in range(arguments.steps):
        ids = torch.randint(vocabulary, (ROWS, TOKENS))
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.versions = [found.versions[-1], payload_of(model)]
        old, new = (np.frombuffer(one, np.uint16) for one in found.versions)
        found.changed.append(float((old != new).mean()))
        base, target = found.versions
        found.ratios.append(old.nbytes / len(encode(base, target)))
    return found


def payload_of(model: Any) -> memoryview:
    """Return a version as it would travel whole."""
    return whole(snapshot({"": model}, torch.bfloat16))


def gb_per_s(work: Callable[[], Any], num_bytes: int, rounds: int = 3) -> float:
    """Return the speed of `work`, the median of some rounds."""
    took: list[float] = []
    for _ in range(rounds):
        started = time.perf_counter()
        work()
        took.append(time.perf_counter() - started)
    return num_bytes / median(took) / 1e9


def speeds(old: memoryview, new: memoryview) -> dict[str, float]:
    """Return GB/s of weights through the codec and its peers."""
    size, difference = len(new), memoryview(encode(old, new))
    target = np.array(np.frombuffer(old, np.uint8))
    source = np.frombuffer(new, np.uint8)
    zstd: Any = pyarrow.Codec("zstd", compression_level=1)
    packed = zstd.compress(new, asbytes=True)
    return {
        "copy within memory": gb_per_s(lambda: np.copyto(target, source), size),
        "zstandard alone, compress": gb_per_s(lambda: zstd.compress(new, asbytes=True), size),
        "zstandard alone, decompress": gb_per_s(lambda: zstd.decompress(packed, size), len(new)),
        "difference, encode": gb_per_s(lambda: encode(old, new), size),
        "difference, apply": gb_per_s(lambda: apply(difference, target.data), size),
    }


async def spread(broker: Broker, url: str, scope: JobScope, found: Trained) -> dict[int, Any]:
    """Return the seconds until n receivers have a version, whole and as a difference.

    First each for itself, then with one read for all.
    """
    await create_job_streams(broker, scope, LimitsConfig(), weights_bytes=64 << 30)
    manifests = await publish_all(WeightStore(broker, scope), found)
    alone = await fetch_all(url, scope, manifests)
    together = await fetch_all(url, scope, manifests, shared_bytes=SHARED_BYTES)
    return {count: [*alone[count], *together[count]] for count in alone}


async def spread_from_memory(
    broker: Broker, url: str, scope: JobScope, found: Trained
) -> dict[int, Any]:
    """Return the same for the `nccl` transport: in a new group, and in one that is there."""
    await create_job_streams(broker, scope, LimitsConfig(), weights_bytes=64 << 30)
    service = await Service.start(broker, name="learner", description="a learner")
    with tempfile.TemporaryDirectory() as folder:
        sender = Sender(broker, scope, Path(folder))
        await sender.open(service)
        serving = asyncio.create_task(sender.serve())
        manifests = await publish_all(WeightStore(broker, scope, "nccl", holder=sender), found)
        took = await fetch_all(url, scope, manifests)
        serving.cancel()
        await service.stop()
    return took


async def publish_all(store: WeightStore, found: Trained) -> list[Manifest]:
    """Publish the last two versions."""
    return [
        await store.publish(version, {"w": tensor(payload)})
        for version, payload in enumerate(found.versions)
    ]


async def fetch_all(
    url: str, scope: JobScope, manifests: list[Manifest], *, shared_bytes: int = 0
) -> dict[int, Any]:
    """Return the seconds in which n receivers fetch each version, one after the other."""
    took: dict[int, Any] = {}
    for count in RECEIVERS:
        brokers = [await connect(url, name=f"generator-{n}") for n in range(count)]
        receivers = [BroadcastReceiver(one, scope) for one in brokers]
        stores = [
            WeightStore(one, scope, receiver=receiver, shared_bytes=shared_bytes)
            for one, receiver in zip(brokers, receivers, strict=True)
        ]
        seconds: list[float] = []
        for manifest in manifests:
            started = time.perf_counter()
            await asyncio.gather(*(one.fetch(manifest) for one in stores))
            seconds.append(time.perf_counter() - started)
        took[count] = seconds
        for receiver, one in zip(receivers, brokers, strict=True):
            receiver.close()
            await one.close()
        del stores
        gc.collect()
        sweep(0.0)
    return took


def tensor(payload: memoryview) -> Any:
    """Return a payload as one tensor."""
    return TensorBytes("bfloat16", (len(payload) // 2,), payload)


async def measure_spread(
    trained: dict[float, Trained],
) -> tuple[dict[float, dict[int, Any]], dict[int, Any]]:
    """Measure the time to receivers at each rate, and from memory to memory."""
    with tempfile.TemporaryDirectory() as place, NatsServer(Path(place) / "nats") as server:
        async with await connect(server.url, name="learner") as broker:
            took = {
                lr: await spread(broker, server.url, JobScope("local", f"rate{n}"), found)
                for n, (lr, found) in enumerate(trained.items())
            }
            scope = JobScope("local", "memory")
            return took, await spread_from_memory(broker, server.url, scope, trained[1e-6])


def main() -> None:
    """Parse the arguments, measure, and report."""
    options = parser(__doc__)
    options.add_argument("--width", type=int, default=768)
    options.add_argument("--layers", type=int, default=14)
    options.add_argument("--steps", type=int, default=8)
    arguments = options.parse_args()
    if arguments.quick:
        arguments.width, arguments.layers, arguments.steps = 64, 2, 3
    report = Report("differences", "New weights as differences", quick=arguments.quick)
    trained = {lr: train(arguments, lr) for lr in RATES}
    num_bytes = len(trained[1e-6].versions[0])
    report.table(
        f"{num_bytes / 2e6:.0f} M parameters in bfloat16, {num_bytes / 2**20:.0f} MiB",
        ("rate", "changed, first step", "later", "smaller, first step", "later"),
        [
            (
                f"{lr:g}",
                f"{found.changed[0]:.1%}",
                f"{median(found.changed[-3:]):.1%}",
                f"{found.ratios[0]:.0f}×",
                f"{median(found.ratios[-3:]):.0f}×",
            )
            for lr, found in trained.items()
        ],
    )
    for lr, found in trained.items():
        smaller = median(found.ratios[-3:])
        report.at_least(f"bytes at rate {lr:g}, whole over difference", smaller, RATES[lr])
    fast = {lr: speeds(*found.versions) for lr, found in trained.items()}
    report.table(
        "GB of weights per second",
        ("", *(f"rate {lr:g}" for lr in fast)),
        [
            (name, *(f"{one[name]:.2f}" for one in fast.values()))
            for name in next(iter(fast.values()))
        ],
    )
    for what, peer in (("encode", "compress"), ("apply", "decompress")):
        for lr, one in fast.items():
            ratio = one[f"difference, {what}"] / one[f"zstandard alone, {peer}"]
            report.at_least(f"{what} at rate {lr:g} against zstandard alone", ratio, None)
    took, direct = uvloop.run(measure_spread(trained))
    report.table(
        "Seconds until all receivers have a version",
        (
            "receivers",
            "whole",
            *(f"difference at {lr:g}" for lr in took),
            "one read: whole",
            *(f"one read: difference at {lr:g}" for lr in took),
            "whole by gloo, new group",
            "same group",
        ),
        [
            (
                str(count),
                f"{took[1e-6][count][0]:.2f}",
                *(f"{one[count][1]:.2f}" for one in took.values()),
                f"{took[1e-6][count][2]:.2f}",
                *(f"{one[count][3]:.2f}" for one in took.values()),
                *(f"{seconds:.2f}" for seconds in direct[count]),
            )
            for count in RECEIVERS
        ],
    )
    whole_s = took[1e-6][RECEIVERS[-1]][0]
    for which, seconds in zip(("new", "same"), direct[RECEIVERS[-1]], strict=True):
        what = f"{RECEIVERS[-1]} receivers sooner by gloo, {which} group"
        report.at_least(what, whole_s / seconds, None)
    for lr, one in took.items():
        slow, fast_s, _, one_fast_s = one[RECEIVERS[-1]]
        what = f"{RECEIVERS[-1]} receivers sooner, rate {lr:g}"
        target = SOONER if lr == 1e-6 else None
        report.at_least(f"{what}, each for itself", slow / fast_s, None)
        report.at_least(f"{what}, one read over whole for each", slow / one_fast_s, target)
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
