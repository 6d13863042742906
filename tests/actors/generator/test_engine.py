"""The engine on real tiny models: what it generates, records and keeps for the next turn."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from tinkermq.actors.engine.engine import Drawn, Engine, Sampling
from tinkermq.actors.engine.transformers.transformers_engine import TransformersEngine
from tinkermq.actors.policy.tiny_models import TinyKind
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.actors.generator.conftest import BLOCK_TOKENS, EngineKind
from tests.support.models import make_tiny_model, plain_logprobs, random_prompt, until

Capsys = pytest.CaptureFixture[str]

pytestmark = pytest.mark.asyncio(loop_scope="package")
MAX_SLOTS, MAX_CONTEXT = 8, 160


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3_moe"])
async def test_greedy_tokens_of_other_models_are_those_of_generate(
    tmp_path: Path, kind: TinyKind
) -> None:
    folder = make_tiny_model(tmp_path, kind)
    model = AutoModelForCausalLM.from_pretrained(folder)
    engine = await TransformersEngine.start(
        str(folder), max_slots=MAX_SLOTS, max_context=MAX_CONTEXT
    )
    await check_greedy(engine, model)
    await engine.close()


async def test_greedy_tokens_are_those_of_generate(
    engine: Engine, engine_kind: EngineKind, model: PreTrainedModel, capsys: Capsys
) -> None:
    worst = await check_greedy(engine, model)
    with capsys.disabled():
        print(f"\n{engine_kind}: log-probs differ from a plain forward pass by at most {worst:.1e}")


async def check_greedy(engine: Engine, model: PreTrainedModel) -> float:
    """Compare with transformers' `generate`; return by how much log-probs differ at most."""
    rng = np.random.default_rng(0)
    prompts = [random_prompt(rng) for _ in range(12)]
    sampling = Sampling(max_new_tokens=16, temperature=0.0)
    results = await asyncio.gather(
        *(engine.generate(p, sampling, request_id=str(i)) for i, p in enumerate(prompts))
    )
    differences: list[float] = []
    for prompt, result in zip(prompts, results, strict=True):
        ids = torch.from_numpy(prompt.astype(np.int64))[None]
        expected: torch.Tensor = model.generate(  # pyright: ignore[reportCallIssue]  its mixin's
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=16,
            do_sample=False,
            eos_token_id=None,
        )
        assert result.token_ids.tolist() == expected[0, len(prompt) :].tolist()
        differences.append(
            np.abs(result.logprobs - plain_logprobs(model, prompt, result.token_ids)).max()
        )
    assert max(differences) < 1e-4
    return float(max(differences))


async def test_logprobs_equal_a_plain_forward_pass_under_random_arrivals(
    engine: Engine, model: PreTrainedModel
) -> None:
    rng = np.random.default_rng(1)

    async def one(number: int) -> float:
        prompt, temperature = random_prompt(rng, 100), float(rng.choice([0.5, 1.0, 1.7]))
        top_p, top_k = float(rng.choice([0.8, 1.0])), int(rng.choice([0, 20]))
        sampling = Sampling(int(rng.integers(1, 50)), temperature, top_p, top_k)
        await asyncio.sleep(float(rng.random()) * 0.2)
        result = await engine.generate(prompt, sampling, request_id=str(number))
        assert len(result.token_ids) == sampling.max_new_tokens
        expected = plain_logprobs(model, prompt, result.token_ids, temperature)
        return float(np.abs(expected - result.logprobs).max())

    assert max(await asyncio.gather(*(one(number) for number in range(60)))) < 1e-4


def cached(kind: EngineKind, num_tokens: int) -> int:
    """Return how many tokens of a prompt the next one with the same beginning need not compute."""
    return num_tokens if kind == "transformers" else num_tokens // BLOCK_TOKENS * BLOCK_TOKENS


async def test_a_group_computes_its_shared_prompt_once(
    engine: Engine, engine_kind: EngineKind, model: PreTrainedModel
) -> None:
    rng = np.random.default_rng(2)
    prompts = [random_prompt(rng, 120), random_prompt(rng, 120)]
    assert min(map(len, prompts)) > BLOCK_TOKENS
    results = await asyncio.gather(
        *(
            engine.generate(prompts[i // 4], Sampling(20), request_id=str(i))
            for i in range(MAX_SLOTS)
        )
    )
    stats = engine.stats()
    shared = 3 * sum(cached(engine_kind, len(prompt)) for prompt in prompts)
    assert stats.reused_tokens == shared
    assert stats.prefilled_tokens == 4 * sum(map(len, prompts)) - shared
    assert len({tuple(result.token_ids.tolist()) for result in results}) == MAX_SLOTS
    for index, result in enumerate(results):
        expected = plain_logprobs(model, prompts[index // 4], result.token_ids)
        np.testing.assert_allclose(result.logprobs, expected, atol=1e-4)


async def test_the_next_turn_of_a_conversation_computes_only_what_is_new(
    engine: Engine, engine_kind: EngineKind, model: PreTrainedModel
) -> None:
    rng = np.random.default_rng(3)
    reused: list[int] = []

    async def episode(name: str) -> None:
        tokens = random_prompt(rng, 100)
        for turn in range(3):
            result = await engine.generate(
                tokens, Sampling(8), request_id=f"{name}.{turn}", conversation=name
            )
            expected = plain_logprobs(model, tokens, result.token_ids)
            np.testing.assert_allclose(result.logprobs, expected, atol=1e-4)
            if turn < 2:
                reused.append(cached(engine_kind, len(tokens) + 7))  # the last was never fed
            tokens = np.concatenate([tokens, result.token_ids, random_prompt(rng, 9)])
        engine.release(name)

    await asyncio.gather(*(episode(f"episode {number}") for number in range(20)))
    assert engine.stats().reused_tokens == sum(reused)
    await until(lambda: not engine.stats().cached_prefixes)


async def test_cached_prefixes_give_way_to_newer_ones(folder: Path) -> None:
    engine = await TransformersEngine.start(
        str(folder), max_slots=4, max_context=64, prefix_cache_bytes=100 * 2 * 2 * 2 * 16 * 4
    )
    for number in range(20):
        prompt = np.arange(20, dtype=np.int32) + np.int32(8 + number)
        await engine.generate(prompt, Sampling(4), request_id="x", conversation=str(number))
    assert engine.stats().cached_prefixes == 4  # 23 of 100 tokens each
    await engine.close()


async def test_a_conversation_that_was_edited_is_computed_anew(
    engine: Engine, model: PreTrainedModel
) -> None:
    prompt = np.arange(8, 40, dtype=np.int32)
    await engine.generate(prompt, Sampling(4), request_id="1", conversation="c")
    other = prompt[::-1].copy()
    result = await engine.generate(other, Sampling(4), request_id="2", conversation="c")
    expected = plain_logprobs(model, other, result.token_ids)
    np.testing.assert_allclose(result.logprobs, expected, atol=1e-4)
    assert engine.stats().reused_tokens == 0


async def test_a_seed_draws_the_same_tokens_in_any_batch(engine: Engine) -> None:
    rng = np.random.default_rng(4)
    prompt, sampling = random_prompt(rng), Sampling(24, temperature=1.0, seed=12345)
    alone = await engine.generate(prompt, sampling, request_id="alone")
    others = [
        engine.generate(random_prompt(rng), Sampling(int(rng.integers(1, 40))), request_id=str(i))
        for i in range(10)
    ]
    crowded, *_ = await asyncio.gather(
        engine.generate(prompt, sampling, request_id="crowded"), *others
    )
    assert crowded.token_ids.tolist() == alone.token_ids.tolist()


async def test_generation_ends_after_a_stop_token(engine: Engine) -> None:
    prompt = np.arange(10, 20, dtype=np.int32)
    free = await engine.generate(prompt, Sampling(12, temperature=0.0), request_id="free")
    stop = int(free.token_ids[-3])
    result = await engine.generate(
        prompt, Sampling(12, temperature=0.0, stop_token_ids=(3, 4, stop)), request_id="stopped"
    )
    first = free.token_ids.tolist().index(stop)
    assert free.finish_reason == "length"
    assert result.finish_reason == "stop"
    assert result.token_ids.tolist() == free.token_ids.tolist()[: first + 1]


async def test_tokens_are_told_one_by_one_as_they_are_drawn(engine: Engine) -> None:
    rng = np.random.default_rng(8)
    drawn: list[Drawn] = []
    quiet = engine.generate(random_prompt(rng), Sampling(12), request_id="quiet")
    prompt = random_prompt(rng)
    asked = engine.generate(prompt, Sampling(12, seed=3), request_id="told", on_token=drawn.append)
    _, told = await asyncio.gather(quiet, asked)
    assert [one.token_id for one in drawn] == told.token_ids.tolist()
    assert [one.logprob for one in drawn] == pytest.approx(told.logprobs.tolist())
    assert {one.version for one in drawn} == {engine.version}
    again = await engine.generate(prompt, Sampling(12, seed=3), request_id="again")
    assert again.token_ids.tolist() == told.token_ids.tolist()
    assert len(drawn) == 12
