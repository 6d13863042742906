"""Corrections against tables worked out by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tinkermq.actors.training.off_policy import (
    CORRECTIONS,
    CorrectionInputs,
    correct,
    masked,
    mismatch_statistics,
    normalised,
    off_policy_statistics,
)
from tinkermq.schemas.config.algorithm import AlgorithmConfig, CorrectionMask
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


# w of each token, and the sequence of each: products 1.2, 0.25 and 4; geometric means 1.095, 0.5, 2
WEIGHTS, SEQ = [0.6, 2.0, 0.5, 0.5, 8.0, 0.5], [0, 0, 1, 1, 2, 2]
ADVANTAGES = torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0, -1.0], dtype=torch.float64)


DEEPSEEK = {"over": "sequence_mean", "of": "k1", "high": 0.1, "only": "negative"}


@pytest.mark.parametrize(
    ("mask", "kept"),
    [
        ({"high": 3}, [1, 1, 1, 1, 0, 1]),
        ({"low": 0.55, "high": 3}, [1, 1, 0, 0, 0, 0]),
        ({"over": "sequence_sum", "high": 3}, [1, 1, 1, 1, 0, 0]),
        ({"over": "sequence_mean", "low": 0.9, "high": 1.1}, [1, 1, 0, 0, 0, 0]),
        ({"over": "sequence_max", "low": 0.55}, [1, 1, 0, 0, 0, 0]),
        ({"over": "sequence_max", "high": 3}, [1, 1, 1, 1, 0, 0]),
        ({"of": "k1", "low": -1.0}, [1, 1, 1, 1, 0, 1]),
        ({"of": "k2", "high": 0.3}, [1, 1, 1, 1, 0, 1]),
        ({"of": "k3", "high": 0.15}, [1, 0, 0, 0, 0, 0]),
        ({"over": "sequence_mean", "of": "k2", "high": 0.2}, [1, 1, 0, 0, 0, 0]),
        (
            {"over": "sequence_mean", "of": "k1", "high": 0.1, "only": "negative"},
            [1, 1, 0, 0, 1, 1],
        ),
        ({"over": "sequence_mean", "of": "k1", "high": -0.5}, [0, 0, 0, 0, 1, 1]),
        ({"low": 1.5, "only": "negative"}, [1, 1, 0, 0, 1, 0]),
    ],
)
def test_a_mask_drops_what_is_out_of_its_bounds(mask, kept):
    case = inputs(WEIGHTS, SEQ)
    left = masked(correct("none", case), [CorrectionMask.model_validate(mask)], case, ADVANTAGES)
    assert left.weight_N.tolist() == kept


def test_masks_go_with_any_weight_and_with_each_other():
    case = inputs(WEIGHTS, SEQ)
    masks = [CorrectionMask(over="sequence_mean", low=0.9), CorrectionMask(low=0.55)]
    left = masked(correct("tis", case), masks, case, ADVANTAGES)
    assert left.weight_N.tolist() == pytest.approx([0.6, 2.0, 0.0, 0.0, 2.0, 0.0])


def test_the_named_corrections_are_weights_with_masks():
    """Each old name is one of the weights with one of the masks: the same bits."""
    case = inputs(WEIGHTS, SEQ)
    for name, weight, mask in (
        ("mis", "none", {"over": "sequence_sum", "high": 3.0}),
        ("geometric", "none", {"over": "sequence_mean", "low": 0.99, "high": 1.01}),
        ("veto", "none", {"over": "sequence_max", "low": 1e-4}),
        ("icepop", "decoupled", {"low": 0.5, "high": 5.0}),
    ):
        composed = masked(
            correct(weight, case), [CorrectionMask.model_validate(mask)], case, ADVANTAGES
        )
        assert torch.equal(composed.weight_N, correct(name, case).weight_N), name


def test_normalised_weights_have_a_mean_of_one():
    case = inputs(WEIGHTS, SEQ)
    by_token = normalised(correct("tis", case), case, level="token").weight_N
    torch.testing.assert_close(by_token.mean().item(), 1.0)
    by_sequence = normalised(correct("tis", case, level="sequence"), case, level="sequence")
    torch.testing.assert_close(by_sequence.weight_N[::2].mean().item(), 1.0)


def test_a_cap_bounds_the_weights_of_the_decoupled_loss():
    check("decoupled", inputs([0.5, 9.0]), [0.5, 9.0])
    check("decoupled", inputs([0.5, 9.0]), [0.5, 4.0], cap=4.0)


def test_off_policy_statistics_are_those_of_their_formulas():
    case = inputs(WEIGHTS, SEQ)
    old, behaviour = case.old_logprobs_N, case.behaviour_logprobs_N
    told = off_policy_statistics(old, behaviour, case.seq_N, 4)  # one has no tokens
    assert told["off_policy/training_ppl"] == pytest.approx(math.exp(2))
    means = [math.log(1.2) / 2, math.log(0.25) / 2, math.log(4) / 2]
    assert told["off_policy/log_ppl_diff"] == pytest.approx(-sum(means) / 3)
    assert told["off_policy/ppl_ratio"] == pytest.approx(sum(math.exp(-m) for m in means) / 3)
    assert told["off_policy/kl"] == pytest.approx(-sum(map(math.log, WEIGHTS)) / 6)
    assert told["off_policy/chi2_token"] == pytest.approx(sum(w * w for w in WEIGHTS) / 6 - 1)
    assert told["off_policy/chi2_seq"] == pytest.approx((1.2**2 + 0.25**2 + 4**2) / 3 - 1)


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        ({"correction_masks": [{}]}, "without a bound it drops nothing"),
        ({"correction_masks": [{"low": 2, "high": 1}]}, "low=2 is not under high=1"),
        ({"correction_masks": [{"of": "k3", "low": 0.1}]}, "k3 is never negative"),
        ({"correction_masks": [{"high": -1}]}, "a ratio is never negative"),
        ({"correction_masks": [{"high": 2}] * 17}, "correction_masks"),
        ({"correction_masks": [{"low": 0}]}, "a ratio is never negative"),
        ({"loss": "cispo", "clip_low": 6}, "clip_low=6 is not under clip_high=5"),
        ({"loss": "sapo", "loss_options": {"tau_pos": 0}}, "tau_pos=0 of loss=sapo: from 1e-06"),
        ({"loss": "kl_cov", "loss_options": {"share": -1}}, "share=-1 of loss=kl_cov"),
        ({"loss": "clip_cov", "loss_options": {"cov_low": 5}}, "cov_low is not under cov_high"),
        ({"advantage": "gigpo", "advantage_std": "batch"}, "is not known of gigpo"),
        ({"advantage": "gdpo"}, "advantage=gdpo needs reward_components"),
        (
            {"advantage": "gdpo", "reward_components": {"a": 1}, "sample": "turn"},
            "has rewards by episode",
        ),
        ({"loss": "sapo", "loss_options": {"tau": 1}}, "loss=sapo has no option 'tau': it has tau"),
        ({"correction": "icepop", "correction_floor": 6}, "icepop would keep nothing"),
        ({"correction": "geometric", "correction_cap": 0.5}, "geometric would keep nothing"),
        ({"correction": "none", "correction_floor": 0.5}, "correction_floor"),
        ({"loss": "dppo", "correction": "tis"}, "cannot be used with loss=dppo"),
        ({"loss": "dppo", "correction_masks": [{"high": 2}]}, "cannot be used with loss=dppo"),
    ],
)
def test_what_contradicts_itself_is_refused_with_the_reason(algorithm, said):
    with pytest.raises(ValueError, match=said):
        AlgorithmConfig.model_validate(algorithm)
