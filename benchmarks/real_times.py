"""What SmolLM2-135M costs beside its steps: start, first token, publishing, checkpoints.

    python -m benchmarks.real_times

The model is of the catalogue (`tinkermq model get smollm2`), float32, one CPU thread. All parts are
those of actors, in one process, with a real nats-server: a version goes from the learner's model
into the machine's shared memory, through NATS, and into an engine that generates. Its difference is
that of the second update, at two learning rates. A checkpoint is held as it is, written, and then
flushed, with its digests; training goes on as soon as it is held.
"""

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from tinkermq.actors.engine.engine import Sampling
from tinkermq.actors.engine.transformers.transformers_engine import TransformersEngine
from tinkermq.actors.policy.model_folder import load_tokenizer
from tinkermq.actors.policy.policies import MAIN
from tinkermq.actors.training.batch import assemble
from tinkermq.actors.training.checkpoint import CheckpointStore
from tinkermq.actors.training.checkpoint_copy import CheckpointCopy
from tinkermq.actors.training.parallel import Parallel, snapshot, snapshot_bytes
from tinkermq.actors.training.state import LearnerState
from tinkermq.actors.training.step import Trainer
from tinkermq.actors.weights.follower import of_policy
from tinkermq.actors.weights.store import WeightStore
from tinkermq.broker.client.connection import connect
from tinkermq.broker.jetstream.streams import create_job_streams
from tinkermq.broker.nats_server import NatsServer
from tinkermq.schemas.config.job import LimitsConfig
from tinkermq.schemas.model_catalogue import find_model
from tinkermq.schemas.weights import Manifest
from tinkermq.schemas.wire.subjects import JobScope

from benchmarks.learner_real import MODEL, StepWork, load_trainer, make_groups
from benchmarks.report import Report, parser

RATES = (3e-6, 1e-5)
WORK = StepWork("update", 1, 4, 32, 8, 16, 128)
SCOPE = JobScope("local", "bench")
_ROOM = 8 << 30
T = TypeVar("T")


class Times:
    """Seconds by what took them, in their order."""

    def __init__(self) -> None:
        self.rows: list[list[str]] = []

    def timed(self, what: str, work: Callable[[], T], note: str = "") -> T:
        """Do some work and note its time."""
        started = time.perf_counter()
        result = work()
        self.note(what, time.perf_counter() - started, note)
        return result

    def note(self, what: str, seconds: float, note: str = "") -> None:
        """Note a time."""
        self.rows.append([what, f"{seconds:.2f} s", note])


def train(trainer: Trainer, step: int) -> None:
    """Make one update."""
    model: Any = trainer.model
    trainer.step(assemble(make_groups(WORK, model.config.vocab_size)), step)


def time_starts(times: Times) -> None:
    """Time what an actor does before it works."""
    code = "import tinkermq.actors.learner.start"
    command = [sys.executable, "-c", code]
    run = "a process of its own imports torch and the rest"
    times.timed(run, lambda: subprocess.run(command, check=True), "once a node: actors are forked")
    times.timed("the learner loads and checks the model", lambda: load_trainer(WORK))


async def time_engine(times: Times) -> TransformersEngine:
    """Time an engine's start and its first token; return it."""
    started = time.perf_counter()
    engine = await TransformersEngine.start(find_model(MODEL), max_slots=8, max_context=256)
    times.note("an engine loads the model", time.perf_counter() - started)
    rng = np.random.default_rng(0)
    for what in ("first token of the first request", "first token of a later one"):
        prompt = rng.integers(8, 49_000, 45).astype(np.int32)
        started = time.perf_counter()
        await engine.generate(prompt, Sampling(1), request_id=what)
        times.note(what, time.perf_counter() - started, "45 tokens of prompt")
    return engine


def time_checkpoint(times: Times, trainer: Trainer, folder: Path) -> None:
    """Time a checkpoint, and what training waits for."""
    tokenizer = load_tokenizer(find_model(MODEL))
    copied = times.timed(
        "a checkpoint is held", lambda: trainer.copy(tokenizer), "training waits for this"
    )
    write = CheckpointCopy({MAIN: copied}, Parallel()).write
    written: list[float] = []

    def noted(made: Path) -> None:
        started = time.perf_counter()
        write(made)
        written.append(time.perf_counter() - started)

    started = time.perf_counter()
    final = CheckpointStore(folder, keep_last=1, keep_every=0).save(LearnerState(step=1), noted)
    size = sum(file.stat().st_size for file in final.rglob("*"))
    times.note("its files are written", written[0], f"{size / 1e9:.2f} GB")
    took = time.perf_counter() - started
    times.note("it counts: with digests, on the disk", took, "beside training")
    copied.release()


async def time_publishing(
    times: Times, trainer: Trainer, engine: TransformersEngine, url: str
) -> None:
    """Time a whole version in float32, from the learner's model to an engine that uses it."""
    async with AsyncExitStack() as stack:
        learner = await stack.enter_async_context(await connect(url, name="learner"))
        generator = await stack.enter_async_context(await connect(url, name="generator"))
        await create_job_streams(learner, SCOPE, LimitsConfig(), weights_bytes=_ROOM)
        store = WeightStore(learner, SCOPE, shared_bytes=_ROOM)
        reader = WeightStore(generator, SCOPE, shared_bytes=_ROOM)
        models = {MAIN: trainer.model}
        draft = store.draft(snapshot_bytes(models, torch.float32))
        tensors = times.timed(
            "a version is taken",
            lambda: snapshot(models, torch.float32, draft),
            "beside the next step",
        )
        started = time.perf_counter()
        manifest = await store.publish(1, tensors)
        took = time.perf_counter() - started
        times.note("it is published", took, f"{manifest.num_bytes / 1e6:.0f} MB, beside training")
        started = time.perf_counter()
        await engine.load_weights(1, of_policy(await reader.fetch(manifest)))
        took = time.perf_counter() - started
        times.note("an engine of this machine has it", took)
        await store.remove(1)


async def time_differences(times: Times, url: str, report: Report) -> None:
    """Time the second update's difference in bfloat16, at each learning rate."""
    for number, rate in enumerate(RATES):
        scope = JobScope("local", f"bench{number}")
        trainer = load_trainer(WORK, rate)
        async with await connect(url, name="learner") as learner:
            await create_job_streams(learner, scope, LimitsConfig(), weights_bytes=_ROOM)
            store = WeightStore(learner, scope, shared_bytes=_ROOM)
            train(trainer, 1)
            await publish_update(trainer, store, 1)
            train(trainer, 2)
            started = time.perf_counter()
            manifest = await publish_update(trainer, store, 2)
            took = time.perf_counter() - started
        whole, sent = manifest.num_bytes, manifest.stored_bytes
        what = f"published in bfloat16, learning rate {rate:g}"
        times.note(what, took, f"{sent / 1e6:.1f} of {whole / 1e6:.0f} MB")
        report.at_least(f"bytes of a version over its difference, {rate:g}", whole / sent, None)


async def publish_update(trainer: Trainer, store: WeightStore, version: int) -> Manifest:
    """Publish the model in bfloat16."""
    models = {MAIN: trainer.model}
    draft = store.draft(snapshot_bytes(models, torch.bfloat16))
    return await store.publish(version, snapshot(models, torch.bfloat16, draft))


async def run(report: Report) -> None:
    """Measure all, and report."""
    times = Times()
    time_starts(times)
    with tempfile.TemporaryDirectory() as place:
        server = NatsServer(Path(place) / "nats")
        with server:
            engine = await time_engine(times)
            trainer = load_trainer(WORK)
            train(trainer, 1)
            time_checkpoint(times, trainer, Path(place))
            await time_publishing(times, trainer, engine, server.url)
            await engine.close()
            del trainer
            await time_differences(times, server.url, report)
    report.table("SmolLM2-135M-Instruct, one CPU thread", ["", "takes", ""], times.rows)


def main() -> None:
    """Parse the arguments, measure, and report."""
    arguments = parser(__doc__).parse_args()
    torch.set_num_threads(1)
    report = Report("real_times", "SmolLM2-135M beside its steps", quick=arguments.quick)
    asyncio.run(run(report))
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
