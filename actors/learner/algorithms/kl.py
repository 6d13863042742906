"""KL to a frozen reference, estimated from the sampled tokens, and entropy.

With x = log π − log π_ref the estimators are k1 = x, k2 = x²/2, k3 = e^(−x) − 1 + x
(http://joschu.net/blog/kl-approx.html). In the loss the gradient flows through `logprobs_N`; the
gradient of k1 is 0 in expectation, so k1 belongs in the reward. k1+ and k3+ have the value of k1
and k3 with the gradient of k2, which is that of the KL (as verl names them).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from .losses import log_ratio
from .registry import choose

KlEstimator = Callable[[Tensor, Tensor], Tensor]


def k1(logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
    """Give x: unbiased, high variance, may be negative."""
    return log_ratio(logprobs_N, reference_N)


def k2(logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
    """Give x²/2: biased, never negative; its gradient is that of the KL."""
    return log_ratio(logprobs_N, reference_N) ** 2 / 2


def k3(logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
    """Give e^(−x) − 1 + x: unbiased, never negative."""
    x_N = log_ratio(logprobs_N, reference_N)
    return torch.exp(-x_N) - 1 + x_N


def _with_gradient_of_k2(value: Callable[[Tensor, Tensor], Tensor]) -> KlEstimator:
    def estimate(logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
        slope_N = k2(logprobs_N, reference_N)
        return value(logprobs_N, reference_N).detach() + slope_N - slope_N.detach()

    return estimate


KL_ESTIMATORS: dict[str, KlEstimator] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "k1+": _with_gradient_of_k2(k1),
    "k3+": _with_gradient_of_k2(k3),
}


def kl_per_token(name: str, logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
    """Estimate KL(π‖π_ref) at each token; differentiable in `logprobs_N`."""
    return choose(KL_ESTIMATORS, "kl_estimator", name)(logprobs_N, reference_N)


def rewards_with_kl(
    name: str, token_rewards_N: Tensor, logprobs_N: Tensor, reference_N: Tensor, coef: float
) -> Tensor:
    """Subtract the KL from the reward of each token; no gradient.

    An outcome advantage takes the sum over each sequence as its `rewards_S`.
    """
    kl_N = kl_per_token(name, logprobs_N.detach(), reference_N.detach())
    return token_rewards_N - coef * kl_N


def entropy_from_logits(logits_NV: Tensor) -> Tensor:
    """Compute the entropy of each distribution over the vocabulary, in nats: N values.

    A token that cannot occur, whose logit is -inf, adds nothing, to the gradient either.
    """
    probs_NV = torch.softmax(logits_NV, dim=-1)
    finite_NV = logits_NV.masked_fill(logits_NV.isneginf(), 0.0)
    return torch.logsumexp(logits_NV, dim=-1) - (probs_NV * finite_NV).sum(dim=-1)
