"""What is known of the clocks of nodes, and that nothing else depends on them."""

import re
import time
from dataclasses import replace

import pytest
from tinkermq.actors.scheduler.nodes import RECENT_S, better, read_clock
from tinkermq.broker.client.rpc import Service
from tinkermq.broker.jetstream.kv import Bucket
from tinkermq.clients.cli.doctor import clock_differences
from tinkermq.schemas.node import NodeList, NodeStatus, NodeSync
from tinkermq.schemas.wire.message import Empty
from tinkermq.schemas.wire.subjects import BUCKET_NODES, node

from tests.actors.scheduler.conftest import FAST, Stack
from tests.support.waiting import eventually

pytestmark = pytest.mark.full


@pytest.mark.parametrize(
    ("shown", "took_s", "ahead_s"),
    [
        (1000.1, 0.2, 0.0),  # it was read half-way
        (1005.1, 0.2, 4.9),  # 5 s, give or take 0.1 s
        (997.1, 0.2, -2.9),
        (1000.9, 2.0, 0.0),  # anywhere within the 2 s
    ],
)
def test_a_clock_is_off_by_what_the_way_of_the_answer_leaves_no_doubt_of(
    shown: float, took_s: float, ahead_s: float
) -> None:
    assert read_clock(shown, 1000.0, took_s, 0.0).surely_ahead_s == pytest.approx(ahead_s)


def test_the_answer_that_came_soonest_counts_while_it_is_recent() -> None:
    quick, slow = read_clock(1.0, 0.0, 0.1, at=0.0), read_clock(1.0, 0.0, 2.0, at=1.0)
    assert better(None, slow) == slow
    assert better(quick, slow) == quick
    assert better(slow, quick) == quick
    late = read_clock(1.0, 0.0, 2.0, at=RECENT_S + 1)
    assert better(quick, late) == late


@pytest.mark.parametrize("ahead_s", [3600.0, -3600.0])
async def test_a_node_whose_clock_is_an_hour_off_is_told_and_works_as_any(
    stack: Stack, ahead_s: float
) -> None:
    """It tells its own time in all that it says; the scheduler waits for it as for others."""
    asked: list[NodeSync] = []

    def status() -> NodeStatus:
        return NodeStatus(node="odd", host="h", slots=2, time=time.time() + ahead_s)

    async def sync(request: NodeSync) -> NodeStatus:
        asked.append(request)
        return status()

    await stack.scheduler(replace(FAST, silent_s=3.0))
    records = Bucket(stack.broker, BUCKET_NODES, NodeStatus)
    async with await Service.start(stack.broker, name="odd", description="a node") as service:
        await service.endpoint("sync", node("odd", "sync"), NodeSync, sync)

        async def told() -> list[str]:
            await records.put("odd", status())
            return clock_differences((await stack.ask_for("nodes", Empty(), NodeList)).nodes)

        (off,) = await eventually(told, "a clock that is off")
        side = "ahead of" if ahead_s > 0 else "behind"
        said = re.fullmatch(rf"the clock of odd is ([0-9.]+) s {side} the scheduler's", off)
        assert said is not None, off
        assert abs(float(said[1]) - 3600) < 60
        job = await stack.submit()
        seen = time.monotonic()
        while time.monotonic() - seen < 4:  # a heartbeat is one, whatever it shows
            await told()
            assert (await stack.ask_for("nodes", Empty(), NodeList)).nodes != []
        assert any(one.job == job.job for request in asked for one in request.actors)
