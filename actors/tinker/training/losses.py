"""The losses of the Tinker API: each is a sum over targets, and nothing is averaged.

Shape letter: E targets, one for each position of a datum, or several. p is the model's log-prob of
a target, q that of the sampler (`logprobs`), A its advantage, w its weight (default 1) and
r = exp(p - q). A target adds to the loss:

* cross_entropy: -w p
* importance_sampling: -w r A
* ppo: -w min(r A, clip(r) A)
* cispo: -w sg(clip(r)) p A, where sg has no gradient
* dro: -w (p A - beta/2 (p - q)^2); targets that are left out need the weight 0
* gspo: ppo's with r = exp(mean(p - q)), the mean over those targets of the datum that
  `sequence_ratio_mask` marks, by default all whose w A is not 0; each target has its share of r's
  gradient (GSPO-token, arXiv 2507.18071)
"""

# torch leaves some of its methods untyped.
# pyright: reportUnknownMemberType=false

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ....schemas.wire.errors import ConfigError
from ...training.model import Scorer
from ...training.output_layer import add_at, row_chunks, target_logprobs


@dataclass(frozen=True)
class Targets:
    """Inputs of a loss apart from the model's log-probs."""

    weights_E: Tensor
    datum_E: Tensor
    """int64: the datum of each target, counted from 0 without gaps."""
    inputs: Mapping[str, Tensor]
    """float32[E] by name: `advantages`, `logprobs`, `sequence_ratio_mask`."""

    @property
    def advantages_E(self) -> Tensor:
        """Advantages times weights."""
        return self.inputs["advantages"] * self.weights_E

    def at(self, index: Tensor) -> "Targets":
        """Return the targets at some indices."""
        inputs = {name: value[index] for name, value in self.inputs.items()}
        return Targets(self.weights_E[index], self.datum_E[index], inputs)


@dataclass(frozen=True)
class TargetLoss:
    """The loss of each target."""

    loss_E: Tensor
    clipped_E: Tensor | None = None
    """bool: whether the ratio was clipped; None for a loss without bounds."""


Config = Mapping[str, float]


@dataclass(frozen=True)
class LossFunction:
    """One loss: its inputs, settings and formula."""

    compute: Callable[[Tensor, Targets, Config], TargetLoss]
    needs: tuple[str, ...] = ("logprobs", "advantages")
    """Required inputs apart from `target_tokens`."""
    may_have: tuple[str, ...] = ("weights",)
    """Optional inputs."""
    config: Config = field(default_factory=dict[str, float])
    """Settings with their defaults."""
    takes_many: bool = False
    """Whether a position may have several targets."""
    is_of_datums: bool = False
    """Whether a target's loss depends on the other targets of its datum."""
    by_advantage: bool = True
    """Whether targets without advantage have no effect."""

    @property
    def has_bounds(self) -> bool:
        """Whether it clips ratios."""
        return _LOW in self.config

    def active_E(self, targets: Targets) -> Tensor:
        """Return which targets have an effect: bool[E]."""
        return (targets.advantages_E if self.by_advantage else targets.weights_E) != 0


def find_loss(name: str) -> LossFunction:
    """Return a loss by name; raises ConfigError for an unknown one."""
    if name == "stable_reinforce":
        raise ConfigError(
            "loss_fn stable_reinforce is not offered: what it computes is not published",
            hint="set loss_fn=importance_sampling, ppo or cispo",
        )
    if name not in _LOSSES:
        raise ConfigError(f"there is no loss_fn {name!r}", hint=f"take one of {', '.join(_LOSSES)}")
    return _LOSSES[name]


def read_config(name: str, settings: Mapping[str, float | str] | None) -> dict[str, float]:
    """Return the settings of a loss; raises ConfigError for an unknown key or invalid value."""
    known = find_loss(name).config
    result = dict(known)
    for key, value in (settings or {}).items():
        if key not in known:
            offered = f"it has {', '.join(known)}" if known else "it has none"
            raise ConfigError(
                f"loss_fn {name} has no setting {key!r}", hint=f"leave it out: {offered}"
            )
        if isinstance(value, str) or not 0 <= value < math.inf:
            raise ConfigError(
                f"{key} of loss_fn {name} is {value!r}",
                hint="take a finite number that is not negative",
            )
        result[key] = float(value)
    low, high = result.get(_LOW, 0.0), result.get(_HIGH, math.inf)
    if low > high:
        raise ConfigError(
            f"{_LOW} of loss_fn {name} is {low}, above {_HIGH}, which is {high}",
            hint="both are bounds of a ratio around 1, such as 0.8 and 1.2",
        )
    return result


def _cross_entropy(p_E: Tensor, targets: Targets, _: Config) -> TargetLoss:
    return TargetLoss(-targets.weights_E * p_E)


def _importance_sampling(p_E: Tensor, targets: Targets, _: Config) -> TargetLoss:
    return TargetLoss(-_ratio(p_E, targets) * targets.advantages_E)


def _ppo(p_E: Tensor, targets: Targets, config: Config) -> TargetLoss:
    return _clipped(_ratio(p_E, targets), targets, config)


def _cispo(p_E: Tensor, targets: Targets, config: Config) -> TargetLoss:
    ratio_E = _ratio(p_E.detach(), targets)
    bounded_E = ratio_E.clamp(config[_LOW], config[_HIGH])
    return TargetLoss(-bounded_E * p_E * targets.advantages_E, bounded_E != ratio_E)


def _dro(p_E: Tensor, targets: Targets, config: Config) -> TargetLoss:
    apart_E = torch.where(targets.weights_E != 0, p_E - targets.inputs["logprobs"], 0.0)
    penalty_E = config["beta"] / 2 * apart_E**2 * targets.weights_E
    return TargetLoss(penalty_E - p_E * targets.advantages_E)


def _gspo(p_E: Tensor, targets: Targets, config: Config) -> TargetLoss:
    counts_E = targets.inputs["sequence_ratio_mask"] != 0
    apart_E = torch.where(counts_E, p_E.detach() - targets.inputs["logprobs"], 0.0)
    num_datums = int(targets.datum_E.max()) + 1
    sums_D = add_at(apart_E.new_zeros(num_datums), targets.datum_E, apart_E)
    counts_D = add_at(apart_E.new_zeros(num_datums), targets.datum_E, counts_E.float())
    ratio_D = (sums_D / counts_D.clamp(min=1)).exp()
    return _clipped(ratio_D[targets.datum_E] * (p_E - p_E.detach()).exp(), targets, config)


def _ratio(p_E: Tensor, targets: Targets) -> Tensor:
    """Return r; 1 for targets without effect, whose q may be anything."""
    return torch.where(targets.advantages_E != 0, p_E - targets.inputs["logprobs"], 0.0).exp()


def _clipped(ratio_E: Tensor, targets: Targets, config: Config) -> TargetLoss:
    bounded_E = ratio_E.clamp(config[_LOW], config[_HIGH])
    advantages_E = targets.inputs["advantages"]
    worse_E = torch.minimum(ratio_E * advantages_E, bounded_E * advantages_E)
    clipped_E = (bounded_E != ratio_E) & (targets.advantages_E != 0)
    return TargetLoss(-worse_E * targets.weights_E, clipped_E)


_LOW, _HIGH = "clip_low_threshold", "clip_high_threshold"
_LOSSES = {
    "cross_entropy": LossFunction(
        _cross_entropy, needs=("weights",), may_have=(), takes_many=True, by_advantage=False
    ),
    "importance_sampling": LossFunction(_importance_sampling),
    "ppo": LossFunction(_ppo, config={_LOW: 0.8, _HIGH: 1.2}),
    "cispo": LossFunction(_cispo, config={_LOW: 0.0, _HIGH: 4.0}),
    "dro": LossFunction(_dro, config={"beta": 0.01}, by_advantage=False),
    "gspo": LossFunction(
        _gspo,
        may_have=("weights", "sequence_ratio_mask"),
        config={_LOW: 0.9997, _HIGH: 1.0004},
        is_of_datums=True,
    ),
}


# From hidden states through the output layer to a loss, and back, for some columns at a time.
#
# Shape letters: U columns of a micro-batch, E targets that they predict, C columns whose logits
# are in memory at once, e their targets, D hidden size.
#
# Most losses need only a target's own log-prob: forward and backward pass are computed for some
# columns before the next ones. For a loss over a whole datum the log-probs are computed first, and
# again for the gradients. Columns whose targets have no effect get no backward pass.


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
    """Results of the targets of a micro-batch, without gradients."""

    logprobs_E: Tensor
    loss_E: Tensor
    clipped_E: Tensor
    """bool; False for a loss without bounds."""

    @classmethod
    def empty(cls, num: int, device: torch.device) -> "TargetScores":
        """Allocate the results of `num` targets."""
        numbers = torch.empty(2, num, device=device)
        return cls(numbers[0], numbers[1], torch.zeros(num, dtype=torch.bool, device=device))


@dataclass(frozen=True)
class _Columns:
    column_C: Tensor
    target_e: Tensor
    """Indices of the targets that they predict."""
    place_e: Tensor
    """The place of each target's column among these."""
    is_active: bool
    """Whether they get a backward pass."""


class LossReader:
    """Computes one loss from the hidden states of micro-batches."""

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
        """Return the scores, and the gradient of the states if they need one.

        With `backward` the gradients of the output layer's adapter are added to the adapter's.
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
                _add_gradient(gradient_UD, some, states_CD)

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
                _add_gradient(gradient_UD, some, states_CD)

    def _logprobs(
        self, states_UD: Tensor, placed: PlacedTargets, some: _Columns
    ) -> tuple[Tensor, Tensor]:
        """Return copies of some columns' states, with gradient, and the targets' log-probs."""
        states_CD = states_UD.detach()[some.column_C].requires_grad_(states_UD.requires_grad)
        # States that are logits are copied, since `target_logprobs` overwrites them.
        logits_CV = self._scorer.logits(states_CD * 1 if self._scorer.full_logits else states_CD)
        token_e = placed.token_E[some.target_e]
        return states_CD, target_logprobs(logits_CV, some.place_e, token_e)

    def _columns(self, num: int, placed: PlacedTargets, backward: bool) -> list[_Columns]:
        """Cut the columns into chunks for the logits, those with gradients first."""
        active_E = self._loss.active_E(placed.targets)
        active_U = torch.zeros(num, dtype=torch.bool, device=active_E.device)
        active_U[placed.place_E[active_E]] = backward
        order_U = active_U.logical_not().int().argsort(stable=True)
        rank_U = torch.empty_like(order_U)
        rank_U[order_U] = torch.arange(num, device=order_U.device)
        rank_E, order_E = rank_U[placed.place_E].sort(stable=True)
        num_active = int(active_U.sum())
        num_targets = int((rank_E < num_active).sum())
        parts = [(True, slice(0, num_active), slice(0, num_targets))]
        parts += [(False, slice(num_active, num), slice(num_targets, len(rank_E)))]
        collected: list[_Columns] = []
        for is_active, of_columns, of_targets in parts:
            column_U, target_E = order_U[of_columns], order_E[of_targets]
            place_E = rank_E[of_targets] - of_columns.start
            if len(column_U):
                collected += [
                    _Columns(
                        column_U[first:end],
                        target_E[begin:stop],
                        place_E[begin:stop] - first,
                        is_active,
                    )
                    for first, end, begin, stop in row_chunks(
                        place_E, len(column_U), self._logits_columns
                    )
                ]
        return collected


def _add_gradient(gradient_UD: Tensor | None, some: _Columns, states_CD: Tensor) -> None:
    if gradient_UD is not None and states_CD.grad is not None:
        gradient_UD[some.column_C] = states_CD.grad
