"""Nodes that only answer: as many as asked for, in one process, over one connection.

    python -m benchmarks.many_nodes NATS_URL COUNT SLOTS

Each says over real messages what a real node says: its record every two seconds and when it
changes, an answer to each sync, and that every actor it was asked for runs.
"""

import asyncio
import sys
import time

import uvloop
from tinkermq.broker.client.connection import Broker, connect
from tinkermq.broker.client.rpc import Service
from tinkermq.broker.jetstream.kv import Bucket
from tinkermq.schemas.node import ActorStatus, NodeStatus, NodeSync, WantedActor
from tinkermq.schemas.wire.subjects import BUCKET_NODES, node

RECORD_S = 2.0


class SimulatedNode:
    """A node whose actors all run."""

    def __init__(self, broker: Broker, name: str, slots: int) -> None:
        self.name = name
        self._slots = slots
        self._records = Bucket(broker, BUCKET_NODES, NodeStatus)
        self._actors: list[WantedActor] = []
        self._changed = asyncio.Event()

    def status(self) -> NodeStatus:
        """Return what a real node would."""
        half = self._slots // 2
        return NodeStatus(
            node=self.name,
            host=self.name,
            slots=self._slots,
            groups=[list(range(half)), list(range(half, self._slots))],
            actors=[
                ActorStatus(
                    user=one.user,
                    job=one.job,
                    name=one.name,
                    slots=one.slots,
                    devices=one.devices,
                    attempt=one.attempt,
                    state="running",
                )
                for one in self._actors
            ],
            time=time.time(),
        )

    async def sync(self, request: NodeSync) -> NodeStatus:
        """Run what is asked for."""
        if request.actors != self._actors:
            self._actors = request.actors
            self._changed.set()
        return self.status()

    async def run(self, service: Service, first_s: float) -> None:
        """Answer and write the record for ever."""
        await service.endpoint("sync", node(self.name, "sync"), NodeSync, self.sync)
        await asyncio.sleep(first_s)
        while True:
            self._changed.clear()
            await self._records.put(self.name, self.status())
            try:
                await asyncio.wait_for(self._changed.wait(), RECORD_S)
            except TimeoutError:
                continue


async def main(url: str, count: int, slots: int) -> None:
    """Be `count` nodes of `slots` slots each until this process is ended."""
    async with (
        await connect(url, name="nodes") as broker,
        await Service.start(broker, name="nodes", description="Simulated nodes") as service,
        asyncio.TaskGroup() as group,
    ):
        for number in range(count):
            simulated = SimulatedNode(broker, f"node-{number:04d}", slots)
            group.create_task(simulated.run(service, RECORD_S * number / count))


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
