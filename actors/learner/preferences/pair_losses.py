"""Losses of pairs of answers, and the weight that each answer has in their gradient.

A loss of pairs reads one score of each answer: of DPO the sum of the log-probs of its tokens, of a
reward model what it says of it. Given the scores before an update, the gradient of the loss is that
of a weighted sum of scores,

    ∇ loss = Σ_S (∂ loss / ∂ score_S) ∇ score_S,

so that the backward pass needs the weights alone, and the answers of a pair may lie in different
micro-batches or on different ranks. That is exact for the weights at which the scores were taken.

Pure functions. Shapes: P pairs, 2 answers of each, the chosen one first.
"""

# torch leaves some of its methods untyped.
# pyright: reportUnknownMemberType=false

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ....schemas.config.sft import SftConfig


@dataclass(frozen=True)
class Pairs:
    """What DPO reads of pairs beside the policy's log-probs."""

    reference_P2: Tensor
    """float64: log π_ref of each answer, the sum over its tokens."""
    lengths_P2: Tensor
    """float64: tokens of each answer."""


@dataclass(frozen=True)
class WeighedScores:
    """A loss of pairs at some scores, and its gradient."""

    loss: float
    """Mean over the pairs."""
    gradient_P2: Tensor
    """float64: ∂ loss / ∂ score."""


def weigh(loss: Callable[[Tensor], Tensor], scores_P2: Tensor) -> WeighedScores:
    """Return a loss at some scores, and how it changes with each of them."""
    with torch.enable_grad():
        read_P2 = scores_P2.detach().double().requires_grad_()
        value = loss(read_P2)
        [gradient_P2] = torch.autograd.grad(value, read_P2)
    return WeighedScores(float(value.detach()), gradient_P2)


def dpo_loss(config: SftConfig, logprobs_P2: Tensor, pairs: Pairs) -> Tensor:
    """Return the mean over pairs of −log σ(β h), h = Δ_chosen − Δ_rejected, Δ = log π/π_ref.

    That is DPO (arXiv 2305.18290). With label smoothing ε it is (1 − ε)(−log σ(β h)) + ε(−log
    σ(−β h)) (cDPO). IPO is (h − 1/2β)², with Δ by token as its authors and TRL have it (arXiv
    2310.12036). The cross entropy of the chosen answers, by token, is added with its weight (the
    SFT term of arXiv 2404.19733, and TRL's loss type `sft`).
    """
    delta_P2 = logprobs_P2 - pairs.reference_P2
    if config.dpo_loss == "ipo":
        delta_P2 = delta_P2 / pairs.lengths_P2
    margin_P = delta_P2[:, 0] - delta_P2[:, 1]
    if config.dpo_loss == "ipo":
        loss_P = (margin_P - 1 / (2 * config.beta)) ** 2
    else:
        wrong, logit_P = config.label_smoothing, config.beta * margin_P
        loss_P = -(1 - wrong) * logsigmoid(logit_P) - wrong * logsigmoid(-logit_P)
    loss = loss_P.mean()
    if config.sft_coef:
        loss = loss - config.sft_coef * logprobs_P2[:, 0].sum() / pairs.lengths_P2[:, 0].sum()
    return loss


def reward_loss(config: SftConfig, scores_P2: Tensor) -> Tensor:
    """Return the mean over pairs of −log σ(r_chosen − r_rejected) (Bradley-Terry).

    Scores are held around 0 by `center_coef` · (r_chosen + r_rejected)² (arXiv 2312.09244).
    """
    loss_P = -logsigmoid(scores_P2[:, 0] - scores_P2[:, 1])
    return (loss_P + config.center_coef * scores_P2.sum(1) ** 2).mean()


def pair_numbers(scores_P2: Tensor, prefix: str) -> dict[str, float]:
    """Name as metrics how often, and by how much, the chosen answers win; equal scores are half so.

    Where a policy is its reference nothing tells answers apart: half of them are found.
    """
    chosen_P, rejected_P = scores_P2.unbind(1)
    wins_P = (chosen_P > rejected_P).double() + (chosen_P == rejected_P).double() / 2
    return {
        f"{prefix}/accuracy": float(wins_P.mean()),
        f"{prefix}/margin": float((chosen_P - rejected_P).mean()),
        f"{prefix}/chosen_reward": float(chosen_P.mean()),
        f"{prefix}/rejected_reward": float(rejected_P.mean()),
    }
