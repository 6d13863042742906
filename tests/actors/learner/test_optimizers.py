"""Whatever the optimiser and the dtype: training goes on from a checkpoint, and learns."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tinkermq.actors.learner.algorithms.training_batch import assemble
from tinkermq.actors.learner.training.model import load_model
from tinkermq.actors.learner.training.optimizers.loss_scale import (
    FIRST_SCALE,
    GROWTH_INTERVAL,
    SCALE,
    LossScale,
)
from tinkermq.actors.learner.training.parallel import Meeting, Parallel
from tinkermq.actors.learner.training.step import StepReport, Trainer
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.config.learner import LearnerConfig
from tinkermq.schemas.wire.errors import ConfigError, ModelError
from torch import nn

from tests.support.groups import random_group
from tests.support.models import make_tiny_model
from tests.support.saving import make_store, save

torch.set_num_threads(1)

OPTIMIZERS = ["adamw", "muon", "adamw_8bit"]
DTYPES = ["float32", "float16"]
CRITIC: dict[str, Any] = {"algorithm": {"advantage": "gae"}, "critic": {"lr": 1e-3}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder."""
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def _trainer(
    folder: Path, source: Path | None = None, parallel: Parallel | None = None, **sections: Any
) -> Trainer:
    """Make a trainer, from a checkpoint if one is given."""
    learner = {"lr": 1e-3, **sections.pop("learner", {})}
    asked: dict[str, Any] = {"model": {"path": str(folder)}, "learner": learner, **sections}
    if "sft" not in sections:
        asked["env"] = {"game": "none"}
    config = JobConfig.model_validate(asked)
    loaded = load_model(config.model, config.learner, source, lora=config.lora)
    trainer = Trainer(loaded, config, total_steps=20, parallel=parallel)
    if source is not None:
        trainer.restore(source)
    return trainer


def _train(trainer: Trainer, steps: range) -> list[StepReport]:
    def batch(step: int):
        rng = np.random.default_rng(step)
        return assemble([random_group(rng, number) for number in range(2)])

    return [trainer.step(batch(step), step) for step in steps]


def _bits(trainer: Trainer) -> list[bytes]:
    return [value.numpy().tobytes() for value in trainer.weights().values()]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_adapter_and_a_critic_go_on_bit_for_bit_from_a_checkpoint(
    folder: Path, tmp_path: Path, optimizer: str, dtype: str
) -> None:
    ways = {"learner": {"optimizer": optimizer, "dtype": dtype}, "lora": {"rank": 2}, **CRITIC}
    first = _trainer(folder, **ways)
    begun = _bits(first)
    _train(first, range(1, 3))
    again = _trainer(folder, save(make_store(tmp_path), first, folder, 2), **ways)
    reports = [_train(trainer, range(3, 5)) for trainer in (first, again)]
    assert _bits(again) == _bits(first) != begun
    ours, expected = ([report.numbers for report in each] for each in reports)
    assert ours == expected


@pytest.mark.parametrize("wanted", OPTIMIZERS)
@pytest.mark.parametrize("found", OPTIMIZERS)
def test_the_state_of_another_optimiser_is_refused_with_both_names(
    folder: Path, tmp_path: Path, found: str, wanted: str
) -> None:
    saved = save(make_store(tmp_path), _trainer(folder, learner={"optimizer": found}), folder, 1)
    if found == wanted:
        _trainer(folder, saved, learner={"optimizer": wanted})
        return
    said = f"learner.optimizer={found}, and this run has {wanted}"
    with pytest.raises(ConfigError, match=said) as raised:
        _trainer(folder, saved, learner={"optimizer": wanted})
    assert f"set learner.optimizer={found}" in raised.value.hint
    assert "--from RUN@STEP" in raised.value.hint


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_loss_of_a_text_falls(folder: Path, optimizer: str, dtype: str) -> None:
    learner = {"optimizer": optimizer, "dtype": dtype}
    trainer = _trainer(folder, learner=learner, sft={"data": ["chats.jsonl"]})
    text = assemble([random_group(np.random.default_rng(0), size=1, turns=1)])
    losses = [trainer.step(text, step).numbers["actor/pg_loss"] for step in range(1, 17)]
    assert losses[-1] < 0.7 * losses[0]


# -- float16 ---------------------------------------------------------------------------------------


def test_a_checkpoint_of_float32_is_gone_on_from_in_float16_and_back(
    folder: Path, tmp_path: Path
) -> None:
    saved = save(make_store(tmp_path), _trainer(folder), folder, 1)
    half = _trainer(folder, saved, learner={"dtype": "float16"})
    assert _train(half, range(2, 3))[0].numbers["actor/loss_scale"] == FIRST_SCALE
    saved = save(make_store(tmp_path), half, folder, 2)
    whole = _trainer(folder, saved)
    assert "actor/loss_scale" not in _train(whole, range(3, 4))[0].numbers


def test_an_overflow_leaves_the_update_out_halves_the_scale_and_training_goes_on(
    folder: Path, tmp_path: Path
) -> None:
    ways: dict[str, Any] = {"learner": {"dtype": "float16"}, **CRITIC}
    trainer = _trainer(folder, **ways)
    assert trainer.critic is not None
    _train(trainer, range(1, 2))  # a new critic's head is 0, and nothing overflows behind it
    for optimizer in (trainer.optimizer, trainer.critic.optimizer):
        optimizer.param_groups[0][SCALE] = 2.0**28
    begun = _bits(trainer)
    [over] = _train(trainer, range(2, 3))
    assert _bits(trainer) == begun
    for whose in ("actor", "critic"):
        assert over.numbers[f"{whose}/loss_scale"] == 2.0**27
        assert over.numbers[f"{whose}/skipped_updates"] == 1
    saved = save(make_store(tmp_path), trainer, folder, 2)
    reports = [_train(each, range(3, 18)) for each in (trainer, _trainer(folder, saved, **ways))]
    last = reports[0][-1].numbers
    assert 1 < last["actor/loss_scale"] < 2.0**27
    assert last["actor/skipped_updates"] == 0
    assert [each.numbers for each in reports[0]] == [each.numbers for each in reports[1]]


@pytest.fixture
def divided() -> Iterator[Parallel]:
    """One rank whose model is in parts, of which it has all: it writes as several ranks do."""
    parallel = Parallel.join(0, LearnerConfig(), Meeting.open())
    yield parallel
    parallel.leave()


def test_what_ranks_wrote_has_the_scale_and_the_name_of_the_optimiser(
    folder: Path, tmp_path: Path, divided: Parallel
) -> None:
    ways: dict[str, Any] = {"learner": {"dtype": "float16", "optimizer": "muon"}}
    trainer = _trainer(folder, parallel=divided, **ways)
    trainer.optimizer.param_groups[0][SCALE] = 2.0**40
    [over] = _train(trainer, range(1, 2))
    saved = save(make_store(tmp_path), trainer, folder, 1)
    for parallel in (divided, None):
        again = _trainer(folder, saved, parallel=parallel, **ways)
        [next_one] = _train(again, range(2, 3))
        assert next_one.numbers["actor/skipped_updates"] == 1
        assert next_one.numbers["actor/loss_scale"] == over.numbers["actor/loss_scale"] / 2
        with pytest.raises(ConfigError, match=r"learner.optimizer=muon, and this run has adamw"):
            _trainer(folder, saved, parallel=parallel)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_what_ranks_wrote_before_any_update_changes_no_bit(
    folder: Path, tmp_path: Path, divided: Parallel, optimizer: str
) -> None:
    ways: dict[str, Any] = {"learner": {"dtype": "float16", "optimizer": optimizer}}
    plain, saving = (_trainer(folder, parallel=divided, **ways) for _ in range(2))
    for trainer in (plain, saving):
        trainer.optimizer.param_groups[0][SCALE] = 2.0**40
        [over] = _train(trainer, range(1, 2))
        assert over.numbers["actor/skipped_updates"] == 1
        trainer.optimizer.param_groups[0][SCALE] = 256.0
    saved = save(make_store(tmp_path), saving, folder, 1)
    again = _trainer(folder, saved, parallel=divided, **ways)
    for trainer in (plain, saving, again):
        assert _train(trainer, range(2, 4))[-1].numbers["actor/loss_scale"] == 256.0
    assert _bits(plain) == _bits(saving) == _bits(again)


def test_what_ranks_wrote_in_float32_is_gone_on_from_in_float16(
    folder: Path, tmp_path: Path, divided: Parallel
) -> None:
    saved = save(make_store(tmp_path), _trainer(folder, parallel=divided), folder, 1)
    for parallel in (divided, None):
        half = _trainer(folder, saved, parallel=parallel, learner={"dtype": "float16"})
        assert _train(half, range(2, 3))[0].numbers["actor/loss_scale"] == FIRST_SCALE


def test_gradients_are_those_of_float32_whatever_the_scale(folder: Path) -> None:
    norms = [
        _train(_trainer(folder, learner={"dtype": dtype}), range(1, 2))[0].numbers[
            "actor/grad_norm"
        ]
        for dtype in ("float32", "float16")
    ]
    assert norms[1] == pytest.approx(norms[0], rel=2e-3)


def test_the_scale_moves_as_that_of_torch_does() -> None:
    weight = nn.Parameter(torch.ones(3))
    ours = LossScale(torch.optim.AdamW([weight]), "float16")
    theirs = torch.amp.GradScaler("cpu")
    sgd = torch.optim.SGD([weight], lr=0.0)
    rng = np.random.default_rng(0)
    for bad in [*(rng.random(40) < 0.3), *[False] * 2 * GROWTH_INTERVAL, True, *[False] * 9]:
        assert theirs.get_scale() == ours.value
        loss = (weight * (float("inf") if bad else 1.0)).sum()
        weight.grad = None
        theirs.scale(loss).backward()
        theirs.step(sgd)
        theirs.update()
        ours.is_good(float("inf") if bad else 1.0)
    assert theirs.get_scale() == ours.value


def test_a_model_that_float16_cannot_hold_ends_the_run_and_says_so() -> None:
    scale = LossScale(torch.optim.AdamW([nn.Parameter(torch.ones(3))]), "float16")
    for _ in range(16):
        assert not scale.is_good(float("nan"))
    assert scale.value == 1.0
    with pytest.raises(ModelError, match="over 65504") as raised:
        scale.is_good(float("inf"))
    assert "learner.dtype=bfloat16" in raised.value.hint


def test_in_other_dtypes_there_is_no_scale() -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(3))])
    scale = LossScale(optimizer, "bfloat16")
    assert scale.is_good(1.0)
    assert not scale.is_good(float("nan"))
    assert scale.value == 1.0
    assert scale.numbers("actor") == {}
    assert SCALE not in optimizer.param_groups[0]
