"""Several policies in one job: each is trained on its own roles, as if it were alone."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tinkermq.actors.policy.model_folder import load_tokenizer
from tinkermq.actors.policy.tiny_models import make_model, make_tokenizer, save_tiny_model
from tinkermq.actors.training.batch import assemble
from tinkermq.actors.training.policies import Policies, load_models
from tinkermq.actors.training.state import LearnerState
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.rollout import Group
from tinkermq.schemas.wire.errors import ConfigError

from tests.support.groups import random_group
from tests.support.models import make_tiny_model
from tests.support.saving import make_store, make_trainer


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models with different weights."""
    made = tmp_path_factory.mktemp("models")
    return make_tiny_model(made / "one"), save_tiny_model(made / "two", width=32, seed=5)


def config_of(main: Path, own: Path, advantage: str = "grpo") -> JobConfig:
    return JobConfig.model_validate(
        {
            "model": {"path": str(main)},
            "policies": {"buyer": str(own)},
            "env": {"game": "none"},
            "learner": {"lr": 1e-3, "schedule": "cosine"},
            "algorithm": {"advantage": advantage},
        }
    )


def make_policies(
    folders: tuple[Path, Path], advantage: str = "grpo", checkpoint: Path | None = None
) -> Policies:
    torch.set_num_threads(1)
    config = config_of(*folders, advantage)
    models = load_models(config, checkpoint)
    return Policies(config, models, total_steps=20, folder=checkpoint)


def by_role(seed: int) -> tuple[list[Group], dict[str, list[Group]]]:
    """Return two groups with two roles, and the part of each role."""
    rng = np.random.default_rng(seed)
    both: list[Group] = []
    parts: dict[str, list[Group]] = {"seller": [], "buyer": []}
    for number in range(2):
        group = random_group(rng, number)
        roles = [
            [item.model_copy(update={"role": role}) for item in group.sampled] for role in parts
        ]
        both.append(group.model_copy(update={"trajectories": roles[0] + roles[1]}))
        for role, items in zip(parts, roles, strict=True):
            parts[role].append(group.model_copy(update={"trajectories": items}))
    return both, parts


def bits(policies: Policies) -> list[bytes]:
    trainers = policies.trainers.values()
    critics = [trainer.critic.model for trainer in trainers if trainer.critic is not None]
    return [
        value.numpy().tobytes()
        for model in (*policies.models.values(), *critics)
        for value in model.state_dict().values()
    ]


def test_each_policy_is_trained_on_its_own_roles_alone(folders: tuple[Path, Path]) -> None:
    policies = make_policies(folders)
    alone = {"seller": make_trainer(folders[0]), "buyer": make_trainer(folders[1])}
    for step in range(1, 3):
        both, parts = by_role(step)
        numbers = policies.step(both, step).numbers
        for role, trainer in alone.items():
            trainer.step(assemble(parts[role]), step)
        assert {"actor/pg_loss", "policy/buyer/actor/pg_loss"} <= numbers.keys()
    for model, trainer in zip(policies.models.values(), alone.values(), strict=True):
        for name, value in trainer.model.state_dict().items():
            assert torch.equal(model.state_dict()[name], value), name


@pytest.mark.parametrize(("advantage", "measured"), [("grpo", "actor/lr"), ("gae", "critic/lr")])
def test_training_goes_on_bit_for_bit_from_a_checkpoint_of_several_policies(
    folders: tuple[Path, Path], tmp_path: Path, advantage: str, measured: str
) -> None:
    first = make_policies(folders, advantage)
    numbers = first.step(by_role(1)[0], 1).numbers
    assert {measured, f"policy/buyer/{measured}"} <= numbers.keys()
    tokenizer = load_tokenizer(str(folders[0]))
    saved = make_store(tmp_path).save(
        LearnerState(step=1), lambda made: first.save(made, tokenizer)
    )
    again = make_policies(folders, advantage, saved)
    assert bits(again) == bits(first)
    for policies in (first, again):
        policies.step(by_role(2)[0], 2)
    assert bits(again) == bits(first)


def test_a_policy_whose_roles_had_no_turn_stays_as_it_is(folders: tuple[Path, Path]) -> None:
    policies = make_policies(folders)
    before = [value.clone() for value in policies.models["buyer"].state_dict().values()]
    policies.step(by_role(1)[1]["seller"], 1)
    after = policies.models["buyer"].state_dict().values()
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_a_checkpoint_without_a_policy_for_the_role_is_refused(folders: tuple[Path, Path]) -> None:
    with pytest.raises(ConfigError, match=r"policies.buyer: checkpoint .* has no policy"):
        load_models(config_of(*folders), folders[0])


def test_policies_that_read_other_tokens_are_refused(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    make_model(width=32, layers=1, vocab_size=300).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"policies.buyer has a vocabulary of 300, the model one"):
        load_models(config_of(folders[0], tmp_path), None)
