"""Whatever the optimiser and the dtype: training goes on from a checkpoint, and learns."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tinkermq.actors.training.batch import assemble
from tinkermq.actors.training.model import load_model
from tinkermq.actors.training.parallel import Meeting, Parallel
from tinkermq.actors.training.step import StepReport, Trainer
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.config.sections import LearnerConfig
from tinkermq.schemas.wire.errors import ConfigError

from tests.support.groups import random_group
from tests.support.saving import make_store, save

pytestmark = pytest.mark.full

torch.set_num_threads(1)

OPTIMIZERS = ["adamw", "muon"]
DTYPES = ["float32", "bfloat16"]
CRITIC: dict[str, Any] = {"algorithm": {"advantage": "gae"}, "critic": {"lr": 1e-3}}


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


@pytest.fixture
def divided() -> Iterator[Parallel]:
    """One rank whose model is in parts, of which it has all: it writes as several ranks do."""
    parallel = Parallel.join(0, LearnerConfig(), Meeting.open())
    yield parallel
    parallel.leave()


def test_what_ranks_wrote_has_the_name_of_the_optimiser(
    folder: Path, tmp_path: Path, divided: Parallel
) -> None:
    trainer = _trainer(folder, parallel=divided, learner={"optimizer": "muon"})
    _train(trainer, range(1, 2))
    saved = save(make_store(tmp_path), trainer, folder, 1)
    for parallel in (divided, None):
        with pytest.raises(ConfigError, match=r"learner.optimizer=muon, and this run has adamw"):
            _trainer(folder, saved, parallel=parallel)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_what_ranks_wrote_before_any_update_changes_no_bit(
    folder: Path, tmp_path: Path, divided: Parallel, optimizer: str
) -> None:
    ways: dict[str, Any] = {"learner": {"optimizer": optimizer}}
    plain, saving = (_trainer(folder, parallel=divided, **ways) for _ in range(2))
    saved = save(make_store(tmp_path), saving, folder, 1)
    again = _trainer(folder, saved, parallel=divided, **ways)
    for trainer in (plain, saving, again):
        _train(trainer, range(2, 4))
    assert _bits(plain) == _bits(saving) == _bits(again)


def test_the_state_of_a_removed_optimiser_is_refused_with_a_way_on(
    folder: Path, tmp_path: Path
) -> None:
    trainer = _trainer(folder)
    trainer.optimizer.param_groups[0]["adamw_8bit"] = True  # as it was written down
    saved = save(make_store(tmp_path), trainer, folder, 1)
    with pytest.raises(ConfigError, match=r"learner.optimizer=adamw_8bit, and this") as raised:
        _trainer(folder, saved)
    assert raised.value.hint.startswith("begin a new run with the checkpoint's weights")


def test_an_update_of_the_critic_without_a_finite_gradient_is_left_out_and_counted(
    folder: Path,
) -> None:
    trainer = _trainer(folder, **CRITIC)
    assert trainer.critic is not None
    with torch.no_grad():
        trainer.critic.model.value_head.bias.fill_(float("nan"))
    begun = trainer.critic.weights()
    [report] = _train(trainer, range(1, 2))
    made = trainer.critic.weights()
    assert all(torch.equal(made[name], begun[name]) for name in begun if "bias" not in name)
    assert report.numbers["critic/skipped_updates"] == 1
