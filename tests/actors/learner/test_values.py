"""Values against tables worked out by hand."""

import torch
from tinkermq.actors.training.advantages import (
    explained_variance,
    generalized_advantage,
    value_loss,
)


def test_the_generalised_advantage_by_hand():
    # γ = 1/2, λ = 1/2; a sequence of three tokens, one of one, and one of none.
    rewards = torch.tensor([0.0, 1.0, 2.0, 5.0])
    values = torch.tensor([1.0, 2.0, 4.0, 3.0])
    seq = torch.tensor([0, 0, 0, 2])
    # δ: 0 + 1 − 1, 1 + 2 − 2, 2 − 4 | 5 − 3; A = δ + A_next / 4
    expected = torch.tensor([0.125, 0.5, -2.0, 2.0], dtype=torch.float64)
    torch.testing.assert_close(generalized_advantage(rewards, values, seq, 3, 0.5, 0.5), expected)


def test_with_gamma_and_lambda_1_the_return_is_the_reward_that_is_still_to_come():
    rewards = torch.tensor([0.0, 1.0, 2.0])
    values = torch.tensor([0.3, -0.2, 0.7])
    advantages = generalized_advantage(rewards, values, torch.zeros(3, dtype=torch.int64), 1, 1, 1)
    torch.testing.assert_close((advantages + values).float(), torch.tensor([3.0, 3.0, 2.0]))


def test_a_value_earns_nothing_by_moving_beyond_the_clip():
    values = torch.tensor([1.0, 0.4, -1.0], requires_grad=True)
    loss, clipped = value_loss(values, torch.zeros(3), torch.tensor([2.0, 2.0, 2.0]), 0.5)
    torch.testing.assert_close(loss, torch.tensor([1.125, 1.28, 4.5]))
    assert clipped.tolist() == [True, False, False]
    loss.sum().backward()
    assert values.grad is not None
    torch.testing.assert_close(values.grad, torch.tensor([0.0, -1.6, -3.0]))


def test_the_explained_variance():
    returns = torch.tensor([0.0, 1.0, 2.0, 3.0])
    assert explained_variance(returns, returns) == 1
    assert explained_variance(torch.full((4,), 7.0), returns) == 0
    assert explained_variance(returns, torch.ones(4)) == 0
