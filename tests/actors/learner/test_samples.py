"""Turns as samples: their numbers, their peers, their rewards; and the observations they answer."""

import pytest
import torch
from tinkermq.actors.training import batch as samples
from tinkermq.actors.training.advantages import Values
from tinkermq.actors.training.batch import TrainingBatch, assemble
from tinkermq.actors.training.credit import assign_credit
from tinkermq.schemas.config.job import JobConfig

from tests.support.groups import make_group, make_trajectory


@pytest.fixture
def batch() -> TrainingBatch:
    """Two groups: episodes of two, one and two turns; one episode alone."""
    first = [
        make_trajectory([1, 2], [([11, 12], [20, 21]), ([13], [])], [1.0, 2.0]),
        make_trajectory([1, 2], [([14], [])], [5.0]),
        make_trajectory([1, 2], [([15], [20, 21]), ([16, 17], [])], [0.0, 4.0]),
    ]
    alone = make_trajectory([1, 2], [([18], [20, 21]), ([19], [])], [3.0, 8.0])
    return assemble([make_group(first), make_group([alone], 1)])


def _config(**algorithm: object) -> JobConfig:
    return JobConfig.model_validate(
        {"model": {"path": "x"}, "env": {"game": "x"}, "algorithm": algorithm}
    )


def test_each_turn_is_a_sample_and_its_peers_are_the_same_turns_of_its_group(
    batch: TrainingBatch,
) -> None:
    by_turn = samples.turns(batch)
    assert by_turn.num == 7
    assert by_turn.sample_N.tolist() == [0, 0, 1, 2, 3, 4, 4, 5, 6]
    assert by_turn.group_M.tolist() == [0, 1, 0, 0, 1, 2, 3]
    assert by_turn.lone_M is not None
    assert not by_turn.lone_M.any()  # a group of one episode has no peers anywhere


def test_a_turn_that_one_episode_alone_reached_is_lone() -> None:
    long = make_trajectory([1, 2], [([11], [20]), ([12], [])], [0.0, 1.0])
    short = make_trajectory([1, 2], [([13], [])], [3.0])
    batch = assemble([make_group([long, short])])
    lone = samples.turns(batch).lone_M
    assert lone is not None
    assert lone.tolist() == [False, True, False]
    advantages = assign_credit(
        _config(sample="turn", advantage="dr_grpo"), batch, None, None, None
    ).advantages_N
    assert advantages.tolist() == [-1.0, 0.0, 1.0]


def test_returns_by_turn_are_discounted_and_lie_on_each_turns_last_token(
    batch: TrainingBatch,
) -> None:
    returns = samples.returns_by_turn(batch, batch.token_rewards_N, 0.5)
    assert returns.tolist() == [0, 2, 2, 5, 2, 0, 4, 7, 8]


@pytest.mark.parametrize(
    ("turn_reward", "expected"),
    [
        # first turns 1, 5, 0: mean 2; second turns 2, 4: mean 3; the lone episode: its rewards
        ("reward", [-1, -1, -1, 3, -2, 1, 1, 3, 8]),
        # returns with γ = 1/2: first turns 2, 5, 2: mean 3
        ("return", [-1, -1, -1, 2, -1, 1, 1, 7, 8]),
    ],
)
def test_a_turn_earns_its_reward_or_its_return(
    batch: TrainingBatch, turn_reward: str, expected: list[float]
) -> None:
    gamma = {"gamma": 0.5} if turn_reward == "return" else {}
    config = _config(sample="turn", turn_reward=turn_reward, advantage="dr_grpo", **gamma)
    credit = assign_credit(config, batch, None, None, None)
    assert credit.advantages_N.tolist() == expected
    assert credit.rewards_E.tolist() == [3, 5, 4, 11]  # of episodes, whatever the samples are


def test_grpo_over_turns_with_returns_is_grpo_per_turn(batch: TrainingBatch) -> None:
    over_turns = _config(sample="turn", advantage="grpo", gamma=0.5)
    per_turn = _config(advantage="grpo_per_turn", gamma=0.5)
    one, other = (assign_credit(c, batch, None, None, None) for c in (over_turns, per_turn))
    torch.testing.assert_close(one.advantages_N, other.advantages_N)


@pytest.mark.parametrize("advantage", ["reinforce_pp", "gae"])
def test_turns_that_earn_their_returns_are_discounted_from_turn_to_turn_and_not_by_token(
    advantage: str,
) -> None:
    # Turns of 2 and 3 tokens that earn 1 and 4: with γ = 1/2 the first returns 1 + 4/2 = 3.
    episode = make_trajectory([1, 2], [([11, 12], [20]), ([13, 14, 15], [])], [1.0, 4.0])
    batch = assemble([make_group([episode])])
    config = _config(sample="turn", advantage=advantage, gamma=0.5)
    values = Values(torch.zeros(5)) if advantage == "gae" else None
    credit = assign_credit(config, batch, None, None, values)
    returns = torch.tensor([3.0, 3.0, 4.0, 4.0, 4.0])
    torch.testing.assert_close(credit.advantages_N, (returns - returns.mean()) / returns.std())
    if credit.targets is not None:
        assert credit.targets.returns_N.tolist() == returns.tolist()


def test_turns_that_earn_their_own_rewards_are_discounted_by_token() -> None:
    episode = make_trajectory([1, 2], [([11, 12], [20]), ([13, 14, 15], [])], [1.0, 4.0])
    batch = assemble([make_group([episode])])
    config = _config(sample="turn", turn_reward="reward", advantage="reinforce_pp", gamma=0.5)
    returns = torch.tensor([0.5, 1.0, 1.0, 2.0, 4.0])
    found = assign_credit(config, batch, None, None, None).advantages_N
    torch.testing.assert_close(found, (returns - returns.mean()) / returns.std())


def test_turns_that_answer_the_same_tokens_answer_the_same_observation() -> None:
    episodes = [
        make_trajectory([1, 2], [([11, 12], [20, 21]), ([13], [22]), ([14], [])], [0.0] * 3),
        make_trajectory([1, 2], [([15], [20, 21]), ([16, 17], [])], [0.0] * 2),
    ]
    states = samples.answered_states(assemble([make_group(episodes)]))
    prompt, first, second = 0, 1, 2
    assert states.tolist() == [prompt, prompt, first, second, prompt, first, first]


def test_episodes_that_the_token_limit_cut_off_get_nothing() -> None:
    cut = make_trajectory([1, 2], [([11], [])], [0.0], finish="length")
    whole = make_trajectory([1, 2], [([12], [])], [1.0])
    batch = assemble([make_group([cut, whole])])
    config = _config(advantage="dr_grpo", overlong_filter=True)
    assert assign_credit(config, batch, None, None, None).advantages_N.tolist() == [0.0, 0.5]


@pytest.mark.parametrize("algorithm", [{}, {"sample": "turn"}, {"advantage": "grpo_per_step"}])
def test_equal_rewards_in_another_order_are_equal_returns(algorithm: dict[str, object]) -> None:
    rewards = [0.1, -0.7, 0.9, 0.3, -0.2, 0.6, 0.8]
    orders = [[rewards[(first + 3 * place) % 7] for place in range(7)] for first in range(7)]
    turns: list[tuple[list[int], list[int]]] = [([11], [20]) for _ in range(7)]
    group = make_group([make_trajectory([1, 2], turns, order) for order in orders])
    assert group.has_equal_rewards
    batch = assemble([group])
    assert len(set(batch.rewards_S.tolist())) == 1
    advantages_N = assign_credit(_config(**algorithm), batch, None, None, None).advantages_N
    assert advantages_N[::7].tolist() == [0.0] * 7
