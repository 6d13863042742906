"""Whether a hybrid and a model with windows learn as a dense model of their size does.

    python -m benchmarks.evidence.kinds

Runs what has no line in results/kinds.jsonl yet, and writes the table of docs/models.md: the
calculator in a real pool, the same seeds and keys for three models of two layers and 0.4 million
weights. They are warm-started alike (`tinkermq.actors.warm_start --kind`): a Qwen3 with full
attention, a Qwen3.5 with a layer of linear attention below one of full attention, and a Gemma 3
with a layer that sees 8 tokens below one that sees all. Some five minutes on two cores, and as many
for the models.
"""

import asyncio

from tinkermq.actors.policy.tiny_models import TinyKind

from benchmarks.evidence.cells import Cell, Overrides, job_of, run_cells, take_no_arguments
from benchmarks.evidence.lagged import Curve
from benchmarks.evidence.pooled import run_pooled
from benchmarks.tasks import warm_model

EXPERIMENT, GAME = "kinds", "calculator"
SEEDS = (101, 102, 103)
BOUND, STEPS, TEST_EVERY = 2, 40, 10
KINDS: dict[TinyKind, str] = {
    "qwen3": "full attention",
    "qwen3_5_text": "linear and full attention",
    "gemma3_text": "a window of 8 tokens and full attention",
}
"""The layers of each kind."""


def cells() -> list[Cell]:
    """Return all runs, every seed's together; warm-starts the models."""
    training = {"num_steps": STEPS, "test_freq": TEST_EVERY, "max_staleness": BOUND}

    def overrides(kind: TinyKind) -> Overrides:
        return {"model": {"path": str(warm_model(GAME, kind=kind))}, "training": training}

    return [Cell(GAME, kind, BOUND, seed, overrides(kind)) for seed in SEEDS for kind in KINDS]


def measure(cell: Cell) -> Curve:
    """Run one of them."""
    return asyncio.run(run_pooled(job_of(cell)))


if __name__ == "__main__":
    take_no_arguments(__doc__)
    run_cells(EXPERIMENT, cells(), measure=measure)
    from benchmarks.evidence.tables import write_pages  # imports this module for its names

    write_pages()
