"""A step with functions of the user's own, in a process of their own, against built-in ones.

    python -m benchmarks.own_functions [--sequences 16] [--tokens 256] [--steps 5]

Both sides train one model of random weights in SmolLM2-135M's size by turns on the same batch: with
`own_advantage` and `own_loss` of examples/own_algorithms.py, and with `dr_grpo` and `ppo`.
"""

# transformers leaves some of its methods untyped.
# pyright: reportUnknownMemberType=false

import argparse
import tempfile
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

import torch
from numpy.typing import NDArray
from tinkermq.actors.training.batch import TrainingBatch, assemble
from tinkermq.actors.training.functions.calls import CustomFunction, OwnFunctions
from tinkermq.actors.training.model import load_model
from tinkermq.actors.training.parallel import Parallel
from tinkermq.actors.training.step import Trainer
from tinkermq.schemas.config.job import JobConfig
from transformers.utils import logging

from .learner_step import StepSequences
from .report import Report, parser
from .sizes import ALL_CORES, SIZES, SMOLLM2, save_random_weights

OWN = {
    "own_advantage": "examples.own_algorithms:best_of_group",
    "own_loss": "examples.own_algorithms:clipped",
}
BUILT_IN = {"advantage": "dr_grpo", "loss": "ppo"}
MOST = 1.03
"""A step with functions of one's own is expected to take so many times as long."""


class TimedFunctions(OwnFunctions):
    """Functions whose calls are timed."""

    seconds = 0.0

    def request(
        self,
        function: CustomFunction,
        message: Mapping[str, Any],
        arrays: dict[str, NDArray[Any]],
        *,
        result_bytes: int = 0,
        call_s: float | None = None,
    ) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """Send one request, and add the time to the answer."""
        started = time.perf_counter()
        try:
            return super().request(
                function, message, arrays, result_bytes=result_bytes, call_s=call_s
            )
        finally:
            self.seconds += time.perf_counter() - started


def config_of(folder: Path, tokens: int, algorithm: dict[str, str]) -> JobConfig:
    """Return the configuration of one side."""
    return JobConfig.model_validate(
        {
            "model": {"path": str(folder)},
            "env": {"game": "none"},
            "rollout": {
                "max_prompt_tokens": tokens,
                "max_turn_tokens": tokens,
                "max_response_tokens": tokens,
            },
            "algorithm": {"correction": "none", **algorithm},
            "learner": {
                "lr": 1e-6,
                "dtype": "bfloat16" if torch.cuda.is_available() else "float32",
                "max_row_tokens": 2 * tokens,
                "microbatch_tokens": 4 * tokens,
                "threads": torch.get_num_threads(),
            },
        }
    )


def step_s(trainer: Trainer, batch: TrainingBatch, number: int) -> float:
    """Return the seconds of one step."""
    started = time.perf_counter()
    if trainer.step(batch, number).numbers["actor/skipped_updates"]:
        raise RuntimeError("the gradient was not finite: this was no training step")
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def compare(arguments: argparse.Namespace, report: Report, folder: Path) -> None:
    """Measure both sides by turns."""
    own = config_of(folder, arguments.tokens, OWN)
    built_in = config_of(folder, arguments.tokens, BUILT_IN)
    model = load_model(own.model, own.learner)
    work = StepSequences(int(model.config.vocab_size), arguments.tokens, arguments.sequences)
    batch = assemble(work.groups())
    took: dict[str, list[float]] = {"built-in": [], "own": [], "calls": []}
    with closing(TimedFunctions.of(own)) as functions:
        assert isinstance(functions, TimedFunctions)
        total = arguments.steps + 1
        alone = Parallel.alone
        with_own = Trainer(model, own, total_steps=total, parallel=alone(), functions=functions)
        plain = Trainer(model, built_in, total_steps=total, parallel=alone())
        for number in range(1, total + 1):
            took["built-in"].append(step_s(plain, batch, number))
            functions.seconds = 0.0
            took["own"].append(step_s(with_own, batch, number))
            took["calls"].append(functions.seconds)
    seconds = {side: median(each[1:]) for side, each in took.items()}  # the first warms up
    report.table(
        f"{arguments.sequences} sequences, {batch.num_tokens:,} generated tokens",
        ("", "seconds"),
        [(side, f"{each:.3f}") for side, each in seconds.items()],
    )
    ratios = [own / other for own, other in zip(took["own"], took["built-in"], strict=True)]
    report.at_most("step: own functions over built-in ones", median(ratios[1:]), MOST)
    share = 1 + seconds["calls"] / seconds["built-in"]
    report.at_most("step and calls of functions over the step", share, MOST)


def main() -> None:
    """Parse the arguments, measure both sides, and report."""
    options = parser(__doc__)
    options.add_argument("--sequences", type=int, default=16)
    options.add_argument("--tokens", type=int, default=256, help="of the longest sequence")
    options.add_argument("--steps", type=int, default=5)
    arguments = options.parse_args()
    logging.disable_progress_bar()
    shape = SMOLLM2
    if arguments.quick:
        arguments.tokens, arguments.steps, shape = 64, 1, SIZES["small"]
    elif not torch.cuda.is_available():
        torch.set_num_threads(ALL_CORES)
    report = Report("own_functions", "Functions of one's own", quick=arguments.quick)
    with tempfile.TemporaryDirectory() as place:
        save_random_weights(shape, Path(place))
        compare(arguments, report, Path(place))
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
