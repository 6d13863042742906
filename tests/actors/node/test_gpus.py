"""GPUs as a node gives them away; NVML itself is stood in for, as no machine of CI has a GPU."""

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest
from tinkermq.actors.gpus import Gpus, find_gpus
from tinkermq.actors.node.children import Child, spawn
from tinkermq.actors.node.process import ActorProcess
from tinkermq.actors.node.sandbox import actor_environment
from tinkermq.actors.scheduler.jobs.states import actors_for, wanted_actor
from tinkermq.actors.scheduler.placement import NodeSlots, PlacementRequest, place, with_nodes
from tinkermq.schemas.config.load_config import parse_config
from tinkermq.schemas.job import JobRecord
from tinkermq.schemas.metric import LogLines
from tinkermq.schemas.node import WantedActor
from tinkermq.schemas.wire.errors import ConfigError


class NvmlError(Exception):
    """As pynvml raises it."""


class Nvml:
    """Four GPUs at two memory domains; `links` joins pairs of them, `switched` reach a switch."""

    NVMLError = NvmlError
    NVML_NVLINK_MAX_LINKS = 4
    NVML_NVLINK_DEVICE_TYPE_SWITCH = 2

    def __init__(self, links: tuple[tuple[int, int], ...] = (), switched: bool = False) -> None:
        self.links = links
        self.switched = switched

    def nvmlDeviceGetCount(self) -> int:
        return 4

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, handle: int) -> bytes:
        return b"NVIDIA H200"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(total=141 << 30, used=handle << 30)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        if handle == 3:
            raise NvmlError
        return SimpleNamespace(gpu=25)

    def nvmlDeviceGetNumaNodeId(self, handle: int) -> int:
        return handle // 2

    def nvmlDeviceGetPciInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(busId=f"0000:0{handle}:00.0")

    def _others(self, handle: int) -> list[int]:
        return [a + b - handle for a, b in self.links if handle in (a, b)]

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        if self.switched:
            return int(link == 0)
        if link >= len(self._others(handle)):
            raise NvmlError
        return 1

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: int, link: int) -> int:
        return 2 if self.switched else 0

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: int, link: int) -> SimpleNamespace:
        return self.nvmlDeviceGetPciInfo(self._others(handle)[link])


def test_each_gpu_tells_its_model_memory_and_use() -> None:
    told = Gpus(Nvml(), [1, 3]).read()
    assert [(one.index, one.model, one.numa) for one in told] == [
        (1, "NVIDIA H200", 0),
        (3, "NVIDIA H200", 1),
    ]
    assert (told[0].memory_bytes, told[0].used_bytes) == (141 << 30, 1 << 30)
    assert [one.utilization for one in told] == [0.25, 0.0]


@pytest.mark.parametrize(
    ("nvml", "groups"),
    [
        (Nvml(), [[0, 1], [2, 3]]),
        (Nvml(links=((0, 2), (1, 3))), [[0, 2], [1, 3]]),
        (Nvml(links=((0, 1), (1, 2))), [[0, 1, 2], [3]]),
        (Nvml(switched=True), [[0, 1, 2, 3]]),
    ],
    ids=["memory domains", "pairs", "chain", "switch"],
)
def test_linked_gpus_are_a_group(nvml: Nvml, groups: list[list[int]]) -> None:
    assert Gpus(nvml, range(4)).groups == groups


def test_slots_are_numbered_from_zero_whatever_gpus_are_given_away() -> None:
    some = Gpus(Nvml(), [1, 3])
    assert some.groups == [[0], [1]]
    assert some.numbers([1]) == [3]


def test_gpus_that_are_not_there_are_refused() -> None:
    assert len(find_gpus(None, Nvml) or []) == 4
    with pytest.raises(ConfigError, match="names GPU 7, the driver of this machine knows 4"):
        find_gpus("0,7", Nvml)
    with pytest.raises(ConfigError, match="no list of GPUs"):
        find_gpus("0,zero", Nvml)
    assert find_gpus(None, lambda: None) is None
    with pytest.raises(ConfigError, match="knows 0"):
        find_gpus("0", lambda: None)


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
        wanted, start=start, nats_url="", send=send, gpus=Gpus(Nvml(), [1, 3]).numbers([0, 1])
    ).run()
    assert told == ["sees 1,3"]


@pytest.mark.parametrize("kind", ["eval", "train"])
def test_every_actor_that_evaluates_a_model_sees_a_gpu(kind: Literal["eval", "train"]) -> None:
    tree = {
        "model": {"path": "m"},
        "env": {"game": "g"},
        "generator": {"engine": "vllm", "count": 2},
    }
    config = parse_config(tree)
    actors = actors_for(config, kind)
    gpus = Gpus(Nvml(), [0, 1, 2, 3])
    placed = place(
        [PlacementRequest("u.j", tuple(actors))], [NodeSlots("n", 4, frozenset({0, 1, 2, 3}))]
    )
    record = JobRecord(
        job="j", name="j", user="u", state="QUEUED", kind=kind, created=0.0, config={}
    )
    record = record.model_copy(update={"actors": actors})
    record = with_nodes(record, {one.actor: one for one in placed.assignments})
    seen = {
        actor.role: actor_environment(wanted, "", gpus.numbers(wanted.devices))
        for actor in record.actors
        for wanted in [wanted_actor(record, actor, config)]
    }
    evaluates = "evaluator" if kind == "eval" else "generator"
    assert {role for role, own in seen.items() if own["CUDA_VISIBLE_DEVICES"]} == {
        evaluates,
        *(["learner"] if kind == "train" else []),
    }
