"""A machine whose node falls silent after it joined drains before it is ended."""

import asyncio
import time
from dataclasses import dataclass, field

from tinkermq.actors.scheduler.lease import Timing
from tinkermq.actors.scheduler.machines.keeper import Demand, MachineKeeper
from tinkermq.actors.scheduler.machines.source import Machine, MachineNames
from tinkermq.actors.scheduler.nodes import Nodes
from tinkermq.actors.scheduler.placement import UserShares
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.jetstream.kv import Bucket
from tinkermq.schemas.machines import MachinesConfig
from tinkermq.schemas.node import NodeStatus
from tinkermq.schemas.wire.errors import PlacementError
from tinkermq.schemas.wire.message import Empty
from tinkermq.schemas.wire.subjects import BUCKET_NODES

from tests.support.waiting import eventually, until

URL = "nats://h:1"
SILENT, NEVER_CAME = MachineNames(URL).free([], 2)


@dataclass
class Cluster:
    """Machines that run, whatever is done to them."""

    names: list[str]
    started: dict[str, float | None] = field(default_factory=dict[str, float | None])
    looks: int = 0
    releases: list[tuple[str, bool]] = field(default_factory=list[tuple[str, bool]])

    async def list_machines(self) -> list[Machine]:
        self.looks += 1
        return [
            Machine(name, name, "asked" if at is None else "started", at)
            for name in self.names
            for at in [self.started.get(name, 1000.0)]
        ]

    async def request_machine(self, name: str) -> None:
        raise PlacementError(f"there is no room for {name}")

    async def release_machine(self, machine: Machine, *, drain: bool) -> None:
        self.releases.append((machine.name, drain))

    def of(self, name: str) -> list[bool]:
        """With and without draining: how a machine was released."""
        return [drain for released, drain in self.releases if released == name]


def no_demand() -> Demand:
    """No job waits."""
    return Demand((), (), UserShares(), frozenset(), 0.0)


async def test_a_node_that_falls_silent_drains_and_is_ended_if_that_takes_too_long(
    own_broker: Broker,
) -> None:
    pool, cluster = Nodes(own_broker, Timing()), Cluster([SILENT])
    await pool.records.open(lambda: None)
    records = Bucket(own_broker, BUCKET_NODES, NodeStatus)
    await records.put(SILENT, NodeStatus(node=SILENT, host="h", slots=2, time=time.time()))
    config = MachinesConfig(kind="slurm", least=2, join_s=0.2, look_s=0.01, drain_s=1)
    keeper = MachineKeeper(own_broker, config, URL, cluster, pool)

    async def node_is(there: bool) -> bool:
        await pool.refresh()
        return bool(pool.nodes()) == there

    await eventually(lambda: node_is(True), "the node")
    keeping = asyncio.create_task(keeper.run(no_demand, lambda: True))
    await until(lambda: cluster.looks > 1, "a look at the cluster")
    cluster.names.append(NEVER_CAME)
    await until(lambda: cluster.of(NEVER_CAME) != [], "what never came to be released")
    assert cluster.of(NEVER_CAME)[0] is False
    assert cluster.of(SILENT) == []
    await records.delete(SILENT)
    await eventually(lambda: node_is(False), "the node to be gone")
    await until(lambda: cluster.of(SILENT) != [], "the silent node to be released")
    assert cluster.of(SILENT)[0] is True, "no time to drain"

    async def is_told() -> bool:
        return "was silent for 0.2 s" in (await keeper.answer(Empty())).trouble

    await eventually(is_told, "the reason")
    await until(lambda: False in cluster.of(SILENT), "what does not drain to be ended")
    keeping.cancel()
    await pool.records.close()


async def test_what_ran_before_the_scheduler_has_time_to_join_and_drains(
    own_broker: Broker,
) -> None:
    pool, cluster = Nodes(own_broker, Timing()), Cluster([SILENT])
    config = MachinesConfig(kind="slurm", least=1, join_s=1, look_s=0.01, drain_s=1)
    keeper = MachineKeeper(own_broker, config, URL, cluster, pool)
    keeping = asyncio.create_task(keeper.run(no_demand, lambda: True))
    await until(lambda: cluster.of(SILENT) != [], "the silent machine to be released")
    assert cluster.of(SILENT)[0] is True, "no time to drain"
    assert cluster.looks > 2, "no time to join"
    await until(lambda: False in cluster.of(SILENT), "what does not drain to be ended")
    keeping.cancel()


async def test_a_job_that_is_requeued_under_its_number_has_the_whole_time_to_join(
    own_broker: Broker,
) -> None:
    pool, cluster = Nodes(own_broker, Timing()), Cluster([SILENT])
    await pool.records.open(lambda: None)
    records = Bucket(own_broker, BUCKET_NODES, NodeStatus)
    await records.put(SILENT, NodeStatus(node=SILENT, host="h", slots=2, time=time.time()))
    config = MachinesConfig(kind="slurm", least=1, join_s=0.2, look_s=0.01, drain_s=1)
    keeper = MachineKeeper(own_broker, config, URL, cluster, pool)

    async def state_is(state: str) -> bool:
        await pool.refresh()
        return [one.state for one in (await keeper.answer(Empty())).machines] == [state]

    async def is_gone() -> bool:
        await pool.refresh()
        return not pool.nodes()

    await pool.refresh()
    keeping = asyncio.create_task(keeper.run(no_demand, lambda: True))
    await eventually(lambda: state_is("here"), "the node")
    cluster.started[SILENT] = None
    await eventually(lambda: state_is("asked"), "the job to wait again")
    await records.delete(SILENT)
    await eventually(is_gone, "the node to be gone")  # with it, the job would have joined at once
    await asyncio.sleep(config.join_s)
    cluster.started[SILENT] = time.time() + 1000  # its time to join has not begun
    await eventually(lambda: state_is("coming"), "the job to run again")
    looks = cluster.looks
    await until(lambda: cluster.looks > looks + 1, "two looks at the cluster")
    assert cluster.of(SILENT) == []
    keeping.cancel()
    await pool.records.close()
