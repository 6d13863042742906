"""Checkpoints of runs, taken over as checkpoints that programs written for Tinker load."""

import os
import time
from collections.abc import Collection, Iterable
from pathlib import Path

from ...broker.run_folder import Folder
from ...schemas.config.job import JobConfig
from ...schemas.job import JobRecord
from ...schemas.tinker.names import CheckpointName
from ...schemas.tinker.operation import ModelInfo
from ...schemas.wire.errors import NotFoundError, QuotaError, StorageError
from ..policy.lora import base_of, config_of
from .tinker_checkpoints import TINKER_FOLDER, CheckpointFolders, StoredCheckpoint

_ATTENTION = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj"})
_MLP = frozenset({"gate_proj", "up_proj", "down_proj", "gate_up_proj"})
_UNEMBED = frozenset({"lm_head"})


def take_over(
    folder: Path, services: Iterable[tuple[JobRecord, JobConfig]], user: str, path: str
) -> ModelInfo:
    """Copy an adapter's folder to the run folder of the service that has its base model.

    Returns what it is; one that is there already stays. Raises NotFoundError where no service has
    the base, QuotaError, StorageError.
    """
    base = os.path.realpath(base_of(folder))
    for service, config in services:
        if os.path.realpath(config.model.path) == base:
            return _copy(folder, service, config, user, path)
    raise NotFoundError(
        f"no service for the Tinker API has the base model of {path}, {base}",
        hint=f"an admin starts one: `tinkermq tinker up --model NAME={base}`",
    )


def _copy(folder: Path, service: JobRecord, config: JobConfig, user: str, path: str) -> ModelInfo:
    name = CheckpointName.parse(path)
    folders = CheckpointFolders(Path(service.run_dir) / TINKER_FOLDER)
    known = folders.read(user, name)
    if known is not None and known.is_there(time.time()):
        return known.info
    with Folder(folder) as taken:
        size = sum(entry.num_bytes for entry in taken.files())
    used = folders.size_of(user)
    if used + size > config.tinker.checkpoint_mb << 20:
        raise QuotaError(
            f"the checkpoints of user {user!r} have {used:,} bytes; {size:,} more are over the "
            f"limit of {config.tinker.checkpoint_mb} MiB (tinker.checkpoint_mb)",
            hint="delete some",
        )
    stored = StoredCheckpoint(
        user=user,
        name=name,
        place=folders.place_of(user, name),
        info=_info(folder, config, name),
        seq=0,
        time=time.time(),
        size_bytes=size,
    )
    seq = stored.folder.name
    try:
        with Folder(folder.parent) as run, Folder(stored.place, make=True) as place:
            place.remove(seq)  # of a copy that was cut off
            run.copy(folder.name, place, seq, leave_out=["learner"])
    except OSError as error:
        raise StorageError(
            f"{folder} cannot be copied to {stored.folder}: {error}", hint="see the pool's disk"
        ) from error
    folders.commit(stored)
    return stored.info


def _info(folder: Path, config: JobConfig, name: CheckpointName) -> ModelInfo:
    lora = config_of(folder)
    targets = {lora.targets} if isinstance(lora.targets, str) else set(lora.targets)
    last = {target.rpartition(".")[2] for target in targets}
    return ModelInfo(
        model=str(name.model),
        base=config.tinker.base,
        folder=config.model.path,
        arch="",
        rank=lora.max_rank,
        train_attn=_any(last, _ATTENTION),
        train_mlp=_any(last, _MLP),
        train_unembed=_any(last, _UNEMBED),
    )


def _any(targets: Collection[str], layers: frozenset[str]) -> bool:
    return "all-linear" in targets or not layers.isdisjoint(targets)
