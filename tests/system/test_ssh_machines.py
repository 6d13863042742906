"""A pool whose machines are hosts by SSH, with a real sshd: nodes come when jobs wait."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tinkermq.actors.scheduler.machines.source import Machine, MachineNames
from tinkermq.actors.scheduler.machines.ssh import SSHSource
from tinkermq.broker.client.connection import connect
from tinkermq.broker.programs.server import NatsServer
from tinkermq.clients.pool import Pool
from tinkermq.schemas.job import JobRecord
from tinkermq.schemas.machines.config import MachinesConfig, machines_config
from tinkermq.schemas.machines.status import MachineList
from tinkermq.schemas.wire.errors import ConfigError, PlacementError

from tests.clients.command import Outcome, tinkermq
from tests.support.configs import REPOSITORY, small_job
from tests.support.sshd import Sshd, lacking
from tests.support.waiting import PATIENCE_S, eventually

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(bool(lacking()), reason=f"no SSH server can be had: {lacking()}"),
]


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    with Sshd(tmp_path_factory.mktemp("ssh") / "server") as server:
        yield server


def hosts(sshd: Sshd, folder: Path) -> dict[str, Any]:
    """Return machines by two names of this one."""
    names = ["127.0.0.1", f"{sshd.user}@127.0.0.1"]
    return {"kind": "ssh", "hosts": names, "ssh": sshd.arguments, "logs": str(folder)}


async def test_a_node_is_started_once_found_and_ended(
    sshd: Sshd, nats_server: NatsServer, tmp_path: Path
) -> None:
    config = MachinesConfig.model_validate({**hosts(sshd, tmp_path), "most": 2})
    source = SSHSource(config, nats_server.url)
    first, second, third = MachineNames(nats_server.url).free([], 3)
    assert await source.look() == []
    await asyncio.gather(*(source.ask(first) for _ in range(4)))

    async def started() -> Machine | None:
        return next((one for one in await source.look() if one.state == "started"), None)

    async def ended() -> bool:
        return await source.look() == []

    found = await eventually(started, "a node by SSH")
    await source.ask(first)
    again = await started()
    assert again == found
    assert found.name == first
    assert found.started is not None
    assert found.log == str(tmp_path / f"{first}.log")
    await source.give_back(found, drain=True)
    await eventually(ended, "its end")
    await source.give_back(Machine(second, "none", "started"), drain=True)  # nothing runs there
    with pytest.raises(PlacementError, match="all 2 hosts are in use"):
        await source.ask(third)


async def test_a_host_that_does_not_answer_is_told_and_the_other_one_is_used(
    sshd: Sshd, tmp_path: Path
) -> None:
    told = {**hosts(sshd, tmp_path), "hosts": ["127.0.0.1", "nobody@127.0.0.1"], "most": 2}
    source = SSHSource(MachinesConfig.model_validate(told), "nats://127.0.0.1:1")
    [away] = await source.look()
    assert (away.id, away.state) == ("nobody@127.0.0.1", "leaving")
    assert "Permission denied" in away.why


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"hosts": ["a", "a"]}, "hosts names one twice"),
        ({"hosts": ["a"], "most": 2}, "most is 2, and there are 1 hosts"),
        ({"hosts": ["-oProxyCommand=x"]}, "hosts.0: String should match pattern"),
    ],
)
def test_hosts_that_make_no_sense_are_refused(
    tmp_path: Path, changed: dict[str, Any], words: str
) -> None:
    file = tmp_path / "machines.yaml"
    file.write_text(yaml.safe_dump({"kind": "ssh", **changed}))
    with pytest.raises(ConfigError, match=words):
        machines_config(str(file))


async def test_a_job_brings_a_host_trains_there_and_lets_it_go(
    sshd: Sshd, model: Path, tmp_path: Path
) -> None:
    environment = {
        **os.environ,
        "TINKERMQ_HOME": str(tmp_path / "home"),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(REPOSITORY),
    }
    file = tmp_path / "machines.yaml"
    file.write_text(yaml.safe_dump({**hosts(sshd, tmp_path), "look_s": 0.5, "idle_s": 2}))

    async def command(*words: str) -> Outcome:
        return await asyncio.to_thread(tinkermq, *words, env=environment, timeout=PATIENCE_S)

    up = await command("up", "--on", str(file), "--port", "0", "--no-gateway", "--json")
    assert up.code == 0, up.err
    try:
        async with await connect(yaml.safe_load(up.out)["url"], name="test") as broker:
            pool = Pool(broker)
            config = {**small_job(model), "output_dir": str(tmp_path / "runs")}
            job = await pool.submit(config)

            async def ended() -> JobRecord | None:
                record = await pool.get(job.job)
                return record if record.state in ("COMPLETED", "FAILED") else None

            async def gone() -> MachineList | None:
                told = await pool.machines()
                return told if not told.machines else None

            done = await eventually(ended, "the job's end")
            assert done.state == "COMPLETED", done.reason
            assert (await eventually(gone, "no machine")).slot_hours > 0
    finally:
        down = await command("down")
    assert down.code == 0, down.err
