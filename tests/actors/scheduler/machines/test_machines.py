"""What is read of a configuration, what Slurm is asked, what was used of a budget."""

import os
import re
from pathlib import Path

import pytest
from tinkermq.actors.scheduler.machines.keeper import FIRST_PAUSE_S, RequestBackoff, spent
from tinkermq.actors.scheduler.machines.source import Machine, MachineNames
from tinkermq.actors.scheduler.machines.sources import machine_source, sbatch_arguments
from tinkermq.schemas.machines import MachinesConfig, machines_config
from tinkermq.schemas.wire.errors import ConfigError, PlacementError
from tinkermq.schemas.wire.field_docs import field_docs

from tests.support.configs import REPOSITORY
from tests.support.waiting import eventually

DAY_S = 86400.0


def machine(number: str, started: float | None) -> Machine:
    return Machine(f"tmq-{number}", number, "started" if started else "asked", started)


def test_a_machine_counts_from_its_start_and_counting_again_changes_nothing() -> None:
    running = [machine("1", 5 * DAY_S + 100), machine("2", None)]
    once = spent(None, running, 5 * DAY_S + 160)
    assert once.seconds == {"1": 60.0}
    assert spent(once, running, 5 * DAY_S + 160) == once
    assert spent(once, [], 5 * DAY_S + 900).seconds == {"1": 60.0}


def test_each_day_has_a_budget_of_its_own() -> None:
    before = spent(None, [machine("1", 5 * DAY_S + 100)], 6 * DAY_S - 1)
    assert spent(before, [machine("1", 5 * DAY_S + 100)], 6 * DAY_S + 30).seconds == {"1": 30.0}


def test_who_asks_twice_asks_for_the_same_names() -> None:
    names = MachineNames("nats://login:4222")
    first = names.free([], 2)
    assert names.free([], 2) == first
    assert names.free(first[:1], 1) == first[1:]
    assert [names.number(name) for name in first] == [1, 2]
    assert names.own(first[0])
    assert not names.own("tmq-other-1")
    assert not MachineNames("nats://elsewhere:4222").own(first[0])


def test_refusals_are_waited_out_ever_longer_until_a_machine_comes() -> None:
    patience = RequestBackoff()
    assert patience.is_over()
    patience.failed("no such partition")
    assert not patience.is_over()
    assert patience.trouble == "no such partition"
    patience.succeeded()
    assert patience.is_over()
    assert FIRST_PAUSE_S > 0


def test_what_the_owner_adds_comes_last() -> None:
    config = MachinesConfig(
        kind="slurm", partition="gpu", slots=8, gpus=True, sbatch=["--gres=gpu:h100:8"]
    )
    arguments = sbatch_arguments(config, "tmq-1")
    assert arguments[-1] == "--gres=gpu:h100:8"
    assert {"--job-name=tmq-1", "--dependency=singleton", "--partition=gpu"} <= set(arguments)
    assert "--cpus-per-task=2" in sbatch_arguments(MachinesConfig(kind="slurm"), "tmq-1")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("gpu", "'gpu' names no source of machines"),
        ("ssh:node1", "'ssh:node1' names no source of machines"),
        ("kind: slurm\nslot_hours_per_day: 0", "slot_hours_per_day: must be > 0"),
        ("kind: slurm\nmost: 2\nleast: 3", "least is 3, more than most, which is 2"),
        ("kind: slurm\nparttion: gpu", "parttion: is not a known key"),
        ("kind: none\npartition: gpu", "partition has no effect while kind is 'none'"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(tmp_path: Path, text: str, told: str) -> None:
    if "\n" in text:
        file = tmp_path / "machines.yaml"
        file.write_text(text, encoding="utf-8")
        text = str(file)
    with pytest.raises(ConfigError, match=re.escape(told)):
        machines_config(text)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"kind": "slurm"}, "PermissionError"),  # as where a machine is out of processes
        ({"kind": "kubernetes", "image": "tinkermq"}, "ParserError"),
        ({"kind": "ray", "address": "127.0.0.1:99999"}, "port must be 0-65535"),
    ],
)
async def test_whatever_a_clusters_client_raises_is_told_and_ends_no_scheduler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, object], told: str
) -> None:
    (tmp_path / "squeue").write_text("not to be executed")
    (tmp_path / "config").write_text("users: [", encoding="utf-8")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    with pytest.raises(PlacementError, match=f"the cluster cannot be asked: .*{told}"):
        await machine_source(MachinesConfig.model_validate(config), "nats://h:1").list_machines()


async def test_a_node_is_found_on_a_host_whose_shell_greets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ssh, node = tmp_path / "ssh", tmp_path / "node"
    ssh.write_text('#!/bin/sh\necho "Welcome"\nfor command; do :; done\nexec sh -c "$command"\n')
    node.write_text("#!/bin/sh\nexec sleep 60\n")
    for program in (ssh, node):
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    config = {"kind": "ssh", "hosts": ["gpu01"], "python": str(node), "logs": str(tmp_path)}
    source = machine_source(MachinesConfig.model_validate(config), "nats://h:1")
    (name,) = MachineNames("nats://h:1").free([], 1)
    assert await source.list_machines() == []

    async def started() -> list[Machine]:
        await source.request_machine(name)  # a look at the same time may have held its lock
        return await source.list_machines()

    async def ended() -> bool:
        return not await source.list_machines()

    (running,) = await eventually(started, "its node")
    assert running.state == "started"
    await source.release_machine(running, drain=True)
    await eventually(ended, "its end")


def test_the_page_on_slurm_names_every_key() -> None:
    page = (REPOSITORY / "docs" / "clusters.md").read_text(encoding="utf-8")
    texts = field_docs(MachinesConfig).items()
    described = {name: " ".join(text.split()) for name, text in texts}
    assert [name for name, text in described.items() if f"| `{name}` |" not in page] == []
    assert [name for name, text in described.items() if text not in page] == []
