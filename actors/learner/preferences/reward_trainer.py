"""Training a reward model by pairs of answers (Bradley-Terry), in the place of a policy.

A step scores the answers, weighs them (`pair_losses.py`), and computes the gradient of the weighted
sum: two passes, packed like all others, and the answers of a pair need not lie in one micro-batch.
The step is a pure function of the model, the batch and the step's number, as a policy's is.

Shape letters: S sequences, the two answers of each pair one after the other, the chosen one first;
N last tokens of answers in a micro-batch.
"""

# torch leaves some of its methods untyped.
# pyright: reportUnknownMemberType=false

import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from ....schemas.config.job import JobConfig
from ....schemas.rollout import Group
from ....schemas.wire.errors import DataError
from ..algorithms.training_batch import TrainingBatch, ends_of, minibatches
from ..packing.micro_batch import MicroBatch
from ..training.checkpoint import OPTIMIZER, save_form, save_policy
from ..training.optimizer import load_optimizer, make_optimizer
from ..training.optimizers.loss_scale import LossScale
from ..training.parallel import Parallel, whole, whole_tensors
from ..training.rank_packer import RankPacker
from ..training.schedules import rate_of
from ..training.step import StepReport
from .pair_losses import pair_numbers, reward_loss, weigh
from .preferences import check_pair
from .reward_model import RewardScorer, pad_alike


class RewardTrainer:
    """A reward model with its optimiser."""

    critic = None

    def __init__(
        self,
        model: nn.Module,
        config: JobConfig,
        *,
        total_steps: int,
        parallel: Parallel | None = None,
    ) -> None:
        """`parallel` is the place among other ranks, by default none but this, on the CPU.

        Raises ModelError when the model cannot be trained in packed rows.
        """
        self.model = model
        self.config = config
        self._total_steps = total_steps
        self._parallel = parallel or Parallel()
        learner = config.learner
        inside = self._parallel.place(model, learner, in_float32=[cast(Any, model).score])
        self.optimizer = make_optimizer(model, learner, learner.lr)
        self._loss_scale = LossScale(self.optimizer, learner.dtype)
        self._scorer = RewardScorer(model, dtype=learner.dtype, inside=inside)
        self._packer = RankPacker(model, self._scorer, learner, self._parallel, None)

    def weights(self) -> dict[str, Tensor]:
        """Return what is trained, whole and on the CPU; all ranks ask for it together."""
        return {name: value.cpu() for name, value in whole_tensors(self.model)}

    def save_form(self, folder: Path, tokenizer: Any) -> None:
        """Write all of a checkpoint but weights and optimiser."""
        save_form(folder, self.model, pad_alike(tokenizer, self.model))

    def begin_save(self, folder: Path, tokenizer: Any) -> Callable[[], None]:
        """Write what the ranks write together; return what is left to this one.

        Only the first rank has a tokenizer to write.
        """
        if self._parallel.rank == 0:
            tokenizer = pad_alike(tokenizer, self.model)
        return save_policy(folder, self.model, tokenizer, self.optimizer, self._parallel)

    def restore(self, folder: Path) -> None:
        """Take the optimiser's state from a checkpoint."""
        load_optimizer(folder / OPTIMIZER, self.model, self.optimizer)

    def check_readable(self, group: Group) -> None:
        """Raise DataError for a group that is no pair, or whose answers end with padding."""
        check_pair(group)
        padding = cast(Any, self.model).config.get_text_config().pad_token_id
        if any(int(item.token_ids[item.turn_ends[-1]]) == padding for item in group.sampled):
            raise DataError(
                f"an answer ends with token {padding}, which the tokenizer pads with: its score "
                "would not be found",
                hint="set another pad_token in the model's tokenizer_config.json",
            )

    def step(self, batch: TrainingBatch, step: int) -> StepReport:
        """Train one batch; the model's version is `step` afterwards.

        An update whose gradient is not finite is left out and counted.
        """
        torch.manual_seed(self.config.seed * 1_000_003 + step)
        start, learner = time.perf_counter(), self.config.learner
        rate = rate_of(learner, step, learner.lr, self._total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        batch = batch.to(self._scorer.device)
        ends = ends_of(batch, torch.ones_like(batch.group_S, dtype=torch.bool))
        norms, losses, scores = list[float](), list[tuple[float, int]](), list[Tensor]()
        for part_S in minibatches(batch, learner.num_minibatches) * learner.batch_epochs:
            micros = self._packer.pack(ends, part_S)
            scores_S = self._score(micros, batch.num_seqs)
            scores_P2 = scores_S[part_S].view(-1, 2)
            found = weigh(partial(reward_loss, self.config.sft), scores_P2)
            weight_S = torch.zeros_like(scores_S)
            weight_S[part_S] = found.gradient_P2.flatten().to(weight_S.dtype)
            norms.append(self._update(micros, weight_S))
            losses.append((found.loss, len(scores_P2)))
            scores.append(scores_P2)
        finite = [norm for norm in norms if math.isfinite(norm)]
        num_pairs = sum(count for _, count in losses)
        numbers = {
            "actor/lr": rate,
            **self._loss_scale.numbers("actor"),
            "actor/pg_loss": sum(loss * count for loss, count in losses) / num_pairs,
            "actor/skipped_updates": float(len(norms) - len(finite)),
            **({"actor/grad_norm": sum(finite) / len(finite)} if finite else {}),
            **pair_numbers(torch.cat(scores), "reward_model"),
        }
        return StepReport(numbers, time.perf_counter() - start)

    def pair_rewards(self, batch: TrainingBatch) -> Tensor:
        """Return the scores of the answers of pairs: float32[P, 2]."""
        batch = batch.to(self._scorer.device)
        everything = torch.ones_like(batch.group_S, dtype=torch.bool)
        micros = self._packer.pack(ends_of(batch, everything), everything)
        return self._score(micros, batch.num_seqs).view(-1, 2)

    @torch.no_grad()
    def _score(self, micros: list[MicroBatch], num_seqs: int) -> Tensor:
        """Return the score of each answer, of which this rank computes its share: float32[S]."""
        scores_S = torch.zeros(num_seqs, device=self._scorer.device)
        for micro in micros:
            scores_S[micro.index_N] = self._scorer.rewards(micro)
        return self._parallel.add_up(scores_S)

    def _update(self, micros: list[MicroBatch], weight_S: Tensor) -> float:
        """Make one optimiser update by the weights of answers; return the gradient's norm.

        Every sequence has one last token, whose place among them all is that of the sequence.
        """
        self.optimizer.zero_grad()
        for micro in micros:
            scores_N = self._scorer.rewards(micro)
            if micro.is_empty:
                scores_N.sum().backward()  # only to gather and reduce with the others
                continue
            self._loss_scale.backward((scores_N * weight_S[micro.index_N]).sum())
        self._loss_scale.unscale()
        clip = self.config.learner.grad_clip
        norm = float(whole(nn.utils.clip_grad_norm_(self.model.parameters(), clip)))
        if self._loss_scale.is_good(norm):
            self.optimizer.step()
        return norm
