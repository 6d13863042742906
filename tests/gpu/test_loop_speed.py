"""The engine in a training loop beside the engine alone, and the way from a step to new tokens."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch
from tinkermq.actors.policy.tiny_models import END, SPECIAL_TOKENS, save_tiny_model
from tinkermq.broker.feed import read_traces
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.config.sections import resolve_dtype
from tinkermq.schemas.plan.model_shape import find_shape
from tinkermq.schemas.plan.plan import DECODE_OVERHEAD_S

from benchmarks.engine import generated_per_s
from benchmarks.learner_step import let_go
from tests.gpu.material import Peak
from tests.gpu.report import Recorder
from tests.support.jobs import Job
from tests.support.stack import Stack

pytestmark = [
    pytest.mark.gpu_machine,
    pytest.mark.timeout(300),
]
PROMPT_TOKENS = 16
NUM_WAVES = 4
"""Requests of the engine alone, over those that it runs at once."""
NEEDED_BYTES = 38 * 2**30
"""For learner and engine of 0.65 B weights on one GPU."""


@dataclass(frozen=True)
class Load:
    """What is trained and generated."""

    on_gpu: bool
    folder: Path

    @property
    def tasks(self) -> int:
        """Tasks of a batch."""
        return 16 if self.on_gpu else 4

    @property
    def group_size(self) -> int:
        """Episodes of a task."""
        return 8 if self.on_gpu else 4

    @property
    def num_requests(self) -> int:
        """Requests that the engine runs at once."""
        return self.tasks * self.group_size

    @property
    def new_tokens(self) -> int:
        """Tokens of an answer, at most."""
        return 128 if self.on_gpu else 24

    def job(self, num_steps: int, max_staleness: int) -> dict[str, Any]:
        """Return a job in which the engine is asked for a batch at once."""
        return {
            "model": {"path": str(self.folder)},
            "env": {"game": "benchmarks.coin_game:CoinGame", "num_val": 0},
            "rollout": {
                "group_size": self.group_size,
                "max_prompt_tokens": PROMPT_TOKENS,
                "max_turn_tokens": self.new_tokens,
                "max_response_tokens": self.new_tokens,
            },
            "generator": {
                "engine": "vllm" if self.on_gpu and find_spec("vllm") else "transformers",
                "max_episodes": 4 * self.num_requests,
                "max_requests": self.num_requests,
            },
            "learner": {"lr": 1e-5, "max_row_tokens": 512, "microbatch_tokens": 4096},
            "training": {
                "num_steps": num_steps,
                "batch_size": self.tasks,
                "max_staleness": max_staleness,
                "keep_rollouts": True,
            },
        }


@pytest.fixture
def load(on_gpu: bool, tmp_path: Path) -> Load:
    """Return what is trained and generated; its model is saved."""
    let_go()
    if on_gpu and torch.cuda.mem_get_info()[0] < NEEDED_BYTES:
        pytest.skip("less than 38 GiB of the GPU are free")
    width, layers, heads = (1536, 28, 12) if on_gpu else (128, 2, 4)
    folder = tmp_path / "model"
    save_tiny_model(folder, width=width, layers=layers, heads=heads, kv_heads=2)
    return Load(on_gpu, folder)


async def engine_alone(load: Load) -> float:
    """Return the tokens per second of the job's engine, with requests as the job has them."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(8, 264, (NUM_WAVES * load.num_requests, PROMPT_TOKENS), np.int32)
    config = JobConfig.model_validate(load.job(1, 0))
    try:
        return await generated_per_s(config, list(prompts), [SPECIAL_TOKENS.index(END)])
    finally:
        let_go()


def decode_of_bandwidth(load: Load, step_s: float) -> tuple[float, str]:
    """Return the bytes that a decoding step reads over those that the memory could give.

    What a plan assumes for a step besides its reads is taken off. 0: the step is shorter.
    """
    config, shape = JobConfig.model_validate(load.job(1, 0)), find_shape(str(load.folder))
    assert shape is not None
    width = 4 if resolve_dtype(config.generator.dtype, on_gpu=load.on_gpu) == "float32" else 2
    cached = PROMPT_TOKENS + load.new_tokens / 2
    cache_bytes = load.num_requests * cached * 2 * shape.layers * shape.kv_width * width
    has_graphs = config.generator.engine == "vllm" and config.generator.compile
    read_s = step_s - (DECODE_OVERHEAD_S[has_graphs] if load.on_gpu else 0.0)
    peak = Peak.of_device("bfloat16" if width == 2 else "float32")
    share = (shape.active_weights * width + cache_bytes) / (read_s * peak.bandwidth)
    return max(0.0, share), peak.source


async def loop_tokens_per_s(job: Job) -> float:
    """Return the generated tokens of all steps behind the first, over the time of these steps."""
    metrics = await job.metrics()
    tokens = sum(metric.values["rollout/generated_tokens"] for metric in metrics[1:])
    return tokens / (metrics[-1].time - metrics[0].time)


@dataclass(frozen=True)
class NewVersions:
    """What a generator did with new weights."""

    to_tokens_s: list[float]
    """From each step to the first token that its weights generated."""
    pauses_s: list[float]
    """Of generation, for the versions of a step."""


async def new_versions(job: Job) -> NewVersions:
    """Return how a run's generator took its versions."""
    traces = await read_traces(job.stack.broker, job.scope, len(await job.metrics()))
    swaps = [one.get("swap", 0.0) for trace in traces for one in trace.generators.values()]
    trained = {trace.step: trace.formed + trace.learner["train"] for trace in traces}
    began: dict[int, float] = {}
    for entry in await job.entries():
        for one in entry.group.trajectories if entry.group is not None else []:
            version = int(one.versions[one.mask == 1][0])
            began[version] = min(began.get(version, one.first_token), one.first_token)
    seconds = [began[step] - trained[step] for step in trained if step in began]
    return NewVersions(seconds, [pause for pause in swaps if pause])


def node_options(*, on_gpu: bool) -> list[str]:
    return [] if on_gpu else ["--slots", "2"]


async def test_a_loop_at_staleness_two_generates_nearly_as_fast_as_the_engine_alone(
    load: Load, tmp_path: Path, record: Recorder
) -> None:
    alone = await engine_alone(load)
    async with Stack(tmp_path / "stack", node_options=node_options(on_gpu=load.on_gpu)) as stack:
        job = await stack.submit(load.job(12, 2))
        await job.until("COMPLETED", deadline_s=200)
        in_loop = await loop_tokens_per_s(job)
        versions = await new_versions(job)
    share, source = decode_of_bandwidth(load, load.num_requests / alone)
    record("engine alone, tokens/s", alone)
    record("engine in the loop, tokens/s", in_loop)
    record("loop_over_engine", in_loop / alone)
    if share:
        record("decode_of_bandwidth", share)
        record("peak", source)
    record("swap_pause_s", median(versions.pauses_s))
    record("step_to_new_tokens_s", median(versions.to_tokens_s))
    assert min(versions.to_tokens_s) > 0
    assert median(versions.to_tokens_s) <= 10
    assert in_loop >= (0.4 if load.on_gpu else 0.02) * alone
