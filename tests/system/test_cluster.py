"""A cluster of three servers and two nodes loses a server and a link in the middle of a run."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.cluster import Cluster
from tests.configs import small_job
from tests.proofs import assert_every_task_once, assert_replay_is_identical

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]

SLOW = {"game": "tests.games:SlowBandit", "kwargs": {"delay_s": 0.1}, "num_val": 0}
CUT_S = 5.0
LONG_S = 300.0


@pytest_asyncio.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    """A cluster of the test's own."""
    async with Cluster(tmp_path) as made:
        yield made


async def test_a_server_is_killed_and_a_link_cut_and_nothing_is_lost(
    cluster: Cluster, model: Path
) -> None:
    config = small_job(model, env=SLOW, generator={"count": 2}, training={"num_steps": 24})
    job = await cluster.submit_from_client(config)
    told = await job.until_step(3, LONG_S)
    leader = await cluster.leader_of(job.scope.stream_rollout)
    cluster.kill(leader)
    told = await job.until_step(told.step + 3, LONG_S)
    record = await job.read()
    assert {actor.node for actor in record.actors} == {"node-1", "node-2"}
    cluster.network.cut("node-2")
    await asyncio.sleep(CUT_S)
    cluster.network.mend("node-2")
    await job.until_step(told.step + 3, LONG_S)
    assert await cluster.leader_of(job.scope.stream_rollout) != leader
    await job.until("COMPLETED", deadline_s=LONG_S)
    await assert_every_task_once(job)
    await assert_replay_is_identical(job)
    late = await cluster.submit_from_client(small_job(model, training={"num_steps": 4}))
    await late.until("COMPLETED", deadline_s=LONG_S)
