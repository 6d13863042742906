"""The optimiser: made, and its state written and read.

Several ranks write the state together, by torch.distributed.checkpoint. Each writes the parts that
it holds, and reads those that it needs whichever rank wrote them: a checkpoint is not tied to the
number of ranks. One process reads it, too.
"""

# torch leaves some of its methods untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import contextlib
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from ....broker.disk.room import remedy
from ....schemas.config.learner import LearnerConfig
from ....schemas.wire.errors import ConfigError, StorageError
from .optimizers.muon import MUON, Muon, split
from .parallel import Parallel, divided
from .shared_files import folder_of_all

_REMOVED = "adamw_8bit"
"""An optimiser of earlier versions, whose states are told apart from AdamW's."""
_UNREADABLE = "resume from an earlier checkpoint of the run, or fork its weights"


def make_optimizer(
    model: nn.Module, config: LearnerConfig, learning_rate: float
) -> torch.optim.Optimizer:
    """Return a fresh optimiser for what is trained of a model, as the learner is configured.

    The rate is another one for a critic.
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
    """Return torch's AdamW with the learner's settings but for the rate."""
    return torch.optim.AdamW(
        parameters,
        lr=learning_rate,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )


def save_optimizer(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, parallel: Parallel
) -> Callable[[], None]:
    """Write the state of an optimiser: a folder by all ranks at once, or later a file by one."""
    if parallel.sharded:
        _save_together(path, model, optimizer, parallel)
        return lambda: None
    return lambda: torch.save(optimizer.state_dict(), path.with_suffix(".pt"))


def load_optimizer(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load the state of an optimiser, whether one rank wrote it or several.

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
            kept = state["state"][number].items()
            state["state"][number] = {key: divided(value, parameter) for key, value in kept}
    optimizer.load_state_dict(state)


def _save_together(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, parallel: Parallel
) -> None:
    """Write the state of an optimiser; all ranks do so together.

    Raises StorageError on all ranks if one of them cannot write.
    """
    state = _state(model, optimizer) if optimizer.state else _settings(optimizer)
    try:
        with _alone_without_a_warning(), folder_of_all(folder, parallel) as here:
            save({"optimizer": state}, checkpoint_id=here, no_dist=_is_whole(model))
    except CheckpointException as error:
        raise StorageError(
            f"the optimiser state in {folder} could not be written: {_reason(error)}",
            hint=remedy(error, folder),
        ) from error


def _load_together(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Read the state of an optimiser, each rank what it holds of it.

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
    """Return the state in this rank's parts; of a fresh optimiser one of the same shapes."""
    return get_optimizer_state_dict(model, optimizer)


def _settings(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return all that an optimiser has before its first update, in the form of its state.

    torch would make an update of zeros to have a state, which counts.
    """
    groups = optimizer.param_groups
    kept = [{name: group[name] for name in group if name != "params"} for group in groups]
    return {"param_groups": kept}


def _names_in(folder: Path) -> set[str]:
    """Return the names that a state written by several ranks has.

    Raises StorageError if it cannot be read.
    """
    try:
        return set(FileSystemReader(folder).read_metadata().state_dict_metadata)
    except (OSError, EOFError, pickle.UnpicklingError) as error:
        raise StorageError(
            f"the optimiser state in {folder} cannot be read: {error}", hint=_UNREADABLE
        ) from error


def _require_same(path: Path, optimizer: torch.optim.Optimizer, saved: set[str]) -> None:
    """Raise ConfigError unless a state, known by the names in it, is that of this optimiser."""
    wanted = _kind({name for group in optimizer.param_groups for name in group})
    if (found := _kind(saved)) != wanted:
        raise ConfigError(
            f"{path} is the state of learner.optimizer={found}, and this run has {wanted}",
            hint=("" if found == _REMOVED else f"set learner.optimizer={found}, or ")
            + "begin a new run with the checkpoint's weights: `tinkermq train CONFIG --from "
            "RUN@STEP`",
        )


def _kind(names: set[str]) -> str:
    """Return the optimiser among whose settings there are these."""
    return next((name for name in (MUON, _REMOVED) if name in names), "adamw")


def _is_whole(model: nn.Module) -> bool:
    return not any(isinstance(weight, DTensor) for weight in model.parameters())


def _reason(error: CheckpointException) -> str:
    return "; ".join(f"rank {rank}: {failed[0]}" for rank, failed in error.failures.items())


@contextlib.contextmanager
def _alone_without_a_warning() -> Iterator[None]:
    """Let one process use what several are meant for; torch remarks on it each time."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
