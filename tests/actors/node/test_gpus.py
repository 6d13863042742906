"""GPUs as a node gives them away; NVML itself is stood in for, as no machine of CI has a GPU."""

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import pytest
from structlog.testing import capture_logs
from tinkermq.actors.gpus import Gpus, find_gpus, unseen_gpu
from tinkermq.actors.node.children import Child, spawn
from tinkermq.actors.node.process import ActorProcess
from tinkermq.actors.node.sandbox import actor_environment
from tinkermq.actors.policy.devices import own_device
from tinkermq.actors.scheduler.jobs.states import actors_for, wanted_actor
from tinkermq.actors.scheduler.placement import NodeSlots, PlacementRequest, place, with_nodes
from tinkermq.clients.cli.doctor import describe_gpus
from tinkermq.schemas.config.load_config import parse_config
from tinkermq.schemas.job import JobRecord
from tinkermq.schemas.metric import LogLines
from tinkermq.schemas.node import NodeStatus, WantedActor
from tinkermq.schemas.wire.errors import ConfigError

from tests.support.nvml import MigNvml, Nvml


def gpus_of(wanted: str | None, nvml: type[Nvml] | Nvml = Nvml) -> Gpus:
    """Return the GPUs of a list."""
    found = find_gpus(wanted, lambda: nvml() if isinstance(nvml, type) else nvml)
    assert found is not None
    return found


def indices(gpus: Gpus) -> list[int]:
    """Return their numbers at the driver."""
    return [gpu.index for gpu in gpus.read()]


def test_each_gpu_tells_its_model_memory_and_use() -> None:
    told = gpus_of("1,3").read()
    assert [(one.index, one.model, one.numa) for one in told] == [
        (1, "NVIDIA H200", 0),
        (3, "NVIDIA H200", 1),
    ]
    assert (told[0].memory_bytes, told[0].used_bytes) == (141 << 30, 1 << 30)
    assert [one.utilization for one in told] == [0.25, 0.0]


def test_a_gpu_that_is_lost_stays_as_it_was_and_the_others_go_on() -> None:
    nvml = Nvml()
    gpus = gpus_of("all", nvml)
    before = gpus.read()
    nvml.lost = {2}
    with capture_logs() as logs:
        assert gpus.read() == gpus.read() == before
    assert [(line["event"], line["gpu"]) for line in logs] == [("gpu_lost", 2)]
    nvml.lost = set()
    assert gpus.read() == before


@pytest.mark.parametrize(
    ("nvml", "groups"),
    [
        (Nvml(), [[0, 1], [2, 3]]),
        (Nvml(links=((0, 2), (1, 3))), [[0, 2], [1, 3]]),
        (Nvml(links=((0, 1), (1, 2))), [[0, 1, 2], [3]]),
        (Nvml(switched=True), [[0, 1, 2, 3]]),
    ],
    ids=["NUMA nodes", "pairs", "chain", "switch"],
)
def test_linked_gpus_are_a_group(nvml: Nvml, groups: list[list[int]]) -> None:
    assert gpus_of("all", nvml).groups == groups


def test_the_numa_node_of_a_gpu_is_what_the_kernel_tells(tmp_path: Path) -> None:
    """As of an x86 server: NVML has NUMA nodes only of GPUs whose memory is one."""
    for index, node in enumerate((1, 0, -1)):
        (tmp_path / f"ffff:0{index}:00.0").mkdir()
        (tmp_path / f"ffff:0{index}:00.0" / "numa_node").write_text(f"{node}\n")
    gpus = find_gpus("all", Nvml, tmp_path)
    assert gpus is not None
    assert [gpu.numa for gpu in gpus.read()] == [1, 0, 1, 1]
    assert (gpus.groups, gpus.groups_by) == ([[0, 2, 3], [1]], "numa")


def test_gpus_whose_numa_nodes_nobody_tells_are_all_alike() -> None:
    class Virtual(Nvml):
        def nvmlDeviceGetMemoryAffinity(self, handle: int, size: int, scope: int) -> list[int]:
            raise self.NVMLError

    gpus = gpus_of("all", Virtual)
    assert [gpu.numa for gpu in gpus.read()] == [None] * 4
    assert (gpus.groups, gpus.groups_by) == ([[0, 1, 2, 3]], "")


def test_the_pool_shows_how_the_gpus_of_a_node_are_linked() -> None:
    def shown(nvml: Nvml) -> str:
        gpus = gpus_of("all", nvml)
        return describe_gpus(
            NodeStatus(
                node="n1",
                host="h",
                slots=len(gpus),
                groups=gpus.groups,
                groups_by=gpus.groups_by,
                gpus=gpus.read(),
                time=0.0,
            )
        )

    numa = "NUMA node 0: slots 0-1; NUMA node 1: slots 2-3"
    assert shown(Nvml()) == f"n1: 4 × NVIDIA H200; {numa}"
    assert shown(Nvml(switched=True)) == (f"n1: 4 × NVIDIA H200; NVLink joins slots 0-3; {numa}")
    assert "NVLink joins slots 0, 2 and 1, 3;" in shown(Nvml(links=((0, 2), (1, 3))))


def test_slots_are_numbered_from_zero_whatever_gpus_are_given_away() -> None:
    some = gpus_of("1,3")
    assert some.groups == [[0], [1]]
    assert some.uuids([1]) == [Nvml().nvmlDeviceGetUUID(3)]


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ("0, 2", [0, 2]),
        ("GPU-2a5f09e4-7d1b-4b0c-9b6e-3f0d0c2b1a20", [2]),
        ("GPU-2a5,GPU-0", [2, 0]),
        ("3,GPU-1", [3, 1]),
        ("all", [0, 1, 2, 3]),
    ],
)
def test_gpus_are_named_by_number_or_uuid(wanted: str, expected: list[int]) -> None:
    assert indices(gpus_of(wanted)) == expected


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ("MIG-102-c2b1", ["MIG-102-c2b1"]),  # Slurm, and Kubernetes with the strategy `mixed`
        ("1:1", ["MIG-102-c2b1"]),  # NVIDIA_VISIBLE_DEVICES of container runtimes
        ("1", ["MIG-100-c2b1", "MIG-102-c2b1"]),
    ],
)
def test_instances_are_named_by_uuid_or_place(wanted: str, expected: list[str]) -> None:
    gpus = gpus_of(wanted, MigNvml)
    assert gpus.uuids(range(len(gpus))) == expected
    assert all(gpu.is_instance and gpu.memory_bytes == 35 << 30 for gpu in gpus.read())


def test_a_divided_gpu_is_given_away_by_its_instances_each_of_which_stands_alone() -> None:
    gpus = gpus_of(None, MigNvml)
    assert indices(gpus) == [0, 1, 1, 2, 3]
    assert [gpu.is_instance for gpu in gpus.read()] == [False, True, True, False, False]
    assert gpus.groups == [[0], [1], [2], [3], [4]]


@pytest.mark.parametrize(
    ("own", "expected"), [("2", [2]), ("GPU-3,GPU-1", [3, 1]), ("all", [0, 1, 2, 3])]
)
def test_a_node_without_a_list_gives_away_what_it_was_given(
    monkeypatch: pytest.MonkeyPatch, own: str, expected: list[int]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", own)
    assert indices(gpus_of(None)) == expected
    assert indices(gpus_of("0")) == [0]


@pytest.mark.parametrize("own", ["", "-1", "NoDevFiles", "void"])
def test_a_node_that_was_given_no_gpu_gives_cpu_shares_away(
    monkeypatch: pytest.MonkeyPatch, own: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", own)
    assert find_gpus(None, Nvml) is None


def test_gpus_that_are_not_there_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert len(gpus_of(None)) == 4
    with pytest.raises(ConfigError, match="--gpus '0,7' names GPU 7, and the driver shows"):
        find_gpus("0,7", Nvml)
    with pytest.raises(ConfigError, match="names MIG-9, and the driver shows"):
        find_gpus("MIG-9", Nvml)
    with pytest.raises(ConfigError, match="names instance 2 of GPU 1"):
        find_gpus("1:2", MigNvml)
    with pytest.raises(ConfigError, match="names instance 0 of GPU 0"):
        find_gpus("0:0", Nvml)
    with pytest.raises(ConfigError, match="not a list of GPUs"):
        find_gpus("0,zero", Nvml)
    with pytest.raises(ConfigError, match="not a list of GPUs"):
        find_gpus("", Nvml)
    with pytest.raises(ConfigError, match="names a GPU twice"):
        find_gpus("0,GPU-0", Nvml)
    with pytest.raises(ConfigError, match="GPU- is the beginning of 4 UUIDs"):
        find_gpus("GPU-", Nvml)
    assert find_gpus(None, lambda: None) is None
    with pytest.raises(ConfigError, match="shows this process: none"):
        find_gpus("0", lambda: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    assert find_gpus(None, lambda: None) is None  # a variable that means nothing here
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES '5' names GPU 5"):
        find_gpus(None, Nvml)


@pytest.mark.parametrize(
    ("built_for", "load", "message"),
    [
        (None, Nvml, "torch 2.13.0 is built for the CPU"),
        ("13.0", lambda: None, "the NVIDIA driver cannot be reached from it"),
        (
            "13.0",
            Nvml,
            "built for CUDA 13.0, and driver 535.104.05 of this machine is too old for it: it "
            "supports CUDA up to 12.2",
        ),
        ("12.8", Nvml, r"torch 2.13.0 \(CUDA 12.8, driver 535.104.05\) sees no GPU"),
    ],
    ids=["torch of the CPU", "no driver", "old driver", "unknown"],
)
def test_why_torch_sees_no_gpu_is_told(built_for: str | None, load: object, message: str) -> None:
    assert callable(load)
    with pytest.raises(ConfigError, match=message):
        raise unseen_gpu("GPU-1", "2.13.0", built_for, load)


def test_a_process_does_not_compute_on_the_cpu_in_place_of_its_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert own_device().type == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-7")  # as a node writes it
    with pytest.raises(ConfigError, match="the node gave this process GPU-7"):
        own_device()


async def test_an_actor_sees_its_own_gpus_only(tmp_path: Path) -> None:
    told: list[str] = []

    async def send(lines: LogLines) -> None:
        told.extend(lines.lines)

    def start(
        wanted: WantedActor, environment: Mapping[str, str], output: int
    ) -> "asyncio.Future[Child]":
        del wanted
        command = [os.environ.get("SHELL", "/bin/sh"), "-c", "echo sees $CUDA_VISIBLE_DEVICES"]
        return asyncio.ensure_future(spawn(command, environment, output))

    wanted = WantedActor(
        user="u", job="j", name="a", role="generator", run_dir=str(tmp_path), devices=[0, 1]
    )
    await ActorProcess(
        wanted, start=start, nats_url="", send=send, gpus=gpus_of("GPU-1,3").uuids([0, 1])
    ).run()
    assert told == [f"sees {Nvml().nvmlDeviceGetUUID(1)},{Nvml().nvmlDeviceGetUUID(3)}"]


@pytest.mark.parametrize("kind", ["eval", "train"])
def test_every_actor_that_evaluates_a_model_sees_a_gpu(kind: Literal["eval", "train"]) -> None:
    tree = {
        "model": {"path": "m"},
        "env": {"game": "g"},
        "generator": {"engine": "vllm", "count": 2},
    }
    config = parse_config(tree)
    actors = actors_for(config, kind)
    gpus = gpus_of("all")
    placed = place(
        [PlacementRequest("u.j", tuple(actors))], [NodeSlots("n", 4, frozenset({0, 1, 2, 3}))]
    )
    record = JobRecord(
        job="j", name="j", user="u", state="QUEUED", kind=kind, created=0.0, config={}
    )
    record = record.model_copy(update={"actors": actors})
    record = with_nodes(record, {one.actor: one for one in placed.assignments})
    seen = {
        actor.role: actor_environment(wanted, "", gpus.uuids(wanted.devices))
        for actor in record.actors
        for wanted in [wanted_actor(record, actor, config)]
    }
    evaluates = "evaluator" if kind == "eval" else "generator"
    assert {role for role, own in seen.items() if own["CUDA_VISIBLE_DEVICES"]} == {
        evaluates,
        *(["learner"] if kind == "train" else []),
    }
