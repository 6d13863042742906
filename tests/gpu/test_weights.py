"""Weights from the learner's memory to a receiver's, in a process and on a GPU of its own."""

import asyncio
import contextlib
import multiprocessing
import time
from collections.abc import AsyncIterator, Callable
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch
from tinkermq.actors.policy.devices import own_device
from tinkermq.actors.weights.broadcast import BroadcastReceiver, Sender
from tinkermq.actors.weights.store import WeightStore
from tinkermq.actors.weights.tensors import TensorBytes
from tinkermq.broker.client.connection import Broker, connect
from tinkermq.broker.client.rpc import Service
from tinkermq.schemas.wire.errors import NotFoundError
from tinkermq.schemas.wire.subjects import JobScope

pytestmark = [pytest.mark.gpu_machine, pytest.mark.timeout(300)]
NUM_VERSIONS = 4
WAIT_S = 60.0


@contextlib.asynccontextmanager
async def serving(broker: Broker, scope: JobScope, folder: Path) -> AsyncIterator[WeightStore]:
    """Serve weights as a learner does."""
    sender = Sender(broker, scope, folder, own_device())
    service = await Service.start(broker, name="learner", description="the sender of a test")
    await sender.open(service)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(sender.serve())
        yield WeightStore(broker, scope, "nccl", holder=sender)
        task.cancel()
    await service.stop(0)


@contextlib.contextmanager
def receiver(url: str, scope: JobScope, device: str):
    """Start a receiver in a process of its own; yield the pipe of its reports."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=run_receiver, args=(url, scope, device, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        process.kill()
        process.join()


def run_receiver(url: str, scope: JobScope, device: str, pipe: Connection) -> None:
    """Receive every version and send how long each took."""
    asyncio.run(receive(url, scope, torch.device(device), pipe))


async def receive(url: str, scope: JobScope, device: torch.device, pipe: Connection) -> None:
    async with await connect(url, name="receiver") as broker:
        store = WeightStore(broker, scope, receiver=BroadcastReceiver(broker, scope, device))
        version = -1
        while version < NUM_VERSIONS - 1:
            manifest = await store.wait_newer(version, WAIT_S)
            assert manifest is not None, f"nothing newer than version {version}"
            started = time.perf_counter()
            with contextlib.suppress(NotFoundError):  # a newer one is there
                await store.fetch(manifest)  # which refuses bytes of another fingerprint
                pipe.send((manifest.version, time.perf_counter() - started))
            version = manifest.version


def next_report(pipe: Connection, version: int) -> float:
    """Return the seconds that a version took to be received."""
    while True:
        assert pipe.poll(WAIT_S), f"version {version} was not received in {WAIT_S:g} s"
        received, seconds = pipe.recv()
        if received == version:
            return seconds


@pytest.mark.parametrize("where", ["on one GPU", "apart"])
async def test_versions_go_from_memory_to_memory_to_the_bit(
    where: str,
    own_broker: Broker,
    own_scope: JobScope,
    tmp_path: Path,
    on_gpu: bool,
    record_property: Callable[[str, object], None],
) -> None:
    num_bytes = 1 << (30 if on_gpu else 22)
    if where == "on one GPU" and not on_gpu:
        pytest.skip("CUDA IPC maps the memory of a GPU")
    another = "cuda:1" if torch.cuda.device_count() > 1 else "cpu"  # NCCL: one member on each GPU
    device = another if where == "apart" else "cuda:0"
    data = np.random.default_rng(0).integers(0, 255, num_bytes, np.uint8)
    seconds: list[float] = []
    async with serving(own_broker, own_scope, tmp_path / "weights") as store:
        with receiver(own_broker.url, own_scope, device) as pipe:
            for version in range(NUM_VERSIONS):
                data[: 1 << 20] += 1
                tensor = TensorBytes("bfloat16", (num_bytes // 2,), data.data)
                await store.publish(version, {"weights": tensor})
                seconds.append(await asyncio.to_thread(next_report, pipe, version))
    rate = num_bytes / min(seconds[1:])  # the first forms the group
    record_property("by", {"cpu": "gloo", "cuda:0": "CUDA IPC"}.get(device, "NCCL"))
    record_property("MB/s", rate / 1e6)
    if device != "cpu" or not on_gpu:  # the machine's memory is not the way between GPUs
        record_property("weights_bytes_per_s", rate)
