"""Memory of the log-probs of a long batch: in chunks, against all logits at once.

    python -m benchmarks.logits [--tokens 1024 4096] [--vocab 151936]

One decoder layer of Qwen2's 0.5 B width and its vocabulary, forward and backward, on the same rows.
Each side is a process of its own; its peak is what it holds more at most than before the pass:
resident memory, or the GPU's. Both sides must come to the same gradient. "all logits" is what a
plain training step does: the model's own logits of the columns that predict something, a
log-softmax, and a choice.
"""

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tinkermq.actors.training.micro_batch import MicroBatch, TokenSequence
from tinkermq.actors.training.model import Scorer
from tinkermq.actors.training.packing import pack
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.report import Report, parser

WAYS = ("chunks", "all logits")
WIDTH = 896


def make_model(vocab: int) -> Any:
    """Make one layer between embedding and output layer, which share their weights."""
    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=14,
        num_key_value_heads=2,
        intermediate_size=4864,
        vocab_size=vocab,
        tie_word_embeddings=True,
    )
    model: Any = Qwen2ForCausalLM(config)
    return model.to("cuda" if torch.cuda.is_available() else "cpu")


def make_rows(tokens: int, vocab: int) -> MicroBatch:
    """Make one row of generated tokens behind short prompts."""
    rng = np.random.default_rng(0)
    length = 256
    mask = (np.arange(length + 1) >= 8).astype(np.uint8)
    sequences = [
        TokenSequence(rng.integers(8, vocab, length + 1), mask) for _ in range(tokens // length)
    ]
    (packed,) = pack(sequences, max_row_tokens=tokens, microbatch_tokens=tokens)
    return packed


def all_logits(scorer: Scorer, packed: MicroBatch) -> torch.Tensor:
    """Return the log-probs as they are written down first: by the logits of all columns."""
    packed = packed.to(scorer.device)
    logits_UV, place_N = scorer.states_UD(packed, logits=True)
    return logits_UV.float().log_softmax(-1)[place_N, packed.target_N]


def resident() -> int:
    """Return the most bytes of memory that this process has held since the mark was set."""
    status = Path("/proc/self/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return 1024 * int(found[1])


def set_mark() -> int:
    """Forget earlier peaks; return what is held now."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")
    return resident()


def peak() -> int:
    """Return the peak since the mark."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else resident()


def one_side(way: str, tokens: int, vocab: int) -> dict[str, float]:
    """Measure one side in this process."""
    model = make_model(vocab)
    packed = make_rows(tokens, vocab)
    scorer = Scorer(model, temperature=1.0, dtype="float32")
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)  # not what is compared
    before, started = set_mark(), time.perf_counter()
    scored = scorer.score(packed).logprobs_N if way == "chunks" else all_logits(scorer, packed)
    scored.mean().backward()
    norm = torch.nn.utils.get_total_norm([each.grad for each in model.parameters()])
    return {"bytes": peak() - before, "s": time.perf_counter() - started, "norm": float(norm)}


def measured(way: str, tokens: int, vocab: int) -> dict[str, float]:
    """Measure one side in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.logits", "--side", way]
    sizes = ["--tokens", str(tokens), "--vocab", str(vocab)]
    done = subprocess.run([*command, *sizes], check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure(lengths: Sequence[int], vocab: int, report: Report) -> None:
    """Measure both sides at each length."""
    rows: list[list[str]] = []
    held: dict[str, list[float]] = {way: [] for way in WAYS}
    for tokens in lengths:
        sides = {way: measured(way, tokens, vocab) for way in WAYS}
        chunks, whole = (sides[way]["norm"] for way in WAYS)
        if abs(chunks - whole) > 1e-4 * whole:
            raise RuntimeError(f"the gradients differ: {chunks} and {whole}")
        for way, one in sides.items():
            held[way].append(one["bytes"])
            mib = [4 * tokens * vocab / 2**20, one["bytes"] / 2**20]
            numbers = [f"{each:,.0f}" for each in mib]
            rows.append([f"{tokens:,}", way, *numbers, f"{one['s']:.1f}", f"{one['norm']:.5f}"])
    columns = ["tokens", "log-probs", "MiB of logits", "peak MiB", "s", "norm of the gradient"]
    report.table(f"{vocab:,} words, width {WIDTH}", columns, rows)
    further = 4 * vocab * (lengths[-1] - lengths[0])
    growth = {way: (each[-1] - each[0]) / further for way, each in held.items()}
    report.at_most("chunks: bytes for each further token over its logits", growth[WAYS[0]], None)
    report.at_least("all logits: the same", growth[WAYS[1]], None)
    last = [each[-1] for each in held.values()]
    report.at_least(f"peak at {lengths[-1]:,} tokens, all logits over chunks", last[1] / last[0], 2)


def main() -> None:
    """Parse the arguments, measure, and report."""
    options = parser(__doc__)
    options.add_argument("--tokens", type=int, nargs="+", help="of the row: 1024 and 4096")
    options.add_argument("--vocab", type=int, help="words (151936; quick: 4096)")
    options.add_argument("--side", choices=WAYS, help=argparse.SUPPRESS)
    arguments = options.parse_args()
    lengths = arguments.tokens or ([256, 512] if arguments.quick else [1024, 4096])
    vocab = arguments.vocab or (4096 if arguments.quick else 151936)
    torch.set_num_threads(1)
    if arguments.side:
        print(json.dumps(one_side(arguments.side, lengths[0], vocab)))
        return
    report = Report("logits", "Log-probs without all logits", quick=arguments.quick)
    measure(lengths, vocab, report)
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
