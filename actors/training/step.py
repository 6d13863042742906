"""One training step: advantages, packing, losses, gradients, one version.

The step is a pure function of the policy, the batch and the step's number: repeated from the same
state it gives the same bits. Each of several ranks computes its share of the sequences, and all
compute the same advantages, gradients and metrics.

Shape letters: N generated tokens, S sequences.
"""

# torch leaves some of its methods untyped.
# pyright: reportUnknownMemberType=false

import math
import time
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import structlog
import torch
from torch import Tensor, nn

from ...schemas.config.job import JobConfig
from ...schemas.rollout import Group
from ..policy.experts import RouterReplay
from ..policy.lora import set_dropout
from ..policy.policies import MAIN
from ..policy.vision import Processor, load_image_reader
from .advantages import Values
from .batch import TrainingBatch, check_readable, ends_of, minibatches
from .checkpoint import save_form
from .checkpoint_copy import (
    OPTIMIZER,
    CheckpointCopy,
    HostCopies,
    TrainerCopy,
    critic_names,
)
from .credit import assign_credit
from .critic import Critic, spread
from .distillation import Teachers, check_same_language
from .functions.calls import OwnFunctions
from .losses import Denominators
from .micro_batch import MicroBatch
from .model import Scorer, load_model, load_reference, make_embedding_gradients_sparse
from .numerics import numerics_of
from .objective import EntropyBonus, Objective, StepInputs
from .off_policy import batch_mismatch
from .optimizer import load_optimizer, make_optimizer, rate_of
from .parallel import Inside, Parallel, whole, whole_tensors
from .rank_batches import MemoryGuard, RankPacker
from .reference import Reference
from .state import Numerics

_log = structlog.get_logger()


_OF_THE_UPDATES = ("pg_loss", "kl_loss", "teacher_loss")
"""Metrics that only updates have."""


@dataclass
class StepSums:
    """Sums over the micro-batches and updates of a step."""

    totals: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Sum over the tokens by metric name."""
    tokens: int = 0
    """Number of generated tokens."""
    norms: list[float] = field(default_factory=list[float])
    """Gradient norm of each update; not finite for a skipped update."""
    old: list[tuple[Tensor, Tensor]] = field(default_factory=list[tuple[Tensor, Tensor]])
    """Indices of all generated tokens, and their log-probs before the update."""

    def include(self, totals: dict[str, Tensor]) -> None:
        """Add the sums of further tokens."""
        for name, value in totals.items():
            before = self.totals.get(name)
            self.totals[name] = value if before is None else before + value

    def copy(self) -> "StepSums":
        """Return a copy, to restore later; tensors are replaced, never modified."""
        return StepSums(dict(self.totals), self.tokens, [*self.norms], [*self.old])

    def become(self, other: "StepSums") -> None:
        """Restore earlier sums."""
        self.totals, self.tokens = dict(other.totals), other.tokens
        self.norms, self.old = [*other.norms], [*other.old]

    def add(self, values: dict[str, Tensor], index_N: Tensor, old_N: Tensor) -> None:
        """Add the sums of a micro-batch whose N tokens stand at `index_N` of the batch."""
        self.include(values)
        self.tokens += len(index_N)
        self.old.append((index_N, old_N))

    def of_all(self, parallel: Parallel) -> "StepSums":
        """Return the sums over all ranks; norms are global already."""
        if parallel.size == 1:
            return self
        totals = {name: value.cpu() for name, value in self.totals.items()}
        old = [(index_N.cpu(), old_N.cpu()) for index_N, old_N in self.old]
        together = StepSums(norms=self.norms)
        for other in parallel.gather(replace(self, totals=totals, old=old)):
            together.include(other.totals)
            together.tokens += other.tokens
            together.old += other.old
        return together

    def numbers(self) -> dict[str, float]:
        """Return the sums as metrics; metrics without tokens are left out.

        Losses are means over the updates, all others over the generated tokens of the batch.
        """
        finite = [norm for norm in self.norms if math.isfinite(norm)]
        averages = {"actor/skipped_updates": float(len(self.norms) - len(finite))}
        if finite:
            averages["actor/grad_norm"] = sum(finite) / len(finite)
        for name, total in self.totals.items():
            count = len(self.norms) if name in _OF_THE_UPDATES else self.tokens
            if count:
                averages[f"actor/{name}"] = float(total) / count
        return averages


@dataclass
class StepReport:
    """The measurements of a step."""

    numbers: dict[str, float]
    """Metric name to value."""
    model_s: float
    """Seconds spent in the step."""


class Trainer:
    """The policy with its optimiser, and, if needed, the frozen reference and the critic."""

    def __init__(
        self,
        model: nn.Module,
        config: JobConfig,
        *,
        total_steps: int,
        parallel: Parallel | None = None,
        functions: OwnFunctions | None = None,
    ) -> None:
        """`parallel` describes the ranks, by default one on the CPU; `functions` are the job's own.

        Raises ModelError if the model cannot be trained in packed rows.
        """
        self.model = model
        self.config = config
        self.total_steps = total_steps
        self._parallel = parallel or Parallel()
        functions = functions or OwnFunctions({})
        self._copies = HostCopies()
        learner = config.learner
        self.image_reader = load_image_reader(
            config.model.path, trust_remote_code=config.model.trust_remote_code
        )
        self._replay = RouterReplay(model) if config.algorithm.router_replay else None
        inside = self._parallel.place(model, learner, config.model.attn_implementation)
        self._trained = [weight for weight in model.parameters() if weight.requires_grad]
        self._embeddings = make_embedding_gradients_sparse(inside)
        self.optimizer = make_optimizer(model, learner, learner.lr)
        self._objective = Objective(config, functions)
        self._scorer = self._scorer_of(model, inside, self._replay)
        self._packer = RankPacker(model, self._scorer, learner, self._parallel, self.image_reader)
        self._memory = MemoryGuard(config, model, self._packer, alone=not self._parallel.sharded)
        self._reference = self._make_reference() if config.algorithm.kl_coef else None
        self._entropy = EntropyBonus(config.algorithm.entropy_coef)
        self._custom_advantage = functions.get("advantage", config.algorithm.own_advantage)
        self._teachers = Teachers(config, self._scorer, self._frozen, self._packer, self._parallel)
        self.critic = self._make_critic() if config.algorithm.advantage == "gae" else None

    def _make_reference(self) -> Reference:
        algorithm, path = self.config.algorithm, self.config.model.path
        if algorithm.reference.path is not None:
            key = "algorithm.reference.path"
            check_same_language(self.config, algorithm.reference.path, key)
        load = partial(self._frozen, moves=algorithm.reference.moves)
        return Reference(algorithm.reference, self.model, path, self._scorer, load)

    def _frozen(self, path: str, *, moves: bool = False) -> Scorer:
        """Return a scorer for a frozen model, which may follow a trained one."""
        config = self.config.model.model_copy(update={"path": path})
        learner = self.config.learner
        loaded = load_reference(config, learner, hollow=self._parallel.filled_by_another)
        frozen = cast(nn.Module, loaded)
        inside = self._parallel.place(
            frozen, learner, config.attn_implementation, moves_frozen=moves
        )
        scorer = self._scorer_of(frozen, inside)
        self._packer.serve(scorer)
        return scorer

    def _make_critic(self) -> Critic:
        config = self.config
        start = load_model(
            config.model,
            config.learner,
            config.critic.path or config.model.path,
            hollow=self._parallel.filled_by_another,
        )
        critic = Critic(start, config, self._parallel)
        self._packer.serve(critic.model.scorer)
        return critic

    def _scorer_of(
        self, model: nn.Module, inside: Inside, replay: RouterReplay | None = None
    ) -> Scorer:
        temperature = self.config.rollout.temperature
        return Scorer(model, temperature=temperature, inside=inside, replay=replay)

    @property
    def numerics(self) -> Numerics:
        """How its steps are computed."""
        scorer, learner = self._scorer, self.config.learner
        return numerics_of(scorer.device, scorer.inside.dtype, scorer.attention, learner)

    def weights(self) -> dict[str, Tensor]:
        """Return the trained weights, unsharded and on the CPU; called on all ranks together."""
        policy = {name: value.cpu() for name, value in whole_tensors(self.model)}
        return policy if self.critic is None else policy | critic_names(self.critic.weights())

    def save(self, folder: Path, tokenizer: Any) -> None:
        """Write model, tokenizer, image processor, optimiser and critic into a new folder."""
        CheckpointCopy({MAIN: self.copy(tokenizer)}, self._parallel).write(folder)

    def save_form(self, folder: Path, tokenizer: Any) -> None:
        """Write all files of a checkpoint but weights and optimiser."""
        save_form(folder, self.model, Processor(tokenizer, self.image_reader))

    def wait_before_change(self, reading: "Future[Any]") -> None:
        """Make the next update wait for `reading`, which reads the weights."""
        self._copies.wait_before_change(reading)

    def copy(self, tokenizer: Any) -> TrainerCopy:
        """Return a copy for a checkpoint; on a GPU it is valid until the next copy."""
        moving = {} if self._reference is None else self._reference.moving()
        keeps_entropy = self.config.algorithm.entropy_target is not None
        return TrainerCopy(
            self.model,
            Processor(tokenizer, self.image_reader),
            self._copies.take_model(self.model, self.optimizer, self._parallel),
            None if self.critic is None else self.critic.copy(self._copies),
            self._copies.take(moving),
            replace(self._entropy) if keeps_entropy else None,
        )

    def check_readable(self, group: Group) -> None:
        """Raise DataError for a group that the model cannot read as configured."""
        if self._replay is not None:
            self._replay.check(group)
        self._teachers.check(group)
        components = list(self.config.algorithm.reward_components)
        check_readable(group, self.model, self.image_reader, components)

    def restore(self, folder: Path) -> None:
        """Load the optimiser, the critic, a moving reference and the entropy bonus."""
        load_optimizer(folder / OPTIMIZER, self.model, self.optimizer)
        if self.critic is not None and not self.critic.load(folder):
            _log.info("critic_is_new", checkpoint=str(folder))
        if self._reference is not None and not self._reference.load(folder):
            _log.info("reference_is_new", checkpoint=str(folder))
        if self.config.algorithm.entropy_target is not None:
            self._entropy.load(folder)

    @property
    def microbatch_tokens(self) -> int:
        """Tokens per forward and backward pass; lower after a step that was out of memory."""
        return self._packer.microbatch_tokens

    def step(self, batch: TrainingBatch, step: int, microbatch_tokens: int = 0) -> StepReport:
        """Train one batch; the policy's version is `step` afterwards.

        `microbatch_tokens` are the tokens of a pass from now on; 0: as before. An update whose
        gradient is not finite is skipped and counted.

        Raises OutOfMemoryError if the step does not fit on the GPU.
        """
        self._packer.microbatch_tokens = microbatch_tokens or self._packer.microbatch_tokens
        self._memory.begin_step()
        torch.manual_seed(self.config.seed * 1_000_003 + step)
        start, learner = time.perf_counter(), self.config.learner
        batch = batch.to(self._scorer.device)
        rate = self._set_learning_rate(step)
        run = self._memory.run
        old_N, entropy_N, reference_N = run(lambda: self._scores_before(batch))
        values = run(lambda: self._values(batch))
        own = None if self._custom_advantage is None else self._custom_advantage.advantage
        credit = assign_credit(self.config, batch, old_N, reference_N, values, own)
        if entropy_N is not None:
            credit = credit.of_top_entropy(entropy_N, self.config.algorithm.entropy_share)
        untaught = credit
        credit, targets, taught = run(lambda: self._teachers.guide(untaught, batch, old_N))
        sample_N, advantages_N = credit.samples.sample_N, credit.advantages_N
        kept_N = credit.kept_N
        objective, parts = self._objective, (kept_N, sample_N, advantages_N)
        weights_N = objective.whole_batch_weights(batch, old_N, *parts)
        trained, counted_N = objective.without_dropped(batch, kept_N, weights_N)
        before = (old_N, reference_N, weights_N)
        entropy_coef = self._entropy.of_step(self.config.algorithm)
        inputs = StepInputs(
            trained, sample_N, step - 1, advantages_N, *before, entropy_coef, targets
        )
        if self.critic is not None and credit.targets is not None:
            self.critic.begin_step(self._rate(step, self.config.critic.lr), credit.targets)
        sums = StepSums()
        for part_S in minibatches(batch, learner.num_minibatches) * learner.ppo_epochs:
            kept_S = part_S & credit.kept_S
            of_part_N = part_S[batch.seq_N]
            if step > self.config.critic.warmup_steps:
                counted = self._denominators(sample_N[of_part_N & counted_N], credit.samples.num)
                self._update(inputs, part_S, kept_S, counted, sums)
            if self.critic is not None:
                counted = self._denominators(sample_N[of_part_N & kept_N], credit.samples.num)
                self._update_critic(self.critic, batch, kept_S, counted)
        self._parallel.phases.enter("gather")
        sums = sums.of_all(self._parallel)
        if self._reference is not None:
            self._reference.follow(step)
        numbers = {
            "actor/lr": rate,
            **({"actor/entropy_coef": entropy_coef} if entropy_coef else {}),
            **sums.numbers(),
            **taught,
            **objective.dropped_share(weights_N, kept_N),
            **({} if entropy_N is None else {"actor/entropy": float(entropy_N.mean())}),
            **spread("critic/advantages", advantages_N[kept_N]),
            **spread("critic/rewards", credit.rewards_E),
            **({} if self.critic is None else self.critic.numbers()),
            "training/num_samples": float(credit.samples.num),
            **batch_mismatch(sums.old if old_N is None else batch.fresh_of(old_N), batch, step - 1),
        }
        if "actor/entropy" in numbers:
            self._entropy.measured(self.config.algorithm, numbers["actor/entropy"])
        return StepReport(numbers, time.perf_counter() - start)

    # -- named parts of the step -------------------------------------------------------------

    def _set_learning_rate(self, step: int) -> float:
        rate = self._rate(step, self.config.learner.lr)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _rate(self, step: int, base: float) -> float:
        return rate_of(self.config.learner, step, base, self.total_steps)

    def _scores_before(
        self, batch: TrainingBatch
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Score all tokens with π_o (log-probs and entropies) and with the reference.

        Scores that are not needed are None.
        """
        needs_old = self._objective.needs_old(
            self.config.learner.num_updates, self.config.lora.dropout
        )
        if not needs_old and self._reference is None:
            return None, None, None
        everything = self._packer.pack(batch, _all(batch))
        old_N, entropy_N = None, None
        if needs_old:
            old_N, entropy_N = self._score_all(everything, batch, self._scorer)
        if self._reference is None:
            return old_N, entropy_N, None
        everything = [
            replace(micro, experts_BTLK=None) for micro in everything
        ]  # the reference uses its own routing
        if self._reference.is_adapter:
            self._copies.before_change()
        with self._reference.in_place() as scorer:
            return old_N, entropy_N, self._score_all(everything, batch, scorer)[0]

    @torch.no_grad()
    def _score_all(
        self, micros: list[MicroBatch], batch: TrainingBatch, scorer: Scorer
    ) -> tuple[Tensor, Tensor]:
        """Return log-probs and entropies of all tokens; this rank computes its share."""
        logprobs_N, entropy_N = torch.zeros(2, batch.num_tokens, device=scorer.device)
        for micro in micros:
            scores = scorer.score(micro)
            logprobs_N[micro.index_N] = scores.logprobs_N
            entropy_N[micro.index_N] = scores.entropy_N
        return self._parallel.add_up(logprobs_N), self._parallel.add_up(entropy_N)

    def _values(self, batch: TrainingBatch) -> Values | None:
        """Return the critic's values before each token and after some; None without a critic."""
        critic, pack = self.critic, self._packer.pack
        if critic is None:
            return None
        values_N = critic.values_of(pack(batch, _all(batch)), batch.num_tokens)
        if not self.config.critic.bootstrap_cut or not bool(batch.unfinished_S.any()):
            return Values(values_N)
        after = ends_of(batch, batch.unfinished_S)
        after_s = critic.values_of(pack(after, batch.unfinished_S), after.num_tokens)
        after_S = torch.zeros_like(batch.rewards_S).masked_scatter(batch.unfinished_S, after_s)
        return Values(values_N, after_S)

    def _denominators(self, sample_n: Tensor, num_samples: int) -> Denominators:
        length = self.config.algorithm.loss_agg_length or self.config.rollout.max_response_tokens
        return Denominators.of(sample_n, length, num_samples)

    def _update(
        self,
        inputs: StepInputs,
        part_S: Tensor,
        kept_S: Tensor,
        denominators: Denominators,
        sums: StepSums,
    ) -> None:
        """Make one optimiser update on some sequences, training those in `kept_S`.

        Sequences without gradient are only scored, for the metrics.
        """
        before = sums.copy()
        keep_S = kept_S & self._objective.has_gradient(inputs)

        def accumulate() -> None:
            self._clear_gradients()
            sums.become(before)
            self._measure(inputs, part_S & ~keep_S, denominators, sums)
            set_dropout(self.model, on=True)
            self._accumulate(inputs, keep_S, denominators, sums)

        try:
            self._memory.run(accumulate)
        finally:
            set_dropout(self.model, on=False)
        self._parallel.phases.enter("update")
        self._require_gradients()
        norm = whole(nn.utils.clip_grad_norm_(self._trained, self.config.learner.grad_clip))
        sums.norms.append(float(norm))
        if math.isfinite(sums.norms[-1]):
            self._copies.before_change()
            self._memory.last(self.optimizer.step)

    def _accumulate(
        self, inputs: StepInputs, keep_S: Tensor, denominators: Denominators, sums: StepSums
    ) -> None:
        """Accumulate the gradients of some sequences, micro-batch by micro-batch."""
        phases = self._parallel.phases
        for micro in self._packer.pack(inputs.batch, keep_S):
            phases.enter("forward")
            scores = self._scorer.score(micro, self._objective.score_options(inputs, micro))
            if micro.is_empty:
                phases.enter("backward")
                scores.logprobs_N.sum().backward()  # only to take part in gathering and reducing
                continue
            result = self._objective.loss(inputs, micro, scores, denominators)
            phases.enter("backward")
            result.loss.backward()
            sums.add(result.sums, result.index_N, result.old_N)

    def _update_critic(
        self, critic: Critic, batch: TrainingBatch, kept_S: Tensor, denominators: Denominators
    ) -> None:
        """Make one optimiser update of the critic on the sequences in `kept_S`."""
        self._memory.run(lambda: critic.accumulate(self._packer.pack(batch, kept_S), denominators))
        self._copies.before_change()
        self._memory.last(critic.update)

    @torch.no_grad()
    def _measure(
        self, inputs: StepInputs, rest_S: Tensor, denominators: Denominators, sums: StepSums
    ) -> None:
        """Score sequences that take no part in an update, by a forward pass only."""
        for micro in self._packer.pack(inputs.batch, rest_S):
            scores = self._scorer.score(micro, self._objective.score_options(inputs, micro))
            if micro.is_empty or self._objective.is_too_old(inputs, micro):
                continue
            result = self._objective.loss(inputs, micro, scores, denominators)
            measured = {name: n for name, n in result.sums.items() if name not in _OF_THE_UPDATES}
            sums.add(measured, result.index_N, result.old_N)

    def _clear_gradients(self) -> None:
        """Clear the gradients; on a CPU, keep their memory to avoid fragmenting the heap."""
        self.optimizer.zero_grad(set_to_none=self._scorer.device.type != "cpu")
        for weight in self._embeddings:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)

    def _require_gradients(self) -> None:
        """Set missing gradients of trained weights to zeros.

        Momentum and decay then continue for them, and the norm sums the same tensors in all steps,
        including the first step of a run or after a resume.
        """
        for parameter in self._trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


def _all(batch: TrainingBatch) -> Tensor:
    return torch.ones_like(batch.group_S, dtype=torch.bool)
