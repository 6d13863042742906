"""The critic of PPO: a separate model that estimates an episode's remaining return.

It is a decoder like the policy's, with a single output (the value) in place of the vocabulary. It
reads the same packed rows, so a token's value is at the column that predicts the token. The value
layer is initialised to 0: a new critic returns 0, and advantages are plain returns.
"""

# torch leaves some of its methods untyped, safetensors its paths.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import math
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...schemas.config.job import JobConfig
from ...schemas.config.sections import LearnerConfig
from ..policy.layers import decoder_of
from .advantages import ValueTargets, explained_variance, value_loss
from .batch import renumber
from .checkpoint_copy import CRITIC, CRITIC_OPTIMIZER, HostCopies, ModelCopy
from .losses import Denominators, aggregate
from .micro_batch import MicroBatch
from .model import Scorer
from .optimizer import load_optimizer, make_optimizer
from .parallel import Parallel, divided, whole
from .varlen import AttentionKey


class ValueModel(nn.Module):
    """A decoder with one value for each column."""

    def __init__(
        self,
        model: PreTrainedModel,
        learner: LearnerConfig,
        parallel: Parallel,
        attention: AttentionKey = "auto",
    ) -> None:
        """Take the decoder of a causal language model, moved to its device.

        Raises ModelError if it cannot read packed rows.
        """
        super().__init__()
        width = int(cast(Any, model).config.get_text_config().hidden_size)
        self.value_head = nn.Linear(width, 1)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)
        self.decoder: nn.Module = decoder_of(model)
        mine = {id(each) for each in self.parameters()}
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.requires_grad and id(parameter) in mine)
        cast(Any, model).value_head = self.value_head  # sharded over the ranks with the decoder
        inside = parallel.place(model, learner, attention, in_float32=[self.value_head])
        self.scorer = Scorer(model, temperature=1.0, inside=inside)
        """Reads the rows; the output layer is the value's."""

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return self.scorer.device

    def get_output_embeddings(self) -> nn.Module:
        """Return the output layer, under the method name of transformers' language models."""
        return self.value_head

    def values(self, packed: MicroBatch) -> Tensor:
        """Return the value before each of the N tokens, with gradient where enabled."""
        return self.scorer.inside.compute(lambda: self._values(packed))

    def _values(self, packed: MicroBatch) -> Tensor:
        states_UD, place_N = self.scorer.states_UD(packed)
        return self.value_head(states_UD.float())[place_N, 0]


class Critic:
    """The value model with its optimiser."""

    def __init__(self, model: PreTrainedModel, config: JobConfig, parallel: Parallel) -> None:
        """Create a critic with a causal language model's weights."""
        attention = config.model.attn_implementation
        self.model = ValueModel(model, config.learner, parallel, attention)
        self._config = config
        self._parallel = parallel
        self.optimizer = make_optimizer(self.model, config.learner, config.critic.lr)
        self._targets: ValueTargets
        self._sums: dict[str, float] = {}
        self._num_tokens = 0
        self._norms: list[float] = []

    @torch.no_grad()
    def values_of(self, micros: list[MicroBatch], num_tokens: int) -> Tensor:
        """Return the values of a whole batch, of which this rank computes a share: float32[N]."""
        values_N = torch.zeros(num_tokens, device=self.model.device)
        for micro in micros:
            values_N[micro.index_N] = self.model.values(micro)
        return self._parallel.add_up(values_N)

    def begin_step(self, rate: float, targets: ValueTargets) -> None:
        """Begin a step with a learning rate, and clear the metrics of the previous step."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self._targets = targets
        self._sums, self._num_tokens, self._norms = {}, 0, []

    def accumulate(self, micros: list[MicroBatch], denominators: Denominators) -> None:
        """Accumulate the gradients of micro-batches; it can be repeated after an error."""
        self.optimizer.zero_grad()
        before = dict(self._sums), self._num_tokens
        try:
            for micro in micros:
                self._accumulate(micro, denominators)
        except torch.OutOfMemoryError:
            self._sums, self._num_tokens = before
            raise

    def update(self) -> None:
        """Make one optimiser update; skip it if its gradient is not finite."""
        self._parallel.phases.enter("update")
        clip = self._config.learner.grad_clip
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        self._norms.append(float(whole(norm)))
        if math.isfinite(self._norms[-1]):
            self.optimizer.step()

    def _accumulate(self, micro: MicroBatch, denominators: Denominators) -> None:
        targets = self._targets
        kept_N = targets.kept_N[micro.index_N]
        index_N = micro.index_N[kept_N]
        self._parallel.phases.enter("forward")
        values_N = self.model.values(micro)
        if micro.is_empty:
            self._parallel.phases.enter("backward")
            values_N.sum().backward()  # only to take part in gathering and reducing
            return
        values_N = values_N[kept_N]
        loss_N, clipped_N = value_loss(
            values_N,
            targets.values_N[index_N],
            targets.returns_N[index_N],
            self._config.critic.clip,
        )
        sample_N, numbers_M = renumber(targets.sample_N[index_N])
        part = denominators.of_part(sample_N, numbers_M)
        loss = aggregate(self._config.algorithm.loss_agg, loss_N, sample_N, len(numbers_M), part)
        self._parallel.phases.enter("backward")
        loss.backward()
        self._num_tokens += len(index_N)
        measured = {"vf_loss": loss, "vf_clipfrac": clipped_N.sum(), "vpred_mean": values_N.sum()}
        for name, value in measured.items():
            self._sums[name] = self._sums.get(name, 0.0) + float(value.detach())

    def numbers(self) -> dict[str, float]:
        """Return the metrics of the step over all ranks."""
        finite = [norm for norm in self._norms if math.isfinite(norm)]
        kept_N = self._targets.kept_N
        values_N, returns_N = self._targets.values_N[kept_N], self._targets.returns_N[kept_N]
        ranks = self._parallel.gather((self._sums, self._num_tokens))
        num_tokens = sum(number for _, number in ranks)

        def total(name: str) -> float:
            return sum(sums.get(name, 0.0) for sums, _ in ranks)

        return {
            "critic/lr": float(self.optimizer.param_groups[0]["lr"]),
            "critic/vf_loss": total("vf_loss") / len(self._norms),
            "critic/vf_clipfrac": total("vf_clipfrac") / max(num_tokens, 1),
            "critic/vpred_mean": total("vpred_mean") / max(num_tokens, 1),
            "critic/vf_explained_var": explained_variance(values_N, returns_N),
            "critic/skipped_updates": float(len(self._norms) - len(finite)),
            **({"critic/grad_norm": sum(finite) / len(finite)} if finite else {}),
            **spread("critic/values", values_N),
            **spread("critic/returns", returns_N),
        }

    # -- checkpoints ---------------------------------------------------------------------------

    def copy(self, copies: HostCopies) -> ModelCopy:
        """Copy the critic's part of a checkpoint."""
        return copies.take_model(self.model, self.optimizer, self._parallel)

    def weights(self) -> dict[str, Tensor]:
        """Return all weights, unsharded and on the CPU; called on all ranks together."""
        return {name: whole(value).cpu() for name, value in self.model.state_dict().items()}

    def load(self, folder: Path) -> bool:
        """Load weights and optimiser state from a checkpoint; return False if it has no critic.

        Only another run's checkpoint, from which a fork starts, may lack a critic.
        """
        if not (folder / CRITIC).is_file():
            return False
        mine = self.model.state_dict()
        saved = saved_critic(folder)
        self.model.load_state_dict({name: divided(saved[name], mine[name]) for name in mine})
        load_optimizer(folder / CRITIC_OPTIMIZER, self.model, self.optimizer)
        return True


def spread(name: str, values: Tensor) -> dict[str, float]:
    """Return mean, largest and smallest value as metrics; none without values."""
    if not len(values):
        return {}
    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }


def saved_critic(folder: Path) -> dict[str, Tensor]:
    """Return the critic's weights of a checkpoint that has one."""
    return load_file(folder / CRITIC)
