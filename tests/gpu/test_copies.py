"""How fast weights are copied, digested and pinned, beside the training that waits for them."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tinkermq.actors.policy.devices import own_device
from tinkermq.actors.policy.policies import MAIN
from tinkermq.actors.training.parallel import snapshot, snapshot_bytes
from tinkermq.actors.weights.tensors import fingerprint

from benchmarks.learner_step import StepSequences, StepWay, let_go, make_trainer
from benchmarks.sizes import SIZES, save_random_weights
from tests.gpu.report import Recorder

pytestmark = [pytest.mark.gpu_machine, pytest.mark.timeout(300)]
PINNED_BYTES = 1 << 30
NEEDED_BYTES = 32 * 2**30


def gb_per_s(copy: Callable[[], object], num_bytes: int) -> float:
    """Return the rate of a copy that was made once before: its memory is there."""
    copy()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    started = time.perf_counter()
    copy()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return num_bytes / (time.perf_counter() - started) / 1e9


def test_weights_are_copied_at_the_rate_of_the_machine(
    on_gpu: bool, tmp_path: Path, record: Recorder
) -> None:
    let_go()
    if on_gpu:
        if torch.cuda.mem_get_info()[0] < NEEDED_BYTES:
            pytest.skip("less than 32 GiB of the GPU are free")
        torch.empty(1, pin_memory=True)  # CUDA starts
        started = time.perf_counter()
        torch.empty(PINNED_BYTES, dtype=torch.uint8, pin_memory=True)
        record("pinning_gb_per_s", PINNED_BYTES / (time.perf_counter() - started) / 1e9)
    config = SIZES["1.5 B" if on_gpu else "small"]
    save_random_weights(config, tmp_path)
    way = StepWay(tmp_path, 256, "bfloat16" if on_gpu else "float32", "auto", False, 1)
    trainer, batch = make_trainer(way, StepSequences(config.vocab_size, 64, 4))
    trainer.step(batch, 1)  # the optimiser has its states after it
    models = {MAIN: trainer.model}
    num_bytes = snapshot_bytes(models, torch.bfloat16)
    record("snapshot_gb_per_s", gb_per_s(lambda: snapshot(models, torch.bfloat16), num_bytes))
    payload = torch.randint(256, (num_bytes,), dtype=torch.uint8, device=own_device())
    record("fingerprint_gb_per_s", gb_per_s(lambda: fingerprint(payload), num_bytes))
    weights = sum(each.numel() for each in trainer.model.parameters())
    copied = 12 * weights  # float32: weights and two moments

    def copy() -> None:
        trainer.copy(None).policy.detach()  # without a GPU it is no copy until then

    record("checkpoint_copy_gb_per_s", gb_per_s(copy, copied))
