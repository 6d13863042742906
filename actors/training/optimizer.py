"""The optimiser: its construction, its learning rate, and writing and reading its state.

Several ranks write the state together with torch.distributed.checkpoint. Each rank writes its own
parts, and reads the parts that it needs from any rank's files: any number of ranks can read a
checkpoint, also a single process.

Muon makes the momentum of a hidden matrix orthogonal (kellerjordan.github.io/posts/muon). The
update is scaled so that it is as large as AdamW's are (a root mean square of 0.2, arXiv
2502.16982), so that one learning rate serves for both. The formulas and constants are those of
`torch.optim.Muon`, which computes in bfloat16 alone: there a gradient that differs in its last bit,
as that of other numbers of ranks does, moves a weight otherwise by hundredths of its update.

Shape letters: M and N rows and columns, the fewer first; leading dimensions are many matrices.
"""

# torch leaves some of its methods untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import contextlib
import math
import pickle
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor, Replicate

from ...schemas.config.sections import LearnerConfig, resolve_dtype
from ...schemas.local.disk import remedy
from ...schemas.wire.errors import ConfigError, StorageError
from ..weights.tensors import DTYPES
from .parallel import Parallel, divided
from .ranks import folder_of_all

# -- Muon ------------------------------------------------------------------------------------------

_LINEAR, _CUBIC, _QUINTIC = 3.4445, -4.7750, 2.0315
"""Coefficients that make small singular values grow fastest; all values end between 0.7 and 1.2."""
_STEPS = 5
_EPS = 1e-7
_RMS_OF_ADAMW = 0.2
_MOMENTUM = "momentum_buffer"
MUON = "muon"
"""Key that marks the group of Muon's matrices in a state."""


class Muon(torch.optim.Optimizer):
    """Muon, with Nesterov momentum and decoupled weight decay, for hidden matrices; AdamW for the
    rest.

    Schedules, checkpoints and ranks treat it as one optimiser with two parameter groups.
    """

    def __init__(
        self,
        matrices: Sequence[nn.Parameter],
        rest: torch.optim.AdamW | None,
        config: LearnerConfig,
        learning_rate: float,
    ) -> None:
        """`rest` updates all other parameters; None: there are no others."""
        self._adamw = rest
        # A learner that computes in 16 bits also orthogonalises in 16 bits.
        on_gpu = any(matrix.is_cuda for matrix in matrices)
        self._dtype = DTYPES[resolve_dtype(config.dtype, on_gpu=on_gpu)]
        own: dict[str, Any] = {
            "params": list(matrices),
            "lr": learning_rate,
            "weight_decay": config.weight_decay,
            MUON: True,
            "momentum": config.muon_momentum,
        }
        groups = [own] if matrices else []
        super().__init__([*groups, *(rest.param_groups if rest else [])], {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Make one update with the current gradients."""
        assert closure is None
        for group in self.param_groups:
            if MUON in group:
                moved = [weight for weight in group["params"] if weight.grad is not None]
                self._update(moved, [self.state[weight] for weight in moved], group)
        if self._adamw is not None:
            # Loading a state replaces both.
            self._adamw.param_groups = [group for group in self.param_groups if MUON not in group]
            self._adamw.state = self.state
            self._adamw.step()

    def _update(self, matrices: list[Tensor], states: list[dict[str, Any]], group: Any) -> None:
        """Update matrices with their orthogonalised momentum."""
        share = dist.get_world_size() if _is_divided(matrices) else 1
        for begin in range(0, len(matrices), share):
            some = matrices[begin : begin + share]
            ahead = [
                self._ahead(weight, state, group["momentum"])
                for weight, state in zip(some, states[begin:], strict=False)
            ]
            for weight, update in zip(some, self._orthogonal(ahead), strict=True):
                rate = group["lr"] * (_RMS_OF_ADAMW * math.sqrt(max(weight.shape[-2:])))
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(update, alpha=-rate)

    @staticmethod
    def _ahead(weight: Tensor, state: dict[str, Any], momentum: float) -> Tensor:
        """Add a gradient to the momentum; return the momentum one step ahead (Nesterov)."""
        gradient = weight.grad
        assert gradient is not None
        if not state:
            state[_MOMENTUM] = torch.zeros_like(weight)
        state[_MOMENTUM].lerp_(gradient, 1 - momentum)
        return gradient.lerp(state[_MOMENTUM], momentum)

    def _orthogonal(self, updates: list[Tensor]) -> list[Tensor]:
        """Orthogonalise updates; for sharded updates, each rank computes one for all ranks."""
        if not _is_divided(updates):
            return [orthogonal(update, self._dtype) for update in updates]
        wholes = [self._gathered(update) for update in updates]
        own = dist.get_rank()
        if own < len(wholes):
            wholes[own] = orthogonal(wholes[own], self._dtype).contiguous()
        made: list[Tensor] = []
        for rank, (whole, like) in enumerate(zip(wholes, updates, strict=True)):
            dist.broadcast(whole, rank)
            made.append(_part(whole, like))
        return made

    def _gathered(self, update: Any) -> Tensor:
        return update.to(self._dtype).full_tensor().contiguous()


def orthogonal(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Return U S Vᵀ with singular values S near 1 where `matrix` has U, S and V, in `dtype`.

    Uses five steps of Newton-Schulz: X ← a X + (b XXᵀ + c (XXᵀ)²) X.
    """
    is_high = matrix.shape[-2] > matrix.shape[-1]
    x_MN: Tensor = matrix.to(dtype).mT if is_high else matrix.to(dtype)
    x_MN = x_MN / x_MN.norm(dim=(-2, -1), keepdim=True).clamp(min=_EPS)
    multiply_add: Any = torch.addmm if matrix.ndim == 2 else torch.baddbmm
    for _ in range(_STEPS):
        gram_MM = x_MN @ x_MN.mT
        by_MM = multiply_add(gram_MM, gram_MM, gram_MM, beta=_CUBIC, alpha=_QUINTIC)
        x_MN = multiply_add(x_MN, by_MM, x_MN, beta=_LINEAR)
    return x_MN.mT if is_high else x_MN


def _is_divided(tensors: list[Tensor]) -> bool:
    return any(isinstance(tensor, DTensor) for tensor in tensors)


def _part(whole: Tensor, like: Tensor) -> Tensor:
    """Return this rank's part of a full tensor, sharded like another tensor."""
    assert isinstance(like, DTensor)
    mesh = like.device_mesh
    everywhere = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return everywhere.redistribute(mesh, like.placements)


def split(
    model: nn.Module, parameters: Sequence[nn.Parameter]
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Split parameters into hidden matrices and all other parameters.

    A tensor with more than two dimensions counts as many matrices, as some models store experts.
    """
    apart = _not_hidden(model)
    matrices = [each for each in parameters if each.ndim in (2, 3) and id(each) not in apart]
    matrix_ids = {id(each) for each in matrices}
    return matrices, [each for each in parameters if id(each) not in matrix_ids]


def _not_hidden(model: nn.Module) -> set[int]:
    """Return the ids of the parameters of embeddings, convolutions and the output layer."""
    output: nn.Module = cast(Any, model).get_output_embeddings()
    kinds = (nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    modules = [module for module in model.modules() if isinstance(module, kinds)]
    return {id(weight) for module in [*modules, output] for weight in module.parameters()}


_REMOVED = "adamw_8bit"
"""An optimiser of earlier versions; its states differ from AdamW's."""
_UNREADABLE = "resume from an earlier checkpoint of the run, or fork its weights"


def make_optimizer(
    model: nn.Module, config: LearnerConfig, learning_rate: float
) -> torch.optim.Optimizer:
    """Return a new optimiser for the trained weights of a model, as the learner is configured.

    A critic has its own learning rate.
    """
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    if config.optimizer == "adamw":
        return _adamw(trained, config, learning_rate)
    matrices, rest = split(model, trained)
    of_rest = _adamw(rest, config, learning_rate) if rest else None
    return Muon(matrices, of_rest, config, learning_rate)


def _adamw(
    parameters: list[nn.Parameter], config: LearnerConfig, learning_rate: float
) -> torch.optim.AdamW:
    """Return torch's AdamW with the learner's settings and the learning rate `rate`."""
    return torch.optim.AdamW(
        parameters,
        lr=learning_rate,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )


def optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, parallel: Parallel
) -> dict[str, Any]:
    """Return an optimiser's state for a checkpoint: this rank's parts, by reference."""
    if not parallel.sharded:
        return optimizer.state_dict()
    return _state(model, optimizer) if optimizer.state else _settings(optimizer)


def save_optimizer(path: Path, state: dict[str, Any], parallel: Parallel) -> Callable[[], None]:
    """Write an optimiser's state: a folder by all ranks together, or later a file by one rank.

    A single process writes a file that is read without executing pickled code. Raises StorageError
    on all ranks if one of them cannot write.
    """
    if parallel.sharded:
        _save_together(path, state, parallel)
        return lambda: None
    return lambda: torch.save(state, path.with_suffix(".pt"))


def load_optimizer(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load the state of an optimiser, written by one rank or several.

    Raises ConfigError for the state of another optimiser, StorageError if it cannot be read.
    """
    if path.is_dir():
        _load_together(path, model, optimizer)
        return
    state = torch.load(path.with_suffix(".pt"), weights_only=True, map_location="cpu")
    _require_same(path, optimizer, {name for group in state["param_groups"] for name in group})
    parameters = [weight for group in optimizer.param_groups for weight in group["params"]]
    for number, parameter in enumerate(parameters):
        if number in state["state"]:
            items = state["state"][number].items()
            state["state"][number] = {key: divided(value, parameter) for key, value in items}
    optimizer.load_state_dict(state)


def _save_together(folder: Path, state: dict[str, Any], parallel: Parallel) -> None:
    """Write the state of an optimiser; called on all ranks together."""
    try:
        with folder_of_all(folder, parallel) as here:
            save({"optimizer": state}, checkpoint_id=here, process_group=parallel.group)
    except CheckpointException as error:
        raise StorageError(
            f"the optimiser state in {folder} could not be written: {_reason(error)}",
            hint=remedy(error, folder),
        ) from error


def _load_together(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Read the state of an optimiser; each rank reads its own parts.

    Raises StorageError if it cannot be read.
    """
    saved = _names_in(folder)
    _require_same(folder, optimizer, {name.rpartition(".")[2] for name in saved})
    has_begun = any(name.startswith("optimizer.state.") for name in saved)
    state = _state(model, optimizer) if has_begun else _settings(optimizer)
    try:
        with _alone_without_a_warning():
            load({"optimizer": state}, checkpoint_id=folder, no_dist=_is_whole(model))
    except CheckpointException as error:
        raise StorageError(
            f"the optimiser state in {folder} cannot be read: {_reason(error)}", hint=_UNREADABLE
        ) from error
    if has_begun:
        set_optimizer_state_dict(model, optimizer, state)
        return
    for group, settings in zip(optimizer.param_groups, state["param_groups"], strict=True):
        group.update(settings)


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return this rank's parts of the state; for a new optimiser, a state of the same shapes."""
    return get_optimizer_state_dict(model, optimizer)


def _settings(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state of an optimiser before its first update.

    To create a state, torch would make an update of zeros, which counts as a step.
    """
    groups = optimizer.param_groups
    settings = [{name: group[name] for name in group if name != "params"} for group in groups]
    return {"param_groups": settings}


def _names_in(folder: Path) -> set[str]:
    """Return the names in a state written by several ranks.

    Raises StorageError if it cannot be read.
    """
    try:
        return set(FileSystemReader(folder).read_metadata().state_dict_metadata)
    except (OSError, EOFError, pickle.UnpicklingError) as error:
        raise StorageError(
            f"the optimiser state in {folder} cannot be read: {error}", hint=_UNREADABLE
        ) from error


def _require_same(path: Path, optimizer: torch.optim.Optimizer, saved: set[str]) -> None:
    """Raise ConfigError unless a state is of this optimiser's kind, by the names in it."""
    own_kind = _kind({name for group in optimizer.param_groups for name in group})
    if (saved_kind := _kind(saved)) != own_kind:
        raise ConfigError(
            f"{path} is the state of learner.optimizer={saved_kind}, and this run has {own_kind}",
            hint=("" if saved_kind == _REMOVED else f"set learner.optimizer={saved_kind}, or ")
            + "begin a new run with the checkpoint's weights: `tinkermq train CONFIG --from "
            "RUN@STEP`",
        )


def _kind(names: set[str]) -> str:
    """Return the name of the optimiser that has these settings."""
    return next((name for name in (MUON, _REMOVED) if name in names), "adamw")


def _is_whole(model: nn.Module) -> bool:
    return not any(isinstance(weight, DTensor) for weight in model.parameters())


def _reason(error: CheckpointException) -> str:
    return "; ".join(f"rank {rank}: {failed[0]}" for rank, failed in error.failures.items())


@contextlib.contextmanager
def _alone_without_a_warning() -> Iterator[None]:
    """Silence torch's warning about distributed checkpoints in a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


# -- the learning rate -----------------------------------------------------------------------------


def _decay(kind: str, progress: float) -> float:
    """Decay from 1 at progress 0 to 0 at progress 1."""
    if kind == "linear":
        return 1.0 - progress
    if kind == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    raise ConfigError(
        f"learner.schedule={kind} does not exist", hint="choose constant, linear or cosine"
    )


def learning_rate(
    step: int,
    *,
    base: float,
    kind: str = "constant",
    warmup_steps: int = 0,
    total_steps: int | None = None,
    min_ratio: float = 0.0,
) -> float:
    """Return the learning rate of `step` (from 0).

    It rises linearly over `warmup_steps` to `base` at the last of them; it is never 0. Then it is
    constant, or falls to `min_ratio * base` at the last step and stays there.
    """
    if step < warmup_steps:
        return base * (step + 1) / warmup_steps
    if kind == "constant":
        return base
    if total_steps is None:
        raise ConfigError(
            f"learner.schedule={kind} needs a known number of steps",
            hint="set training.num_steps, or learner.schedule=constant",
        )
    span = max(total_steps - 1 - warmup_steps, 1)
    progress = min((step - warmup_steps) / span, 1.0)
    return base * (min_ratio + (1.0 - min_ratio) * _decay(kind, progress))


def rate_of(learner: LearnerConfig, step: int, base: float, total_steps: int) -> float:
    """Return the learning rate of training step `step` (from 1), as the learner is configured."""
    return learning_rate(
        step - 1,
        base=base,
        kind=learner.schedule,
        warmup_steps=learner.warmup_steps,
        total_steps=total_steps,
        min_ratio=learner.min_lr_ratio,
    )
