"""Weights from the learner's memory to a receiver's, in a process and on a GPU of its own."""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from statistics import median

import pytest
import torch
from tinkermq.actors.policy.devices import own_device
from tinkermq.actors.policy.policies import MAIN
from tinkermq.actors.training.parallel import snapshot, snapshot_bytes
from tinkermq.actors.weights.broadcast import Sender
from tinkermq.actors.weights.store import WeightStore
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.client.rpc import Service
from tinkermq.schemas.wire.subjects import JobScope
from torch import nn

from benchmarks.learner_step import StepSequences, StepWay, let_go, make_trainer
from benchmarks.sizes import SIZES, save_random_weights
from tests.gpu.receiver import next_report, receiver
from tests.gpu.report import Recorder

pytestmark = [pytest.mark.gpu_machine, pytest.mark.timeout(300)]
TIMES = 3
NEEDED_BYTES = 48 * 2**30
"""To train 1.5 B weights while two versions of them are on the GPU."""


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


@pytest.mark.parametrize("where", ["on one GPU", "apart"])
async def test_versions_are_sent_to_the_bit_amid_a_step_and_between_steps(
    where: str,
    own_broker: Broker,
    own_scope: JobScope,
    tmp_path: Path,
    on_gpu: bool,
    record: Recorder,
) -> None:
    """Each is copied between two steps, as a learner does. Receivers check its fingerprint."""
    if where == "on one GPU" and not on_gpu:
        pytest.skip("CUDA IPC maps the memory of a GPU")
    another = "cuda:1" if torch.cuda.device_count() > 1 else "cpu"  # NCCL: one member on each GPU
    device = another if where == "apart" else "cuda:0"
    step, models = training(tmp_path / "model", on_gpu=on_gpu)
    begun = threading.Event()

    def begin_step(number: int) -> None:
        begun.set()
        step(number)

    totals: dict[str, list[float]] = {"idle": [], "amid": []}
    received: list[float] = []
    num_versions = 2 * TIMES + 1
    async with serving(own_broker, own_scope, tmp_path / "weights") as store:
        with receiver(own_broker.url, own_scope, device, num_versions) as pipe:
            for version in range(num_versions):
                copy = await asyncio.to_thread(snapshot, models, torch.bfloat16)
                begun.clear()
                stepping = None
                if version > TIMES:
                    stepping = asyncio.create_task(asyncio.to_thread(begin_step, version))
                    await asyncio.to_thread(begun.wait)
                started = time.perf_counter()
                await store.publish(version, copy)
                received.append(await asyncio.to_thread(next_report, pipe, version))
                totals["idle" if stepping is None else "amid"].append(time.perf_counter() - started)
                if stepping is not None:
                    await stepping
    num_bytes = snapshot_bytes(models, torch.bfloat16)
    rate = num_bytes / min(received[1 : TIMES + 1])  # the first forms the group
    record("by", {"cpu": "gloo", "cuda:0": "CUDA IPC"}.get(device, "NCCL"))
    record("MB/s", rate / 1e6)
    if on_gpu and device == "cpu":  # the machine's memory is not the way between GPUs
        return
    idle, amid = median(totals["idle"][1:]), median(totals["amid"])
    record("weights_bytes_per_s", rate)
    record("send_idle_s", idle)
    record("send_amid_step_s", amid)
    record("send_amid_over_idle", amid / idle)
    assert not on_gpu or amid <= 3 * idle + 0.5


def training(folder: Path, *, on_gpu: bool) -> tuple[Callable[[int], None], dict[str, nn.Module]]:
    """Return a learner's step, which has run once, and the models that it trains."""
    let_go()
    if on_gpu and torch.cuda.mem_get_info()[0] < NEEDED_BYTES:
        pytest.skip("less than 48 GiB of the GPU are free")
    config = SIZES["1.5 B" if on_gpu else "small"]
    longest, num_sequences = (2048, 48) if on_gpu else (64, 4)
    save_random_weights(config, folder)
    dtype = "bfloat16" if on_gpu else "float32"
    way = StepWay(folder, 4 * longest, dtype, "auto", False, 2 * TIMES + 1)
    trainer, batch = make_trainer(way, StepSequences(config.vocab_size, longest, num_sequences))

    def step(number: int) -> None:
        trainer.step(batch, number)

    step(1)
    return step, {MAIN: trainer.model}
