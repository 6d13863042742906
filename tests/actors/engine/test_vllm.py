"""What vLLM alone is asked for: two workers, adapters beside their base, processes that die."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import pytest_asyncio
import torch
from tinkermq.actors.engine.engine import Sampling
from tinkermq.actors.policy.lora import policy_tensors
from tinkermq.actors.policy.policies import MAIN, config_of_folder
from tinkermq.actors.rollout.players import Base, load_base, start_engine
from tinkermq.actors.weights.store import WeightStore
from tinkermq.broker.client.connection import connect
from tinkermq.broker.jetstream.streams import create_job_streams, delete_job_streams
from tinkermq.broker.nats_server import NatsServer
from tinkermq.schemas.config.job import JobConfig, LimitsConfig
from tinkermq.schemas.config.sections import LoraConfig
from tinkermq.schemas.wire.errors import ConfigError, EngineError
from tinkermq.schemas.wire.subjects import JobScope
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.actors.engine.conftest import InVllm
from tests.actors.engine.test_vllm_transfer import Learner, check, load_version
from tests.support.models import (
    adapted,
    changed,
    loaded,
    make_tiny_model,
    plain_logprobs,
    until,
)
from tests.support.processes import alive
from tests.support.vllm_start import configured

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="package")]

LORAS = [LoraConfig(rank=4), LoraConfig(rank=2, alpha=8, targets=["q_proj", "v_proj"])]
PROMPT = np.arange(40, 110, dtype=np.int32)


@dataclass(frozen=True)
class Pair:
    """Two workers that hold one model."""

    config: JobConfig
    base: Base
    engine: Any
    model: PreTrainedModel
    """The same model, to compare with."""
    processes: set[int]
    """All that vLLM has started."""


def processes() -> set[int]:
    """Return the ids of all processes of vLLM's that this one has started, and theirs."""
    children = psutil.Process().children(recursive=True)
    return {child.pid for child in children if "VLLM" in "".join(child.cmdline())}


async def test_what_vllm_would_do_otherwise_is_refused(folder: Path, in_vllm: InVllm) -> None:
    from tinkermq.actors.engine.vllm.vllm_engine import start_vllm

    engine = await start_vllm(configured(folder), base=await in_vllm(folder))
    with pytest.raises(ConfigError, match=r"does not sample at temperature 0\.005"):
        await engine.generate([9], Sampling(1, temperature=0.005), request_id="cold")
    await engine.close()


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    """Two workers that hold one model, with room for adapters.

    Their cache has 2,048 tokens for 32 requests of 160.
    """
    folder = make_tiny_model(tmp_path_factory.mktemp("model"), heads=2, kv_heads=2)
    config = configured(folder, slots=2, tensor_parallel=2, max_requests=32, kv_cache_mb=1)
    others = processes()
    base = await load_base(config, LORAS)
    engine = await start_engine(config, 7, base)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    started = processes() - others
    assert len(started) == 3  # one that schedules
    yield Pair(config, base, engine, model, started)
    await engine.close()


async def test_two_workers_take_new_weights_together(pair: Pair) -> None:
    engine, model = pair.engine, pair.model
    weights = changed(model, 1)
    for version, each in ((1, loaded(model, weights)), (2, model)):
        await engine.load_weights(version, each.state_dict())
        result = await engine.generate(PROMPT, Sampling(20, 1.3, 0.9), request_id="1")
        assert set(result.versions.tolist()) == {version}
        expected = plain_logprobs(each, PROMPT, result.token_ids, 1.3)
        np.testing.assert_allclose(result.logprobs, expected, atol=1e-4)


async def test_two_workers_take_new_weights_from_the_learner_together(
    pair: Pair, nats_server: NatsServer, tmp_path: Path
) -> None:
    scope = JobScope("local", "pair")
    async with (
        await connect(nats_server.url, name="learner") as broker,
        await connect(nats_server.url, name="generator") as other,
    ):
        await create_job_streams(broker, scope, LimitsConfig())
        learner = Learner(broker, scope, tmp_path, pair.model)
        await learner.start()
        store = WeightStore(other, scope, "nccl")
        for version in (3, 4):
            manifest = await learner.publish(version)
            await load_version(store, {MAIN: pair.engine}, manifest, "keep")
            await check(pair.engine, learner, version, "pair")
        assert pair.engine._receiver._member.num_ranks == 2
        await learner.close()
        await delete_job_streams(broker, scope)


async def test_more_requests_run_while_the_cache_has_room_and_fewer_after_a_preemption(
    pair: Pair,
) -> None:
    engine, model = pair.engine, pair.model
    await engine.load_weights(5, model.state_dict())
    rng = np.random.default_rng(9)
    prompts = [rng.integers(8, 264, 10).astype(np.int32) for _ in range(40)]
    turn = await engine.generate(PROMPT, Sampling(80), request_id="1", conversation="c")
    before = engine.stats()
    running = asyncio.gather(
        *(
            engine.generate(prompt, Sampling(140), request_id=str(index))
            for index, prompt in enumerate(prompts)
        )
    )
    bound = engine._model._limit.concurrency
    limits = [bound.limit]
    while not running.done():
        limits.append(bound.limit)
        await asyncio.sleep(0.005)
    assert limits[0] == 2048 // 160
    assert limits[0] < max(limits) <= 32
    assert limits[-1] < max(limits)  # only a preemption cuts it
    preempted = engine.stats().evicted
    assert preempted > before.evicted
    assert before.cache_tokens == 2048
    # the others used the whole cache, so nothing is left of the conversation
    longer = np.concatenate([PROMPT, turn.token_ids])
    for request in "23":
        await engine.generate(longer, Sampling(1), request_id=request, conversation="c")
        assert engine.stats().evicted == preempted + 1
    engine.release("c")
    for prompt, result in zip(prompts, await running, strict=True):
        assert len(result.token_ids) == 140
        expected = plain_logprobs(model, prompt, result.token_ids)
        np.testing.assert_allclose(result.logprobs, expected, atol=1e-4)


async def test_adapters_beside_their_base_are_swapped_while_all_of_them_generate(
    pair: Pair, tmp_path: Path
) -> None:
    config, folder = pair.config, Path(pair.config.model.path)
    first, third = adapted(folder, LORAS[0], 1), adapted(folder, LORAS[0], 3)
    second = adapted(folder, LORAS[1], 2)
    second.save_pretrained(tmp_path)
    await pair.engine.load_weights(7, pair.model.state_dict())
    engines = [
        pair.engine,
        await start_engine(config.model_copy(update={"lora": LORAS[0]}), 0, pair.base),
        await start_engine(config_of_folder(config, str(tmp_path)), 5, pair.base),
    ]
    assert [engine.version for engine in engines] == [7, 0, 5]
    before = engines[0].stats().generated_tokens
    running = [
        asyncio.ensure_future(engine.generate(PROMPT, Sampling(80), request_id="same name"))
        for engine in engines
    ]
    await until(lambda: engines[0].stats().generated_tokens >= before + 30)
    await engines[1].load_weights(1, policy_tensors(first), "recompute")
    await until(lambda: engines[0].stats().generated_tokens >= before + 120)
    await engines[1].load_weights(2, policy_tensors(third), "recompute")
    results = await asyncio.gather(*running)
    made_by = [{7: pair.model}, {0: pair.model, 1: first, 2: third}, {5: second}]
    for result, models in zip(results, made_by, strict=True):
        assert set(result.versions.tolist()) == set(models)
        for version, each in models.items():
            own = result.versions == version
            expected = plain_logprobs(each, PROMPT, result.token_ids)
            np.testing.assert_allclose(result.logprobs[own], expected[own], atol=1e-3)
    with pytest.raises(EngineError, match=r"missing: base_model\.model\."):
        await engines[1].load_weights(3, policy_tensors(second))
    await engines[1].close()
    again = await engines[2].generate(PROMPT, Sampling(5), request_id="after the other")
    assert set(again.versions.tolist()) == {5}
    await engines[2].close()


async def test_vllm_ends_with_whom_it_works_for_and_its_death_fails_requests(pair: Pair) -> None:
    other = await asyncio.create_subprocess_exec("sleep", "1000")
    await pair.engine._model._llm.collective_rpc("end_with", args=(other.pid,))
    running = asyncio.ensure_future(
        pair.engine.generate(PROMPT, Sampling(90), request_id="running")
    )
    await asyncio.sleep(0)
    other.kill()
    with pytest.raises(EngineError):
        await running
    await until(lambda: pair.engine.failure is not None)
    with pytest.raises(EngineError, match="vLLM"):
        await pair.engine.generate(PROMPT, Sampling(50), request_id="refused")
    await other.wait()
    await until(lambda: not any(alive(pid) for pid in pair.processes))
