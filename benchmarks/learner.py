"""The learner's step against a plain transformers training step, and what the device can do.

    python -m benchmarks.learner [--weights "0.5 B" "1.5 B"] [--lengths 2048 8192]
        [--sequences 16] [--steps 5] [--attention flash_attention_2] [--checkpointing]

Random weights of Qwen2's sizes, bfloat16 on a GPU. Both sides train the same sequences, of uneven
lengths as episodes are, with the same optimiser, and at most as many tokens in one pass: ours by
`Trainer.step`, with all that belongs to a step; the peer by rows padded to the longest, labels, the
loss of the model's own, clipping and AdamW. A third side is ours with `learner.compile`; the time
of its first step, in which it compiles, stands beside. Model FLOPs utilisation counts 6 operations
per weight and token and 6 · layers · width · L² of causal attention per sequence, over the rate of
a large matrix product in the same run. Without a GPU a small model of the same class is measured in
float32 unless sizes are named, which says that all runs and nothing about a GPU. One process:
several ranks are proven equal in tests, and their speed is measured nowhere yet.
"""

import argparse
import gc
import resource
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from tinkermq.actors.learner.algorithms.training_batch import assemble
from tinkermq.actors.learner.packing.balance import cost, longest_first
from tinkermq.actors.learner.training.model import load_model
from tinkermq.actors.learner.training.parallel import Parallel
from tinkermq.actors.learner.training.step import Trainer
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.rollout import Group, Trajectory
from tinkermq.schemas.task import Task
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging

from benchmarks.report import Report, parser

SIZES = {
    "small": Qwen2Config(
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=1024,
        vocab_size=8192,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    ),
    "0.5 B": Qwen2Config(
        hidden_size=896,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        intermediate_size=4864,
        vocab_size=151936,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
    ),
    "1.5 B": Qwen2Config(
        hidden_size=1536,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        intermediate_size=8960,
        vocab_size=151936,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
    ),
}
RATE = 1e-6


@dataclass
class Measured:
    """What one side needs for a step."""

    seconds: float
    first: float
    """Seconds of the first step."""
    peak_gib: float


@dataclass(frozen=True)
class Way:
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


class Work:
    """The sequences of a step."""

    def __init__(self, config: Qwen2Config, longest: int, num: int) -> None:
        """Draw `num` sequences of up to `longest` tokens, the longest among them."""
        rng = np.random.default_rng(0)
        self.lengths = [longest, *rng.integers(longest // 4, longest, num - 1).tolist()]
        self.ids = [rng.integers(8, config.vocab_size, length) for length in self.lengths]

    def groups(self) -> list[Group]:
        """Lay the sequences out as one group; an eighth of each is its prompt."""
        return [
            Group(
                task=Task(task=0, index=0, seed=0, group_size=len(self.ids), min_version=0),
                trajectories=[_trajectory(ids, at) for at, ids in enumerate(self.ids)],
                source="benchmark",
            )
        ]

    def flops(self, config: Qwen2Config, num_weights: int) -> float:
        """Return the operations of the model in a step, forward and backward."""
        attention = 6 * config.num_hidden_layers * config.hidden_size
        return sum(6 * num_weights * each + attention * each**2 for each in self.lengths)


def _trajectory(ids: np.ndarray, number: int) -> Trajectory:
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


def free() -> None:
    """Let go of what the last side held, so that the next one finds the same memory."""
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def timed(step: Callable[[int], None], steps: int, device: torch.device) -> Measured:
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
    return Measured(median(took[1:]), took[0], peak)


def ours(way: Way, work: Work, *, compiled: bool = False) -> Measured:
    """Measure `Trainer.step`."""
    free()
    longest = max(work.lengths)
    config = JobConfig.model_validate(
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
                "row_tokens": 2 * longest,
                "microbatch_tokens": max(way.budget, 2 * longest),
                "threads": torch.get_num_threads(),
            },
        }
    )
    model = load_model(config.model, config.learner)
    trainer = Trainer(model, config, total_steps=way.steps + 1, parallel=Parallel.alone())
    batch = assemble(work.groups())
    device = next(model.parameters()).device
    return timed(lambda number: _finite(trainer.step(batch, number).numbers), way.steps, device)


def _finite(numbers: dict[str, float]) -> None:
    if numbers["actor/skipped_updates"]:
        raise RuntimeError("the gradient was not finite: this was no training step")


def plain(way: Way, work: Work) -> Measured:
    """Measure a training step as transformers' documentation writes it."""
    free()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        way.folder, dtype=torch.float32, attn_implementation=way.attention
    )
    model = loaded.to(device).train()
    if way.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    longest = max(work.lengths)
    ids = torch.zeros(len(work.ids), longest, dtype=torch.int64)
    real = torch.zeros_like(ids)
    for row, tokens in enumerate(work.ids):
        ids[row, : len(tokens)] = torch.from_numpy(tokens)
        real[row, : len(tokens)] = 1
    ids, real = ids.to(device), real.to(device)
    labels = ids.masked_fill(real == 0, -100)
    num_rows = max(1, way.budget // longest)

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


def matrix_rate(dtype: str, size: int) -> float:
    """Return the operations per second of a product of two square matrices."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind: torch.dtype = getattr(torch, dtype)
    left, right = (torch.randn(size, size, device=device).to(kind) for _ in range(2))
    product = torch.empty(size, size, device=device, dtype=kind)
    times = 20 if device.type == "cuda" else 3

    def step(_: int) -> None:
        for _time in range(times):
            torch.mm(left, right, out=product)

    return times * 2 * size**3 / timed(step, 3, device).seconds


def report_balance(report: Report) -> None:
    """Tell how evenly the sequences of a long-tailed batch are divided over eight ranks."""
    rng = np.random.default_rng(0)
    lengths = [int(each) for each in rng.lognormal(6.5, 1.0, 512).clip(16, 8192)]
    costs = [cost(length, 896) for length in lengths]

    def spread(shares: list[list[int]]) -> float:
        loads = [sum(costs[at] for at in share) for share in shares]
        return 100 * (max(loads) / min(loads) - 1)

    report.at_most("ranks differ, by cost", spread(longest_first(costs, 8)), 0.1, "%")
    report.at_least("ranks differ, by token count", spread(longest_first(lengths, 8)), None, "%")


def main() -> None:
    """Parse the arguments, measure, and report."""
    options = parser(__doc__)
    options.add_argument("--weights", nargs="+", choices=SIZES, help="default: by the device")
    options.add_argument("--lengths", type=int, nargs="+", help="tokens of the longest sequence")
    options.add_argument("--sequences", type=int, default=16)
    options.add_argument("--steps", type=int, default=5)
    kernels = ("sdpa", "flash_attention_2")
    options.add_argument("--attention", choices=kernels, default="sdpa", help="of both sides")
    again = "both sides compute activations again in the backward pass"
    options.add_argument("--checkpointing", action="store_true", help=again)
    arguments = options.parse_args()
    logging.disable_progress_bar()
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        torch.set_num_threads(1)
    arguments.weights = arguments.weights or (["0.5 B", "1.5 B"] if on_gpu else ["small"])
    arguments.lengths = arguments.lengths or ([2048, 4096, 8192] if on_gpu else [512])
    if arguments.quick:
        arguments.weights, arguments.lengths = ["small"], [64]
        arguments.sequences, arguments.steps = 4, 1
    report = Report("learner", "The learner's step against transformers", quick=arguments.quick)
    measure(arguments, report, on_gpu=on_gpu)
    report_balance(report)
    report.finish(arguments.json)


def measure(arguments: argparse.Namespace, report: Report, *, on_gpu: bool) -> None:
    """Measure both sides for each size and length."""
    dtype = "bfloat16" if on_gpu else "float32"
    rate = matrix_rate(dtype, 8192 if on_gpu else 1024)
    device = torch.cuda.get_device_name() if on_gpu else "one CPU thread"
    report.note(f"{device}: {rate / 1e12:.2f} TFLOP/s in a {dtype} matrix product")
    if not on_gpu:
        report.note("A CPU: nothing here tells of a GPU.")
    rows: list[tuple[str, ...]] = []
    for name in arguments.weights:
        config = SIZES[name]
        with tempfile.TemporaryDirectory() as place:
            torch.manual_seed(0)
            model: Any = Qwen2ForCausalLM(config)
            num_weights = sum(each.numel() for each in model.parameters())
            model.save_pretrained(place)
            del model
            for longest in arguments.lengths:
                work = Work(config, longest, arguments.sequences)
                way = Way(
                    Path(place),
                    2 * longest,
                    dtype,
                    arguments.attention,
                    arguments.checkpointing,
                    arguments.steps,
                )
                sides = {"ours": ours(way, work), "transformers": plain(way, work)}
                if not arguments.quick:  # compiling alone takes longer than all the rest
                    sides["ours, compiled"] = ours(way, work, compiled=True)
                flops = work.flops(config, num_weights)
                rows += [
                    (
                        name,
                        f"{longest:,}",
                        side,
                        f"{one.seconds:.3f} s",
                        f"{one.first:.1f} s",
                        f"{sum(work.lengths) / one.seconds:,.0f}",
                        f"{flops / one.seconds / rate:.1%}",
                        f"{one.peak_gib:.2f} GiB" if on_gpu else "-",
                    )
                    for side, one in sides.items()
                ]
                for side in sorted(sides.keys() - {"transformers"}):
                    target = 1.5 if side == "ours" else None
                    ratio = sides["transformers"].seconds / sides[side].seconds
                    what = f"{name}, {longest:,} tokens: {side} over transformers"
                    report.at_least(what, ratio, target if on_gpu else None)
    report.table(
        f"{arguments.sequences} sequences a step, {dtype}",
        (
            "weights",
            "longest",
            "side",
            "step",
            "first step",
            "tokens/s",
            "of the product's rate",
            "peak memory",
        ),
        rows,
    )


if __name__ == "__main__":
    main()
