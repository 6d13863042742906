"""What a step tells of the policy covers all generated tokens, whatever else is configured."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tinkermq.actors.policy.lora import policy_tensors
from tinkermq.actors.training.batch import TrainingBatch, assemble
from tinkermq.actors.training.losses import kl_per_token
from tinkermq.actors.training.model import load_model
from tinkermq.actors.training.step import Trainer
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.rollout import Group

from tests.actors.learner.plain_step import plain_logprobs
from tests.support.groups import random_group
from tests.support.models import changed, loaded

torch.set_num_threads(1)

STEP = 4


def _config(folder: Path, **sections: dict[str, Any]) -> JobConfig:
    learner = {"lr": 1e-2} | sections.pop("learner", {})
    rollout = {"max_prompt_tokens": 16, "max_turn_tokens": 16, "max_response_tokens": 48}
    return JobConfig.model_validate(
        {
            "model": {"path": str(folder)},
            "env": {"game": "none"},
            "rollout": rollout,
            "learner": learner,
            **sections,
        }
    )


def _groups() -> list[Group]:
    """Five groups; all of two have equal rewards, one was cut as a whole."""
    rng = np.random.default_rng(2)
    groups = [random_group(rng, number, turns=2, version=STEP - 1) for number in range(5)]
    for number in (1, 3):
        for item in groups[number].trajectories:
            item.rewards[:] = 1.0 / len(item.rewards)
    cut = [item.model_copy(update={"finish": "length"}) for item in groups[4].trajectories]
    groups[4] = groups[4].model_copy(update={"trajectories": cut})
    return groups


def _numbers(folder: Path, **sections: dict[str, Any]) -> dict[str, float]:
    config = _config(folder, **sections)
    initial = load_model(config.model, config.learner)
    policy = loaded(initial, changed(initial, seed=3, scale=0.1))
    return Trainer(policy, config, total_steps=9).step(assemble(_groups()), STEP).numbers


def _of_all_tokens(numbers: dict[str, float], *more: str) -> dict[str, float]:
    return {
        name: value
        for name, value in numbers.items()
        if name.startswith("staleness/") or name in ("actor/entropy", *more)
    }


def test_entropy_and_mismatch_are_those_of_all_generated_tokens(folder: Path) -> None:
    numbers, groups = _numbers(folder), _groups()
    batch = assemble(groups)
    config = _config(folder)
    initial = load_model(config.model, config.learner)
    policy = loaded(initial, changed(initial, seed=3, scale=0.1))
    with torch.no_grad():
        logprobs, entropies = plain_logprobs(policy, [t for g in groups for t in g.sampled], 1.0)
    assert numbers["actor/entropy"] == pytest.approx(float(torch.cat(entropies).mean()), rel=1e-5)
    fresh_N = batch.versions_N == STEP - 1
    wanted = (torch.cat(logprobs) - batch.behaviour_N)[fresh_N].abs().mean()
    assert numbers["staleness/num_tokens/lag_0"] == int(fresh_N.sum())
    assert numbers["staleness/abs_log_ratio/lag_0"] == pytest.approx(float(wanted), rel=1e-5)


VARIANTS: list[dict[str, Any]] = [
    {"algorithm": {"filter_equal_rewards": True}},
    {"algorithm": {"overlong_filter": True}},
    {"algorithm": {"advantage": "reinforce_pp"}},
    {"algorithm": {"kl_coef": 0.1}},
    {"algorithm": {"kl_coef": 0.1, "kl_in": "reward"}},
    {"algorithm": {"entropy_coef": 0.1}},
    {"algorithm": {"loss": "dppo"}},
    {"algorithm": {"correction": "m2po"}},
    {"algorithm": {"advantage": "gae"}},
    {"learner": {"num_minibatches": 3}},
    {"learner": {"max_row_tokens": 64, "microbatch_tokens": 64}},
    {"learner": {"share_prompts": False}},
]


@pytest.mark.parametrize("sections", VARIANTS, ids=str)
def test_they_do_not_change_with_other_keys(folder: Path, sections: dict[str, Any]) -> None:
    wanted = _of_all_tokens(_numbers(folder))
    assert len(wanted) > 10
    assert _of_all_tokens(_numbers(folder, **sections)) == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("learner", [{"max_row_tokens": 64, "microbatch_tokens": 64}], ids=str)
def test_kl_and_clipped_share_of_the_updates_cover_all_tokens_too(
    folder: Path, learner: dict[str, Any]
) -> None:
    some = {"num_minibatches": 3, "lr": 1e-3}
    names = ("actor/ppo_kl", "actor/pg_clipfrac", "actor/pg_clipfrac_lower")
    wanted = _of_all_tokens(_numbers(folder, learner=some), *names)
    assert wanted["actor/ppo_kl"] != 0
    found = _of_all_tokens(_numbers(folder, learner=some | learner), *names)
    assert found == pytest.approx(wanted, rel=1e-3, abs=1e-5)


def _reference_kl(folder: Path, name: str) -> float:
    config = _config(folder)
    initial = load_model(config.model, config.learner)
    policy = loaded(initial, changed(initial, seed=3, scale=0.1))
    items = [item for group in _groups() for item in group.sampled]
    with torch.no_grad():
        now, frozen = (torch.cat(plain_logprobs(m, items, 1.0)[0]) for m in (policy, initial))
    return float(kl_per_token(name, now, frozen).mean())


@pytest.mark.parametrize("kl_in", ["loss", "reward"])
@pytest.mark.parametrize("num_minibatches", [1, 2])
def test_the_kl_to_the_reference_is_told_wherever_it_enters(
    folder: Path, kl_in: str, num_minibatches: int
) -> None:
    algorithm = {"kl_coef": 0.1, "kl_in": kl_in, "kl_estimator": "k3"}
    learner = {"num_minibatches": num_minibatches}
    numbers = _numbers(folder, algorithm=algorithm, learner=learner)
    wanted = pytest.approx(_reference_kl(folder, "k3"), rel=1e-4)
    assert numbers["actor/reference_kl"] == wanted


def _adapted(folder: Path, dropout: float) -> tuple[Trainer, TrainingBatch]:
    """A trainer of an adapter that changes what is said, and what exactly it says."""
    config = _config(folder, lora={"rank": 4, "dropout": dropout})
    model = load_model(config.model, config.learner, lora=config.lora)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for tensor in policy_tensors(model).values():
            tensor.copy_(0.3 * torch.randn(tensor.shape, generator=generator))
        batch = assemble(_groups())
        items = [item for group in _groups() for item in group.sampled]
        batch.behaviour_N[:] = torch.cat(plain_logprobs(model, items, 1.0)[0])
    batch.versions_N[:] = STEP - 1
    return Trainer(model, config, total_steps=9), batch


def test_dropout_of_an_adapter_is_no_mismatch(folder: Path) -> None:
    for dropout in (0.0, 0.5):
        trainer, batch = _adapted(folder, dropout)
        numbers = trainer.step(batch, STEP).numbers
        assert numbers["staleness/abs_log_ratio/lag_0"] < 1e-5
        assert numbers["staleness/max_ratio/lag_0"] == pytest.approx(1.0, abs=1e-4)
        if not dropout:
            entropy = numbers["actor/entropy"]
        assert numbers["actor/entropy"] == pytest.approx(entropy, rel=1e-5)
    assert abs(numbers["actor/ppo_kl"]) > 1e-4, "the update computed with it"


def test_numbers_are_finite_and_floats(folder: Path) -> None:
    for name, value in _numbers(folder, algorithm={"advantage": "gae", "kl_coef": 0.1}).items():
        assert isinstance(value, float), name
        assert math.isfinite(value), name
