"""GPUs as a node gives them away; NVML itself is stood in for, as no machine of CI has a GPU."""

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
from tinkermq.actors.gpus import Gpus, find_gpus
from tinkermq.actors.node.children import Child, spawn
from tinkermq.actors.node.process import ActorProcess
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
    NVML_DEVICE_MIG_ENABLE = 1

    def __init__(self, links: tuple[tuple[int, int], ...] = (), switched: bool = False) -> None:
        self.links = links
        self.switched = switched

    def nvmlDeviceGetCount(self) -> int:
        return 4

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}a5f09e4-7d1b-4b0c-9b6e-3f0d0c2b1a{handle}0"

    def nvmlDeviceGetMigMode(self, handle: int) -> list[int]:
        raise NvmlError

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


class MigNvml(Nvml):
    """The same machine, GPU 1 of which is divided into three, one of them another container's."""

    def nvmlDeviceGetMigMode(self, handle: int) -> list[int]:
        return [int(handle == 1), int(handle == 1)]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: int) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: int, place: int) -> int:
        if place not in (0, 2):
            raise NvmlError
        return 100 * handle + place

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return super().nvmlDeviceGetUUID(handle) if handle < 4 else f"MIG-{handle}-c2b1"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(total=(141 if handle < 4 else 35) << 30, used=1 << 30)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        if handle >= 4:
            raise NvmlError
        return super().nvmlDeviceGetUtilizationRates(handle)


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
    assert gpus_of("all", nvml).groups == groups


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
    with pytest.raises(ConfigError, match="no list of GPUs"):
        find_gpus("0,zero", Nvml)
    with pytest.raises(ConfigError, match="no list of GPUs"):
        find_gpus("", Nvml)
    with pytest.raises(ConfigError, match="names a GPU twice"):
        find_gpus("0,GPU-0", Nvml)
    with pytest.raises(ConfigError, match="GPU- is the beginning of 4 UUIDs"):
        find_gpus("GPU-", Nvml)
    assert find_gpus(None, lambda: None) is None
    with pytest.raises(ConfigError, match="shows this process: none"):
        find_gpus("0", lambda: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES '5' names GPU 5"):
        find_gpus(None, Nvml)


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
