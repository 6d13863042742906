"""A receiver of weights in a process of its own, which imports little."""

import asyncio
import contextlib
import multiprocessing
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

import torch
from tinkermq.actors.weights.broadcast import BroadcastReceiver
from tinkermq.actors.weights.store import WeightStore
from tinkermq.broker.client.connection import connect
from tinkermq.schemas.wire.errors import NotFoundError
from tinkermq.schemas.wire.subjects import JobScope

WAIT_S = 120.0


@contextlib.contextmanager
def receiver(url: str, scope: JobScope, device: str, num_versions: int) -> Iterator[Connection]:
    """Start a receiver in a process of its own; yield the pipe of its reports."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(
        target=run_receiver, args=(url, scope, device, num_versions, theirs), daemon=True
    )
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        process.kill()
        process.join()


def run_receiver(
    url: str, scope: JobScope, device: str, num_versions: int, pipe: Connection
) -> None:
    """Receive every version and send how long each took."""
    asyncio.run(receive(url, scope, torch.device(device), num_versions, pipe))


async def receive(
    url: str, scope: JobScope, device: torch.device, num_versions: int, pipe: Connection
) -> None:
    async with await connect(url, name="receiver") as broker:
        store = WeightStore(broker, scope, receiver=BroadcastReceiver(broker, scope, device))
        version = -1
        while version < num_versions - 1:
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
