"""A pool whose machines are pods; a server of the tests stands for the cluster and runs them."""

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tinkermq.clients.pool import Pool

from tests.support.kubernetes import Kubernetes
from tests.support.on_cluster import SLOW, OnCluster, job_is, machines

pytestmark = pytest.mark.long


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Kubernetes]:
    with Kubernetes(tmp_path / "cluster") as running:
        yield running


@pytest.fixture
async def on_kubernetes(cluster: Kubernetes, tmp_path: Path) -> AsyncIterator[OnCluster]:
    """A pool without a node; after the test it is down and no pod runs."""
    config = {"kind": "kubernetes", "namespace": "lab", "image": "tinkermq"}
    pool = OnCluster(tmp_path, config, {"KUBECONFIG": str(cluster.kubeconfig)})
    yield pool
    await pool.down()
    assert [one for one in cluster.pods.values() if one["status"]["phase"] == "Running"] == []


async def test_a_machine_comes_for_a_job_and_goes_after_it(
    on_kubernetes: OnCluster, model: Path
) -> None:
    async with await on_kubernetes.up() as broker:
        pool = Pool(broker)
        job = await on_kubernetes.submit(pool, model)
        await machines(pool, "here")
        shown = await on_kubernetes.command("pool")
        assert "kubernetes:lab: 0 asked, 0 coming, 1 here" in shown.out
        assert (await job_is(pool, job.job, "COMPLETED", "FAILED")).state == "COMPLETED"
        assert (await machines(pool)).slot_hours > 0


async def test_an_evicted_machine_drains_and_its_job_goes_on_on_another(
    cluster: Kubernetes, on_kubernetes: OnCluster, model: Path
) -> None:
    async with await on_kubernetes.up() as broker:
        pool = Pool(broker)
        job = await on_kubernetes.submit(pool, model, env=SLOW, training={"num_steps": 40})
        await job_is(pool, job.job, "RUNNING")
        (name,) = cluster.pods
        cluster.evict(name)
        await job_is(pool, job.job, "QUEUED")
        done = await job_is(pool, job.job, "COMPLETED", "FAILED")
        assert done.state == "COMPLETED", done.reason
        assert done.losses == 0


async def test_a_scheduler_that_is_killed_again_and_again_asks_for_no_machine_twice(
    cluster: Kubernetes, on_kubernetes: OnCluster, model: Path
) -> None:
    async with await on_kubernetes.up(most=3) as broker:
        pool = Pool(broker)
        jobs = [await on_kubernetes.submit(pool, model) for _ in range(2)]
        for _ in range(4):
            await asyncio.sleep(random.uniform(0.3, 3.0))
            os.kill(on_kubernetes.scheduler_pid(), signal.SIGKILL)
            assert len(cluster.pods) <= 3
        for job in jobs:
            assert (await job_is(pool, job.job, "COMPLETED", "FAILED")).state == "COMPLETED"
        await machines(pool)
