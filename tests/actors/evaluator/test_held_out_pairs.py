"""Held-out pairs are judged by published weights as the learner itself would judge them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tinkermq.actors.evaluator.held_out_pairs import PairJudge, held_out_pairs
from tinkermq.actors.learner.algorithms.training_batch import assemble
from tinkermq.actors.learner.preferences.pair_losses import pair_numbers
from tinkermq.actors.learner.training.policies import Policies, load_models
from tinkermq.envs.write_data import write_rows
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.wire.errors import DataError

from tests.support.models import make_tiny_model

torch.set_num_threads(1)

KINDS: dict[str, dict[str, Any]] = {
    "dpo": {"sft": {"objective": "dpo", "beta": 0.4}},
    "adapter": {"sft": {"objective": "dpo", "beta": 0.4}, "lora": {"rank": 4, "alpha": 32}},
    "reward": {"sft": {"objective": "reward"}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder."""
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def config_of(folder: Path, data: Path, kind: str = "dpo") -> JobConfig:
    sections = {name: dict(section) for name, section in KINDS[kind].items()}
    sections["sft"] |= {"data": [str(data)], "val_data": [str(data)]}
    rollout = {"max_prompt_tokens": 16, "max_turn_tokens": 16, "max_response_tokens": 48}
    model, learner = {"path": str(folder)}, {"lr": 3e-3}
    return JobConfig.model_validate(
        {"model": model, "rollout": rollout, "learner": learner, **sections}
    )


def write_pairs(folder: Path, answers: list[tuple[str, str]]) -> Path:
    rows = [{"prompt": "which?", "chosen": one, "rejected": other} for one, other in answers]
    return write_rows(folder / "pairs.jsonl", rows)


@pytest.mark.parametrize("kind", KINDS)
def test_a_version_is_judged_as_the_learner_judges_it(
    folder: Path, tmp_path: Path, kind: str
) -> None:
    data = write_pairs(tmp_path, [("red", "green"), ("blue", "blue"), ("red", "blue sky")])
    config = config_of(folder, data, kind)
    pairs, failures = held_out_pairs(config)
    assert len(pairs) == 2
    assert len(failures) == 1
    assert "chosen and rejected of row 1 of" in failures[0]
    policies = Policies(config, load_models(config, None), total_steps=9)
    judge = PairJudge(config, pairs)
    begun = judge.measure(policies.snapshot(torch.float32))
    assert (begun["val/mean_score"], begun["val/margin"]) == (0.5, 0.0)
    for step in range(1, 6):
        policies.step(pairs, step)
    told = judge.measure(policies.snapshot(torch.float32))
    own = pair_numbers(policies.trainers[""].pair_rewards(assemble(pairs)), "val")
    assert {name: told[name] for name in own} == pytest.approx(own, abs=1e-6)
    assert told["val/mean_score"] == 1
    assert told["val/margin"] > 0.1


def test_pairs_none_of_which_can_be_used_are_refused(folder: Path, tmp_path: Path) -> None:
    config = config_of(folder, write_pairs(tmp_path, [("blue", "blue")]))
    with pytest.raises(DataError, match=r"no pair of sft.val_data can be used: chosen and"):
        held_out_pairs(config)
