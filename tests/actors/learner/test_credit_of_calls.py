"""What calls and branches of agents' episodes are credited with, by hand and in any rows."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tinkermq.actors.training.advantages import Values
from tinkermq.actors.training.batch import TrainingBatch, assemble
from tinkermq.actors.training.credit import assign_credit
from tinkermq.actors.training.model import load_model
from tinkermq.actors.training.step import Trainer
from tinkermq.schemas.agent import CallPlaces, RewardedBranch
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.rollout import Group, Trajectory

from tests.support.groups import make_group
from tests.support.models import gradients_of, make_tiny_model

torch.set_num_threads(1)


@dataclass
class Call:
    """One call of an episode: what was new, what was generated, and where it stands."""

    number: int
    given: list[int]
    said: list[int]
    path: list[int] = field(default_factory=list)
    """Numbers of the calls before it."""
    to: int = -1
    reward: float = 0.0
    role: str = "main"
    branch: int = -1


@dataclass
class Episode:
    """An episode's calls, what it earned itself, and what its branches did."""

    calls: list[Call]
    outcome: float
    branches: dict[int, float] = field(default_factory=dict)


def row(episode: Episode, number: int, trained: Sequence[int], *, is_main: bool) -> Trajectory:
    """Return the row to the last of the trained calls, all of which are on one path."""
    by_number = {call.number: call for call in episode.calls}
    taken = [by_number[one] for one in trained]
    ids: list[int] = []
    mask: list[int] = []
    ends: list[int] = []
    for one in [*taken[-1].path, trained[-1]]:
        call = by_number[one]
        ids += [*call.given, *call.said]
        mask += [0] * len(call.given) + [int(one in trained)] * len(call.said)
        if one in trained:
            ends.append(len(ids) - 1)
    rewards = np.array([call.reward for call in taken], np.float32)
    places = CallPlaces(
        numbers=np.array(trained, np.int32),
        nexts=np.array([call.to for call in taken], np.int32),
        depths=np.array([len(call.path) for call in taken], np.int32),
        observed=np.array([len(call.given) for call in taken], np.int32),
        rewards=rewards,
        branches=np.array([call.branch for call in taken], np.int32),
        roles=[call.role for call in taken],
        outcome=episode.outcome if is_main else 0.0,
        rewarded=[
            RewardedBranch(call=begun, role=by_number[begun].role, reward=reward)
            for begun, reward in episode.branches.items()
        ]
        if is_main
        else [],
    )
    flags = np.array(mask, np.uint8)
    return Trajectory(
        token_ids=np.array(ids, np.int32),
        mask=flags,
        logprobs=np.where(flags, -1.0, 0.0).astype(np.float32),
        versions=np.where(flags, 0, -1).astype(np.int32),
        turn_ends=np.array(ends, np.int32),
        rewards=rewards + np.float32(places.outcome) * (np.arange(len(ends)) == len(ends) - 1),
        episode=number,
        kind="main" if is_main else "edited",
        calls=places,
    )


def group_of(episodes: Sequence[Episode], *, split: bool, task: int = 0) -> Group:
    """Return a task's group; with `split`, each call stands in a row of its own."""
    rows: list[Trajectory] = []
    for number, episode in enumerate(episodes):
        last = [call.number for call in episode.calls if call.to < 0][-1]
        main = next(call for call in episode.calls if call.number == last)
        whole = [[*main.path, last]]
        others = [call for call in episode.calls if call.number not in whole[0]]
        leaves = [call for call in others if all(call.number not in one.path for one in others)]
        covered = set(whole[0])
        for leaf in leaves:
            whole.append([one for one in [*leaf.path, leaf.number] if one not in covered])
            covered.update(whole[-1])
        parts = [[last], *([n] for n in sorted(covered - {last}))] if split else whole
        rows += [row(episode, number, part, is_main=not at) for at, part in enumerate(parts)]
    return make_group(rows, task)


def random_episode(rng: np.random.Generator) -> Episode:
    """Return a conversation with answers thrown away, and sub-agents whose answers it reads."""

    def some(most: int) -> list[int]:
        return rng.integers(1, 200, rng.integers(1, most)).tolist()

    calls: list[Call] = []
    path: list[int] = []
    for turn in range(rng.integers(2, 4)):
        if turn and rng.random() < 0.7:
            asked = len(calls)
            for _ in range(rng.integers(1, 3)):
                branch = asked if rng.random() < 0.8 else -1
                calls.append(Call(len(calls), some(4), some(4), role="helper", branch=branch))
                calls[-1].path = list(range(asked, len(calls) - 1))
        if turn and rng.random() < 0.5:
            calls.append(Call(len(calls), some(3), some(4), list(path)))
        calls.append(Call(len(calls), some(4), some(5), list(path)))
        path.append(len(calls) - 1)
    last = len(calls) - 1
    for call in calls:
        later = [one for one in calls if one.path and one.path[-1] == call.number]
        reader = next((n for n in [*path, last] if n > call.number), -1)
        on_path = [one.number for one in later if one.number in path]
        call.to = on_path[0] if on_path else later[0].number if later else reader
        if call.number == last:
            call.to = -1
        call.reward = float(rng.integers(0, 3)) / 2
    begun = {call.branch for call in calls} - {-1}
    return Episode(calls, float(rng.normal()), {one: float(rng.normal()) for one in sorted(begun)})


def random_groups(*, split: bool) -> list[Group]:
    rng = np.random.default_rng(5)
    tasks = [[random_episode(rng) for _ in range(3)] for _ in range(3)]
    return [group_of(episodes, split=split, task=task) for task, episodes in enumerate(tasks)]


def config_of(**algorithm: Any) -> JobConfig:
    return JobConfig.model_validate(
        {
            "model": {"path": "m"},
            "agent": {"command": ["run.sh"]},
            "algorithm": algorithm,
            "learner": {"lr": 0.1, "eps": 1.0, "microbatch_tokens": 64, "max_row_tokens": 64},
            "rollout": {"max_prompt_tokens": 32, "max_turn_tokens": 8, "max_response_tokens": 32},
        }
    )


def values_of(batch: TrainingBatch) -> torch.Tensor:
    """Return values that depend on what stands before each token, as a critic's do."""
    values: list[float] = []
    for sequence in batch.sequences:
        for at in np.flatnonzero(sequence.mask):
            seen = sequence.token_ids[: at + 1]
            values.append(float(np.sin(seen * np.arange(1, len(seen) + 1)).sum()))
    return torch.tensor(values, dtype=torch.float32)


def advantages_by_token(config: JobConfig, groups: list[Group]) -> dict[Any, tuple[float, float]]:
    """Return advantage and value target of each token, by what stands before it."""
    batch = assemble(groups)
    values = Values(values_of(batch)) if config.algorithm.advantage == "gae" else None
    credit = assign_credit(config, batch, None, None, values)
    targets = credit.targets.returns_N if credit.targets is not None else credit.advantages_N
    found: dict[Any, tuple[float, float]] = {}
    places = [
        (int(batch.group_S[row]), int(batch.episode_S[row]), sequence.token_ids[: at + 1].tobytes())
        for row, sequence in enumerate(batch.sequences)
        for at in np.flatnonzero(sequence.mask)
    ]
    both = zip(credit.advantages_N.tolist(), targets.tolist(), strict=True)
    for place, pair in zip(places, both, strict=True):
        assert place not in found
        found[place] = pair
    return found


OF_EPISODES = ("grpo", "rloo", "opo", "dr_grpo", "reinforce_pp_baseline")
BY_CALL = ("grpo_per_turn", "reinforce_pp", "gigpo")
MODES = [
    *((advantage, mode) for advantage in OF_EPISODES for mode in ("own", "both")),
    *((advantage, mode) for advantage in BY_CALL for mode in ("episode", "own", "both")),
    ("gae", "episode"),
    ("gae", "own"),
]


@pytest.mark.parametrize(("advantage", "mode"), MODES)
def test_a_token_is_credited_alike_in_whatever_rows_its_episode_stands(
    advantage: str, mode: str
) -> None:
    discounted = {} if advantage in OF_EPISODES else {"gamma": 0.9}
    config = config_of(advantage=advantage, branch_credit=mode, **discounted)
    whole, split = (
        advantages_by_token(config, random_groups(split=split)) for split in (False, True)
    )
    assert len({advantage for advantage, _ in whole.values()}) > 6
    assert whole.keys() == split.keys()
    for place, pair in whole.items():
        assert split[place] == pytest.approx(pair, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("advantage", [*OF_EPISODES, "grpo_per_turn", "reinforce_pp"])
def test_calls_that_know_nothing_of_each_other_have_the_reward_of_their_episode(
    advantage: str,
) -> None:
    """The second has no reader and is none: it ends a chain of its own, with the whole reward."""

    def episode(number: int, outcome: float) -> Episode:
        calls = [Call(n, [n + 1], [10 * number + n + 2, 3]) for n in range(3)]
        return Episode(calls, outcome)

    group = group_of([episode(1, 1.0), episode(2, 0.0), episode(3, 0.0)], split=False)
    credited = advantages_by_token(config_of(advantage=advantage), [group])
    by_episode: dict[int, list[float]] = {}
    for (_, number, _), (worth, _) in credited.items():
        by_episode.setdefault(number, []).append(round(worth, 4))
    assert all(len(worths) == 6 and len(set(worths)) == 1 for worths in by_episode.values())
    assert by_episode[0][0] > 0 > by_episode[1][0] == by_episode[2][0]


@pytest.mark.parametrize(
    ("advantage", "mode", "loss_agg"),
    [
        ("grpo_per_turn", "episode", "seq-mean-token-mean"),
        ("rloo", "both", "seq-mean-token-sum"),
        ("reinforce_pp", "own", "token-mean"),
    ],
)
def test_a_step_is_the_same_with_each_call_of_a_tree_in_a_row_of_its_own(
    tmp_path: Path, advantage: str, mode: str, loss_agg: str
) -> None:
    config = config_of(
        advantage=advantage, branch_credit=mode, loss_agg=loss_agg, loss="cispo"
    ).model_copy(deep=True)
    config.model.path = str(make_tiny_model(tmp_path))
    gradients: list[torch.Tensor] = []
    for split in (False, True):
        model = load_model(config.model, config.learner)
        Trainer(model, config, total_steps=10).step(assemble(random_groups(split=split)), 1)
        gradients.append(gradients_of(model))
    assert gradients[0].abs().max() > 0
    assert torch.allclose(*gradients, rtol=1e-4, atol=1e-7)


def two_episodes() -> list[Episode]:
    """Return episodes of two calls and a sub-agent of one, whose answer the second call reads."""
    return [
        Episode(
            [
                Call(0, [1], [2, 3], to=2, reward=0.5),
                Call(1, [4], [5], to=2, role="helper", branch=1),
                Call(2, [6], [7], [0]),
            ],
            outcome=1.0,
            branches={1: helped},
        )
        for helped in (0.0,)
    ] + [
        Episode(
            [
                Call(0, [1], [9, 3], to=2),
                Call(1, [4], [8], to=2, role="helper", branch=1),
                Call(2, [6], [7], [0]),
            ],
            outcome=0.0,
            branches={1: 4.0},
        )
    ]


HALF = 0.5**0.5
"""What two episodes are apart from their mean, in standard deviations."""


@pytest.mark.parametrize(
    ("algorithm", "first", "second"),
    [
        # Order of the tokens: call 0 (two), call 2, call 1.
        ({"advantage": "dr_grpo"}, [0.75] * 4, [-0.75] * 4),
        (
            {"advantage": "dr_grpo", "branch_credit": "own"},
            [0.75, 0.75, 0.75, -2.0],
            [-0.75, -0.75, -0.75, 2.0],
        ),
        (
            {"advantage": "dr_grpo", "branch_credit": "both"},
            [0.75, 0.75, 0.75, -1.25],
            [-0.75, -0.75, -0.75, 1.25],
        ),
        ({"advantage": "grpo_per_turn"}, [HALF] * 4, [-HALF] * 4),
        (
            {"advantage": "grpo_per_turn", "branch_credit": "own"},
            [HALF, HALF, HALF, -HALF],
            [-HALF, -HALF, -HALF, HALF],
        ),
        ({"advantage": "rloo", "branch_credit": "own"}, [1.5] * 3 + [-4], [-1.5] * 3 + [4]),
    ],
)
def test_a_branch_is_credited_as_the_configuration_says(
    algorithm: dict[str, Any], first: list[float], second: list[float]
) -> None:
    batch = assemble([group_of(two_episodes(), split=False)])
    found = assign_credit(config_of(**algorithm), batch, None, None, None).advantages_N
    assert found.tolist() == pytest.approx([*first, *second], rel=1e-5)


@pytest.mark.parametrize(
    ("mode", "first"),
    [("own", [0.75, 0.75, 0.75, -2.25]), ("both", [0.5, 0.5, 0.5, -1.75])],
)
def test_the_kl_of_a_branchs_tokens_is_taken_off_its_reward(mode: str, first: list[float]) -> None:
    batch = assemble([group_of(two_episodes(), split=False)])
    old_N = batch.behaviour_N
    reference_N = old_N - torch.tensor([0, 0, 0, 1.0, 0, 0, 0, 0])  # of the first one's branch
    algorithm = {"advantage": "dr_grpo", "branch_credit": mode, "kl_coef": 0.5, "kl_in": "reward"}
    config = config_of(**algorithm, kl_estimator="k1")
    found = assign_credit(config, batch, old_N, reference_N, None).advantages_N.tolist()
    assert found == pytest.approx([*first, *(-one for one in first)], rel=1e-5)


def test_what_later_calls_earn_is_discounted_along_the_chain_of_calls() -> None:
    batch = assemble([group_of(two_episodes(), split=True)])
    assert batch.calls is not None
    posted = batch.calls.token_rewards(torch.zeros(batch.num_tokens))
    # In rows of their own: call 2 first, then 0 and 1.
    assert batch.calls.returns_by_call(posted, 0.5).tolist() == [1.0, 1.0, 0.5, 0.0, 0.0, 0.0]
    assert batch.calls.to_go(posted, 0.5).tolist() == [1, 0.5, 1.0, 0.5, 0, 0, 0, 0]
    own = batch.calls.own_chains()
    posted = own.token_rewards(torch.zeros(batch.num_tokens))
    assert own.returns_by_call(posted, 0.5).tolist() == [1.0, 1.0, 0.0, 0.0, 0.0, 4.0]


def test_branches_of_one_episode_weigh_together_as_one() -> None:
    """Baseline of the role: the mean of the episodes' means, here (1 + 5) / 2."""
    many = Episode(
        [
            *(Call(n, [1], [2 + n], to=3, role="helper", branch=n) for n in range(3)),
            Call(3, [6], [7]),
        ],
        outcome=0.0,
        branches={0: 0.0, 1: 1.0, 2: 2.0},
    )
    one = Episode(
        [Call(0, [1], [2], to=1, role="helper", branch=0), Call(1, [6], [7])], 0.0, {0: 5.0}
    )
    batch = assemble([group_of([many, one], split=False)])
    config = config_of(advantage="dr_grpo", branch_credit="own")
    found = assign_credit(config, batch, None, None, None).advantages_N.tolist()
    assert found == pytest.approx([0, -3, -2, -1, 0, 2])
    alone = assemble([group_of([many, Episode([Call(0, [6], [7])], 0.0)], split=False)])
    found = assign_credit(config, alone, None, None, None).advantages_N.tolist()
    assert found == pytest.approx([0, 0, 0, 0, 0]), "nobody else has such a branch"


def test_rows_that_do_not_name_their_calls_are_conversations_one_after_the_other() -> None:
    known = group_of(two_episodes(), split=False)
    plain = known.trajectories[-1].model_copy(update={"calls": None})
    batch = assemble([known.model_copy(update={"trajectories": [*known.trajectories[:-1], plain]})])
    assert batch.calls is not None
    assert batch.calls.next_K.tolist() == [1, -1, 1, 4, -1, -1]
    assert batch.calls.observed_K.tolist() == [1, 1, 1, 1, 1, 1]
