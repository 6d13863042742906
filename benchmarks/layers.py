"""What kinds of layers cost: a row for each sequence, windows, and what they cost dense models.

    python -m benchmarks.layers [--rounds 3] [--base FOLDER]

A model with recurrent layers is read one sequence a row. What that costs is measured on a dense
model of random weights in SmolLM2-135M's size, forward and backward, on the sums of `quickstart
--real`: packed rows with each prompt once, packed rows, and a row each. Windows are measured in the
transformers engine: one model of random weights with a window and without. With `--base`, a
checkout of another commit, a dense model's step and decoding are compared with that commit's: both
sides are processes that take turns, and must come to the same bits.

All sides take turns on one CPU thread; seconds are of the process's own CPU time, which other
processes on the machine change little.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch
from tinkermq.actors.engine.transformers.transformers_engine import TransformersEngine
from tinkermq.actors.policy.model_folder import load_causal_lm
from tinkermq.actors.policy.tiny_models import make_tokenizer
from tinkermq.actors.training.batch import assemble
from tinkermq.actors.training.model import Scorer, load_model
from tinkermq.actors.training.packing import pack
from tinkermq.actors.training.parallel import Parallel
from tinkermq.actors.training.step import Trainer
from tinkermq.schemas.config.job import JobConfig
from transformers import Qwen2Config
from transformers.models.mistral import MistralConfig, MistralForCausalLM
from transformers.utils import logging

from benchmarks.engine import CONTEXT, make_load, run_engine
from benchmarks.learner_real import QUICK, SUMS, StepWork, make_groups
from benchmarks.report import Report, parser
from benchmarks.sizes import SIZES, SMOLLM2, save_random_weights

ROOT = Path(__file__).resolve().parents[1]
FALLBACK, WINDOWED = 1.3, 1.1
NOT_SLOWER = 1.02
ROWS = {
    "packed, a prompt once": {"share_prompts": True},
    "packed": {},
    "a row each": {"one_per_row": True},
}
WINDOW = 32
Side = Callable[[], float | str]
"""One turn; returns what must be equal on all sides of a comparison."""


def in_turns(sides: Mapping[str, Side], rounds: int) -> dict[str, list[float]]:
    """Return the CPU seconds of each side's turns behind a first one."""
    took: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds + 1):
        for name, turn in sides.items():
            started = time.process_time()
            turn()
            took[name].append(time.process_time() - started)
    return {name: seconds[1:] for name, seconds in took.items()}


def ratio(took: Mapping[str, Sequence[float]], side: str, other: str) -> float:
    """Return the median over the rounds of one side's seconds over another's."""
    return median(one / base for one, base in zip(took[side], took[other], strict=True))


# -- rows ------------------------------------------------------------------------------------------


def compare_rows(shape: Qwen2Config, work: StepWork, rounds: int, report: Report) -> None:
    """Measure a pass forward and backward over each kind of rows."""
    with tempfile.TemporaryDirectory() as place:
        save_random_weights(shape, Path(place))
        model: Any = load_causal_lm(place, dtype=torch.float32)
    sequences = assemble(make_groups(work, shape.vocab_size)).sequences
    columns: dict[str, int] = {}

    def side(name: str) -> Side:
        scorer = Scorer(model, temperature=1.0)
        scorer.one_per_row = name == "a row each"
        micros = pack(
            sequences,
            max_row_tokens=16 * work.row_tokens,
            microbatch_tokens=16 * work.row_tokens,
            hidden_size=scorer.hidden_size,
            **cast("dict[str, Any]", ROWS[name]),
        )
        columns[name] = sum(micro.input_ids_BT.numel() for micro in micros)

        def turn() -> float:
            model.zero_grad()
            total = 0.0
            for micro in micros:
                logprob = scorer.score(micro).logprobs_N.sum()
                cast(Any, logprob).backward()
                total += float(logprob.detach())
            return total

        return turn

    took = in_turns({name: side(name) for name in ROWS}, rounds)
    rows = [(name, f"{columns[name]:,}", f"{median(took[name]):.2f} s") for name in ROWS]
    answers = f"{work.groups} × {work.answers} answers, prompts of {work.prompt} tokens"
    report.table(f"Rows: {answers}", ("rows", "columns", "pass"), rows)
    report.at_most("a row each over packed rows", ratio(took, "a row each", "packed"), FALLBACK)
    shared = ratio(took, "a row each", "packed, a prompt once")
    report.at_most("a row each over packed rows with each prompt once", shared, None)


# -- windows ---------------------------------------------------------------------------------------


def save_windowed(folder: Path, window: int | None, layers: int) -> str:
    """Write a model of random weights with a window in each layer, or without."""
    config = MistralConfig(
        vocab_size=264,
        hidden_size=256,
        intermediate_size=672,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        sliding_window=window,
    )
    torch.manual_seed(0)
    MistralForCausalLM(config).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


def compare_windows(rounds: int, report: Report, *, quick: bool) -> None:
    """Measure the engine on answers longer than the window."""
    load = make_load("answers", 4 if quick else 16, (16, 48), (40, 60) if quick else (120, 180))
    with tempfile.TemporaryDirectory() as place, asyncio.Runner() as runner, ExitStack() as stack:

        def side(name: str, window: int | None) -> Side:
            folder = save_windowed(Path(place) / name, window, 1 if quick else 4)
            start = TransformersEngine.start(folder, max_slots=16, max_context=CONTEXT)
            engine = runner.run(start)
            stack.callback(lambda: runner.run(engine.close()))
            return lambda: runner.run(run_engine(engine, load)).seconds

        sides = {"windows": side("windows", WINDOW), "full": side("full", None)}
        took = in_turns(sides, rounds)
    rows = [(name, f"{median(seconds):.2f} s") for name, seconds in took.items()]
    tokens = sum(load.new_tokens)
    report.table(f"Engine: {tokens:,} tokens, windows of {WINDOW}", ("layers", "takes"), rows)
    report.at_most("windows over full attention", ratio(took, "windows", "full"), WINDOWED)


# -- another commit --------------------------------------------------------------------------------


def serve() -> None:
    """Take turns on request, one a line: a step of a dense model, or its decoding."""
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as place, asyncio.Runner() as runner:
        save_random_weights(SIZES["small"], Path(place))
        make_tokenizer().save_pretrained(place)
        config = JobConfig.model_validate(
            {
                "model": {"path": place},
                "env": {"game": "none"},
                "rollout": {
                    "max_prompt_tokens": 64,
                    "max_turn_tokens": 64,
                    "max_response_tokens": 64,
                },
                "learner": {"max_row_tokens": 256, "microbatch_tokens": 1024},
            }
        )
        model: Any = load_model(config.model, config.learner)
        trainer = Trainer(model, config, total_steps=1000, parallel=Parallel())
        batch = assemble(make_groups(SUMS, int(SIZES["small"].vocab_size)))
        load = make_load("answers", 16, (16, 48), (60, 90))
        engine = runner.run(TransformersEngine.start(place, max_slots=16, max_context=CONTEXT))
        steps = iter(range(1, 1000))

        def step() -> str:
            trainer.step(batch, next(steps))
            return float(sum(weight.detach().double().sum() for weight in model.parameters())).hex()

        turns = {"step": step, "decoding": lambda: runner.run(run_engine(engine, load)) and ""}
        for line in sys.stdin:
            started = time.process_time()
            result = turns[line.strip()]()
            print(json.dumps([time.process_time() - started, result]), flush=True)
        runner.run(engine.close())


def compare_commits(base: Path, rounds: int, report: Report) -> None:
    """Measure this checkout and another one by turns."""
    with ExitStack() as stack:
        sides: dict[str, Any] = {}
        for name, folder in (("here", ROOT), ("there", base)):
            path = os.pathsep.join(map(str, (folder / "typings", ROOT)))
            command = [sys.executable, "-c", "from benchmarks.layers import serve; serve()"]
            sides[name] = stack.enter_context(
                subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env={**os.environ, "PYTHONPATH": path},
                )
            )
        for kind in ("step", "decoding"):
            took: dict[str, list[float]] = {name: [] for name in sides}
            for _ in range(rounds + 1):
                results: list[str] = []
                for name, process in sides.items():
                    process.stdin.write(f"{kind}\n")
                    process.stdin.flush()
                    seconds, result = json.loads(process.stdout.readline())
                    took[name].append(seconds)
                    results.append(result)
                if len(set(results)) > 1:
                    raise RuntimeError(f"the weights after a {kind} differ: {results}")
            took = {name: seconds[1:] for name, seconds in took.items()}
            report.at_most(
                f"dense {kind}: here over there", ratio(took, "here", "there"), NOT_SLOWER
            )
        for process in sides.values():
            process.stdin.close()


def main() -> None:
    """Parse the arguments, measure, and report."""
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--base", type=Path, metavar="FOLDER", help="a checkout to compare with")
    arguments = options.parse_args()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    quick = arguments.quick
    rounds = 1 if quick else arguments.rounds
    report = Report("layers", "What kinds of layers cost", quick=quick)
    compare_rows(SIZES["small"] if quick else SMOLLM2, QUICK if quick else SUMS, rounds, report)
    compare_windows(rounds if quick else 3 * rounds, report, quick=quick)
    if arguments.base is not None:
        compare_commits(arguments.base.resolve(), 5 * rounds, report)
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
