"""The objective of a step: computes the loss of a micro-batch from its log-probs.

Sequences and samples are never split over micro-batches, so losses and corrections read one
micro-batch at a time. Weights that depend on the whole batch (m2po, normalised weights) are
computed first.

Shape letters: N generated tokens, S sequences.
"""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...schemas.config.algorithm import AlgorithmConfig
from ...schemas.config.job import JobConfig
from . import losses
from .batch import TrainingBatch, renumber
from .distillation import TeacherTargets, forward_kl
from .functions.calls import OwnFunctions
from .micro_batch import MicroBatch
from .model import ScoreOptions, TokenScores
from .off_policy import Correction, CorrectionInputs, correct, masked, normalised
from .sequences import sum_by_sequence

_GRADIENT_AT_ZERO = frozenset({"clip_cov", "dppo", "kl_cov", "sft"})
"""Losses in which tokens with advantage 0 have a gradient."""


@dataclass(frozen=True)
class StepInputs:
    """Inputs of the updates of one step, over the whole batch."""

    batch: TrainingBatch
    sample_N: Tensor
    """int64: the sample of each token (`batch.py`)."""
    version: int
    """The policy's version before the step."""
    advantages_N: Tensor
    old_N: Tensor | None
    """log π_o; None: π_o is the policy at the update."""
    reference_N: Tensor | None
    weights_N: Tensor | None
    """Correction weights that depend on the whole batch."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus in this step."""
    targets: TeacherTargets | None = None
    """Targets of a forward KL from teachers."""


@dataclass(frozen=True)
class MicroLoss:
    """The loss of one micro-batch, and its statistics."""

    loss: Tensor
    """This micro-batch's share of the batch's loss, with gradient."""
    sums: dict[str, Tensor]
    """Detached sums, which are added over micro-batches."""
    index_N: Tensor
    """Indices in the batch of its tokens, except tokens that are too old."""
    old_N: Tensor
    """log π_o of these tokens."""


class Objective:
    """The policy loss with its correction, KL and entropy bonus, as configured."""

    def __init__(self, config: JobConfig, functions: OwnFunctions) -> None:
        self._algorithm = config.algorithm
        self._loss_options = _loss_options(config)
        self._correction_options = _correction_options(config)
        self._custom_loss = functions.get("loss", config.algorithm.own_loss)
        self._custom_correction = functions.get("correction", config.algorithm.own_correction)
        self._custom_mask = functions.get("mask", config.algorithm.own_mask)

    def needs_old(self, num_updates: int, dropout: float = 0.0) -> bool:
        """Return whether π_o needs a separate forward pass: it is not the policy at the update.

        It also needs one for an adapter with dropout, which updates compute with. The log-linear
        proximal policy avoids that pass.
        """
        algorithm = self._algorithm
        interpolated = algorithm.correction == "decoupled" and algorithm.proximal == "loglinear"
        return (
            (num_updates > 1 and not interpolated)
            or algorithm.entropy_share < 1
            or (dropout > 0 and algorithm.loss != "sft")
            or algorithm.weighs_whole_batches
            or (algorithm.teacher is not None and algorithm.teacher_loss == "reverse_kl")
            or (algorithm.kl_coef > 0 and algorithm.kl_in == "reward")
        )

    def whole_batch_weights(
        self,
        batch: TrainingBatch,
        old_N: Tensor | None,
        kept_N: Tensor,
        sample_N: Tensor,
        advantages_N: Tensor,
    ) -> Tensor | None:
        """Return weights that depend on the whole batch, for kept tokens; None: none do."""
        algorithm = self._algorithm
        if old_N is None or not algorithm.weighs_whole_batches:
            return None
        kept_n, numbers_M = renumber(sample_N[kept_N])
        inputs = CorrectionInputs(old_N[kept_N], batch.behaviour_N[kept_N], kept_n, len(numbers_M))
        correction = self._masked(inputs, advantages_N[kept_N])
        weights_N = torch.zeros_like(old_N)
        weights_N[kept_N] = correction.weight_N
        return weights_N

    def without_dropped(
        self, batch: TrainingBatch, kept_N: Tensor, weights_N: Tensor | None
    ) -> tuple[TrainingBatch, Tensor]:
        """Return the batch to train, and the tokens that count in denominators: bool[N].

        If only kept tokens count, the others are excluded like tokens that are too old.
        """
        if weights_N is None or self._algorithm.correction_denominator == "all":
            return batch, kept_N
        counted_N = kept_N & (weights_N > 0)
        return replace(batch, fresh_N=counted_N), counted_N

    def dropped_share(self, weights_N: Tensor | None, kept_N: Tensor) -> dict[str, float]:
        """Return the share of dropped tokens, if the statistics do not include them."""
        if weights_N is None or self._algorithm.correction_denominator == "all":
            return {}
        dropped_n = (weights_N[kept_N] == 0).float()
        return {"actor/correction_dropped": float(dropped_n.mean()) if len(dropped_n) else 0.0}

    def _masked(self, inputs: CorrectionInputs, advantages_N: Tensor) -> Correction:
        algorithm = self._algorithm
        if self._custom_correction is not None:
            correction = self._custom_correction.correction(inputs)
        else:
            correction = correct(algorithm.correction, inputs, **self._correction_options)
        if algorithm.correction_normalise:
            correction = normalised(correction, inputs, level=algorithm.correction_level)
        correction = masked(correction, algorithm.correction_masks, inputs, advantages_N)
        if self._custom_mask is None:
            return correction
        return replace(correction, weight_N=correction.weight_N * self._custom_mask.mask(inputs))

    def _policy_loss(self, inputs: losses.LossInputs) -> losses.TokenLoss:
        if self._custom_loss is not None:
            return self._custom_loss.loss(inputs)
        return losses.compute_loss(self._algorithm.loss, inputs, **self._loss_options)

    def has_gradient(self, inputs: StepInputs) -> Tensor:
        """Mark the sequences that have a gradient; the others need no backward pass."""
        algorithm, batch = self._algorithm, inputs.batch
        kl_in_loss = algorithm.kl_coef > 0 and algorithm.kl_in == "loss"
        everywhere = self._custom_loss is not None or algorithm.loss in _GRADIENT_AT_ZERO
        if kl_in_loss or inputs.entropy_coef or everywhere:
            return torch.ones_like(batch.group_S, dtype=torch.bool)
        moved_N = inputs.advantages_N.abs()
        if inputs.targets is not None:
            moved_N = moved_N + inputs.targets.taught_N
        return sum_by_sequence(moved_N, batch.seq_N, batch.num_seqs) > 0

    def score_options(self, inputs: StepInputs, micro: MicroBatch) -> ScoreOptions:
        """Return the options for scoring a micro-batch, as required by the loss."""
        others_NK = None if inputs.targets is None else inputs.targets.ids_NK[micro.index_N]
        return ScoreOptions(entropy_gradient=inputs.entropy_coef > 0, others_NK=others_NK)

    def is_too_old(self, inputs: StepInputs, micro: MicroBatch) -> bool:
        """Return whether all tokens of a micro-batch are too old to be trained."""
        fresh_N = inputs.batch.fresh_N
        return fresh_N is not None and not bool(fresh_N[micro.index_N].any())

    def loss(
        self,
        inputs: StepInputs,
        micro: MicroBatch,
        scores: TokenScores,
        denominators: losses.Denominators,
    ) -> MicroLoss:
        """Compute the loss of a micro-batch from the scores of its tokens."""
        algorithm = self._algorithm
        index_N, scores = _fresh(inputs, micro.index_N, scores)
        sample_N, numbers_M = renumber(inputs.sample_N[index_N])
        part = denominators.of_part(sample_N, numbers_M)
        current_N = scores.logprobs_N
        old_N = current_N.detach() if inputs.old_N is None else inputs.old_N[index_N]
        correction = self._correction(inputs, index_N, current_N, old_N)
        read = losses.LossInputs(
            logprobs_N=current_N,
            advantages_N=inputs.advantages_N[index_N],
            old_logprobs_N=correction.old_logprobs_N,
            behaviour_logprobs_N=inputs.batch.behaviour_N[index_N],
            seq_N=sample_N,
            num_seqs=len(numbers_M),
        )
        policy_N, sums = self._policy_loss(read)

        def total(values_N: Tensor) -> Tensor:
            return losses.aggregate(algorithm.loss_agg, values_N, sample_N, len(numbers_M), part)

        loss = total(policy_N * correction.weight_N)
        sums |= {"pg_loss": loss.detach(), "entropy": scores.entropy_N.detach().sum()}
        sums["correction_dropped"] = (correction.weight_N == 0).sum().float()
        sums["correction_weight"] = correction.weight_N.sum()
        if inputs.reference_N is not None:
            before_N = losses.kl_per_token(
                algorithm.kl_estimator, old_N, inputs.reference_N[index_N]
            )
            sums["reference_kl"] = before_N.sum()
        if inputs.reference_N is not None and algorithm.kl_in == "loss":
            kl_N = losses.kl_per_token(
                algorithm.kl_estimator, current_N, inputs.reference_N[index_N]
            )
            if algorithm.kl_importance:
                kl_N = kl_N * losses.log_ratio(current_N, read.behaviour_logprobs_N).exp()
            kl = total(kl_N)
            sums["kl_loss"] = kl.detach()
            loss = loss + algorithm.kl_coef * kl
        if inputs.targets is not None:
            teaching = total(_teaching(inputs.targets, index_N, scores))
            sums["teacher_loss"] = teaching.detach()
            loss = loss + algorithm.teacher_coef * teaching
        if inputs.entropy_coef:
            loss = loss - inputs.entropy_coef * total(scores.entropy_N)
        return MicroLoss(loss, sums, index_N, old_N)

    def _correction(
        self, inputs: StepInputs, index_N: Tensor, current_N: Tensor, old_N: Tensor
    ) -> Correction:
        if inputs.weights_N is not None:
            return Correction(inputs.weights_N[index_N], old_N)
        batch = inputs.batch
        sample_N, numbers_M = renumber(inputs.sample_N[index_N])
        read = CorrectionInputs(
            old_logprobs_N=old_N,
            behaviour_logprobs_N=batch.behaviour_N[index_N],
            seq_N=sample_N,
            num_seqs=len(numbers_M),
            logprobs_N=current_N.detach(),
            lag_N=inputs.version - batch.versions_N[index_N],
        )
        return self._masked(read, inputs.advantages_N[index_N])


def _fresh(inputs: StepInputs, index_N: Tensor, scores: TokenScores) -> tuple[Tensor, TokenScores]:
    """Exclude the tokens of a micro-batch that are too old to be trained."""
    if inputs.batch.fresh_N is None:
        return index_N, scores
    fresh_N = inputs.batch.fresh_N[index_N]
    others_NK = None if scores.others_NK is None else scores.others_NK[fresh_N]
    fresh = TokenScores(scores.logprobs_N[fresh_N], scores.entropy_N[fresh_N], others_NK)
    return index_N[fresh_N], fresh


def _teaching(targets: TeacherTargets, index_N: Tensor, scores: TokenScores) -> Tensor:
    """Return the forward KL of each token from its teacher, or 0 without a teacher."""
    assert scores.others_NK is not None
    kl_N = forward_kl(scores.others_NK, targets.logprobs_NK[index_N])
    return kl_N * targets.taught_N[index_N]


def _loss_options(config: JobConfig) -> dict[str, float]:
    algorithm = config.algorithm
    options: dict[str, float] = dict(algorithm.loss_options)
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
    if algorithm.correction_floor is not None:
        options["floor"] = algorithm.correction_floor
    if algorithm.correction_budget is not None:
        options["budget"] = algorithm.correction_budget
    if algorithm.correction == "tis":
        options["level"] = algorithm.correction_level
    if algorithm.correction == "decoupled":
        options["proximal"] = algorithm.proximal
    return options


# -- the coefficient of the entropy bonus ----------------------------------------------------------
# Fixed, or adapted to keep the entropy at a target: the coefficient then rises by a fixed amount
# after each step with entropy below the target, falls by as much after other steps, never below 0,
# and counts only while entropy is below the target (Skywork-OR1, arXiv 2505.22312). The entropy is
# that of the step before, so it costs no pass.

_FILE = "learner/entropy.json"
MAX_COEF = 1.0
"""Upper bound of the coefficient."""


@dataclass
class EntropyBonus:
    """The current coefficient of the entropy bonus."""

    coef: float
    """The coefficient; adapted if there is an entropy target, else constant."""
    entropy: float | None = None
    """Mean entropy of a token in the previous step, in nats; None: no step yet."""

    def of_step(self, algorithm: AlgorithmConfig) -> float:
        """Return the coefficient with which a step is trained."""
        target = algorithm.entropy_target
        if target is None or self.entropy is None:
            return self.coef
        return self.coef if self.entropy <= target else 0.0

    def measured(self, algorithm: AlgorithmConfig, entropy: float) -> None:
        """Adapt the coefficient to the entropy of a step."""
        target = algorithm.entropy_target
        if target is None:
            return
        self.entropy = entropy
        change = algorithm.entropy_coef_step if entropy < target else -algorithm.entropy_coef_step
        self.coef = min(max(self.coef + change, 0.0), MAX_COEF)

    def save(self, folder: Path) -> None:
        """Write the coefficient beside the optimiser of a checkpoint."""
        (folder / _FILE).write_text(json.dumps(asdict(self)))

    def load(self, folder: Path) -> None:
        """Load the coefficient if the checkpoint has one; else keep the configured one."""
        if (folder / _FILE).is_file():
            saved = json.loads((folder / _FILE).read_text())
            self.coef, self.entropy = saved["coef"], saved["entropy"]
