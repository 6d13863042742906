"""A learner's step with random weights, beside transformers', the device's matrix product, and what
prime-rl published for the same shapes (its page of benchmarks, February 2026)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tinkermq.actors.learner.memory import with_chosen_settings
from tinkermq.actors.policy.devices import own_card
from tinkermq.actors.training.model import load_model
from tinkermq.actors.training.parallel import Parallel
from tinkermq.actors.training.step import Trainer
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.plan.plan import ModelUse
from tinkermq.schemas.plan.settings import find_models

from benchmarks.learner_step import (
    OVER_TRANSFORMERS,
    StepSequences,
    StepTime,
    StepWay,
    let_go,
    matrix_rate,
    our_step,
    plain_step,
    timed,
)
from benchmarks.sizes import QWEN3, SIZES, save_random_weights
from tests.gpu.material import Peak
from tests.gpu.report import ROWS, Recorder
from tests.support.allocations import equal_sequences, estimated_for_step, job_of_length

pytestmark = [pytest.mark.gpu_machine, pytest.mark.timeout(300)]
MIN_UTILISATION = 0.2
BYTES_PER_WEIGHT = 16
"""Weights, gradients and two moments in float32."""
ACTIVATIONS_BYTES = 16 * 2**30


@dataclass(frozen=True)
class PeerShape:
    """A model that prime-rl published figures of."""

    name: str
    size: str
    """Its key in `QWEN3`."""
    lora_rank: int
    needed_bytes: int

    def peer_flops(self, config: Any, num_weights: int, length: int) -> float:
        """Return the operations of a token by prime-rl's formula: attention counts in full.

        Of frozen weights it leaves out the gradients.
        """
        of_weights = (4 if self.lora_rank else 6) * num_weights
        return of_weights + 12 * config.num_hidden_layers * config.hidden_size * length


PEERS = (
    PeerShape("full", "0.6 B", 0, 40 * 2**30),
    PeerShape("lora", "4 B", 16, 70 * 2**30),
)
STEP_TOKENS = 32 << 10


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_a_step_at_the_shapes_of_peers(
    peer: PeerShape, on_gpu: bool, tmp_path: Path, record: Recorder
) -> None:
    """Settings that are left out are chosen for the card, as a run's are."""
    let_go()
    if on_gpu and torch.cuda.mem_get_info()[0] < peer.needed_bytes:
        pytest.skip(f"less than {peer.needed_bytes >> 30} GiB of the GPU are free")
    shape = QWEN3[peer.size if on_gpu else "small"]
    num_weights = save_random_weights(shape, tmp_path)
    peak = Peak.of_device("bfloat16" if on_gpu else "float32")
    for row in ROWS:
        length = int(row.removesuffix("k")) << (10 if on_gpu else 3)
        let_go()
        config = with_chosen_settings(peer_config(peer, tmp_path, length), own_card())
        num = max(2, STEP_TOKENS // length) if on_gpu else 2
        step = measured_step(config, shape.vocab_size, length, num, 1)
        tokens = num * length
        per_s = tokens / step.seconds
        record(f"{peer.name}_{row}_tokens_per_s", per_s, "tokens/s")
        flops = peer.peer_flops(shape, num_weights, length)
        record(f"{peer.name}_{row}_peer_mfu", per_s * flops / peak.flops)
        models = find_models(config)
        assert models is not None
        use = ModelUse(models.policy, peak.flops, False, 1)
        groups = [[(length // 8, length - length // 8)] * num]
        record(f"{peer.name}_{row}_mfu", use.mfu(groups, step.seconds))
        record(f"{peer.name}_{row}_memory_gib", step.peak_gib, "GiB")
        if on_gpu:
            estimated = estimated_for_step(config, on_gpu=True) / 2**30
            record(f"{peer.name}_{row}_memory_predicted", estimated / step.peak_gib)


def peer_config(peer: PeerShape, folder: Path, length: int) -> JobConfig:
    """Return a job whose sequences have `length` tokens."""
    passes = {"max_row_tokens": length, "microbatch_tokens": length}
    learner = {} if torch.cuda.is_available() else passes
    return job_of_length(folder, length, learner, lora={"rank": peer.lora_rank})


def measured_step(
    config: JobConfig, vocab_size: int, length: int, num_sequences: int, steps: int
) -> StepTime:
    """Measure steps of sequences of one length."""
    model = load_model(config.model, config.learner, lora=config.lora)
    trainer = Trainer(model, config, total_steps=steps + 1, parallel=Parallel.alone())
    batch = equal_sequences(vocab_size, length, num_sequences)
    device = next(model.parameters()).device
    return timed(lambda number: trainer.step(batch, number), steps, device)


@pytest.mark.parametrize(("size", "num_weights"), [("0.5 B", 0.5e9), ("1.5 B", 1.6e9)])
def test_a_step_is_faster_than_transformers(
    size: str,
    num_weights: float,
    on_gpu: bool,
    tmp_path: Path,
    record: Recorder,
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
    record("step, s", ours.seconds)
    record("tokens/s", sum(work.lengths) / ours.seconds)
    record("step_over_transformers", plain.seconds / ours.seconds)
    record("learner_of_matrix_product", utilisation)
    record("learner_of_peak", flops / peak.flops)
    record("peak", peak.source)
    record("memory, GiB", ours.peak_gib)
    if on_gpu:
        assert plain.seconds >= OVER_TRANSFORMERS * ours.seconds
        assert utilisation >= MIN_UTILISATION
