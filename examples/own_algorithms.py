"""Functions of one's own that a learner runs: each in some lines.

    tinkermq algorithm check examples.own_algorithms:clipped
    tinkermq train examples/addition.yaml algorithm.own_loss=examples.own_algorithms:clipped

Shape letters: N generated tokens of some sequences, S sequences, I tasks.
"""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from tinkermq.actors.training.advantages import AdvantageInputs
from tinkermq.actors.training.functions.wire import CurriculumInputs, FilterInputs
from tinkermq.actors.training.losses import LossInputs
from tinkermq.actors.training.off_policy import CorrectionInputs
from torch import Tensor


def best_of_group(inputs: AdvantageInputs) -> Tensor:
    """Credit the best episodes of each group with 1, less the share of the best: float32[N]."""
    num_groups = int(inputs.group_S.max()) + 1
    best = torch.full((num_groups,), -torch.inf).scatter_reduce(
        0, inputs.group_S, inputs.rewards_S.float(), "amax"
    )
    is_best_S = (inputs.rewards_S == best[inputs.group_S]).float()
    count = torch.bincount(inputs.group_S, minlength=num_groups).float()
    share = torch.bincount(inputs.group_S, is_best_S, num_groups).float() / count
    return (is_best_S - share[inputs.group_S])[inputs.seq_N]


def clipped(inputs: LossInputs) -> Tensor:
    """PPO's clipped objective: one loss for each token, with gradient."""
    ratio_N = (inputs.logprobs_N - inputs.old_logprobs_N).exp()
    plain_N = ratio_N * inputs.advantages_N
    bounded_N = ratio_N.clamp(0.8, 1.28) * inputs.advantages_N
    return -torch.minimum(plain_N, bounded_N)


def square_root(inputs: CorrectionInputs) -> Tensor:
    """Weigh each token by the root of its ratio, at most 2."""
    log_ratio_N = inputs.old_logprobs_N - inputs.behaviour_logprobs_N
    return (0.5 * log_ratio_N).exp().clamp(max=2.0)


def certain(inputs: CorrectionInputs) -> Tensor:
    """Train the tokens to which both policies gave at least one in a thousand: bool[N]."""
    least_N = torch.minimum(inputs.old_logprobs_N, inputs.behaviour_logprobs_N)
    return least_N > math.log(1e-3)


def neither_hopeless_nor_easy(group: FilterInputs) -> bool:
    """Select groups of which some, but fewer than nine in ten, episodes were good."""
    good = float((group.rewards_E > 0.5).mean())
    return 0 < good <= 0.9


def hardest(tasks: CurriculumInputs) -> NDArray[np.float64]:
    """Prefer tasks that are rarely solved: float64[I]."""
    return 1 - tasks.rates_I
