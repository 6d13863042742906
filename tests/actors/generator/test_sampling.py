"""Sampling: the distributions it draws from, and the log-probs it records."""

import numpy as np
import pytest
import torch
from tinkermq.actors.engine.sampling import RowParameters, sample, uniforms

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
