"""A learner's step takes the memory that a plan estimates."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tinkermq.schemas.config.job import JobConfig

from benchmarks.learner_step import let_go
from benchmarks.sizes import SIZES, save_random_weights
from tests.support.allocations import allocated_in_step, estimated_for_step

pytestmark = [pytest.mark.gpu_machine, pytest.mark.timeout(300)]
NUM_ROWS, NUM_PASSES = 2, 3
TOLERANCE = 0.15
NEEDED_BYTES = 24 * 2**30
"""For 0.5 B weights."""


@pytest.mark.parametrize("checkpointing", [True, False], ids=["recomputed", "kept"])
def test_a_step_takes_the_memory_that_is_estimated(
    checkpointing: bool,
    on_gpu: bool,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    let_go()
    if on_gpu and torch.cuda.mem_get_info()[0] < NEEDED_BYTES:
        pytest.skip("less than 24 GiB of the GPU are free")
    columns = 2048 if on_gpu else 256
    prompt = columns // 8
    save_random_weights(SIZES["0.5 B" if on_gpu else "small"], tmp_path)
    config = JobConfig.model_validate(
        {
            "model": {"path": str(tmp_path)},
            "env": {"game": "none"},
            "rollout": {
                "max_prompt_tokens": prompt,
                "max_turn_tokens": columns - prompt,
                "max_response_tokens": columns - prompt,
            },
            "algorithm": {"correction": "none"},
            "learner": {
                "lr": 1e-6,
                "gradient_checkpointing": checkpointing,
                "max_row_tokens": columns,
                "microbatch_tokens": NUM_ROWS * columns,
            },
        }
    )
    # a sequence takes a column less than it has tokens
    measured = allocated_in_step(config, columns + 1, NUM_ROWS * NUM_PASSES)
    estimated = estimated_for_step(config, on_gpu=on_gpu)
    record_property("measured, GiB", measured / 2**30)
    record_property("memory_predicted_over_measured", estimated / measured)
    assert estimated == pytest.approx(measured, rel=TOLERANCE)
