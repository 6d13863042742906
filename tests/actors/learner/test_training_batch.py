"""A batch of groups becomes flat arrays; the table is computed by hand."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tinkermq.actors.training.advantages import AdvantageInputs, compute_advantages
from tinkermq.actors.training.batch import assemble, components_of, select
from tinkermq.schemas.rollout import Group
from tinkermq.schemas.task import Task
from tinkermq.schemas.wire.errors import DataError

from tests.support.groups import make_group, make_trajectory, random_group


def _two_groups():
    long = make_trajectory(
        [1, 2, 3],
        [([4, 5], [6, 7]), ([8], [])],
        [0.5, 2.0],
        logprobs=[-0.1, -0.2, -0.3],
        versions=[4, 4, 5],
    )
    short = make_trajectory([1, 2, 3], [([9], [])], [1.0], logprobs=[-0.4], versions=5)
    other = make_trajectory([1], [([2], [3]), ([4], [])], [0.0, -1.0], logprobs=[-0.5, -0.6])
    greedy = make_trajectory([1], [([7], [])], [0.75], greedy=True)
    return [make_group([long, short]), make_group([other, greedy], 1)]


def test_every_generated_token_knows_its_episode_turn_reward_and_version() -> None:
    batch = assemble(_two_groups())
    assert batch.num_seqs == 3
    assert batch.num_tokens == 6
    assert batch.seq_N.tolist() == [0, 0, 0, 1, 2, 2]
    assert batch.turn_N.tolist() == [0, 0, 1, 0, 0, 1]
    assert batch.token_rewards_N.tolist() == [0.0, 0.5, 2.0, 1.0, 0.0, -1.0]
    assert batch.behaviour_N.tolist() == pytest.approx([-0.1, -0.2, -0.3, -0.4, -0.5, -0.6])
    assert batch.versions_N.tolist() == [4, 4, 5, 5, 0, 0]
    assert batch.rewards_S.tolist() == [2.5, 1.0, -1.0]
    assert batch.group_S.tolist() == [0, 0, 1]
    assert [item.token_ids.tolist() for item in batch.sequences] == [
        [1, 2, 3, 4, 5, 6, 7, 8],
        [1, 2, 3, 9],
        [1, 2, 3, 4],
    ]


def test_the_greedy_episode_is_a_baseline_only_if_every_group_has_one() -> None:
    groups = _two_groups()
    assert assemble(groups).baseline_E is None
    baseline_S = assemble([groups[1], groups[1]]).baseline_E
    assert baseline_S is not None
    assert baseline_S.tolist() == [0.75, 0.75]


@pytest.mark.parametrize("told", [None, "1", float("nan"), float("inf"), -1e39])
def test_a_component_of_the_reward_is_a_number_that_can_be_trained(told: object) -> None:
    rows = [make_trajectory([1], [([2], [])], [1.0], info={"correct": told, "other": True})]
    with pytest.raises(DataError, match=r"reward_components\.correct: the game's `info` has"):
        components_of(rows, ["other", "correct"])
    assert components_of(rows, ["other"]) == [1.0]


def test_types_are_those_that_the_losses_expect() -> None:
    batch = assemble(_two_groups())
    for name in ("seq_N", "turn_N", "versions_N", "group_S"):
        assert getattr(batch, name).dtype == torch.int64, name
    for name in ("token_rewards_N", "behaviour_N", "rewards_S"):
        assert getattr(batch, name).dtype == torch.float32, name


def test_a_selection_says_where_its_tokens_stand() -> None:
    batch = assemble(_two_groups())
    sequences, index_N = select(batch, torch.tensor([True, False, True]))
    assert [len(item.mask) for item in sequences] == [8, 4]
    assert index_N.tolist() == [0, 1, 2, 4, 5]
    assert select(batch, torch.zeros(3, dtype=torch.bool))[0] == []


@given(st.integers(0, 10_000), st.integers(1, 4), st.booleans())
def test_it_is_what_a_loop_over_episodes_gives(seed: int, num: int, greedy: bool) -> None:
    rng = np.random.default_rng(seed)
    groups = [random_group(rng, n, size=3, turns=4, greedy=greedy) for n in range(num)]
    batch = assemble(groups)
    at = 0
    for seq, item in enumerate(episode for group in groups for episode in group.sampled):
        turn = 0
        for place in np.flatnonzero(item.mask):
            assert int(batch.seq_N[at]) == seq
            assert int(batch.turn_N[at]) == turn
            assert float(batch.behaviour_N[at]) == item.logprobs[place]
            assert int(batch.versions_N[at]) == item.versions[place]
            ends = place in item.turn_ends
            assert float(batch.token_rewards_N[at]) == (item.rewards[turn] if ends else 0.0)
            turn += bool(ends)
            at += 1
    assert at == batch.num_tokens


def test_roles_of_a_task_are_compared_within_themselves() -> None:
    returns = {"x": [1.0, -1.0, 1.0], "o": [-1.0, 1.0]}  # one game ended before o's first turn
    members = [
        make_trajectory([1], [([2], [])], [reward], role=role)
        for role, rewards in returns.items()
        for reward in rewards
    ]
    task = Task(task=0, seed=0, group_size=3)
    batch = assemble([Group(task=task, trajectories=members, source="test")])
    assert batch.group_S.tolist() == [0, 0, 0, 1, 1]
    inputs = AdvantageInputs(batch.rewards_S, batch.group_S, batch.seq_N)
    assert compute_advantages("dr_grpo", inputs).tolist() == pytest.approx(
        [2 / 3, -4 / 3, 2 / 3, -1.0, 1.0]
    )


@pytest.mark.parametrize(
    ("returns", "equal"),
    [
        ({"x": [1.0, 1.0], "o": [-1.0, -1.0]}, True),
        ({"x": [1.0, -1.0], "o": [-1.0, -1.0]}, False),
        ({"": [0.5, 0.5]}, True),
        ({"": [0.5, 0.0]}, False),
    ],
)
def test_equal_rewards_are_those_of_each_role(returns: dict[str, list[float]], equal: bool) -> None:
    members = [
        make_trajectory([1], [([2], [])], [reward], role=role)
        for role, rewards in returns.items()
        for reward in rewards
    ]
    group = Group(task=Task(task=0, seed=0, group_size=2), trajectories=members, source="test")
    assert group.has_equal_rewards is equal


@pytest.mark.parametrize(
    ("roles", "problem"),
    [
        (["x", "x", "x", "o"], "has 2 episodes, this has 3 of role x"),
        (["", ""], None),
        ([""], "has 2 episodes, this has 1"),
        (["x", "o", "x"], None),
        (["x"], None),
    ],
)
def test_a_role_may_have_fewer_conversations_than_episodes_and_never_more(
    roles: list[str], problem: str | None
) -> None:
    members = [make_trajectory([1], [([2], [])], [0.0], role=role) for role in roles]
    task = Task(task=0, seed=0, group_size=2)
    if problem is None:
        assert Group(task=task, trajectories=members, source="test").sampled == members
        return
    with pytest.raises(ValueError, match=problem):
        Group(task=task, trajectories=members, source="test")
