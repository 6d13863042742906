"""Losses, their gradients and statistics against tables worked out by hand."""

import math

import pytest
import torch
from tinkermq.actors.training.losses import LOSSES, LossInputs, compute_loss
from tinkermq.schemas.wire.errors import ConfigError


def inputs(ratios, advantages, seq=None, behaviour_ratios=None, logprob=-1.0):
    """Make tokens of the given π/π_o (and π/π_b) at log π = `logprob`."""
    logprobs_N = torch.full((len(ratios),), logprob, dtype=torch.float64, requires_grad=True)
    log_ratios_N = torch.tensor(ratios, dtype=torch.float64).log()
    behaviour_N = torch.tensor(behaviour_ratios or ratios, dtype=torch.float64).log()
    seq_N = torch.tensor(seq or [0] * len(ratios))
    return LossInputs(
        logprobs_N=logprobs_N,
        advantages_N=torch.tensor(advantages, dtype=torch.float64),
        old_logprobs_N=logprob - log_ratios_N,
        behaviour_logprobs_N=logprob - behaviour_N,
        seq_N=seq_N,
        num_seqs=int(seq_N.max()) + 1,
    )


def check(name, given_inputs, loss, gradient, **options):
    """Compare token losses and their gradients in log π; return the statistics."""
    loss_N, statistics = compute_loss(name, given_inputs, **options)
    expected = torch.tensor(loss, dtype=torch.float64)
    torch.testing.assert_close(loss_N, expected, atol=1e-9, rtol=1e-9)
    [gradient_N] = torch.autograd.grad(loss_N.sum(), given_inputs.logprobs_N)
    expected = torch.tensor(gradient, dtype=torch.float64)
    torch.testing.assert_close(gradient_N, expected, atol=1e-9, rtol=1e-9)
    assert not any(value.requires_grad for value in statistics.values())
    return {key: pytest.approx(float(value)) for key, value in statistics.items()}


def test_ppo_clips_what_would_go_too_far():
    case = inputs([1.0, 1.5, 0.5, 1.5, 0.5], [2.0, 2.0, 2.0, -1.0, -1.0])
    statistics = check(
        "ppo",
        case,
        loss=[-2.0, -2.4, -1.0, 1.5, 0.8],
        gradient=[-2.0, 0.0, -1.0, 1.5, 0.0],
    )
    assert statistics["pg_clipfrac"] == 2
    assert statistics["pg_clipfrac_lower"] == 0
    assert statistics["ppo_kl"] == -2 * math.log(1.5) - 2 * math.log(0.5)


def test_ppo_clips_higher_above_where_asked():
    case = inputs([1.25, 1.4, 0.6], [1.0, 1.0, -1.0])
    check("ppo", case, [-1.25, -1.28, 0.9], [-1.25, 0.0, 0.0], clip_low=0.1, clip_high=0.28)


def test_the_dual_clip_bounds_the_loss_of_negative_advantages():
    case = inputs([2.0, 5.0, 5.0], [-1.0, -1.0, 1.0])
    statistics = check("ppo", case, [2.0, 3.0, -1.2], [2.0, 0.0, 0.0])
    assert statistics["pg_clipfrac_lower"] == 1


def test_gspo_uses_the_ratio_of_the_sequence():
    # first sequence: s = sqrt(1.2 · 1/1.1); second: 1.5, beyond the clip
    case = inputs([1.2, 1 / 1.1, 1.5], [1.0, 1.0, 1.0], seq=[0, 0, 1])
    ratio = math.sqrt(1.2 / 1.1)
    statistics = check(
        "gspo",
        case,
        [-ratio, -ratio, -1.2],
        [-ratio, -ratio, 0.0],
        clip_low=0.2,
        clip_high=0.2,
    )
    assert statistics["pg_clipfrac"] == 1


def test_gspo_clips_narrowly_by_default():
    case = inputs([1.001, 0.999], [1.0, -1.0], seq=[0, 1])
    check("gspo", case, [-1.0004, 0.9997], [0.0, 0.0])


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    case = inputs([0.5, 8.0, 2.0], [1.0, 1.0, -1.0], logprob=-2.0)
    statistics = check("cispo", case, [1.0, 10.0, -4.0], [-0.5, -5.0, 2.0])
    assert statistics["pg_clipfrac"] == 1


def test_dppo_masks_by_the_difference_of_probabilities():
    # π = 0.5; π_b = 0.25, 0.4, 0.8, 0.8: differences 0.25, 0.1, −0.3, −0.3
    ratios = [2.0, 1.25, 0.625, 0.625]
    case = inputs(ratios, [1.0, 1.0, -1.0, 1.0], logprob=math.log(0.5))
    squares = [1e-3 * math.log(ratio) ** 2 for ratio in ratios]
    slopes = [2e-3 * math.log(ratio) for ratio in ratios]
    statistics = check(
        "dppo",
        case,
        [squares[0], squares[1] - 1.25, squares[2], squares[3] - 0.625],
        [slopes[0], slopes[1] - 1.25, slopes[2], slopes[3] - 0.625],
    )
    assert statistics["pg_clipfrac"] == 2


def test_dppo_reads_the_behaviour_log_probs_only():
    case = inputs([9.0], [1.0], behaviour_ratios=[1.0])
    check("dppo", case, [-1.0], [-1.0])


def test_reinforce_is_minus_advantage_times_log_prob():
    check("reinforce", inputs([3.0, 1.0], [2.0, -1.0], logprob=-1.5), [3.0, -1.5], [-2.0, 1.0])


def test_sft_is_the_cross_entropy():
    assert check("sft", inputs([1.0, 1.0], [0.0, 0.0], logprob=-1.5), [1.5, 1.5], [-1, -1]) == {}


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_extreme_ratios_stay_finite(name):
    case = LossInputs(
        logprobs_N=torch.tensor([-1e-6, -300.0, -1.0], requires_grad=True),
        advantages_N=torch.tensor([-1.0, 1.0, 1.0]),
        old_logprobs_N=torch.tensor([-300.0, -1e-6, -1.0]),
        behaviour_logprobs_N=torch.tensor([-300.0, -1e-6, -1.0]),
        seq_N=torch.tensor([0, 1, 1]),
        num_seqs=2,
    )
    loss_N, statistics = compute_loss(name, case)
    [gradient_N] = torch.autograd.grad(loss_N.sum(), case.logprobs_N)
    assert torch.isfinite(loss_N).all()
    assert torch.isfinite(gradient_N).all()
    assert all(torch.isfinite(value) for value in statistics.values())


@pytest.mark.parametrize("name", sorted(set(LOSSES) - {"sft", "gmpo"}))
def test_the_gradient_on_policy_is_that_of_reinforce(name):
    case = inputs([1.0, 1.0, 1.0], [0.5, -2.0, 1.0], seq=[0, 0, 1])
    loss_N, _ = compute_loss(name, case)
    [gradient_N] = torch.autograd.grad(loss_N.sum(), case.logprobs_N)
    torch.testing.assert_close(gradient_N, -case.advantages_N)


@pytest.mark.parametrize("name", sorted(set(LOSSES) - {"clip_cov", "kl_cov"}))
def test_the_statistics_of_parts_add_up(name):
    case = inputs([1.0, 3.0, 0.2, 7.0], [1.0, 1.0, -1.0, -1.0], seq=[0, 0, 1, 1])
    whole = compute_loss(name, case)[1]
    parts = [
        compute_loss(name, inputs(ratios, advantages))[1]
        for ratios, advantages in (([1.0, 3.0], [1.0, 1.0]), ([0.2, 7.0], [-1.0, -1.0]))
    ]
    for key, value in whole.items():
        assert float(value) == pytest.approx(sum(float(part[key]) for part in parts))


def test_an_unknown_loss_names_the_closest():
    with pytest.raises(ConfigError, match="loss=gspoo") as caught:
        compute_loss("gspoo", inputs([1.0], [1.0]))
    assert caught.value.hint == "did you mean gspo?"


def test_gmpo_takes_the_geometric_mean_of_what_is_clipped_for_the_worse():
    case = inputs([math.e, 1.0, math.e**-1, 1.0], [2.0, 2.0, -1.0, -1.0], seq=[0, 0, 1, 1])
    up, down = math.exp(0.2), math.exp(-0.2)
    statistics = check("gmpo", case, [-2 * up] * 2 + [down] * 2, [0.0, -2 * up, 0.0, down])
    assert statistics["pg_clipfrac"] == 2
    case = inputs([math.e**-1, 1.0], [2.0, 2.0])  # for the worse: it is not clipped
    low = math.exp(-0.5)
    check("gmpo", case, [-2 * low] * 2, [-2 * low] * 2)
    indifferent = compute_loss("gmpo", inputs([2.0, 0.5], [0.0, 0.0]))[1]
    assert indifferent["pg_clipfrac"] == 0


def test_sapo_gates_softly_by_the_sign_of_the_advantage():
    case = inputs([1.0, 1.5, 0.5], [1.0, 1.0, -1.0])

    def gate(ratio, tau):
        return 4 / tau / (1 + math.exp(-tau * (ratio - 1)))

    def slope(ratio, tau):
        sigmoid = 1 / (1 + math.exp(-tau * (ratio - 1)))
        return 4 * sigmoid * (1 - sigmoid) * ratio

    check(
        "sapo",
        case,
        [-gate(1.0, 1.0), -gate(1.5, 1.0), gate(0.5, 1.05)],
        [-slope(1.0, 1.0), -slope(1.5, 1.0), slope(0.5, 1.05)],
    )


def test_topr_tapers_what_went_badly_by_its_sequence():
    case = inputs(
        [1.0] * 6,
        [1.0, 1.0, -1.0, -1.0, -1.0, -1.0],
        seq=[0, 0, 1, 1, 2, 2],
        behaviour_ratios=[0.5, 0.5, 0.5, 0.5, 3.0, 1.0],
    )
    statistics = check(
        "topr", case, [1.0, 1.0, -0.25, -0.25, -1.0, -1.0], [-1.0, -1.0, 0.25, 0.25, 1.0, 1.0]
    )
    assert statistics["pg_clipfrac"] == 2


def test_vespo_weighs_a_sequence_by_a_gamma_of_its_weight():
    case = inputs([1.0] * 4, [1.0, 1.0, -1.0, -1.0], [0, 0, 1, 1], [2.0, 1.0, 0.5, 0.5])
    up, down = 4 * math.exp(3 * (1 - 2)), 0.25**3 * math.exp(2 * (1 - 0.25))
    check("vespo", case, [up, up, -down, -down], [-up, -up, down, down])
    even = inputs([1.0], [1.0])
    check("vespo", even, [1.0], [-1.0])  # on-policy it is reinforce


def test_dppo_kl_masks_what_has_moved_too_far_from_its_sampler():
    # from 0.5 to 0.9, to 0.1, and to 0.55: binary KLs 0.51, 0.51 and 0.005
    behaviour = torch.tensor([0.5] * 5, dtype=torch.float64)
    current = torch.tensor([0.9, 0.9, 0.1, 0.1, 0.55], dtype=torch.float64)
    logprobs_N = current.log().requires_grad_()
    advantages_N = torch.tensor([1.0, -1.0, -1.0, 1.0, 1.0], dtype=torch.float64)
    seq_N = torch.zeros(5, dtype=torch.int64)
    case = LossInputs(logprobs_N, advantages_N, behaviour.log(), behaviour.log(), seq_N, 1)
    loss_N, statistics = compute_loss("dppo_kl", case)
    [gradient_N] = torch.autograd.grad(loss_N.sum(), logprobs_N)
    ratios = (current / behaviour).tolist()
    assert gradient_N.tolist() == pytest.approx([0.0, ratios[1], 0.0, -ratios[3], -ratios[4]])
    assert float(statistics["pg_clipfrac"]) == 2


def test_kl_cov_holds_the_token_that_costs_most_entropy():
    logprobs_N = torch.tensor([-3.0, -1.0, -0.1, -2.0], dtype=torch.float64, requires_grad=True)
    old_N = torch.tensor([-3.0, -1.0, -0.5, -2.0], dtype=torch.float64)
    advantages_N = torch.tensor([0.0, 0.0, 2.0, 0.0], dtype=torch.float64)
    case = LossInputs(logprobs_N, advantages_N, old_N, old_N, torch.zeros(4, dtype=torch.int64), 1)
    loss_N, _ = compute_loss("kl_cov", case, coef=0.5)
    expected = [0.0, 0.0, -2 * math.exp(0.4) + 0.5 * 0.4, 0.0]
    assert loss_N.tolist() == pytest.approx(expected)


def test_clip_cov_leaves_out_a_token_whose_covariance_is_between_the_bounds():
    logprobs_N = torch.tensor([-3.0, -1.0, -0.1, -2.0], dtype=torch.float64, requires_grad=True)
    advantages_N = torch.tensor([0.0, 0.0, 2.0, 0.0], dtype=torch.float64)
    old_N = logprobs_N.detach()
    case = LossInputs(logprobs_N, advantages_N, old_N, old_N, torch.zeros(4, dtype=torch.int64), 1)
    assert compute_loss("clip_cov", case)[0].tolist() == [0.0] * 4  # 1.5 · 1.425
    assert compute_loss("clip_cov", case, cov_low=3.0)[0].tolist() == [0.0, 0.0, -2.0, 0.0]


def test_cispo_has_a_lower_clip_where_asked():
    case = inputs([0.5, 2.0], [1.0, 1.0])
    check("cispo", case, [0.8, 1.2], [-0.8, -1.2], clip_low=0.8, clip_high=1.2)
