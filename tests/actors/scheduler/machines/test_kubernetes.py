"""Machines of Kubernetes: what is asked for, found and given back, and what is told of refusals."""

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from tinkermq.actors.scheduler.machines.kubernetes import KubernetesSource, pod
from tinkermq.actors.scheduler.machines.source import Machine, MachineNames
from tinkermq.schemas.machines import MachinesConfig, machines_config
from tinkermq.schemas.wire.errors import ConfigError, PlacementError

from tests.support.kubernetes import VERSION, Kubernetes
from tests.support.s3 import environment
from tests.support.waiting import eventually

URL = "nats://broker:4222"
SLEEPING = {"spec": {"containers": [{"name": "node", "command": ["sleep", "100"]}]}}
FAILING = {"spec": {"containers": [{"name": "node", "command": ["false"]}]}}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Kubernetes]:
    with (
        Kubernetes(tmp_path / "k", quota=3, room=2) as running,
        environment({"KUBECONFIG": str(running.kubeconfig)}),
    ):
        yield running


def source(pod: dict[str, Any], **more: Any) -> KubernetesSource:
    told = {"kind": "kubernetes", "namespace": "lab", "image": "tinkermq", "pod": pod, **more}
    return KubernetesSource(MachinesConfig.model_validate(told), URL)


async def states(asked: KubernetesSource, *wanted: str) -> list[Machine]:
    async def look() -> list[Machine] | None:
        found = await asked.list_machines()
        return found if [one.state for one in found] == list(wanted) else None

    if not wanted:
        await asyncio.sleep(0.3)
        return await asked.list_machines()
    found = await eventually(look, f"machines that are {wanted}")
    assert found is not None
    return found


async def test_a_machine_is_asked_for_once_found_and_given_back(cluster: Kubernetes) -> None:
    asked = source(SLEEPING)
    first, second, third, fourth = MachineNames(URL).free([], 4)
    await asyncio.gather(*(source(SLEEPING).request_machine(first) for _ in range(4)))
    await asked.request_machine(second)
    await asked.request_machine(third)
    found = await states(asked, "started", "started", "asked")
    assert [one.name for one in found] == [first, second, third]
    assert found[0].started is not None
    assert found[2].why == "Unschedulable: 0/1 nodes are available: 1 Insufficient cpu."
    with pytest.raises(PlacementError, match=r"HTTP 403.*exceeded quota: lab, requested: pods=1"):
        await asked.request_machine(fourth)
    stale = Machine(first, "another-uid", "started")
    await asked.release_machine(stale, drain=True)  # another pod's: harmless
    await asked.release_machine(found[0], drain=True)
    after = await states(asked, "started", "started")
    assert [one.name for one in after] == [second, third]
    await asked.release_machine(found[0], drain=True)  # gone: harmless


async def test_a_pod_that_has_ended_is_no_machine_and_makes_room_for_its_name(
    cluster: Kubernetes,
) -> None:
    (name,) = MachineNames(URL).free([], 1)
    await source(FAILING).request_machine(name)

    async def failed() -> bool:
        return cluster.pods[name]["status"]["phase"] == "Failed"

    await eventually(failed, "its end")
    assert await source({}).list_machines() == []
    await source(SLEEPING).request_machine(name)
    await states(source({}), "started")


async def test_what_the_cluster_refuses_is_told_in_its_words(
    cluster: Kubernetes, tmp_path: Path
) -> None:
    with pytest.raises(
        PlacementError, match=r"is not a valid pod: spec.priority: .* \(it is 'high'\)"
    ):
        await source({"spec": {"priority": "high"}}).request_machine("tmq-1")
    with pytest.raises(PlacementError, match=r'HTTP 403.*User "u" cannot list'):
        await source({}, namespace="theirs").list_machines()
    with pytest.raises(PlacementError, match=r"Kubernetes is not configured.*nowhere"):
        await source({}, context="nowhere").list_machines()
    gone = yaml.safe_load(cluster.kubeconfig.read_text())
    gone["clusters"][0]["cluster"]["server"] = "http://127.0.0.1:1"
    (tmp_path / "gone").write_text(json.dumps(gone))
    with (
        environment({"KUBECONFIG": str(tmp_path / "gone")}),
        pytest.raises(PlacementError, match="Kubernetes cannot be reached"),
    ):
        await source({}).list_machines()


def test_a_pod_fits_the_schema_and_what_the_owner_says_wins() -> None:
    more = {
        "metadata": {"labels": {"team": "lab"}, "name": "mine"},
        "spec": {
            "nodeSelector": {"gpu": "h100"},
            "containers": [
                {"name": "node", "resources": {"limits": {"memory": "64Gi"}}},
                {"name": "side", "image": "side"},
            ],
        },
    }
    config = MachinesConfig(
        kind="kubernetes",
        image="i",
        slots=8,
        gpus=True,
        pod=more,
        credentials="/c",
        python="python",
    )
    made = pod(config, URL, "tmq-0-1")
    kubernetes_validate.validate(made, VERSION, strict=True)
    assert made["metadata"]["name"] == "tmq-0-1"
    assert made["metadata"]["labels"]["team"] == "lab"
    node, side = made["spec"]["containers"]
    assert node["resources"]["limits"] == {"nvidia.com/gpu": "8", "memory": "64Gi"}
    assert node["command"][-4:] == ["--nats", URL, "--name", "tmq-0-1"]
    assert side["name"] == "side"
    assert made["spec"]["nodeSelector"] == {"gpu": "h100"}
    cpu = pod(MachinesConfig(kind="kubernetes", image="i"), URL, "tmq-0-1")
    assert cpu["spec"]["containers"][0]["command"][0] == sys.executable
    kubernetes_validate.validate(cpu, VERSION, strict=True)


def test_an_image_is_needed(tmp_path: Path) -> None:
    file = tmp_path / "machines.yaml"
    file.write_text("kind: kubernetes\n")
    with pytest.raises(ConfigError, match="image is not given"):
        machines_config(str(file))
