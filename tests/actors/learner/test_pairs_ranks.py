"""Pairs are learnt by two ranks as by one: by DPO and as a reward model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.rollout import Group
from transformers.models.auto.modeling_auto import AutoModelForSequenceClassification

from tests.support.models import make_tiny_model

from .test_preferences import config_of, pairs
from .test_ranks import assert_same_reports, assert_same_weights, trained

pytestmark = pytest.mark.long
torch.set_num_threads(1)

KINDS: dict[str, dict[str, Any]] = {
    "dpo": {"sft": {"objective": "dpo", "beta": 0.4, "sft_coef": 0.5}},
    "adapter": {"sft": {"objective": "dpo", "beta": 0.4}, "lora": {"rank": 4}},
    "reward": {"sft": {"objective": "reward", "center_coef": 0.1}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder."""
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def ranks_config(folder: Path, kind: str, ranks: int) -> JobConfig:
    """Updates are nearly proportional to gradients."""
    learner = {"lr": 0.1, "eps": 1.0, "ranks": ranks, "slots": ranks, "num_minibatches": 2}
    sections = {**KINDS[kind], "learner": learner}
    return config_of(folder, sections.pop("sft"), **sections)


def batch(step: int) -> list[Group]:
    return pairs(3 if step % 2 else 4, seed=step)


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_learn_pairs_as_one_does(folder: Path, kind: str, tmp_path: Path) -> None:
    one = trained(ranks_config(folder, kind, 1), range(1, 4), groups=batch)
    two = trained(
        ranks_config(folder, kind, 2), range(1, 4), save_to=tmp_path / "run", groups=batch
    )
    assert all(report.numbers["actor/grad_norm"] > 0 for report in one[0])
    assert_same_reports(two[0], one[0])
    assert_same_weights(two[1], one[1])
    checkpoint = tmp_path / "run" / "checkpoints" / "step_000003"
    again = trained(ranks_config(folder, kind, 2), range(4, 5), checkpoint, groups=batch)
    longer = trained(ranks_config(folder, kind, 1), range(1, 5), groups=batch)
    assert_same_weights(again[1], longer[1])
    if kind == "reward":
        opened: Any = AutoModelForSequenceClassification.from_pretrained(checkpoint, num_labels=1)
        assert torch.equal(opened.score.weight, two[1]["score.weight"])
