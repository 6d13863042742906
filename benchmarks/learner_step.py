"""The learner's step and a plain transformers training step, on the same sequences.

Both train sequences of uneven lengths, as episodes are, with the same optimiser, and at most as
many tokens in one pass: ours by `Trainer.step`, with all that belongs to a step; the peer by rows
padded to the longest, labels, the loss of the model's own, clipping and AdamW. Model FLOPs
utilisation counts 6 operations per weight and token and 6 · layers · width · L² of causal attention
per sequence, over the rate of a large matrix product.
"""

# torch and transformers leave some of their methods untyped.
# pyright: reportUnknownMemberType=false

import gc
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tinkermq.actors.policy.devices import can_use_onednn, multiply, own_device
from tinkermq.actors.training.batch import TrainingBatch, assemble
from tinkermq.actors.training.model import load_model
from tinkermq.actors.training.parallel import Parallel
from tinkermq.actors.training.step import Trainer
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.rollout import Group, Trajectory
from tinkermq.schemas.task import Task
from tinkermq.schemas.wire.errors import EngineError
from transformers import AutoModelForCausalLM, Qwen2Config

RATE = 1e-6
OVER_TRANSFORMERS = 1.5
"""A step of ours is expected to be so many times as fast on a GPU."""


@dataclass(frozen=True)
class StepTime:
    """What one side needs for a step."""

    seconds: float
    """Median."""
    first: float
    """Seconds of the first step."""
    peak_gib: float
    """Memory of the GPU; without one, of the process."""


@dataclass(frozen=True)
class StepWay:
    """How both sides compute."""

    folder: Path
    """The model."""
    budget: int
    """Tokens of one pass."""
    dtype: str
    attention: str
    checkpointing: bool
    """Activations are computed again in the backward pass."""
    steps: int


class StepSequences:
    """The sequences of a step."""

    def __init__(self, vocab_size: int, longest: int, num: int) -> None:
        """Draw `num` sequences of up to `longest` tokens, the longest among them."""
        rng = np.random.default_rng(0)
        self.lengths: list[int] = [longest, *rng.integers(longest // 4, longest, num - 1).tolist()]
        self.ids = [rng.integers(8, vocab_size, length) for length in self.lengths]

    def groups(self) -> list[Group]:
        """Lay the sequences out as one group; an eighth of each is its prompt."""
        return [
            Group(
                task=Task(task=0, index=0, seed=0, group_size=len(self.ids), min_version=0),
                trajectories=[_trajectory(ids, at) for at, ids in enumerate(self.ids)],
                source="measured",
            )
        ]

    def flops(self, config: Qwen2Config, num_weights: int) -> float:
        """Return the operations of the model in a step, forward and backward."""
        attention = 6 * int(config.num_hidden_layers) * int(config.hidden_size)
        return sum(6 * num_weights * each + attention * each**2 for each in self.lengths)


def _trajectory(ids: NDArray[Any], number: int) -> Trajectory:
    length = len(ids)
    mask = (np.arange(length) >= length // 8).astype(np.uint8)
    return Trajectory(
        token_ids=ids.astype(np.int32),
        mask=mask,
        logprobs=np.where(mask, -9.0, 0.0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        turn_ends=np.array([length - 1], dtype=np.int32),
        rewards=np.array([number % 2], dtype=np.float32),
    )


def let_go() -> None:
    """Let go of what the last side held, so that the next one finds the same memory."""
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def timed(step: Callable[[int], object], steps: int, device: torch.device) -> StepTime:
    """Return the median time of a step after a first one, and the peak memory of all."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    took: list[float] = []
    for number in range(steps + 1):
        started = time.perf_counter()
        step(number + 1)
        if device.type == "cuda":
            torch.cuda.synchronize()
        took.append(time.perf_counter() - started)
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated() / 2**30
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return StepTime(median(took[1:]), took[0], peak)


def our_step(way: StepWay, work: StepSequences, *, compiled: bool = False) -> StepTime:
    """Measure `Trainer.step`; EngineError for one whose gradient was not finite."""
    let_go()
    trainer, batch = make_trainer(way, work, compiled=compiled)
    device = next(trainer.model.parameters()).device
    return timed(lambda number: _finite(trainer.step(batch, number).numbers), way.steps, device)


def make_trainer(
    way: StepWay, work: StepSequences, *, compiled: bool = False
) -> tuple[Trainer, TrainingBatch]:
    """Return the trainer of a step, and its batch."""
    config = _configured(way, max(work.lengths), compiled=compiled)
    model = load_model(config.model, config.learner)
    trainer = Trainer(model, config, total_steps=way.steps + 1, parallel=Parallel.alone())
    return trainer, assemble(work.groups())


def _configured(way: StepWay, longest: int, *, compiled: bool) -> JobConfig:
    return JobConfig.model_validate(
        {
            "model": {"path": str(way.folder), "attn_implementation": way.attention},
            "env": {"game": "none"},
            "rollout": {
                "max_prompt_tokens": longest // 8 + 1,
                "max_turn_tokens": longest,
                "max_response_tokens": longest,
            },
            "algorithm": {"correction": "none"},
            "learner": {
                "lr": RATE,
                "dtype": way.dtype,
                "compile": compiled,
                "gradient_checkpointing": way.checkpointing,
                "max_row_tokens": 2 * longest,
                "microbatch_tokens": max(way.budget, 2 * longest),
                "threads": torch.get_num_threads(),
            },
        }
    )


def _finite(numbers: dict[str, float]) -> None:
    if numbers["actor/skipped_updates"]:
        raise EngineError(
            "the gradient of a step was not finite", hint="compare learner.dtype=float32"
        )


def plain_step(way: StepWay, work: StepSequences) -> StepTime:
    """Measure a training step as transformers' documentation writes it."""
    let_go()
    device = own_device()
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        way.folder,
        dtype=torch.float32,
        attn_implementation="flash_attention_2" if "flash" in way.attention else "sdpa",
    )
    model = loaded.to(device).train()
    if way.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    ids, real = (each.to(device) for each in _padded(work))
    labels = ids.masked_fill(real == 0, -100)
    num_rows = max(1, way.budget // max(work.lengths))

    def step(_: int) -> None:
        optimizer.zero_grad()
        for start in range(0, len(ids), num_rows):
            part = slice(start, start + num_rows)
            with torch.autocast(device.type, torch.bfloat16, enabled=way.dtype == "bfloat16"):
                output = model(
                    input_ids=ids[part],
                    attention_mask=real[part],
                    labels=labels[part],
                    use_cache=False,
                )
            (output.loss * len(ids[part]) / len(ids)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return timed(step, way.steps, device)


def _padded(work: StepSequences) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and mask, int64[B, T], padded to the longest."""
    ids = torch.zeros(len(work.ids), max(work.lengths), dtype=torch.int64)
    real = torch.zeros_like(ids)
    for row, tokens in enumerate(work.ids):
        ids[row, : len(tokens)] = torch.from_numpy(tokens)
        real[row, : len(tokens)] = 1
    return ids, real


def matrix_rate(dtype: str, size: int) -> float:
    """Return the operations per second of a product of two square matrices.

    In float32 on a CPU it is the faster of MKL, which `torch.mm` calls, and oneDNN.
    """
    device = own_device()
    kind: torch.dtype = getattr(torch, dtype)
    left, right = (torch.randn(size, size, device=device).to(kind) for _ in range(2))
    product = torch.empty(size, size, device=device, dtype=kind)
    times = 20 if device.type == "cuda" else 3

    def rate(multiply_once: Callable[[], object]) -> float:
        def step(_: int) -> None:
            for _time in range(times):
                multiply_once()

        return times * 2 * size**3 / timed(step, 3, device).seconds

    rates = [rate(lambda: torch.mm(left, right, out=product))]
    if can_use_onednn(left, right):
        rates.append(rate(lambda: multiply(left, right)))
    return max(rates)
