"""The optimiser: made, and its state written and read.

Several ranks write the state together, by torch.distributed.checkpoint. Each writes the parts that
it holds, and reads those that it needs whichever rank wrote them: a checkpoint is not tied to the
number of ranks. One process reads it, too.
"""

# torch leaves some of its methods untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from ....schemas.config.learner import LearnerConfig
from ....schemas.wire.errors import StorageError
from .parallel import Parallel, divided
from .shared_files import folder_of_all


def make_optimizer(
    parameters: Iterable[nn.Parameter], config: LearnerConfig, learning_rate: float
) -> torch.optim.AdamW:
    """Return a fresh optimiser for parameters, with the learner's settings but for the rate."""
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
    """Load the state of an optimiser, whether one rank wrote it or several."""
    if path.is_dir():
        _load_together(path, model, optimizer)
        return
    state = torch.load(path.with_suffix(".pt"), weights_only=True, map_location="cpu")
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
    state = get_optimizer_state_dict(model, optimizer)
    try:
        with _alone_without_a_warning(), folder_of_all(folder, parallel) as here:
            save({"optimizer": state}, checkpoint_id=here, no_dist=_is_whole(model))
    except CheckpointException as error:
        raise StorageError(
            f"the optimiser state in {folder} could not be written: {_reason(error)}",
            hint="free some space; earlier checkpoints are whole and training goes on",
        ) from error


def _load_together(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Read the state of an optimiser, each rank what it holds of it.

    Raises StorageError if it cannot be read.
    """
    state = get_optimizer_state_dict(model, optimizer)  # fresh, in the shapes that are read
    try:
        with _alone_without_a_warning():
            load({"optimizer": state}, checkpoint_id=folder, no_dist=_is_whole(model))
    except CheckpointException as error:
        raise StorageError(
            f"the optimiser state in {folder} cannot be read: {_reason(error)}",
            hint="resume from an earlier checkpoint of the run, or fork its weights",
        ) from error
    set_optimizer_state_dict(model, optimizer, state)


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
