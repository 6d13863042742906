"""The learner's step on a language model, against plain PyTorch and the machine's matrix rate.

    python -m benchmarks.learner_real [--rounds 2]

SmolLM2-135M-Instruct (`tinkermq model get smollm2`), all weights trained, float32, one CPU thread.
Both sides take turns in one process on the same tokens: ours by `Trainer.step`; the peer as a
training script does it, with one row for each answer, padded to the longest, one group of answers a
pass, the cross-entropy of the answers, clipping and AdamW.

The matrix rate is that of products of two matrices of 1,024 × 1,024, measured between the steps.
Operations are counted that the tokens need where a prompt is computed once: 6 for each weight of
the layers and column, 6 for each weight of the output layer and column that predicts a token, and
12 · layers · width for each pair of a column and one that it sees. The optimiser counts as none, so
few groups a step have a smaller share than a whole batch.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tinkermq.actors.training.batch import assemble
from tinkermq.actors.training.model import load_model
from tinkermq.actors.training.parallel import Parallel
from tinkermq.actors.training.step import Trainer
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.model_catalogue import find_model
from tinkermq.schemas.rollout import Group, Trajectory
from tinkermq.schemas.task import Task
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from benchmarks.learner_step import RATE, matrix_rate
from benchmarks.report import Report, parser

MODEL = "smollm2"
OVER_PLAIN = 1.5
"""A step of ours is expected to be so many times as fast where answers share a prompt."""
OF_THE_RATE = 0.75
_RATE_SIZE = 1024


@dataclass(frozen=True)
class StepWork:
    """Groups of answers to a prompt each."""

    name: str
    groups: int
    answers: int
    """Of each group."""
    prompt: int
    """Tokens of each prompt."""
    shortest: int
    longest: int
    """Tokens of an answer."""
    row_tokens: int
    """Columns of a row, and of a pass."""

    def lengths(self) -> NDArray[np.int64]:
        """Return the tokens of each answer, int[groups, answers]."""
        shape = (self.groups, self.answers)
        return np.random.default_rng(0).integers(self.shortest, self.longest + 1, shape)

    def ids(self, vocab_size: int) -> list[list[NDArray[np.int64]]]:
        """Return the tokens of each answer of each group, behind the prompt that they share."""
        rng = np.random.default_rng(1)

        def group(lengths: NDArray[np.int64]) -> list[NDArray[np.int64]]:
            prompt = rng.integers(8, vocab_size, self.prompt)
            return [np.concatenate([prompt, rng.integers(8, vocab_size, n)]) for n in lengths]

        return [group(lengths) for lengths in self.lengths()]

    def operations(self, config: Any) -> float:
        """Return what the tokens need, forward and backward."""
        layers, width, ffn = config.num_hidden_layers, config.hidden_size, config.intermediate_size
        keys = width * config.num_key_value_heads // config.num_attention_heads
        in_layers = layers * (2 * width * width + 2 * width * keys + 3 * width * ffn)
        behind = self.lengths() - 1  # nothing is predicted at an answer's last token
        columns = self.groups * self.prompt + int(behind.sum())
        predicting = self.groups + int(behind.sum())
        seen = self.groups * self.prompt * (self.prompt + 1) // 2
        seen += int((behind * self.prompt + behind * (behind + 1) // 2).sum())
        linear = 6 * (in_layers * columns + config.vocab_size * width * predicting)
        return float(linear + 12 * layers * width * seen)


SUMS = StepWork("sums", 4, 8, 45, 4, 16, 240)
BATCH = StepWork("a whole batch", 16, 8, 45, 4, 16, 240)
LONG = StepWork("long answers", 1, 2, 64, 192, 448, 512)
QUICK = StepWork("quick", 1, 2, 8, 2, 4, 32)


def load_trainer(work: StepWork, rate: float = RATE) -> Trainer:
    """Load the model with an optimiser, as a learner of such work does."""
    config = JobConfig.model_validate(
        {
            "model": {"path": find_model(MODEL)},
            "env": {"game": "none"},
            "rollout": {
                "group_size": work.answers,
                "max_prompt_tokens": work.prompt,
                "max_turn_tokens": work.longest,
                "max_response_tokens": work.longest,
            },
            "learner": {
                "lr": rate,
                "max_row_tokens": work.row_tokens,
                "microbatch_tokens": work.row_tokens,
            },
        }
    )
    model: Any = load_model(config.model, config.learner)
    return Trainer(model, config, total_steps=1000, parallel=Parallel.alone())


def our_side(work: StepWork) -> tuple[Callable[[int], None], Any]:
    """Return a step of ours by its number, and the model's configuration."""
    trainer = load_trainer(work)
    model: Any = trainer.model
    batch = assemble(make_groups(work, model.config.vocab_size))

    def step(number: int) -> None:
        if trainer.step(batch, number).numbers["actor/skipped_updates"]:
            raise RuntimeError("the gradient was not finite")

    return step, model.config


def make_groups(work: StepWork, vocab_size: int) -> list[Group]:
    """Return the groups of a batch, every second answer rewarded."""

    def trajectory(ids: NDArray[np.int64], reward: float) -> Trajectory:
        mask = (np.arange(len(ids)) >= work.prompt).astype(np.uint8)
        return Trajectory(
            token_ids=ids.astype(np.int32),
            mask=mask,
            logprobs=np.where(mask, -9.0, 0.0).astype(np.float32),
            versions=np.where(mask, 0, -1).astype(np.int32),
            turn_ends=np.array([len(ids) - 1], dtype=np.int32),
            rewards=np.array([reward], dtype=np.float32),
        )

    return [
        Group(
            task=Task(task=at, index=at, seed=0, group_size=work.answers, min_version=0),
            trajectories=[trajectory(ids, number % 2) for number, ids in enumerate(group)],
            source="measured",
        )
        for at, group in enumerate(work.ids(vocab_size))
    ]


def plain_side(work: StepWork) -> Callable[[int], None]:
    """Return a step of a plain training script by its number."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(find_model(MODEL), dtype=torch.float32)
    model = loaded.train()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    passes = [_padded(work, group) for group in work.ids(model.config.vocab_size)]

    def step(_: int) -> None:
        optimizer.zero_grad()
        for ids, real, labels in passes:
            output = model(input_ids=ids, attention_mask=real, labels=labels, use_cache=False)
            (output.loss / len(passes)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def _padded(work: StepWork, group: list[NDArray[np.int64]]) -> tuple[torch.Tensor, ...]:
    """Return ids, mask and labels, int64[B, T], padded to the longest of a group."""
    ids = torch.zeros(len(group), max(map(len, group)), dtype=torch.int64)
    real = torch.zeros_like(ids)
    for row, tokens in enumerate(group):
        ids[row, : len(tokens)] = torch.from_numpy(tokens)
        real[row, : len(tokens)] = 1
    labels = ids.masked_fill(real == 0, -100)
    labels[:, : work.prompt] = -100
    return ids, real, labels


def in_turns(sides: Mapping[str, Callable[[int], None]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each side's steps, behind a first one; sides take turns."""
    took: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, step in sides.items():
            started = time.perf_counter()
            step(number + 1)
            took[name].append(time.perf_counter() - started)
    return {name: seconds[1:] for name, seconds in took.items()}


def measure(work: StepWork, rounds: int, report: Report) -> list[tuple[str, ...]]:
    """Measure both sides on some work, of a whole batch ours alone; return rows of the table."""
    our_step, config = our_side(work)
    rates: list[float] = []
    sides = {"ours": our_step}
    if work is not BATCH:
        sides["plain"] = plain_side(work)
    rated = sides | {"rate": lambda _: rates.append(matrix_rate("float32", _RATE_SIZE))}
    took = in_turns(rated, rounds)
    rate = median(rates)
    times = {name: median(took[name]) for name in sides}
    operations = work.operations(config)
    if "plain" in took:
        pairs = zip(took["ours"], took["plain"], strict=True)
        ratio = median(theirs / mine for mine, theirs in pairs)
        target = OVER_PLAIN if work is SUMS else None
        report.at_least(f"{work.name}: ours over plain", ratio, target)
    share = operations / times["ours"] / rate
    target = None if work is SUMS else OF_THE_RATE
    report.at_least(f"{work.name}: ours over the matrix rate", share, target)
    tokens = work.groups * work.answers * work.prompt + int(work.lengths().sum())
    shape = f"{work.groups} × {work.answers}, {work.shortest} to {work.longest} tokens"
    return [
        (
            work.name,
            shape,
            name,
            f"{seconds:.2f} s",
            f"{tokens / seconds:,.0f}",
            f"{operations / seconds / 1e9:,.0f}",
            f"{operations / seconds / rate:.0%}",
        )
        for name, seconds in times.items()
    ]


def main() -> None:
    """Parse the arguments, measure, and report."""
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=2)
    arguments = options.parse_args()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    report = Report("learner_real", "The learner's step on SmolLM2-135M", quick=arguments.quick)
    works = [QUICK] if arguments.quick else [SUMS, BATCH, LONG]
    rounds = 1 if arguments.quick else arguments.rounds
    rows = [row for work in works for row in measure(work, rounds, report)]
    report.table(
        "SmolLM2-135M-Instruct, float32, one CPU thread",
        ("work", "answers", "side", "step", "tokens/s", "needed GFLOP/s", "of the matrix rate"),
        rows,
    )
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
