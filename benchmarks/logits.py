"""Memory of the log-probs of a long batch: in chunks, against all logits at once.

    python -m benchmarks.logits [--tokens 2048] [--vocab 151936]

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
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tinkermq.actors.learner.model import Scorer
from tinkermq.actors.learner.packing import Packed, TokenSequence, pack
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
    return Qwen2ForCausalLM(config).to("cuda" if torch.cuda.is_available() else "cpu")


def make_rows(tokens: int, vocab: int) -> Packed:
    """Make one row of generated tokens behind short prompts."""
    rng = np.random.default_rng(0)
    length = 256
    mask = (np.arange(length + 1) >= 8).astype(np.uint8)
    sequences = [
        TokenSequence(rng.integers(8, vocab, length + 1), mask) for _ in range(tokens // length)
    ]
    (packed,) = pack(sequences, row_tokens=tokens, microbatch_tokens=tokens)
    return packed


def all_logits(scorer: Scorer, packed: Packed) -> torch.Tensor:
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


def measure(arguments: argparse.Namespace, report: Report) -> None:
    """Measure each side in a process of its own."""
    found: dict[str, dict[str, float]] = {}
    for way in WAYS:
        command = [sys.executable, "-m", "benchmarks.logits", "--side", way]
        sizes = ["--tokens", str(arguments.tokens), "--vocab", str(arguments.vocab)]
        done = subprocess.run([*command, *sizes], check=True, capture_output=True, text=True)
        found[way] = json.loads(done.stdout.splitlines()[-1])
    chunks, whole = (found[way] for way in WAYS)
    if abs(chunks["norm"] - whole["norm"]) > 1e-4 * whole["norm"]:
        raise RuntimeError(f"the gradients differ: {chunks['norm']} and {whole['norm']}")
    mib = 4 * arguments.tokens * arguments.vocab / 2**20
    report.table(
        f"{arguments.tokens:,} tokens, {arguments.vocab:,} words: {mib:,.0f} MiB of logits",
        ["log-probs", "peak MiB", "s", "norm of the gradient"],
        [
            [way, f"{one['bytes'] / 2**20:,.0f}", f"{one['s']:.1f}", f"{one['norm']:.6f}"]
            for way, one in found.items()
        ],
    )
    report.at_least("peak of all logits over that of chunks", whole["bytes"] / chunks["bytes"], 2.0)
    report.at_most("time of chunks over that of all logits", chunks["s"] / whole["s"], None)


def main() -> None:
    """Parse the arguments, measure, and report."""
    options = parser(__doc__)
    options.add_argument("--tokens", type=int, help="tokens of the row (2048; quick: 512)")
    options.add_argument("--vocab", type=int, help="words (151936; quick: 8192)")
    options.add_argument("--side", choices=WAYS, help=argparse.SUPPRESS)
    arguments = options.parse_args()
    arguments.tokens = arguments.tokens or (512 if arguments.quick else 2048)
    arguments.vocab = arguments.vocab or (8192 if arguments.quick else 151936)
    torch.set_num_threads(1)
    if arguments.side:
        print(json.dumps(one_side(arguments.side, arguments.tokens, arguments.vocab)))
        return
    report = Report("logits", "Log-probs without all logits", quick=arguments.quick)
    measure(arguments, report)
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
