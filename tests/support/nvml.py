"""NVML as pynvml shows it, of a machine with four GPUs: no machine of CI has one."""

from types import SimpleNamespace


class NvmlError(Exception):
    """As pynvml raises it."""


class Nvml:
    """Four GPUs at two NUMA nodes; `links` joins pairs of them, `switched` reach a switch."""

    NVMLError = NvmlError
    NVML_NVLINK_MAX_LINKS = 4
    NVML_NVLINK_DEVICE_TYPE_SWITCH = 2
    NVML_DEVICE_MIG_ENABLE = 1
    NVML_AFFINITY_SCOPE_NODE = 0
    compute_capability = (9, 0)

    def __init__(self, links: tuple[tuple[int, int], ...] = (), switched: bool = False) -> None:
        self.links = links
        self.switched = switched
        self.lost: set[int] = set()
        """GPUs that have fallen off the bus."""

    def nvmlDeviceGetCount(self) -> int:
        return 4

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}a5f09e4-7d1b-4b0c-9b6e-3f0d0c2b1a{handle}0"

    def nvmlDeviceGetMigMode(self, handle: int) -> list[int]:
        raise NvmlError

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:
        return self.compute_capability

    def nvmlSystemGetDriverVersion(self) -> str:
        return "535.104.05"

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return 12020

    def nvmlDeviceGetName(self, handle: int) -> bytes:
        return b"NVIDIA H200"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        if handle in self.lost:
            raise NvmlError("GPU is lost")
        return SimpleNamespace(total=141 << 30, used=handle << 30)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        if handle == 3:
            raise NvmlError
        return SimpleNamespace(gpu=25)

    def nvmlDeviceGetMemoryAffinity(self, handle: int, size: int, scope: int) -> list[int]:
        assert (size, scope) == (1, self.NVML_AFFINITY_SCOPE_NODE)
        return [1 << handle // 2]

    def nvmlDeviceGetPciInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(busId=f"0000FFFF:0{handle}:00.0")  # none here

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
