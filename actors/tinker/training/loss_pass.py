"""One call of forward_backward on its way: micro-batch by micro-batch, each of one adapter.

Shape letters: P positions of data, E targets, U columns of a micro-batch.
"""

# torch leaves some of its methods untyped.
# pyright: reportUnknownMemberType=false

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....schemas.tinker.datum import LossResult
from ...learner.packing.layout import ranges
from ...learner.packing.micro_batch import MicroBatch
from ...learner.training.model import Scorer
from .adapter import Adapter
from .inputs import DatumBatch
from .layers import AdapterInUse
from .losses import LossFunction, Targets
from .output_layer import OutputLayer, PlacedTargets, TargetScores
from .rows import pack_data


@dataclass(frozen=True)
class SharedBase:
    """The model that all adapters share, and how it is computed."""

    scorer: Scorer
    in_use: AdapterInUse
    microbatch_tokens: int
    """Columns of one forward and backward pass; a longer datum is one of its own."""
    logits_columns: int
    """Columns whose logits are held at once."""
    share_prompts: bool
    """Whether what data begin with in common is computed once."""


class LossPass:
    """Computes a loss, and adds its gradients to the adapter's, one micro-batch at a time.

    Passes of several adapters may take turns, micro-batch by micro-batch: none changes another's
    result by a bit.
    """

    def __init__(
        self,
        base: SharedBase,
        adapter: Adapter,
        batch: DatumBatch,
        loss: LossFunction,
        config: Mapping[str, float],
        *,
        at_end: Callable[[], None] | None,
    ) -> None:
        """Lay the data out; nothing is computed yet.

        `at_end` is called once all gradients are added; without it there are none.
        """
        self._base = base
        self._adapter = adapter
        self._batch = batch
        self._loss = loss
        self._output = OutputLayer(base.scorer, loss, config, base.logits_columns)
        self._at_end = at_end
        self._micros = pack_data(
            batch.tokens,
            microbatch_tokens=base.microbatch_tokens,
            hidden_size=base.scorer.hidden_size,
            share_prompts=base.share_prompts,
        )
        self._done = 0
        self._first_P = np.cumsum(batch.count_P) - batch.count_P
        self._logprobs_E, self._loss_E = np.zeros((2, len(batch.targets_E)), dtype=np.float32)
        self._num_clipped = 0

    @property
    def num_left(self) -> int:
        """Micro-batches that are still to be computed."""
        return len(self._micros) - self._done

    @property
    def next_tokens(self) -> int:
        """Tokens of the next micro-batch, those in common counted once; 0 behind the last one."""
        return self._micros[self._done].num_tokens if self.num_left else 0

    def advance(self) -> bool:
        """Compute the next micro-batch; return whether there are more."""
        if self.num_left:
            with self._base.in_use.using(self._adapter.by_layer):
                self._compute(self._micros[self._done])
            self._done += 1
            if not self.num_left and self._at_end is not None:
                self._at_end()
        return self.num_left > 0

    def result(self) -> LossResult:
        """Return log-probs and metrics; RuntimeError unless all is computed."""
        if self.num_left:
            raise RuntimeError(f"{self.num_left} micro-batches are not computed yet")
        metrics = {
            "loss:sum": float(self._loss_E.sum(dtype=np.float64)),
            "tokens:sum": float(len(self._batch.count_P)),
        }
        if self._loss.has_bounds:
            metrics["clipped:sum"] = float(self._num_clipped)
        return LossResult(self._batch.by_datum(self._logprobs_E), metrics)

    def _compute(self, micro: MicroBatch) -> None:
        scorer, index_P = self._base.scorer, micro.index_N.numpy()
        count_P = self._batch.count_P[index_P]
        index_E = ranges(self._first_P[index_P], count_P)
        targets = self._targets(index_E)
        backward = self._at_end is not None and bool(self._loss.active_E(targets).any())
        if backward:
            self._adapter.begin_gradients()
        micro = micro.to(scorer.device)
        with torch.set_grad_enabled(backward):
            states_UD, place_P = scorer.states_UD(micro, logits=scorer.full_logits)
        placed = PlacedTargets(
            token_E=self._tensor(self._batch.targets_E[index_E]),
            place_E=place_P.repeat_interleave(self._tensor(count_P)),
            targets=targets,
        )
        scores, gradient_UD = self._output.read(states_UD, placed, backward=backward)
        if gradient_UD is not None:
            states_UD.backward(gradient_UD)
        self._keep(index_E, scores)

    def _targets(self, index_E: NDArray[np.int64]) -> Targets:
        """Return what the loss reads of some targets."""
        batch = self._batch
        return Targets(
            weights_E=self._tensor(batch.weights_E[index_E]),
            datum_E=self._tensor(np.unique(batch.datum_E[index_E], return_inverse=True)[1]),
            given={name: self._tensor(value[index_E]) for name, value in batch.given.items()},
        )

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._base.scorer.device)

    def _keep(self, index_E: NDArray[np.int64], scores: TargetScores) -> None:
        self._logprobs_E[index_E] = scores.logprobs_E.cpu().numpy()
        self._loss_E[index_E] = scores.loss_E.cpu().numpy()
        self._num_clipped += int(scores.clipped_E.sum())
