"""Copies of a checkpoint's contents, written while training continues.

With several ranks, or on a GPU, each rank copies its tensors (on a GPU into reused pinned memory)
before training continues. A single process on a CPU copies nothing at first: its weights change
only in the next update, after the passes of a step. Tensors that are not written by then are copied
before the update, and a partly written file is written again from the copy: an update never waits
for a disk.

A separate thread writes the copy: each rank writes its parts of the optimiser's state (divided and
resharded by `torch.distributed.checkpoint`), and the first rank writes the model as a Hugging Face
folder. Collectives of that thread have a separate group.

`torch.distributed.checkpoint.async_save` is not used: its future completes when its own files are
written, but a checkpoint also needs the model, digests, fsync and the renamed folder; and with
`AsyncCheckpointerType.PROCESS` a process outlives a killed learner and continues writing. Its parts
are used: its stager, and `save` in the thread.
"""

# torch leaves some of its methods untyped, safetensors its paths.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import contextlib
import threading
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from ..policy.lora import policy_tensors
from ..policy.model_folder import save_model
from ..policy.policies import policy_folder
from .objective import EntropyBonus
from .optimizer import optimizer_state, save_optimizer
from .parallel import Parallel
from .ranks import Order, Ranks

OPTIMIZER = "learner/optimizer"
"""A folder written by several ranks, or, with the suffix `.pt`, the file of a single rank."""
CRITIC = "learner/critic.safetensors"
CRITIC_OPTIMIZER = "learner/critic_optimizer"
REFERENCE = "learner/reference.safetensors"
SAVE = Order("save", {})


class HostCopies:
    """Copies tensors into host memory, as torch.distributed.checkpoint stages them.

    GPU tensors are copied into pinned memory that the next copy overwrites. Other tensors are
    copied into new memory.
    """

    def __init__(self) -> None:
        """Start without allocated memory."""
        self._pinned: DefaultStager | None = None
        self._copies: weakref.WeakSet[ModelCopy] = weakref.WeakSet()
        self._readings: list[Future[Any]] = []

    def wait_before_change(self, reading: "Future[Any]") -> None:
        """Make the next change wait for `reading`, which reads the tensors.

        It must not wait for the thread that trains. Finished readings and their tensors are
        released, since many steps may pass without a change.
        """
        self._readings = [reading for reading in self._readings if not reading.done()]
        self._readings.append(reading)

    def take_model(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, parallel: Parallel
    ) -> "ModelCopy":
        """Return the current state of a model and its optimiser; later changes do not affect it."""
        weights, state = trained_weights(model), optimizer_state(model, optimizer, parallel)
        if parallel.sharded or torch.cuda.is_available():
            return ModelCopy(**self.take({"weights": weights, "optimizer": state}))
        held = ModelCopy(weights, state, self)
        self._copies.add(held)
        return held

    def before_change(self) -> None:
        """Wait for the readings, and copy unwritten tensors that are held by reference.

        Call it before each change of the tensors.
        """
        wait(self._readings)
        self._readings.clear()
        for held in list(self._copies):
            held.detach()
        self._copies.clear()

    def take(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of a nested state."""
        if not torch.cuda.is_available():
            return _stager(pinned=False).stage(state)  # pyright: ignore[reportReturnType]  # no future: staging is not asynchronous
        self._pinned = self._pinned or _stager(pinned=True)
        return self._pinned.stage(state)  # pyright: ignore[reportReturnType]  # as above


def _stager(*, pinned: bool) -> DefaultStager:
    options = StagingOptions(
        use_pinned_memory=pinned,
        use_shared_memory=False,
        use_async_staging=False,
        use_non_blocking_copy=pinned,
    )
    return DefaultStager(options)


@dataclass(eq=False)
class ModelCopy:
    """A model and its optimiser at the time of the copy."""

    weights: dict[str, Tensor]
    """This rank's parts of the trained weights; after `gather`, all weights on the first rank."""
    optimizer: dict[str, Any]
    """This rank's parts of the optimiser's state; empty after they are written."""
    source: HostCopies | None = None
    """Copies the tensors before they change; None: they are already copies."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def gather(self, parallel: Parallel) -> None:
        """Gather all parts of the weights on the first rank; called on all ranks together."""
        with self._lock:
            self.weights = gather_weights(self.weights, parallel)

    def detach(self) -> None:
        """Copy weights and optimiser state, unless they are already copies."""
        with self._lock:
            if self.source is None:
                return
            copied = self.source.take({"weights": self.weights, "optimizer": self.optimizer})
            self.weights, self.optimizer = copied["weights"], copied["optimizer"]
            self.source = None

    def write_weights(self, write: Callable[[dict[str, Tensor]], None]) -> None:
        """Call `write` with the weights; repeat it with copies if the weights changed meanwhile."""
        self._write(lambda: write(self.weights))

    def write_optimizer(self, path: Path, parallel: Parallel) -> Callable[[], None]:
        """Write the optimiser's state on all ranks at once; with one rank, return its writer."""
        if parallel.sharded:
            return save_optimizer(path, self.optimizer, parallel)

        def write() -> None:
            self._write(lambda: save_optimizer(path, self.optimizer, parallel)())
            with self._lock:
                self.optimizer = {}

        return write

    def _write(self, write: Callable[[], None]) -> None:
        source = self.source
        write()
        with self._lock:
            has_changed = self.source is not source
        if has_changed:
            write()


@dataclass
class TrainerCopy:
    """A checkpoint's contents of one policy."""

    model: nn.Module
    """Provides the form of the model folder only; its weights may have changed."""
    processor: Any
    policy: ModelCopy
    critic: ModelCopy | None
    reference: dict[str, Tensor]
    """Weights of a moving reference."""
    entropy: EntropyBonus | None

    def gather(self, parallel: Parallel) -> None:
        """Gather all weights on the first rank; called on all ranks together."""
        self.policy.gather(parallel)
        if self.critic is not None:
            self.critic.gather(parallel)
        self.reference = gather_weights(self.reference, parallel)

    def write_optimizers(self, folder: Path, parallel: Parallel) -> list[Callable[[], None]]:
        """Write the states that all ranks write together; return writers for the first rank.

        Raises StorageError on all ranks if one of them cannot write.
        """
        copies = {OPTIMIZER: self.policy}
        if self.critic is not None:
            copies[CRITIC_OPTIMIZER] = self.critic
        return [copy.write_optimizer(folder / name, parallel) for name, copy in copies.items()]

    def write_models(self, folder: Path) -> None:
        """Write all gathered models; called on the first rank only."""
        (folder / "learner").mkdir(parents=True, exist_ok=True)
        self.policy.write_weights(lambda weights: save_model(self.model, folder, weights))
        self.processor.save_pretrained(folder)
        if self.critic is not None:
            self.critic.write_weights(
                lambda weights: save_file(contiguous(weights), folder / CRITIC)
            )
        if self.reference:
            save_file(contiguous(self.reference), folder / REFERENCE)
        if self.entropy is not None:
            self.entropy.save(folder)

    def release(self) -> None:
        """Release all tensors."""
        for copy in (self.policy, self.critic):
            if copy is not None:
                copy.weights, copy.optimizer, copy.source = {}, {}, None

    def named_weights(self) -> dict[str, Tensor]:
        """Return the gathered weights under the names of published versions; critics `critic.*`."""
        for copy in (self.policy, self.critic):
            if copy is not None:
                copy.detach()
        names = {id(tensor): name for name, tensor in self.model.state_dict(keep_vars=True).items()}
        first = {id(tensor): name for name, tensor in [*policy_tensors(self.model).items()][::-1]}
        named = {name: self.policy.weights[names[of]] for of, name in first.items()}
        return named if self.critic is None else named | critic_names(self.critic.weights)


class CheckpointCopy:
    """A checkpoint's contents of all models of a job, in host memory."""

    def __init__(
        self,
        copies: Mapping[str, TrainerCopy],
        parallel: Parallel,
        ranks: Ranks | None = None,
        number: int = 0,
    ) -> None:
        """Hold `copies` by policy; `ranks` have copies under the same number, and write them."""
        self._copies = copies
        self._number = number
        self._parallel = parallel.in_background
        self._ranks = ranks

    def write(self, folder: Path | None) -> None:
        """Write into a new folder, named by the first rank; called on all ranks together.

        Collectives run first, so that no rank waits for one that cannot write. Raises StorageError
        on all ranks if one of them cannot write its parts.
        """
        ranks, alone = self._ranks, contextlib.nullcontext()
        self._parallel.phases.enter("write")
        try:
            with alone if ranks is None else ranks.explaining(SAVE):
                self._write(folder)
        finally:
            self._parallel.phases.enter("")

    def _write(self, named: Path | None) -> None:
        parallel = self._parallel
        places = parallel.gather((self._number, str(named)))
        if {number for number, _ in places} != {self._number}:
            raise ValueError(f"ranks write different copies: {places}")
        folder = Path(places[0][1])
        for copied in self._copies.values():
            copied.gather(parallel)
        finish: list[Callable[[], None]] = []
        for name, copied in self._copies.items():
            finish += copied.write_optimizers(policy_folder(folder, name), parallel)
        if parallel.rank == 0:
            for name, copied in self._copies.items():
                copied.write_models(policy_folder(folder, name))
            for finishing in finish:
                finishing()

    def release(self) -> None:
        """Release the copies of a finished checkpoint, so that updates need not copy for it."""
        for copied in self._copies.values():
            copied.release()

    def weights(self) -> dict[str, dict[str, Tensor]]:
        """Return the weights to write, by policy; critics as `critic.*`.

        They are available once the folder is named, even if it could not be written.
        """
        return {name: copied.named_weights() for name, copied in self._copies.items()}


def critic_names(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Add the critic's prefix to names of its weights."""
    return {f"critic.{name}": value for name, value in weights.items()}


def trained_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the trained weights of a model, by reference, by state name.

    Tied weights are one tensor under several names.
    """
    changing = {id(tensor) for tensor in policy_tensors(model).values()}
    detached: dict[int, Tensor] = {}
    named: dict[str, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in changing:
            named[name] = detached.setdefault(id(tensor), tensor.detach())
    return named


def gather_weights(weights: Mapping[str, Tensor], parallel: Parallel) -> dict[str, Tensor]:
    """Return full tensors on the first rank, none on others; called on all ranks together.

    Tied weights are one tensor under several names.
    """
    gathered: dict[int, Tensor | None] = {}
    for tensor in weights.values():
        if id(tensor) not in gathered:
            gathered[id(tensor)] = parallel.gather_whole(tensor)
    whole = {name: gathered[id(tensor)] for name, tensor in weights.items()}
    return {name: tensor for name, tensor in whole.items() if tensor is not None}


def contiguous(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous tensors, as safetensors requires."""
    return {name: tensor.contiguous() for name, tensor in weights.items()}
