"""Several ranks train as one process does, in real processes that speak by gloo."""

import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tinkermq.actors.learner.ranks.processes import ChildRanks
from tinkermq.actors.policy.model_folder import load_causal_lm, load_tokenizer
from tinkermq.actors.policy.policies import MAIN, prefix_of
from tinkermq.actors.training.functions.calls import OwnFunctions
from tinkermq.actors.training.parallel import device_of
from tinkermq.actors.training.policies import Policies, load_models
from tinkermq.actors.training.state import LearnerState
from tinkermq.actors.training.step import StepReport
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.rollout import Group
from tinkermq.schemas.wire.errors import ConfigError, EngineError
from torch import Tensor

from tests.actors.learner.test_images import _groups as groups_with_images
from tests.support.groups import random_group
from tests.support.images import make_vision_model
from tests.support.models import make_tiny_model
from tests.support.saving import make_store

pytestmark = pytest.mark.full

torch.set_num_threads(1)

TOLERANCE = 1e-5
Groups = Callable[[int], list[Group]]
HARD = {
    "algorithm": {
        "kl_coef": 0.05,
        "correction": "m2po",
        "loss_agg": "seq-mean-token-mean",
        "entropy_coef": 0.01,
    },
    "learner": {"num_minibatches": 2},
}
"""Asks for the policy before the update, a reference, and statistics over the whole batch."""


def config_of(folder: Path, ranks: int, **sections: dict[str, Any]) -> JobConfig:
    """Updates are nearly proportional to gradients, and each takes several micro-batches."""
    learner = {"lr": 0.1, "eps": 1.0, "grad_clip": 0.5, "ranks": ranks, "slots": ranks}
    rows = {"max_row_tokens": 96, "microbatch_tokens": 96}
    return JobConfig.model_validate(
        {
            "model": {"path": str(folder)},
            "env": {"game": "none"},
            "rollout": {"max_prompt_tokens": 16, "max_turn_tokens": 16, "max_response_tokens": 48},
            **sections,
            "learner": learner | rows | sections.get("learner", {}),
        }
    )


def batch(step: int) -> list[Group]:
    """Make uneven groups; every third batch is one episode, of which but one rank has a part."""
    rng = np.random.default_rng(step)
    if step % 3 == 0:
        return [random_group(rng, size=1, turns=1, version=step - 1)]
    return [random_group(rng, number, size=5, turns=4, version=step - 1) for number in range(3)]


class Trained:
    """Policies that are trained by some ranks."""

    def __init__(
        self, config: JobConfig, checkpoint: Path | None = None, groups: Groups = batch
    ) -> None:
        self.groups = groups
        self.ranks = ChildRanks.start(config)
        try:
            models = load_models(config, checkpoint)
            self.functions = OwnFunctions.of(config)
            self.policies = Policies.open(
                config,
                models,
                self.ranks,
                total_steps=20,
                functions=self.functions,
                folder=checkpoint,
            )
        except BaseException:
            self.ranks.close()
            raise

    def train(self, steps: range) -> list[StepReport]:
        """Train some steps, each on a batch of its own."""
        return [self.policies.step(self.groups(step), step) for step in steps]

    def save(self, run: Path, step: int) -> Path:
        """Write a checkpoint as a learner does; return its folder."""
        tokenizer = load_tokenizer(str(self.policies.trainers[MAIN].config.model.path))
        return make_store(run).save(
            LearnerState(step=step), lambda made: self.policies.save(made, tokenizer)
        )

    @property
    def weights(self) -> dict[str, Tensor]:
        """All weights, whole, of all policies."""
        return {
            f"{prefix_of(policy)}{name}": tensor
            for policy, tensors in self.policies.gather().items()
            for name, tensor in tensors.items()
        }


def trained(
    config: JobConfig,
    steps: range,
    checkpoint: Path | None = None,
    save_to: Path | None = None,
    groups: Groups = batch,
) -> tuple[list[StepReport], dict[str, Tensor]]:
    """Train some steps with ranks that end then."""
    made = Trained(config, checkpoint, groups)
    try:
        reports = made.train(steps)
        if save_to is not None:
            made.save(save_to, steps[-1])
        return reports, made.weights
    finally:
        made.ranks.close()
        made.functions.close()


def assert_same_weights(made: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert made.keys() == expected.keys()
    worst = max(float((made[name] - expected[name]).abs().max()) for name in expected)
    assert worst < TOLERANCE, worst


def assert_same_reports(made: list[StepReport], expected: list[StepReport]) -> None:
    for one, other in zip(made, expected, strict=True):
        assert one.numbers == pytest.approx(other.numbers, rel=2e-4, abs=TOLERANCE)


def test_three_ranks_go_on_from_what_two_saved(folder: Path, tmp_path: Path) -> None:
    trained(config_of(folder, 2), range(1, 4), save_to=tmp_path)
    checkpoint = tmp_path / "checkpoints" / "step_000003"
    reports, weights = trained(config_of(folder, 3), range(4, 7), checkpoint)
    expected, uninterrupted = trained(config_of(folder, 1), range(1, 7))
    assert_same_reports(reports, expected[3:])
    assert_same_weights(weights, uninterrupted)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_recomputed_activations_and_other_dtypes_train_alike(folder: Path, dtype: str) -> None:
    learner = {"gradient_checkpointing": True, "dtype": dtype}
    reports, weights = trained(config_of(folder, 2, learner=learner), range(1, 3))
    expected, alone = trained(config_of(folder, 1, learner=learner), range(1, 3))
    tolerance = TOLERANCE if dtype == "float32" else 0.02
    for name, value in alone.items():
        assert torch.allclose(weights[name], value, atol=tolerance), name
    for one, other in zip(reports, expected, strict=True):
        norm = pytest.approx(other.numbers["actor/grad_norm"], rel=10 * tolerance)
        assert one.numbers["actor/grad_norm"] == norm


OWN = {
    "own_advantage": "examples.own_algorithms:best_of_group",
    "own_loss": "examples.own_algorithms:clipped",
    "own_correction": "examples.own_algorithms:square_root",
    "own_mask": "examples.own_algorithms:certain",
}


def test_functions_of_ones_own_train_two_ranks_as_they_do_one(folder: Path) -> None:
    sections = {"algorithm": OWN, "learner": {"gradient_checkpointing": True}}
    reports, weights = trained(config_of(folder, 2, **sections), range(1, 3))
    expected, alone = trained(config_of(folder, 1, **sections), range(1, 3))
    assert_same_reports(reports, expected)
    assert_same_weights(weights, alone)


def test_a_function_that_fails_on_a_rank_is_told_by_its_name_and_not_tried_again(
    folder: Path,
) -> None:
    wrong = {"own_loss": "tests.actors.learner.test_own_functions:scalar"}
    with pytest.raises(ConfigError, match=r"own_loss=.*:scalar returned losses of shape"):
        trained(config_of(folder, 2, algorithm=wrong), range(1, 2))


def test_ranks_without_slots_are_refused(folder: Path) -> None:
    for learner, said in (
        ({"slots": 1}, r"learner.ranks \(2\) is over learner.slots \(1\)"),
        ({"ranks": 65}, r"less than or equal to 64"),
    ):
        with pytest.raises(ValueError, match=said):
            config_of(folder, 2, learner=learner)
    assert config_of(folder, 1, learner={"slots": 2}).learner.ranks == 1


def test_what_a_machine_cannot_do_is_refused_with_the_reason(folder: Path) -> None:
    offloaded = config_of(folder, 1, learner={"cpu_offload": True}).learner
    with pytest.raises(ConfigError, match=r"learner.cpu_offload=true and this learner has no GPU"):
        device_of(0, 1, offloaded, num_gpus=0)
    assert device_of(0, 1, offloaded, num_gpus=1) == torch.device("cuda", 0)
    two = config_of(folder, 2).learner
    with pytest.raises(ConfigError, match=r"learner.ranks=2 and this learner has 1 GPUs"):
        device_of(1, 2, two, num_gpus=1)
    assert device_of(1, 2, two, num_gpus=2) == torch.device("cuda", 1)
    assert device_of(1, 2, two, num_gpus=0) == torch.device("cpu")


KINDS: dict[str, dict[str, Any]] = {
    "adapter": {"lora": {"rank": 4}, "algorithm": {"kl_coef": 0.05}},
    "critic": {"algorithm": {"advantage": "gae"}, "critic": {"lr": 0.1}},
    "policies": {"policies": {"bob": ""}},
    "images": {
        "env": {"game": "geo3k"},
        "algorithm": {"kl_coef": 0.05},
        "learner": {"gradient_checkpointing": True},
    },
    "images, critic": {
        "env": {"game": "geo3k"},
        "algorithm": {"advantage": "gae"},
        "critic": {"lr": 0.1},
    },
    "images, adapter": {"env": {"game": "geo3k"}, "lora": {"rank": 4}},
}


def _played(group: Group) -> Group:
    """Let another role play what is done in a group, too, but backwards."""
    others = [
        item.model_copy(update={"role": "bob", "rewards": item.rewards[::-1].copy()})
        for item in reversed(group.trajectories)
    ]
    return group.model_copy(update={"trajectories": [*group.trajectories, *others]})


def groups_of(kind: str, step: int) -> list[Group]:
    """Make the batch of a step; where there are images one rank has none now and then."""
    if "images" in kind:
        seeing = groups_with_images()
        return [seeing[step % 3], seeing[3]] if step % 2 else [*seeing]
    groups = batch(step)
    if kind == "policies":
        groups = [_played(group) for group in groups]
    return groups


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_one_process_trains_two_ranks_do_and_each_goes_on_from_the_other(
    folder: Path, tmp_path: Path, kind: str
) -> None:
    if "images" in kind:
        folder = make_vision_model(tmp_path / "seeing", "qwen2_5_vl")
    sections = {**KINDS[kind]}
    if kind == "policies":
        sections["policies"] = {"bob": str(make_tiny_model(tmp_path / "bob"))}
    one, two = (config_of(folder, ranks, **sections) for ranks in (1, 2))
    groups = partial(groups_of, kind)
    begun = {
        ranks: trained(config, range(1, 3), save_to=tmp_path / str(ranks), groups=groups)
        for ranks, config in ((1, one), (2, two))
    }
    assert_same_reports(begun[2][0], begun[1][0])
    assert_same_weights(begun[2][1], begun[1][1])
    saved = {ranks: tmp_path / str(ranks) / "checkpoints" / "step_000002" for ranks in begun}
    expected, weights = trained(one, range(1, 5), groups=groups)
    for config, checkpoint in ((one, saved[2]), (two, saved[1])):
        reports, made = trained(config, range(3, 5), checkpoint, groups=groups)
        assert_same_reports(reports, expected[2:])
        assert_same_weights(made, weights)


def test_ranks_send_and_save_an_adapter_alone_and_compare_with_the_one_they_began_with(
    folder: Path, tmp_path: Path
) -> None:
    _, weights = trained(
        config_of(folder, 2, lora={"rank": 4}), range(1, 3), save_to=tmp_path / "first"
    )
    adapter = tmp_path / "first" / "checkpoints" / "step_000002"
    assert all(".lora_" in name for name in weights)
    assert not (adapter / "model.safetensors").exists()
    assert load_file(adapter / "adapter_model.safetensors").keys() == weights.keys()
    ways = {"lora": {"rank": 4}, "algorithm": {"kl_coef": 0.2}}
    reports, made = trained(config_of(adapter, 2, **ways), range(3, 5))
    expected, alone = trained(config_of(adapter, 1, **ways), range(3, 5))
    assert_same_reports(reports, expected)
    assert_same_weights(made, alone)


# A process has one group of ranks at a time: that of the fixture comes last.


@pytest.fixture(scope="module")
def begun(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that one process wrote after a step."""
    run = tmp_path_factory.mktemp("run")
    trained(config_of(folder, 1, **HARD), range(1, 2), save_to=run)
    return run / "checkpoints" / "step_000001"


@pytest.fixture(scope="module")
def two(folder: Path, begun: Path) -> Iterator[Trained]:
    """Two ranks that go on from it."""
    made = Trained(config_of(folder, 2, **HARD), begun)
    yield made
    made.ranks.close()


def test_two_ranks_go_on_from_one_process_as_it_would_and_it_goes_on_from_them(
    folder: Path, begun: Path, two: Trained, tmp_path: Path
) -> None:
    alone = config_of(folder, 1, **HARD)
    expected, weights = trained(alone, range(2, 5), begun)
    reports = two.train(range(2, 5))
    assert_same_reports(reports, expected)
    assert all(report.numbers["actor/grad_norm"] > 0 for report in reports)
    assert_same_weights(two.weights, weights)

    checkpoint = two.save(tmp_path, 4)
    saved = load_causal_lm(str(checkpoint), dtype=torch.float32).state_dict()
    assert_same_weights({name: saved[name] for name in weights}, two.weights)
    assert two.policies.snapshot(torch.bfloat16).keys() == weights.keys()
    _, uninterrupted = trained(alone, range(2, 6), begun)
    _, resumed = trained(alone, range(5, 6), checkpoint)
    assert_same_weights(resumed, uninterrupted)


def test_a_rank_that_is_killed_fails_the_step_with_its_number_and_how_it_ended(
    two: Trained,
) -> None:
    os.kill(two.ranks.pids[0], signal.SIGKILL)
    with pytest.raises(EngineError, match=r"rank 1 of the learner .* ended with code -9"):
        two.train(range(9, 10))
