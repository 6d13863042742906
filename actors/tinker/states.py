"""The models' states on disk: adapter, optimiser, and the operation behind which they were written.

A state is written directly behind an `optim_step`, when no gradients are pending, so that the
operations behind it, done again, lead to the same bits. It is there whole or not at all.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...schemas.tinker.names import CheckpointName, ModelName
from ...schemas.tinker.operation import ModelInfo
from ...schemas.wire.errors import MessageError, ModelError, StorageError
from .adapters import Adapters
from .checkpoints.folders import CheckpointFolders
from .history import ModelHistory
from .models import TrainedModel

STATES = "tinker"
"""Folder of a run in which its models' states and checkpoints lie."""
_META = "tinker.json"
_SUSPENDED = "suspended.safetensors"


@dataclass(frozen=True)
class SavedState:
    """One model's newest state."""

    user: str
    name: ModelName
    applied: int
    info: ModelInfo
    folder: Path
    history: ModelHistory
    tokens: int = 0


class States:
    """The folder of one trainer's states; named checkpoints are found there, too."""

    def __init__(self, folder: Path) -> None:
        """Keep them below `folder`."""
        self.folder = folder
        """Where they lie."""
        self._folders = CheckpointFolders(folder)

    def read_all(self) -> list[SavedState]:
        """Return the newest state of each model; raises StorageError."""
        found: list[SavedState] = []
        for place in sorted(self.folder.glob("*/*/state")):
            numbers = sorted(int(one.name) for one in place.iterdir() if one.name.isdigit())
            if numbers:
                found.append(_read_state(place / str(numbers[-1])))
        return found

    def save(self, adapters: Adapters, model: TrainedModel) -> None:
        """Write a model's state behind its newest operation; older ones go."""
        place = self._place(model.user, model.name) / "state"
        folder = place / str(model.applied)
        if model.info is None or folder.is_dir():
            return
        meta = {"user": model.user, "applied": model.applied, "info": model.info.to_map()}
        meta |= {"history": model.history.to_map(), "tokens": model.tokens}
        self._write(adapters, model, folder, meta, with_optimizer=True)
        for old in place.iterdir():
            # what is newer was written by a trainer after this one
            if not old.name.isdigit() or int(old.name) < model.applied:
                shutil.rmtree(old, ignore_errors=True)

    def load(self, adapters: Adapters, model: TrainedModel) -> None:
        """Bring a model back to its newest state; raises ModelError for one that is damaged."""
        folder = self._place(model.user, model.name) / "state" / str(model.saved)
        adapters.load(model.key, folder, with_optimizer=True)

    def suspend(self, adapters: Adapters, model: TrainedModel) -> None:
        """Take a model out of memory, written down as it is now; raises StorageError."""
        adapters.suspend(model.key, self._suspended(model))

    def resume(self, adapters: Adapters, model: TrainedModel) -> None:
        """Bring a model back as it was when it was taken out of memory; raises ModelError."""
        file = self._suspended(model)
        adapters.resume(model.key, file)
        file.unlink()

    def forget_suspended(self) -> None:
        """Remove what an earlier trainer has written down: it is in the log as well."""
        for file in self.folder.glob(f"*/*/{_SUSPENDED}"):
            file.unlink()

    def info_of(self, user: str, name: CheckpointName) -> ModelInfo:
        """Return what a named checkpoint holds that a user may read; raises NotFoundError."""
        return self._folders.find(user, name).info

    def place_of(self, user: str, name: CheckpointName) -> Path:
        """Return the folder of a named checkpoint that a user may read; raises NotFoundError.

        One that is saved anew under its name has another folder.
        """
        return self._folders.find(user, name).folder

    def forget(self, model: TrainedModel) -> None:
        """Remove a model's states; its named checkpoints stay."""
        place = self._place(model.user, model.name) / "state"
        shutil.rmtree(place, ignore_errors=True)
        self._suspended(model).unlink(missing_ok=True)

    def _suspended(self, model: TrainedModel) -> Path:
        return self._place(model.user, model.name) / _SUSPENDED

    def _place(self, user: str, name: ModelName) -> Path:
        return self.folder / user / f"{name.session}.train.{name.number}"

    def _write(
        self,
        adapters: Adapters,
        model: TrainedModel,
        folder: Path,
        meta: dict[str, Any],
        *,
        with_optimizer: bool,
    ) -> None:
        hidden = folder.with_name(f".{folder.name}")
        try:
            shutil.rmtree(hidden, ignore_errors=True)
            hidden.parent.mkdir(parents=True, exist_ok=True)
            adapters.save(model.key, hidden, with_optimizer=with_optimizer)
            (hidden / _META).write_text(json.dumps(meta), encoding="utf-8")
            hidden.rename(folder)
        except OSError as error:
            raise StorageError(
                f"{folder} cannot be written: {error.strerror}", hint="see the disk of the pool"
            ) from error


def _meta(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / _META).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{folder} is damaged: {error}", hint="restore it from a back-up, or remove it"
        ) from error


def _read_state(folder: Path) -> SavedState:
    meta = _meta(folder)
    try:
        info = ModelInfo.from_map(meta["info"])
        name, applied = ModelName.parse(info.model), int(meta["applied"])
        history = ModelHistory(meta.get("history"))
        tokens = int(meta.get("tokens", 0))
        return SavedState(meta["user"], name, applied, info, folder, history, tokens)
    except (KeyError, TypeError, MessageError) as error:
        raise ModelError(f"{folder} is damaged: {error}", hint="restore it") from error
