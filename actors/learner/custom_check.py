"""Check a function of the user's on small random tensors, for `tinkermq algorithm check`.

The command starts `python -m tinkermq.actors.learner.custom_check KIND MODULE:FUNCTION` (see
`schemas/checks.py`).
"""

# torch leaves some of its methods untyped.
# pyright: reportUnknownMemberType=false

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from ...schemas.checks import Check, run_checks, write_results
from ...schemas.wire.errors import ConfigError
from ..training.advantages import AdvantageInputs
from ..training.functions.calls import CustomFunction, OwnFunctions
from ..training.functions.wire import CurriculumInputs, FilterInputs, Kind
from ..training.losses import LossInputs
from ..training.off_policy import CorrectionInputs

_LENGTHS = (3, 5, 2, 4, 6, 1)
_GROUPS = (0, 0, 0, 1, 1, 1)
_GROUPS_OF_REWARDS = ((0.0, 0.0, 0.0, 0.0), (1.0, 0.0, 0.0, 0.0), (1.0, 1.0, 1.0, 0.0), (1.0,) * 4)
_FIRST = 3
"""Number of sequences in the first group."""


def _range(values_N: Tensor) -> str:
    return f"{float(values_N.min()):.3g} to {float(values_N.max()):.3g}"


def check_function(kind: Kind, target: str) -> Iterator[Check]:
    """Yield the checks of a function."""
    functions: list[OwnFunctions] = []
    loaded: list[CustomFunction] = []

    def load() -> str:
        functions.append(OwnFunctions({kind: target}))
        own = functions[0].get(kind, target)
        assert own is not None
        loaded.append(own)
        return own.key

    yield Check("it can be imported", load, is_required=True)
    (own,), compute = loaded, _VALUES[kind]
    what, describe = _DESCRIBED.get(kind, ("one finite value for each token", _range))
    yield Check(what, lambda: describe(compute(own)))
    yield Check("the same twice", lambda: _same(compute(own), compute(own)))
    for name, question in _FURTHER.get(kind, {}).items():
        yield Check(name, partial(question, own))
    functions[0].close()


def _loss(own: CustomFunction) -> Tensor:
    return own.loss(_loss_inputs())[0].detach()


def _decisions(own: CustomFunction) -> Tensor:
    return torch.tensor([own.decision(_filter_inputs(rewards)) for rewards in _GROUPS_OF_REWARDS])


def _curriculum_weights(own: CustomFunction) -> Tensor:
    tries, solved = np.array([0.0, 8.0, 8.0, 8.0]), np.array([0.0, 0.0, 4.0, 8.0])
    return torch.from_numpy(own.weights(CurriculumInputs(tries, solved)))


_VALUES: dict[Kind, Callable[[CustomFunction], Tensor]] = {
    "advantage": lambda own: own.advantage(_advantage_inputs()),
    "loss": _loss,
    "correction": lambda own: own.correction(_correction_inputs()).weight_N,
    "mask": lambda own: own.mask(_correction_inputs()),
    "filter": _decisions,
    "curriculum": _curriculum_weights,
}


def _trained_groups(decisions: Tensor) -> str:
    pairs = zip(_GROUPS_OF_REWARDS, decisions, strict=True)
    trained = [str(list(rewards)) for rewards, keep in pairs if keep]
    if not trained:
        raise ConfigError(
            f"no group is trained, of rewards {', '.join(map(str, _GROUPS_OF_REWARDS))}",
            hint="return True for groups that are to be trained",
        )
    return f"trained are groups of rewards {', '.join(trained)}"


def _task_weights(weights: Tensor) -> str:
    names = ("unseen", "never solved", "solved half of the time", "always solved")
    pairs = zip(names, cast("list[float]", weights.tolist()), strict=True)
    return ", ".join(f"{name} {weight:.3g}" for name, weight in pairs)


def _share(kept_N: Tensor) -> str:
    return f"{float(kept_N.mean()):.0%} of the tokens are kept"


_DESCRIBED: dict[Kind, tuple[str, Callable[[Tensor], str]]] = {
    "correction": ("one finite weight for each token", _range),
    "mask": ("0 or 1 for each token", _share),
    "filter": ("True or False for each group", _trained_groups),
    "curriculum": ("one weight of 0 or more for each task", _task_weights),
}


def _equal_rewards(own: CustomFunction) -> str:
    same = replace(_advantage_inputs(), rewards_S=torch.ones(len(_LENGTHS)))
    values = own.advantage(replace(same, token_rewards_N=_on_last(same.rewards_S)))
    if float(values.abs().max()) < 1e-4:
        return "equal rewards teach nothing"
    return f"groups of equal rewards are trained as well: up to {float(values.abs().max()):.3g}"


def _gradient(own: CustomFunction) -> str:
    inputs = _loss_inputs()
    own.loss(inputs)[0].sum().backward()
    gradient = inputs.logprobs_N.grad
    if gradient is None or not float(gradient.abs().max()):
        raise ConfigError("its gradient is zero", hint="compute it from inputs.logprobs_N")
    if not bool(torch.isfinite(gradient).all()):
        raise ConfigError(
            "its gradient is NaN or infinite", hint="mind sqrt, log and divisions at 0"
        )
    return f"{float((gradient != 0).float().mean()):.0%} of the tokens have one"


def _rewards_tokens(own: CustomFunction) -> str:
    """Check that descending the loss makes tokens with positive advantage likelier overall."""
    inputs = _loss_inputs()
    own.loss(inputs)[0].sum().backward()
    slope = float((cast("Tensor", inputs.logprobs_N.grad) * inputs.advantages_N).sum())
    if slope >= 0:
        raise ConfigError(
            "descending it makes tokens with positive advantages less likely",
            hint="the loss is minimised: it is −advantage × …",
        )
    return "descending it makes tokens with positive advantages likelier"


def _alone(own: CustomFunction) -> str:
    inputs, part = _loss_inputs(), sum(_LENGTHS[:_FIRST])
    cut: dict[str, Any] = {
        name: value[:part] if isinstance(value, Tensor) else _FIRST
        for name, value in vars(inputs).items()
    }
    if not torch.allclose(own.loss(LossInputs(**cut))[0].detach(), _loss(own)[:part], atol=1e-5):
        raise ConfigError(
            "a token's loss depends on other sequences, and micro-batches are cut between them",
            hint="compute it from the token and its sequence (inputs.seq_N) alone; what needs "
            "the batch is an advantage",
        )
    return "a token's loss depends on its own sequence alone"


def _on_policy_inputs() -> CorrectionInputs:
    inputs = _correction_inputs()
    return replace(inputs, behaviour_logprobs_N=inputs.old_logprobs_N)


def _on_policy_weights(own: CustomFunction) -> str:
    values = own.correction(_on_policy_inputs()).weight_N
    if not torch.allclose(values, torch.ones_like(values), atol=1e-4):
        return f"on policy the weights are not 1: {_range(values)}"
    return "on policy all weights are 1"


_FURTHER: dict[Kind, dict[str, Callable[[CustomFunction], str]]] = {
    "advantage": {"equal rewards": _equal_rewards},
    "loss": {
        "it keeps a finite gradient": _gradient,
        "it rewards": _rewards_tokens,
        "micro-batches": _alone,
    },
    "correction": {"on policy": _on_policy_weights},
    "mask": {"on policy": lambda own: f"on policy {_share(own.mask(_on_policy_inputs()))}"},
}


def _filter_inputs(rewards: tuple[float, ...]) -> FilterInputs:
    num = len(rewards)
    return FilterInputs(
        rewards_E=np.array(rewards),
        lengths_E=np.arange(10, 10 + num),
        truncated_E=np.zeros(num, bool),
        infos=[{} for _ in rewards],
        data_source="",
        sample=0,
    )


def _same(first: Tensor, second: Tensor) -> str:
    if not torch.equal(first, second):
        raise ConfigError(
            "two calls with the same inputs differ: a run could not be replayed",
            hint="draw nothing at random, and keep nothing between calls",
        )
    return "every bit"


def _tokens() -> Tensor:
    return torch.repeat_interleave(torch.arange(len(_LENGTHS)), torch.tensor(_LENGTHS))


def _random(seed: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(sum(_LENGTHS), generator=generator)


def _on_last(rewards_S: Tensor) -> Tensor:
    rewards_N = torch.zeros(sum(_LENGTHS))
    rewards_N[torch.tensor(_LENGTHS).cumsum(0) - 1] = rewards_S
    return rewards_N


def _advantage_inputs() -> AdvantageInputs:
    rewards_S = torch.tensor([1.0, 0.0, 0.5, 0.0, 1.0, 1.0])
    return AdvantageInputs(
        rewards_S=rewards_S,
        group_S=torch.tensor(_GROUPS),
        seq_N=_tokens(),
        token_rewards_N=_on_last(rewards_S),
        turn_N=torch.zeros(sum(_LENGTHS), dtype=torch.int64),
        values_N=_random(1, 0.1),
        lone_S=torch.zeros(len(_LENGTHS), dtype=torch.bool),
        kept_N=torch.ones(sum(_LENGTHS), dtype=torch.bool),
    )


def _loss_inputs() -> LossInputs:
    old_N = -_random(2).abs()
    return LossInputs(
        logprobs_N=(old_N + _random(3, 0.05)).requires_grad_(),
        advantages_N=_random(4),
        old_logprobs_N=old_N,
        behaviour_logprobs_N=old_N + _random(5, 0.05),
        seq_N=_tokens(),
        num_seqs=len(_LENGTHS),
    )


def _correction_inputs() -> CorrectionInputs:
    old_N = -_random(2).abs()
    return CorrectionInputs(
        old_logprobs_N=old_N,
        behaviour_logprobs_N=old_N + _random(5, 0.5),
        seq_N=_tokens(),
        num_seqs=len(_LENGTHS),
    )


def main() -> None:
    """Print the results for the function given on the command line."""
    kind, target = sys.argv[1:3]
    write_results(run_checks(check_function(cast("Kind", kind), target)))


if __name__ == "__main__":
    main()
