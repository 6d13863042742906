"""Weights from the learner's memory to a receiver's, in a process and on a GPU of its own."""

import asyncio
import contextlib
import multiprocessing
import time
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection

import numpy as np
import torch

from ....broker.client.connection import connect
from ....broker.client.rpc import Service
from ....broker.jetstream.streams import create_job_streams, create_shared
from ....broker.programs.server import NatsServer
from ....broker.weights.store import TensorBytes, WeightStore
from ....schemas.config.job import LimitsConfig
from ....schemas.wire.errors import DeadlineError, NotFoundError
from ....schemas.wire.subjects import JobScope
from ...broadcast.receiver import BroadcastReceiver
from ...broadcast.sender import Sender
from ...models.devices import own_device
from ..figures import Figure, Found, Setting

_SCOPE = JobScope("local", "acceptance")
_NUM_VERSIONS = 4
_WAIT_S = 60.0


def memory_to_memory(setting: Setting) -> Found:
    """Publish versions; the receiver refuses any whose fingerprint differs."""
    num_bytes = 1 << (30 if setting.on_gpu else 22)
    num_gpus = torch.cuda.device_count()
    device = "cuda:1" if num_gpus > 1 else "cpu"  # NCCL takes one member on each GPU
    with NatsServer(setting.folder / "nats") as server:
        seconds = asyncio.run(_send(server.url, setting, device, num_bytes))
    best_s = min(seconds[1:])  # the first version forms the group
    between = "from GPU to GPU by NCCL" if num_gpus > 1 else "from memory to memory by gloo"
    return Found(
        [
            Figure("versions", len(seconds), "the same to the bit", at_least=_NUM_VERSIONS),
            Figure("received", num_bytes / best_s / 1e6, "MB/s"),
        ],
        {"weights travelled": between},
    )


async def _send(url: str, setting: Setting, device: str, num_bytes: int) -> list[float]:
    """Publish versions to one receiver; return the seconds from publishing to having each."""
    words = np.random.default_rng(0).integers(0, 255, num_bytes, np.uint8)
    async with _opened(url, setting) as store, _receiver(url, device) as pipe:
        took: list[float] = []
        for version in range(_NUM_VERSIONS):
            words[: 1 << 20] += 1
            await store.publish(
                version, {"weights": TensorBytes("bfloat16", (num_bytes // 2,), words.data)}
            )
            seconds = await asyncio.to_thread(_told, pipe, version)
            took.append(seconds)
        return took


@contextlib.asynccontextmanager
async def _opened(url: str, setting: Setting) -> AsyncIterator[WeightStore]:
    """Serve weights as a learner does."""
    async with await connect(url, name="acceptance") as broker:
        await create_shared(broker)
        await create_job_streams(broker, _SCOPE, LimitsConfig())
        sender = Sender(broker, _SCOPE, setting.folder / "weights", own_device())
        service = await Service.start(broker, name="learner", description="the sender of a check")
        await sender.open(service)
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(sender.serve())
            yield WeightStore(broker, _SCOPE, "nccl", holder=sender)
            serving.cancel()
        await service.stop(0)


@contextlib.asynccontextmanager
async def _receiver(url: str, device: str) -> AsyncIterator[Connection]:
    """Start a receiver in a process of its own; yield what it tells."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_follow, args=(url, device, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        process.kill()
        process.join()


def _told(pipe: Connection, version: int) -> float:
    if not pipe.poll(_WAIT_S):
        raise DeadlineError(f"version {version} was not received in {_WAIT_S:g} s")
    found, seconds = pipe.recv()
    return seconds if found == version else _told(pipe, version)


def _follow(url: str, device: str, pipe: Connection) -> None:
    """Receive every version and tell how long each took."""
    asyncio.run(_receive(url, torch.device(device), pipe))


async def _receive(url: str, device: torch.device, pipe: Connection) -> None:
    async with await connect(url, name="receiver") as broker:
        receiver = BroadcastReceiver(broker, _SCOPE, device)
        store = WeightStore(broker, _SCOPE, receiver=receiver)
        version = -1
        while version < _NUM_VERSIONS - 1:
            version = await _fetched(store, version, pipe)


async def _fetched(store: WeightStore, version: int, pipe: Connection) -> int:
    manifest = await store.wait_newer(version, _WAIT_S)
    if manifest is None:
        raise DeadlineError(f"nothing newer than version {version} came in {_WAIT_S:g} s")
    started = time.perf_counter()
    with contextlib.suppress(NotFoundError):
        await store.fetch(manifest)
        pipe.send((manifest.version, time.perf_counter() - started))
    return manifest.version
