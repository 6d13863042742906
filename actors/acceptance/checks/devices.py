"""The device itself: driver, GPUs, and matrix products in bfloat16."""

# torch leaves some of its methods untyped.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false

from typing import Any, cast

import torch

from ....schemas.wire.errors import EngineError
from ...models.devices import own_device
from ...node.gpus import load_nvml
from ..figures import Figure, Found, Setting
from ..measuring.learner_step import matrix_rate

_BF16_CAPABILITY = 8.0
_TERA = 1e12


def device(setting: Setting) -> Found:
    """Find the GPUs and compute something on each. Raises EngineError where there are none."""
    if not setting.on_gpu:
        threads = Figure("threads", torch.get_num_threads(), at_least=1)
        return Found([threads], {"gpus": "none: checked on the CPU"})
    _refuse_without_gpu()
    cuda, count = cast("Any", torch.cuda), torch.cuda.device_count()
    worst = max(
        abs(float(torch.ones(1000, device=f"cuda:{at}").sum()) - 1000) for at in range(count)
    )
    capability = min(
        10 * major + minor for major, minor in map(cuda.get_device_capability, range(count))
    )
    figures = [
        Figure("GPUs", count, at_least=1),
        Figure("compute capability", capability / 10, at_least=_BF16_CAPABILITY),
        Figure("a sum differs by", worst, at_most=0),
    ]
    return Found(figures, _facts(count))


def _refuse_without_gpu() -> None:
    if torch.cuda.is_available():
        return
    run_small = "`tinkermq doctor --gpu --device cpu` runs the same checks, small, on the CPU"
    if load_nvml() is None:
        raise EngineError(
            "this machine has no GPU: no NVIDIA driver answers",
            hint=f"run this on a machine with an NVIDIA GPU and its driver (`nvidia-smi`); in a "
            f"container give it the GPUs (`--gpus all`); {run_small}",
        )
    built = torch.version.cuda
    raise EngineError(
        f"the driver has GPUs, and torch {torch.__version__} cannot use them: it is built for "
        + (f"CUDA {built}" if built else "the CPU alone"),
        hint="install the same torch from PyPI's index, or the index of pytorch.org that fits the "
        f"driver, and unset CUDA_VISIBLE_DEVICES; {run_small}",
    )


def _facts(count: int) -> dict[str, str]:
    nvml = load_nvml()
    driver: Any = nvml.nvmlSystemGetDriverVersion() if nvml else "unknown"
    properties = [cast("Any", torch.cuda).get_device_properties(at) for at in range(count)]
    nccl: Any = cast("Any", torch.cuda).nccl.version()
    return {
        "driver": driver.decode() if isinstance(driver, bytes) else str(driver),
        "cuda": str(torch.version.cuda),
        "cudnn": str(torch.backends.cudnn.version()),
        "nccl": ".".join(map(str, nccl)),
        "gpus": ", ".join(f"{one.name} ({one.total_memory / 2**30:.0f} GiB)" for one in properties),
    }


def bf16(setting: Setting) -> Found:
    """Multiply matrices in bfloat16, exactly enough and faster than in float32."""
    size = 8192 if setting.on_gpu else 256
    rates = {dtype: matrix_rate(dtype, size) for dtype in ("bfloat16", "float32")}
    faster = rates["bfloat16"] / rates["float32"]
    return Found(
        [
            Figure("relative error", _relative_error(), at_most=0.01),
            Figure("product", rates["bfloat16"] / _TERA, "TFLOP/s"),
            Figure("over float32", faster, "×", at_least=2.0 if setting.on_gpu else None),
        ]
    )


def _relative_error() -> float:
    """Return by how much a product in bfloat16 differs from one in float64."""
    left, right = (torch.randn(512, 512, device=own_device(), dtype=torch.float64) for _ in "ab")
    exact = left @ right
    rounded = (left.bfloat16() @ right.bfloat16()).double()
    return float((rounded - exact).norm() / exact.norm())
