"""Advantages against tables worked out by hand."""

import math
import statistics
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tinkermq.actors.training.advantages import (
    ADVANTAGES,
    AdvantageInputs,
    compute_advantages,
    length_reward,
    overlong_penalty,
)
from tinkermq.schemas.wire.errors import ConfigError

from tests.support.variants import variants

OUTCOME = ["grpo", "dr_grpo", "rloo", "opo", "maxrl", "reinforce_pp_baseline"]


def inputs(rewards, groups, lengths=None, **extra):
    lengths = lengths or [1] * len(rewards)
    told = {"components_SC": [[float(reward)] for reward in rewards]} | extra
    given: dict[str, Any] = {
        name: torch.tensor(value) if isinstance(value, list) else value
        for name, value in told.items()
    }
    return AdvantageInputs(
        rewards_S=torch.tensor(rewards, dtype=torch.float32),
        group_S=torch.tensor(groups),
        seq_N=torch.repeat_interleave(torch.arange(len(rewards)), torch.tensor(lengths)),
        **given,
    )


def assert_advantages(name, given_inputs, expected, **options):
    actual = compute_advantages(name, given_inputs, **options)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, torch.tensor(expected).float(), atol=1e-6, rtol=1e-6)


def test_grpo_divides_by_the_unbiased_std_of_the_group():
    # group 7: mean 2, std sqrt((1+0+1)/2) = 1; group 3: mean 5, std sqrt(2)
    case = inputs([1, 2, 3, 4, 6], [7, 7, 7, 3, 3], [2, 1, 1, 1, 1])
    root = 1 / (math.sqrt(2) + 1e-6)
    one = 1 / (1 + 1e-6)
    assert_advantages("grpo", case, [-one, -one, 0, one, -root, root])


def test_dr_grpo_subtracts_the_mean_only():
    case = inputs([1, 2, 3, 4, 6], [7, 7, 7, 3, 3], [2, 1, 1, 1, 1])
    assert_advantages("dr_grpo", case, [-1, -1, 0, 1, -1, 1])


def test_rloo_compares_with_the_mean_of_the_others():
    # 1 − (2+6)/2 = −3; 2 − (1+6)/2 = −1.5; 6 − 1.5 = 4.5
    assert_advantages("rloo", inputs([1, 2, 6], [0, 0, 0]), [-3, -1.5, 4.5])


def test_opo_weighs_the_baseline_by_length():
    # (3·1 + 1·5) / 4 = 2
    assert_advantages("opo", inputs([1, 5], [0, 0], [3, 1]), [-1, -1, -1, 3])


def test_maxrl_divides_by_the_mean():
    # mean 1/4
    expected = [0.75 / 0.250001] + [-0.25 / 0.250001] * 3
    assert_advantages("maxrl", inputs([1, 0, 0, 0], [0] * 4), expected)


def test_maxrl_refuses_negative_rewards():
    with pytest.raises(ConfigError, match=r"a reward is -0\.5") as caught:
        compute_advantages("maxrl", inputs([1, -0.5], [0, 0]))
    assert "grpo" in caught.value.hint


def test_remax_subtracts_the_greedy_episode():
    case = inputs([1, 0, 3], [0, 0, 1], [1, 2, 1], baseline_S=[0.5, 0.5, 4.0])
    assert_advantages("remax", case, [0.5, -0.5, -0.5, -1])
    with pytest.raises(ConfigError, match="no greedy baseline"):
        compute_advantages("remax", inputs([1], [0]))


def test_reinforce_pp_whitens_the_discounted_reward_to_go():
    # returns: 1/2 then 1 in the first sequence, 3 in the second; mean 1.5, unbiased variance 1.75
    case = inputs([1, 3], [0, 0], [2, 1], gamma=0.5)
    scale = 1 / math.sqrt(1.75 + 1e-8)
    assert_advantages("reinforce_pp", case, [-scale, -0.5 * scale, 1.5 * scale])


def test_reinforce_pp_uses_rewards_where_they_lie():
    # returns with γ = 1: 3, 1, 1 | 0
    case = inputs([3, 0], [0, 0], [3, 1], token_rewards_N=[2.0, 0.0, 1.0, 0.0])
    returns = torch.tensor([3.0, 1.0, 1.0, 0.0])
    expected = (returns - returns.mean()) / (returns.var() + 1e-8).sqrt()
    assert_advantages("reinforce_pp", case, expected.tolist())


def test_reinforce_pp_baseline_whitens_over_tokens():
    # centred −1 (three tokens) and 1 (one): mean −1/2, unbiased variance 1
    expected = [-0.5, -0.5, -0.5, 1.5]
    assert_advantages("reinforce_pp_baseline", inputs([0, 2], [0, 0], [3, 1]), expected)


def test_grpo_per_turn_compares_equal_turns_of_a_group():
    # returns (γ = 1/2): first episode 1 + 1, 2; second 3 + 2, 4. Means 3.5 and 3.
    case = inputs(
        [3, 7],
        [0, 0],
        [3, 2],
        turn_N=[0, 0, 1, 0, 1],
        token_rewards_N=[0.0, 1.0, 2.0, 3.0, 4.0],
        gamma=0.5,
    )
    first = 1.5 / (math.sqrt(4.5) + 1e-6)
    second = 1 / (math.sqrt(2) + 1e-6)
    assert_advantages("grpo_per_turn", case, [-first, -first, -second, first, second])


def test_a_turn_that_no_other_episode_reached_gets_nothing():
    case = inputs(
        [1, 3], [0, 0], [2, 1], turn_N=[0, 1, 0], token_rewards_N=[0.0, 1.0, 3.0], gamma=1.0
    )
    first = 1 / (math.sqrt(2) + 1e-6)
    assert_advantages("grpo_per_turn", case, [-first, 0, first])


def test_eight_equal_episodes_of_several_turns_get_exactly_nothing():
    rewards = [-0.3 * 3] * 8
    case = inputs(
        rewards,
        [0] * 8,
        [3] * 8,
        turn_N=[0, 1, 2] * 8,
        token_rewards_N=[-0.1, -0.3, -0.5] * 8,
        gamma=0.95,
    )
    assert torch.equal(compute_advantages("grpo_per_turn", case), torch.zeros(24))


def test_grpo_per_step_compares_each_turn_with_the_first_returns_of_its_group():
    # returns of the turns: 3 and 2; 1; 5: first ones 3, 1 and 5
    turns: dict[str, Any] = {"turn_N": [0, 1, 0, 0], "token_rewards_N": [1.0, 2.0, 1.0, 5.0]}
    case = inputs([3, 1, 5], [0, 0, 0], [2, 1, 1], **turns)
    assert_advantages("grpo_per_step", case, [0, -0.5, -1, 1])
    halved = inputs([3, 1, 5], [0, 0, 0], [2, 1, 1], **turns, gamma=0.5)  # first ones 2, 1 and 5
    mean, std = 8 / 3, statistics.stdev([2, 1, 5])
    assert_advantages("grpo_per_step", halved, [(one - mean) / std for one in (2, 2, 1, 5)])


def test_grpo_per_step_of_equal_first_returns_is_nothing_and_of_one_episode_its_returns():
    turns: dict[str, Any] = {"turn_N": [0, 1, 0], "token_rewards_N": [1.0, 2.0, 3.0]}
    assert_advantages("grpo_per_step", inputs([3, 3], [0, 0], [2, 1], **turns), [0, 0, 0])
    alone = inputs([3], [0], [2], turn_N=[0, 1], token_rewards_N=[1.0, 2.0])
    assert_advantages("grpo_per_step", alone, [3, 2])


def test_grpo_divides_by_the_std_of_the_batch_where_asked():
    case = inputs([1, 3, 0, 0, 4, 8], [0, 0, 1, 1, 2, 2])
    std = statistics.stdev([1, 3, 0, 0, 4, 8])
    expected = [value / std for value in (-1, 1, 0, 0, -2, 2)]
    assert_advantages("grpo", case, expected, std="batch")


def test_gpg_makes_up_for_episodes_without_a_reward():
    # half of the rewards are not 0: α = 2
    assert_advantages("gpg", inputs([0, 1, 0, 1], [0, 0, 1, 1]), [-1, 1, -1, 1])
    assert_advantages("gpg", inputs([0, 0], [0, 0]), [0, 0])


def test_an_episode_of_several_sequences_counts_once_in_the_batch():
    once = inputs([0, 2, 0, 2], [0, 0, 1, 1])
    rows = inputs([0, 2, 2, 2, 0, 2], [0, 0, 0, 0, 1, 1], owner_S=[0, 1, 1, 1, 2, 3])
    for name, options in (("gpg", {}), ("grpo", {"std": "batch"})):
        expected = compute_advantages(name, once, **options)
        assert torch.equal(compute_advantages(name, rows, **options)[[0, 1, 4, 5]], expected)


def test_passk_rewards_the_lead_of_the_best_alone():
    std = statistics.stdev([1, 4, 2]) + 1e-6
    case = inputs([1, 4, 2, 3, 3, 5], [0, 0, 0, 1, 1, 2])
    assert_advantages("passk", case, [0, 2 / std, 0, 0, 0, 0])
    rows = inputs([1, 4, 4, 2], [0, 0, 0, 0], owner_S=[0, 1, 1, 2])  # two rows of one episode
    assert_advantages("passk", rows, [0, 2 / std, 2 / std, 0])


def test_grpo_per_turn_needs_turns():
    with pytest.raises(ConfigError, match="no turns"):
        compute_advantages("grpo_per_turn", inputs([1], [0]))


def test_gigpo_adds_what_a_turn_is_worth_at_its_observation():
    # Group 0: episodes return 3 and 1. Returns by turn (γ = 1/2): 1 + 1, 2 | 0 + 1/2, 1.
    # The first turns answer state 5, 2 against 1/2; the second ones answer states of their own.
    # Group 1 answers state 5, too, and is not pooled with group 0: its returns 0 and 4.
    case = inputs(
        [3, 1, 0, 4],
        [0, 0, 1, 1],
        [3, 2, 1, 1],
        turn_N=[0, 0, 1, 0, 1, 0, 0],
        token_rewards_N=[0.0, 1.0, 2.0, 0.0, 1.0, 0.0, 4.0],
        state_N=[5, 5, 6, 5, 7, 5, 5],
        gamma=0.5,
    )
    episode = 1 / (math.sqrt(2) + 1e-6)
    step = 0.75 / (math.sqrt(1.125) + 1e-6)
    last = 2 / (math.sqrt(8) + 1e-6)
    first = episode + 3 * step
    expected = [first, first, episode, -first, -episode, -4 * last, 4 * last]
    assert_advantages("gigpo", case, expected, step_weight=3.0)


def test_gdpo_normalises_each_component_by_itself():
    # Two groups of two; one component varies by 1, the other by 100 and in the first group alone.
    components = torch.tensor([[1.0, 0.0], [0.0, 100.0], [1.0, 7.0], [0.0, 7.0]])
    case = inputs([1, 100, 8, 7], [0, 0, 1, 1], components_SC=components)
    one = 0.5 / (math.sqrt(0.5) + 1e-6)
    hundred = 50 / (math.sqrt(5000) + 1e-6)
    total = torch.tensor([one - 2 * hundred, -one + 2 * hundred, one, -one], dtype=torch.float64)
    expected = (total - total.mean()) / (total.std() + 1e-6)
    assert_advantages("gdpo", case, expected.tolist(), weights=[1.0, 2.0])


def test_gigpo_divides_by_nothing_where_f_norm_is_1():
    case = inputs(
        [3, 1],
        [0, 0],
        [2, 2],
        turn_N=[0, 1, 0, 1],
        token_rewards_N=[1.0, 2.0, 0.0, 1.0],
        state_N=[5, 6, 5, 6],
    )
    # of episodes ±1; of first turns 3 and 1: ±1; of second turns 2 and 1: ±1/2
    expected = [1 + 2 * 1, 1 + 2 * 0.5, -1 - 2 * 1, -1 - 2 * 0.5]
    assert_advantages("gigpo", case, expected, step_weight=2.0, std="none")
    assert_advantages("grpo", case, [1, 1, -1, -1], std="none")


def test_gae_has_a_lambda_that_grows_with_the_length():
    # α = 1/2: λ = 1 − 1/(2/2) = 0 of two tokens, 1 − 1/(4/2) = 1/2 of four. γ = 1, values 0.
    rewards, values = [0.0, 4.0, 0.0, 0.0, 0.0, 8.0], [0.0] * 6
    case = inputs([4, 8], [0, 0], [2, 4], token_rewards_N=rewards, values_N=values)
    plain = torch.tensor([0.0, 4.0, 1.0, 2.0, 4.0, 8.0])
    expected = (plain - plain.mean()) / (plain.var() + 1e-8).sqrt()
    assert_advantages("gae", case, expected.tolist(), by_length=0.5)


def test_gae_follows_the_tokens_and_is_whitened():
    # γ = 1/2, λ = 1/2. First sequence: δ = 0 + 1 − 1, 0 + 2 − 2, 4 − 4 = 0, 0, 0 but for the first
    # value; second: δ = 3 − 1.
    case = inputs(
        [4, 3],
        [0, 0],
        [3, 1],
        token_rewards_N=[0.0, 0.0, 4.0, 3.0],
        values_N=[3.0, 2.0, 4.0, 1.0],
        gamma=0.5,
    )
    plain = torch.tensor([-2.0, 0.0, 0.0, 2.0])
    expected = plain / (plain.var() + 1e-8).sqrt()
    assert_advantages("gae", case, expected.tolist(), gae_lambda=0.5)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "opo", "maxrl"])
def test_a_sequence_that_nothing_can_be_compared_with_gets_nothing(name):
    case = inputs([5, 1, 3], [0, 1, 1], lone_S=[True, False, False])
    advantages = compute_advantages(name, case)
    assert advantages[0] == 0
    assert torch.equal(advantages[1:], compute_advantages(name, inputs([1, 3], [1, 1])))


@pytest.mark.parametrize(
    ("name", "needs"), [("gigpo", "observations"), ("gae", "values"), ("gdpo", "components")]
)
def test_what_an_advantage_needs_is_named(name, needs):
    with pytest.raises(ConfigError, match=f"no {needs}"):
        compute_advantages(name, inputs([1], [0], turn_N=[0], components_SC=None))


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "opo", "maxrl", "grpo_per_turn"])
def test_a_group_of_one_has_no_baseline(name):
    case = inputs([0.5, 2.0], [4, 9], [2, 1], turn_N=[0, 0, 0])
    assert_advantages(name, case, [0.5, 0.5, 2.0])


@pytest.mark.parametrize("name", sorted(set(ADVANTAGES) - {"remax", "reinforce_pp_baseline"}))
@given(reward=st.floats(0, 1e3, width=32), size=st.integers(2, 9))
def test_equal_rewards_give_exactly_zero(name, reward, size):
    zeros = [0] * size
    case = inputs([reward] * size, zeros, turn_N=zeros, state_N=zeros, values_N=zeros)
    assert torch.equal(compute_advantages(name, case), torch.zeros(size))


@pytest.mark.parametrize("name", variants(OUTCOME, "grpo", "reinforce_pp_baseline"))
@given(data=st.data())
def test_the_order_of_sequences_and_the_names_of_groups_do_not_matter(name, data):
    size = data.draw(st.integers(2, 10))
    rewards = data.draw(st.lists(st.integers(0, 4), min_size=size, max_size=size))
    groups = data.draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
    order = data.draw(st.permutations(range(size)))
    before = compute_advantages(name, inputs(rewards, groups))
    after = compute_advantages(
        name,
        inputs([rewards[place] for place in order], [100 - 7 * groups[place] for place in order]),
    )
    torch.testing.assert_close(after, before[list(order)], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", sorted(set(ADVANTAGES) - {"remax"}))
def test_a_sequence_without_generated_tokens_is_counted_in_its_group(name):
    zeros = [0, 0, 0]
    case = inputs([0.0, 1, 1], zeros, [2, 0, 1], turn_N=zeros, state_N=zeros, values_N=zeros)
    advantages = compute_advantages(name, case)
    assert advantages.shape == (3,)
    assert torch.isfinite(advantages).all()


@pytest.mark.parametrize("name", sorted(set(ADVANTAGES) - {"remax"}))
def test_an_empty_batch_has_no_advantages(name):
    none = torch.zeros(0, dtype=torch.int64)
    case = AdvantageInputs(
        torch.zeros(0),
        none,
        none,
        turn_N=none,
        state_N=none,
        components_SC=torch.zeros(0, 1),
        values_N=torch.zeros(0),
    )
    assert compute_advantages(name, case).shape == (0,)


def test_an_unknown_advantage_names_the_closest():
    with pytest.raises(ConfigError, match="advantage=gpro") as caught:
        compute_advantages("gpro", inputs([1], [0]))
    assert caught.value.hint == "did you mean grpo?"


def test_the_overlong_penalty_grows_over_the_buffer():
    lengths = torch.tensor([10, 80, 85, 90, 100])
    expected = torch.tensor([0.0, 0.0, -0.5, -1.0, -2.0])
    torch.testing.assert_close(overlong_penalty(lengths, 100, 20, factor=2.0), expected)


def test_an_episode_that_a_limit_cut_gets_the_whole_overlong_penalty():
    lengths, cut = torch.tensor([50, 90, 30]), torch.tensor([False, False, True])
    penalties = overlong_penalty(lengths, 100, 20, factor=2.0, cut_E=cut)
    torch.testing.assert_close(penalties, torch.tensor([0.0, -1.0, -2.0]))


def test_an_overlong_buffer_over_the_longest_response_is_refused():
    with pytest.raises(ConfigError, match="overlong_buffer is 200"):
        overlong_penalty(torch.tensor([1]), 100, 200)


def test_short_episodes_are_rewarded_within_their_group():
    # group 0 from 10 to 30 tokens; of group 1 all are alike
    rewards = length_reward(
        torch.tensor([10, 20, 30, 30, 7, 7]),
        torch.tensor([0, 0, 0, 0, 1, 1]),
        torch.tensor([False, True, True, False, True, False]),
        coef=2.0,
    )
    torch.testing.assert_close(rewards, torch.tensor([0.0, 0.0, -1.0, -1.0, 0.0, 0.0]))
    solved = torch.tensor([True, True])
    shortest = length_reward(torch.tensor([10, 30]), torch.tensor([0, 0]), solved)
    torch.testing.assert_close(shortest, torch.tensor([0.5, -0.5]))
