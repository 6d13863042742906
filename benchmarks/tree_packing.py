"""Trees of calls packed as trees against one row for each call.

    python -m benchmarks.tree_packing [--calls 20] [--episodes 2] [--call-tokens 160] [--steps 3]

An agent whose history is rendered anew at each call, without the reasoning of the calls before: an
episode of 20 calls is 20 rows that begin alike. Columns are those that go through the model once in
a step, padding included; seconds are of `Trainer.step`, with all that belongs to a step. The model
is a small one with random weights, in float32 on one CPU thread, or in bfloat16 on a GPU. The other
side is the same learner with `learner.share_prompts=false`.
"""

import argparse
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tinkermq.actors.training.batch import TrainingBatch, assemble
from tinkermq.actors.training.model import load_model
from tinkermq.actors.training.packing import pack
from tinkermq.actors.training.parallel import Parallel
from tinkermq.actors.training.step import Trainer
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.rollout import Group, Trajectory
from tinkermq.schemas.task import Task
from transformers import Qwen2ForCausalLM
from transformers.utils import logging

from benchmarks.learner_step import timed
from benchmarks.report import Report, parser
from benchmarks.sizes import SIZES


@dataclass(frozen=True)
class Shape:
    """What the episodes are like, in tokens."""

    calls: int
    """Calls of an episode."""
    system: int
    """System prompt, tools and question."""
    reasoning: int
    """Of each call, and in no later prompt."""
    said: int
    """Of each call, and in all later prompts."""
    result: int
    """What a tool gives back."""

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        between = (self.calls - 1) * (self.said + self.result)
        return self.system + between + self.reasoning + self.said


def episode(shape: Shape, number: int, system: np.ndarray) -> list[Trajectory]:
    """Return a row for each call of an episode, the last call first."""
    rng = np.random.default_rng(number)
    history, rows = system, list[Trajectory]()
    for call in range(shape.calls):
        generated = rng.integers(8, 8192, shape.reasoning + shape.said)
        ids = np.concatenate([history, generated]).astype(np.int32)
        mask = (np.arange(len(ids)) >= len(history)).astype(np.uint8)
        is_last = call == shape.calls - 1
        rows.append(
            Trajectory(
                token_ids=ids,
                mask=mask,
                logprobs=np.where(mask, -9.0, 0.0).astype(np.float32),
                versions=np.where(mask, 0, -1).astype(np.int32),
                turn_ends=np.array([len(ids) - 1], dtype=np.int32),
                rewards=np.array([float(is_last and number % 2)], dtype=np.float32),
                episode=number,
                kind="main" if is_last else "edited",
            )
        )
        kept = generated[shape.reasoning :]
        history = np.concatenate([history, kept, rng.integers(8, 8192, shape.result)])
    return rows[::-1]


def batch_of(shape: Shape, episodes: int) -> TrainingBatch:
    """Lay out one task with so many episodes."""
    system = np.random.default_rng(99).integers(8, 8192, shape.system)
    rows = [row for number in range(episodes) for row in episode(shape, number, system)]
    task = Task(task=0, index=0, seed=0, group_size=episodes, min_version=0)
    return assemble([Group(task=task, trajectories=rows, source="benchmark")])


def columns_of(batch: TrainingBatch, max_row_tokens: int, hidden_size: int, *, share: bool) -> int:
    """Return the columns of a pass through the model, padding included."""
    packed = pack(
        batch.sequences,
        max_row_tokens=max_row_tokens,
        microbatch_tokens=max_row_tokens,
        share_prompts=share,
        hidden_size=hidden_size,
    )
    return sum(math.prod(micro.input_ids_BT.shape) for micro in packed)


def measure(
    folder: Path, shape: Shape, batch: TrainingBatch, steps: int, *, share: bool
) -> tuple[int, float]:
    """Return the columns of a pass through the model, and the seconds of a step."""
    max_row_tokens = 4 * shape.longest
    config = JobConfig.model_validate(
        {
            "model": {"path": str(folder)},
            "env": {"game": "none"},
            "rollout": {
                "max_prompt_tokens": shape.longest,
                "max_turn_tokens": shape.longest,
                "max_response_tokens": shape.longest,
            },
            "algorithm": {"correction": "none"},
            "learner": {
                "lr": 1e-6,
                "dtype": "bfloat16" if torch.cuda.is_available() else "float32",
                "max_row_tokens": max_row_tokens,
                "microbatch_tokens": max_row_tokens,
                "share_prompts": share,
                "threads": torch.get_num_threads(),
            },
        }
    )
    model = load_model(config.model, config.learner)
    columns = columns_of(batch, max_row_tokens, int(model.config.hidden_size), share=share)
    trainer = Trainer(model, config, total_steps=steps + 1, parallel=Parallel.alone())
    device = next(model.parameters()).device

    def step(number: int) -> None:
        if trainer.step(batch, number).numbers["actor/skipped_updates"]:
            raise RuntimeError("the gradient was not finite: this was no training step")

    return columns, timed(step, steps, device).seconds


def main() -> None:
    """Parse the arguments, measure both sides, and report."""
    options = parser(__doc__)
    options.add_argument("--calls", type=int, default=20)
    options.add_argument("--episodes", type=int, default=2)
    options.add_argument("--call-tokens", type=int, default=160, help="generated by each call")
    options.add_argument("--steps", type=int, default=3)
    arguments = options.parse_args()
    logging.disable_progress_bar()
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    if arguments.quick:
        arguments.call_tokens, arguments.steps = 16, 1
    report = Report("tree_packing", "Trees of calls against a row each", quick=arguments.quick)
    compare(arguments, report)
    report.finish(arguments.json)


def compare(arguments: argparse.Namespace, report: Report) -> None:
    """Measure both sides."""
    tokens = arguments.call_tokens
    shape = Shape(arguments.calls, 4 * tokens, tokens // 2, tokens - tokens // 2, tokens // 2)
    batch = batch_of(shape, arguments.episodes)
    with tempfile.TemporaryDirectory() as place:
        torch.manual_seed(0)
        model: Any = Qwen2ForCausalLM(SIZES["small"])
        model.save_pretrained(place)
        del model
        sides = {
            name: measure(Path(place), shape, batch, arguments.steps, share=share)
            for name, share in (("trees", True), ("a row for each call", False))
        }
    columns, seconds = zip(*sides.values(), strict=True)
    report.table(
        f"{arguments.episodes} episodes of {shape.calls} calls, rows of up to {shape.longest:,}",
        ("side", "columns", "step"),
        [(side, f"{number:,}", f"{took:.2f} s") for side, (number, took) in sides.items()],
    )
    hidden_size = int(SIZES["small"].hidden_size)
    rows: list[tuple[str, ...]] = []
    for factor in (1, 2, 4, 8):
        tokens = factor * shape.longest
        trees = columns_of(batch, tokens, hidden_size, share=True)
        rows.append((f"{factor} × the longest", f"{trees:,}", f"{columns[1] / trees:.1f}×"))
    report.table("by learner.max_row_tokens", ("max_row_tokens", "columns as trees", "fewer"), rows)
    report.at_least("columns: a row for each call over trees", columns[1] / columns[0], 3.0)
    report.at_least("step: a row for each call over trees", seconds[1] / seconds[0], None)


if __name__ == "__main__":
    main()
