"""Rules and their weighted sum."""

import pytest
from tinkermq.envs.math.grading import MathRewards, shared_grader
from tinkermq.schemas.wire.errors import ConfigError

THOUGHT = r"<think>2 and 2</think> \boxed{4}"


@pytest.mark.parametrize(
    ("weights", "text", "reward"),
    [
        ({"answer": 1}, THOUGHT, 1),
        ({"answer": 1}, r"\boxed{5}", 0),
        ({"answer": 1}, "4", 0),
        ({"answer": 0.9, "think": 0.1}, THOUGHT, 1),
        ({"answer": 0.9, "think": 0.1}, r"\boxed{4}", 0.9),
        ({"answer": 0.9, "think": 0.1}, r"<think>a</think>\boxed{5}", 0.1),
        ({"answer": 0.9, "think": 0.1}, r"<think></think>\boxed{5}", 0),
        ({"answer": 0.9, "think": 0.1}, r"<think>a</think><think>b</think>\boxed{5}", 0),
        ({"answer": 1, "boxed": 0.5}, r"\boxed{4} \boxed{4}", 1),
        ({"answer": 1, "boxed": 0.5}, r"\boxed{5}", 0.5),
        ({"boxed": 1}, r"<think>\boxed{1}</think>\boxed{5}", 1),
    ],
)
def test_a_reward_is_the_weighted_sum_of_its_rules(weights, text, reward):
    judged = MathRewards(weights, shared_grader()).judge(text, "4")
    assert judged.reward == pytest.approx(reward)
    assert set(weights) <= set(judged.parts)


@pytest.mark.parametrize(
    ("weights", "words"), [({"lenght": 1}, "rewards.lenght: there is no such rule"), ({}, "empty")]
)
def test_rules_that_do_not_exist_are_named(weights, words):
    with pytest.raises(ConfigError, match=words):
        MathRewards(weights, shared_grader())
