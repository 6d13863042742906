"""A pool whose machines a cluster gives: the same is asked of Slurm, Ray, Kubernetes and SSH.

What only one of them can do is in the module of its name.
"""

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tinkermq.clients.pool import Pool

from tests.support import ray, slurm, sshd
from tests.support.kubernetes import Kubernetes
from tests.support.on_cluster import SLOW, OnCluster, job_is, machines

pytestmark = pytest.mark.long


@dataclass(frozen=True)
class Cluster:
    """A cluster: how a pool asks it for machines, what runs there, how a machine is lost."""

    config: Mapping[str, Any]
    running: Callable[[], list[str]]
    """Return the names of the machines that run."""
    take_away: Callable[[], object] = lambda: None
    """Take the machines of the pool away from it."""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])


@contextmanager
def on_slurm(folder: Path) -> Iterator[Cluster]:
    """Slurm preempts what runs in partition `low` for what is more important."""
    if reason := slurm.lacking():
        pytest.skip(f"Slurm cannot be had: {reason}")
    with slurm.Slurm(folder / "cluster") as cluster:
        all_nodes = ("--nodes=3", "--exclusive", "--output=/dev/null", "--wrap=sleep 5")
        yield Cluster(
            {"kind": "slurm", "partition": "low", "logs": str(folder)},
            lambda: [line.split()[0] for line in cluster.jobs() if "RUNNING" in line],
            lambda: cluster.tell("sbatch", "--partition=p", *all_nodes),
            cluster.environment,
        )


@contextmanager
def on_ray(folder: Path) -> Iterator[Cluster]:
    """Nodes of Ray leave it once there is another one."""
    if reason := ray.lacking():
        pytest.skip(f"Ray cannot be had: {reason}")
    with ray.Ray(folder / "cluster") as cluster:

        def take_away() -> None:
            cluster.add()
            for node in cluster.nodes[:-1]:
                node.leave()

        yield Cluster(
            {"kind": "ray", "address": cluster.address},
            lambda: [name for name, status in cluster.jobs() if status == "RUNNING"],
            take_away,
        )


@contextmanager
def on_kubernetes(folder: Path) -> Iterator[Cluster]:
    """A server of the tests stands for Kubernetes, and evicts pods."""
    with Kubernetes(folder / "cluster") as cluster:
        yield Cluster(
            {"kind": "kubernetes", "namespace": "lab", "image": "tinkermq"},
            lambda: [
                name for name, pod in cluster.pods.items() if pod["status"]["phase"] == "Running"
            ],
            lambda: [cluster.evict(name) for name in [*cluster.pods]],
            {"KUBECONFIG": str(cluster.kubeconfig)},
        )


@contextmanager
def on_ssh(folder: Path) -> Iterator[Cluster]:
    """Two names of this machine, which a real sshd serves."""
    if reason := sshd.lacking():
        pytest.skip(f"no SSH server can be had: {reason}")
    with sshd.Sshd(folder / "server") as server:
        hosts = ["127.0.0.1", f"{server.user}@127.0.0.1"]
        config = {"kind": "ssh", "hosts": hosts, "ssh": server.arguments, "logs": str(folder)}
        yield Cluster(config, list[str])


GIVES_AND_TAKES = [on_slurm, on_ray, on_kubernetes]


@pytest.fixture
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    """The cluster that a test asks for by its parameter."""
    with request.param(tmp_path) as running:
        yield running


@pytest.fixture
async def pool_of(cluster: Cluster, tmp_path: Path) -> AsyncIterator[OnCluster]:
    """A pool without a node; after the test it is down and no machine runs."""
    pool = OnCluster(tmp_path, cluster.config, cluster.environment)
    yield pool
    await pool.down()
    assert cluster.running() == []


@pytest.mark.parametrize("cluster", [*GIVES_AND_TAKES, on_ssh], indirect=True)
async def test_a_machine_comes_for_a_job_and_goes_after_it(pool_of: OnCluster, model: Path) -> None:
    async with await pool_of.up() as broker:
        pool = Pool(broker)
        job = await pool_of.submit(pool, model)
        await machines(pool, "here")
        shown = await pool_of.command("pool")
        assert "0 asked, 0 coming, 1 here" in shown.out
        assert "slot-hours today" in shown.out
        done = await job_is(pool, job.job, "COMPLETED", "FAILED")
        assert done.state == "COMPLETED", done.reason
        assert (await machines(pool)).slot_hours > 0


@pytest.mark.parametrize("cluster", GIVES_AND_TAKES, indirect=True)
async def test_a_job_whose_machine_is_taken_away_goes_on_on_another(
    cluster: Cluster, pool_of: OnCluster, model: Path
) -> None:
    async with await pool_of.up(most=2) as broker:
        pool = Pool(broker)
        job = await pool_of.submit(pool, model, env=SLOW, training={"num_steps": 40})
        await job_is(pool, job.job, "RUNNING")
        await asyncio.to_thread(cluster.take_away)
        done = await job_is(pool, job.job, "COMPLETED", "FAILED")
        assert done.state == "COMPLETED", done.reason
        assert done.losses <= (1 if cluster.config["kind"] == "ray" else 0)
        await machines(pool)


@pytest.mark.parametrize("cluster", [on_kubernetes], indirect=True)
async def test_a_scheduler_that_is_killed_again_and_again_asks_for_no_machine_twice(
    cluster: Cluster, pool_of: OnCluster, model: Path
) -> None:
    async with await pool_of.up(most=3) as broker:
        pool = Pool(broker)
        jobs = [await pool_of.submit(pool, model) for _ in range(2)]
        for _ in range(4):
            await asyncio.sleep(random.uniform(0.3, 3.0))
            os.kill(pool_of.scheduler_pid(), signal.SIGKILL)
            names = cluster.running()
            assert len(names) == len(set(names)) <= 3
        for job in jobs:
            assert (await job_is(pool, job.job, "COMPLETED", "FAILED")).state == "COMPLETED"
        await machines(pool)
