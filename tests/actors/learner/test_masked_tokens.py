"""Tokens that are too old are context: they are in no loss, and their episodes count whole."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tinkermq.actors.learner.group_metrics import group_numbers
from tinkermq.actors.learner.staleness import Candidate, form_batch, oldest_trained
from tinkermq.actors.training.batch import assemble
from tinkermq.actors.training.credit import assign_credit
from tinkermq.actors.training.model import load_model
from tinkermq.actors.training.state import Waste
from tinkermq.actors.training.step import Trainer
from tinkermq.schemas.config.job import JobConfig, TrainingConfig
from tinkermq.schemas.rollout import Group, Trajectory, num_too_old
from torch import Tensor, nn

from tests.actors.learner.plain_step import Episodes, grpo, plain_logprobs, plain_step
from tests.support.configs import learner_job
from tests.support.groups import make_group, make_trajectory

torch.set_num_threads(1)

STEP, OLDEST = 6, 4


def _groups(num: int = 3) -> list[Group]:
    """Groups of four episodes of three turns; some of them, or their first turns, are old."""
    rng = np.random.default_rng(5)
    groups: list[Group] = []
    for number in range(num):
        prompt = rng.integers(1, 200, 4).tolist()
        episodes: list[Trajectory] = []
        for place in range(4):
            sizes = rng.integers(1, 5, 3).tolist()
            turns = [
                (rng.integers(1, 200, size).tolist(), rng.integers(1, 200, 2).tolist())
                for size in sizes
            ]
            ages = [1, 1, 2] if (number, place) == (2, 0) else [3, 2 + place, 5]
            rewards = rng.normal(size=3).tolist()
            made = make_trajectory(prompt, turns, rewards, versions=np.repeat(ages, sizes).tolist())
            episodes.append(made)
        groups.append(make_group(episodes, number))
    return groups


def _without_old(item: Trajectory) -> Trajectory:
    """Return a trajectory in which what is too old was given to the policy."""
    fresh = (item.mask == 1) & (item.versions >= OLDEST)
    turns = fresh[item.turn_ends]
    return item.model_copy(
        update={
            "mask": fresh.astype(np.uint8),
            "turn_ends": item.turn_ends[turns],
            "rewards": item.rewards[turns],
        }
    )


def _gradients(model: nn.Module) -> Tensor:
    return torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None])


def _plainly(groups: list[Group], model: nn.Module, config: JobConfig, behaviour_N: Tensor) -> None:
    """Train what is fresh alone, with the advantages that the whole episodes have."""
    advantages = grpo([[item.reward for item in group.sampled] for group in groups])
    items = [(at, item) for at, group in enumerate(groups) for item in group.sampled]
    behaviours = behaviour_N.split([item.num_generated for _, item in items])
    data = Episodes([], [], [], [], [])
    for (at, item), behaviour, advantage in zip(items, behaviours, advantages, strict=True):
        fresh = torch.from_numpy(item.versions[item.mask == 1] >= OLDEST)
        if not fresh.any():
            continue
        data.trajectories.append(_without_old(item))
        data.group.append(at)
        data.behaviour.append(behaviour[fresh])
        data.lags.append(torch.zeros(int(fresh.sum())))
        data.advantages.append(torch.full((int(fresh.sum()),), float(advantage)))
    plain_step(model, copy.deepcopy(model), config, data)


@pytest.mark.parametrize(
    "algorithm",
    [
        {},
        {"loss_agg": "seq-mean-token-mean", "entropy_coef": 0.1},
        {"loss_agg": "seq-mean-token-sum", "correction": "m2po"},
        {"kl_coef": 0.1},
        {"loss": "dppo"},
    ],
    ids=str,
)
@pytest.mark.parametrize("num_minibatches", [1, 2])
def test_the_gradient_is_that_of_the_fresh_tokens_with_the_advantages_of_whole_episodes(
    folder: Path, algorithm: dict[str, Any], num_minibatches: int
) -> None:
    learner = {"num_minibatches": num_minibatches, "max_row_tokens": 64, "microbatch_tokens": 64}
    config = learner_job(folder, algorithm=algorithm, learner=learner)
    model = load_model(config.model, config.learner)
    plain, groups = copy.deepcopy(model), _groups()
    batch = assemble(groups, OLDEST)
    assert batch.fresh_N is not None
    with torch.no_grad():
        exact, _ = plain_logprobs(model, [t for g in groups for t in g.sampled], 1.0)
    noise = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(1))
    batch.behaviour_N[:] = torch.cat(exact) + 0.3 * noise
    _plainly(groups, plain, config, batch.behaviour_N)
    report = Trainer(model, config, total_steps=9).step(batch, STEP)
    wanted = _gradients(plain)
    assert wanted.abs().max() > 1e-4
    torch.testing.assert_close(_gradients(model), wanted, rtol=1e-4, atol=1e-5)
    counted = [n for key, n in report.numbers.items() if key.startswith("staleness/num_tokens")]
    assert sum(counted) == int(batch.fresh_N.sum())


def test_rewards_of_old_turns_count_in_the_baseline() -> None:
    episodes = [
        make_trajectory([1], [([2], [3]), ([4], [])], [2.0, 0.0], versions=[1, 5]),
        make_trajectory([1], [([2], [])], [0.0], versions=[5]),
    ]
    config = learner_job(algorithm={"advantage": "dr_grpo"})
    credit = assign_credit(config, assemble([make_group(episodes)], OLDEST), None, None, None)
    assert credit.advantages_N.tolist() == [0.0, 1.0, -1.0]
    assert credit.kept_N.tolist() == [False, True, True]
    assert credit.rewards_E.tolist() == [2.0, 0.0]


def _critic_after(folder: Path, groups: list[Group], oldest: int) -> tuple[Tensor, float]:
    config = learner_job(folder, algorithm={"advantage": "gae"}, critic={"lr": 0.1})
    trainer = Trainer(load_model(config.model, config.learner), config, total_steps=9)
    assert trainer.critic is not None
    numbers = trainer.step(assemble(groups, oldest), STEP).numbers
    return _gradients(trainer.critic.model), numbers["critic/vf_loss"]


def test_a_critic_is_not_trained_on_old_tokens(folder: Path) -> None:
    groups = _groups()
    gradients, loss = _critic_after(folder, groups, OLDEST)
    fresh = [
        make_group(kept, at)
        for at, group in enumerate(groups)
        if (kept := [_without_old(one) for one in group.sampled if one.max_version >= OLDEST])
    ]
    wanted, alone = _critic_after(folder, fresh, 0)
    assert wanted.abs().max() > 1e-3
    torch.testing.assert_close(gradients, wanted, rtol=1e-4, atol=1e-6)
    assert loss == pytest.approx(alone)


def test_a_batch_without_old_tokens_is_what_it_was() -> None:
    batch = assemble(_groups(), 1)
    assert batch.fresh_N is None


def test_a_group_is_dropped_for_its_age_only_where_no_token_is_left() -> None:
    candidates = [
        Candidate(1, 1, 0, (0.0, 1.0), max_token_version=1),
        Candidate(2, 2, 0, (0.0, 1.0), max_token_version=2),
        Candidate(3, 3, 3, (0.0, 1.0), max_token_version=3),
    ]
    found = {
        policy: form_batch(candidates, version=3, batch_size=2, max_staleness=1, policy=policy)
        for policy in ("mask", "drop", "train")
    }
    assert found["mask"].train == [2, 3]
    assert found["mask"].dropped == [(1, "stale")]
    assert found["drop"].dropped == [(1, "stale"), (2, "stale")]
    assert found["train"].dropped == []


def test_what_is_trained_follows_from_the_version_and_the_bound() -> None:
    masks = TrainingConfig(staleness_policy="mask", max_staleness=2)
    assert [oldest_trained(version, masks) for version in (0, 2, 3, 7)] == [0, 0, 1, 5]
    auto = TrainingConfig(staleness_policy="mask", max_staleness="auto", staleness_limit=4)
    assert oldest_trained(7, auto) == 3
    assert oldest_trained(7, TrainingConfig(staleness_policy="drop", max_staleness=2)) == 0


def test_masked_tokens_are_counted_and_are_waste() -> None:
    groups = _groups()
    episodes = [item for group in groups for item in group.sampled]
    masked = num_too_old(episodes, OLDEST)
    assert 0 < masked < sum(item.num_generated for item in episodes)
    numbers = group_numbers(groups, STEP - 1, 48, 0.5, OLDEST)
    assert numbers["staleness/masked_tokens"] == masked
    assert numbers["staleness/lag_max"] == STEP - 1 - OLDEST
    assert numbers["rollout/episodes"] == len(episodes)
    assert "staleness/masked_tokens" not in group_numbers(groups, STEP - 1, 48, 0.5)
    waste = Waste()
    for group in groups:
        waste.add(group, trained=True, oldest=OLDEST)
    assert waste.tokens_trained == waste.tokens_finished - masked
