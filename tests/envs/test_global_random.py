"""Episodes that draw from the process-wide generators draw each from a state of its own."""

import random

import numpy as np
import pytest
from tinkermq.envs.running.global_random import GlobalRandom


def draw(dice):
    with dice.lent():
        return random.random(), np.random.random()


def test_episodes_that_take_turns_draw_what_they_would_draw_alone():
    alone = [draw(dice) for dice in [GlobalRandom(5)] for _ in range(3)]
    one, other = GlobalRandom(5), GlobalRandom(6)
    mixed = []
    for _ in range(3):
        mixed.append(draw(one))
        draw(other)
    assert mixed == alone


def test_afterwards_the_generators_are_as_before():
    before = random.getstate(), repr(np.random.get_state(legacy=False))
    dice = GlobalRandom(5)
    draw(dice)
    with pytest.raises(ValueError, match="half-way"):
        fail_half_way(dice)
    assert (random.getstate(), repr(np.random.get_state(legacy=False))) == before


def fail_half_way(dice):
    with dice.lent():
        random.seed(1)
        raise ValueError("half-way")
