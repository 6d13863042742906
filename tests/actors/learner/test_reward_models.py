"""Reward models: the step is Bradley-Terry's, and transformers opens what is saved."""

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tinkermq.actors.learner.algorithms.training_batch import assemble
from tinkermq.actors.learner.preferences.reward_model import load_reward_model, padding_of
from tinkermq.actors.learner.preferences.reward_trainer import RewardTrainer
from tinkermq.actors.learner.training.policies import Policies, load_models
from tinkermq.actors.models.model_folder import load_tokenizer
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.rollout import Group, Trajectory
from tinkermq.schemas.wire.errors import DataError, ModelError
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers.models.auto.modeling_auto import AutoModelForSequenceClassification

from tests.support.images import make_vision_model
from tests.support.models import gradients_of, make_tiny_model

from .test_preferences import config_of, pairs

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the language model."""
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def reward_config(folder: Path, center: float = 0.0, **sections: Any) -> JobConfig:
    return config_of(folder, {"objective": "reward", "center_coef": center}, **sections)


def model_of(config: JobConfig, seed: int = 3) -> Any:
    """A reward model that tells answers apart."""
    model: Any = load_reward_model(config.model, config.learner)
    with torch.no_grad():
        noise = torch.randn(model.score.weight.shape, generator=torch.Generator().manual_seed(seed))
        model.score.weight.copy_(0.1 * noise)
    return model


def answer(item: Trajectory) -> Tensor:
    return torch.from_numpy(item.token_ids[: item.turn_ends[-1] + 1].astype(np.int64))[None]


def plain_scores(model: Any, groups: list[Group]) -> Tensor:
    """What transformers' class says of each answer by itself: [P, 2]."""
    rows = [[model(answer(item)).logits[0, 0] for item in group.sampled] for group in groups]
    return torch.stack([torch.stack(row) for row in rows])


@pytest.mark.parametrize("center", [0.0, 0.01])
def test_loss_and_gradient_of_a_step_are_those_of_the_formula(folder: Path, center: float) -> None:
    config = reward_config(folder, center)
    model = model_of(config)
    plain, groups = copy.deepcopy(model), pairs()
    scores = plain_scores(plain, groups)
    expected = -logsigmoid(scores[:, 0] - scores[:, 1]).mean()
    expected = expected + center * (scores.sum(1) ** 2).mean()
    expected.backward()
    numbers = RewardTrainer(model, config, total_steps=9).step(assemble(groups), 1).numbers
    assert numbers["actor/pg_loss"] == pytest.approx(float(expected.detach()), rel=1e-6)
    wins = (scores[:, 0] > scores[:, 1]).double().mean()
    assert numbers["reward_model/accuracy"] == float(wins)
    wanted = gradients_of(plain)
    assert wanted.abs().max() > 1e-3
    torch.testing.assert_close(gradients_of(model), wanted, atol=1e-6, rtol=1e-5)


def test_pairs_are_learnt_and_what_is_saved_is_opened_by_transformers(
    folder: Path, tmp_path: Path
) -> None:
    config = reward_config(folder, learner={"lr": 3e-3, "num_minibatches": 2})
    policies = Policies(config, load_models(config, None), total_steps=20)
    groups = pairs(6)
    numbers = [policies.step(groups, step).numbers for step in range(1, 9)]
    assert numbers[0]["actor/pg_loss"] == pytest.approx(math.log(2), abs=0.1)
    assert numbers[-1]["reward_model/accuracy"] == 1
    assert numbers[-1]["actor/pg_loss"] < 0.1

    saved = tmp_path / "checkpoint"
    policies.save(saved, load_tokenizer(str(folder)))
    opened: Any = AutoModelForSequenceClassification.from_pretrained(saved, num_labels=1)
    tokenizer: Any = load_tokenizer(str(saved))
    scores = plain_scores(opened.eval(), groups)
    assert (scores[:, 0] > scores[:, 1]).all()
    ids = [answer(item)[0] for group in groups for item in group.sampled]
    padded = tokenizer.pad({"input_ids": ids}, return_tensors="pt")
    torch.testing.assert_close(opened(**padded).logits.view(-1, 2), scores, atol=1e-4, rtol=1e-4)

    again = Policies(config, load_models(config, saved), total_steps=20, folder=saved)
    for one in (policies, again):
        one.step(groups, 9)
    made, resumed = (one.gather()[""] for one in (policies, again))
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in made.items())


def test_a_token_that_ends_answers_is_not_what_is_padded_with(folder: Path, tmp_path: Path) -> None:
    tokenizer: Any = load_tokenizer(str(folder))
    assert padding_of(tokenizer) == tokenizer.pad_token_id != tokenizer.eos_token_id
    tokenizer.pad_token = tokenizer.eos_token
    assert padding_of(tokenizer) != tokenizer.eos_token_id
    config = reward_config(folder)
    trainer = RewardTrainer(load_reward_model(config.model, config.learner), config, total_steps=9)
    trainer.begin_save(tmp_path / "saved", tokenizer)()
    saved: Any = load_tokenizer(str(tmp_path / "saved"))
    model: Any = trainer.model
    assert saved.pad_token_id == model.config.pad_token_id != saved.eos_token_id


def test_an_answer_that_ends_with_padding_is_refused(folder: Path) -> None:
    config = reward_config(folder)
    trainer = RewardTrainer(load_reward_model(config.model, config.learner), config, total_steps=9)
    [group] = pairs(1)
    trainer.check_readable(group)
    for item in group.trajectories:
        item.token_ids[item.turn_ends[-1]] = 0
    with pytest.raises(DataError, match="an answer ends with token 0, which the tokenizer pads"):
        trainer.check_readable(group)


def test_no_reward_model_is_made_of_one_that_sees(folder: Path, tmp_path: Path) -> None:
    config = reward_config(make_vision_model(tmp_path / "seeing", "qwen2_5_vl"))
    with pytest.raises(ModelError, match=r"no reward model is made of .*, or sees images"):
        load_reward_model(config.model, config.learner)
