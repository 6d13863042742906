"""A pool on a real Slurm: machines come for what waits, and go when nothing does."""

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tinkermq.clients.pool import Pool

from tests.support.on_cluster import SLOW, OnCluster, job_is, machines
from tests.support.slurm import Slurm, lacking
from tests.support.waiting import eventually

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(lacking()), reason=f"Slurm cannot be had: {lacking()}"),
]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with Slurm(tmp_path_factory.mktemp("slurm") / "cluster") as cluster:
        yield cluster


@pytest.fixture
async def on_slurm(slurm: Slurm, tmp_path: Path) -> AsyncIterator[OnCluster]:
    """A pool without a node; after the test it is down and Slurm's queue empty."""
    config = {"kind": "slurm", "partition": "p", "logs": str(tmp_path)}
    pool = OnCluster(tmp_path, config, slurm.environment)
    yield pool
    await pool.down()
    assert slurm.jobs() == []


async def test_a_machine_comes_for_a_job_and_goes_after_it(
    on_slurm: OnCluster, slurm: Slurm, model: Path
) -> None:
    async with await on_slurm.up(idle_s=2) as broker:
        pool = Pool(broker)
        assert (await machines(pool)).on == "slurm:p"
        job = await on_slurm.submit(pool, model)
        await machines(pool, "here")
        shown = await on_slurm.command("pool")
        assert "1 here" in shown.out
        assert "slot-hours today" in shown.out
        await job_is(pool, job.job, "COMPLETED")
        told = await machines(pool)
        assert told.slot_hours > 0
        assert slurm.jobs() == []


async def test_what_slurm_refuses_is_told_in_its_words(on_slurm: OnCluster, model: Path) -> None:
    async with await on_slurm.up(partition="nowhere") as broker:
        pool = Pool(broker)
        job = await on_slurm.submit(pool, model)

        async def trouble() -> str:
            return (await pool.machines()).trouble

        assert "Invalid partition name specified" in await eventually(trouble, "a refusal")
        assert "Invalid partition name" in (await on_slurm.command("pool")).err
        assert (await pool.get(job.job)).state == "QUEUED"
        await pool.stop(job.job)


async def test_a_preempted_machine_drains_and_its_job_goes_on_on_another(
    on_slurm: OnCluster, slurm: Slurm, model: Path
) -> None:
    async with await on_slurm.up(partition="low") as broker:
        pool = Pool(broker)
        job = await on_slurm.submit(pool, model, env=SLOW, training={"num_steps": 40})
        await job_is(pool, job.job, "RUNNING")
        more_important = ("--nodes=3", "--exclusive", "--output=/dev/null", "--wrap=sleep 5")
        slurm.tell("sbatch", "--partition=p", *more_important)
        await job_is(pool, job.job, "QUEUED")
        done = await job_is(pool, job.job, "COMPLETED", "FAILED")
        assert done.state == "COMPLETED", done.reason
        assert done.losses == 0
        await machines(pool)


async def test_a_scheduler_that_is_killed_again_and_again_asks_for_no_machine_twice(
    on_slurm: OnCluster, slurm: Slurm, model: Path
) -> None:
    async with await on_slurm.up(most=3) as broker:
        pool = Pool(broker)
        jobs = [await on_slurm.submit(pool, model) for _ in range(2)]
        for _ in range(4):
            await asyncio.sleep(random.uniform(0.3, 3.0))
            os.kill(on_slurm.scheduler_pid(), signal.SIGKILL)
            names = [line.split()[0] for line in slurm.jobs() if "RUNNING" in line]
            assert len(names) == len(set(names)) <= 3
        for job in jobs:
            assert (await job_is(pool, job.job, "COMPLETED", "FAILED")).state == "COMPLETED"
        await machines(pool)
