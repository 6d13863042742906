"""What holds a policy back: which reference a KL is taken to, and an entropy that is held."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tinkermq.actors.policy.model_folder import load_tokenizer
from tinkermq.actors.training.batch import TrainingBatch, assemble
from tinkermq.actors.training.model import load_model
from tinkermq.actors.training.step import Trainer
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.wire.errors import ConfigError

from tests.actors.learner.plain_step import plain_logprobs
from tests.support.groups import random_group
from tests.support.models import changed, gradients_of, loaded, make_tiny_model

torch.set_num_threads(1)
STEP = 3


@pytest.fixture(scope="module")
def other(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model that has moved away from it."""
    place = tmp_path_factory.mktemp("other") / "model"
    config = _config(folder)
    model = load_model(config.model, config.learner)
    loaded(model, changed(model, seed=5, scale=0.1)).save_pretrained(place)
    load_tokenizer(str(folder)).save_pretrained(place)
    return place


def _config(folder: Path, **sections: Any) -> JobConfig:
    return JobConfig.model_validate(
        {
            "model": {"path": str(folder)},
            "env": {"game": "none"},
            "learner": {"lr": 1e-2} | sections.pop("learner", {}),
            "rollout": {"max_prompt_tokens": 16, "max_turn_tokens": 16, "max_response_tokens": 48},
            **sections,
        }
    )


def _trainer(folder: Path, **sections: Any) -> Trainer:
    config = _config(folder, **sections)
    model = load_model(config.model, config.learner, lora=config.lora, seed=0)
    return Trainer(model, config, total_steps=10)


def _batch(seed: int = 0) -> TrainingBatch:
    rng = np.random.default_rng(seed)
    return assemble([random_group(rng, number, version=STEP - 1) for number in range(2)])


def _saved(trainer: Trainer, folder: Path, into: Path) -> Path:
    trainer.save(into, load_tokenizer(str(folder)))
    return into


def _kl(trainer: Trainer, step: int = STEP) -> float:
    return trainer.step(_batch(), step).numbers["actor/reference_kl"]


def test_a_reference_of_ones_own_is_the_one_that_is_measured(folder: Path, other: Path) -> None:
    algorithm = {"kl_coef": 0.1, "kl_estimator": "k1+"}
    assert _kl(_trainer(folder, algorithm=algorithm)) == pytest.approx(0, abs=1e-6)
    trainer = _trainer(folder, algorithm=algorithm | {"reference": {"path": str(other)}})
    rng = np.random.default_rng(0)
    items = [item for n in range(2) for item in random_group(rng, n, version=STEP - 1).sampled]
    config = _config(folder)
    own, theirs = (load_model(config.model, config.learner, one) for one in (folder, other))
    with torch.no_grad():
        mine = torch.cat(plain_logprobs(own, items, 1.0)[0])
        gap = mine - torch.cat(plain_logprobs(theirs, items, 1.0)[0])
    assert _kl(trainer) == pytest.approx(float(gap.mean()), rel=1e-4)


@pytest.mark.parametrize("lora", [{}, {"rank": 4, "alpha": 32}], ids=["whole", "adapter"])
def test_a_reference_that_is_reset_becomes_the_policy(folder: Path, lora: dict[str, Any]) -> None:
    algorithm = {"kl_coef": 0.1, "reference": {"reset_every": 2}}
    trainer = _trainer(folder, algorithm=algorithm, lora=lora)
    found = [_kl(trainer, step) for step in range(1, 6)]
    # Measured before the update: after steps 2 and 4 policy and reference are one.
    assert [one < 1e-9 for one in found] == [True, False, True, False, True]


@pytest.mark.parametrize("lora", [{}, {"rank": 4, "alpha": 32}], ids=["whole", "adapter"])
def test_a_reference_that_follows_is_nearer_and_goes_on_to_the_bit(
    folder: Path, lora: dict[str, Any], tmp_path: Path
) -> None:
    def trainer(ema: float | None, model: Path = folder) -> Trainer:
        algorithm = {"kl_coef": 0.1, "reference": {"ema": ema} if ema else {}}
        config = _config(folder, algorithm=algorithm, lora=lora)
        start = None if model == folder else model
        loaded_model = load_model(config.model, config.learner, start, lora=config.lora, seed=0)
        return Trainer(loaded_model, config, total_steps=10)

    still, following = trainer(None), trainer(0.2)
    kls = [[_kl(one, step) for step in range(1, 4)] for one in (still, following)]
    assert 0 < kls[1][2] < kls[0][2] / 2
    checkpoint = _saved(following, folder, tmp_path / "checkpoint")
    again = trainer(0.2, checkpoint)
    again.restore(checkpoint)
    for step in (4, 5):
        assert _kl(again, step) == _kl(following, step)
    for name, tensor in following.weights().items():
        assert torch.equal(tensor, again.weights()[name]), name


def test_a_reference_of_another_shape_cannot_follow(folder: Path, tmp_path: Path) -> None:
    smaller = make_tiny_model(tmp_path / "smaller", heads=2)
    algorithm = {"kl_coef": 0.1, "reference": {"path": str(smaller), "ema": 0.5}}
    with pytest.raises(ConfigError, match="weights have other shapes") as raised:
        _trainer(folder, algorithm=algorithm)
    assert "take a model of the same kind" in raised.value.hint


def test_the_kl_is_weighed_by_how_far_the_policy_is_from_what_drew_the_token(
    folder: Path, other: Path
) -> None:
    # The advantages are left out, so that the KL alone has a gradient.
    algorithm = {
        "kl_coef": 0.5,
        "kl_importance": True,
        "correction": "none",
        "reference": {"path": str(other)},
    }
    trainer = _trainer(
        folder, algorithm=algorithm, learner={"lr": 1e-9, "eps": 1.0, "grad_clip": 1e9}
    )
    rng = np.random.default_rng(0)
    groups = [random_group(rng, n, version=STEP - 1) for n in range(2)]
    for group in groups:
        for item in group.trajectories:
            item.rewards[:] = 0.0
    batch = assemble(groups)
    batch.behaviour_N[:] = -5.5
    numbers = trainer.step(batch, STEP).numbers
    config = _config(folder)
    own, theirs = (load_model(config.model, config.learner, one) for one in (folder, other))
    items = [item for group in groups for item in group.sampled]
    now = torch.cat(plain_logprobs(own, items, 1.0)[0])
    gap = torch.cat(plain_logprobs(theirs, items, 1.0)[0]).detach() - now
    kl = ((now + 5.5).exp() * (gap.exp() - 1 - gap)).mean()
    (0.5 * kl).backward()
    assert numbers["actor/kl_loss"] == pytest.approx(float(kl.detach()), rel=1e-5)
    torch.testing.assert_close(gradients_of(trainer.model), gradients_of(own), rtol=1e-4, atol=1e-5)


def test_the_bonus_rises_below_the_target_falls_above_and_goes_on_where_it_was(
    folder: Path, tmp_path: Path
) -> None:
    def coefs(target: float, steps: range, trainer: Trainer) -> list[float]:
        return [
            trainer.step(_batch(), step).numbers.get("actor/entropy_coef", 0.0) for step in steps
        ]

    # A fresh model's entropy is about that of all its tokens, ln 264 = 5.6.
    keys = {"entropy_coef_step": 0.25, "entropy_coef": 0.5}
    above = {"algorithm": {"entropy_target": 9.0, **keys}}
    rising = _trainer(folder, **above)
    assert coefs(9.0, range(1, 5), rising) == [0.5, 0.75, 1.0, 1.0]
    checkpoint = _saved(rising, folder, tmp_path / "checkpoint")
    again = _trainer(folder, **above)
    again.restore(checkpoint)
    assert coefs(9.0, range(5, 6), again) == [1.0]
    below = _trainer(folder, algorithm={"entropy_target": 0.5, **keys})
    assert coefs(0.5, range(1, 4), below) == [0.5, 0.0, 0.0]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"algorithm": {"reference": {"ema": 0.9}}},
            "reference has no effect while algorithm.kl_coef is 0",
        ),
        ({"algorithm": {"kl_importance": True}}, "kl_importance has no effect while kl_coef"),
        (
            {"algorithm": {"kl_coef": 1, "kl_in": "reward", "kl_importance": True}},
            "kl_importance weighs the KL of the loss",
        ),
        (
            {"algorithm": {"kl_coef": 1, "reference": {"ema": 0.9, "reset_every": 5}}},
            "ema and reset_every",
        ),
        ({"algorithm": {"entropy_coef_step": 0.1}}, "entropy_coef_step has no effect while"),
        ({"algorithm": {"turn_gamma": 0.9}}, "turn_gamma has no effect while advantage is 'grpo'"),
        (
            {"algorithm": {"advantage": "gae", "sample": "turn", "turn_lambda": 0.9}},
            "algorithm.turn_lambda compares turns of an episode",
        ),
        (
            {"algorithm": {"advantage": "gae", "gae_lambda_length": 0.1, "turn_lambda": 0.9}},
            "cannot be used with algorithm.gae_lambda_length",
        ),
        (
            {
                "algorithm": {"advantage": "gae", "sample": "turn"},
                "critic": {"bootstrap_cut": True},
            },
            "critic.bootstrap_cut is for episodes that are one sample each",
        ),
    ],
)
def test_keys_that_would_have_no_effect_are_refused(
    folder: Path, sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        _config(folder, **sections)
