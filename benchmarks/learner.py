"""The learner's step against a plain transformers training step, and what the device can do.

    python -m benchmarks.learner [--weights "0.5 B" "1.5 B"] [--lengths 2048 8192]
        [--sequences 16] [--steps 5] [--attention flash_attention_2] [--checkpointing]

Random weights of Qwen2's sizes, bfloat16 on a GPU. What both sides do and what is counted stands in
`benchmarks/learner_step.py`. A third side is ours with `learner.compile`; the time
of its first step, in which it compiles, stands beside. Without a GPU a small model of the same
class is measured in float32 unless sizes are named, which says that all runs and nothing about a
GPU. One process: several ranks are proven equal in tests, and their speed is measured nowhere yet.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from tinkermq.actors.training.rank_batches import cost, longest_first
from transformers.utils import logging

from benchmarks.learner_step import (
    OVER_TRANSFORMERS,
    StepSequences,
    StepWay,
    matrix_rate,
    our_step,
    plain_step,
)
from benchmarks.report import Report, parser
from benchmarks.sizes import SIZES, save_random_weights


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
    kernels = ("auto", "sdpa", "varlen", "flash_attention_2")
    options.add_argument("--attention", choices=kernels, default="auto", help="of the learner")
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
            num_weights = save_random_weights(config, Path(place))
            for longest in arguments.lengths:
                work = StepSequences(config.vocab_size, longest, arguments.sequences)
                way = StepWay(
                    Path(place),
                    2 * longest,
                    dtype,
                    arguments.attention,
                    arguments.checkpointing,
                    arguments.steps,
                )
                sides = {"ours": our_step(way, work), "transformers": plain_step(way, work)}
                if not arguments.quick:  # compiling alone takes longer than all the rest
                    sides["ours, compiled"] = our_step(way, work, compiled=True)
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
                    target = OVER_TRANSFORMERS if side == "ours" else None
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
