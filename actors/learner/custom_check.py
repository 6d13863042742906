"""Check a function of the user's on small random tensors, for `tinkermq algorithm check`.

The command starts `python -m tinkermq.actors.learner.custom_check KIND MODULE:FUNCTION` (see
`schemas/checks.py`).
"""

# torch leaves some of its methods untyped.
# pyright: reportUnknownMemberType=false

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
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
    questions = {
        "advantage": _of_advantage,
        "loss": _of_loss,
        "correction": _of_correction,
        "mask": _of_mask,
        "filter": _of_filter,
        "curriculum": _of_curriculum,
    }
    for name, question in questions[kind](loaded[0]).items():
        yield Check(name, question)
    functions[0].close()


Questions = dict[str, Callable[[], str]]


def _of_advantage(own: CustomFunction) -> Questions:
    def equal() -> str:
        inputs = _advantage_inputs()
        same = replace(inputs, rewards_S=torch.ones(len(_LENGTHS)))
        values = own.advantage(replace(same, token_rewards_N=_on_last(same.rewards_S)))
        if float(values.abs().max()) < 1e-4:
            return "equal rewards teach nothing"
        return f"groups of equal rewards are trained as well: up to {float(values.abs().max()):.3g}"

    return {
        "one finite value for each token": lambda: _range(own.advantage(_advantage_inputs())),
        "the same twice": lambda: _same(
            own.advantage(_advantage_inputs()), own.advantage(_advantage_inputs())
        ),
        "equal rewards": equal,
    }


def _of_loss(own: CustomFunction) -> Questions:
    def gradient() -> str:
        inputs = _loss_inputs()
        own.loss(inputs)[0].sum().backward()
        return _gradient(inputs.logprobs_N)

    def follows() -> str:
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

    def alone() -> str:
        inputs = _loss_inputs()
        whole = own.loss(inputs)[0].detach()
        part = sum(_LENGTHS[:_FIRST])
        cut: dict[str, Any] = {
            name: value[:part] if isinstance(value, Tensor) else _FIRST
            for name, value in vars(inputs).items()
        }
        first = LossInputs(**cut)
        if not torch.allclose(own.loss(first)[0].detach(), whole[:part], atol=1e-5):
            raise ConfigError(
                "a token's loss depends on other sequences, and micro-batches are cut between them",
                hint="compute it from the token and its sequence (inputs.seq_N) alone; what needs "
                "the batch is an advantage",
            )
        return "a token's loss depends on its own sequence alone"

    return {
        "one finite value for each token": lambda: _range(own.loss(_loss_inputs())[0].detach()),
        "it keeps a finite gradient": gradient,
        "the same twice": lambda: _same(
            own.loss(_loss_inputs())[0].detach(), own.loss(_loss_inputs())[0].detach()
        ),
        "it rewards": follows,
        "micro-batches": alone,
    }


def _of_correction(own: CustomFunction) -> Questions:
    def on_policy() -> str:
        inputs = _correction_inputs()
        same = replace(inputs, behaviour_logprobs_N=inputs.old_logprobs_N)
        values = own.correction(same).weight_N
        if not torch.allclose(values, torch.ones_like(values), atol=1e-4):
            return f"on policy the weights are not 1: {_range(values)}"
        return "on policy all weights are 1"

    return {
        "one finite weight for each token": lambda: _range(
            own.correction(_correction_inputs()).weight_N
        ),
        "the same twice": lambda: _same(
            own.correction(_correction_inputs()).weight_N,
            own.correction(_correction_inputs()).weight_N,
        ),
        "on policy": on_policy,
    }


def _of_mask(own: CustomFunction) -> Questions:
    def share() -> str:
        kept_N = own.mask(_correction_inputs())
        return f"{float(kept_N.mean()):.0%} of the tokens are kept"

    def on_policy() -> str:
        inputs = _correction_inputs()
        same = replace(inputs, behaviour_logprobs_N=inputs.old_logprobs_N)
        return f"on policy {float(own.mask(same).mean()):.0%} of the tokens are kept"

    return {
        "0 or 1 for each token": share,
        "the same twice": lambda: _same(
            own.mask(_correction_inputs()), own.mask(_correction_inputs())
        ),
        "on policy": on_policy,
    }


def _of_filter(own: CustomFunction) -> Questions:
    def answers() -> list[bool]:
        return [own.decision(_filter_inputs(rewards)) for rewards in _GROUPS_OF_REWARDS]

    def kept() -> str:
        decisions = answers()
        trained = [
            str(list(r)) for r, keep in zip(_GROUPS_OF_REWARDS, decisions, strict=True) if keep
        ]
        if not trained:
            raise ConfigError(
                f"no group is trained, of rewards {', '.join(map(str, _GROUPS_OF_REWARDS))}",
                hint="return True for groups that are to be trained",
            )
        return f"trained are groups of rewards {', '.join(trained)}"

    return {
        "True or False for each group": kept,
        "the same twice": lambda: _same(torch.tensor(answers()), torch.tensor(answers())),
    }


def _of_curriculum(own: CustomFunction) -> Questions:
    def weights() -> Tensor:
        tries = np.array([0.0, 8.0, 8.0, 8.0])
        inputs = CurriculumInputs(tries, np.array([0.0, 0.0, 4.0, 8.0]))
        return torch.from_numpy(own.weights(inputs))

    def describe() -> str:
        names = ("unseen", "never solved", "solved half of the time", "always solved")
        pairs = zip(names, cast("list[float]", weights().tolist()), strict=True)
        return ", ".join(f"{name} {weight:.3g}" for name, weight in pairs)

    return {
        "one weight of 0 or more for each task": describe,
        "the same twice": lambda: _same(weights(), weights()),
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


def _gradient(logprobs_N: Tensor) -> str:
    gradient = logprobs_N.grad
    if gradient is None or not float(gradient.abs().max()):
        raise ConfigError("its gradient is zero", hint="compute it from inputs.logprobs_N")
    if not bool(torch.isfinite(gradient).all()):
        raise ConfigError(
            "its gradient is NaN or infinite", hint="mind sqrt, log and divisions at 0"
        )
    silent = float((gradient == 0).float().mean())
    return f"{1 - silent:.0%} of the tokens have one"


def _range(values_N: Tensor) -> str:
    return f"{float(values_N.min()):.3g} to {float(values_N.max()):.3g}"


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
