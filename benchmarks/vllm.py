"""Generation: vLLM's CPU build against our transformers engine, in one run, on all cores each.

    .venv-vllm/bin/python -m benchmarks.vllm [--eager]

Needs the environment of `make test-vllm`. With a language model of 135 million weights it prints
tokens per second of both engines and their ratio (each alternates with the other), the median time
to a request's first token, by how much their log-probs differ from a plain forward pass, and how
long generation stands still at a weight swap; and the time from a published version to the first
token of it, through NATS and from the learner's memory (by gloo). `--eager` is without vLLM's
compilation. `--quick` takes some seconds beside vLLM's start, with a tiny model.
"""

import asyncio
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np
import torch
from tinkermq.actors.engine.engine import Engine, Generation, Sampling
from tinkermq.actors.policy.model_folder import load_causal_lm
from tinkermq.actors.policy.policies import MAIN
from tinkermq.actors.rollout.players import start_engine
from tinkermq.actors.training.parallel import snapshot
from tinkermq.actors.weights.broadcast import Sender
from tinkermq.actors.weights.follower import fetch_version
from tinkermq.actors.weights.store import WeightStore
from tinkermq.broker.client.connection import connect
from tinkermq.broker.client.rpc import Service
from tinkermq.broker.jetstream.streams import create_job_streams
from tinkermq.broker.nats_server import NatsServer
from tinkermq.schemas.config.job import JobConfig, LimitsConfig
from tinkermq.schemas.wire.subjects import JobScope
from transformers import PreTrainedModel

from benchmarks.engine import CONTEXT, TINY, Load, language_loads, row_of, run_engine, save
from benchmarks.report import Report, parser
from benchmarks.sizes import ALL_CORES, language_model

WAYS: dict[Literal["object", "nccl"], str] = {"object": "one machine", "nccl": "memory to memory"}
COLUMNS = (
    "model",
    "load",
    "vllm tokens/s",
    "transformers tokens/s",
    "ratio",
    "vllm first token ms",
    "transformers first token ms",
)


def configured(folder: str, **generator: Any) -> JobConfig:
    """Return the configuration of a job whose generators run a model so."""
    limits = {"max_prompt_tokens": 64, "max_turn_tokens": 128, "max_response_tokens": 128}
    return JobConfig.model_validate(
        {
            "model": {"path": folder},
            "env": {"game": "bandit"},
            "rollout": limits,
            "generator": {"max_context": CONTEXT, "max_requests": 256, **generator},
        }
    )


async def compare(folder: str, name: str, loads: list[Load], repeats: int, report: Report) -> None:
    """Print one row per load: both engines alternate, and the median ratio counts."""
    ours = await start_engine(configured(folder))
    compiled = "compiled" in name
    theirs = await start_engine(
        configured(folder, engine="vllm", compile=compiled, kv_cache_mb=1024)
    )
    model = load_causal_lm(folder, dtype=torch.float32)
    size = f"{model.num_parameters() / 1e6:.1f} M"
    rows: list[list[str]] = []
    for engine in (ours, theirs):
        await run_engine(engine, loads[0])
    for load in loads:
        pairs = [
            (await run_engine(theirs, load), await run_engine(ours, load)) for _ in range(repeats)
        ]
        ratio = median(their.seconds / our.seconds for their, our in pairs)
        report.at_least(f"{size}, {load.name}, transformers against {name}", ratio, load.goal)
        rows.append([size, load.name, *row_of(load, pairs)])
    report.table(f"Our transformers engine against {name}, {ALL_CORES} threads", COLUMNS, rows)
    for label, engine in (("transformers", ours), (name, theirs)):
        worst = await difference(engine, model)
        report.at_most(f"{label}, {size}: largest difference of log-probs", 1e6 * worst, 1e3, "e-6")
    pause = await swap(theirs, model)
    report.at_most(f"{name}, {size}: stands still at a swap, caches kept", pause, None, "ms")
    for transport, way in WAYS.items():
        seconds = await publish_to_token(theirs, model, transport)
        report.at_most(f"{name}, {size}: {way}, publish to first new token", seconds, None, "s")
    await ours.close()
    await theirs.close()


async def difference(engine: Engine, model: PreTrainedModel) -> float:
    """Return the largest difference of log-probs from a plain forward pass."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(8, 264, 48).astype(np.int32) for _ in range(8)]
    results: list[Generation] = await asyncio.gather(
        *(
            engine.generate(prompt, Sampling(64, 0.8, 0.9), request_id=str(index))
            for index, prompt in enumerate(prompts)
        )
    )
    worst = 0.0
    for prompt, result in zip(prompts, results, strict=True):
        ids = torch.from_numpy(np.concatenate([prompt, result.token_ids]).astype(np.int64))[None]
        with torch.no_grad():
            logprobs = (model(ids).logits[0] / 0.8).log_softmax(-1)
        plain = logprobs[len(prompt) - 1 : -1].gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()
        worst = max(worst, float(np.abs(plain - result.logprobs).max()))
    return worst


async def swap(engine: Engine, model: PreTrainedModel) -> float:
    """Return the milliseconds for which eight running requests stand still at a swap."""
    running = [
        asyncio.ensure_future(engine.generate([9, 10, 11], Sampling(200), request_id=str(index)))
        for index in range(8)
    ]
    pauses: list[float] = []
    for version in range(1, 4):
        await asyncio.sleep(0.05)
        await engine.load_weights(version, model.state_dict())
        pauses.append(1e3 * engine.stats().last_pause_s)
    for index in range(8):
        engine.cancel(str(index))
    await asyncio.gather(*running)
    return median(pauses)


async def publish_to_token(
    engine: Engine, model: PreTrainedModel, transport: Literal["object", "nccl"]
) -> float:
    """Return the seconds from a snapshot to the first token of its version, of three the median."""
    scope = JobScope("local", "bench")
    room = 1 << 30
    with tempfile.TemporaryDirectory() as folder, NatsServer(Path(folder) / "nats") as server:
        async with (
            await connect(server.url, name="learner") as learner,
            await connect(server.url, name="generator") as generator,
        ):
            await create_job_streams(learner, scope, LimitsConfig(), weights_bytes=8 << 30)
            sender = Sender(learner, scope, Path(folder) / "weights")
            service = await Service.start(learner, name="learner", description="a learner")
            await sender.open(service)
            serving = asyncio.create_task(sender.serve())
            holder = sender if transport == "nccl" else None
            store = WeightStore(learner, scope, transport, holder=holder, shared_bytes=room)
            taking = WeightStore(generator, scope, transport, shared_bytes=room)
            times: list[float] = []
            for version in range(10, 13):
                tensors = snapshot({MAIN: model}, torch.float32)
                started = time.perf_counter()
                manifest = await store.publish(version, tensors)
                load = await fetch_version(taking, {MAIN: engine}, manifest)
                await load("keep")
                token = await engine.generate([9, 10, 11], Sampling(1), request_id="first")
                times.append(time.perf_counter() - started)
                assert token.versions[0] == version
            serving.cancel()
            await service.stop(0)
    return median(times)


async def run(name: str, report: Report, *, quick: bool) -> None:
    """Run all and print."""
    torch.set_num_threads(ALL_CORES)
    os.environ["OMP_NUM_THREADS"] = str(ALL_CORES)  # of vLLM's processes
    loads = language_loads({64: 1.0}, quick=quick)
    with tempfile.TemporaryDirectory() as temporary:
        folder = save(Path(temporary) / "tiny", **TINY) if quick else language_model()
        await compare(folder, name, loads, 1 if quick else 3, report)


def main() -> None:
    """Parse the arguments, run, print and write."""
    options = parser(__doc__)
    options.add_argument("--eager", action="store_true", help="vLLM without its compilation")
    arguments = options.parse_args()
    report = Report("vllm", "Transformers against vLLM on a CPU", quick=arguments.quick)
    name = "vllm, eager" if arguments.eager or arguments.quick else "vllm, compiled"
    asyncio.run(run(name, report, quick=arguments.quick))
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
