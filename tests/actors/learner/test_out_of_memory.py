"""A step that does not fit is trained once, in smaller micro-batches, or fails with the remedy."""

import copy
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tinkermq.actors.learner.memory import PassTokens, smaller_passes_after, with_chosen_settings
from tinkermq.actors.tinker.service import recomputes_on
from tinkermq.actors.training.batch import TrainingBatch, assemble
from tinkermq.actors.training.model import load_model
from tinkermq.actors.training.state import LearnerState
from tinkermq.actors.training.step import StepReport, Trainer
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.plan.cards import find_card
from tinkermq.schemas.task import BatchRecord
from tinkermq.schemas.wire.errors import OutOfMemoryError
from torch import nn
from transformers import PreTrainedModel

from tests.actors.learner.test_ranks import Trained, config_of
from tests.actors.learner.test_ranks import batch as groups_of
from tests.support import small_card
from tests.support.hub import served_hub

torch.set_num_threads(1)

EVERYTHING = {
    "algorithm": {"advantage": "gae", "kl_coef": 0.05, "entropy_coef": 0.01},
    "learner": {"num_minibatches": 2},
}
"""Scores by the policy before the update and by a reference, and a critic."""


def _config(folder: Path, microbatch_tokens: int = 256, **sections: Any) -> JobConfig:
    rows = {"max_row_tokens": 96, "microbatch_tokens": microbatch_tokens}
    learner = sections.pop("learner", {}) | rows
    return config_of(folder, 1, **sections, learner=learner)


def _batch() -> TrainingBatch:
    return assemble(groups_of(1))


@contextmanager
def full_card(model: nn.Module, most_tokens: int, times: int = 1 << 30) -> Iterator[list[int]]:
    """Let the last layer raise what CUDA does for more tokens; yield those of failed passes."""
    failed: list[int] = []

    def refuse(_module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        num_tokens = inputs[0].shape[:2].numel()
        if num_tokens > most_tokens and len(failed) < times:
            failed.append(num_tokens)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    hook = model.get_decoder().layers[-1].register_forward_pre_hook(refuse)  # pyright: ignore
    try:
        yield failed
    finally:
        hook.remove()


def _trained(
    model: PreTrainedModel, config: JobConfig, most_tokens: int | None = None, steps: int = 1
) -> tuple[list[StepReport], dict[str, torch.Tensor], Trainer]:
    trainer = Trainer(copy.deepcopy(model), config, total_steps=9)
    with full_card(trainer.model, most_tokens or 1 << 30):
        reports = [trainer.step(_batch(), step + 1) for step in range(steps)]
    return reports, trainer.weights(), trainer


@pytest.mark.parametrize("sections", [{}, EVERYTHING], ids=["update", "everything"])
def test_a_step_that_does_not_fit_is_trained_once_in_smaller_micro_batches(
    folder: Path, sections: dict[str, Any]
) -> None:
    config = _config(folder, **sections)
    model = load_model(config.model, config.learner)
    whole, expected, _ = _trained(model, config, steps=2)
    reports, weights, trainer = _trained(model, config, most_tokens=130, steps=2)
    assert trainer.microbatch_tokens == 128
    for report, other in zip(reports, whole, strict=True):
        assert report.numbers == pytest.approx(other.numbers, rel=2e-4, abs=1e-5)
    worst = max(float((weights[name] - expected[name]).abs().max()) for name in expected)
    assert worst < 1e-5


def test_the_repeated_step_is_to_the_bit_one_that_began_in_smaller_micro_batches(
    folder: Path,
) -> None:
    small, large = _config(folder, 128), _config(folder, 256)
    model = load_model(large.model, large.learner)
    _, expected, _ = _trained(model, small)
    _, weights, _ = _trained(model, large, most_tokens=130)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_a_failure_in_the_middle_of_a_step_leaves_no_gradient_behind(folder: Path) -> None:
    config, small = _config(folder, 256), _config(folder, 128)
    model = load_model(config.model, config.learner)
    _, expected, _ = _trained(model, small)
    trainer = Trainer(copy.deepcopy(model), config, total_steps=9)
    packs = trainer._packer.pack(_batch(), torch.ones(15, dtype=torch.bool))  # pyright: ignore
    sizes = [micro.input_ids_BT.numel() for micro in packs]
    assert len(sizes) > 1
    passes: list[int] = []

    def fail_at_the_second(_module: nn.Module, _inputs: Any) -> None:
        passes.append(1)
        if len(passes) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")

    hook = trainer.model.get_decoder().register_forward_pre_hook(fail_at_the_second)  # pyright: ignore
    trainer.step(_batch(), 1)
    hook.remove()
    assert len(passes) > 2
    assert all(torch.equal(trainer.weights()[name], expected[name]) for name in expected)


def test_a_step_that_does_not_fit_twice_fails_with_the_largest_term_and_its_key(
    folder: Path,
) -> None:
    config = _config(folder)
    model = load_model(config.model, config.learner)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer = Trainer(model, config, total_steps=9)
    with full_card(model, 64) as failed, pytest.raises(OutOfMemoryError) as caught:
        trainer.step(_batch(), 1)
    assert len(failed) == 2
    assert caught.value.microbatch_tokens == 128
    assert "out of memory in micro-batches of 128 tokens; " in caught.value.message
    assert "take most, about" in caught.value.message
    assert "learner." in caught.value.hint
    assert not caught.value.may_pass
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_later_step_may_be_repeated_again(folder: Path) -> None:
    config = _config(folder)
    model = load_model(config.model, config.learner)
    trainer = Trainer(model, config, total_steps=9)
    with full_card(model, 130):
        trainer.step(_batch(), 1)
    assert trainer.microbatch_tokens == 128
    with full_card(model, 64):
        trainer.step(_batch(), 2)
    assert trainer.microbatch_tokens == 64


def test_micro_batches_are_never_smaller_than_the_longest_episode(folder: Path) -> None:
    config = _config(folder, 96)
    model = load_model(config.model, config.learner)
    trainer = Trainer(model, config, total_steps=9)
    with full_card(model, 32) as failed, pytest.raises(OutOfMemoryError):
        trainer.step(_batch(), 1)
    assert len(failed) == 2
    assert trainer.microbatch_tokens == 64


# -- ranks -----------------------------------------------------------------------------------------


@pytest.mark.full
def test_ranks_of_which_one_is_out_of_memory_end_and_say_which_step_and_passes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(small_card.MOST_TOKENS, "8")
    monkeypatch.setenv(small_card.ONLY_RANK, "1")
    loss = "tests.support.small_card:small_card_loss"
    config = config_of(folder, 2, algorithm={"own_loss": loss})
    made = Trained(config)
    try:
        with pytest.raises(OutOfMemoryError, match=r"rank 1 of the learner .* ended") as caught:
            made.train(range(1, 2))
    finally:
        made.ranks.close()
        made.functions.close()
    assert (caught.value.step, caught.value.microbatch_tokens) == (1, 96)


def test_a_learner_of_ranks_is_started_again_in_smaller_passes_once_for_a_step(
    folder: Path, tmp_path: Path
) -> None:
    config, state = config_of(folder, 2), LearnerState(step=3)
    failure = OutOfMemoryError("the GPU is out of memory", hint="lower learner.microbatch_tokens")
    failure.step, failure.microbatch_tokens = 5, 96
    record = partial(BatchRecord, seqs=[1], tasks=[1], seed=0, digest="", learner="", time=0.0)
    first = smaller_passes_after(config, tmp_path, failure)
    assert first.may_pass
    assert "step 5 is tried again in micro-batches of 64 tokens" in first.message
    passes = PassTokens(config, tmp_path, state, auto=False)
    sizes = [passes.of(record(step=step, microbatch_tokens=96)) for step in (4, 5, 6)]
    assert sizes == [96, 64, 64]
    assert smaller_passes_after(config, tmp_path, failure) is failure
    alone = config_of(folder, 1)
    failure.step = 6
    assert smaller_passes_after(alone, tmp_path, failure) is failure


def test_the_tokens_of_a_pass_are_those_of_the_record_else_of_the_checkpoint(
    folder: Path, tmp_path: Path
) -> None:
    config, state = config_of(folder, 1), LearnerState(step=3, microbatch_tokens=64)
    passes = PassTokens(config, tmp_path, state, auto=True)
    assert passes.now == 64
    assert PassTokens(config, tmp_path, state.model_copy(), auto=False).now == 96
    passes.note(48)
    assert state.microbatch_tokens == 48


# -- settings that are chosen ----------------------------------------------------------------------


def test_auto_keys_are_settled_for_a_card_and_stay_for_a_cpu(folder: Path) -> None:
    auto = {"microbatch_tokens": "auto", "gradient_checkpointing": "auto", "max_row_tokens": 96}
    config = config_of(folder, 1, learner=auto)
    assert (config.learner.pass_tokens, config.learner.recomputes) == (16384, False)
    assert with_chosen_settings(config, None) is config
    card = find_card("H100")
    settled = with_chosen_settings(config, card).learner
    assert settled.settings == {
        "microbatch_tokens": 32768,
        "gradient_checkpointing": False,
        "offload_activations": False,
    }
    small = replace(card, memory_bytes=3 << 29)
    few = with_chosen_settings(config, small).learner.pass_tokens
    assert 96 <= few < 32768
    assert with_chosen_settings(config, card, shared=True).learner.pass_tokens == 32768
    given = config_of(folder, 1)
    assert with_chosen_settings(given, card).learner.settings["microbatch_tokens"] == 96


def test_a_pass_of_an_unknown_model_is_small_and_recomputed(folder: Path) -> None:
    auto = {"microbatch_tokens": "auto", "gradient_checkpointing": "auto", "max_row_tokens": 96}
    config = config_of(folder, 1, learner=auto, model={"path": "nobody/knows-it"})
    learner = with_chosen_settings(config, find_card("H100")).learner
    assert (learner.pass_tokens, learner.recomputes, learner.offloads) == (96, True, False)
    plain = config_of(
        folder, 1, learner=auto | {"gradient_checkpointing": False}, model={"path": "no/body"}
    )
    assert not with_chosen_settings(plain, find_card("H100")).learner.recomputes


@pytest.mark.parametrize(
    ("model", "card", "expected"),
    [
        ("Qwen/Qwen3-8B", None, False),
        ("Qwen/Qwen3-8B", "L4", True),
        ("Qwen/Qwen3-0.6B", "H100", False),
        ("nobody/knows-it", "H100", True),
    ],
)
def test_a_tinker_service_recomputes_where_its_passes_would_not_fit(
    model: str, card: str | None, expected: bool
) -> None:
    config = JobConfig.model_validate({"model": {"path": model}, "env": {"game": "none"}})
    assert recomputes_on(card and find_card(card), config, shared=False) is expected  # pyright: ignore


_SETTLE = """
from tinkermq.actors.learner.memory import with_chosen_settings
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.plan.cards import find_card
job = {"model": {"path": "lab/here"}, "env": {"game": "none"}, "lora": {"rank": 16}}
config = JobConfig.model_validate(job)
learner = with_chosen_settings(config, find_card("H100"), shared=True).learner
print(learner.pass_tokens, learner.recomputes)
"""


@pytest.mark.full
def test_a_model_of_the_hub_that_is_not_cached_is_settled_for_the_card(tmp_path: Path) -> None:
    """Else an adapter on 8 B weights has passes of 125 GiB."""
    with served_hub() as hub:
        command, home = [sys.executable, "-c", _SETTLE], {"HF_HOME": str(tmp_path)}
        text = subprocess.check_output(command, env={**os.environ, **home, **hub}, text=True)
    assert text.splitlines()[-1] == "32768 True"


@pytest.mark.full
def test_ranks_are_told_the_settings_of_the_learner(folder: Path) -> None:
    auto = {"microbatch_tokens": "auto", "max_row_tokens": 96}
    config = with_chosen_settings(config_of(folder, 2, learner=auto), find_card("H100"))
    made = Trained(config)
    try:
        made.train(range(1, 2))
        assert made.policies.microbatch_tokens == 32768
    finally:
        made.ranks.close()
