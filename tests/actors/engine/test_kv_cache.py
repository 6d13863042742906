"""The slots of a KV cache stay within a bound of tokens, and what rows have stored stays."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from tinkermq.actors.engine.engine import Generation, Sampling
from tinkermq.actors.engine.transformers.decoder import FedTokens, load_decoder
from tinkermq.actors.engine.transformers.kv_cache import (
    CachedPrefix,
    CacheShape,
    PromptCache,
    SlotCache,
    SlotStates,
    cache_cells,
)
from tinkermq.actors.engine.transformers.transformers_engine import TransformersEngine
from tinkermq.actors.policy.model_folder import load_causal_lm

from tests.support.models import make_tiny_model, save_tiny_model

torch.set_num_threads(1)

SHAPE = CacheShape((((2, 4), (2, 4)),) * 2, torch.float32, torch.device("cpu"))


ONE = CacheShape((((1, 1),),), torch.float32, torch.device("cpu"))
"""A token takes four bytes."""


def _cells(cache: SlotCache) -> int:
    return cache.num_bytes // SHAPE.token_bytes


def test_slots_that_no_row_uses_give_way_to_longer_ones() -> None:
    cache = SlotCache(SHAPE, max_slots=256, max_tokens=8192, max_cells=16384)
    cache.note_rows(128, 128)
    cache.reserve(128, 100)
    assert _cells(cache) <= 16384
    cache.note_rows(2, 8192)
    cache.reserve(2, 8000)
    assert 2 * 8000 <= _cells(cache) <= 16384


def test_what_rows_have_stored_stays_when_their_cache_grows() -> None:
    cache = SlotCache(SHAPE, max_slots=64, max_tokens=1024, max_cells=4096)
    cache.note_rows(4, 1024)
    cache.reserve(4, 60)
    states = torch.randn(4, 4, 2, 50, 4)
    for slot in range(4):
        cache.put(slot, SlotStates(tuple(states[slot])))
    cache.reserve(4, 1000)
    for slot in range(4):
        assert torch.equal(torch.stack(cache.read(slot, 50).parts), states[slot])
    assert _cells(cache) <= 4096


def test_a_single_row_is_admitted_whatever_it_takes() -> None:
    cache = SlotCache(SHAPE, max_slots=64, max_tokens=1024, max_cells=100)
    assert cache.admits(1, 1024)
    assert not cache.admits(2, 51)
    assert SlotCache(SHAPE, 64, 1024).admits(64, 1024)
    cache.note_rows(1, 1024)
    cache.reserve(1, 1024)
    assert _cells(cache) == 1024


def test_the_bound_is_what_is_left_beside_the_next_weights() -> None:
    assert cache_cells(10 << 30, 2 << 30, 1 << 20) == int(0.85 * 8 * 1024)
    assert cache_cells(1 << 30, 2 << 30, 1 << 20) == 1


def _computed(*tokens: int, serial: int = 0) -> CachedPrefix:
    states = SlotStates((torch.arange(len(tokens), dtype=torch.float32).view(1, -1, 1),))
    return CachedPrefix(np.array(tokens, np.int32), states, None, serial)


def _found(cache: PromptCache, *tokens: int, serial: int = 0) -> int:
    found = cache.find(np.array(tokens, np.int32), serial)
    if found is None:
        return 0
    assert found.tokens.tolist() == list(tokens[: len(found.tokens)])
    [part] = found.states.parts
    assert part.flatten().tolist() == list(range(len(found.tokens)))
    return len(found.tokens)


def test_a_prompt_begins_with_the_most_that_another_has_in_common_with_it() -> None:
    cache = PromptCache(ONE, 400)
    cache.keep(_computed(*range(20), 50, 51))
    cache.keep(_computed(*range(20), 60, 61))
    assert _found(cache, *range(20), 60, 62) == 21
    assert _found(cache, *range(20), 60, 61) == 21  # one token is left to compute
    assert _found(cache, *range(18)) == 17
    assert _found(cache, *range(15), 70, 71) == 0
    assert _found(cache, *range(20), serial=1) == 0
    assert not cache.admits(np.arange(16, dtype=np.int32))
    assert not cache.admits(np.arange(101, dtype=np.int32))
    cache.clear()
    assert (_found(cache, *range(20)), cache.num_bytes) == (0, 0)


def test_prompts_of_no_use_for_the_longest_time_give_way() -> None:
    cache = PromptCache(ONE, 400)
    for first in (100, 200, 300, 400):
        cache.keep(_computed(*range(first, first + 25)))
    assert _found(cache, *range(100, 125)) == 24
    cache.keep(_computed(*range(500, 525)))
    assert [_found(cache, *range(first, first + 25)) for first in (100, 200, 300)] == [24, 0, 24]
    many = PromptCache(ONE, 40_000)
    for number in range(17):
        many.keep(_computed(*range(100 * number, 100 * number + 20)))
    assert (_found(many, *range(20)), _found(many, *range(100, 120))) == (0, 19)


async def _generated(folder: Path, max_cells: int | None) -> tuple[list[Generation], int]:
    decoder = load_decoder(
        str(folder), dtype=torch.float32, device="cpu", max_slots=16, max_tokens=256
    )
    decoder.cache.max_cells = max_cells
    engine = TransformersEngine(decoder)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(8, 264, int(length)) for length in rng.integers(5, 120, 24)]
    most: list[int] = []
    try:
        answers = await asyncio.gather(
            *(
                engine.generate(
                    prompt.astype(np.int32),
                    Sampling(max_new_tokens=int(20 + 4 * at), temperature=1.0, seed=at),
                    request_id=str(at),
                    on_token=lambda _: most.append(decoder.cache.num_bytes),
                )
                for at, prompt in enumerate(prompts)
            )
        )
    finally:
        await engine.close()
    return answers, max(most) // decoder.cache.shape.token_bytes


@pytest.mark.timeout(120)
async def test_requests_wait_for_memory_and_get_the_same_answers(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    free, _ = await _generated(folder, None)
    bounded, cells = await _generated(folder, 1024)
    assert cells <= 1024
    for one, other in zip(free, bounded, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)


def test_on_a_cpu_a_pass_over_prompts_is_short_and_has_little_padding(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path)
    decoder = load_decoder(
        str(path), dtype=torch.float32, device="cpu", max_slots=64, max_tokens=64
    )
    lengths = np.random.default_rng(0).permutation(np.arange(64) % 32 + 16)
    spans = [
        FedTokens(slot, 0, np.full(length, 9, np.int32)) for slot, length in enumerate(lengths)
    ]
    with torch.inference_mode():
        passes = [batch for batch, _ in decoder.prefill(spans)]
    assert sorted(index for batch in passes for index in batch) == list(range(64))
    fed = [len(batch) * max(lengths[index] for index in batch) for batch in passes]
    assert max(fed) <= 512
    assert sum(fed) <= 1.15 * sum(lengths)


def test_large_layers_compute_on_a_cpu_with_onednn_what_a_plain_pass_does(tmp_path: Path) -> None:
    path = save_tiny_model(
        tmp_path, kind="qwen3", width=1024, layers=1, heads=4, kv_heads=2, seed=1
    )
    decoder = load_decoder(str(path), dtype=torch.float32, device="cpu", max_slots=4, max_tokens=64)
    layer = decoder.model.get_submodule("model.layers.0.mlp.down_proj")
    assert "forward" in vars(layer), "the layer is large enough"
    tokens = np.arange(8, 40, dtype=np.int32)
    plain = load_causal_lm(str(path), dtype=torch.float32)
    with torch.inference_mode():
        expected = plain(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0, -1]
        ((_, logits_BV),) = decoder.prefill([FedTokens(0, 0, tokens)])
    torch.testing.assert_close(logits_BV[0], expected, atol=1e-4, rtol=1e-4)
