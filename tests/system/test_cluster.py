"""A cluster of three servers and two nodes loses one of each for a while in the middle of a run."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.support.cluster import Cluster
from tests.support.configs import small_job
from tests.support.jobs import Job
from tests.support.proofs import assert_every_task_once, assert_replay_is_identical
from tests.support.waiting import eventually

pytestmark = [pytest.mark.faults, pytest.mark.long]

LONG_S = 300.0


@pytest_asyncio.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    """A cluster of the test's own."""
    async with Cluster(tmp_path) as made:
        yield made


async def test_a_server_is_killed_and_a_node_cut_off_until_it_is_missed_and_nothing_is_lost(
    cluster: Cluster, model: Path
) -> None:
    mended = cluster.games / "mended"
    slow = {"delay_s": 2.0, "until": str(mended)}  # it must not be over before the node is back
    env = {"game": "tests.support.games:SlowBandit", "kwargs": slow, "num_val": 0}
    config = small_job(model, env=env, generator={"count": 2}, training={"num_steps": 60})
    job = await cluster.submit_from_client(config)
    told = await job.until_step(3, LONG_S)
    leader = await cluster.leader_of(job.scope.stream_rollout)
    cluster.kill(leader)
    await job.until_step(told.step + 3, LONG_S)
    where = await places(job)
    away = where["generator-1"]
    assert {away, where["learner"]} == {"node-1", "node-2"}
    cluster.network.cut(away)
    await placed(job, "")  # a node is missed after ten seconds
    cluster.network.mend(away)
    await placed(job, away)
    assert await cluster.leader_of(job.scope.stream_rollout) != leader
    mended.touch()
    await job.until("COMPLETED", deadline_s=LONG_S)
    await assert_every_task_once(job)
    await assert_replay_is_identical(job)
    late = await cluster.submit_from_client(small_job(model, training={"num_steps": 4}))
    await late.until("COMPLETED", deadline_s=LONG_S)
    cluster.start_server(leader)
    for stream in (job.scope.stream_rollout, late.scope.stream_rollout):
        await eventually(lambda of=stream: cluster.has_all(leader, of), f"{leader} to catch up")


async def places(job: Job) -> dict[str, str]:
    """Return the node of each actor, empty for one that waits for a node."""
    return {actor.name: actor.node or "" for actor in (await job.read()).actors}


async def placed(job: Job, node: str) -> None:
    """Wait until the second generator is on a node, or on none."""

    async def there() -> bool:
        return (await places(job))["generator-1"] == node

    await job.eventually(there, f"the generator to be on {node or 'no node'}", LONG_S)
