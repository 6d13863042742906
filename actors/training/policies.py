"""All policies of a job with their optimisers: one step trains each on its own roles.

A policy is trained only on the conversations of its roles: its advantages, loss and gradient norm
equal those of a separate job.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...schemas.config.job import JobConfig
from ...schemas.rollout import Group
from ...schemas.wire.errors import ConfigError, OutOfMemoryError
from ..policy.devices import own_device
from ..policy.lora import has_adapter, policy_tensors
from ..policy.policies import MAIN, policy_config, policy_folder, policy_names
from ..runtime import return_free_memory, tensor_bytes
from ..weights.shared_memory import UnfinishedFile
from ..weights.tensors import CopiedWeights
from .batch import assemble
from .checkpoint_copy import SAVE, CheckpointCopy
from .functions.calls import OwnFunctions
from .model import load_model, try_model
from .parallel import Parallel, snapshot, snapshot_bytes
from .ranks import Order, Ranks, folder_here
from .state import Numerics
from .step import StepReport, Trainer

T = TypeVar("T")

_LARGE_BYTES = 64 << 20
"""From this size of the weights on, memory freed by a step on a CPU is returned to the system."""


def load_models(
    config: JobConfig, folder: Path | None, *, hollow: bool = False
) -> dict[str, PreTrainedModel]:
    """Load the model of every policy, from a checkpoint if there is one.

    With `hollow` no weights are read, since another rank has them.

    Raises ModelError for a model that cannot be trained, before any weights are read; ConfigError
    for models with different vocabularies, and for a checkpoint without a policy for a role.
    """
    if folder is None and not hollow:
        for name in policy_names(config):
            try_model(policy_config(config, name))
    models = {
        name: load_model(
            policy_config(config, name).model,
            config.learner,
            _source(folder, name),
            lora=config.lora,
            seed=config.seed,
            hollow=hollow,
        )
        for name in policy_names(config)
    }
    sizes = {name: vocab_size(model) for name, model in models.items()}
    odd = [name for name, size in sizes.items() if size != sizes[MAIN]]
    if odd:
        raise ConfigError(
            f"policies.{odd[0]} has a vocabulary of {sizes[odd[0]]}, the model one of "
            f"{sizes[MAIN]}: all policies of a run share one tokenizer",
            hint="take models of one family",
        )
    return models


def _source(folder: Path | None, policy: str) -> Path | None:
    source = None if folder is None else policy_folder(folder, policy)
    if source is not None and not source.is_dir():
        raise ConfigError(
            f"policies.{policy}: checkpoint {folder} has no policy for this role",
            hint="fork a run that trained one, or start a new run",
        )
    return source


def vocab_size(model: nn.Module) -> int:
    """Return the size of a model's vocabulary."""
    return int(cast(Any, model.config).get_text_config().vocab_size)


class Policies:
    """The trainers of a job, by policy."""

    def __init__(
        self,
        config: JobConfig,
        models: Mapping[str, PreTrainedModel],
        *,
        total_steps: int,
        functions: OwnFunctions | None = None,
        folder: Path | None = None,
        ranks: Ranks | None = None,
        parallel: Parallel | None = None,
    ) -> None:
        """Give each model an optimiser; `folder` is the checkpoint they were loaded from.

        `functions` are the job's own; `ranks` do the same work as this process; `parallel` is its
        place among them.
        """
        self.total_steps = total_steps
        self._ranks = ranks or Ranks(config)
        self._parallel = parallel or Parallel()
        self._num_copies = 0
        self.trainers: dict[str, Trainer] = {
            name: Trainer(
                model,
                policy_config(config, name),
                total_steps=total_steps,
                functions=functions,
                parallel=parallel,
            )
            for name, model in models.items()
        }
        if folder is not None:
            for name, trainer in self.trainers.items():
                trainer.restore(policy_folder(folder, name))

    @classmethod
    def open(
        cls,
        config: JobConfig,
        models: Mapping[str, PreTrainedModel],
        ranks: Ranks,
        *,
        total_steps: int,
        functions: OwnFunctions | None = None,
        folder: Path | None,
    ) -> "Policies":
        """Create an optimiser for each model, together with the other ranks of this learner."""
        begun = ranks.beginning(folder, total_steps, functions and functions.hidden)
        with begun as parallel, folder_here(folder, parallel):
            return cls(
                config,
                models,
                total_steps=total_steps,
                functions=functions,
                folder=folder,
                ranks=ranks,
                parallel=parallel,
            )

    def copy(self, tokenizer: Any) -> CheckpointCopy:
        """Copy a checkpoint on all ranks, to be written while training continues.

        The last copy must have been written before.
        """
        with self._ranks.doing(SAVE):
            copies = {name: trainer.copy(tokenizer) for name, trainer in self.trainers.items()}
        self._num_copies += 1
        return CheckpointCopy(copies, self._parallel, self._ranks, self._num_copies)

    def save(self, folder: Path, tokenizer: Any) -> None:
        """Write every policy into the folder of a checkpoint."""
        self.copy(tokenizer).write(folder)

    def save_form(self, folder: Path, tokenizer: Any) -> None:
        """Write all files of a checkpoint but weights and optimisers; not on other ranks."""
        for name, trainer in self.trainers.items():
            trainer.save_form(policy_folder(folder, name), tokenizer)

    @property
    def num_bytes(self) -> int:
        """Bytes of the trained tensors, and so of a checkpoint without optimisers."""
        return sum(
            tensor.numel() * tensor.element_size()
            for model in self.models.values()
            for tensor in policy_tensors(model).values()
        )

    @property
    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes of the tensors of training in host memory, by kind."""
        trainers = self.trainers.values()
        parts = [part for item in trainers for part in (item, item.critic) if part]
        weights = [weight for part in parts for weight in part.model.parameters()]
        buffers = [buffer for part in parts for buffer in part.model.buffers()]
        moments = [
            value
            for part in parts
            for state in part.optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        ]
        return {
            "weights": tensor_bytes([*weights, *buffers]),
            "gradients": tensor_bytes(weight.grad for weight in weights),
            "optimiser state": tensor_bytes(moments),
        }

    def snapshot(self, dtype: torch.dtype, draft: UnfinishedFile | None = None) -> CopiedWeights:
        """Copy the published weights of each policy."""
        with self._ranks.doing(Order("gather", {"dtype": str(dtype).removeprefix("torch.")})):
            return snapshot(self.models, dtype, draft)

    def snapshot_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of a snapshot."""
        return snapshot_bytes(self.models, dtype)

    @property
    def kind(self) -> Literal["full", "lora"]:
        """Whether versions differ in all weights, or in an adapter."""
        return "lora" if has_adapter(self.models[MAIN]) else "full"

    def read_beside_training(self, work: Callable[[], T]) -> "Future[T] | None":
        """Start `work`, which reads the weights, in a thread; the next update waits for it.

        The passes of a step change no weights, so they need not wait. Returns None without starting
        `work` with several ranks, which read together, and on a GPU, where a copy is faster.
        """
        if self._parallel.sharded or own_device().type == "cuda":
            return None
        thread = ThreadPoolExecutor(1, thread_name_prefix="reader")
        reading = thread.submit(work)
        thread.shutdown(wait=False)  # it ends with the work
        for trainer in self.trainers.values():
            trainer.wait_before_change(reading)
        return reading

    def gather(self) -> dict[str, dict[str, Tensor]]:
        """Return all trained tensors, whole, on the CPU, by policy; critics as `critic.*`."""
        with self._ranks.doing(Order("gather", {"dtype": None})):
            return {name: trainer.weights() for name, trainer in self.trainers.items()}

    @property
    def numerics(self) -> Numerics:
        """How steps are computed."""
        return self.trainers[MAIN].numerics

    @property
    def models(self) -> dict[str, nn.Module]:
        """The models, by policy."""
        return {name: trainer.model for name, trainer in self.trainers.items()}

    @property
    def critics(self) -> list[nn.Module]:
        """The value models of policies that have one."""
        critics = (trainer.critic for trainer in self.trainers.values())
        return [critic.model for critic in critics if critic is not None]

    def check_readable(self, group: Group) -> None:
        """Raise DataError for a group that the policies of its roles cannot read."""
        for name, trainer in self.trainers.items():
            if (own := self._of(name, group)) is not None:
                trainer.check_readable(own)

    def step(
        self,
        groups: Sequence[Group],
        step: int,
        oldest: int = 0,
        seqs: Sequence[int] = (),
        *,
        microbatch_tokens: int = 0,
    ) -> StepReport:
        """Train one batch; the version of all policies is `step` afterwards.

        Tokens of versions before `oldest` are context. A policy without a turn in the batch does
        not change. `seqs` are the groups' sequences in the rollout log, for ranks that read them
        there; `microbatch_tokens` are the tokens of a pass from now on (0: as before).

        Raises OutOfMemoryError if the step does not fit on the GPU.
        """
        tokens = microbatch_tokens or self.microbatch_tokens
        fields = {"step": step, "oldest": oldest, "microbatch_tokens": tokens}
        with self._ranks.doing(Order("step", fields, groups, seqs)):
            try:
                report = self._step(groups, step, oldest, tokens)
            except OutOfMemoryError as error:
                error.step = step
                raise
        if self.num_bytes >= _LARGE_BYTES and not torch.cuda.is_available():
            return_free_memory()
        return report

    @property
    def microbatch_tokens(self) -> int:
        """Tokens per forward and backward pass; lower after a step that was out of memory."""
        return min(trainer.microbatch_tokens for trainer in self.trainers.values())

    def _step(
        self, groups: Sequence[Group], step: int, oldest: int, microbatch_tokens: int
    ) -> StepReport:
        numbers: dict[str, float] = {}
        model_s = 0.0
        for name, trainer in self.trainers.items():
            own = [group for group in (self._of(name, group) for group in groups) if group]
            if not own:
                continue
            batch = assemble(own, oldest, [*trainer.config.algorithm.reward_components])
            report = trainer.step(batch, step, microbatch_tokens)
            label = f"policy/{name}/" if name else ""
            numbers |= {f"{label}{key}": value for key, value in report.numbers.items()}
            model_s += report.model_s
        return StepReport(numbers, model_s)

    def _of(self, name: str, group: Group) -> Group | None:
        """Return the part of a group that a policy played, or None."""
        if len(self.trainers) == 1:
            return group
        played = [
            item
            for item in group.trajectories
            if (item.role if item.role in self.trainers else MAIN) == name
        ]
        return group.model_copy(update={"trajectories": played}) if played else None
