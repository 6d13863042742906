"""New weights while requests run: versions, caches, dtypes, and weights that do not fit."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from tinkermq.actors.engine.engine import Engine, Generation, Sampling
from tinkermq.actors.engine.transformers.transformers_engine import TransformersEngine
from tinkermq.schemas.wire.errors import EngineError
from transformers import PreTrainedModel

from tests.actors.generator.conftest import EngineKind
from tests.support.models import changed, loaded, plain_logprobs, random_prompt, until

pytestmark = pytest.mark.asyncio(loop_scope="package")
MAX_SLOTS = 8


async def test_new_weights_serve_running_requests_and_every_token_has_its_version(
    engine: Engine, model: PreTrainedModel
) -> None:
    rng = np.random.default_rng(5)
    weights = {version: changed(model, version) for version in (1, 2)}
    models = {0: model} | {v: loaded(model, w) for v, w in weights.items()}
    prompts = [random_prompt(rng) for _ in range(MAX_SLOTS)]
    running = [
        asyncio.ensure_future(engine.generate(p, Sampling(110), request_id=str(i)))
        for i, p in enumerate(prompts)
    ]
    for version in (1, 2):
        enough = version * 10 * MAX_SLOTS
        await until(lambda enough=enough: engine.stats().generated_tokens >= enough)
        await engine.load_weights(version, weights[version], "recompute")
        assert engine.version == version
    for prompt, result in zip(prompts, await asyncio.gather(*running), strict=True):
        assert set(result.versions.tolist()) == {0, 1, 2}
        assert (np.diff(result.versions) >= 0).all()
        for version, other in models.items():
            own = result.versions == version
            expected = plain_logprobs(other, prompt, result.token_ids)
            np.testing.assert_allclose(result.logprobs[own], expected[own], atol=1e-4)
    assert 0 < engine.stats().last_pause_s < 5


async def test_keeping_the_cache_at_a_swap_leaves_earlier_tokens_as_they_were(
    engine: Engine, model: PreTrainedModel
) -> None:
    prompt = np.arange(10, 30, dtype=np.int32)
    running = asyncio.ensure_future(
        engine.generate(prompt, Sampling(120), request_id="1", conversation="c")
    )
    await until(lambda: engine.stats().generated_tokens >= 30)
    await engine.load_weights(1, changed(model, 1), "keep")
    result = await running
    old = result.versions == 0
    assert 0 < old.sum() < 120
    expected = plain_logprobs(model, prompt, result.token_ids)
    np.testing.assert_allclose(result.logprobs[old], expected[old], atol=1e-4)
    assert engine.stats().cached_prefixes == 0  # one of two versions is not kept


async def test_cached_turns_do_not_outlive_their_version(
    engine: Engine, engine_kind: EngineKind, model: PreTrainedModel
) -> None:
    prompt = np.arange(10, 80, dtype=np.int32)
    first = await engine.generate(prompt, Sampling(5), request_id="1", conversation="c")
    num_cached = int(engine_kind == "transformers")  # vLLM has one cache for all
    assert engine.stats().cached_prefixes == num_cached
    weights = changed(model, 1)
    await engine.load_weights(1, weights)
    longer = np.concatenate([prompt, first.token_ids, [9]])
    result = await engine.generate(longer, Sampling(5), request_id="2", conversation="c")
    expected = plain_logprobs(loaded(model, weights), longer, result.token_ids)
    np.testing.assert_allclose(result.logprobs, expected, atol=1e-4)


async def test_weights_come_as_bytes_in_another_dtype_and_with_tied_names(
    engine: Engine, model: PreTrainedModel
) -> None:
    weights = {name: value.bfloat16() for name, value in changed(model, 1).items()}
    buffers = {
        name: ("bfloat16", list(v.shape), v.contiguous().view(torch.uint8).numpy().tobytes())
        for name, v in weights.items()
    }
    buffers["lm_head.weight"] = buffers["model.embed_tokens.weight"]
    await engine.load_weights(1, buffers)
    prompt = np.arange(10, 30, dtype=np.int32)
    result = await engine.generate(prompt, Sampling(5), request_id="1")
    same = loaded(model, {name: value.float() for name, value in weights.items()})
    expected = plain_logprobs(same, prompt, result.token_ids)
    np.testing.assert_allclose(result.logprobs, expected, atol=1e-4)


async def test_weights_that_do_not_fit_are_refused_and_change_nothing(
    engine: Engine, model: PreTrainedModel
) -> None:
    good = changed(model, 1)
    bad = dict(good)
    del bad["model.norm.weight"]
    bad["model.layers.9.mlp.up_proj.weight"] = torch.zeros(3)
    bad["model.layers.0.mlp.up_proj.weight"] = torch.zeros(2, 3)
    with pytest.raises(EngineError) as caught:
        await engine.load_weights(1, bad)
    assert "missing: model.norm.weight" in caught.value.message
    assert "unknown: model.layers.9.mlp.up_proj.weight" in caught.value.message
    assert "model.layers.0.mlp.up_proj.weight [2, 3], the model's is" in caught.value.message
    with pytest.raises(EngineError, match="are one tensor in this model"):
        await engine.load_weights(1, good | {"lm_head.weight": torch.zeros(264, 64)})
    with pytest.raises(EngineError, match="bytes instead of"):
        await engine.load_weights(1, good | {"model.norm.weight": ("float32", [64], b"1234")})
    prompt = np.arange(10, 30, dtype=np.int32)
    result = await engine.generate(prompt, Sampling(5), request_id="1")
    assert engine.version == 0
    expected = plain_logprobs(model, prompt, result.token_ids)
    np.testing.assert_allclose(result.logprobs, expected, atol=1e-4)


async def test_diverged_weights_fail_their_requests_and_the_next_version_recovers(
    engine: Engine, model: PreTrainedModel
) -> None:
    weights = {name: torch.full_like(v, torch.nan) for name, v in changed(model, 1).items()}
    running = asyncio.ensure_future(engine.generate([9, 10], Sampling(150), request_id="0"))
    await asyncio.sleep(0.02)
    await engine.load_weights(1, weights)
    with pytest.raises(EngineError, match="logits that are not finite"):
        await running
    with pytest.raises(EngineError, match="version 1 computes logits that are not finite"):
        await engine.generate([9, 10], Sampling(5), request_id="1")
    await engine.load_weights(2, model.state_dict())
    result = await engine.generate([9, 10], Sampling(5), request_id="2")
    assert np.isfinite(result.logprobs).all()


async def test_a_group_that_waits_at_a_swap_computes_its_prompt_anew(
    engine: Engine, model: PreTrainedModel
) -> None:
    prompt = np.arange(10, 110, dtype=np.int32)
    running = [
        asyncio.ensure_future(engine.generate(prompt, Sampling(40), request_id=str(index)))
        for index in range(3 * MAX_SLOTS)
    ]
    await until(lambda: engine.stats().generated_tokens >= 10 * MAX_SLOTS)
    weights = changed(model, 1)
    await engine.load_weights(1, weights, "keep")
    results = await asyncio.gather(*running)
    late = [result for result in results if set(result.versions.tolist()) == {1}]
    assert len(late) == 2 * MAX_SLOTS
    for result in late:
        expected = plain_logprobs(loaded(model, weights), prompt, result.token_ids)
        np.testing.assert_allclose(result.logprobs, expected, atol=1e-4)


async def test_bfloat16_generates_and_takes_float32_weights(
    folder: Path, model: PreTrainedModel
) -> None:
    engine = await TransformersEngine.start(
        str(folder), max_slots=4, max_context=64, dtype="bfloat16"
    )
    await engine.load_weights(1, changed(model, 1))
    prompts = [np.arange(8, 8 + n, dtype=np.int32) for n in (3, 9, 20)]
    results: list[Generation] = await asyncio.gather(
        *(engine.generate(p, Sampling(10), request_id=str(i)) for i, p in enumerate(prompts))
    )
    same = loaded(model, changed(model, 1))
    for prompt, result in zip(prompts, results, strict=True):
        expected = plain_logprobs(same, prompt, result.token_ids)
        np.testing.assert_allclose(result.logprobs, expected, atol=0.15)
    await engine.close()
