"""Distributions that are sampled, bounds of requests at once, and models that can be run."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tinkermq.actors.engine.engine import Concurrency, EngineStats, GroupLimit, Meter, RequestLimit
from tinkermq.actors.engine.sampling import RowParameters, sample, uniforms
from tinkermq.actors.engine.transformers.decoder import FedTokens, SlotDecoder, load_decoder
from tinkermq.actors.policy.tiny_models import save_tiny_model
from tinkermq.schemas.plan.model_shape import find_max_positions
from tinkermq.schemas.wire.errors import ModelError
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.models.gemma2 import Gemma2Config, Gemma2ForCausalLM

from tests.support.families import make_model
from tests.support.models import make_tiny_model
from tests.support.waiting import PATIENCE_S

torch.set_num_threads(1)
NUM_DRAWS = 20_000


def rows(
    num: int, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, seed: int = 7
) -> RowParameters:
    return RowParameters(
        np.full(num, temperature, np.float32),
        np.full(num, top_p, np.float32),
        np.full(num, top_k, np.int64),
        np.full(num, seed, np.uint64),
        np.arange(num, dtype=np.uint64),
    )


def frequencies(logits: torch.Tensor, parameters: RowParameters) -> np.ndarray:
    tokens, _ = sample(logits.expand(NUM_DRAWS, -1), parameters)
    return np.bincount(tokens, minlength=logits.shape[0]) / NUM_DRAWS


def test_uniforms_are_uniform_for_neighbouring_seeds_and_counters() -> None:
    seeds, counters = np.divmod(np.arange(1 << 16, dtype=np.uint64), np.uint64(256))
    values = uniforms(seeds, counters)
    assert values.min() >= 0
    assert values.max() < 1
    histogram = np.histogram(values, 64, (0, 1))[0]
    assert ((histogram - 1024) ** 2 / 1024).sum() < 120  # chi-square, 63 degrees of freedom
    neighbours = values.reshape(256, 256)
    assert abs(np.corrcoef(neighbours[:, :-1].ravel(), neighbours[:, 1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(neighbours[:-1].ravel(), neighbours[1:].ravel())[0, 1]) < 0.02


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_follow_the_softmax_at_their_temperature(temperature: float) -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, float("-inf")])
    expected = (logits / temperature).softmax(-1).numpy()
    seen = frequencies(logits, rows(NUM_DRAWS, temperature))
    np.testing.assert_allclose(seen, expected, atol=0.015)
    assert seen[4] == 0


def test_top_k_keeps_the_likeliest_tokens() -> None:
    logits = torch.tensor([0.0, 2.0, 1.0, 1.5])
    expected = torch.tensor([0.0, 2.0, 0.0, 1.5]).exp() * torch.tensor([0, 1, 0, 1])
    seen = frequencies(logits, rows(NUM_DRAWS, top_k=2))
    np.testing.assert_allclose(seen, (expected / expected.sum()).numpy(), atol=0.015)


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
    seen = frequencies(logits, rows(NUM_DRAWS, top_p=0.65))
    np.testing.assert_allclose(seen, [0, 4 / 7, 0, 3 / 7], atol=0.015)


@pytest.mark.parametrize(("top_p", "top_k"), [(0.05, 0), (1.0, 3), (0.07, 2)])
def test_filters_that_keep_almost_nothing_are_still_exact(top_p: float, top_k: int) -> None:
    logits = torch.linspace(0, 0.1, 50).repeat(2)  # 1/100 or so each: redrawing never ends
    logits[[7, 50, 99]] += torch.tensor([1.2, 1.1, 0.9])
    order = logits.argsort(descending=True)
    probs = logits.softmax(-1)[order]
    keep = (probs.cumsum(-1) - probs < top_p) & (torch.arange(100) < (top_k or 100))
    expected = torch.zeros(100)
    expected[order] = probs * keep / (probs * keep).sum()
    seen = frequencies(logits, rows(NUM_DRAWS, top_p=top_p, top_k=top_k))
    np.testing.assert_allclose(seen, expected.numpy(), atol=0.015)
    assert seen[expected.numpy() == 0].sum() == 0


def test_each_row_of_a_batch_has_its_own_parameters() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]]).expand(6, -1)
    mixed = RowParameters(
        np.array([0, 1, 1, 0.5, 1, 0], np.float32),
        np.array([1, 1, 0.01, 1, 1, 0.5], np.float32),
        np.array([0, 0, 0, 0, 1, 3]),
        np.arange(6, dtype=np.uint64),
        np.zeros(6, np.uint64),
    )
    tokens, logprobs = sample(logits, mixed)
    assert tokens[[0, 2, 4, 5]].tolist() == [1, 1, 1, 1]
    for row, temperature in enumerate([1, 1, 1, 0.5, 1, 1]):
        expected = (logits[row] / temperature).log_softmax(-1)[tokens[row]]
        assert logprobs[row] == pytest.approx(float(expected), abs=1e-5)


def test_a_row_draws_the_same_token_in_any_batch() -> None:
    logits = torch.randn(32, 50, generator=torch.Generator().manual_seed(0))
    together, _ = sample(logits, rows(32))
    for row in range(32):
        one = RowParameters(*(getattr(rows(32), name)[row : row + 1] for name in rows(1).__slots__))
        assert sample(logits[row : row + 1], one)[0][0] == together[row]


def test_logits_that_are_not_finite_give_a_log_prob_of_nan() -> None:
    logits = torch.zeros(2, 4)
    logits[1, 2] = torch.nan
    tokens, logprobs = sample(logits, rows(2))
    assert np.isfinite(logprobs[0])
    assert np.isnan(logprobs[1])
    assert (tokens < 4).all()


# -- How many requests an engine with a paged cache works on at once -------------------------------


def test_the_bound_rises_while_requests_wait_and_the_cache_has_room() -> None:
    bound = Concurrency(fits=8, most=64)
    assert bound.limit == 8
    for _ in range(100):
        bound.step(bound.limit, is_demanded=True, cache_share=0.3, preempted=0)
    assert bound.limit == 64


@pytest.mark.parametrize(
    ("running", "wanted", "cache_share"), [(8, False, 0.3), (8, True, 0.85), (7, True, 0.3)]
)
def test_the_bound_stays_without_need_or_room_or_use(
    running: int, wanted: bool, cache_share: float
) -> None:
    bound = Concurrency(fits=8, most=64)
    bound.step(running, is_demanded=wanted, cache_share=cache_share, preempted=0)
    assert bound.limit == 8


def test_a_preemption_cuts_the_bound_but_never_below_what_fits_in_any_case() -> None:
    bound = Concurrency(fits=8, most=64)
    for _ in range(100):
        bound.step(bound.limit, is_demanded=True, cache_share=0.5, preempted=0)
    bound.step(60, is_demanded=True, cache_share=0.99, preempted=4)
    assert bound.limit == 42
    for _ in range(20):
        bound.step(bound.limit, is_demanded=True, cache_share=0.99, preempted=1)
    assert bound.limit == 8


def test_requests_that_new_weights_threw_out_of_an_empty_cache_cut_nothing() -> None:
    bound = Concurrency(fits=8, most=64)
    bound.step(8, is_demanded=True, cache_share=0.1, preempted=8)
    assert bound.limit == 8


def test_what_fits_is_bounded_by_what_is_allowed() -> None:
    assert Concurrency(fits=1000, most=64).limit == 64
    assert Concurrency(fits=0, most=64).limit == 1


# -- How many groups a generator plays at once -----------------------------------------------------


def cache_of(
    evicted: int = 0, *, tokens: int = 0, share: float = 0.5, waiting: int = 0
) -> EngineStats:
    meter = Meter()
    meter.evicted, meter.cache_tokens, meter.cache_share = evicted, tokens, share
    return meter.stats(version=0, running=1, waiting=waiting, cached_prefixes=0, cache_bytes=0)


@pytest.mark.parametrize(
    ("tokens", "most", "begins"), [(0, 30, 30), (1000, 30, 10), (1000, 4, 4), (50, 30, 1)]
)
def test_a_generator_begins_with_the_groups_that_always_fit(
    tokens: int, most: int, begins: int
) -> None:
    assert GroupLimit(100, most, cache_of(tokens=tokens)).limit == begins


@pytest.mark.parametrize(
    ("held", "ended", "stats", "limit"),
    [
        (10, True, cache_of(5), 11),
        (10, False, cache_of(5), 10),  # nothing is known of a group before its end
        (9, True, cache_of(5), 10),  # more would not be used
        (10, True, cache_of(5, share=0.9), 10),
        (10, True, cache_of(5, waiting=1), 10),  # more would only wait
        (10, True, cache_of(6), 7),
        (4, False, cache_of(6), 3),
        (12, True, cache_of(6), 10),  # an earlier cut is not complete
    ],
)
def test_groups_become_more_while_the_cache_has_room_and_fewer_after_a_loss(
    held: int, ended: bool, stats: EngineStats, limit: int
) -> None:
    groups = GroupLimit(100, 30, cache_of(5, tokens=1000))
    groups.adapt(held, stats, ended=ended)
    assert groups.limit == limit


@given(
    most=st.integers(1, 40),
    seen=st.lists(st.tuples(st.integers(0, 45), st.integers(0, 1), st.booleans()), max_size=200),
)
def test_the_number_of_groups_stays_within_its_bounds(
    most: int, seen: list[tuple[int, int, bool]]
) -> None:
    groups, evicted = GroupLimit(100, most, cache_of(tokens=500)), 0
    for held, lost, ended in seen:
        evicted += lost
        groups.adapt(held, cache_of(evicted), ended=ended)
        assert 1 <= groups.limit <= most


@pytest.mark.parametrize(("fits", "begins"), [(12, 1), (12, 40), (3, 40), (30, 1), (60, 1)])
def test_the_number_of_groups_settles_at_what_fits(fits: int, begins: int) -> None:
    groups = GroupLimit(100, 40, cache_of(tokens=100 * begins))
    held = evicted = 0
    limits: list[int] = []
    for _ in range(2000):  # one group ends, and as many begin as may
        held = max(held, groups.limit)
        evicted += held > fits
        groups.adapt(held, cache_of(evicted), ended=True)
        held -= 1
        limits.append(groups.limit)
    best = min(fits, 40)
    assert max(limits[500:]) <= best + 1
    assert min(limits[500:]) >= int(0.75 * best)


async def test_the_gate_lets_in_as_many_as_the_bound_in_their_order() -> None:
    bound = Concurrency(fits=2, most=8)
    gate = RequestLimit(bound)
    places = [gate.request_place() for _ in range(5)]
    assert [place.done() for place in places] == [True, True, False, False, False]
    assert (gate.inside, gate.waiting) == (2, 3)
    gate.leave(places[3])  # whoever gives up waiting frees no place
    gate.leave(places[0])
    assert [place.done() for place in places[2:]] == [True, True, False]
    assert places[3].cancelled()
    assert (gate.inside, gate.waiting) == (2, 1)
    bound.limit = 3
    gate.admit()
    await asyncio.wait_for(places[4], PATIENCE_S)
    assert (gate.inside, gate.waiting) == (3, 0)


# -- Which models the slot decoder runs, and what it says of the others ----------------------------


SMALL: dict[str, Any] = {
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
}


def load(path: Path, max_tokens: int = 64, dtype: torch.dtype = torch.float32) -> SlotDecoder:
    return load_decoder(str(path), dtype=dtype, device="cpu", max_slots=4, max_tokens=max_tokens)


def refused(path: Path, max_tokens: int = 64, dtype: torch.dtype = torch.float32) -> str:
    with pytest.raises(ModelError) as caught:
        load(path, max_tokens, dtype)
    return str(caught.value)


def test_a_model_that_keeps_more_than_keys_values_and_states_is_refused(tmp_path: Path) -> None:
    make_model("deepseek_v32").save_pretrained(tmp_path)
    message = refused(tmp_path)
    assert "keep more than keys, values and recurrent states (DynamicIndexedLayer)" in message
    assert "generator.engine=vllm" in message


class _Biased(Qwen3ForCausalLM):
    """A model whose tokens depend on how long the pass is, as position biases do."""

    def forward(self, *args: Any, **arguments: Any) -> Any:
        """Add the length of the pass to one logit."""
        output: Any = super().forward(*args, **arguments)
        output.logits[..., 0] += arguments["input_ids"].shape[1]
        return output


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_needs_more_than_masks_is_refused(dtype: torch.dtype) -> None:
    model: Any = _Biased(Qwen3Config(**SMALL)).eval()
    model.to(dtype)
    with pytest.raises(ModelError, match="computes other logits over the slot cache"):
        SlotDecoder("biased", model, max_slots=4, max_tokens=64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_are_capped_over_the_slots_as_in_the_models_own_pass(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    config = Gemma2Config(**SMALL, layer_types=["full_attention"] * 2, attn_logit_softcapping=1e-3)
    torch.manual_seed(0)
    model: Any = Gemma2ForCausalLM(config)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.q_proj.weight)
        torch.nn.init.normal_(layer.self_attn.k_proj.weight)
        torch.nn.init.normal_(layer.self_attn.v_proj.weight)
    model.save_pretrained(tmp_path)
    assert load(tmp_path, dtype=dtype).cache.shape.dtype == dtype


def test_a_sound_model_that_16_bits_round_far_is_not_refused(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, kind="qwen2", width=64, layers=12, heads=4, kv_heads=2, seed=1)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    with torch.no_grad():
        for layer in model.model.layers:  # attention to one token or another, by the last bit
            layer.self_attn.q_proj.weight.mul_(64)
            layer.self_attn.k_proj.weight.mul_(64)
    model.bfloat16().save_pretrained(tmp_path)
    ids = torch.arange(40)[None]
    with torch.no_grad():
        exact, rounded = model.float()(ids).logits, model.bfloat16()(ids).logits
    assert (exact - rounded).abs().max() >= 0.1 * exact.abs().max()
    decoder = load(tmp_path, dtype=torch.bfloat16)
    assert decoder.cache.shape.dtype == torch.bfloat16
    assert {parameter.dtype for parameter in decoder.model.parameters()} == {torch.bfloat16}
    decoded = next(decoder.prefill([FedTokens(0, 0, np.array([1, 2, 3], np.int32))]))[1]
    assert decoded.dtype == torch.bfloat16


def test_a_folder_that_holds_no_model_names_the_missing_file(tmp_path: Path) -> None:
    assert "there is no model folder" in refused(tmp_path / "nowhere")
    assert "config.json is missing" in refused(tmp_path)
    make_tiny_model(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.bak")
    assert "model.safetensors is missing" in refused(tmp_path)
    assert "is a file" in refused(tmp_path / "config.json")


def test_a_damaged_configuration_is_refused(tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert "cannot be read" in refused(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_model"}))
    assert "no_such_model" in refused(tmp_path)


def test_incomplete_weights_are_refused_and_never_random(tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    message = refused(tmp_path)
    assert "lack 1 tensors: model.layers.1.mlp.up_proj.weight" in message


def test_sequences_beyond_the_models_positions_are_refused(tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    message = refused(tmp_path, max_tokens=5000)
    assert "up to 5000 tokens" in message
    assert "positions for 4096" in message


def test_scaled_positions_reach_as_far_as_submission_says(tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["max_position_embeddings"] = 64
    config["rope_parameters"] = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert find_max_positions(str(tmp_path)) == 256
    load(tmp_path, 256)
    assert "positions for 256" in refused(tmp_path, max_tokens=257)
