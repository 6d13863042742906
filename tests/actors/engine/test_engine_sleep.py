"""An engine that frees its memory while a learner on the same GPU trains, and goes on after it."""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from tinkermq.actors.engine.engine import Drawn, Engine, Sampling
from tinkermq.actors.engine.transformers.transformers_engine import TransformersEngine
from tinkermq.schemas.config.sections import LoraConfig
from tinkermq.schemas.wire.errors import EngineError
from transformers import PreTrainedModel

from tests.actors.engine.conftest import MAX_SLOTS, EngineKind, StartEngine
from tests.support.models import changed, loaded, plain_logprobs, random_prompt, until

pytestmark = pytest.mark.asyncio(loop_scope="package")


async def test_requests_in_flight_go_on_after_a_sleep_with_the_weights_that_came_meanwhile(
    engine: Engine, model: PreTrainedModel
) -> None:
    rng = np.random.default_rng(5)
    weights = changed(model, 1)
    models = {0: model, 1: loaded(model, weights)}
    prompts = [random_prompt(rng) for _ in range(MAX_SLOTS + 2)]  # two of them wait for a row
    running = [
        asyncio.ensure_future(engine.generate(p, Sampling(110), request_id=str(i)))
        for i, p in enumerate(prompts)
    ]
    await until(lambda: engine.stats().generated_tokens >= 10 * MAX_SLOTS)
    await engine.sleep()
    await engine.sleep()  # nothing happens
    drawn = engine.stats().generated_tokens
    late = asyncio.ensure_future(engine.generate(prompts[0], Sampling(5), request_id="late"))
    scored = asyncio.ensure_future(engine.score(prompts[1], request_id="scored"))
    await engine.load_weights(1, weights)
    assert engine.version == 1
    await asyncio.sleep(0.2)
    assert engine.stats().generated_tokens == drawn
    assert not any(request.done() for request in [*running, late, scored])
    await engine.wake()
    await engine.wake()
    results = await asyncio.gather(*running)
    assert {int(version) for result in results[:MAX_SLOTS] for version in result.versions} == {0, 1}
    for prompt, result in zip(prompts, results, strict=True):
        assert len(result.token_ids) == 110
        assert (np.diff(result.versions) >= 0).all()
        for version, other in models.items():
            of_version = result.versions == version
            expected = plain_logprobs(other, prompt, result.token_ids, 1.0)
            np.testing.assert_allclose(result.logprobs[of_version], expected[of_version], atol=1e-4)
    assert set((await late).versions.tolist()) == {1}
    expected = plain_logprobs(models[1], prompts[1][:1], prompts[1][1:], 1.0)
    np.testing.assert_allclose((await scored).logprobs[1:], expected, atol=1e-4)
    assert engine.stats().paused_s > 0.2


async def test_an_engine_wakes_with_the_weights_that_it_had(
    engine: Engine, model: PreTrainedModel
) -> None:
    prompt = random_prompt(np.random.default_rng(6))
    before = await engine.generate(prompt, Sampling(20, temperature=0), request_id="before")
    for _ in range(2):
        await engine.sleep()
        await engine.wake()
    after = await engine.generate(prompt, Sampling(20, temperature=0), request_id="after")
    assert after.token_ids.tolist() == before.token_ids.tolist()
    np.testing.assert_allclose(
        after.logprobs, plain_logprobs(model, prompt, after.token_ids, 1.0), atol=1e-4
    )


async def test_requests_are_cancelled_and_versions_are_swapped_twice_during_a_sleep(
    engine: Engine, model: PreTrainedModel
) -> None:
    prompts = [random_prompt(np.random.default_rng(seed)) for seed in range(4)]
    running = [
        asyncio.ensure_future(engine.generate(p, Sampling(100), request_id=str(i)))
        for i, p in enumerate(prompts)
    ]
    await until(lambda: engine.stats().generated_tokens >= 40)
    await engine.sleep()
    engine.cancel("0")
    cancelled = await running[0]
    assert cancelled.finish_reason == "cancelled"
    assert len(cancelled.token_ids) >= 1
    for version in (1, 2):
        await engine.load_weights(version, changed(model, version))
    await engine.wake()
    newest = loaded(model, changed(model, 2))
    for prompt, result in zip(prompts[1:], await asyncio.gather(*running[1:]), strict=True):
        assert set(result.versions.tolist()) == {0, 2}
        of_newest = result.versions == 2
        expected = plain_logprobs(newest, prompt, result.token_ids, 1.0)
        np.testing.assert_allclose(result.logprobs[of_newest], expected[of_newest], atol=1e-4)


async def test_an_engine_that_gave_up_its_weights_wakes_with_those_that_come(
    engine: Engine, model: PreTrainedModel
) -> None:
    await engine.load_weights(1, changed(model, 1))  # vLLM's workers see which ones a version has
    prompt = random_prompt(np.random.default_rng(8))
    running = asyncio.ensure_future(engine.generate(prompt, Sampling(100), request_id="runs"))
    generated = engine.stats().generated_tokens
    await until(lambda: engine.stats().generated_tokens >= generated + 10)
    await engine.sleep(keep_weights=False)
    assert not engine.has_weights
    with pytest.raises(EngineError, match="gave up its weights when it fell asleep"):
        await engine.wake()
    await engine.load_weights(2, changed(model, 2))
    assert engine.has_weights
    await engine.wake()
    result = await running
    assert set(result.versions.tolist()) == {1, 2}
    for version in (1, 2):
        of_version = result.versions == version
        other = loaded(model, changed(model, version))
        expected = plain_logprobs(other, prompt, result.token_ids, 1.0)
        np.testing.assert_allclose(result.logprobs[of_version], expected[of_version], atol=1e-4)


async def test_an_engine_keeps_the_weights_beside_an_adapter_when_it_sleeps(folder: Path) -> None:
    """A new version is an adapter, and does not bring them. vLLM sleeps at level 1 then."""
    engine: Any = await TransformersEngine.start(
        str(folder), max_slots=2, max_context=64, lora=LoraConfig(rank=4)
    )
    weights = sum(weight.nbytes for weight in engine._decoder.model.parameters())
    await engine.sleep(keep_weights=False)
    assert engine._worker._asleep.num_bytes > 0.8 * weights
    assert not engine.has_weights
    await engine.close()


async def test_the_memory_of_weights_and_cache_is_free_during_a_sleep(
    engine_kind: EngineKind, start: StartEngine, folder: Path
) -> None:
    if engine_kind == "vllm":
        pytest.skip("vLLM frees memory on GPUs only")
    engine: Any = await start(folder)
    assert isinstance(engine, TransformersEngine)
    decoder = engine._decoder

    def held() -> int:
        tensors = [*decoder.model.parameters(), *decoder.model.buffers()]
        storages = {t.data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        return sum(storages.values()) + decoder.cache.num_bytes

    prompt = random_prompt(np.random.default_rng(7))
    weights = {name: tensor.clone() for name, tensor in decoder.model.state_dict().items()}
    await engine.load_weights(1, weights)
    running = asyncio.ensure_future(engine.generate(prompt, Sampling(100), request_id="runs"))
    await until(lambda: engine.stats().generated_tokens >= 10)
    awake, worker = held(), cast(Any, engine._worker)
    assert awake > 1 << 16
    await engine.sleep()
    assert held() <= awake // 50  # one number for each tensor
    assert worker._asleep.num_bytes > awake // 4  # in the machine's memory
    await engine.wake()
    await engine.sleep(keep_weights=False)
    assert held() + worker._asleep.num_bytes <= awake // 50
    await engine.load_weights(2, weights)
    await engine.wake()
    assert held() >= awake
    assert len((await running).token_ids) == 100
    model: Any = decoder.model
    assert torch.equal(model.get_output_embeddings().weight, model.get_input_embeddings().weight)


async def test_tokens_that_are_streamed_in_parts_have_the_version_that_drew_them(
    engine: Engine, model: PreTrainedModel
) -> None:
    told: dict[int, list[Drawn]] = {}

    def note(request: int, drawn: Drawn) -> None:
        told.setdefault(request, []).append(drawn)

    prompts = [random_prompt(np.random.default_rng(seed)) for seed in range(4)]
    running = [
        asyncio.ensure_future(
            engine.generate(
                p, Sampling(100, stream_every=16), request_id=str(i), on_token=partial(note, i)
            )
        )
        for i, p in enumerate(prompts)
    ]
    await until(lambda: engine.stats().generated_tokens >= 100)
    await engine.load_weights(1, changed(model, 1), "recompute")
    await until(lambda: engine.stats().generated_tokens >= 200)
    await engine.sleep()
    await engine.load_weights(2, changed(model, 2))
    await engine.wake()
    for request, result in enumerate(await asyncio.gather(*running)):
        assert set(result.versions.tolist()) == {0, 1, 2}
        assert [drawn.token_id for drawn in told[request]] == result.token_ids.tolist()
        assert [drawn.version for drawn in told[request]] == result.versions.tolist()
        logprobs = [drawn.logprob for drawn in told[request]]
        np.testing.assert_allclose(logprobs, result.logprobs, atol=1e-6)


async def test_an_engine_is_closed_during_a_sleep(
    engine_kind: EngineKind, start: StartEngine, folder: Path
) -> None:
    if engine_kind == "vllm":
        pytest.skip("its processes are shared by all tests")
    engine = await start(folder)
    await engine.sleep()
    await engine.close()
