"""Tiny models for the tests of the engine, and the engines that run them.

A test that asks for `engine` or `start` runs once with each engine; what runs vLLM is marked `vllm`
(`make test-vllm`). It takes long to start, so all tests share one vLLM for each model, in one event
loop.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

import pytest
import pytest_asyncio
import torch
from tinkermq.actors.engine.engine import Engine, Meter
from tinkermq.actors.engine.transformers.transformers_engine import TransformersEngine
from tinkermq.actors.policy.model_folder import (
    load_causal_lm,
    load_model_config,
    sees_images,
)
from tinkermq.actors.rollout.players import load_base
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.jetstream.streams import create_job_streams, delete_job_streams
from tinkermq.schemas.config.job import LimitsConfig
from tinkermq.schemas.wire.subjects import JobScope
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.support.images import KINDS, make_vision_model
from tests.support.models import make_tiny_model
from tests.support.vllm_start import ADAPTER, MAX_CONTEXT, MAX_SLOTS, configured

if TYPE_CHECKING:
    from tinkermq.actors.engine.vllm.model import VllmModel

torch.set_num_threads(1)

BLOCK_TOKENS = 32
"""vLLM caches prompts in whole blocks of so many tokens."""
EngineKind = Literal["transformers", "vllm"]
StartEngine = Callable[..., Awaitable[Engine]]
InVllm = Callable[[Path], Awaitable["VllmModel"]]


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's folder; vLLM's attention on CPUs wants heads of 32."""
    return make_tiny_model(tmp_path_factory.mktemp("model"), heads=2)


@pytest.fixture(scope="package")
def model(folder: Path) -> PreTrainedModel:
    """The same model, to compare with."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture(scope="session", params=KINDS)
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny vision-language model of each class."""
    path = tmp_path_factory.getbasetemp() / request.param
    return path if path.is_dir() else make_vision_model(path, request.param, head=32)


@pytest.fixture(params=["transformers", pytest.param("vllm", marks=pytest.mark.vllm)])
def engine_kind(request: pytest.FixtureRequest) -> EngineKind:
    """Which engine a test runs."""
    return request.param


@pytest.fixture
async def recorded(broker: Broker) -> AsyncIterator[JobScope]:
    """A job whose running episodes are written down: what they draw follows from the task."""
    scope = JobScope("local", "recorded")
    await create_job_streams(broker, scope, LimitsConfig(), segments=True)
    yield scope
    await delete_job_streams(broker, scope)


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def in_vllm() -> AsyncIterator[InVllm]:
    """Return what gives a model in vLLM, which starts with the first who asks.

    Those that see images have room for an adapter.
    """
    started: dict[Path, VllmModel] = {}

    async def get(folder: Path) -> "VllmModel":
        if folder not in started:
            sees = sees_images(load_model_config(str(folder)))
            base = await load_base(configured(folder), [ADAPTER] if sees else [])
            started[folder] = cast("VllmModel", base)
            started[folder].add_owner()
        return started[folder]

    yield get
    for base in started.values():
        await base.close()


@pytest_asyncio.fixture(loop_scope="package")
async def start(engine_kind: EngineKind, in_vllm: InVllm) -> AsyncIterator[StartEngine]:
    """Return what starts an engine of 8 rows and 160 tokens, with the weights of a model."""
    engines: list[Engine] = []

    async def begin(folder: Path, max_waiting: int = 4096, *, replays: bool = False) -> Engine:
        if engine_kind == "transformers":
            engine: Engine = await TransformersEngine.start(
                str(folder),
                max_slots=MAX_SLOTS,
                max_context=MAX_CONTEXT,
                max_waiting=max_waiting,
                record_experts=replays,
            )
        else:
            from tinkermq.actors.engine.vllm.vllm_engine import start_vllm

            base = await in_vllm(folder)
            config = configured(folder)
            config.algorithm.router_replay = replays
            engine = await start_vllm(config, base=base, max_waiting=max_waiting)
            weights = load_causal_lm(str(folder), dtype=torch.float32).state_dict()
            await engine.load_weights(0, weights, "recompute")
            vars(base.meter).update(vars(Meter()))
        engines.append(engine)
        return engine

    yield begin
    for engine in engines:
        await engine.close()


@pytest_asyncio.fixture(loop_scope="package")
async def engine(start: StartEngine, folder: Path) -> Engine:
    """An engine of 8 rows and 160 tokens."""
    return await start(folder)


@pytest_asyncio.fixture(loop_scope="package")
async def eyes(start: StartEngine, seeing: Path) -> Engine:
    """An engine that runs a model of each class that sees images."""
    return await start(seeing)
