"""A pool on a real Slurm, and the limits that it keeps for accounts and users."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from tinkermq.actors.scheduler.machines.sources import SlurmSource
from tinkermq.clients.pool import Pool
from tinkermq.schemas.machines import MachinesConfig
from tinkermq.schemas.wire.errors import PlacementError

from tests.support.on_cluster import SLOW, OnCluster, job_is, machines
from tests.support.slurm import Slurm, lacking
from tests.support.waiting import eventually

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(bool(lacking()), reason=f"Slurm cannot be had: {lacking()}"),
]


STRICT = """
EnforcePartLimits=ALL
PartitionName=theirs Nodes=ALL State=UP AllowAccounts=physics
PartitionName=short Nodes=ALL State=UP MaxTime=1
PartitionName=narrow Nodes=ALL State=UP MaxCPUsPerNode=1
PartitionName=closed Nodes=ALL State=INACTIVE
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with Slurm(tmp_path_factory.mktemp("slurm") / "cluster", settings=STRICT) as cluster:
        yield cluster


@pytest.fixture
async def on_slurm(slurm: Slurm, tmp_path: Path) -> AsyncIterator[OnCluster]:
    """A pool without a node; after the test it is down and Slurm's queue empty."""
    config = {"kind": "slurm", "partition": "p", "logs": str(tmp_path)}
    pool = OnCluster(tmp_path, config, slurm.environment)
    yield pool
    await pool.down()
    assert slurm.jobs() == []


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"partition": "theirs"}, "Invalid account or account/partition combination specified"),
        ({"partition": "theirs", "sbatch": ["--account=chemistry"]}, "Invalid account"),
        ({"partition": "short", "sbatch": ["--time=5"]}, "Requested time limit is invalid"),
        ({"partition": "narrow"}, "configuration"),
        ({"partition": "closed"}, "Required partition not available"),
        ({"slots": 99}, "More processors requested than permitted"),
        ({"gpus": True}, "Invalid generic resource"),
    ],
)
async def test_a_machine_that_the_cluster_may_not_give_is_refused_with_what_to_mend(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], told: str
) -> None:
    monkeypatch.setenv("SLURM_CONF", slurm.environment["SLURM_CONF"])
    config = MachinesConfig.model_validate({"kind": "slurm", "partition": "p", **changes})
    with pytest.raises(PlacementError, match=told) as refused:
        await SlurmSource(config, "nats://login:4222").request_machine("tmq-12345678-1")
    assert "correct `sbatch:` or `partition:`" in refused.value.hint
    assert slurm.jobs() == []


async def test_a_machine_whose_time_is_up_drains_and_its_job_goes_on_on_another(
    on_slurm: OnCluster, model: Path
) -> None:
    """Slurm looks at time limits every half minute, and signals so much earlier."""
    async with await on_slurm.up(drain_s=20, sbatch=["--time=2"]) as broker:
        pool = Pool(broker)
        job = await on_slurm.submit(pool, model, env=SLOW, training={"num_steps": 400})
        await job_is(pool, job.job, "RUNNING")
        first = await machines(pool, "here")
        left = await on_slurm.command("pool")
        assert "1m" in left.out  # of the two minutes
        await job_is(pool, job.job, "QUEUED")
        again = await job_is(pool, job.job, "RUNNING", "FAILED")
        assert again.state == "RUNNING", again.reason
        assert again.losses == 0
        assert again.version > 0  # it goes on from a checkpoint
        running = {one.id for one in (await pool.machines()).machines if one.state == "here"}
        assert running.isdisjoint({one.id for one in first.machines})
        await pool.stop(job.job, now=True)
        await machines(pool)


async def test_a_machine_whose_node_never_joins_is_given_back_and_told(
    on_slurm: OnCluster, model: Path
) -> None:
    async with await on_slurm.up(url="nats://127.0.0.1:1", join_s=4) as broker:
        pool = Pool(broker)
        job = await on_slurm.submit(pool, model)

        async def trouble() -> str:
            return (await pool.machines()).trouble

        told = await eventually(trouble, "a machine that is late")
        assert "has not joined within 4 s: can it reach the broker at its URL?" in told
        await machines(pool)
        assert (await pool.get(job.job)).state == "QUEUED"
        await pool.stop(job.job)
