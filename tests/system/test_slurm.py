"""A pool on a real Slurm: machines come for what waits, and go when nothing does."""

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tinkermq.broker.client.connection import Broker, connect
from tinkermq.clients.home import Home
from tinkermq.clients.pool import Pool
from tinkermq.schemas.job import JobRecord
from tinkermq.schemas.machines.status import MachineList
from tinkermq.schemas.wire.errors import BrokerError

from tests.clients.command import Outcome, tinkermq
from tests.support.configs import REPOSITORY, small_job
from tests.support.processes import alive
from tests.support.slurm import Slurm, lacking
from tests.support.waiting import eventually

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(lacking()), reason=f"Slurm cannot be had: {lacking()}"),
]

SLOW = {"game": "tests.support.games:SlowBandit", "kwargs": {"delay_s": 0.3}, "num_val": 0}


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with Slurm(tmp_path_factory.mktemp("slurm") / "cluster") as cluster:
        yield cluster


class OnSlurm:
    """`tinkermq up --on` a file, in a home of its own."""

    def __init__(self, slurm: Slurm, folder: Path) -> None:
        self.slurm = slurm
        self.folder = folder
        self.environment = {
            **os.environ,
            **slurm.environment,
            "TINKERMQ_HOME": str(folder / "home"),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(REPOSITORY),
        }

    async def command(self, *words: str) -> Outcome:
        return await asyncio.to_thread(tinkermq, *words, env=self.environment, timeout=120)

    async def up(self, **config: Any) -> Broker:
        file = self.folder / "machines.yaml"
        told = {"kind": "slurm", "partition": "p", "look_s": 0.5, "idle_s": 2, **config}
        file.write_text(yaml.safe_dump({**told, "logs": str(self.folder)}), encoding="utf-8")
        up = await self.command("up", "--on", str(file), "--port", "0", "--no-gateway", "--json")
        assert up.code == 0, up.err
        self.state = yaml.safe_load(up.out)
        return await connect(self.state["url"], name="test")

    def scheduler_pid(self) -> int:
        """Return the process of the scheduler that runs, waiting for one that is started again."""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            state = Home(self.folder / "home").running()
            if state is not None and alive(state.children["scheduler"]):
                return state.children["scheduler"]
            time.sleep(0.1)
        raise TimeoutError("no scheduler was started again within 30 s")

    async def down(self) -> None:
        down = await self.command("down")
        assert down.code == 0, down.err
        assert self.slurm.jobs() == []


@pytest.fixture
async def on_slurm(slurm: Slurm, tmp_path: Path) -> AsyncIterator[OnSlurm]:
    """A pool without a node; after the test it is down and Slurm's queue empty."""
    pool = OnSlurm(slurm, tmp_path)
    yield pool
    await pool.down()


async def machines(pool: Pool, *states: str) -> MachineList:
    """Wait until the machines have these states."""

    async def look() -> MachineList | None:
        told = await pool.machines()
        return told if sorted(one.state for one in told.machines) == sorted(states) else None

    return await eventually(look, f"machines that are {states}", 90)


async def job_is(pool: Pool, job: str, *states: str) -> JobRecord:
    """Wait until a job is in one of the states."""

    async def look() -> JobRecord | None:
        with contextlib.suppress(BrokerError):  # a scheduler that was killed, too
            record = await pool.get(job)
            return record if record.state in states else None

    return await eventually(look, f"a job that is {states}", 120)


async def submit(pool: Pool, folder: Path, model: Path, **sections: Any) -> JobRecord:
    config = {**small_job(model, **sections), "output_dir": str(folder / "runs")}
    return await pool.submit(config)


async def test_a_machine_comes_for_a_job_and_goes_after_it(
    on_slurm: OnSlurm, model: Path, tmp_path: Path
) -> None:
    async with await on_slurm.up(idle_s=2) as broker:
        pool = Pool(broker)
        assert (await machines(pool)).on == "slurm:p"
        job = await submit(pool, tmp_path, model)
        await machines(pool, "here")
        shown = await on_slurm.command("pool")
        assert "1 here" in shown.out
        assert "slot-hours today" in shown.out
        await job_is(pool, job.job, "COMPLETED")
        told = await machines(pool)
        assert told.slot_hours > 0
        assert on_slurm.slurm.jobs() == []


async def test_what_slurm_refuses_is_told_in_its_words(
    on_slurm: OnSlurm, model: Path, tmp_path: Path
) -> None:
    async with await on_slurm.up(partition="nowhere") as broker:
        pool = Pool(broker)
        job = await submit(pool, tmp_path, model)

        async def trouble() -> str:
            return (await pool.machines()).trouble

        assert "Invalid partition name specified" in await eventually(trouble, "a refusal")
        assert "Invalid partition name" in (await on_slurm.command("pool")).err
        assert (await pool.get(job.job)).state == "QUEUED"
        await pool.stop(job.job)


async def test_a_preempted_machine_drains_and_its_job_goes_on_on_another(
    on_slurm: OnSlurm, model: Path, tmp_path: Path
) -> None:
    async with await on_slurm.up(partition="low") as broker:
        pool = Pool(broker)
        job = await submit(pool, tmp_path, model, env=SLOW, training={"num_steps": 40})
        await job_is(pool, job.job, "RUNNING")
        more_important = ("--nodes=3", "--exclusive", "--output=/dev/null", "--wrap=sleep 5")
        on_slurm.slurm.tell("sbatch", "--partition=p", *more_important)
        await job_is(pool, job.job, "QUEUED")
        done = await job_is(pool, job.job, "COMPLETED", "FAILED")
        assert done.state == "COMPLETED", done.reason
        assert done.losses == 0
        await machines(pool)


async def test_a_scheduler_that_is_killed_again_and_again_asks_for_no_machine_twice(
    on_slurm: OnSlurm, model: Path, tmp_path: Path
) -> None:
    async with await on_slurm.up(most=3) as broker:
        pool = Pool(broker)
        jobs = [await submit(pool, tmp_path, model) for _ in range(2)]
        for _ in range(4):
            await asyncio.sleep(random.uniform(0.3, 3.0))
            os.kill(on_slurm.scheduler_pid(), signal.SIGKILL)
            names = [line.split()[0] for line in on_slurm.slurm.jobs() if "RUNNING" in line]
            assert len(names) == len(set(names)) <= 3
        for job in jobs:
            assert (await job_is(pool, job.job, "COMPLETED", "FAILED")).state == "COMPLETED"
        await machines(pool)
