"""Sums over sequences are those of loops over them."""

import pytest
import torch
from tinkermq.actors.training.sequences import reward_to_go


@pytest.mark.parametrize("length", [0, 1, 2, 3, 7, 64, 1000])
@pytest.mark.parametrize("kind", ["number", "by place"])
def test_returns_are_those_of_a_loop_from_the_end(length: int, kind: str) -> None:
    generator = torch.Generator().manual_seed(length)
    rewards_SP = torch.randn(3, length, generator=generator, dtype=torch.float64)
    decay_SP = torch.rand(3, length, generator=generator, dtype=torch.float64)
    decay_SP[:, length // 2 : length // 2 + 1] = 0.0  # where an episode ends
    gamma_SP = decay_SP if kind == "by place" else torch.full_like(decay_SP, 0.9)
    expected_SP = rewards_SP.clone()
    for place in range(length - 2, -1, -1):
        expected_SP[:, place] += gamma_SP[:, place] * expected_SP[:, place + 1]
    made_SP = reward_to_go(rewards_SP, decay_SP if kind == "by place" else 0.9)
    torch.testing.assert_close(made_SP, expected_SP, rtol=1e-12, atol=1e-12)
