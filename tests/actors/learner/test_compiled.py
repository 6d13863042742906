"""Compiled layers train as they are written, in every way in which layers are run."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from tests.actors.learner.test_ranks import (
    assert_same_reports,
    assert_same_weights,
    config_of,
    trained,
)

torch.set_num_threads(1)

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore"),  # torch warns of itself where it compiles
]


@pytest.mark.parametrize(
    ("ranks", "sections"),
    [
        (1, {"algorithm": {"kl_coef": 0.05}}),
        (1, {"learner": {"gradient_checkpointing": True}}),
        (1, {"lora": {"rank": 4}, "algorithm": {"kl_coef": 0.05}}),
        (2, {"learner": {"gradient_checkpointing": True}}),
    ],
    ids=["reference", "checkpointing", "adapter", "ranks"],
)
def test_compiled_layers_train_as_eager_ones_do(
    folder: Path, ranks: int, sections: dict[str, Any]
) -> None:
    compiled = {**sections, "learner": {**sections.get("learner", {}), "compile": True}}
    counters.clear()
    reports, weights = trained(config_of(folder, ranks, **compiled), range(1, 5))
    assert counters["stats"]["unique_graphs"] > 0
    expected, eager = trained(config_of(folder, 1, **sections), range(1, 5))
    assert_same_reports(reports, expected)
    assert_same_weights(weights, eager)


def test_micro_batches_of_other_sizes_are_not_compiled_anew(folder: Path) -> None:
    config = config_of(folder, 1, learner={"compile": True})
    counters.clear()
    trained(config, range(1, 6))  # of one row and of several, which torch compiles apart
    graphs = counters["stats"]["unique_graphs"]
    trained(config, range(6, 11))
    assert counters["stats"]["unique_graphs"] == graphs


def test_without_a_compiler_the_error_says_what_to_install(folder: Path, tmp_path: Path) -> None:
    program = (
        "from tinkermq.actors.training.model import load_model\n"
        "from tinkermq.schemas.config.job import LearnerConfig, ModelConfig\n"
        f"load_model(ModelConfig(path={str(folder)!r}), LearnerConfig(compile=True))\n"
    )
    nothing = {"CXX": str(tmp_path / "no-compiler"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **nothing},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "ConfigError: learner.compile=true, and torch cannot compile on this machine" in (
        done.stderr
    )
    assert "g++" in done.stderr
