"""A learner's step with random weights, beside transformers' and the device's matrix product."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.learner_step import (
    OVER_TRANSFORMERS,
    StepSequences,
    StepWay,
    matrix_rate,
    our_step,
    plain_step,
)
from benchmarks.sizes import SIZES, save_random_weights
from tests.gpu.material import Peak

pytestmark = [pytest.mark.gpu_machine, pytest.mark.timeout(300)]
MIN_UTILISATION = 0.2
BYTES_PER_WEIGHT = 16
"""Weights, gradients and two moments in float32."""
ACTIVATIONS_BYTES = 16 * 2**30


@pytest.mark.parametrize(("size", "num_weights"), [("0.5 B", 0.5e9), ("1.5 B", 1.6e9)])
def test_a_step_is_faster_than_transformers(
    size: str,
    num_weights: float,
    on_gpu: bool,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    if on_gpu:
        free, _ = torch.cuda.mem_get_info()
        if free < BYTES_PER_WEIGHT * num_weights + ACTIVATIONS_BYTES:
            pytest.skip(f"{free / 2**30:.0f} GiB of the GPU are free, too few for {size}")
    config = SIZES[size if on_gpu else "small"]
    longest, num_sequences = (2048, 16) if on_gpu else (64, 4)
    dtype = "bfloat16" if on_gpu else "float32"
    num_saved = save_random_weights(config, tmp_path)
    work = StepSequences(config.vocab_size, longest, num_sequences)
    way = StepWay(tmp_path, 2 * longest, dtype, "auto", False, 3 if on_gpu else 1)
    ours, plain = our_step(way, work), plain_step(way, work)
    rate = matrix_rate(dtype, 8192 if on_gpu else 256)
    flops = work.flops(config, num_saved) / ours.seconds
    peak = Peak.of_device(dtype, rate)
    utilisation = flops / rate
    record_property("step, s", ours.seconds)
    record_property("tokens/s", sum(work.lengths) / ours.seconds)
    record_property("step_over_transformers", plain.seconds / ours.seconds)
    record_property("learner_of_matrix_product", utilisation)
    record_property("learner_of_peak", flops / peak.flops)
    record_property("peak", peak.source)
    record_property("memory, GiB", ours.peak_gib)
    if on_gpu:
        assert plain.seconds >= OVER_TRANSFORMERS * ours.seconds
        assert utilisation >= MIN_UTILISATION
