"""Several ranks train as one process does, in real processes that speak by gloo."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tinkermq.actors.learner.checkpoint import LearnerState
from tinkermq.actors.learner.parallel import device_of
from tinkermq.actors.learner.policies import Policies, load_models
from tinkermq.actors.learner.ranks import Ranks
from tinkermq.actors.learner.step import StepReport
from tinkermq.actors.model_folder import load_causal_lm, load_tokenizer
from tinkermq.actors.policies import MAIN
from tinkermq.actors.tiny_vision_model import save_tiny_vision_model
from tinkermq.schemas.config import JobConfig
from tinkermq.schemas.errors import ConfigError, EngineError
from tinkermq.schemas.rollout import Group
from torch import Tensor

from tests.groups import random_group
from tests.models import make_tiny_model
from tests.saving import make_store

torch.set_num_threads(1)

TOLERANCE = 1e-5
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder."""
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def config_of(folder: Path, ranks: int, **sections: dict[str, Any]) -> JobConfig:
    """Updates are nearly proportional to gradients, and each takes several micro-batches."""
    learner = {"lr": 0.1, "eps": 1.0, "grad_clip": 0.5, "ranks": ranks, "slots": ranks}
    rows = {"row_tokens": 96, "microbatch_tokens": 96}
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

    def __init__(self, config: JobConfig, checkpoint: Path | None = None) -> None:
        self.ranks = Ranks.start(config)
        try:
            models = load_models(config, checkpoint)
            self.policies = Policies.open(
                config, models, self.ranks, total_steps=20, folder=checkpoint
            )
        except BaseException:
            self.ranks.close()
            raise

    def train(self, steps: range) -> list[StepReport]:
        """Train some steps, each on a batch of its own."""
        return [self.policies.step(batch(step), step) for step in steps]

    def save(self, run: Path, step: int) -> Path:
        """Write a checkpoint as a learner does; return its folder."""
        tokenizer = load_tokenizer(str(self.policies.trainers[MAIN].config.model.path))
        return make_store(run).save(
            LearnerState(step=step), lambda made: self.policies.save(made, tokenizer)
        )

    @property
    def weights(self) -> dict[str, Tensor]:
        """All weights, whole."""
        return self.policies.gather()[MAIN]


def trained(
    config: JobConfig, steps: range, checkpoint: Path | None = None, save_to: Path | None = None
) -> tuple[list[StepReport], dict[str, Tensor]]:
    """Train some steps with ranks that end then."""
    made = Trained(config, checkpoint)
    try:
        reports = made.train(steps)
        if save_to is not None:
            made.save(save_to, steps[-1])
        return reports, made.weights
    finally:
        made.ranks.close()


def assert_same_weights(made: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert made.keys() == expected.keys()
    worst = max(float((made[name] - expected[name]).abs().max()) for name in expected)
    assert worst < TOLERANCE, worst


def assert_same_reports(made: list[StepReport], expected: list[StepReport]) -> None:
    for one, other in zip(made, expected, strict=True):
        assert one.numbers == pytest.approx(other.numbers, rel=2e-4, abs=TOLERANCE)


@pytest.mark.long
def test_three_ranks_go_on_from_what_two_saved(folder: Path, tmp_path: Path) -> None:
    trained(config_of(folder, 2), range(1, 4), save_to=tmp_path)
    checkpoint = tmp_path / "checkpoints" / "step_000003"
    reports, weights = trained(config_of(folder, 3), range(4, 7), checkpoint)
    expected, uninterrupted = trained(config_of(folder, 1), range(1, 7))
    assert_same_reports(reports, expected[3:])
    assert_same_weights(weights, uninterrupted)


@pytest.mark.long
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


def test_what_is_trained_whole_is_refused_with_ranks_and_says_what_to_do(
    folder: Path,
) -> None:
    for sections, said in (
        ({"algorithm": {"advantage": "gae"}}, r"critic .* is not built: set learner.ranks=1"),
        ({"lora": {"rank": 4}}, r"lora is not built: .* or train all weights"),
        ({"policies": {"bob": "x"}}, r"several policies is not built: .* or one policy"),
        ({"learner": {"slots": 1}}, r"ranks=2 needs a slot for each rank .* learner.slots=2"),
        ({"learner": {"ranks": 65}}, r"less than or equal to 64"),
    ):
        with pytest.raises(ValueError, match=said):
            config_of(folder, 2, **sections)
    assert config_of(folder, 1, learner={"slots": 2}).learner.ranks == 1


def test_what_a_machine_cannot_do_is_refused_with_the_reason(folder: Path) -> None:
    offloaded = config_of(folder, 1, learner={"cpu_offload": True}).learner
    with pytest.raises(ConfigError, match=r"learner.cpu_offload=true and this learner has no GPU"):
        device_of(0, offloaded, num_gpus=0)
    assert device_of(0, offloaded, num_gpus=1) == torch.device("cuda", 0)
    two = config_of(folder, 2).learner
    with pytest.raises(ConfigError, match=r"learner.ranks=2 and this learner has 1 GPUs"):
        device_of(1, two, num_gpus=1)
    assert device_of(1, two, num_gpus=2) == torch.device("cuda", 1)
    assert device_of(1, two, num_gpus=0) == torch.device("cpu")


@pytest.mark.long
def test_a_model_that_sees_images_is_refused_with_ranks(tmp_path: Path) -> None:
    seeing = save_tiny_vision_model(tmp_path / "seeing")
    with pytest.raises(ConfigError, match=r"sees images, .* by one process"):
        Trained(config_of(seeing, 2))


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
