"""A step of a Tinker session's model, against the same step in plain PyTorch and PEFT.

    python -m benchmarks.tinker_step [--rounds 5]

forward_backward and optim_step of one model with rank 32 on all linear layers, the output layer
included, beside an adapter of another user. The plain side is what a training script does: PEFT's
adapter on transformers' model, a padded batch, the log-softmax of all logits, torch's AdamW. Both
sides take turns in one process, and must come to the same loss at each step.

Data: conversations of one length, every token trained; and answers to one prompt, as RL has them,
where the prompt is computed once.
"""

import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from tinkermq.actors.policy.tiny_models import make_model
from tinkermq.actors.tinker.training.adapter import ALPHA
from tinkermq.actors.tinker.training.trainer import AdapterTrainer
from tinkermq.schemas.tinker.datum import AdamParams, Datum, LoraSpec
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from benchmarks.report import Report, parser

RANK = 32
PARAMS = AdamParams(1e-4)
Kind = Literal["one length", "one prompt"]
KINDS: tuple[Kind, ...] = ("one length", "one prompt")


@dataclass(frozen=True)
class Size:
    """A model and a batch."""

    name: str
    width: int
    layers: int
    vocab: int
    datums: int
    tokens: int
    """Of each datum."""
    target: float | None = None
    """Largest ratio to the plain step."""


SMALL = Size("1 M", 128, 4, 1024, 8, 128)
MIDDLE = Size("20 M", 384, 8, 8192, 8, 128)
LARGE = Size("100 M", 768, 12, 24576, 8, 128, target=1.15)
QUICK = Size("quick", 64, 2, 264, 4, 32)


def make(size: Size, folder: Path) -> Path:
    """Write the model."""
    model: Any = make_model(
        kind="llama", width=size.width, layers=size.layers, heads=4, vocab_size=size.vocab
    )
    model.save_pretrained(folder)
    return folder


def make_data(size: Size, kind: Kind) -> list[Datum]:
    """Make a batch: all tokens trained, or three quarters a prompt that is not."""
    rng = np.random.default_rng(0)
    shape = (size.datums, size.tokens + 1)
    ids = rng.integers(8, size.vocab, shape)
    weights = np.ones((size.datums, size.tokens), dtype=np.float32)
    if kind == "one prompt":
        prompt = size.tokens * 3 // 4
        ids[:, :prompt] = ids[0, :prompt]
        weights[:, : prompt - 1] = 0
    return [
        Datum(row[:-1].astype(np.int32), {"target_tokens": row[1:], "weights": weight})
        for row, weight in zip(ids, weights, strict=True)
    ]


class Ours:
    """A model of a session."""

    def __init__(self, folder: Path) -> None:
        self.trainer = AdapterTrainer.open(str(folder))
        self.trainer.create("another", LoraSpec(8))
        self.trainer.create("model", LoraSpec(RANK))

    def step(self, data: Sequence[Datum]) -> float:
        """Make one step; return the loss."""
        result = self.trainer.forward_backward("model", data, "cross_entropy")
        self.trainer.optim_step("model", PARAMS)
        return result.metrics["loss:sum"]


class Plain:
    """A training script."""

    def __init__(self, folder: Path, start: dict[str, Tensor]) -> None:
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        targets = sorted({name.split(".")[-3] for name in start})
        config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets)
        self.model: Any = get_peft_model(base, config)
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                parameter.data.copy_(start[name.replace(".default.", ".")])
        trained = [each for each in self.model.parameters() if each.requires_grad]
        self.optimizer = torch.optim.AdamW(
            trained,
            lr=PARAMS.learning_rate,
            betas=(PARAMS.beta1, PARAMS.beta2),
            eps=PARAMS.eps,
            weight_decay=PARAMS.weight_decay,
        )

    def step(self, data: Sequence[Datum]) -> float:
        """Make one step; return the loss."""
        ids, targets, weights = (
            torch.from_numpy(np.stack(rows))
            for rows in (
                [one.tokens.astype(np.int64) for one in data],
                [one.inputs["target_tokens"] for one in data],
                [one.inputs["weights"] for one in data],
            )
        )
        logits = self.model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        logprobs = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
        loss = -(weights * logprobs).sum()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())


def compare(size: Size, kind: Kind, folder: Path, rounds: int) -> tuple[float, float, float]:
    """Return seconds of our step and of the plain one, and their ratio: medians over rounds."""
    data = make_data(size, kind)
    ours = Ours(folder)
    plain = Plain(folder, ours.trainer.tensors("model"))
    took: list[tuple[float, float]] = []
    for number in range(rounds + 1):
        seconds: list[float] = []
        losses: list[float] = []
        for side in (ours, plain):
            started = time.perf_counter()
            losses.append(side.step(data))
            seconds.append(time.perf_counter() - started)
        if abs(losses[0] - losses[1]) > 1e-4 * abs(losses[1]):
            raise RuntimeError(f"the losses of step {number} differ: {losses}")
        took.append((seconds[0], seconds[1]))
    kept = took[1:]  # the first one warms up
    return (
        median(one for one, _ in kept),
        median(other for _, other in kept),
        median(one / other for one, other in kept),
    )


def measure(sizes: Sequence[Size], rounds: int, report: Report) -> None:
    """Measure each size with each kind of data."""
    rows: list[list[str]] = []
    found: list[tuple[Size, Kind, float, float]] = []
    with tempfile.TemporaryDirectory() as place:
        for size in sizes:
            folder = make(size, Path(place) / size.name.replace(" ", ""))
            for kind in KINDS:
                # Steps of a few milliseconds differ by what else the machine does.
                repeated = rounds * (10 if size.width <= SMALL.width else 1)
                ours, plain, ratio = compare(size, kind, folder, repeated)
                found.append((size, kind, ours - plain, ratio))
                tokens = f"{size.datums} × {size.tokens}"
                times = [f"{1000 * ours:,.1f} ms", f"{1000 * plain:,.1f} ms", f"{ratio:.2f}×"]
                rows.append([size.name, tokens, kind, *times])
    columns = ["parameters", "tokens", "data", "a session's step", "plain", "ratio"]
    report.table(f"rank {RANK}, float32, cross_entropy", columns, rows)
    for size, kind, added, ratio in found:
        is_target = kind == "one length"
        report.at_most(f"{size.name}, {kind}", ratio, size.target if is_target else None)
        if size is SMALL and is_target:
            report.at_most(f"{size.name}, {kind}: added", 1000 * added, 15, "ms")


def main() -> None:
    """Parse the arguments, measure, and report."""
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=5)
    arguments = options.parse_args()
    torch.set_num_threads(1)
    disable_progress_bar()
    warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings")
    report = Report("tinker_step", "A Tinker session's step", quick=arguments.quick)
    sizes = [QUICK] if arguments.quick else [SMALL, MIDDLE, LARGE]
    measure(sizes, 1 if arguments.quick else arguments.rounds, report)
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
