"""Generation: our engine against transformers' `generate`, in one process, on one thread.

    OMP_NUM_THREADS=1 python -m benchmarks.engine

Prints tokens per second of both sides and their ratio (only tokens that were asked for count), the
time of one reinforcement-learning step's generation, what the engine spends outside the model,
and how long decoding stands still at a weight swap. `--quick` takes a few seconds.
"""

import asyncio
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Unpack

import numpy as np
import torch
from tinkermq.actors.engine.engine import Engine, KvOnSwap, Sampling
from tinkermq.actors.engine.transformers.decoder import FedTokens, load_decoder
from tinkermq.actors.engine.transformers.transformers_engine import TransformersEngine
from tinkermq.actors.policy.model_folder import load_causal_lm
from tinkermq.actors.policy.tiny_models import make_model, make_tokenizer
from transformers import PreTrainedModel

from benchmarks.report import Report, parser
from benchmarks.tasks import Shape

SMALL: Shape = {"width": 128, "layers": 2, "heads": 4}
TINY: Shape = {"width": 256, "layers": 4, "heads": 4, "kv_heads": 2, "mlp_width": 672}
CONTEXT = 256


@dataclass
class Load:
    """Prompts, and how many tokens each is continued by."""

    name: str
    prompts: list[np.ndarray]
    new_tokens: list[int]


def make_load(name: str, num: int, prompt: tuple[int, int], new: tuple[int, int]) -> Load:
    """Return a load with lengths drawn from these ranges, ends included."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(prompt[0], prompt[1] + 1, num)
    prompts = [rng.integers(8, 264, length).astype(np.int32) for length in lengths]
    return Load(name, prompts, rng.integers(new[0], new[1] + 1, num).tolist())


def run_generate(model: PreTrainedModel, load: Load) -> float:
    """Generate with transformers, left-padded to the longest; return seconds."""
    longest = max(map(len, load.prompts))
    ids = torch.zeros(len(load.prompts), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(load.prompts):
        ids[row, longest - len(prompt) :] = torch.from_numpy(prompt)
        mask[row, longest - len(prompt) :] = 1
    started = time.perf_counter()
    generate: Any = model.generate  # transformers hides its type behind a decorator
    generate(
        ids,
        attention_mask=mask,
        max_new_tokens=max(load.new_tokens),
        do_sample=True,
        top_k=0,
        eos_token_id=None,
    )
    return time.perf_counter() - started


async def run_engine(engine: Engine, load: Load) -> float:
    """Generate the same with the engine; return seconds."""
    started = time.perf_counter()
    await asyncio.gather(
        *(
            engine.generate(prompt, Sampling(new), request_id=str(index))
            for index, (prompt, new) in enumerate(zip(load.prompts, load.new_tokens, strict=True))
        )
    )
    return time.perf_counter() - started


async def compare(folder: str, loads: Sequence[Load], repeats: int) -> list[list[str]]:
    """Return one row per load: both sides alternate, and the median ratio counts."""
    rows = list[list[str]]()
    model = load_causal_lm(folder, dtype=torch.float32)
    slots = max(len(load.prompts) for load in loads)
    engine = await TransformersEngine.start(folder, max_slots=slots, max_context=CONTEXT)
    for load in loads:
        await run_engine(engine, load)
        pairs = [
            (run_generate(model, load), await run_engine(engine, load)) for _ in range(repeats)
        ]
        tokens = sum(load.new_tokens)
        theirs, ours = (median(tokens / pair[side] for pair in pairs) for side in (0, 1))
        ratio = median(their / our for their, our in pairs)
        size = f"{model.num_parameters() / 1e6:.1f} M"
        rows.append([size, load.name, f"{theirs:,.0f}", f"{ours:,.0f}", f"{ratio:.2f}"])
    await engine.close()
    return rows


async def rl_step(folder: str, repeats: int, report: Report) -> None:
    """Print the time of 16 prompts × 16 samples of 3 tokens, and the model's share of it."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(8, 264, 12).astype(np.int32) for _ in range(16)]
    load = Load("step", [prompts[i // 16] for i in range(256)], [3] * 256)
    engine = await TransformersEngine.start(folder, max_slots=256, max_context=CONTEXT)
    await run_engine(engine, load)
    times = [await run_engine(engine, load) for _ in range(repeats)]
    await engine.close()
    model_s = median(model_only(folder, prompts) for _ in range(5))
    report.note(
        f"RL step, 16 prompts × 16 samples × 3 tokens, 0.4 M: median {median(times) * 1e3:.1f} ms, "
        f"best {min(times) * 1e3:.1f} ms; the same forward passes alone {model_s * 1e3:.1f} ms."
    )
    report.at_most(
        "an RL step's generation over its forward passes alone", median(times) / model_s, None
    )


def model_only(folder: str, prompts: Sequence[np.ndarray]) -> float:
    """Return the seconds of the forward passes that such a step needs, and nothing else."""
    decoder = load_decoder(
        folder, dtype=torch.float32, device="cpu", max_slots=256, max_tokens=CONTEXT
    )
    spans = [FedTokens(16 * index, 0, prompt) for index, prompt in enumerate(prompts)]
    tokens = np.full(256, 9, np.int32)
    took = 0.0
    with torch.inference_mode():
        for _ in range(3):
            started = time.perf_counter()
            list(decoder.prefill(spans))
            decoder.decode(tokens, np.full(256, 12))
            decoder.decode(tokens, np.full(256, 13))
            took = time.perf_counter() - started
    return took


async def swap(folder: str, report: Report) -> None:
    """Print how long decoding stands still while new weights are taken."""
    engine = await TransformersEngine.start(folder, max_slots=8, max_context=CONTEXT)
    model = load_causal_lm(folder, dtype=torch.float32)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    size = sum(p.numel() * p.element_size() for p in model.parameters()) / 1e6
    del model
    running = [
        asyncio.ensure_future(
            engine.generate([9, 10, 11], Sampling(CONTEXT - 3), request_id=str(index))
        )
        for index in range(8)
    ]
    pauses = dict[str, float]()
    swaps: list[tuple[int, KvOnSwap]] = [(1, "keep"), (2, "keep"), (3, "recompute")]
    for version, kv in swaps:
        started = time.perf_counter()
        await engine.load_weights(version, weights, kv)
        took = time.perf_counter() - started
        pauses[kv] = max(pauses.get(kv, 0.0), 1e3 * engine.stats().last_pause_s)
        report.note(
            f"Swap of {size:,.0f} MB, {kv}: decoding stood still "
            f"{engine.stats().last_pause_s * 1e3:.2f} ms, load took {took * 1e3:.0f} ms."
        )
        await asyncio.sleep(0.2)
    for request in range(8):
        engine.cancel(str(request))
    await asyncio.gather(*running)
    await engine.close()
    what = f"decoding stands still at a swap of {size:,.0f} MB"
    report.at_most(f"{what}, caches kept", pauses["keep"], 50.0, "ms")
    copy_ms = 1e3 * median(copy_over(weights) for _ in range(5))
    report.at_most("a full copy over the same weights, in its place", copy_ms, None, "ms")
    report.at_least("a full copy over that pause", copy_ms / pauses["keep"], 10.0)
    report.at_most(
        f"{what}, caches of 8 running requests recomputed", pauses["recompute"], None, "ms"
    )


def copy_over(weights: Mapping[str, torch.Tensor]) -> float:
    """Return the seconds of a swap that copies new weights over those that decode."""
    running = {name: torch.zeros_like(value) for name, value in weights.items()}
    started = time.perf_counter()
    for name, value in weights.items():
        running[name].copy_(value)
    return time.perf_counter() - started


def save(folder: Path, **shape: Unpack[Shape]) -> str:
    """Write a model of this shape and return its folder."""
    make_model(**shape).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


async def run(report: Report, *, quick: bool) -> None:
    """Run all and print."""
    torch.set_num_threads(1)
    repeats = 3 if quick else 7
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        small, tiny = save(root / "small", **SMALL), save(root / "tiny", **TINY)
        uniform = make_load("32 × 128 new, uniform", 32, (32, 32), (128, 128))
        mixed = make_load("32 × 8-128 new, mixed", 32, (8, 64), (8, 128))
        rows = [] if quick else await compare(tiny, [uniform, mixed], repeats)
        loads = [make_load(f"{n} × 4-64 new, mixed", n, (12, 30), (4, 64)) for n in (128, 256)]
        rows += await compare(small, loads[: 1 if quick else 2], repeats)
        columns = ["model", "load", "generate tokens/s", "engine tokens/s", "ratio"]
        report.table("Engine against transformers' generate", columns, rows)
        for row in rows:
            report.at_least(f"{row[0]}, {row[1]}, against generate", float(row[4]), None)
        await rl_step(small, 10 * repeats, report)
        if not quick:
            large = save(root / "large", width=1024, layers=9, heads=16, mlp_width=3072)
            await swap(large, report)


def main() -> None:
    """Parse the arguments, run, print and write."""
    arguments = parser(__doc__).parse_args()
    report = Report("engine", "Generation against transformers", quick=arguments.quick)
    asyncio.run(run(report, quick=arguments.quick))
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
