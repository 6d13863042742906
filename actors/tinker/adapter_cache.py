"""Adapters in memory, as many as fit; the others are on disk.

A model with a ready operation is loaded again, to the same bits, in the place of the least recently
used one. A model whose operation has begun stays, and one that was loaded stays for a moment, since
its gradients would have to be written as well.
"""

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import structlog

from ...schemas.tinker.datum import LoraSpec
from ...schemas.tinker.names import ModelName
from ...schemas.tinker.operation import ModelInfo
from ...schemas.wire.errors import ModelError, NotFoundError, StorageError
from ..storage.files import new_folder
from .models import ModelHistory, Models, TrainedModel
from .training.trainer import AdapterTrainer

# Saved states: adapter, optimiser, pending gradients, and the number of the last operation, so that
# repeating later operations leads to the same bits. A state exists completely or not at all.

_META, _PENDING = "tinker.json", "pending.safetensors"
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
    is_pending: bool = False


class DamagedState(NamedTuple):
    """A model whose newest state cannot be read."""

    user: str
    name: ModelName
    reason: str


class AdapterStates:
    """The folder of one trainer's states."""

    def __init__(self, folder: Path) -> None:
        """Keep the states below `folder`."""
        self.folder = folder

    def read_all(self) -> tuple[list[SavedState], list[DamagedState]]:
        """Return the newest state of each model, and the models whose newest state is damaged."""
        states: list[SavedState] = []
        damaged: list[DamagedState] = []
        for place in sorted(self.folder.glob("*/*.train.*/state")):
            numbers = sorted(int(item.name) for item in place.iterdir() if item.name.isdigit())
            if not numbers:
                continue
            try:
                name = ModelName.of_folder(place.parent.name)
            except NotFoundError:  # a folder with another name
                continue
            try:
                states.append(_read_state(place / str(numbers[-1])))
            except ModelError as error:
                damaged.append(DamagedState(place.parents[1].name, name, error.message))
        return states, damaged

    def save(self, adapters: AdapterTrainer, model: TrainedModel) -> None:
        """Write a model's state after its newest operation, and remove older ones."""
        place = self._place(model.user, model.name) / "state"
        folder = place / str(model.applied)
        if model.info is None or folder.is_dir():
            return
        meta = {"user": model.user, "applied": model.applied, "info": model.info.to_map()}
        meta |= {"history": model.history.to_map(), "tokens": model.tokens}
        meta["pending"] = model.is_pending
        for unfinished in place.glob(".*"):  # of a killed process
            shutil.rmtree(unfinished, ignore_errors=True)
        with new_folder(folder, digests=False) as new:
            adapters.save(model.key, new, with_optimizer=True)
            if model.is_pending:
                adapters.save_pending(model.key, new / _PENDING)
            (new / _META).write_text(json.dumps(meta), encoding="utf-8")
        for old in place.iterdir():
            # newer ones were written by a trainer after this one
            if not old.name.isdigit() or int(old.name) < model.applied:
                shutil.rmtree(old, ignore_errors=True)

    def load(self, adapters: AdapterTrainer, model: TrainedModel) -> None:
        """Load a model's newest state; raises ModelError if it is damaged."""
        folder = self._place(model.user, model.name) / "state" / str(model.saved)
        adapters.load(model.key, folder, with_optimizer=True)
        if _meta(folder).get("pending"):
            adapters.load_pending(model.key, folder / _PENDING)

    def suspend(self, adapters: AdapterTrainer, model: TrainedModel) -> None:
        """Write a model as it is now, and evict it from memory; raises StorageError."""
        adapters.suspend(model.key, self._suspended(model))

    def resume(self, adapters: AdapterTrainer, model: TrainedModel) -> None:
        """Load a suspended model; raises ModelError."""
        file = self._suspended(model)
        adapters.resume(model.key, file)
        file.unlink()

    def forget_suspended(self) -> None:
        """Remove suspended models of an earlier trainer: the log has their operations."""
        for file in self.folder.glob(f"*/*/{_SUSPENDED}"):
            file.unlink()

    def forget(self, model: TrainedModel) -> None:
        """Remove a model's states; its named checkpoints stay."""
        place = self._place(model.user, model.name) / "state"
        shutil.rmtree(place, ignore_errors=True)
        self._suspended(model).unlink(missing_ok=True)

    def _suspended(self, model: TrainedModel) -> Path:
        return self._place(model.user, model.name) / _SUSPENDED

    def _place(self, user: str, name: ModelName) -> Path:
        return self.folder / user / name.folder


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
        is_pending = bool(meta.get("pending"))
        return SavedState(meta["user"], name, applied, info, folder, history, tokens, is_pending)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(f"{folder} is damaged: {error}", hint="restore it") from error


_STAY_S = 0.5
"""How long a loaded model with unsaved operations stays at least."""
_log: structlog.stdlib.BoundLogger = structlog.get_logger()


class AdapterCache:
    """The models in memory; used in the trainer's thread."""

    def __init__(
        self,
        adapters: AdapterTrainer,
        states: AdapterStates,
        models: Models,
        *,
        max_models: int,
        max_bytes: int,
    ) -> None:
        """Keep at most `max_models` of `max_bytes` together in memory."""
        self._adapters = adapters
        self._states = states
        self._models = models
        self._max_models = max_models
        self._max_bytes = max_bytes
        self._bytes: dict[str, int] = {}
        self._since: dict[str, float] = {}
        self._suspended: set[str] = set()
        self.num_suspended = 0
        """Number of suspensions to make room."""

    def find_admissible(self) -> Callable[[TrainedModel], bool]:
        """Return a function that says whether a model is in memory or can be loaded now."""
        can_evict = self._find_evictable() is not None
        return lambda model: model.key in self._bytes or can_evict or not self._is_full(model)

    def admit(self, model: TrainedModel) -> None:
        """Load a model, and evict others to make room; raises StorageError, ModelError."""
        if model.key in self._bytes:
            return
        while self._is_full(model) and (other := self._find_evictable()) is not None:
            self.evict(other)
        try:
            self._reload(model)
        except (NotFoundError, StorageError) as error:
            raise ModelError(
                f"{model.name} cannot be loaded again: {error.message}", hint=error.hint
            ) from error
        self._bytes[model.key] = self._bytes_of(model)
        self._since[model.key] = time.monotonic()

    def _reload(self, model: TrainedModel) -> None:
        if model.key in self._suspended:
            self._states.resume(self._adapters, model)
            self._suspended.discard(model.key)
        elif model.info is not None:
            self._states.load(self._adapters, model)

    def update_size(self, model: TrainedModel) -> None:
        """Update the size of a model in memory; one that could not be made is dropped."""
        if model.info is None:
            self._bytes.pop(model.key, None)
        else:
            self._bytes[model.key] = self._bytes_of(model)

    def evict_idle(self, idle_s: float) -> None:
        """Evict models that were unused for too long; a full disk is only logged."""
        now = time.monotonic()
        for model in self._in_memory():
            if model.running is None and not model.waiting and now - model.used > idle_s:
                try:
                    self.evict(model)
                except StorageError as error:
                    _log.warning("model_not_evicted", model=model.key, reason=error.message)

    def evict(self, model: TrainedModel) -> None:
        """Remove a model from memory; it is written first unless its saved state is current."""
        if model.saved == model.applied:
            self._adapters.evict(model.key)
        else:
            self._states.suspend(self._adapters, model)
            self._suspended.add(model.key)
            self.num_suspended += 1
        del self._bytes[model.key], self._since[model.key]

    def drop(self, model: TrainedModel) -> None:
        """Remove a model from memory without writing it."""
        self._suspended.discard(model.key)
        if model.key in self._bytes:
            self._adapters.evict(model.key)
            del self._bytes[model.key], self._since[model.key]

    def is_in_memory(self, model: TrainedModel) -> bool:
        """Whether a model is in memory."""
        return model.key in self._bytes

    def fits(self, model: TrainedModel) -> bool:
        """Whether a model is in memory, or there is room without evicting another."""
        return model.key in self._bytes or not self._is_full(model)

    def _is_full(self, model: TrainedModel) -> bool:
        if not self._bytes:
            return False  # one model always fits
        full = len(self._bytes) >= self._max_models
        return full or sum(self._bytes.values()) + self._bytes_of(model) > self._max_bytes

    def _bytes_of(self, model: TrainedModel) -> int:
        """Return the most bytes that a model takes; 0 before it is made."""
        return 0 if model.info is None else self._adapters.num_bytes_of(_spec(model.info))

    def _find_evictable(self) -> TrainedModel | None:
        """Return the least recently used model that may be evicted, or None."""
        now = time.monotonic()
        matches = [model for model in self._in_memory() if self._may_evict(model, now)]
        return min(matches, key=lambda model: model.used, default=None)

    def _may_evict(self, model: TrainedModel, now: float) -> bool:
        if model.running is not None:
            return False
        return model.saved == model.applied or now - self._since[model.key] > _STAY_S

    def _in_memory(self) -> list[TrainedModel]:
        return [model for model in self._models if model.key in self._bytes]


def _spec(info: ModelInfo) -> LoraSpec:
    return LoraSpec(
        info.rank,
        train_attn=info.train_attn,
        train_mlp=info.train_mlp,
        train_unembed=info.train_unembed,
    )
