"""One call of forward_backward on its way: micro-batch by micro-batch.

Shape letters: P positions of data, E targets, U columns of a micro-batch.
"""

# torch leaves some of its methods untyped.
# pyright: reportUnknownMemberType=false

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....schemas.tinker.datum import LossResult
from ....schemas.tinker.operation import ALONE, Company
from ...training.micro_batch import MicroBatch, ranges
from .adapter import Adapter
from .inputs import DatumBatch
from .layers import SharedBase
from .losses import LossFunction, OutputLayer, PlacedTargets, Targets
from .rows import pack_data


@dataclass(frozen=True)
class NextMicroBatch:
    """What is computed next of a call."""

    micro: MicroBatch
    index_E: NDArray[np.int64]
    """Which of the call's targets it predicts."""
    targets: Targets
    backward: bool
    """Whether gradients come of it."""


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
        companies: Sequence[Company] | None = None,
    ) -> None:
        """Lay the data out; nothing is computed yet.

        `at_end` is called once all gradients are added; without it there are none. `companies` are
        those of its micro-batches, none if all were alone, where it is computed as it once was.
        """
        self._base = base
        self.adapter = adapter
        """Whose loss it is."""
        self.companies: list[Company] = []
        """Of the micro-batches that are computed."""
        self._past = companies
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
        self._next: NextMicroBatch | None = None
        self._first_P = np.cumsum(batch.count_P) - batch.count_P
        self._logprobs_E, self._loss_E = np.zeros((2, len(batch.targets_E)), dtype=np.float32)
        self._num_clipped = self._num_clipped_next = 0

    @property
    def num_left(self) -> int:
        """Micro-batches that are still to be computed."""
        return len(self._micros) - len(self.companies)

    @property
    def next_tokens(self) -> int:
        """Tokens of the next micro-batch, those in common counted once; 0 behind the last one."""
        return self._micros[len(self.companies)].num_tokens if self.num_left else 0

    @property
    def past_company(self) -> Company | None:
        """The company that the next micro-batch had when it was computed before, if it was."""
        if self._past is None:
            return None
        done = len(self.companies)
        return self._past[done] if done < len(self._past) else ALONE

    def next(self) -> NextMicroBatch:
        """Return what is to be computed next, on the base's device; IndexError behind the last."""
        if self._next is None:
            micro = self._micros[len(self.companies)]
            index_P = micro.index_N.numpy()
            index_E = ranges(self._first_P[index_P], self._batch.count_P[index_P])
            targets = self._targets(index_E)
            backward = self._at_end is not None and bool(self._loss.active_E(targets).any())
            device = self._base.scorer.device
            self._next = NextMicroBatch(micro.to(device), index_E, targets, backward)
        return self._next

    def read(self, states_UD: Tensor, place_P: Tensor) -> Tensor | None:
        """Compute the next one's loss of its hidden states; return their gradient, if any.

        `place_P` says which of the states predicts each position's targets. The gradients of the
        output layer's adapter, which is to be in use, are added to what is there.
        """
        some = self.next()
        count_P = self._batch.count_P[some.micro.index_N.cpu().numpy()]
        placed = PlacedTargets(
            token_E=self._tensor(self._batch.targets_E[some.index_E]),
            place_E=place_P.repeat_interleave(self._tensor(count_P)),
            targets=some.targets,
        )
        scores, gradient_UD = self._output.read(states_UD, placed, backward=some.backward)
        self._logprobs_E[some.index_E] = scores.logprobs_E.cpu().numpy()
        self._loss_E[some.index_E] = scores.loss_E.cpu().numpy()
        self._num_clipped_next = int(scores.clipped_E.sum())
        return gradient_UD

    def done(self, company: Company) -> None:
        """Note that the next micro-batch is computed, and beside whom."""
        self._num_clipped += self._num_clipped_next
        self._next = None
        self.companies.append(company)
        if not self.num_left and self._at_end is not None:
            self._at_end()

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
