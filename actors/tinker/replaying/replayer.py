"""Does the operations of one model again, and compares with what is stored to the bit."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ....schemas.tinker.names import CheckpointName, ModelName
from ....schemas.tinker.operation import ModelInfo, OperationResult
from ....schemas.wire.errors import NotFoundError
from ...storage.tinker_checkpoints import CheckpointFolders
from ..adapter_cache import SavedState, States
from ..apply import Applying
from ..checkpoints.user_records import KeptByTrainer
from ..models import TrainedModel
from ..operations import Doing
from ..training.folders import read_adapter
from ..training.trainer import AdapterTrainer
from .archive import KeptOperation, digest_of

_NAMED = frozenset({"save_weights", "save_weights_for_sampler"})


@dataclass
class ModelReplay:
    """What became of one model."""

    model: str
    operations: int = 0
    """Operations that were done again."""
    compared: list[str] = field(default_factory=list[str])
    """Checkpoints and states that the adapter was compared with."""
    differing: list[str] = field(default_factory=list[str])
    """What was not the same, in words; empty if every bit was."""

    @property
    def identical(self) -> bool:
        """Whether every bit is the same."""
        return not self.differing


class ReplayStates(States):
    """Checkpoints as the operations find them: those that were made again, then those stored."""

    def __init__(self, made: Path, stored: Path) -> None:
        """Look below `made` first."""
        super().__init__(made)
        self._stored = States(stored)

    def info_of(self, user: str, name: CheckpointName) -> ModelInfo:
        """See States."""
        try:
            return super().info_of(user, name)
        except NotFoundError:
            return self._stored.info_of(user, name)

    def place_of(self, user: str, name: CheckpointName) -> Path:
        """See States."""
        try:
            return super().place_of(user, name)
        except NotFoundError:
            return self._stored.place_of(user, name)


class Replayer:
    """Does operations again with adapters of its own; what is stored is only read."""

    def __init__(
        self, adapters: AdapterTrainer, base: ModelInfo, *, made: Path, stored: Path
    ) -> None:
        """Write what is saved below `made`, and compare it with what lies below `stored`."""
        self._adapters = adapters
        self._applying = Applying(adapters, ReplayStates(made, stored), KeptByTrainer(made), base)
        self._made, self._stored = CheckpointFolders(made), CheckpointFolders(stored)
        self._states = States(stored).read_all()

    def replay(
        self,
        user: str,
        name: ModelName,
        kept: Sequence[KeptOperation],
        progress: Callable[[int, int], None] | None = None,
    ) -> ModelReplay:
        """Do all operations of a model again; raises NotFoundError if some were not kept."""
        _check_whole(name, kept)
        model, found = TrainedModel(user, name), ModelReplay(str(name))
        states = {one.applied: one for one in self._states if (one.user, one.name) == (user, name)}
        for one in kept:
            result = self._done(model, one)
            if digest_of(result) != one.digest:
                found.differing.append(f"the result of operation {one.operation.seq}")
            model.applied, found.operations = one.operation.seq, found.operations + 1
            if one.operation.kind in _NAMED and result.state == "done":
                self._compare_saved(model, result, found)
            if model.applied in states:
                self._compare_state(model, states[model.applied], found)
            if progress is not None:
                progress(found.operations, len(kept))
        if model.key in self._adapters.models:
            self._adapters.evict(model.key)
        return found

    def _done(self, model: TrainedModel, kept: KeptOperation) -> OperationResult:
        operation = kept.operation
        doing = Doing(self._applying.begin(model, operation, operation.companies))
        while not isinstance(piece := doing.next(), OperationResult):
            if piece is None:
                try:
                    self._applying.advance([doing.loss])
                except Exception as error:  # noqa: BLE001  it is the operation's result
                    return doing.failed(error)
                doing.computed()
        return piece

    def _compare_state(self, model: TrainedModel, state: SavedState, found: ModelReplay) -> None:
        what = f"the state behind operation {state.applied}"
        self._compare(model, state.folder, what, found, with_optimizer=True)

    def _compare_saved(
        self, model: TrainedModel, result: OperationResult, found: ModelReplay
    ) -> None:
        """Compare a named checkpoint, if it is still the one that this operation has saved."""
        for kind in ("weights", "sampler_weights"):
            for place in self._made.place_of(
                model.user, CheckpointName(model.name, kind, "-")
            ).parent.glob("*"):
                name = CheckpointName(model.name, kind, place.name)
                stored = self._stored.read(model.user, name)
                if stored is not None and stored.seq == model.applied and not stored.gone:
                    self._compare(model, stored.folder, str(name), found, with_optimizer=False)

    def _compare(
        self,
        model: TrainedModel,
        folder: Path,
        what: str,
        found: ModelReplay,
        *,
        with_optimizer: bool,
    ) -> None:
        stored = read_adapter(folder, with_optimizer=with_optimizer)
        pairs = [("", self._adapters.tensors(model.key), stored.tensors)]
        if with_optimizer and stored.moments is not None:
            made = self._adapters.moments(model.key)
            pairs += [("exp_avg of ", made.first, stored.moments.first)]
            pairs += [("exp_avg_sq of ", made.second, stored.moments.second)]
        found.compared.append(what)
        found.differing += [
            f"{part}{tensor} of {what}"
            for part, ours, theirs in pairs
            for tensor in theirs
            if tensor not in ours or not torch.equal(_bits(ours[tensor]), _bits(theirs[tensor]))
        ]


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def _check_whole(name: ModelName, kept: Sequence[KeptOperation]) -> None:
    for seq, one in enumerate(kept):
        if one.operation.seq != seq:
            raise NotFoundError(
                f"operation {seq} of {name} was not kept",
                hint="tinker.history_mb says how much is kept; models that rest longest go first",
            )
