"""The losses of the Tinker API: each is a sum over targets, and nothing is averaged.

Shape letter: E targets, one for each position of a datum, or several. p is the model's log-prob of
a target, q the one that is given (`logprobs`), A its advantage, w its weight (1 unless given) and
r = exp(p - q). What a target adds to the loss:

* cross_entropy: -w p
* importance_sampling: -w r A
* ppo: -w min(r A, clip(r) A)
* cispo: -w sg(clip(r)) p A, where sg has no gradient
* dro: -w (p A - beta/2 (p - q)^2); targets to be left out need the weight 0
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
from .target_logprobs import add_at


@dataclass(frozen=True)
class Targets:
    """What a loss reads beside the model's log-probs."""

    weights_E: Tensor
    datum_E: Tensor
    """int64: the datum of each target, counted from 0 without gaps."""
    given: Mapping[str, Tensor]
    """float32[E] by name: `advantages`, `logprobs`, `sequence_ratio_mask`."""

    @property
    def advantages_E(self) -> Tensor:
        """Times the weights."""
        return self.given["advantages"] * self.weights_E

    def at(self, index: Tensor) -> "Targets":
        """Return some of them."""
        given = {name: value[index] for name, value in self.given.items()}
        return Targets(self.weights_E[index], self.datum_E[index], given)


@dataclass(frozen=True)
class TargetLoss:
    """What a loss was of each target."""

    loss_E: Tensor
    clipped_E: Tensor | None = None
    """bool: whether the ratio was out of bounds; None for a loss without bounds."""


Config = Mapping[str, float]


@dataclass(frozen=True)
class LossFunction:
    """One loss: what it reads, and how it is computed."""

    compute: Callable[[Tensor, Targets, Config], TargetLoss]
    needs: tuple[str, ...] = ("logprobs", "advantages")
    """Inputs that there must be beside `target_tokens`."""
    may_have: tuple[str, ...] = ("weights",)
    """Inputs that there may be."""
    config: Config = field(default_factory=dict[str, float])
    """Its settings with their defaults."""
    takes_many: bool = False
    """Whether a position may have several targets."""
    is_of_datums: bool = False
    """Whether what a target adds depends on the other targets of its datum."""
    by_advantage: bool = True
    """Whether a target without advantage adds nothing."""

    @property
    def has_bounds(self) -> bool:
        """Whether it tells which ratios were out of bounds."""
        return _LOW in self.config

    def active_E(self, targets: Targets) -> Tensor:
        """Tell which targets add something: bool[E]."""
        return (targets.advantages_E if self.by_advantage else targets.weights_E) != 0


def find_loss(name: str) -> LossFunction:
    """Return a loss; ConfigError for one that is not offered."""
    if name == "stable_reinforce":
        raise ConfigError(
            "loss_fn stable_reinforce is not offered: what it computes is not published",
            hint="set loss_fn=importance_sampling, ppo or cispo",
        )
    if name not in _LOSSES:
        raise ConfigError(f"there is no loss_fn {name!r}", hint=f"take one of {', '.join(_LOSSES)}")
    return _LOSSES[name]


def read_config(name: str, given: Mapping[str, float | str] | None) -> dict[str, float]:
    """Return the settings of a loss; ConfigError for a key or value that it does not have."""
    known = find_loss(name).config
    result = dict(known)
    for key, value in (given or {}).items():
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
    apart_E = torch.where(targets.weights_E != 0, p_E - targets.given["logprobs"], 0.0)
    penalty_E = config["beta"] / 2 * apart_E**2 * targets.weights_E
    return TargetLoss(penalty_E - p_E * targets.advantages_E)


def _gspo(p_E: Tensor, targets: Targets, config: Config) -> TargetLoss:
    counts_E = targets.given["sequence_ratio_mask"] != 0
    apart_E = torch.where(counts_E, p_E.detach() - targets.given["logprobs"], 0.0)
    num_datums = int(targets.datum_E.max()) + 1
    sums_D = add_at(apart_E.new_zeros(num_datums), targets.datum_E, apart_E)
    counts_D = add_at(apart_E.new_zeros(num_datums), targets.datum_E, counts_E.float())
    ratio_D = (sums_D / counts_D.clamp(min=1)).exp()
    return _clipped(ratio_D[targets.datum_E] * (p_E - p_E.detach()).exp(), targets, config)


def _ratio(p_E: Tensor, targets: Targets) -> Tensor:
    """Return r; 1 for targets that add nothing, whose q may be anything."""
    return torch.where(targets.advantages_E != 0, p_E - targets.given["logprobs"], 0.0).exp()


def _clipped(ratio_E: Tensor, targets: Targets, config: Config) -> TargetLoss:
    bounded_E = ratio_E.clamp(config[_LOW], config[_HIGH])
    advantages_E = targets.given["advantages"]
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
