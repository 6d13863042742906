"""A pool whose machines are hosts by SSH, with a real sshd: nodes come when jobs wait."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tinkermq.actors.scheduler.machines.source import Machine, MachineNames
from tinkermq.actors.scheduler.machines.sources import SSHSource
from tinkermq.broker.nats_server import NatsServer
from tinkermq.schemas.machines import MachinesConfig, machines_config
from tinkermq.schemas.wire.errors import ConfigError, PlacementError

from tests.support.sshd import Sshd, lacking
from tests.support.waiting import eventually

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
    assert await source.list_machines() == []
    await asyncio.gather(*(source.request_machine(first) for _ in range(4)))

    async def started() -> Machine | None:
        return next((one for one in await source.list_machines() if one.state == "started"), None)

    async def ended() -> bool:
        return await source.list_machines() == []

    found = await eventually(started, "a node by SSH")
    await source.request_machine(first)
    again = await started()
    assert again == found
    assert found.name == first
    assert found.started is not None
    assert found.log == str(tmp_path / f"{first}.log")
    await source.release_machine(found, drain=True)
    await eventually(ended, "its end")
    await source.release_machine(
        Machine(second, "none", "started"), drain=True
    )  # nothing runs there
    with pytest.raises(PlacementError, match="all 2 hosts are in use"):
        await source.request_machine(third)


async def test_a_host_that_does_not_answer_is_told_and_the_other_one_is_used(
    sshd: Sshd, tmp_path: Path
) -> None:
    told = {**hosts(sshd, tmp_path), "hosts": ["127.0.0.1", "nobody@127.0.0.1"], "most": 2}
    source = SSHSource(MachinesConfig.model_validate(told), "nats://127.0.0.1:1")
    [away] = await source.list_machines()
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
