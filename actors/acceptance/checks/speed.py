"""A learner's step with random weights, beside transformers' and the device's matrix product."""

import torch

from ....schemas.wire.errors import StorageError
from ..figures import CheckSkipped, Figure, Found, Setting
from ..measuring.learner_step import (
    OVER_TRANSFORMERS,
    StepSequences,
    StepWay,
    matrix_rate,
    our_step,
    plain_step,
)
from ..measuring.sizes import SIZES, save_random_weights

_LEAST_UTILISATION = 0.2
_BYTES_PER_WEIGHT = 16
"""Weights, gradients and two moments in float32."""
_ACTIVATIONS_BYTES = 16 * 2**30


def half_billion(setting: Setting) -> Found:
    """Measure a step of Qwen2.5's smallest size."""
    return _measured(setting, "0.5 B", 0.5e9)


def one_and_a_half_billion(setting: Setting) -> Found:
    """Measure a step of the size above."""
    return _measured(setting, "1.5 B", 1.6e9)


def _measured(setting: Setting, size: str, num_weights: float) -> Found:
    """Measure both sides; on a CPU a small model, which says only that all runs."""
    if setting.on_gpu:
        _refuse_small_memory(size, num_weights)
    config = SIZES[size if setting.on_gpu else "small"]
    longest, num_sequences = (2048, 16) if setting.on_gpu else (64, 4)
    dtype = "bfloat16" if setting.on_gpu else "float32"
    try:
        num_weights = save_random_weights(config, setting.folder)
    except OSError as error:
        raise StorageError(
            f"random weights cannot be written to {setting.folder}: {error}",
            hint="set TMPDIR to a folder on a disk with room",
        ) from error
    work = StepSequences(config.vocab_size, longest, num_sequences)
    way = StepWay(setting.folder, 2 * longest, dtype, "sdpa", False, 3 if setting.on_gpu else 1)
    ours, plain = our_step(way, work), plain_step(way, work)
    rate = matrix_rate(dtype, 8192 if setting.on_gpu else 256)
    on_gpu = setting.on_gpu
    return Found(
        [
            Figure("step", ours.seconds, "s"),
            Figure("speed", sum(work.lengths) / ours.seconds, "tokens/s"),
            Figure(
                "over transformers",
                plain.seconds / ours.seconds,
                "×",
                at_least=OVER_TRANSFORMERS if on_gpu else None,
            ),
            Figure(
                "of the matrix product",
                work.flops(config, int(num_weights)) / ours.seconds / rate,
                at_least=_LEAST_UTILISATION if on_gpu else None,
            ),
            Figure("matrix product", rate / 1e12, "TFLOP/s"),
            Figure("memory", ours.peak_gib, "GiB"),
        ],
        {} if on_gpu else {f"step of {size}": "a small model: says nothing of a GPU"},
    )


def _refuse_small_memory(size: str, num_weights: float) -> None:
    free, _ = torch.cuda.mem_get_info()
    needed = _BYTES_PER_WEIGHT * num_weights + _ACTIVATIONS_BYTES
    if free < needed:
        raise CheckSkipped(
            f"a step of {size} is measured with {needed / 2**30:.0f} GiB, and "
            f"{free / 2**30:.0f} GiB of the GPU are free",
            hint="measure on a larger GPU; learner.cpu_offload and gradient_checkpointing train it "
            "here, slower",
        )
