"""Limits that a real Slurm keeps for accounts and users, told in its words."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tinkermq.actors.scheduler.machines.source import MachineNames
from tinkermq.actors.scheduler.machines.sources import SlurmSource
from tinkermq.schemas.machines import MachinesConfig
from tinkermq.schemas.wire.errors import PlacementError

from tests.support.slurm import ACCOUNTING, Slurm, lacking
from tests.support.waiting import eventually

URL = "nats://127.0.0.1:1"
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        bool(lacking(*ACCOUNTING)), reason=f"accounting cannot be had: {lacking(*ACCOUNTING)}"
    ),
]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """A cluster with an account of which two jobs may be in the queue, and one of two cores."""
    folder = tmp_path_factory.mktemp("slurm") / "cluster"
    with Slurm(folder, accounting=True) as cluster:
        cluster.tell("sacctmgr", "-i", "add", "account", "lab", "small")
        cluster.tell("sacctmgr", "-i", "add", "user", "root", "account=lab", "MaxSubmitJobs=2")
        cluster.tell("sacctmgr", "-i", "add", "user", "root", "account=small")
        cluster.tell("sacctmgr", "-i", "modify", "account", "small", "set", "GrpTRES=cpu=2")
        yield cluster


@pytest.fixture
def source(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[SlurmSource]:
    """Machines of the account that the test names, whose nodes find no broker."""
    monkeypatch.setenv("SLURM_CONF", slurm.environment["SLURM_CONF"])
    config = MachinesConfig(
        kind="slurm", slots=2, sbatch=[f"--account={request.param}"], logs=str(tmp_path)
    )
    yield SlurmSource(config, URL)
    slurm.tell("scancel", "--me")


@pytest.mark.parametrize("source", ["lab"], indirect=True)
async def test_who_may_have_two_jobs_in_the_queue_is_refused_the_third(
    source: SlurmSource,
) -> None:
    first, second, third = MachineNames(URL).free([], 3)
    await source.request_machine(first)
    await source.request_machine(second)
    with pytest.raises(PlacementError, match="Job violates accounting/QOS policy") as refused:
        await source.request_machine(third)
    assert "ask the cluster's admins" in refused.value.hint


@pytest.mark.parametrize("source", ["nobody"], indirect=True)
async def test_an_account_that_there_is_not_is_refused(source: SlurmSource) -> None:
    with pytest.raises(PlacementError, match="Invalid account or account/partition combination"):
        await source.request_machine(MachineNames(URL).free([], 1)[0])


@pytest.mark.parametrize("source", ["small"], indirect=True)
async def test_a_machine_beyond_the_accounts_cores_waits_and_says_so(source: SlurmSource) -> None:
    for name in MachineNames(URL).free([], 2):
        await source.request_machine(name)

    async def waits() -> bool:
        return "AssocGrpCpuLimit" in {one.why for one in await source.list_machines()}

    await eventually(waits, "a machine that waits for its account")
