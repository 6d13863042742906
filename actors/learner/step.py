"""One training step: advantages, packing, losses, gradients, one version.

The step is a pure function of the policy, the batch and the step's number: trained again from the
same state it gives the same bits. Shape letters: N generated tokens, S sequences.
"""

# pyright: reportUnknownMemberType=false  # torch leaves some of its methods untyped

import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...schemas.config import JobConfig
from .advantages import AdvantageInputs, compute_advantages, overlong_penalty
from .aggregation import Denominators, aggregate
from .corrections import Correction, CorrectionInputs, correct, mismatch_statistics
from .kl import kl_per_token, rewards_with_kl
from .losses import LossInputs, compute_loss
from .model import Scorer, load_model
from .packing import Packed, pack
from .schedules import learning_rate
from .sequences import is_last_of_sequence, sum_by_sequence
from .training_batch import TrainingBatch, select

_NO_GRADIENT_AT_ZERO = frozenset({"ppo", "gspo", "cispo", "reinforce"})


@dataclass
class StepReport:
    """What a step measured."""

    numbers: dict[str, float]
    """Metric name to value."""
    model_s: float
    """Seconds spent in forward, backward and optimiser."""


@dataclass
class _Sums:
    """Statistics that add up over micro-batches."""

    totals: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    tokens: int = 0
    old: list[tuple[Tensor, Tensor]] = field(default_factory=list[tuple[Tensor, Tensor]])
    """Places of the tokens that were scored, and their log-probs before the update."""

    def add(self, values: dict[str, Tensor], tokens: int) -> None:
        for name, value in values.items():
            self.totals[name] += float(value)
        self.tokens += tokens

    def mean(self, name: str) -> float:
        return self.totals[name] / max(self.tokens, 1)


class Trainer:
    """The policy with its optimiser, and the frozen reference where one is needed."""

    def __init__(self, model: nn.Module, config: JobConfig, *, total_steps: int) -> None:
        self.model = model
        self.config = config
        self.total_steps = total_steps
        learner = config.learner
        self.optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=learner.lr,
            betas=learner.betas,
            eps=learner.eps,
            weight_decay=learner.weight_decay,
            fused=True,
        )
        temperature = config.rollout.temperature
        self._scorer = Scorer(model, temperature=temperature, dtype=learner.dtype)
        self._hidden_size: int = model.config.get_text_config().hidden_size  # pyright: ignore
        self._reference: Scorer | None = None
        if config.algorithm.kl_coef:
            reference = load_model(config.model, learner).requires_grad_(False)
            self._reference = Scorer(reference, temperature=temperature, dtype=learner.dtype)

    def step(self, batch: TrainingBatch, step: int) -> StepReport:
        """Train one batch; the policy's version is `step` afterwards."""
        torch.manual_seed(self.config.seed * 1_000_003 + step)
        start = time.perf_counter()
        batch = batch.to(self._scorer.device)
        rate = learning_rate_of(self.config, step, self.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        everything = self._pack(batch, torch.ones_like(batch.group_S, dtype=torch.bool))
        old_N = self._score_all(everything, batch, self._scorer) if self._needs_old() else None
        reference_N = None
        if self._reference is not None:
            reference_N = self._score_all(everything, batch, self._reference)
        rewards_S = self._shaped_rewards(batch)
        advantages_N = self._advantages(batch, rewards_S, old_N, reference_N)
        weights_N = self._whole_batch_weights(batch, old_N)
        inputs = _Inputs(batch, step - 1, advantages_N, old_N, reference_N, weights_N)
        sums = _Sums()
        norms = [self._update(inputs, part_S, sums) for part_S in self._minibatches(batch)]
        model_s = time.perf_counter() - start
        numbers = {
            "actor/lr": rate,
            "actor/grad_norm": sum(norms) / len(norms),
            "actor/pg_loss": sums.totals["pg_loss"] / len(norms),
            "actor/entropy": sums.mean("entropy"),
            "actor/ppo_kl": sums.mean("ppo_kl"),
            "actor/pg_clipfrac": sums.mean("pg_clipfrac"),
            "actor/pg_clipfrac_lower": sums.mean("pg_clipfrac_lower"),
            **({"actor/kl_loss": sums.mean("kl")} if reference_N is not None else {}),
            **_spread("critic/advantages", advantages_N),
            **_spread("critic/rewards", rewards_S),
            **_mismatch(sums.old, batch, step - 1),
        }
        return StepReport(numbers, model_s)

    # -- named parts of the step -------------------------------------------------------------

    def _needs_old(self) -> bool:
        """Whether π_o needs a forward pass of its own: it is not the policy at the update."""
        algorithm = self.config.algorithm
        return (
            self.config.learner.num_minibatches > 1
            or algorithm.correction == "m2po"
            or (algorithm.kl_coef > 0 and algorithm.kl_in == "reward")
        )

    def _pack(self, batch: TrainingBatch, keep_S: Tensor) -> list["_Part"]:
        learner = self.config.learner
        sequences, index_N = select(batch, keep_S)
        if not sequences:
            return []
        share = learner.share_prompts and self.config.model.attn_implementation == "sdpa"
        packed = pack(
            sequences,
            row_tokens=learner.row_tokens,
            microbatch_tokens=learner.microbatch_tokens,
            share_prompts=share,
            hidden_size=self._hidden_size,
        )
        return [_Part(micro, index_N[micro.index_N.to(index_N.device)]) for micro in packed]

    @torch.no_grad()
    def _score_all(self, parts: list["_Part"], batch: TrainingBatch, scorer: Scorer) -> Tensor:
        scored_N = torch.empty(batch.num_tokens, device=scorer.device)
        for part in parts:
            scored_N[part.index_N] = scorer.score(part.packed, entropy=False).logprobs_N
        return scored_N

    def _shaped_rewards(self, batch: TrainingBatch) -> Tensor:
        algorithm = self.config.algorithm
        if not algorithm.overlong_buffer:
            return batch.rewards_S
        return batch.rewards_S + overlong_penalty(
            batch.lengths_S,
            self.config.rollout.max_response_tokens,
            algorithm.overlong_buffer,
            algorithm.overlong_factor,
        )

    def _advantages(
        self,
        batch: TrainingBatch,
        rewards_S: Tensor,
        old_N: Tensor | None,
        reference_N: Tensor | None,
    ) -> Tensor:
        algorithm = self.config.algorithm
        token_rewards_N = batch.token_rewards_N.clone()
        token_rewards_N[is_last_of_sequence(batch.seq_N)] += rewards_S - batch.rewards_S
        if old_N is not None and reference_N is not None and algorithm.kl_in == "reward":
            token_rewards_N = rewards_with_kl(
                algorithm.kl_estimator, token_rewards_N, old_N, reference_N, algorithm.kl_coef
            )
            rewards_S = sum_by_sequence(token_rewards_N, batch.seq_N, batch.num_seqs)
        return compute_advantages(
            algorithm.advantage,
            AdvantageInputs(
                rewards_S=rewards_S,
                group_S=batch.group_S,
                seq_N=batch.seq_N,
                token_rewards_N=token_rewards_N,
                turn_N=batch.turn_N,
                baseline_S=batch.baseline_S,
                gamma=algorithm.gamma,
            ),
        )

    def _whole_batch_weights(self, batch: TrainingBatch, old_N: Tensor | None) -> Tensor | None:
        """The weights of m2po, which ranks the tokens of the whole batch."""
        if old_N is None or self.config.algorithm.correction != "m2po":
            return None
        inputs = CorrectionInputs(old_N, batch.behaviour_N, batch.seq_N, batch.num_seqs)
        return correct("m2po", inputs).weight_N

    def _minibatches(self, batch: TrainingBatch) -> list[Tensor]:
        """Split the groups into contiguous minibatches: a mask over the sequences for each."""
        groups = torch.arange(int(batch.group_S.max()) + 1, device=batch.group_S.device)
        parts = torch.tensor_split(groups, self.config.learner.num_minibatches)
        return [torch.isin(batch.group_S, part) for part in parts if len(part)]

    def _update(self, inputs: "_Inputs", part_S: Tensor, sums: _Sums) -> float:
        """One optimiser update on some of the sequences; return the gradient norm."""
        algorithm, batch = self.config.algorithm, inputs.batch
        length = algorithm.loss_agg_length or self.config.rollout.max_response_tokens
        denominators = Denominators.of(batch.seq_N[part_S[batch.seq_N]], length)
        self.optimizer.zero_grad(set_to_none=False)
        for part in self._pack(batch, part_S & self._has_gradient(batch, inputs.advantages_N)):
            loss_N, statistics = self._token_losses(inputs, part, sums)
            packed = part.packed
            loss = aggregate(
                algorithm.loss_agg, loss_N, packed.seq_N, packed.num_seqs, denominators
            )
            loss.backward()
            statistics["pg_loss"] = loss.detach()
            sums.add(statistics, len(part.index_N))
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.config.learner.grad_clip)
        self._require_gradients()
        self.optimizer.step()
        return float(norm)

    def _token_losses(
        self, inputs: "_Inputs", part: "_Part", sums: _Sums
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Score a micro-batch and give the loss of each of its tokens, with statistics."""
        algorithm, index_N = self.config.algorithm, part.index_N
        scores = self._scorer.score(part.packed)
        current_N = scores.logprobs_N
        old_N = current_N.detach() if inputs.old_N is None else inputs.old_N[index_N]
        correction = self._correction(inputs, part, current_N, old_N)
        loss_N, statistics = compute_loss(
            algorithm.loss,
            LossInputs(
                logprobs_N=current_N,
                advantages_N=inputs.advantages_N[index_N],
                old_logprobs_N=correction.old_logprobs_N,
                behaviour_logprobs_N=inputs.batch.behaviour_N[index_N],
                seq_N=part.packed.seq_N,
                num_seqs=part.packed.num_seqs,
            ),
            **_loss_options(self.config),
        )
        loss_N = loss_N * correction.weight_N
        if inputs.reference_N is not None and algorithm.kl_in == "loss":
            kl_N = kl_per_token(algorithm.kl_estimator, current_N, inputs.reference_N[index_N])
            loss_N = loss_N + algorithm.kl_coef * kl_N
            statistics["kl"] = kl_N.detach().sum()
        if algorithm.entropy_coef:
            loss_N = loss_N - algorithm.entropy_coef * scores.entropy_N
        statistics["entropy"] = scores.entropy_N.detach().sum()
        sums.old.append((index_N, old_N))
        return loss_N, statistics

    def _has_gradient(self, batch: TrainingBatch, advantages_N: Tensor) -> Tensor:
        """Mark the sequences that move the weights: the others need no pass at all."""
        algorithm = self.config.algorithm
        if (
            algorithm.kl_coef
            or algorithm.entropy_coef
            or algorithm.loss not in _NO_GRADIENT_AT_ZERO
        ):
            return torch.ones_like(batch.group_S, dtype=torch.bool)
        return sum_by_sequence(advantages_N.abs(), batch.seq_N, batch.num_seqs) > 0

    def _correction(
        self, inputs: "_Inputs", part: "_Part", current_N: Tensor, old_N: Tensor
    ) -> Correction:
        if inputs.weights_N is not None:
            return Correction(inputs.weights_N[part.index_N], old_N)
        batch = inputs.batch
        read = CorrectionInputs(
            old_logprobs_N=old_N,
            behaviour_logprobs_N=batch.behaviour_N[part.index_N],
            seq_N=part.packed.seq_N,
            num_seqs=part.packed.num_seqs,
            logprobs_N=current_N.detach(),
            lag_N=inputs.version - batch.versions_N[part.index_N],
        )
        name = self.config.algorithm.correction
        return correct(name, read, **_correction_options(self.config))

    def _require_gradients(self) -> None:
        """A batch without any gradient still counts as a step: momentum and decay go on."""
        for parameter in self.model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


@dataclass(frozen=True)
class _Inputs:
    """What the updates of one step read, over the whole batch."""

    batch: TrainingBatch
    version: int
    advantages_N: Tensor
    old_N: Tensor | None
    reference_N: Tensor | None
    weights_N: Tensor | None


@dataclass(frozen=True)
class _Part:
    """A micro-batch, and where its tokens stand in the whole batch."""

    packed: Packed
    index_N: Tensor


def learning_rate_of(config: JobConfig, step: int, total_steps: int) -> float:
    """Return the learning rate of `step` (from 1)."""
    learner = config.learner
    return learning_rate(
        step - 1,
        base=learner.lr,
        kind=learner.schedule,
        warmup_steps=learner.warmup_steps,
        total_steps=total_steps,
        min_ratio=learner.min_lr_ratio,
    )


def _loss_options(config: JobConfig) -> dict[str, float]:
    algorithm = config.algorithm
    options: dict[str, float] = {}
    if algorithm.clip_low is not None:
        options["clip_low"] = algorithm.clip_low
    if algorithm.clip_high is not None:
        options["clip_high"] = algorithm.clip_high
    if algorithm.loss == "ppo":
        options["dual_clip"] = algorithm.dual_clip
    return options


def _correction_options(config: JobConfig) -> dict[str, Any]:
    algorithm = config.algorithm
    options: dict[str, Any] = {}
    if algorithm.correction_cap is not None:
        options["cap"] = algorithm.correction_cap
    if algorithm.correction == "tis":
        options["level"] = algorithm.correction_level
    if algorithm.correction == "decoupled":
        options["proximal"] = algorithm.proximal
    return options


def _spread(name: str, values: Tensor) -> dict[str, float]:
    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }


def _mismatch(
    seen: list[tuple[Tensor, Tensor]], batch: TrainingBatch, version: int
) -> dict[str, float]:
    """Compare the learner's log-probs with the recorded ones: engine mismatch and staleness."""
    if not seen:
        return {}
    index_N = torch.cat([index for index, _ in seen])
    old_N = torch.cat([old for _, old in seen])
    lag_N = version - batch.versions_N[index_N]
    return mismatch_statistics(old_N, batch.behaviour_N[index_N], lag_N)
