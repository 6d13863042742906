"""KL estimators and entropy against tables and exact sums."""

import math

import pytest
import torch
from tinkermq.actors.training.losses import (
    kl_per_token,
    rewards_with_kl,
)
from tinkermq.schemas.wire.errors import ConfigError

LOGPROBS = torch.tensor([-1.0, -1.0, -3.0])
REFERENCE = torch.tensor([-1.0, -2.0, -1.0])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("k1", [0.0, 1.0, -2.0]),
        ("k2", [0.0, 0.5, 2.0]),
        ("k3", [0.0, math.exp(-1) - 1 + 1, math.exp(2) - 1 - 2]),
    ],
)
def test_estimates_follow_their_formulas(name, expected):
    torch.testing.assert_close(kl_per_token(name, LOGPROBS, REFERENCE), torch.tensor(expected))


@pytest.mark.parametrize(("name", "slope"), [("k1", 1.0), ("k2", 0.5), ("k3", 1 - math.exp(-0.5))])
def test_in_the_loss_the_gradient_flows_through_the_current_policy(name, slope):
    logprobs = torch.tensor([-1.0], requires_grad=True)
    [gradient] = torch.autograd.grad(
        kl_per_token(name, logprobs, torch.tensor([-1.5])).sum(), logprobs
    )
    assert float(gradient) == pytest.approx(slope)


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_with_a_plus_the_value_stays_and_the_gradient_is_that_of_k2(name):
    logprobs = LOGPROBS.clone().requires_grad_()
    plus = kl_per_token(f"{name}+", logprobs, REFERENCE)
    torch.testing.assert_close(plus.detach(), kl_per_token(name, LOGPROBS, REFERENCE))
    [gradient] = torch.autograd.grad(plus.sum(), logprobs)
    torch.testing.assert_close(gradient, LOGPROBS - REFERENCE)


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_unbiased_estimates_average_to_the_exact_kl(name):
    torch.manual_seed(0)
    policy, reference = torch.randn(2, 6, dtype=torch.float64).log_softmax(-1)
    expected = (policy.exp() * (policy - reference)).sum()
    estimate = (policy.exp() * kl_per_token(name, policy, reference)).sum()
    torch.testing.assert_close(estimate, expected)


def test_in_the_reward_it_is_subtracted_without_gradient():
    logprobs = LOGPROBS.clone().requires_grad_()
    rewards = rewards_with_kl("k1", torch.tensor([0.0, 0.0, 1.0]), logprobs, REFERENCE, 0.1)
    torch.testing.assert_close(rewards, torch.tensor([0.0, -0.1, 1.2]))
    assert not rewards.requires_grad


def test_estimates_stay_finite_where_the_policies_share_nothing():
    estimates = kl_per_token("k3", torch.tensor([-500.0, 0.0]), torch.tensor([0.0, -500.0]))
    assert torch.isfinite(estimates).all()


def test_an_unknown_estimator_is_refused():
    with pytest.raises(ConfigError, match="kl_estimator=k4"):
        kl_per_token("k4", LOGPROBS, REFERENCE)
