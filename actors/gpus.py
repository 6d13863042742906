"""The GPUs of a machine, through NVML: their number, links and use.

GPUs that NVLink joins, directly or over others, form one group; without NVLink, those at the same
NUMA node of the host do.
"""

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from ..schemas.node import Gpu, GroupKind
from ..schemas.wire.errors import ConfigError

_NONE = frozenset({"", "-1", "none", "void", "nodevfiles"})
"""Values, in lower case, with which Slurm and container runtimes hide all GPUs."""
_PCI_DEVICES = Path("/sys/bus/pci/devices")
_log: structlog.stdlib.BoundLogger = structlog.get_logger()


@dataclass(frozen=True)
class _Device:
    """A GPU, or a MIG instance of one."""

    index: int
    """Index of the whole GPU at the driver."""
    handle: Any
    uuid: str
    card: Any
    """Handle of the whole GPU."""

    @property
    def is_instance(self) -> bool:
        return self.uuid.startswith("MIG-")


class Gpus:
    """The GPUs that a node offers; slot i of the node is the i-th of them."""

    def __init__(self, nvml: Any, devices: Sequence[_Device], pci_devices: Path) -> None:
        """`nvml` is the initialised module pynvml, `pci_devices` the kernel's list of devices."""
        self._nvml = nvml
        self._pci_devices = pci_devices
        self._devices = list(devices)
        self._seen: dict[str, Gpu] = {}
        self._lost: set[str] = set()
        groups, by = self._find_groups()
        self.groups = groups
        """Slots that are linked closely."""
        self.groups_by: GroupKind = by
        """What the groups are linked by."""

    def __len__(self) -> int:
        return len(self._devices)

    def uuids(self, slots: Sequence[int]) -> list[str]:
        """Return the UUIDs of some slots, for CUDA_VISIBLE_DEVICES.

        Numbers would depend on the order in which CUDA counts, which is not the driver's.
        """
        return [self._devices[slot].uuid for slot in slots]

    def capability(self, slot: int) -> tuple[int, int]:
        """Return the compute capability of a slot."""
        card = self._devices[slot].card
        major, minor = self._nvml.nvmlDeviceGetCudaComputeCapability(card)
        return int(major), int(minor)

    def read(self) -> list[Gpu]:
        """Return the GPUs with their present use.

        A GPU that the driver has lost keeps its last status, and is logged: the node continues with
        the others.
        """
        return [self._last_seen(device) for device in self._devices]

    def _last_seen(self, device: _Device) -> Gpu:
        try:
            self._seen[device.uuid] = self._read(device)
            self._lost.discard(device.uuid)
        except self._nvml.NVMLError as error:
            if device.uuid not in self._seen:
                raise
            if device.uuid not in self._lost:
                self._lost.add(device.uuid)
                _log.error("gpu_lost", gpu=device.index, uuid=device.uuid, error=str(error))
        return self._seen[device.uuid]

    def _read(self, device: _Device) -> Gpu:
        memory = self._nvml.nvmlDeviceGetMemoryInfo(device.handle)
        percent = 0
        with contextlib.suppress(self._nvml.NVMLError):  # a shared or partitioned GPU has none
            percent = self._nvml.nvmlDeviceGetUtilizationRates(device.handle).gpu
        return Gpu(
            index=device.index,
            uuid=device.uuid,
            is_instance=device.is_instance,
            model=_text(self._nvml.nvmlDeviceGetName(device.handle)),
            memory_bytes=memory.total,
            used_bytes=memory.used,
            utilization=percent / 100,
            numa=self._numa(device.card),
        )

    def _numa(self, handle: Any) -> int | None:
        """Return the NUMA node closest to a GPU; None if neither kernel nor NVML reports it.

        Not nvmlDeviceGetNumaNodeId: that is the node of the GPU's own memory, which only machines
        such as Grace Hopper have.
        """
        domain, _, place = self._bus(handle).lower().partition(":")
        with contextlib.suppress(OSError, ValueError):  # NVML's domains have 8 digits, Linux' 4
            file = self._pci_devices / f"{int(domain, 16):04x}:{place}" / "numa_node"
            if (node := int(file.read_text())) >= 0:  # -1: unknown, as in most virtual machines
                return node
        with contextlib.suppress(self._nvml.NVMLError):
            scope = self._nvml.NVML_AFFINITY_SCOPE_NODE
            (nodes,) = self._nvml.nvmlDeviceGetMemoryAffinity(handle, 1, scope)  # 64 nodes
            if nodes:
                return (nodes & -nodes).bit_length() - 1
        return None

    def _find_groups(self) -> tuple[list[list[int]], GroupKind]:
        kind: GroupKind = "nvlink"
        handles = [device.card for device in self._devices]
        slot_of = {self._bus(handle): slot for slot, handle in enumerate(handles)}
        group_of: list[int | None] = list(range(len(handles)))
        for slot, handle in enumerate(handles):
            for peer in self._peers(handle):
                if peer in slot_of:
                    old, new = group_of[slot_of[peer]], group_of[slot]
                    group_of = [new if group == old else group for group in group_of]
        if any(device.is_instance for device in self._devices):
            kind = ""
            group_of = list(range(len(handles)))  # instances cannot work together
        elif len(set(group_of)) == len(handles):
            group_of = [self._numa(handle) for handle in handles]
            kind = "" if None in group_of else "numa"
        groups = [
            [slot for slot, group in enumerate(group_of) if group == linked]
            for linked in dict.fromkeys(group_of)
        ]
        return groups, kind

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
            return self._bus(self._devices[0].card)  # all GPUs that it joins are one group
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


def find_gpus(
    names: str | None,
    load: Callable[[], Any | None] = load_nvml,
    pci_devices: Path = _PCI_DEVICES,
) -> Gpus | None:
    """Return the GPUs that a node offers; None if there are none.

    `names` lists them by number, by UUID (`GPU-…`, `MIG-…`, or a unique prefix), or as an instance
    of a GPU (`0:1`); `all` means all. None: those of CUDA_VISIBLE_DEVICES, or all. A GPU in MIG
    mode stands for its instances. Raises ConfigError for a GPU that does not exist.
    """
    nvml = load()
    there = _devices(nvml) if nvml else []
    source = "--gpus"
    if names is None:
        source, names = "CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES", "all")
        if nvml is None or names.strip().lower() in _NONE:
            return None
    if names.strip().lower() == "all":
        return Gpus(nvml, there, pci_devices) if there else None
    chosen: list[_Device] = []
    for part in names.split(","):
        chosen += _select(part.strip(), there, f"{source} {names!r}")
    if len({device.uuid for device in chosen}) < len(chosen):
        raise ConfigError(
            f"{source} {names!r} names a GPU twice", hint="a GPU is one slot: name each once"
        )
    return Gpus(nvml, chosen, pci_devices)


def _devices(nvml: Any) -> list[_Device]:
    """List all GPUs, and the instances of a GPU in MIG mode."""
    devices: list[_Device] = []
    for index in range(nvml.nvmlDeviceGetCount()):
        card = nvml.nvmlDeviceGetHandleByIndex(index)
        instances = _instances(nvml, card)
        if instances is None:
            devices.append(_Device(index, card, _text(nvml.nvmlDeviceGetUUID(card)), card))
            continue
        devices += [
            _Device(index, handle, _text(nvml.nvmlDeviceGetUUID(handle)), card)
            for handle in instances
        ]
    return devices


def _instances(nvml: Any, card: Any) -> list[Any] | None:
    """Return the MIG instances of a GPU that this process may see; None outside of MIG mode."""
    try:
        current, _ = nvml.nvmlDeviceGetMigMode(card)
    except nvml.NVMLError:  # a GPU without MIG
        return None
    if current != nvml.NVML_DEVICE_MIG_ENABLE:
        return None
    handles: list[Any] = []
    for place in range(nvml.nvmlDeviceGetMaxMigDeviceCount(card)):
        with contextlib.suppress(nvml.NVMLError):  # a free place, or another container's
            handles.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(card, place))
    return handles


def _select(name: str, there: Sequence[_Device], source: str) -> list[_Device]:
    """Return the devices that one name of a list means."""
    number, _, instance = name.partition(":")
    if number.isdigit() and (not instance or instance.isdigit()):
        matching = [device for device in there if device.index == int(number)]
        if instance:
            of_card = [device for device in matching if device.is_instance]
            matching = of_card[int(instance) : int(instance) + 1]
        what = f"instance {instance} of GPU {number}" if instance else f"GPU {number}"
    elif name.startswith(("GPU-", "MIG-")):
        matching = [device for device in there if device.uuid.startswith(name)]
        what = name
    else:
        raise ConfigError(
            f"{source} is not a list of GPUs",
            hint="write numbers (0,2,3), UUIDs (GPU-…, MIG-…) or instances (0:1), or `all`",
        )
    if not matching:
        known = ", ".join(device.uuid for device in there) or "none"
        raise ConfigError(
            f"{source} names {what}, and the driver shows this process: {known}",
            hint="see `nvidia-smi -L`; without GPUs give CPU shares away: --slots N",
        )
    if len(matching) > 1 and not number.isdigit():
        raise ConfigError(
            f"{source}: {name} is the beginning of {len(matching)} UUIDs",
            hint="write it to its end",
        )
    return matching


def unseen_gpu(
    gpus: str, torch: str, torch_cuda: str | None, load: Callable[[], Any | None] = load_nvml
) -> ConfigError:
    """Return the error that explains why torch sees no GPU in this process."""
    if torch_cuda is None:
        return ConfigError(
            f"the node gave this process {gpus}, and torch {torch} is built for the CPU",
            hint="install the torch that PyPI has for GPUs: pip install --force-reinstall torch",
        )
    nvml = load()
    if nvml is None:
        return ConfigError(
            f"the node gave this process {gpus}, and the NVIDIA driver cannot be reached from it",
            hint="see `nvidia-smi`; containers need `--gpus all`",
        )
    driver = _text(nvml.nvmlSystemGetDriverVersion())
    number = int(nvml.nvmlSystemGetCudaDriverVersion())
    highest = (number // 1000, number % 1000 // 10)
    if highest[0] < int(torch_cuda.partition(".")[0]):
        return ConfigError(
            f"torch {torch} is built for CUDA {torch_cuda}, and driver {driver} of this machine is "
            f"too old for it: it supports CUDA up to {highest[0]}.{highest[1]}",
            hint="install a newer driver, or the torch of an older CUDA (https://pytorch.org)",
        )
    return ConfigError(
        f"the node gave this process {gpus}, and torch {torch} (CUDA {torch_cuda}, driver "
        f"{driver}) sees no GPU",
        hint="`tinkermq doctor --gpu` on that machine says more",
    )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
