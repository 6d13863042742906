"""Episodes that a token limit ended are in no loss and in no denominator (`overlong_filter`).

They still count in the mean and std of their group, as in TRL's `mask_truncated_completions`.
"""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tinkermq.actors.training.advantages import ADVANTAGES, Values
from tinkermq.actors.training.batch import TrainingBatch, assemble
from tinkermq.actors.training.credit import Credit, assign_credit
from tinkermq.actors.training.model import load_model
from tinkermq.actors.training.off_policy import CorrectionInputs, correct
from tinkermq.actors.training.step import Trainer
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.rollout import Group, Trajectory
from torch import Tensor, nn

from tests.actors.learner.plain_step import (
    Episodes,
    grpo,
    m2po_kept,
    plain_logprobs,
    plain_step,
)
from tests.support.configs import learner_job
from tests.support.groups import make_group, make_trajectory, random_group
from tests.support.models import gradients_of

torch.set_num_threads(1)

STEP = 3
CUT: dict[str, Any] = {"finish_reasons": ["length"]}


def _config(
    folder: Path | str = "none", *, algorithm: dict[str, Any] | None = None, **sections: Any
) -> JobConfig:
    masking = {"overlong_filter": True} | (algorithm or {})
    return learner_job(folder, algorithm=masking, rollout={"max_turn_tokens": 48}, **sections)


def _credit(values: list[float] | None = None, **algorithm: Any) -> Credit:
    """Two whole answers of a group, of 2 and 1 tokens, and one of 3 that was cut between them."""
    episodes = [
        make_trajectory([1], [([11, 12], [])], [1.0], finish_reasons=["stop"]),
        make_trajectory([1], [([13, 14, 15], [])], [5.0], **CUT),
        make_trajectory([1], [([16], [])], [0.0], finish_reasons=["stop"]),
    ]
    batch = assemble([make_group(episodes)])
    told = None if values is None else Values(torch.tensor(values))
    return assign_credit(_config(algorithm=algorithm), batch, None, None, told)


def test_a_masked_episode_counts_in_its_groups_mean_and_nowhere_else() -> None:
    # R = 1, 5, 0: mean 2
    credit = _credit(advantage="dr_grpo")
    assert credit.advantages_N.tolist() == [-1.0, -1.0, 0.0, 0.0, 0.0, -2.0]
    assert credit.kept_S.tolist() == [True, False, True]
    unmasked = _credit(advantage="dr_grpo", overlong_filter=False)
    assert unmasked.advantages_N.tolist() == [-1.0, -1.0, 3.0, 3.0, 3.0, -2.0]


def test_a_batch_is_whitened_over_the_tokens_that_are_trained() -> None:
    # R − mean is −1, −1 and −2 where it is kept: mean −4/3, variance 1/3
    credit = _credit(advantage="reinforce_pp_baseline")
    plain, low = (1 / 3) / (1 / 3) ** 0.5, (-2 / 3) / (1 / 3) ** 0.5
    wanted = torch.tensor([plain, plain, 0.0, 0.0, 0.0, low])
    torch.testing.assert_close(credit.advantages_N, wanted)


def test_a_critic_is_trained_on_what_is_kept() -> None:
    credit = _credit([0.5, 0.25, 9.0, 9.0, 9.0, 0.75], advantage="gae")
    assert credit.targets is not None
    assert credit.targets.kept_N.tolist() == [True, True, False, False, False, True]
    assert credit.targets.returns_N[credit.targets.kept_N].tolist() == [1.0, 1.0, 0.0]
    # A = R − V is 0.5, 0.75 and −0.75 where it is kept: mean 1/6
    kept = torch.tensor([0.5, 0.75, -0.75])
    wanted = (kept - kept.mean()) / kept.std()
    torch.testing.assert_close(credit.advantages_N[credit.targets.kept_N], wanted)
    assert credit.advantages_N[2:5].tolist() == [0.0, 0.0, 0.0]


def _groups(num: int = 4) -> list[Group]:
    """Groups of which some episodes, and all of the second, were cut."""
    rng = np.random.default_rng(5)
    groups: list[Group] = []
    for number in range(num):
        group = random_group(rng, number, turns=3, longest=6, version=STEP - 1)
        episodes = [
            item.model_copy(update={"finish": "length"})
            if number == 1 or place == number % 4
            else item
            for place, item in enumerate(group.trajectories)
        ]
        groups.append(group.model_copy(update={"trajectories": episodes}))
    return groups


def _plainly(groups: list[Group], model: nn.Module, config: JobConfig, behaviour_N: Tensor) -> None:
    """Train the whole episodes alone, with the advantages that they have among all."""
    rewards = [[item.reward for item in group.sampled] for group in groups]
    items = [(at, item) for at, group in enumerate(groups) for item in group.sampled]
    counts = [item.num_generated for _, item in items]
    columns = zip(items, behaviour_N.split(counts), grpo(rewards), strict=True)
    whole = [column for column in columns if column[0][1].ended_by != "length"]
    data = Episodes(
        trajectories=[item for (_, item), _, _ in whole],
        group=[at for (at, _), _, _ in whole],
        behaviour=[behaviour for _, behaviour, _ in whole],
        lags=[torch.zeros(len(behaviour)) for _, behaviour, _ in whole],
        advantages=[torch.full((len(b),), float(value)) for _, b, value in whole],
    )
    plain_step(model, model, config, data)


@pytest.mark.parametrize(
    "algorithm",
    [
        {},
        {"loss_agg": "seq-mean-token-mean", "entropy_coef": 0.1},
        {"loss_agg": "seq-mean-token-sum", "correction": "m2po"},
        {"loss": "dppo"},
    ],
    ids=str,
)
@pytest.mark.parametrize("num_minibatches", [1, 2])
def test_the_gradient_is_that_of_the_whole_episodes_alone(
    folder: Path, algorithm: dict[str, Any], num_minibatches: int
) -> None:
    learner = {"num_minibatches": num_minibatches, "max_row_tokens": 64, "microbatch_tokens": 64}
    config = _config(folder, algorithm=algorithm, learner=learner)
    model = load_model(config.model, config.learner)
    plain, groups = copy.deepcopy(model), _groups()
    batch = assemble(groups)
    with torch.no_grad():
        exact, _ = plain_logprobs(model, [t for g in groups for t in g.sampled], 1.0)
    noise = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(1))
    batch.behaviour_N[:] = torch.cat(exact) + 0.3 * noise
    _plainly(groups, plain, config, batch.behaviour_N)
    report = Trainer(model, config, total_steps=9).step(batch, STEP)
    wanted = gradients_of(plain)
    assert wanted.abs().max() > 1e-4
    torch.testing.assert_close(gradients_of(model), wanted, rtol=1e-4, atol=1e-5)
    assert batch.truncated_S.sum() == 7
    counted = [n for key, n in report.numbers.items() if key.startswith("staleness/num_tokens")]
    assert sum(counted) == batch.num_tokens


def test_the_second_moment_is_that_of_the_tokens_that_are_trained() -> None:
    old, behaviour = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-1.0, -1.3, -5.0])
    kept = torch.tensor([True, True, False])
    inputs = CorrectionInputs(old[kept], behaviour[kept], torch.tensor([0, 1]), 3)
    assert correct("m2po", inputs).weight_N.tolist() == [1.0, 0.0]
    data: tuple[list[Tensor], list[Tensor]] = ([old[kept]], [behaviour[kept]])
    assert m2po_kept(*data)[0].tolist() == [1.0, 0.0]


def _critic_after(folder: Path, groups: list[Group]) -> tuple[dict[str, float], Tensor]:
    algorithm = {"advantage": "gae"}
    config = _config(folder, algorithm=algorithm, critic={"lr": 0.1})
    trainer = Trainer(load_model(config.model, config.learner), config, total_steps=9)
    assert trainer.critic is not None
    numbers = trainer.step(assemble(groups), STEP).numbers
    return numbers, gradients_of(trainer.critic.model)


def test_a_critic_does_not_see_masked_episodes(folder: Path) -> None:
    groups = _groups()
    numbers, gradients = _critic_after(folder, groups)

    def kept(group: Group) -> list[Trajectory]:
        return [item for item in group.sampled if item.ended_by != "length"]

    others = [make_group(kept(group), at) for at, group in enumerate(groups) if kept(group)]
    alone, wanted = _critic_after(folder, others)
    assert wanted.abs().max() > 1e-3
    torch.testing.assert_close(gradients, wanted, rtol=1e-4, atol=1e-6)
    for name in ("vf_loss", "vf_clipfrac", "returns/mean", "returns/max", "vf_explained_var"):
        assert numbers[f"critic/{name}"] == pytest.approx(alone[f"critic/{name}"], abs=1e-6), name


@pytest.mark.parametrize("advantage", ["grpo", "gae"])
def test_a_batch_that_is_masked_as_a_whole_changes_nothing_and_tells_finite_numbers(
    folder: Path, advantage: str
) -> None:
    group = _groups()[1]
    config = _config(folder, algorithm={"advantage": advantage}, learner={"weight_decay": 0.0})
    model = load_model(config.model, config.learner)
    before = torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()])
    report = Trainer(model, config, total_steps=9).step(assemble([group]), STEP)
    after = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    assert torch.equal(before, after)
    assert all(np.isfinite(value) for value in report.numbers.values()), report.numbers
    assert report.numbers["actor/entropy"] > 0


def _batch(groups: list[list[tuple[float, bool]]]) -> TrainingBatch:
    """Groups of episodes of two turns, with rewards, some of whose games took too long.

    Equal observations have equal ids; the components of a reward are its halves.
    """
    made: list[Group] = []
    for number, episodes in enumerate(groups):
        rows = [
            make_trajectory(
                [1],
                [([11, 12], [5 + at % 2]), ([13], [])],
                [reward / 4, 3 * reward / 4],
                finish="timeout" if hung else "done",
                info={"half": reward / 2, "rest": reward / 2},
            )
            for at, (reward, hung) in enumerate(episodes)
        ]
        greedy = make_trajectory([1], [([7], [])], [0.5], greedy=True)
        made.append(make_group([*rows, greedy], number))
    return assemble(made, components=["half", "rest"])


_ADVANTAGES: list[dict[str, Any]] = [
    *({"advantage": name} for name in sorted(ADVANTAGES) if name != "gdpo"),
    *({"advantage": name, "advantage_std": std} for name in ("grpo", "gigpo") for std in ("none",)),
    {"advantage": "grpo", "advantage_std": "batch"},
    {"advantage": "gdpo", "reward_components": {"half": 1.0, "rest": 0.5}},
    {"advantage": "grpo", "length_coef": 0.5},
    {"advantage": "grpo", "sample": "turn", "advantage_std": "batch"},
    {"advantage": "gpg", "sample": "turn"},
]
_NEEDS_NO_PEERS = {"gae", "reinforce_pp", "remax"}


def _timed(batch: TrainingBatch, algorithm: dict[str, Any]) -> Credit:
    told = Values(batch.token_rewards_N / 3) if algorithm["advantage"] == "gae" else None
    env = {"game": "none", "on_step_timeout": "mask"}
    config = _config(env=env, algorithm={"overlong_filter": False, **algorithm})
    return assign_credit(config, batch, None, None, told)


@pytest.mark.parametrize("algorithm", _ADVANTAGES, ids=str)
@given(data=st.data())
@settings(max_examples=8, deadline=None)
def test_episodes_that_took_their_game_too_long_change_nothing_elsewhere(
    algorithm: dict[str, Any], data: st.DataObject
) -> None:
    rewards = st.integers(0, 3).map(float)
    groups = [data.draw(st.lists(rewards, min_size=2, max_size=4)) for _ in range(3)]
    whole = [[(reward, False) for reward in group] for group in groups]
    masked = [
        group + [(reward, True) for reward in data.draw(st.lists(rewards, max_size=2))]
        for group in whole
    ]
    # A group of which one episode is left; of a second one, none is.
    alone = [[(data.draw(rewards), False), (9.0, True)], [(7.0, True), (0.0, True)]]
    batch = _batch([*masked, *alone])
    credit = _timed(batch, algorithm)
    hung_N = batch.timed_out_S[batch.seq_N]
    assert torch.equal(credit.kept_N, ~hung_N)
    assert not credit.advantages_N[hung_N].any()
    left_N = (batch.group_S[batch.seq_N] == len(groups)) & ~hung_N
    others_N = ~hung_N & ~left_N
    if algorithm["advantage"] in _NEEDS_NO_PEERS:
        whole.append(alone[0][:1])  # it is trained without others, and counts
        others_N |= left_N
    else:
        assert not credit.advantages_N[left_N].any()
    wanted = _timed(_batch(whole), algorithm)
    torch.testing.assert_close(credit.advantages_N[others_N], wanted.advantages_N)
    if credit.targets is not None and wanted.targets is not None:
        torch.testing.assert_close(credit.targets.returns_N[others_N], wanted.targets.returns_N)


def test_a_batch_whose_games_all_took_too_long_earns_nothing() -> None:
    credit = _timed(_batch([[(1.0, True), (0.0, True)]]), {"advantage": "grpo"})
    assert not credit.kept_N.any()
    assert not credit.advantages_N.any()
    assert credit.rewards_E.tolist() == [1.0, 0.0]


def _agents_group(hung: bool) -> Group:
    """Three episodes of an agent, each of a main row and a sub-agent's; the last may hang."""
    rows = [
        make_trajectory(
            [1],
            [([11, 12][: 1 + place], [])],
            [reward if kind == "main" else 0.0],
            finish="timeout" if hung and episode == 2 else "done",
            episode=episode,
            kind=kind,
        )
        for episode, reward in enumerate((1.0, 0.0, 5.0))
        for place, kind in enumerate(("main", "help"))
    ]
    return make_group(rows if hung else rows[:4])


@pytest.mark.parametrize("advantage", ["grpo", "reinforce_pp", "dr_grpo"])
def test_episodes_of_several_rows_are_left_out_whole(advantage: str) -> None:
    masked, plain = (
        _timed(assemble([_agents_group(hung)]), {"advantage": advantage}) for hung in (True, False)
    )
    assert masked.kept_S.tolist() == [True] * 4 + [False] * 2
    assert torch.equal(masked.advantages_N[:6], plain.advantages_N)
    assert not masked.advantages_N[6:].any()


@pytest.mark.parametrize("key", ["overlong_buffer", "length_coef"])
def test_the_length_of_an_episode_is_what_its_policy_wrote_in_all_rows(key: str) -> None:
    """Observations do not count, and an episode of two rows is charged once."""

    def earned(group: Group) -> list[float]:
        values = {"overlong_buffer": 40, "length_coef": 1.0}
        algorithm = {"advantage": "grpo", "overlong_filter": False, key: values[key]}
        config = _config(algorithm=algorithm)
        return assign_credit(config, assemble([group]), None, None, None).rewards_E.tolist()

    ten = list(range(10, 20))
    short = make_trajectory([1], [(ten[:5], [9] * 5), (ten[5:], [])], [0.0, 1.0])
    long = make_trajectory([1], [(ten[:5], [9] * 200), (ten[5:], [])], [0.0, 1.0])
    first, second = earned(make_group([short, long]))
    assert first == second == (1.0 if key == "length_coef" else earned(make_group([short]))[0])
    rows = [
        make_trajectory([1], [(ids, [])], [reward], episode=0, kind=kind)
        for ids, reward, kind in ((ten[:5], 1.0, "main"), (ten[5:], 0.0, "help"))
    ]
    assert earned(make_group(rows)) == pytest.approx(earned(make_group([short])))
