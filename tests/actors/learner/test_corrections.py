"""Corrections against tables worked out by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tinkermq.actors.learner.algorithms.corrections import (
    CORRECTIONS,
    CorrectionInputs,
    correct,
    mismatch_statistics,
)
from tinkermq.schemas.wire.errors import ConfigError


def inputs(weights, seq=None, **extra):
    """Make tokens with the given w = π_o/π_b at log π_o = −2."""
    old_N = torch.full((len(weights),), -2.0, dtype=torch.float64)
    seq_N = torch.tensor(seq or [0] * len(weights))
    return CorrectionInputs(
        old_logprobs_N=old_N,
        behaviour_logprobs_N=old_N - torch.tensor(weights, dtype=torch.float64).log(),
        seq_N=seq_N,
        num_seqs=int(seq_N.max()) + 1,
        **extra,
    )


def check(name, given_inputs, expected, **options):
    correction = correct(name, given_inputs, **options)
    torch.testing.assert_close(correction.weight_N, torch.tensor(expected, dtype=torch.float64))
    assert torch.equal(correction.old_logprobs_N, given_inputs.old_logprobs_N)


def test_none_leaves_every_token_as_it_is():
    check("none", inputs([0.1, 7.0]), [1.0, 1.0])


def test_tis_truncates_the_weight_of_each_token():
    check("tis", inputs([0.5, 1.5, 3.0]), [0.5, 1.5, 2.0])
    check("tis", inputs([0.5, 1.5, 3.0]), [0.5, 1.0, 1.0], cap=1.0)


def test_tis_of_sequences_truncates_the_product():
    case = inputs([0.5, 3.0, 3.0, 3.0, 0.1], seq=[0, 0, 1, 1, 2])
    check("tis", case, [1.5, 1.5, 2.0, 2.0, 0.1], level="sequence")


def test_tis_refuses_an_unknown_level():
    with pytest.raises(ConfigError, match="correction_level=word"):
        correct("tis", inputs([1.0]), level="word")


def test_icepop_drops_tokens_outside_its_band():
    check("icepop", inputs([0.4, 0.6, 4.9, 5.1]), [0.0, 0.6, 4.9, 0.0])


def test_geometric_keeps_sequences_whose_mean_ratio_is_near_one():
    case = inputs([1.1, 1 / 1.1, 1.02, 1.02, 0.98], seq=[0, 0, 1, 1, 2])
    check("geometric", case, [1.0, 1.0, 0.0, 0.0, 0.0])


def test_mis_drops_sequences_whose_product_is_large():
    case = inputs([2.0, 1.4, 2.0, 1.6, 0.01], seq=[0, 0, 1, 1, 2])
    check("mis", case, [1.0, 1.0, 0.0, 0.0, 1.0])


def test_veto_drops_a_sequence_for_one_impossible_token():
    case = inputs([1.0, 9e-5, 1.0, 2e-4], seq=[0, 0, 1, 1])
    check("veto", case, [0.0, 0.0, 1.0, 1.0])


def test_decoupled_weighs_by_the_policy_before_the_update():
    check("decoupled", inputs([0.5, 3.0]), [0.5, 3.0])


def test_the_loglinear_proximal_policy_lies_between_behaviour_and_current():
    case = inputs(
        [1.0, 1.0, 1.0],
        logprobs_N=torch.tensor([-1.0, -1.0, -1.0], dtype=torch.float64),
        lag_N=torch.tensor([0, 1, 3]),
    )
    correction = correct("decoupled", case, proximal="loglinear")
    torch.testing.assert_close(
        correction.old_logprobs_N, torch.tensor([-2.0, -1.5, -1.25], dtype=torch.float64)
    )
    torch.testing.assert_close(
        correction.weight_N, torch.tensor([1.0, math.e**0.5, math.e**0.75], dtype=torch.float64)
    )


def test_the_loglinear_proximal_policy_needs_lags():
    with pytest.raises(ConfigError, match="no current log-probs or lags"):
        correct("decoupled", inputs([1.0]), proximal="loglinear")


def test_m2po_drops_the_furthest_tokens_until_the_rest_is_within_the_budget():
    # squares of log w: 0.01, 0.04, 0.09, 1; means of the smallest: 0.01, 0.025, 0.0467, 0.285
    weights = [math.exp(value) for value in (0.3, -0.1, 1.0, -0.2)]
    check("m2po", inputs(weights), [0.0, 1.0, 0.0, 1.0])
    check("m2po", inputs(weights), [1.0, 1.0, 0.0, 1.0], budget=0.05)


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=30))
def test_m2po_keeps_as_much_as_the_budget_allows(log_weights):
    correction = correct("m2po", inputs([math.exp(value) for value in log_weights]))
    kept = correction.weight_N.bool()
    squares = torch.tensor(log_weights, dtype=torch.float64) ** 2
    assert not kept.any() or squares[kept].mean() < 0.04 + 1e-9
    if not kept.all():
        assert torch.cat([squares[kept], squares[~kept].min()[None]]).mean() >= 0.04 - 1e-9


@pytest.mark.parametrize("name", sorted(CORRECTIONS))
def test_equal_policies_are_not_corrected(name):
    check(name, inputs([1.0, 1.0, 1.0], seq=[0, 1, 1]), [1.0, 1.0, 1.0])


@pytest.mark.parametrize("name", sorted(CORRECTIONS))
def test_extreme_ratios_stay_finite_and_without_gradient(name):
    case = CorrectionInputs(
        old_logprobs_N=torch.tensor([-1e-6, -500.0, -1e-6], requires_grad=True),
        behaviour_logprobs_N=torch.tensor([-500.0, -1e-6, -500.0]),
        seq_N=torch.tensor([0, 1, 0]),
        num_seqs=2,
    )
    correction = correct(name, case)
    assert torch.isfinite(correction.weight_N).all()
    assert not correction.weight_N.requires_grad


def test_an_unknown_correction_names_the_closest():
    with pytest.raises(ConfigError, match="correction=icepopp") as caught:
        correct("icepopp", inputs([1.0]))
    assert caught.value.hint == "did you mean icepop?"


def test_the_mismatch_is_reported_by_lag():
    log_weights = torch.tensor([0.0, math.log(2), math.log(4), -math.log(2)])
    old = torch.full((4,), -1.0)
    statistics = mismatch_statistics(old, old - log_weights, torch.tensor([0, 3, 4, 9]))
    log2 = math.log(2)
    expected = {
        "staleness/num_tokens/lag_0": 1,
        "staleness/abs_log_ratio/lag_0": 0,
        "staleness/max_ratio/lag_0": 1,
        "staleness/k3/lag_0": 0,
        "staleness/effective_sample_size/lag_0": 1,
        "staleness/num_tokens/lag_3_4": 2,
        "staleness/abs_log_ratio/lag_3_4": 1.5 * log2,
        "staleness/max_ratio/lag_3_4": 4,
        "staleness/k3/lag_3_4": ((2 - 1 - log2) + (4 - 1 - 2 * log2)) / 2,
        "staleness/effective_sample_size/lag_3_4": 36 / (2 * 20),
        "staleness/num_tokens/lag_5_up": 1,
        "staleness/abs_log_ratio/lag_5_up": log2,
        "staleness/max_ratio/lag_5_up": 0.5,
        "staleness/k3/lag_5_up": 0.5 - 1 + log2,
        "staleness/effective_sample_size/lag_5_up": 1,
    }
    assert statistics == {key: pytest.approx(value, abs=1e-6) for key, value in expected.items()}
