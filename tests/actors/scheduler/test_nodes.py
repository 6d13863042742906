"""What the scheduler remembers of nodes does not grow with those that came and went."""

import time

from tinkermq.actors.scheduler.lease import Timing
from tinkermq.actors.scheduler.nodes import Nodes
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.jetstream.kv import Bucket
from tinkermq.schemas.node import NodeStatus
from tinkermq.schemas.wire.subjects import BUCKET_NODES

from tests.support.waiting import eventually


async def test_a_node_that_left_is_silent_for_a_while_and_then_forgotten(
    own_broker: Broker,
) -> None:
    pool = Nodes(own_broker, Timing(silent_s=0.3))
    await pool.records.open(lambda: None)
    status = NodeStatus(node="n1", host="h", slots=2, time=time.time())
    await Bucket(own_broker, BUCKET_NODES, NodeStatus).put("n1", status)

    async def is_silent() -> bool:
        await pool.refresh()
        return pool.silent(["n1"]) == {"n1"}

    await eventually(is_silent, "the node to be silent")
    assert (pool.nodes(), pool.num_known) == ([], 1)

    async def is_forgotten() -> bool:
        await pool.refresh()
        return pool.num_known == 0

    await eventually(is_forgotten, "the node to be forgotten")
    assert await Bucket(own_broker, BUCKET_NODES, NodeStatus).keys() == []
    await pool.records.close()
