"""The GPUs of a machine, through NVML: which there are, how they are linked, how busy they are.

GPUs that are joined by NVLink, directly or over others, are one group; without NVLink those at the
same memory domain of the host are.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from ..schemas.node import Gpu
from ..schemas.wire.errors import ConfigError


class Gpus:
    """The GPUs that a node gives away; slot i of the node is the i-th of them."""

    def __init__(self, nvml: Any, indices: Sequence[int]) -> None:
        """`nvml` is the initialised module pynvml."""
        self._nvml = nvml
        self._handles = {index: nvml.nvmlDeviceGetHandleByIndex(index) for index in indices}
        self.groups = self._find_groups()
        """Slots that are linked closely."""

    def __len__(self) -> int:
        return len(self._handles)

    def numbers(self, slots: Sequence[int]) -> list[int]:
        """Return the numbers at the driver of some slots."""
        order = list(self._handles)
        return [order[slot] for slot in slots]

    def read(self) -> list[Gpu]:
        """Return the GPUs with their use as of now."""
        return [self._read(index, handle) for index, handle in self._handles.items()]

    def _read(self, index: int, handle: Any) -> Gpu:
        memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
        percent = 0
        with contextlib.suppress(self._nvml.NVMLError):  # a shared or partitioned GPU has none
            percent = self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu
        return Gpu(
            index=index,
            model=_text(self._nvml.nvmlDeviceGetName(handle)),
            memory_bytes=memory.total,
            used_bytes=memory.used,
            utilization=percent / 100,
            numa=self._numa(handle),
        )

    def _numa(self, handle: Any) -> int:
        with contextlib.suppress(self._nvml.NVMLError, AttributeError):
            return int(self._nvml.nvmlDeviceGetNumaNodeId(handle))
        return 0

    def _find_groups(self) -> list[list[int]]:
        handles = list(self._handles.values())
        slot_of = {self._bus(handle): slot for slot, handle in enumerate(handles)}
        group_of = list(range(len(handles)))
        for slot, handle in enumerate(handles):
            for peer in self._peers(handle):
                if peer in slot_of:
                    old, new = group_of[slot_of[peer]], group_of[slot]
                    group_of = [new if group == old else group for group in group_of]
        if len(set(group_of)) == len(handles):
            group_of = [self._numa(handle) for handle in handles]
        return [
            [slot for slot, group in enumerate(group_of) if group == linked]
            for linked in dict.fromkeys(group_of)
        ]

    def _peers(self, handle: Any) -> list[str]:
        """Return the bus ids at the other ends of a GPU's active links; a switch joins all."""
        peers: list[str] = []
        for link in range(self._nvml.NVML_NVLINK_MAX_LINKS):
            with contextlib.suppress(self._nvml.NVMLError):
                if self._nvml.nvmlDeviceGetNvLinkState(handle, link):
                    peers.append(self._peer(handle, link))
        return peers

    def _peer(self, handle: Any, link: int) -> str:
        kind = self._nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link)
        if kind == self._nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
            return self._bus(next(iter(self._handles.values())))  # all that reach it are one group
        return _text(self._nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId)

    def _bus(self, handle: Any) -> str:
        return _text(self._nvml.nvmlDeviceGetPciInfo(handle).busId)


def load_nvml() -> Any | None:
    """Return pynvml, initialised, or None on a machine without an NVIDIA driver."""
    try:
        import pynvml  # pyright: ignore[reportMissingTypeStubs]  # it has none
    except ImportError:  # not installed with the extra `worker`
        return None
    nvml: Any = pynvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    return nvml


def find_gpus(wanted: str | None, load: Callable[[], Any | None] = load_nvml) -> Gpus | None:
    """Return the GPUs to give away: those that `wanted` lists, or all; None if there are none.

    Raises ConfigError when a wanted one is not there.
    """
    nvml = load()
    count = nvml.nvmlDeviceGetCount() if nvml else 0
    indices = list(range(count)) if wanted is None else _parse(wanted)
    missing = [index for index in indices if index >= count]
    if missing:
        raise ConfigError(
            f"--gpus names GPU {missing[0]}, the driver of this machine knows {count}",
            hint="see `nvidia-smi -L`; without GPUs give CPU shares away: --slots N",
        )
    return Gpus(nvml, indices) if indices else None


def _parse(wanted: str) -> list[int]:
    parts = wanted.split(",")
    if not all(part.strip().isdigit() for part in parts) or len(set(parts)) < len(parts):
        raise ConfigError(f"--gpus {wanted!r} is no list of GPUs", hint="write it as 0,2,3")
    return [int(part) for part in parts]


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
