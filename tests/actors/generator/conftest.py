"""One tiny model for the tests of the engine, and the engines that run it.

A test that asks for `engine` or `start` runs once with each engine; what runs vLLM is marked `vllm`
(`make test-vllm`). It takes long to start, so all tests share one vLLM, in one event loop.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest
import pytest_asyncio
import torch
from tinkermq.actors.generator.engine import Engine
from tinkermq.actors.generator.meter import Meter
from tinkermq.actors.generator.players import load_base
from tinkermq.actors.generator.transformers_engine import TransformersEngine
from tinkermq.schemas.config import JobConfig
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.models import make_tiny_model

if TYPE_CHECKING:
    from tinkermq.actors.generator.vllm_model import VllmModel

torch.set_num_threads(1)

MAX_SLOTS, MAX_CONTEXT = 8, 160
BLOCK_TOKENS = 32
"""vLLM caches prompts in whole blocks of so many tokens."""
EngineKind = Literal["transformers", "vllm"]
StartEngine = Callable[..., Awaitable[Engine]]
InVllm = Callable[[], Awaitable["VllmModel"]]


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's folder; vLLM's attention on CPUs wants heads of 32."""
    return make_tiny_model(tmp_path_factory.mktemp("model"), heads=2)


@pytest.fixture(scope="package")
def model(folder: Path) -> PreTrainedModel:
    """The same model, to compare with."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture(params=["transformers", pytest.param("vllm", marks=pytest.mark.vllm)])
def engine_kind(request: pytest.FixtureRequest) -> EngineKind:
    """Which engine a test runs."""
    return request.param


def configured(folder: Path, **generator: Any) -> JobConfig:
    """Return the configuration of a job whose generators run vLLM."""
    asked = {"compile": False, "kv_cache_mb": 64, "max_requests": MAX_SLOTS, **generator}
    return JobConfig.model_validate(
        {
            "model": {"path": str(folder)},
            "env": {"game": "bandit"},
            "generator": {"engine": "vllm", "max_context": MAX_CONTEXT, **asked},
            "rollout": {
                "max_prompt_tokens": 20,
                "max_turn_tokens": 20,
                "max_response_tokens": 20,
            },
        }
    )


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def in_vllm(folder: Path) -> AsyncIterator[InVllm]:
    """Return what gives the model in vLLM, which starts with the first who asks."""
    started: list[VllmModel] = []

    async def get() -> "VllmModel":
        if not started:
            base = await load_base(configured(folder), [])
            base.own()
            started.append(base)
        return started[0]

    yield get
    for base in started:
        await base.close()


@pytest_asyncio.fixture(loop_scope="package")
async def start(
    engine_kind: EngineKind,
    folder: Path,
    model: PreTrainedModel,
    in_vllm: InVllm,
) -> AsyncIterator[StartEngine]:
    """Return what starts an engine of 8 rows and 160 tokens, with the model's own weights."""
    engines: list[Engine] = []

    async def begin(max_waiting: int = 4096) -> Engine:
        if engine_kind == "transformers":
            engine: Engine = await TransformersEngine.start(
                str(folder), max_slots=MAX_SLOTS, max_context=MAX_CONTEXT, max_waiting=max_waiting
            )
        else:
            from tinkermq.actors.generator.vllm_engine import start_vllm

            base = await in_vllm()
            engine = await start_vllm(configured(folder), base=base, max_waiting=max_waiting)
            await engine.load_weights(0, model.state_dict(), "recompute")
            vars(base.meter).update(vars(Meter()))
        engines.append(engine)
        return engine

    yield begin
    for engine in engines:
        await engine.close()


@pytest_asyncio.fixture(loop_scope="package")
async def engine(start: StartEngine) -> Engine:
    """An engine of 8 rows and 160 tokens."""
    return await start()
