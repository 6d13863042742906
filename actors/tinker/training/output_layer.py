"""From hidden states through the output layer to a loss, and back, for some columns at a time.

Shape letters: U columns of a micro-batch, E targets that they predict, C columns whose logits are
held at once, e their targets, D hidden size.

Most losses need nothing but a target's own log-prob: forward and backward pass are done with some
columns before the next ones. Where a loss looks at a whole datum its log-probs are computed first,
and once more for the gradients. Columns whose targets add nothing take no backward pass.
"""

# torch leaves some of its methods untyped.
# pyright: reportUnknownMemberType=false

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ...learner.training.model import Scorer
from .losses import LossFunction, Targets
from .target_logprobs import target_logprobs


@dataclass(frozen=True)
class PlacedTargets:
    """The targets of a micro-batch."""

    token_E: Tensor
    """int64: their ids."""
    place_E: Tensor
    """int64: the column of each, from 0 to U - 1."""
    targets: Targets


@dataclass(frozen=True)
class TargetScores:
    """What came of the targets of a micro-batch, without gradients."""

    logprobs_E: Tensor
    loss_E: Tensor
    clipped_E: Tensor
    """bool; False where the loss has no bounds."""

    @classmethod
    def empty(cls, num: int, device: torch.device) -> "TargetScores":
        """Make room for those of so many targets."""
        numbers = torch.empty(2, num, device=device)
        return cls(numbers[0], numbers[1], torch.zeros(num, dtype=torch.bool, device=device))


@dataclass(frozen=True)
class _Columns:
    column_C: Tensor
    target_e: Tensor
    """Which of the targets they predict."""
    place_e: Tensor
    """The column of each among these."""
    is_active: bool
    """Whether a backward pass has anything to do."""


class OutputLayer:
    """Reads the hidden states of micro-batches for one loss."""

    def __init__(
        self, scorer: Scorer, loss: LossFunction, config: Mapping[str, float], logits_columns: int
    ) -> None:
        self._scorer = scorer
        self._loss = loss
        self._config = config
        self._logits_columns = logits_columns

    def read(
        self, states_UD: Tensor, placed: PlacedTargets, *, backward: bool
    ) -> tuple[TargetScores, Tensor | None]:
        """Return the scores, and the gradient of the states if those have one.

        With `backward` the gradients of the output layer's adapter are added to what is there.
        """
        scores = TargetScores.empty(len(placed.token_E), states_UD.device)
        columns = self._columns(len(states_UD), placed, backward)
        gradient_UD = torch.zeros_like(states_UD) if backward and states_UD.requires_grad else None
        if self._loss.is_of_datums:
            self._read_twice(states_UD, placed, columns, scores, gradient_UD)
        else:
            self._read_once(states_UD, placed, columns, scores, gradient_UD)
        return scores, gradient_UD

    def _read_once(
        self,
        states_UD: Tensor,
        placed: PlacedTargets,
        columns: list[_Columns],
        scores: TargetScores,
        gradient_UD: Tensor | None,
    ) -> None:
        for some in columns:
            with torch.set_grad_enabled(some.is_active):
                states_CD, logprobs_e = self._logprobs(states_UD, placed, some)
                lost = self._loss.compute(
                    logprobs_e, placed.targets.at(some.target_e), self._config
                )
            scores.logprobs_E[some.target_e] = logprobs_e.detach()
            scores.loss_E[some.target_e] = lost.loss_E.detach()
            if lost.clipped_E is not None:
                scores.clipped_E[some.target_e] = lost.clipped_E
            if some.is_active:
                lost.loss_E.sum().backward()
                _put(gradient_UD, some, states_CD)

    def _read_twice(
        self,
        states_UD: Tensor,
        placed: PlacedTargets,
        columns: list[_Columns],
        scores: TargetScores,
        gradient_UD: Tensor | None,
    ) -> None:
        with torch.no_grad():
            for some in columns:
                scores.logprobs_E[some.target_e] = self._logprobs(states_UD, placed, some)[1]
        logprobs_E = scores.logprobs_E.clone().requires_grad_()
        lost = self._loss.compute(logprobs_E, placed.targets, self._config)
        scores.loss_E.copy_(lost.loss_E.detach())
        if lost.clipped_E is not None:
            scores.clipped_E.copy_(lost.clipped_E)
        (slope_E,) = torch.autograd.grad(lost.loss_E.sum(), logprobs_E)
        for some in columns:
            if some.is_active:
                states_CD, logprobs_e = self._logprobs(states_UD, placed, some)
                logprobs_e.backward(slope_E[some.target_e])
                _put(gradient_UD, some, states_CD)

    def _logprobs(
        self, states_UD: Tensor, placed: PlacedTargets, some: _Columns
    ) -> tuple[Tensor, Tensor]:
        """Return copies of some columns' states, whose gradient is asked for, and log-probs."""
        states_CD = states_UD.detach()[some.column_C].requires_grad_(states_UD.requires_grad)
        # Where the states are the logits themselves they are copied: they are written over.
        logits_CV = self._scorer.logits(states_CD * 1 if self._scorer.full_logits else states_CD)
        token_e = placed.token_E[some.target_e]
        return states_CD, target_logprobs(logits_CV, some.place_e, token_e)

    def _columns(self, num: int, placed: PlacedTargets, backward: bool) -> list[_Columns]:
        """Cut the columns into those whose logits are held at once, those with gradients first."""
        active_E = self._loss.active_E(placed.targets)
        active_U = torch.zeros(num, dtype=torch.bool, device=active_E.device)
        active_U[placed.place_E[active_E]] = backward
        order_U = active_U.logical_not().int().argsort(stable=True)
        rank_U = torch.empty_like(order_U)
        rank_U[order_U] = torch.arange(num, device=order_U.device)
        rank_E, order_E = rank_U[placed.place_E].sort(stable=True)
        num_active = int(active_U.sum())
        cuts = _cuts(0, num_active, self._logits_columns)
        cuts += _cuts(num_active, num, self._logits_columns)
        found: list[_Columns] = []
        for first, last in cuts:
            ends = torch.searchsorted(rank_E, torch.tensor([first, last], device=rank_E.device))
            part = slice(int(ends[0]), int(ends[1]))
            place_e = rank_E[part] - first
            found.append(_Columns(order_U[first:last], order_E[part], place_e, first < num_active))
        return found


def _cuts(first: int, last: int, most: int) -> list[tuple[int, int]]:
    return [(at, min(at + most, last)) for at in range(first, last, most)]


def _put(gradient_UD: Tensor | None, some: _Columns, states_CD: Tensor) -> None:
    if gradient_UD is not None and states_CD.grad is not None:
        gradient_UD[some.column_C] = states_CD.grad
