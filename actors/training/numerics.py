"""Dtypes and kernels of the computations in all processes of a learner.

In 16 bits the optimiser updates float32 master weights, and passes use bfloat16 copies of them:
activations, norms included, are bfloat16, as in the engines. Gradients of a pass are bfloat16 and
accumulate in float32. Several ranks cast weights when FSDP2 gathers them; a single rank casts those
of a layer when the layer runs. Both compute the same.
"""

# torch leaves some of its methods untyped. Weights of modules are exchanged where torch keeps them,
# as torch.func.functional_call does.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportPrivateUsage=false

import os
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import deterministic

from ...schemas.config.sections import LearnerConfig
from ..weights.nccl import pin_settings
from .state import SUMS, Numerics
from .varlen import describe_attention

_CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_DETERMINISTIC_WORKSPACES = (":4096:8", ":16:8")
"""Values of that variable with which cuBLAS adds in a fixed order."""

_DETERMINISTIC_SUMS = {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple", "NCCL_NVLS_ENABLE": "0"}
"""NCCL's settings with which ranks add in a fixed order; its own choice follows its timings."""


def settle_numerics(learner: LearnerConfig, *, on_gpu: bool) -> None:
    """Configure all kernels of this process; must be called before CUDA is used.

    On a GPU, float32 products use TF32. With `learner.deterministic`, kernels with a varying order
    of additions are replaced; they raise RuntimeError if torch has no replacement.
    """
    if on_gpu:
        torch.set_float32_matmul_precision("high")
    if not learner.deterministic:
        return
    if os.environ.get(_CUBLAS_WORKSPACE) not in _DETERMINISTIC_WORKSPACES:
        os.environ[_CUBLAS_WORKSPACE] = _DETERMINISTIC_WORKSPACES[0]
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    if on_gpu and learner.ranks > 1:
        pin_settings(_DETERMINISTIC_SUMS)
    # Filling uninitialised memory is not needed: all memory is written before it is read.
    cast(Any, deterministic).fill_uninitialized_memory = False


def numerics_of(
    device: torch.device, dtype: torch.dtype, attention: str, learner: LearnerConfig
) -> Numerics:
    """Describe how a model computes on a device, for the run's checkpoints."""
    return Numerics(
        device="cpu" if device.type == "cpu" else torch.cuda.get_device_name(device),
        dtype=str(dtype).removeprefix("torch."),
        attention=describe_attention(attention, device),
        deterministic=learner.deterministic,
        torch=str(torch.__version__),
        ranks=learner.ranks,
        sums=SUMS,
    )


# -- weights of another dtype ----------------------------------------------------------------------


def is_in_float32(model: nn.Module, name: str) -> bool:
    """Return whether a model's class always keeps a tensor in float32.

    Engines do the same: in 16 bits, router corrections would choose other experts.
    """
    in_float32: set[str] = getattr(model, "_keep_in_fp32_modules_strict", None) or set()
    return any(f".{part}." in f".{name}." for part in in_float32)


def modules_in_float32(model: nn.Module) -> list[nn.Module]:
    """Return the modules with weights that the model's class keeps in float32."""
    names = [name for name, _ in model.named_parameters() if is_in_float32(model, name)]
    return [model.get_submodule(owner) for owner in {name.rpartition(".")[0] for name in names}]


def store_frozen(
    model: nn.Module, dtype: torch.dtype, in_float32: Sequence[nn.Module] = ()
) -> None:
    """Store frozen weights in the compute dtype; the results are the same."""
    exact = {id(weight) for module in in_float32 for weight in module.parameters()}
    for weight in model.parameters():
        if not weight.requires_grad and weight.is_floating_point() and id(weight) not in exact:
            weight.data = weight.data.to(dtype)


def cast_weights_on_use(
    model: nn.Module,
    layers: Sequence[nn.Module],
    dtype: torch.dtype,
    in_float32: Sequence[nn.Module] = (),
) -> None:
    """Make a model compute with copies of its weights in `dtype`, made when a module runs.

    `layers` are cast as a whole, other modules one by one. Their inputs are cast, too. Modules
    `in_float32` use their own weights.
    """
    exact = {id(inner) for module in in_float32 for inner in module.modules()}
    within: set[int] = set()
    for layer in layers:
        if id(layer) not in within:
            within |= {id(inner) for inner in layer.modules()}
            _CastModule.install(layer, list(_slots(layer, recurse=True, exact=exact)), dtype)
    for module in model.modules():
        if id(module) not in within | exact and (slots := list(_slots(module, recurse=False))):
            _CastModule.install(module, slots, dtype)


Slot = tuple[nn.Module, str]
"""A module, and the name of one of its own weights."""


def _slots(
    module: nn.Module, *, recurse: bool, exact: set[int] | frozenset[int] = frozenset()
) -> Iterator[Slot]:
    for inner in module.modules() if recurse else (module,):
        for name, weight in inner.named_parameters(recurse=False, remove_duplicate=False):
            if weight.is_floating_point() and id(inner) not in exact:
                yield inner, name


class _CastModule:
    """Replaces a module's weights by copies in another dtype while it runs."""

    def __init__(self, slots: list[Slot], dtype: torch.dtype) -> None:
        self._slots = slots
        self._dtype = dtype
        self._masters: list[Any] = []

    @classmethod
    def install(cls, module: nn.Module, slots: list[Slot], dtype: torch.dtype) -> None:
        """Add the hooks; they also run when activation checkpointing recomputes a layer."""
        cast_module = cls(slots, dtype)
        module.register_forward_pre_hook(cast_module.begin, with_kwargs=True)
        module.register_forward_hook(cast_module.end, always_call=True)

    def begin(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Cast weights and inputs."""
        self._masters = [inner._parameters[name] for inner, name in self._slots]
        for (inner, name), master in zip(self._slots, self._masters, strict=True):
            inner._parameters[name] = master.to(self._dtype)  # not a leaf: it has a gradient
        return self._cast(args), self._cast(kwargs)

    def end(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        """Restore the weights, also after an error."""
        for (inner, name), master in zip(self._slots, self._masters, strict=True):
            inner._parameters[name] = master
        self._masters = []

    def _cast(self, value: Any) -> Any:
        """Cast the floating-point tensors in arguments, as FSDP2 does."""
        if isinstance(value, Tensor):
            return value.to(self._dtype) if value.is_floating_point() else value
        if isinstance(value, dict):
            items = cast("dict[str, Any]", value).items()
            return {name: self._cast(item) for name, item in items}
        if type(value) in (tuple, list):
            return type(value)(map(self._cast, value))
        return value
