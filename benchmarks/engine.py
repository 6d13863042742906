"""Generation: our engine against transformers' `generate`, in one process, on the same threads.

    python -m benchmarks.engine [--part language|tiny]

Prints tokens per second of both sides and their ratio (only tokens that were asked for count), the
median time to a request's first token, and how long decoding stands still at a weight swap: with a
language model of 135 million weights on all cores. All requests of a load are made at once. The
limit beside it is the time of the matrix products alone that the load needs. With tiny models on
one thread: the same, the time of one reinforcement-learning step's generation, and what the engine
spends outside the model. `--quick` takes some seconds, with tiny models alone.
"""

import asyncio
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Unpack

import numpy as np
import torch
from tinkermq.actors.engine.engine import Engine, KvOnSwap, Sampling
from tinkermq.actors.engine.transformers.decoder import FedTokens, load_decoder
from tinkermq.actors.engine.transformers.transformers_engine import TransformersEngine
from tinkermq.actors.policy.devices import DECODED_WEIGHTS, can_use_onednn, multiply
from tinkermq.actors.policy.model_folder import load_causal_lm
from tinkermq.actors.policy.tiny_models import make_model, make_tokenizer
from tinkermq.actors.rollout.players import start_engine
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.wire.array import IntVector
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from benchmarks.report import Report, parser
from benchmarks.sizes import ALL_CORES, language_model
from benchmarks.tasks import Shape

SMALL: Shape = {"width": 128, "layers": 2, "heads": 4}
TINY: Shape = {"width": 256, "layers": 4, "heads": 4, "kv_heads": 2, "mlp_width": 672}
CONTEXT = 256
COLUMNS = (
    "model",
    "load",
    "generate tokens/s",
    "engine tokens/s",
    "ratio",
    "generate first token ms",
    "engine first token ms",
)


@dataclass
class Load:
    """Prompts, and how many tokens each is continued by."""

    name: str
    prompts: list[np.ndarray]
    new_tokens: list[int]
    goal: float | None = None
    """Times the tokens per second of the other side."""


@dataclass
class Timed:
    """One run of a load."""

    seconds: float
    first_s: float
    """Median time from the requests to the first token of each."""


def make_load(
    name: str,
    num: int,
    prompt: tuple[int, int],
    new: tuple[int, int],
    *,
    group: int = 1,
    goal: float | None = None,
) -> Load:
    """Return a load with lengths drawn from these ranges, ends included.

    Each prompt is that of `group` requests.
    """
    rng = np.random.default_rng(0)
    lengths = rng.integers(prompt[0], prompt[1] + 1, num // group)
    prompts = [rng.integers(8, 264, length).astype(np.int32) for length in lengths]
    shared = [prompt for prompt in prompts for _ in range(group)]
    return Load(name, shared, rng.integers(new[0], new[1] + 1, num).tolist(), goal)


def language_loads(goals: Mapping[int, float], *, quick: bool) -> list[Load]:
    """Return the loads of a language model; `goals` by the number of requests."""
    if quick:
        return [make_load("4 × 4-8 new", 4, (8, 16), (4, 8), goal=goals[64])]
    loads = [
        make_load(f"{num} × 8-40 new", num, (16, 40), (8, 40), goal=goals.get(num))
        for num in (16, 64)
    ]
    return [
        make_load("1 × 32 new", 1, (32, 32), (32, 32), goal=goals.get(1)),
        *loads,
        make_load("64 × 8-40 new, 8 of each prompt", 64, (16, 40), (8, 40), group=8),
    ]


class _FirstToken(BaseStreamer):
    """Notes when `generate` has drawn the first tokens."""

    def __init__(self) -> None:
        self._calls = 0
        self.at = 0.0

    def put(self, value: torch.Tensor) -> None:
        """Take the prompts, then each step's tokens."""
        del value
        self._calls += 1
        if self._calls == 2:
            self.at = time.perf_counter()

    def end(self) -> None:
        """Do nothing."""


def run_generate(model: PreTrainedModel, load: Load) -> Timed:
    """Generate with transformers, left-padded to the longest."""
    longest = max(map(len, load.prompts))
    ids = torch.zeros(len(load.prompts), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(load.prompts):
        ids[row, longest - len(prompt) :] = torch.from_numpy(prompt)
        mask[row, longest - len(prompt) :] = 1
    first = _FirstToken()
    started = time.perf_counter()
    generate: Any = model.generate  # transformers hides its type behind a decorator
    generate(
        ids,
        attention_mask=mask,
        max_new_tokens=max(load.new_tokens),
        do_sample=True,
        top_k=0,
        eos_token_id=None,
        streamer=first,
    )
    return Timed(time.perf_counter() - started, first.at - started)


async def run_engine(engine: Engine, load: Load) -> Timed:
    """Generate the same with the engine."""
    began, started = time.time(), time.perf_counter()
    generations = await asyncio.gather(
        *(
            engine.generate(prompt, Sampling(new), request_id=str(index))
            for index, (prompt, new) in enumerate(zip(load.prompts, load.new_tokens, strict=True))
        )
    )
    took = time.perf_counter() - started
    lengths = [len(generation.token_ids) for generation in generations]
    assert lengths == load.new_tokens, "an answer ended early"
    return Timed(took, median(generation.first_token for generation in generations) - began)


async def generated_per_s(
    config: JobConfig, prompts: Sequence[IntVector], stop: Sequence[int]
) -> float:
    """Return the tokens per second of a job's engine without a loop, all prompts at once."""
    engine = await start_engine(config)
    sampling = Sampling(config.rollout.response_limit, stop_token_ids=tuple(stop))
    rate = 0.0
    try:
        for attempt in ("first", "measured"):
            started = time.perf_counter()
            generations = await asyncio.gather(
                *(
                    engine.generate(prompt, sampling, request_id=f"{attempt}-{number}")
                    for number, prompt in enumerate(prompts)
                )
            )
            num_tokens = sum(len(one.token_ids) for one in generations)
            rate = num_tokens / (time.perf_counter() - started)
    finally:
        await engine.close()
    return rate


def products_s(model: PreTrainedModel, load: Load) -> float:
    """Return the seconds of the matrix products that a load needs, and of nothing else.

    Each prompt is read once for all its requests; each later token in one pass with the tokens of
    the requests that run then. Large layers are computed by oneDNN, as in the engine.
    """
    decoder: Any = model.get_decoder()
    head: Any = model.get_output_embeddings()
    linear = [module for module in decoder.modules() if isinstance(module, torch.nn.Linear)]
    weights = [module.weight.detach() for module in linear]
    prompts = {prompt.tobytes(): len(prompt) for prompt in load.prompts}
    steps = [sum(new > step for new in load.new_tokens) for step in range(1, max(load.new_tokens))]

    def product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        by_onednn = weight.numel() >= DECODED_WEIGHTS and can_use_onednn(rows, weight)
        return multiply(rows, weight) if by_onednn else torch.nn.functional.linear(rows, weight)

    def pass_s(num_rows: int, num_logits: int) -> float:
        inputs = {width: torch.randn(num_rows, width) for width in {w.shape[1] for w in weights}}
        hidden = torch.randn(num_logits, head.weight.shape[1])
        started = time.perf_counter()
        for weight in weights:
            product(inputs[weight.shape[1]], weight)
        product(hidden, head.weight)
        return time.perf_counter() - started

    known: dict[int, float] = {}
    with torch.inference_mode():
        pass_s(1, 1)
        for rows in set(steps):
            known[rows] = median(pass_s(rows, rows) for _ in range(3))
        prefill = pass_s(sum(prompts.values()), len(prompts))
    return prefill + sum(known[rows] for rows in steps)


async def compare(
    folder: str, loads: Sequence[Load], repeats: int, report: Report, *, limit: bool = False
) -> list[list[str]]:
    """Return one row per load: both sides alternate, and the median ratio counts.

    With `limit` the engine is also measured by the matrix products alone.
    """
    rows = list[list[str]]()
    model = load_causal_lm(folder, dtype=torch.float32)
    size = f"{model.num_parameters() / 1e6:.1f} M"
    slots = max(len(load.prompts) for load in loads)
    engine = await TransformersEngine.start(folder, max_slots=slots, max_context=CONTEXT)
    await run_engine(engine, loads[0])
    for load in loads:
        pairs = [
            (run_generate(model, load), await run_engine(engine, load)) for _ in range(repeats)
        ]
        rows.append([size, load.name, *row_of(load, pairs)])
        ratio = median(their.seconds / our.seconds for their, our in pairs)
        report.at_least(f"{size}, {load.name}, against generate", ratio, load.goal)
        if limit:
            share = products_s(model, load) / median(our.seconds for _, our in pairs)
            report.at_least(f"{size}, {load.name}, of its matrix products alone", share, None)
    await engine.close()
    return rows


def row_of(load: Load, pairs: Sequence[tuple[Timed, Timed]]) -> list[str]:
    """Return the columns of a load: speeds, their ratio, and the times to a first token."""
    tokens = sum(load.new_tokens)
    speeds = [median(tokens / pair[side].seconds for pair in pairs) for side in (0, 1)]
    ratio = median(their.seconds / our.seconds for their, our in pairs)
    firsts = [median(pair[side].first_s for pair in pairs) for side in (0, 1)]
    shown = [f"{speed:,.0f}" if speed >= 100 else f"{speed:.1f}" for speed in speeds]
    return [*shown, f"{ratio:.2f}", *(f"{1e3 * first:,.0f}" for first in firsts)]


async def rl_step(folder: str, repeats: int, report: Report) -> None:
    """Print the time of 16 prompts × 16 samples of 3 tokens, and the model's share of it."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(8, 264, 12).astype(np.int32) for _ in range(16)]
    load = Load("step", [prompts[i // 16] for i in range(256)], [3] * 256)
    engine = await TransformersEngine.start(folder, max_slots=256, max_context=CONTEXT)
    await run_engine(engine, load)
    times = [(await run_engine(engine, load)).seconds for _ in range(repeats)]
    await engine.close()
    model_s = median(model_only(folder, prompts) for _ in range(5))
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
        await engine.load_weights(version, weights, kv)
        pauses[kv] = max(pauses.get(kv, 0.0), 1e3 * engine.stats().last_pause_s)
        await asyncio.sleep(0.2)
    for request in range(8):
        engine.cancel(str(request))
    await asyncio.gather(*running)
    await engine.close()
    what = f"decoding stands still at a swap of {size:,.0f} MB"
    report.at_most(f"{what}, caches kept", pauses["keep"], 50.0, "ms")
    copy_ms = 1e3 * median(copy_over(weights) for _ in range(5))
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


async def run_language(report: Report, *, quick: bool) -> None:
    """Compare with a language model, on all cores; with --quick with a tiny one."""
    torch.set_num_threads(ALL_CORES)
    loads = language_loads({1: 2.0, 16: 2.0, 64: 2.0}, quick=quick)
    with tempfile.TemporaryDirectory() as temporary:
        folder = save(Path(temporary) / "small", **SMALL) if quick else language_model()
        rows = await compare(folder, loads, 1 if quick else 3, report, limit=True)
        title = f"Engine against transformers' generate, {ALL_CORES} threads"
        report.table(title, COLUMNS, rows)
        await swap(folder, report)


async def run_tiny(report: Report, *, quick: bool) -> None:
    """Compare with tiny models, on one thread."""
    torch.set_num_threads(1)
    repeats = 3 if quick else 7
    with tempfile.TemporaryDirectory() as temporary:
        small = save(Path(temporary) / "small", **SMALL)
        loads = [make_load(f"{n} × 4-64 new, mixed", n, (12, 30), (4, 64)) for n in (128, 256)]
        rows = await compare(small, loads[: 1 if quick else 2], repeats, report)
        report.table("Engine against transformers' generate, 1 thread", COLUMNS, rows)
        await rl_step(small, 10 * repeats, report)


PARTS: dict[str, Callable[..., Any]] = {"language": run_language, "tiny": run_tiny}


def main() -> None:
    """Parse the arguments, run, print and write."""
    options = parser(__doc__)
    options.add_argument("--part", choices=PARTS, help="only this one")
    arguments = options.parse_args()
    report = Report("engine", "Generation against transformers", quick=arguments.quick)
    for part in [arguments.part] if arguments.part else PARTS:
        asyncio.run(PARTS[part](report, quick=arguments.quick))
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
