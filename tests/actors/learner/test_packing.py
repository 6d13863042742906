"""Packing changes where tokens lie, never what the model says about them."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tinkermq.actors.training.micro_batch import MicroBatch, TokenSequence
from tinkermq.actors.training.packing import (
    block_causal_mask,
    choose_row_tokens,
    first_fit_decreasing,
    group_rows,
    pack,
)
from tinkermq.schemas.wire.errors import ConfigError
from transformers import Qwen3Config, Qwen3ForCausalLM

VOCAB = 32


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        initializer_range=0.5,  # strong enough that a wrong mask shows
    )
    config._attn_implementation = "sdpa"
    return Qwen3ForCausalLM(config).eval()


def sequence(prompt, rest, mask):
    return TokenSequence(
        np.array([*prompt, *rest], dtype=np.int32),
        np.array([0] * len(prompt) + mask, dtype=np.uint8),
    )


def groups_of_episodes(seed=0, num_groups=3, group_size=4):
    """Groups with a common prompt; some episodes have an observation in their middle."""
    rng = np.random.default_rng(seed)
    episodes = []
    for _ in range(num_groups):
        prompt = rng.integers(1, VOCAB, rng.integers(3, 9))
        for member in range(group_size):
            first, observed, last = rng.integers(1, 6, 3)
            mask = [1] * first + ([0] * observed + [1] * last if member % 2 else [])
            episodes.append(sequence(prompt, rng.integers(1, VOCAB, len(mask)), mask))
    return episodes


def packed_logprobs(model, packs: list[MicroBatch]):
    """Log-probs of all generated tokens of the batch, in the batch's order."""
    values, places = [], []
    for packed in packs:
        logits_BTV = model(
            input_ids=packed.input_ids_BT,
            attention_mask=block_causal_mask(packed.seen_until_BT),
            position_ids=packed.position_ids_BT,
        ).logits
        logprobs_NV = logits_BTV[packed.row_N, packed.source_col_N].log_softmax(-1)
        values.append(logprobs_NV.gather(1, packed.target_N[:, None])[:, 0])
        places.append(packed.index_N)
    order = torch.cat(places).argsort()
    return torch.cat(values)[order]


def lone_logprobs(model, episodes):
    """The same, each sequence alone in an ordinary causal forward pass."""
    values = []
    for episode in episodes:
        ids = torch.as_tensor(episode.token_ids.astype(np.int64))
        logprobs_TV = model(input_ids=ids[None]).logits[0].log_softmax(-1)
        generated = torch.as_tensor(np.flatnonzero(episode.mask))
        values.append(logprobs_TV[generated - 1, ids[generated]])
    return torch.cat(values)


def padded_logprobs(model, episodes):
    """The same, all sequences padded on the right in one batch."""
    longest = max(len(episode.token_ids) for episode in episodes)
    ids = torch.zeros(len(episodes), longest, dtype=torch.int64)
    attention = torch.zeros_like(ids)
    for row, episode in enumerate(episodes):
        ids[row, : len(episode.token_ids)] = torch.as_tensor(episode.token_ids.astype(np.int64))
        attention[row, : len(episode.token_ids)] = 1
    logprobs_BTV = model(input_ids=ids, attention_mask=attention).logits.log_softmax(-1)
    values = []
    for row, episode in enumerate(episodes):
        generated = torch.as_tensor(np.flatnonzero(episode.mask))
        values.append(logprobs_BTV[row, generated - 1, ids[row, generated]])
    return torch.cat(values)


def gradients(model, logprobs_N):
    model.zero_grad()
    weights_N = torch.linspace(-1, 1, len(logprobs_N))
    (logprobs_N * weights_N).mean().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("share_prompts", [False, True])
@pytest.mark.parametrize(("max_row_tokens", "microbatch_tokens"), [(400, 400), (48, 48), (40, 120)])
def test_packed_rows_give_the_log_probs_of_each_sequence_alone(
    model, share_prompts, max_row_tokens, microbatch_tokens
):
    episodes = groups_of_episodes()
    packs = pack(
        episodes,
        max_row_tokens=max_row_tokens,
        microbatch_tokens=microbatch_tokens,
        share_prompts=share_prompts,
    )
    with torch.no_grad():
        expected = lone_logprobs(model, episodes)
        torch.testing.assert_close(padded_logprobs(model, episodes), expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(packed_logprobs(model, packs), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("share_prompts", [False, True])
def test_packed_rows_give_the_gradients_of_a_padded_batch(model, share_prompts):
    episodes = groups_of_episodes(seed=1)
    packs = pack(episodes, max_row_tokens=48, microbatch_tokens=96, share_prompts=share_prompts)
    expected = gradients(model, padded_logprobs(model, episodes))
    for name, gradient in gradients(model, packed_logprobs(model, packs)).items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-5, rtol=1e-5, msg=name)


@pytest.mark.parametrize("share_prompts", [False, True])
def test_changing_one_sequence_leaves_the_others_of_its_row_alone(model, share_prompts):
    episodes = groups_of_episodes(seed=2)
    changed = 1
    other = episodes.copy()
    ids = other[changed].token_ids.copy()
    ids[other[changed].mask == 1] = (ids[other[changed].mask == 1] + 7) % VOCAB
    other[changed] = TokenSequence(ids, other[changed].mask)
    packing = {"max_row_tokens": 400, "microbatch_tokens": 400, "share_prompts": share_prompts}
    packs = pack(episodes, **packing)
    assert [packed.input_ids_BT.shape[0] for packed in packs] == [1]
    with torch.no_grad():
        before = packed_logprobs(model, packs)
        after = packed_logprobs(model, pack(other, **packing))
    counts = [int(episode.mask.sum()) for episode in episodes]
    seq_N = np.repeat(np.arange(len(episodes)), counts)
    same = torch.as_tensor(seq_N != changed)
    assert torch.equal(before[same], after[same])
    assert not torch.allclose(before[~same], after[~same], atol=1e-2)


def test_a_prompt_of_a_group_is_stored_once_and_the_last_token_never():
    episodes = [sequence([5, 6, 7], [8, 9], [1, 1]), sequence([5, 6, 7], [10], [1])]
    [packed] = pack(episodes, max_row_tokens=16, microbatch_tokens=16, share_prompts=True)
    assert packed.input_ids_BT.tolist() == [[5, 6, 7, 8]]
    assert packed.position_ids_BT.tolist() == [[0, 1, 2, 3]]
    assert packed.segment_ids_BT.tolist() == [[1, 1, 1, 2]]
    assert packed.seen_until_BT.tolist() == [[4, 4, 4, 4]]
    assert packed.target_N.tolist() == [8, 9, 10]
    assert packed.row_N.tolist() == [0, 0, 0]
    assert packed.source_col_N.tolist() == [2, 3, 2]
    assert packed.seq_N.tolist() == [0, 0, 1]
    assert packed.num_tokens == 4


def test_rows_of_separate_sequences_restart_their_positions():
    episodes = [sequence([5, 6], [8, 9], [1, 1]), sequence([7], [10, 11], [1, 1])]
    [packed] = pack(episodes, max_row_tokens=8, microbatch_tokens=8)
    assert packed.input_ids_BT.tolist() == [[5, 6, 8, 7, 10]]
    assert packed.position_ids_BT.tolist() == [[0, 1, 2, 0, 1]]
    assert packed.segment_ids_BT.tolist() == [[1, 1, 1, 2, 2]]
    assert packed.seen_until_BT.tolist() == [[3, 3, 3, 5, 5]]
    assert packed.source_col_N.tolist() == [1, 2, 3, 4]
    assert packed.target_N.tolist() == [8, 9, 10, 11]


def test_an_observation_takes_columns_but_predicts_nothing():
    episode = sequence([1], [2, 3, 4, 5], [1, 0, 0, 1])
    [packed] = pack([episode], max_row_tokens=8, microbatch_tokens=8)
    assert packed.input_ids_BT.tolist() == [[1, 2, 3, 4]]
    assert packed.source_col_N.tolist() == [0, 3]
    assert packed.target_N.tolist() == [2, 5]


def test_a_sequence_without_generated_tokens_is_in_no_micro_batch():
    episodes = [sequence([1, 2], [3], [0]), sequence([1, 2], [3], [1])]
    [packed] = pack(episodes, max_row_tokens=8, microbatch_tokens=8)
    assert packed.seq_S.tolist() == [1]
    assert packed.index_N.tolist() == [0]


def test_a_sequence_that_begins_with_a_generated_token_is_refused():
    with pytest.raises(ValueError, match="nothing predicts it"):
        pack([sequence([], [1, 2], [1, 1])], max_row_tokens=8, microbatch_tokens=8)


@pytest.mark.parametrize("share_prompts", [False, True])
def test_a_sequence_longer_than_a_row_names_the_key_to_change(share_prompts):
    episodes = [sequence([1] * 4, [2] * 20, [1] * 20), sequence([1] * 4, [2], [1])]
    with pytest.raises(ConfigError) as caught:
        pack(episodes, max_row_tokens=16, microbatch_tokens=16, share_prompts=share_prompts)
    assert "of 23 tokens" in caught.value.message
    assert "row of 16" in caught.value.message
    assert "learner.max_row_tokens" in caught.value.hint


def test_a_row_longer_than_a_micro_batch_names_the_key_to_change():
    with pytest.raises(ConfigError) as caught:
        group_rows([12, 30], 20)
    assert "30" in caught.value.message
    assert "learner.microbatch_tokens" in caught.value.hint


def test_first_fit_decreasing_places_each_length_into_the_first_bin_with_room():
    assert first_fit_decreasing([4, 8, 1, 4, 2, 1], 10) == [[1, 4], [0, 3, 2, 5]]
    assert first_fit_decreasing([], 10) == []


def test_a_group_too_long_for_one_row_repeats_its_prompt():
    episodes = [sequence([1, 2, 3], [4 + seq] * 6, [1] * 6) for seq in range(4)]
    packs = pack(episodes, max_row_tokens=13, microbatch_tokens=13, share_prompts=True)
    assert [packed.input_ids_BT.tolist()[0][:3] for packed in packs] == [[1, 2, 3], [1, 2, 3]]
    assert sorted(seq for packed in packs for seq in packed.seq_S.tolist()) == [0, 1, 2, 3]


def test_responses_that_differ_in_their_last_token_only_take_the_same_columns():
    ends = ([5, 6, 7], [5, 6, 8], [9, 6, 7], [5, 6, 7])
    episodes = [sequence([1, 2], end, [1, 1, 1]) for end in ends]
    [packed] = pack(episodes, max_row_tokens=32, microbatch_tokens=32, share_prompts=True)
    assert packed.input_ids_BT.tolist() == [[1, 2, 5, 6, 9, 6]]
    assert packed.source_col_N.tolist() == [1, 2, 3, 1, 2, 3, 1, 4, 5, 1, 2, 3]
    assert packed.target_N.tolist() == [token for end in ends for token in end]
    assert packed.seq_N.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    [one] = pack(episodes[:2], max_row_tokens=32, microbatch_tokens=32, share_prompts=True)
    assert one.input_ids_BT.tolist() == [[1, 2, 5, 6]]
    assert one.seen_until_BT.tolist() == [[4, 4, 4, 4]]
    assert one.source_col_N.tolist() == [1, 2, 3, 1, 2, 3]


def test_heavy_tailed_lengths_fill_nearly_all_columns():
    lengths = np.random.default_rng(0).lognormal(5, 1, 500).astype(int).clip(1, 2048)
    bins = first_fit_decreasing(lengths, 2048)
    assert lengths.sum() / (len(bins) * 2048) > 0.97


def test_rows_of_one_sequence_are_padded_by_a_tenth_at_most():
    rng = np.random.default_rng(0)
    lengths = rng.integers(10, 200, 50).tolist()
    sequences = [TokenSequence(np.arange(length), np.arange(length) >= 4) for length in lengths]
    micros = pack(
        sequences,
        max_row_tokens=256,
        microbatch_tokens=1024,
        share_prompts=True,
        one_per_row=True,
    )
    distinct = {item.token_ids[:-1].tobytes() for item in sequences}
    assert sum(len(micro.input_ids_BT) for micro in micros) == len(distinct)
    for micro in micros:
        assert int(micro.segment_ids_BT.max()) == 1
        used_B = (micro.segment_ids_BT > 0).sum(1)
        assert int(used_B.min()) >= 0.9 * micro.input_ids_BT.shape[1]
        assert micro.input_ids_BT.numel() <= 1024


def test_rows_are_short_where_attention_would_cost_more_than_padding():
    assert choose_row_tokens([58] * 16, 4096, hidden_size=128) == 58
    assert choose_row_tokens([60, 40, 40, 40, 40, 40, 40], 4096, hidden_size=4096) == 120
    assert choose_row_tokens([100], 64, hidden_size=128) == 64


def test_the_mask_sees_the_own_segment_backwards_and_the_prompt_in_full():
    # A prompt of two columns, two responses of one each, and padding.
    expected = torch.tensor(
        [
            [1, 0, 0, 0, 0],
            [1, 1, 0, 0, 0],
            [1, 1, 1, 0, 0],
            [1, 1, 0, 1, 0],
            [0, 0, 0, 0, 1],
        ]
    ).bool()
    assert torch.equal(block_causal_mask(torch.tensor([[4, 4, 3, 4, 5]]))[0, 0], expected)


lengths_and_budget = st.integers(1, 60).flatmap(
    lambda budget: st.tuples(st.lists(st.integers(0, budget), max_size=40), st.just(budget))
)


@given(lengths_and_budget)
def test_every_length_is_in_exactly_one_bin_within_the_budget(case):
    lengths, budget = case
    bins = first_fit_decreasing(lengths, budget)
    assert sorted(item for bin_ in bins for item in bin_) == list(range(len(lengths)))
    assert all(sum(lengths[item] for item in bin_) <= budget for bin_ in bins)
    full = sum(1 for bin_ in bins if sum(lengths[item] for item in bin_) * 2 <= budget)
    assert full <= 1  # two half-empty bins would have been one


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(50, 200))
def test_micro_batches_hold_each_row_once_and_stay_within_their_tokens(row_lengths, budget):
    groups = group_rows(row_lengths, budget)
    assert sorted(row for group in groups for row in group) == list(range(len(row_lengths)))
    for group in groups:
        assert len(group) * max(row_lengths[row] for row in group) <= budget


@settings(max_examples=50)
@given(
    st.integers(0, 10_000),
    st.integers(1, 3),
    st.integers(1, 4),
    st.booleans(),
    st.integers(24, 100),
)
def test_every_generated_token_is_placed_once_with_its_own_context(
    seed, num_groups, group_size, share_prompts, max_row_tokens
):
    episodes = groups_of_episodes(seed, num_groups, group_size)
    packs = pack(
        episodes,
        max_row_tokens=max_row_tokens,
        microbatch_tokens=2 * max_row_tokens,
        share_prompts=share_prompts,
    )
    counts = [int(episode.mask.sum()) for episode in episodes]
    starts = np.cumsum([0, *counts])
    places = torch.cat([packed.index_N for packed in packs])
    assert sorted(places.tolist()) == list(range(starts[-1]))
    for packed in packs:
        assert math.prod(packed.input_ids_BT.shape) <= 2 * max_row_tokens
        mask_BTT = block_causal_mask(packed.seen_until_BT)[:, 0]
        assert all(a <= b for a, b in pairwise(packed.seq_N.tolist()))
        for n in range(len(packed.target_N)):
            episode = episodes[packed.seq_S[packed.seq_N[n]]]
            seen = mask_BTT[packed.row_N[n], packed.source_col_N[n]]
            order = packed.position_ids_BT[packed.row_N[n]][seen].argsort()
            context = packed.input_ids_BT[packed.row_N[n]][seen][order].tolist()
            place = np.flatnonzero(episode.mask)[
                packed.index_N[n] - starts[packed.seq_S[packed.seq_N[n]]]
            ]
            assert context == episode.token_ids[:place].tolist()
            assert packed.target_N[n] == episode.token_ids[place]
