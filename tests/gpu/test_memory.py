"""A learner's step takes the memory that a plan estimates."""

from pathlib import Path

import pytest
import torch
from tinkermq.actors.training.model import load_model
from tinkermq.actors.training.parallel import Parallel
from tinkermq.actors.training.step import Trainer
from tinkermq.schemas.config.job import JobConfig

from benchmarks.learner_step import let_go
from benchmarks.sizes import SIZES, save_random_weights
from tests.gpu.report import Recorder
from tests.support.allocations import allocated_in_step, estimated_for_step, job_of_length

pytestmark = [pytest.mark.gpu_machine, pytest.mark.timeout(300)]
NUM_ROWS, NUM_PASSES = 2, 3
TOLERANCE = 0.15
NEEDED_BYTES = 24 * 2**30
"""For 0.5 B weights."""


@pytest.mark.parametrize("activations", ["recomputed", "kept", "offloaded"])
def test_a_step_takes_the_memory_that_is_estimated(
    activations: str,
    on_gpu: bool,
    tmp_path: Path,
    record: Recorder,
) -> None:
    let_go()
    if activations == "offloaded" and not on_gpu:
        pytest.skip("without a GPU activations stay in the same memory")
    if on_gpu and torch.cuda.mem_get_info()[0] < NEEDED_BYTES:
        pytest.skip("less than 24 GiB of the GPU are free")
    columns = 2048 if on_gpu else 256
    save_random_weights(SIZES["0.5 B" if on_gpu else "small"], tmp_path)
    learner = {
        "gradient_checkpointing": activations != "kept",
        "offload_activations": activations == "offloaded",
        "max_row_tokens": columns,
        "microbatch_tokens": NUM_ROWS * columns,
    }
    config = job_of_length(tmp_path, columns, learner)
    # a sequence takes a column less than it has tokens
    measured = allocated_in_step(config, columns + 1, NUM_ROWS * NUM_PASSES)
    estimated = estimated_for_step(config, on_gpu=on_gpu)
    record("measured, GiB", measured / 2**30)
    record("memory_predicted_over_measured", estimated / measured)
    assert estimated == pytest.approx(measured, rel=TOLERANCE)


def test_a_copy_for_a_checkpoint_is_pinned_and_nothing_changes_it(
    on_gpu: bool, tmp_path: Path
) -> None:
    save_random_weights(SIZES["small"], tmp_path)
    config = JobConfig.model_validate({"model": {"path": str(tmp_path)}, "env": {"game": "none"}})
    parallel = Parallel.alone()
    model = load_model(config.model, config.learner)
    trainer = Trainer(model, config, total_steps=3, parallel=parallel)
    before = {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}
    held = trainer.copy(None).policy
    held.detach()  # as before an update: without a GPU it is no copy until then
    copied = held.weights
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    for name, tensor in copied.items():
        assert torch.equal(tensor, before[name]), name
        assert tensor.is_pinned() is on_gpu, name
    again = trainer.copy(None).policy
    again.detach()
    places = {tensor.data_ptr() for tensor in copied.values()}
    assert ({tensor.data_ptr() for tensor in again.weights.values()} == places) is on_gpu
