"""DPO: the loss and the gradient of a step are those of the formula, written plainly."""

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tinkermq.actors.learner.algorithms.training_batch import TrainingBatch, assemble
from tinkermq.actors.learner.preferences.pair_losses import (
    Pairs,
    dpo_loss,
    pair_numbers,
    reward_loss,
    weigh,
)
from tinkermq.actors.learner.training.model import load_model
from tinkermq.actors.learner.training.step import Trainer
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.config.sft import SftConfig
from tinkermq.schemas.rollout import Group
from tinkermq.schemas.wire.errors import DataError
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from tests.support.groups import make_group, make_trajectory
from tests.support.models import changed, gradients_of, loaded, make_tiny_model

from .plain_step import plain_logprobs

torch.set_num_threads(1)

STEP = 3
BETA = 0.4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the reference."""
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def sft_config(**keys: Any) -> SftConfig:
    return SftConfig.model_validate({"data": ["pairs.jsonl"], "objective": "dpo", **keys})


def config_of(folder: Path, sft: dict[str, Any], **sections: Any) -> JobConfig:
    dpo = {} if "objective" in sft else {"objective": "dpo", "beta": BETA}
    learner = {"lr": 1e-4, "grad_clip": 1e9, "row_tokens": 64, "microbatch_tokens": 64}
    return JobConfig.model_validate(
        {
            "model": {"path": str(folder)},
            "sft": {"data": ["pairs.jsonl"], **dpo, **sft},
            "rollout": {"max_prompt_tokens": 16, "max_turn_tokens": 16, "max_response_tokens": 48},
            **sections,
            "learner": learner | sections.get("learner", {}),
        }
    )


def pair(rng: np.random.Generator, number: int, *, is_pair: bool = True) -> Group:
    """A pair of answers of one turn or two, of unequal length, to one prompt."""

    def tokens(longest: int) -> list[int]:
        return rng.integers(8, 264, int(rng.integers(1, longest))).tolist()

    prompt = [4, *tokens(9)]
    answers = [
        make_trajectory(
            prompt,
            [(tokens(9), tokens(5))] * (turns - 1) + [(tokens(9), [])],
            [0.0] * (turns - 1) + [reward],
            versions=STEP - 1,
        )
        for turns, reward in ((1 + number % 2, 1.0 if is_pair else 0.0), (1, 0.0))
    ]
    return make_group(answers, number)


def pairs(num: int = 5, seed: int = 0) -> list[Group]:
    rng = np.random.default_rng(seed)
    return [pair(rng, number) for number in range(num)]


def policy_of(config: JobConfig) -> Any:
    """A policy that has moved away from the reference."""
    model = load_model(config.model, config.learner)
    other = loaded(model, changed(model, seed=5, scale=0.02))
    for weight in other.parameters():
        weight.requires_grad = True
    return other


def plain_loss(
    sft: SftConfig, policy: nn.Module, reference: nn.Module, groups: list[Group]
) -> Tensor:
    """The formulas of the papers, with padded rows and one loop over pairs."""
    losses, chosen_tokens = list[Tensor](), list[Tensor]()
    for group in groups:
        now, _ = plain_logprobs(policy, group.trajectories, 1.0)
        with torch.no_grad():
            before, _ = plain_logprobs(reference, group.trajectories, 1.0)
        gaps = [a - b for a, b in zip(now, before, strict=True)]
        chosen_tokens.append(now[0])
        if sft.dpo_loss == "ipo":
            losses.append((gaps[0].mean() - gaps[1].mean() - 1 / (2 * sft.beta)) ** 2)
            continue
        logit = sft.beta * (gaps[0].sum() - gaps[1].sum())
        wrong = sft.label_smoothing
        losses.append(-(1 - wrong) * logsigmoid(logit) - wrong * logsigmoid(-logit))
    return torch.stack(losses).mean() - sft.sft_coef * torch.cat(chosen_tokens).mean()


@pytest.mark.parametrize(
    "sft",
    [
        {},
        {"label_smoothing": 0.1, "sft_coef": 0.5},
        {"dpo_loss": "ipo"},
        {"dpo_loss": "ipo", "sft_coef": 1.0},
    ],
    ids=str,
)
def test_loss_and_gradient_of_a_step_are_those_of_the_formula(
    folder: Path, sft: dict[str, Any]
) -> None:
    config = config_of(folder, sft)
    policy, reference = policy_of(config), load_model(config.model, config.learner)
    plain, groups = copy.deepcopy(policy), pairs()
    expected = plain_loss(config.sft, plain, reference, groups)
    expected.backward()
    report = Trainer(policy, config, total_steps=9).step(assemble(groups), STEP)
    assert report.numbers["actor/pg_loss"] == pytest.approx(float(expected.detach()), abs=1e-6)
    wanted = gradients_of(plain)
    assert wanted.abs().max() > 1e-2
    torch.testing.assert_close(gradients_of(policy), wanted, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("learner", [{"num_minibatches": 3}, {"batch_epochs": 2}], ids=str)
def test_pairs_are_weighed_by_the_policy_as_it_is_before_each_update(
    folder: Path, learner: dict[str, Any]
) -> None:
    config = config_of(folder, {}, learner={"lr": 1e-2, "eps": 1.0, **learner})
    policy, reference = policy_of(config), load_model(config.model, config.learner)
    plain, groups = copy.deepcopy(policy), pairs(6)
    optimizer = torch.optim.AdamW(
        plain.parameters(),
        lr=config.learner.lr,
        betas=config.learner.betas,
        eps=config.learner.eps,
        weight_decay=config.learner.weight_decay,
    )
    size = len(groups) // config.learner.num_minibatches
    losses: list[float] = []
    for _ in range(config.learner.batch_epochs):
        for start in range(0, len(groups), size):
            optimizer.zero_grad()
            loss = plain_loss(config.sft, plain, reference, groups[start : start + size])
            loss.backward()
            losses.append(float(loss.detach()))
            optimizer.step()
    report = Trainer(policy, config, total_steps=9).step(assemble(groups), STEP)
    assert report.numbers["actor/pg_loss"] == pytest.approx(float(np.mean(losses)), abs=1e-6)
    for ours, theirs in zip(policy.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


def batch(seed: int = 0) -> TrainingBatch:
    return assemble(pairs(seed=seed))


def test_rewards_and_margins_are_told_and_grow_as_pairs_are_learnt(folder: Path) -> None:
    config = config_of(folder, {}, learner={"lr": 3e-3})
    trainer = Trainer(load_model(config.model, config.learner), config, total_steps=20)
    first = trainer.step(batch(), 1).numbers
    assert first["actor/pg_loss"] == pytest.approx(math.log(2))
    assert first["dpo/accuracy"] == 0.5, "the policy is the reference"
    assert first["dpo/margin"] == first["dpo/chosen_reward"] == first["dpo/rejected_reward"] == 0
    assert "actor/reference_kl" not in first
    for step in range(2, 9):
        numbers = trainer.step(batch(), step).numbers
    assert numbers["dpo/accuracy"] == 1
    gap = numbers["dpo/chosen_reward"] - numbers["dpo/rejected_reward"]
    assert numbers["dpo/margin"] == pytest.approx(gap, rel=1e-6)
    assert numbers["dpo/margin"] > 1
    assert numbers["actor/pg_loss"] < 0.3


@pytest.mark.parametrize("reference", [{}, {"ema": 0.5}], ids=["still", "follows"])
def test_an_adapter_is_compared_with_its_base(folder: Path, reference: dict[str, Any]) -> None:
    config = config_of(
        folder, {}, lora={"rank": 4, "alpha": 32}, algorithm={"reference": reference}
    )
    model = load_model(config.model, config.learner, lora=config.lora, seed=0)
    trainer = Trainer(model, config, total_steps=9)
    numbers = [trainer.step(batch(), step).numbers for step in (1, 2, 3)]
    assert numbers[0]["dpo/margin"] == 0
    assert 0 < numbers[1]["dpo/margin"] < numbers[2]["dpo/margin"]


def test_an_own_reference_is_compared_with(folder: Path, tmp_path: Path) -> None:
    config = config_of(folder, {})
    other = policy_of(config)
    other.save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    config = config_of(folder, {}, algorithm={"reference": {"path": str(tmp_path)}})
    expected = plain_loss(config.sft, load_model(config.model, config.learner), other, pairs())
    trainer = Trainer(load_model(config.model, config.learner), config, total_steps=9)
    numbers = trainer.step(batch(), STEP).numbers
    assert numbers["actor/pg_loss"] == pytest.approx(float(expected.detach()), abs=1e-6)


def test_a_group_that_is_no_pair_is_refused(folder: Path) -> None:
    config = config_of(folder, {})
    trainer = Trainer(load_model(config.model, config.learner), config, total_steps=9)
    rng = np.random.default_rng(0)
    trainer.check_readable(pair(rng, 0))
    with pytest.raises(DataError, match=r"rewards \[0.0, 0.0\] is no pair of answers"):
        trainer.check_readable(pair(rng, 0, is_pair=False))


# -- the losses by hand ------------------------------------------------------------------------


def of(*rows: tuple[float, float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def test_weights_of_dpo_by_hand() -> None:
    # h = (−1 − −2) − (−3 − −3) = 1 and 0: −log σ(β h), the weight is ∓β σ(−β h) / 2
    pairs_ = Pairs(of((-2, -3), (-1, -1)), of((1, 1), (1, 1)))
    found = weigh(
        lambda scores: dpo_loss(sft_config(beta=0.5), scores, pairs_), of((-1, -3), (-1, -1))
    )
    loss = (math.log1p(math.exp(-0.5)) + math.log(2)) / 2
    assert found.loss == pytest.approx(loss)
    first = 0.5 / (1 + math.exp(0.5)) / 2
    torch.testing.assert_close(found.gradient_P2, of((-first, first), (-0.125, 0.125)))


def test_weights_of_a_reward_model_by_hand() -> None:
    config = sft_config(objective="reward", center_coef=0.1)
    found = weigh(lambda scores: reward_loss(config, scores), of((2, 1)))
    assert found.loss == pytest.approx(math.log1p(math.exp(-1)) + 0.1 * 9)
    pull = 1 / (1 + math.e)
    torch.testing.assert_close(found.gradient_P2, of((0.6 - pull, 0.6 + pull)))


def test_equal_scores_are_half_a_win() -> None:
    told = pair_numbers(of((1, 0), (1, 1), (0, 2), (3, 2)), "x")
    assert told == {
        "x/accuracy": 0.625,
        "x/margin": 0.0,
        "x/chosen_reward": 1.25,
        "x/rejected_reward": 1.25,
    }
