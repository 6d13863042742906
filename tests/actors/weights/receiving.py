"""Receivers as processes of their own: one that follows, and ones that die in a round.

They are forked from a server that has imported torch once; what they have to say goes into a pipe.
"""

import asyncio
import hashlib
import multiprocessing
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal

from tinkermq.actors.weights.broadcast import BroadcastReceiver
from tinkermq.actors.weights.broadcast_group import LocalMember
from tinkermq.actors.weights.store import WeightStore
from tinkermq.actors.weights.tensors import TensorSource
from tinkermq.broker.client.connection import connect
from tinkermq.schemas.wire.errors import NotFoundError
from tinkermq.schemas.wire.subjects import JobScope

from tests.support.models import bytes_of
from tests.support.waiting import PATIENCE_S

MEET_S = 1.0
"""How long members of a group wait for one that does not come."""
DiesAt = Literal["placed", "met"]


def digest(tensors: Mapping[str, TensorSource]) -> str:
    """Return a digest of all bytes, in order."""
    return hashlib.sha256(b"".join(bytes_of(one) for one in tensors.values())).hexdigest()


async def newest(store: WeightStore, version: int = -1) -> tuple[int, dict[str, TensorSource]]:
    """Wait for a newer version and fetch it, as generators do."""
    while True:
        manifest = await store.wait_newer(version, PATIENCE_S)
        if manifest is None:
            raise TimeoutError(f"nothing newer than version {version} came")
        try:
            return manifest.version, await store.fetch(manifest)
        except NotFoundError:
            await asyncio.sleep(0.02)


def follow(url: str, scope: JobScope, pipe: Connection) -> None:
    """Tell the digest of every version."""

    async def run() -> None:
        async with await connect(url, name="follower") as broker:
            store = WeightStore(
                broker, scope, receiver=BroadcastReceiver(broker, scope, meet_s=MEET_S)
            )
            version = -1
            while True:
                version, tensors = await newest(store, version)
                pipe.send((version, digest(tensors)))

    asyncio.run(run())


def die(url: str, scope: JobScope, dies_at: DiesAt) -> None:
    """Take a place in the round of the newest version, and be killed."""

    async def run() -> None:
        async with await connect(url, name="victim") as broker:
            receiver = BroadcastReceiver(broker, scope)
            manifest = await WeightStore(broker, scope, "nccl").wait_newer(-1, PATIENCE_S)
            assert manifest is not None
            place = await receiver._place(manifest)
            if dies_at == "met":
                assert isinstance(receiver._member, LocalMember)
                await asyncio.to_thread(receiver._member._meet, place)
            os.kill(os.getpid(), signal.SIGKILL)

    asyncio.run(run())


@dataclass
class Process:
    """One that runs."""

    process: Any
    pipe: Connection

    async def tell(self) -> tuple[int, str]:
        """Return the next version that it received, and its digest."""
        there = await asyncio.to_thread(self.pipe.poll, PATIENCE_S)
        if not there:
            raise TimeoutError("a receiver received nothing")
        return self.pipe.recv()


@contextmanager
def processes() -> Iterator[Any]:
    """Start receivers by a function that is yielded; they end with the block."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    started: list[Process] = []

    def start(target: Any, *arguments: Any) -> Process:
        ours, theirs = context.Pipe()
        more = (theirs,) if target is follow else ()
        process = context.Process(target=target, args=(*arguments, *more), daemon=True)
        process.start()
        theirs.close()
        started.append(Process(process, ours))
        return started[-1]

    try:
        yield start
    finally:
        for one in started:
            one.process.kill()
            one.process.join()
            one.pipe.close()
