"""The engines on real tiny models: what they generate, their limits, and new weights."""

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tinkermq.actors.engine.engine import Drawn, Engine, Generation, Sampling
from tinkermq.actors.engine.transformers.decoder import load_decoder
from tinkermq.actors.engine.transformers.transformers_engine import TransformersEngine
from tinkermq.actors.policy.tiny_models import TinyKind
from tinkermq.actors.weights.tensors import TensorBytes
from tinkermq.schemas.wire.errors import ConfigError, EngineError, ModelError
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.actors.engine.conftest import BLOCK_TOKENS, EngineKind, StartEngine
from tests.support.images import png
from tests.support.models import (
    changed,
    loaded,
    make_tiny_model,
    plain_logprobs,
    random_prompt,
    until,
)

pytestmark = pytest.mark.asyncio(loop_scope="package")


Capsys = pytest.CaptureFixture[str]
MAX_SLOTS = 8
MAX_CONTEXT = 160


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
    assert not engine.stats().evicted
    await until(lambda: not engine.stats().cached_prefixes)


async def test_cached_prefixes_give_way_to_newer_ones(folder: Path) -> None:
    engine = await TransformersEngine.start(
        str(folder), max_slots=4, max_context=64, prefix_cache_bytes=134 * 2 * 2 * 2 * 16 * 4
    )
    for number in range(20):
        prompt = np.arange(20, dtype=np.int32) + np.int32(8 + number)
        await engine.generate(prompt, Sampling(4), request_id="x", conversation=str(number))
    assert engine.stats().cached_prefixes == 4  # 23 of 101 tokens each; 33 are for prompts
    assert engine.stats().evicted == 16
    await engine.close()


async def test_prompts_that_begin_alike_compute_their_beginning_once(
    folder: Path, model: PreTrainedModel
) -> None:
    engine = await TransformersEngine.start(str(folder), max_slots=4, max_context=128)
    rng = np.random.default_rng(4)
    system = np.arange(8, 48, dtype=np.int32)
    ends = [np.array([first, *random_prompt(rng, 12)], dtype=np.int32) for first in range(100, 110)]
    prompts = [np.concatenate([system, end]) for end in ends]

    async def check(prompt: np.ndarray, request_id: str) -> None:
        result = await engine.generate(prompt, Sampling(8), request_id=request_id)
        expected = plain_logprobs(model, prompt, result.token_ids)
        np.testing.assert_allclose(result.logprobs, expected, atol=1e-4)

    await asyncio.gather(*(check(prompt, str(at)) for at, prompt in enumerate(prompts)))
    computed = len(system) + sum(map(len, ends))
    assert engine.stats().prefilled_tokens == computed
    await check(prompts[0], "again")
    assert engine.stats().prefilled_tokens == computed + 1
    await check(system[:15], "short")
    assert engine.stats().prefilled_tokens == computed + 1 + 15
    await engine.load_weights(1, changed(model, 1))
    await engine.generate(prompts[0], Sampling(8), request_id="newer weights")
    assert engine.stats().prefilled_tokens == computed + 1 + 15 + len(prompts[0])
    await engine.close()


async def test_rows_of_one_prompt_with_equal_tokens_are_decoded_once(
    folder: Path, model: PreTrainedModel
) -> None:
    decoder = load_decoder(
        str(folder), dtype=torch.float32, device="cpu", max_slots=12, max_tokens=64
    )
    num_rows: list[int] = []
    decoder.model.register_forward_pre_hook(
        lambda _, __, read: num_rows.append(len(read["input_ids"])), with_kwargs=True
    )
    engine = TransformersEngine(decoder)
    prompts = [np.arange(first, first + 20, dtype=np.int32) for first in (8, 60, 120)]
    samplings = [Sampling(16, temperature=0)] * 6 + [Sampling(16, top_k=2)] * 6
    asked = [
        (prompts[at % 3 if at < 6 else 2], replace(sampling, seed=at, max_new_tokens=12 + at % 5))
        for at, sampling in enumerate(samplings)
    ]
    results = await asyncio.gather(
        *(engine.generate(*one, request_id=str(at)) for at, one in enumerate(asked))
    )
    assert num_rows[:2] == [3, 4], "three prompts, and two answers to one of them"
    assert max(num_rows[2:]) > 4, "answers come to differ"
    assert max(num_rows) <= 3 + 6, "greedy answers do not"
    for (prompt, sampling), result in zip(asked, results, strict=True):
        expected = plain_logprobs(model, prompt, result.token_ids, sampling.temperature or 1.0)
        np.testing.assert_allclose(result.logprobs, expected, atol=1e-4)
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


async def test_a_request_tells_when_its_first_token_was_there(engine: Engine) -> None:
    prompts = [random_prompt(np.random.default_rng(seed)) for seed in range(MAX_SLOTS + 1)]
    asked = time.time()
    results = await asyncio.gather(
        *(engine.generate(p, Sampling(20), request_id=str(i)) for i, p in enumerate(prompts))
    )
    times = sorted(result.first_token for result in results)
    assert asked < times[0]
    assert times[-1] < time.time()
    assert times[-1] - times[0] > 0  # the last waited for a row


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


# -- What an engine refuses, how requests end early, and what happens when it fails ----------------


async def test_cancel_returns_what_there_is(engine: Engine) -> None:
    prompt = np.arange(10, 20, dtype=np.int32)
    running = [
        asyncio.ensure_future(engine.generate(prompt, Sampling(140), request_id=str(i)))
        for i in range(MAX_SLOTS + 1)
    ]
    await until(lambda: engine.stats().generated_tokens >= 10 * MAX_SLOTS)
    engine.cancel("2")
    engine.cancel("unknown")
    cancelled = await running[2]
    assert cancelled.finish_reason == "cancelled"
    assert 0 < len(cancelled.token_ids) < 140
    results = await asyncio.gather(*running)
    assert [len(r.token_ids) for i, r in enumerate(results) if i != 2] == [140] * MAX_SLOTS


async def test_a_waiting_request_can_be_cancelled(engine: Engine) -> None:
    prompt = np.arange(10, 20, dtype=np.int32)
    running = [
        asyncio.ensure_future(engine.generate(prompt, Sampling(60), request_id=str(i)))
        for i in range(MAX_SLOTS)
    ]
    late = asyncio.ensure_future(engine.generate(prompt, Sampling(60), request_id="late"))
    await until(lambda: engine.stats().running == MAX_SLOTS)
    engine.cancel("late")
    assert (await late).finish_reason == "cancelled"
    await asyncio.gather(*running)


async def test_a_caller_that_is_cancelled_frees_its_row(engine: Engine) -> None:
    prompt = np.arange(10, 20, dtype=np.int32)
    asking = asyncio.ensure_future(engine.generate(prompt, Sampling(150), request_id="1"))
    await until(lambda: engine.stats().generated_tokens > 0)
    asking.cancel()
    await until(lambda: not engine.stats().running)
    assert engine.stats().generated_tokens < 150


async def test_prompts_that_cannot_run_are_refused(engine: Engine) -> None:
    async def refused(prompt: list[int], sampling: Sampling) -> str:
        with pytest.raises(ConfigError) as caught:
            await engine.generate(prompt, sampling, request_id="1")
        return caught.value.message

    assert "100 tokens and up to 61 new ones exceed the engine's 160" in await refused(
        [9] * 100, Sampling(61)
    )
    assert "no tokens" in await refused([], Sampling(1))
    assert "token 264 of a prompt is outside the model's vocabulary of 264" in await refused(
        [1, 264], Sampling(1)
    )
    assert "token -1 " in await refused([1, -1], Sampling(1))
    assert "temperature=-1" in await refused([1], Sampling(1, temperature=-1))
    assert "max_new_tokens=0" in await refused([1], Sampling(0))


async def test_a_model_that_reads_text_alone_says_so(engine: Engine) -> None:
    with pytest.raises(ModelError, match="reads text only"):
        await engine.generate([9, 10], Sampling(4), request_id="a", images=[png(16, 16)])


async def test_a_full_queue_and_a_repeated_id_are_refused(start: StartEngine, folder: Path) -> None:
    engine = await start(folder, max_waiting=3)
    running = [
        asyncio.ensure_future(engine.generate([9, 10], Sampling(40), request_id=str(i)))
        for i in range(MAX_SLOTS + 3)
    ]
    await asyncio.sleep(0)
    with pytest.raises(EngineError, match="queue is full: 11 requests"):
        await engine.generate([9], Sampling(1), request_id="more")
    await asyncio.gather(*running[1:])
    await running[0]
    again = asyncio.ensure_future(engine.generate([9], Sampling(40), request_id="1"))
    await asyncio.sleep(0)
    with pytest.raises(EngineError, match="request 1 is running already"):
        await engine.generate([9], Sampling(1), request_id="1")
    await again


async def test_a_failure_in_the_engine_fails_every_request(folder: Path) -> None:
    engine = await TransformersEngine.start(str(folder), max_slots=4, max_context=64)
    running = [
        asyncio.ensure_future(engine.generate([9, 10], Sampling(60), request_id=str(i)))
        for i in range(6)
    ]
    await until(lambda: engine.stats().generated_tokens > 0)

    def break_it() -> None:
        raise RuntimeError("out of memory")

    engine._command(break_it)
    results = await asyncio.gather(*running, return_exceptions=True)
    failed = [result for result in results if isinstance(result, EngineError)]
    assert failed
    assert "RuntimeError: out of memory" in failed[0].message
    assert "RuntimeError: out of memory" in str(engine.failure)
    with pytest.raises(EngineError, match="out of memory"):
        await engine.generate([9], Sampling(1), request_id="later")
    with pytest.raises(EngineError, match="out of memory"):
        await engine.load_weights(1, {})
    await engine.close()


async def test_close_fails_what_still_runs(engine: Engine) -> None:
    running = asyncio.ensure_future(engine.generate([9, 10], Sampling(150), request_id="1"))
    await until(lambda: engine.stats().generated_tokens > 0)
    await engine.close()
    with pytest.raises(EngineError, match="was closed"):
        await running


@pytest.mark.full
async def test_memory_does_not_grow_with_the_number_of_requests(folder: Path) -> None:
    engine = await TransformersEngine.start(str(folder), max_slots=8, max_context=160)

    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    rng = np.random.default_rng(6)

    async def many(rounds: int) -> None:
        for index in range(rounds):
            await asyncio.gather(
                *(
                    engine.generate(
                        rng.integers(8, 264, 20).astype(np.int32),
                        Sampling(2),
                        request_id=str(number),
                        conversation=f"{index}.{number}",
                    )
                    for number in range(50)
                )
            )
            for number in range(50):
                engine.release(f"{index}.{number}")
        await until(lambda: not engine.stats().cached_prefixes)

    await many(10)
    before, cache = resident_bytes(), engine.stats().cache_bytes
    await many(40)
    assert engine.stats().cache_bytes == cache
    assert resident_bytes() - before < 8 << 20
    await engine.close()


# -- New weights while requests run: versions, caches, dtypes, and weights that do not fit ---------


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
        name: TensorBytes("bfloat16", value.shape, value.flatten().view(torch.uint8).numpy().data)
        for name, value in weights.items()
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
    short = TensorBytes("float32", [64], memoryview(b"1234"))
    with pytest.raises(EngineError, match="bytes instead of"):
        await engine.load_weights(1, good | {"model.norm.weight": short})
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
    await until(lambda: engine.stats().generated_tokens > 0)
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
