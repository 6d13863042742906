"""Teachers: the reverse KL of each token as its advantage, alone or beside rewards."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tinkermq.actors.learner.algorithms.training_batch import assemble
from tinkermq.actors.learner.distillation.teachers import check_same_language, teacher_advantage
from tinkermq.actors.learner.training.model import load_model
from tinkermq.actors.learner.training.step import Trainer
from tinkermq.actors.models.tiny_model import make_tokenizer
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.rollout import Group
from tinkermq.schemas.wire.errors import ModelError

from tests.support.groups import random_group
from tests.support.models import changed, loaded, make_tiny_model

from .plain_step import plain_logprobs

torch.set_num_threads(1)
VERSION = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The policy's folder."""
    return make_tiny_model(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def teacher(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model that has moved away from it."""
    place = tmp_path_factory.mktemp("teacher") / "model"
    shutil.copytree(folder, place)
    config = _config(folder)
    model = load_model(config.model, config.learner)
    loaded(model, changed(model, seed=5, scale=0.1)).save_pretrained(place)
    return place


def _config(folder: Path, **algorithm: Any) -> JobConfig:
    return JobConfig.model_validate(
        {
            "model": {"path": str(folder)},
            "env": {"game": "none"},
            "learner": {"lr": 0.1, "eps": 1.0, "grad_clip": 1e9},
            "rollout": {"max_prompt_tokens": 16, "max_turn_tokens": 16, "max_response_tokens": 48},
            "algorithm": algorithm,
        }
    )


def _groups(sources: tuple[str, ...] = ("", "")) -> list[Group]:
    rng = np.random.default_rng(0)
    groups = [random_group(rng, number, version=VERSION) for number in range(len(sources))]
    return [
        group.model_copy(
            update={
                "trajectories": [
                    item.model_copy(update={"data_source": source}) for item in group.trajectories
                ]
            }
        )
        for group, source in zip(groups, sources, strict=True)
    ]


def _trainer(config: JobConfig) -> Trainer:
    return Trainer(load_model(config.model, config.learner), config, total_steps=10)


def _moved(config: JobConfig, groups: list[Group]) -> tuple[dict[str, torch.Tensor], Any]:
    trainer = _trainer(config)
    report = trainer.step(assemble(groups), VERSION + 1)
    return trainer.weights(), report.numbers


def test_the_gap_to_the_teacher_is_what_each_token_is_credited_with(
    folder: Path, teacher: Path
) -> None:
    config, groups = _config(folder, teacher=str(teacher), reward_coef=0.0), _groups()
    trainer = _trainer(config)
    batch = assemble(groups)
    numbers = trainer.step(batch, VERSION + 1).numbers
    own = load_model(config.model, config.learner)
    theirs = load_model(_config(teacher).model, config.learner)
    gaps = torch.cat(
        [
            torch.cat(plain_logprobs(theirs, group.sampled, 1.0)[0])
            - torch.cat(plain_logprobs(own, group.sampled, 1.0)[0])
            for group in groups
        ]
    ).detach()
    assert numbers["distillation/reverse_kl"] == pytest.approx(-float(gaps.mean()), abs=1e-5)
    assert numbers["critic/advantages/max"] == pytest.approx(float(gaps.max()), abs=1e-4)
    assert numbers["distillation/taught_share"] == 1.0
    assert numbers["actor/grad_norm"] > 0


def test_a_teacher_that_is_the_policy_itself_changes_nothing(folder: Path) -> None:
    groups = _groups()
    alone, _ = _moved(_config(folder), groups)
    beside, numbers = _moved(_config(folder, teacher=str(folder), teacher_coef=3.0), groups)
    assert numbers["distillation/reverse_kl"] == pytest.approx(0.0, abs=1e-6)
    for name, tensor in alone.items():
        assert torch.allclose(tensor, beside[name], atol=1e-5), name
    silent, told = _moved(_config(folder, teacher=str(folder), reward_coef=0.0), groups)
    assert told["actor/grad_norm"] == pytest.approx(0.0, abs=1e-4)
    assert set(silent) == set(alone)


def test_teaching_brings_the_policy_nearer_and_repeats_to_the_bit(
    folder: Path, teacher: Path
) -> None:
    config = _config(folder, teacher=str(teacher), reward_coef=0.0, teacher_normalise=True)
    config.learner.lr = 1e-3
    runs: list[list[float]] = []
    weights: list[dict[str, torch.Tensor]] = []
    for _ in range(2):
        trainer, kls = _trainer(config), list[float]()
        for step in range(1, 13):
            kls.append(trainer.step(assemble(_groups()), step).numbers["distillation/reverse_kl"])
        runs.append(kls)
        weights.append(trainer.weights())
    assert runs[0] == runs[1]
    assert runs[0][-1] != runs[0][0]
    assert all(torch.equal(one, weights[1][name]) for name, one in weights[0].items())


def test_each_data_source_has_its_own_teacher(folder: Path, teacher: Path) -> None:
    groups = _groups(("math", "code", "other"))
    config = _config(folder, teacher={"math": str(teacher), "code": str(folder)})
    _, numbers = _moved(config, groups)
    counts = [sum(one.num_generated for one in group.sampled) for group in groups]
    assert numbers["distillation/taught_share"] == pytest.approx(sum(counts[:2]) / sum(counts))
    _, only = _moved(_config(folder, teacher=str(teacher)), groups[:1])
    kl = only["distillation/reverse_kl"] * counts[0] / sum(counts[:2])
    assert numbers["distillation/reverse_kl"] == pytest.approx(kl, abs=1e-5)
    _, all_taught = _moved(_config(folder, teacher={"math": str(folder), "": str(teacher)}), groups)
    assert all_taught["distillation/taught_share"] == 1.0


def test_normalised_gaps_keep_their_sign() -> None:
    gap, taught = torch.tensor([0.5, 1.5, -1.0, 0.0]), torch.tensor([True, True, True, False])
    scaled = teacher_advantage(gap, taught, normalise=True)
    assert torch.allclose(scaled[:3], gap[:3] / gap[:3].std(), atol=1e-5)
    assert scaled[3] == 0
    assert teacher_advantage(gap, taught, normalise=False) is gap


def test_a_teacher_with_another_tokenizer_is_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "other")
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<one more>"])
    tokenizer.save_pretrained(tmp_path / "other")
    with pytest.raises(ModelError, match=r"has another tokenizer than .*: 1 entries differ"):
        check_same_language(_config(folder), str(tmp_path / "other"))
    check_same_language(_config(folder), str(folder))
