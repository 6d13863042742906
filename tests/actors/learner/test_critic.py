"""PPO's step makes the gradients of a plain implementation, for policy and critic, and the same
bits when it goes on from a checkpoint; turns as samples are trained as if they were episodes.
"""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tinkermq.actors.policy.model_folder import load_tokenizer
from tinkermq.actors.training.batch import TrainingBatch, assemble
from tinkermq.actors.training.checkpoint import CheckpointStore
from tinkermq.actors.training.critic import ValueModel
from tinkermq.actors.training.model import load_model
from tinkermq.actors.training.state import LearnerState
from tinkermq.actors.training.step import Trainer
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.rollout import Group, Trajectory
from torch import Tensor, nn

from tests.actors.learner.plain_step import Episodes, Tokens, plain_step
from tests.support.configs import learner_job
from tests.support.groups import make_group, random_group
from tests.support.models import gradients_of

torch.set_num_threads(1)

STEP = 3


def _groups(num: int = 3, seed: int = 0) -> list[Group]:
    rng = np.random.default_rng(seed)
    return [random_group(rng, number, turns=3, version=STEP - 1) for number in range(num)]


def _trainer(config: JobConfig) -> Trainer:
    """A trainer whose critic has an opinion."""
    trainer = Trainer(load_model(config.model, config.learner), config, total_steps=10)
    if trainer.critic is not None:
        torch.manual_seed(5)
        nn.init.normal_(trainer.critic.model.value_head.weight, std=0.2)
        nn.init.constant_(trainer.critic.model.value_head.bias, 0.3)
    return trainer


def _plain_values(model: ValueModel, trajectories: list[Trajectory]) -> Tokens:
    """The value before each generated token, one episode after the other."""
    values: Tokens = []
    for item in trajectories:
        ids = torch.from_numpy(item.token_ids.astype(np.int64))[None]
        states = model.decoder(input_ids=ids, use_cache=False).last_hidden_state[0]
        values.append(model.value_head(states[np.flatnonzero(item.mask) - 1])[:, 0])
    return values


def _plain_gae(
    item: Trajectory,
    values: Tensor,
    gamma: float,
    lam: float,
    *,
    turn_gamma: float | None = None,
    turn_lambda: float | None = None,
    after: float = 0.0,
) -> Tensor:
    rewards = np.zeros(len(item.mask))
    rewards[item.turn_ends] = item.rewards
    ends = np.isin(np.flatnonzero(item.mask), item.turn_ends)
    rewards = rewards[np.flatnonzero(item.mask)]
    advantages, later, next_value = [0.0] * len(rewards), 0.0, after
    for at in reversed(range(len(rewards))):
        g = turn_gamma if ends[at] and turn_gamma is not None else gamma
        between = turn_lambda if ends[at] and turn_lambda is not None else lam
        delta = rewards[at] + g * next_value - float(values[at])
        later = delta + g * between * later
        advantages[at], next_value = later, float(values[at])
    return torch.tensor(advantages)


def _recorded(batch: TrainingBatch, items: list[Trajectory]) -> Episodes:
    counts = [item.num_generated for item in items]
    lags = (STEP - 1 - batch.versions_N).float()
    behaviour = list(batch.behaviour_N.split(counts))
    return Episodes(items, list(range(len(items))), behaviour, list(lags.split(counts)), [])


@pytest.mark.parametrize("of_critic", [None, 1.0])
def test_policy_and_critic_train_as_a_plain_implementation_does(
    folder: Path, of_critic: float | None
) -> None:
    gamma, lam, clip = 0.9, 0.8, 0.05
    algorithm = {"advantage": "gae", "gamma": gamma, "gae_lambda": lam, "correction": "none"}
    critic_keys = {"lr": 1e-3, "clip": clip, "gae_lambda": of_critic}
    config = learner_job(folder, algorithm=algorithm, critic=critic_keys)
    trainer = _trainer(config)
    assert trainer.critic is not None
    groups = _groups()
    items = [item for group in groups for item in group.sampled]
    policy, critic = copy.deepcopy(trainer.model), copy.deepcopy(trainer.critic.model)

    values = _plain_values(critic, items)
    gae = [_plain_gae(i, v.detach(), gamma, lam) for i, v in zip(items, values, strict=True)]
    towards = [
        _plain_gae(i, v.detach(), gamma, of_critic or lam)
        for i, v in zip(items, values, strict=True)
    ]
    returns = torch.cat(towards) + torch.cat(values).detach()
    before = torch.cat(values).detach()
    plain = (torch.cat(values) - returns) ** 2
    bounded = (torch.cat(values).clamp(before - clip, before + clip) - returns) ** 2
    loss = 0.5 * torch.maximum(plain, bounded).mean()
    loss.backward()
    flat = torch.cat(gae)
    whitened = (flat - flat.mean()) / (flat.var() + 1e-8).sqrt()
    batch = assemble(groups)
    data = _recorded(batch, items)
    data.advantages = list(whitened.split([item.num_generated for item in items]))
    plain_step(policy, policy, config, data)

    report = trainer.step(batch, STEP)
    torch.testing.assert_close(
        gradients_of(trainer.model), gradients_of(policy), rtol=1e-4, atol=1e-5
    )
    wanted = gradients_of(critic)
    assert wanted.abs().max() > 1e-2
    torch.testing.assert_close(gradients_of(trainer.critic.model), wanted, rtol=1e-4, atol=1e-5)
    numbers = report.numbers
    assert numbers["critic/vf_loss"] == pytest.approx(float(loss.detach()))
    assert numbers["critic/values/mean"] == pytest.approx(float(before.mean()), rel=1e-5)
    assert numbers["critic/returns/max"] == pytest.approx(float(returns.max()), rel=1e-5)
    assert numbers["critic/advantages/mean"] == pytest.approx(0, abs=1e-6)
    assert numbers["critic/rewards/mean"] == pytest.approx(np.mean([i.reward for i in items]))


def test_turns_have_a_discount_and_a_lambda_of_their_own_and_cut_episodes_are_worth_what_follows(
    folder: Path,
) -> None:
    algorithm = {"advantage": "gae", "gamma": 0.9, "gae_lambda": 0.8, "correction": "none"}
    of_turns = {"turn_gamma": 0.5, "turn_lambda": 0.3}
    config = learner_job(
        folder, algorithm=algorithm | of_turns, critic={"lr": 1e-3, "bootstrap_cut": True}
    )
    trainer = _trainer(config)
    assert trainer.critic is not None
    cut = ("turns", "length", "done", "timeout")
    groups = [
        group.model_copy(
            update={
                "trajectories": [
                    item.model_copy(update={"finish": cut[place % len(cut)]})
                    for place, item in enumerate(group.trajectories)
                ]
            }
        )
        for group in _groups()
    ]
    items = [item for group in groups for item in group.sampled]
    critic = trainer.critic.model
    values = [one.detach() for one in _plain_values(critic, items)]
    returns: list[Tensor] = []
    for item, before in zip(items, values, strict=True):
        ids = torch.from_numpy(item.token_ids.astype(np.int64))[None, : item.turn_ends[-1] + 1]
        state = critic.decoder(input_ids=ids, use_cache=False).last_hidden_state[0, -1]
        is_cut = item.finish in ("turns", "length")
        after = float(critic.value_head(state).detach()) if is_cut else 0.0
        returns.append(_plain_gae(item, before, 0.9, 0.8, **of_turns, after=after) + before)
    numbers = trainer.step(assemble(groups), STEP).numbers
    flat = torch.cat(returns)
    assert numbers["critic/returns/mean"] == pytest.approx(float(flat.mean()), rel=1e-5)
    assert numbers["critic/returns/max"] == pytest.approx(float(flat.max()), rel=1e-5)
    assert numbers["critic/returns/min"] == pytest.approx(float(flat.min()), rel=1e-5)
    rewards = np.mean([item.reward for item in items])
    assert numbers["critic/rewards/mean"] == pytest.approx(rewards)  # what the game gave


def _turns_as_episodes(groups: list[Group]) -> list[Trajectory]:
    """Every turn as a trajectory of its own, with the conversation before it as its prompt."""
    turns: list[Trajectory] = []
    for item in [item for group in groups for item in group.sampled]:
        begin = 0
        for end, reward in zip(item.turn_ends, item.rewards, strict=True):
            keep = (np.arange(len(item.mask)) >= begin).astype(np.uint8)
            turns.append(
                item.model_copy(
                    update={
                        "token_ids": item.token_ids[: end + 1],
                        "mask": (item.mask * keep)[: end + 1],
                        "turn_ends": np.array([end], np.int32),
                        "rewards": np.array([reward], np.float32),
                    }
                )
            )
            begin = end + 1
    return turns


@pytest.mark.parametrize(
    "algorithm",
    [
        {"loss": "gspo", "clip_low": 0.01, "clip_high": 0.02},
        {"correction": "tis", "correction_level": "sequence"},
        {"correction": "geometric"},
    ],
    ids=str,
)
def test_a_turn_as_a_sample_is_trained_as_an_episode_of_its_own(
    folder: Path, algorithm: dict[str, Any]
) -> None:
    by_turn = {"sample": "turn", "turn_reward": "reward", "loss_agg": "seq-mean-token-mean"}
    config = learner_job(folder, algorithm={**by_turn, "advantage": "reinforce_pp", **algorithm})
    trainer = _trainer(config)
    plain = copy.deepcopy(trainer.model)
    groups, items = _groups(), _turns_as_episodes(_groups())
    batch = assemble(groups)
    rewards = torch.cat([torch.full((i.num_generated,), i.reward) for i in items])
    whitened = (rewards - rewards.mean()) / (rewards.var() + 1e-8).sqrt()
    # near enough to the policy for sequence corrections to keep some turns
    batch.behaviour_N[:] = -5.5
    data = _recorded(batch, items)
    data.advantages = list(whitened.split([item.num_generated for item in items]))
    plain_step(plain, plain, config, data)
    report = trainer.step(batch, STEP)
    assert report.numbers["training/num_samples"] == len(items)
    assert gradients_of(plain).abs().max() > 1e-4
    torch.testing.assert_close(
        gradients_of(trainer.model), gradients_of(plain), rtol=1e-4, atol=1e-5
    )


def _ppo(folder: Path, **critic: Any) -> JobConfig:
    learner = {"lr": 1e-3, "eps": 1e-8, "num_minibatches": 2}
    algorithm = {"advantage": "gae"}
    return learner_job(folder, algorithm=algorithm, learner=learner, critic={"lr": 1e-3, **critic})


def _train(trainer: Trainer, steps: range) -> None:
    for step in steps:
        trainer.step(assemble(_groups(2, step)), step)


def _bits(trainer: Trainer) -> list[bytes]:
    assert trainer.critic is not None
    tensors = [*trainer.model.state_dict().values(), *trainer.critic.model.state_dict().values()]
    return [tensor.numpy().tobytes() for tensor in tensors]


def test_training_goes_on_from_a_checkpoint_with_the_same_bits(
    folder: Path, tmp_path: Path
) -> None:
    config = _ppo(folder)
    whole = Trainer(load_model(config.model, config.learner), config, total_steps=9)
    _train(whole, range(1, 3))
    tokenizer = load_tokenizer(str(folder))
    saved = CheckpointStore(tmp_path, keep_last=1, keep_every=0).save(
        LearnerState(step=2), lambda made: whole.save(made, tokenizer)
    )
    _train(whole, range(3, 5))
    restored = Trainer(load_model(config.model, config.learner, saved), config, total_steps=9)
    restored.restore(saved)
    _train(restored, range(3, 5))
    assert _bits(restored) == _bits(whole)


def test_the_policy_waits_for_the_critic_to_warm_up(folder: Path) -> None:
    config = _ppo(folder, warmup_steps=2)
    trainer = Trainer(load_model(config.model, config.learner), config, total_steps=9)
    assert trainer.critic is not None
    policy = copy.deepcopy(trainer.model.state_dict())

    def moved() -> bool:
        now = trainer.model.state_dict()
        return any(not torch.equal(policy[name], now[name]) for name in policy)

    _train(trainer, range(1, 3))
    assert not moved()
    assert trainer.critic.model.value_head.bias.item() != 0
    _train(trainer, range(3, 4))
    assert moved()


def test_a_critic_learns_what_an_episode_earns(folder: Path) -> None:
    """Episodes whose prompt begins with one character earn 1, with another 0: it says so."""
    config = _ppo(folder, lr=3e-3, warmup_steps=99)
    trainer = Trainer(load_model(config.model, config.learner), config, total_steps=99)
    explained: list[float] = []
    for step in range(1, 31):
        groups = _groups(4, step)
        for number, group in enumerate(groups):
            for item in group.trajectories:
                item.token_ids[0] = 9 + number % 2
                item.rewards[:] = 0.0
                item.rewards[-1] = number % 2
        report = trainer.step(assemble(groups), step)
        explained.append(report.numbers["critic/vf_explained_var"])
    assert np.mean(explained[:3]) < 0.3
    assert np.mean(explained[-3:]) > 0.6


def test_an_episode_of_one_group_may_stand_alone(folder: Path) -> None:
    trainer = _trainer(_ppo(folder))
    alone = [make_group([group.sampled[0]], number) for number, group in enumerate(_groups())]
    assert np.isfinite(trainer.step(assemble(alone), STEP).numbers["actor/pg_loss"])
