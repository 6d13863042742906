"""What is sent and swapped with a LoRA adapter, against all weights.

    python -m benchmarks.lora [--width 768] [--layers 8] [--rounds 5]

One model, once as a whole and once with adapters of some ranks on all its linear layers. A learner
publishes versions through a real nats-server as training does, and an engine fetches and swaps
them in as a generator does. Beside it: the engine's speed with the adapter beside the base, which
costs two small products for each layer, against the plain model.
"""

import argparse
import asyncio
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch
import uvloop
from tinkermq.actors.engine.engine import Sampling
from tinkermq.actors.engine.transformers.transformers_engine import TransformersEngine
from tinkermq.actors.policy.lora import has_adapter
from tinkermq.actors.policy.model_folder import load_policy
from tinkermq.actors.policy.policies import MAIN
from tinkermq.actors.policy.tiny_models import save_tiny_model
from tinkermq.actors.training.parallel import snapshot
from tinkermq.actors.weights.follower import of_policy
from tinkermq.actors.weights.store import WeightStore
from tinkermq.broker.client.connection import Broker, connect
from tinkermq.broker.jetstream.streams import create_job_streams
from tinkermq.broker.nats_server import NatsServer
from tinkermq.schemas.config.job import LimitsConfig
from tinkermq.schemas.config.sections import LoraConfig
from tinkermq.schemas.wire.subjects import JobScope

from benchmarks.report import Report, parser

SCOPE = JobScope("local", "bench")
RANKS = (0, 8, 64)
PROMPT_TOKENS, NEW_TOKENS, REQUESTS = 32, 48, 32


@dataclass
class Measured:
    """What one way of training sends."""

    sent_bytes: int
    """Payload of one version."""
    swap_s: float
    """From the learner's snapshot to the engine that decodes with it."""
    tokens_per_s: float
    """Tokens that the engine generates."""


async def generate(engine: TransformersEngine) -> float:
    """Return tokens per second over one batch of requests."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(8, 264, (REQUESTS, PROMPT_TOKENS)).astype(np.int32)
    sampling = Sampling(max_new_tokens=NEW_TOKENS)
    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for number, prompt in enumerate(prompts):
            name = f"{number}-{started}"
            group.create_task(engine.generate(prompt, sampling, request_id=name))
    return REQUESTS * NEW_TOKENS / (time.perf_counter() - started)


async def measure(folder: Path, rank: int, broker: Broker, rounds: int) -> Measured:
    """Publish, fetch and swap some versions, and generate with each."""
    lora = LoraConfig(rank=rank)
    model = await asyncio.to_thread(load_policy, str(folder), lora, dtype=torch.float32)
    engine = await TransformersEngine.start(
        str(folder), max_slots=REQUESTS, max_context=PROMPT_TOKENS + NEW_TOKENS, lora=lora
    )
    store = WeightStore(broker, SCOPE)
    took: list[float] = []
    speeds: list[float] = []
    size = 0
    try:
        for version in range(rank * 1000 + 1, rank * 1000 + rounds + 1):
            started = time.perf_counter()
            tensors = await asyncio.to_thread(snapshot, {MAIN: model}, torch.float32)
            kind = "lora" if has_adapter(model) else "full"
            manifest = await store.publish(version, tensors, kind=kind)
            fetched = await store.fetch(manifest)
            await engine.load_weights(version, of_policy(fetched))
            took.append(time.perf_counter() - started)
            speeds.append(await generate(engine))
            size = manifest.num_bytes
            await store.remove(version)
    finally:
        await engine.close()
    return Measured(size, median(took), median(speeds))


async def run(arguments: argparse.Namespace) -> dict[int, Measured]:
    """Measure every rank in turn; 0 is the model as a whole."""
    with tempfile.TemporaryDirectory() as place, NatsServer(Path(place) / "nats") as server:
        folder = save_tiny_model(
            Path(place) / "model", width=arguments.width, layers=arguments.layers, heads=8
        )
        async with await connect(server.url, name="bench") as broker:
            await create_job_streams(broker, SCOPE, LimitsConfig(), weights_bytes=64 << 30)
            return {rank: await measure(folder, rank, broker, arguments.rounds) for rank in RANKS}


def main() -> None:
    """Parse the arguments, measure, and report."""
    options = parser(__doc__)
    options.add_argument("--width", type=int, default=768)
    options.add_argument("--layers", type=int, default=8)
    options.add_argument("--rounds", type=int, default=5)
    arguments = options.parse_args()
    if arguments.quick:
        arguments.width, arguments.layers, arguments.rounds = 64, 2, 1
    torch.set_num_threads(1)
    report = Report("lora", "A LoRA adapter against all weights", quick=arguments.quick)
    found = uvloop.run(run(arguments))
    whole = found[0]
    report.table(
        f"{arguments.layers} layers of width {arguments.width}, float32",
        ("trained", "sent per version", "share", "snapshot to swapped in", "engine tokens/s"),
        [
            (
                f"rank {rank}" if rank else "all weights",
                f"{one.sent_bytes / 2**20:.2f} MiB",
                f"{one.sent_bytes / whole.sent_bytes:.2%}",
                f"{one.swap_s * 1000:.0f} ms",
                f"{one.tokens_per_s:,.0f}",
            )
            for rank, one in found.items()
        ],
    )
    for rank in RANKS[1:]:
        one = found[rank]
        report.at_least(f"rank {rank}: fewer bytes", whole.sent_bytes / one.sent_bytes, None)
        report.at_least(f"rank {rank}: sooner swapped in", whole.swap_s / one.swap_s, None)
        speed = one.tokens_per_s / whole.tokens_per_s
        report.at_least(f"rank {rank}: speed of the engine", speed, None)
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
