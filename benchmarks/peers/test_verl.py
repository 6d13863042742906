"""The same tensors through verl 0.9.1 give the same numbers.

Opt-in, as docs/training.md says: `pytest -m bench`, with verl beside this package. Each case is a
batch of random episodes with observations in their middle; verl takes it as padded rows with a
mask.
"""

# verl: not installed for development.
# pyright: reportMissingImports=false

import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tinkermq.actors.training.advantages import (
    AdvantageInputs,
    compute_advantages,
    generalized_advantage,
    value_loss,
)
from tinkermq.actors.training.losses import (
    Denominators,
    LossInputs,
    aggregate,
    compute_loss,
    kl_per_token,
)
from tinkermq.actors.training.off_policy import correct, mismatch_statistics
from torch import Tensor

from benchmarks.peers.verl_batch import LENGTH, NUM_SEQS, Batch, assert_same, batch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # verl and ray warn while they are imported
    pytest.importorskip(
        "verl.trainer.ppo.core_algos",
        reason="compares with verl 0.9.1: pip install --no-deps verl==0.9.1 and what "
        "docs/training.md names",
        exc_type=ImportError,
    )
    from verl.trainer.ppo import core_algos
    from verl.trainer.ppo.rollout_corr_helper import (
        compute_offpolicy_metrics,
        compute_rollout_correction_weights,
        compute_rollout_rejection_mask,
    )
    from verl.workers.config import ActorConfig

__all__ = ["batch"]

pytestmark = [pytest.mark.bench, pytest.mark.filterwarnings("ignore")]

AGGREGATIONS = [
    "token-mean",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
]


@pytest.mark.parametrize(
    ("name", "theirs", "options"),
    [
        ("grpo", "grpo", {}),
        ("dr_grpo", "grpo", {"norm_adv_by_std_in_grpo": False}),
        ("gpg", "gpg", {}),
        ("rloo", "rloo", {}),
        ("opo", "opo", {}),
        ("reinforce_pp_baseline", "reinforce_plus_plus_baseline", {}),
        ("reinforce_pp", "reinforce_plus_plus", {"config": SimpleNamespace(gamma=0.9)}),
        ("remax", "remax", {"reward_baselines": torch.linspace(0, 2, NUM_SEQS)}),
    ],
)
@pytest.mark.parametrize("groups_of_one", [False, True])
def test_advantages_agree(batch, name, theirs, options, groups_of_one):
    group_S = torch.arange(NUM_SEQS) if groups_of_one else batch.group_S
    ours = compute_advantages(
        name,
        AdvantageInputs(
            rewards_S=batch.rewards_S,
            group_S=group_S,
            seq_N=batch.seq_N,
            token_rewards_N=batch.flat(batch.token_rewards),
            baseline_S=options.get("reward_baselines"),
            gamma=0.9,
        ),
    )
    arguments = {"token_level_rewards": batch.token_rewards.clone(), "response_mask": batch.mask}
    if theirs not in ("remax", "reinforce_plus_plus"):
        arguments["index"] = np.array(group_S.tolist(), dtype=object)
    expected, _ = core_algos.get_adv_estimator_fn(theirs)(**arguments, **options)
    assert_same(ours, batch.flat(expected))


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8), (0.95, 0.0)])
def test_the_generalised_advantage_and_its_returns_agree(batch, gamma, lam):
    # observations in the middle of the rows are skipped by both
    values, rewards = batch.advantages, batch.token_rewards
    expected, returns = core_algos.compute_gae_advantage_return(
        rewards.double(), values.double(), batch.mask.double(), gamma, lam
    )
    values_N, rewards_N = batch.flat(values), batch.flat(rewards)
    ours = compute_advantages(
        "gae",
        AdvantageInputs(
            rewards_S=batch.rewards_S,
            group_S=batch.group_S,
            seq_N=batch.seq_N,
            token_rewards_N=rewards_N,
            values_N=values_N,
            gamma=gamma,
        ),
        gae_lambda=lam,
    )
    assert_same(ours, batch.flat(expected).float())
    plain_N = generalized_advantage(rewards_N, values_N, batch.seq_N, NUM_SEQS, gamma, lam)
    assert_same(plain_N + values_N, batch.flat(returns))


@pytest.mark.parametrize("loss_agg", AGGREGATIONS)
def test_the_value_loss_and_its_gradient_agree(batch, loss_agg):
    before, returns = batch.advantages, batch.advantages + batch.old
    theirs = (before + batch.current).clone().requires_grad_()
    expected, clipfrac = core_algos.compute_value_loss(
        theirs, returns, before, batch.mask, cliprange_value=0.5, loss_agg_mode=loss_agg
    )
    current = theirs.detach().clone().requires_grad_()
    loss_N, clipped_N = value_loss(
        batch.flat(current), batch.flat(before), batch.flat(returns), 0.5
    )
    denominators = Denominators.of(batch.seq_N, constant_length=LENGTH)
    ours = aggregate(loss_agg, loss_N, batch.seq_N, NUM_SEQS, denominators)
    assert_same(ours, expected)
    assert float(clipped_N.float().mean()) == pytest.approx(float(clipfrac), abs=1e-6)
    assert_same(torch.autograd.grad(ours, current)[0], torch.autograd.grad(expected, theirs)[0])


@pytest.mark.parametrize("loss_agg", AGGREGATIONS)
@pytest.mark.parametrize(
    ("name", "theirs", "ours_options", "theirs_options"),
    [
        ("ppo", "vanilla", {"clip_high": 0.28}, {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}),
        ("gspo", "gspo", {}, {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}),
        ("cispo", "cispo", {"clip_high": 1.3}, {"clip_ratio_low": 1.0, "clip_ratio_high": 0.3}),
    ],
)
def test_losses_gradients_and_statistics_agree(
    batch, name, theirs, ours_options, theirs_options, loss_agg
):
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        loss_agg_mode=loss_agg,
        **theirs_options,
    )
    weights = torch.linspace(0.1, 2, NUM_SEQS * LENGTH).view(NUM_SEQS, LENGTH)
    theirs_current = batch.current.clone().requires_grad_()
    expected, metrics = core_algos.get_policy_loss_fn(theirs)(
        old_log_prob=batch.old,
        log_prob=theirs_current,
        advantages=batch.advantages,
        response_mask=batch.mask,
        loss_agg_mode=loss_agg,
        config=config,
        rollout_is_weights=weights,
    )
    current = batch.current.clone().requires_grad_()
    inputs = LossInputs(
        logprobs_N=batch.flat(current),
        advantages_N=batch.flat(batch.advantages),
        old_logprobs_N=batch.flat(batch.old),
        behaviour_logprobs_N=batch.flat(batch.behaviour),
        seq_N=batch.seq_N,
        num_seqs=NUM_SEQS,
    )
    loss_N, statistics = compute_loss(name, inputs, **ours_options)
    denominators = Denominators.of(batch.seq_N, constant_length=LENGTH)
    ours = aggregate(loss_agg, loss_N * batch.flat(weights), batch.seq_N, NUM_SEQS, denominators)
    assert_same(ours, expected)
    assert_same(
        *(
            torch.autograd.grad(*pair)[0]
            for pair in zip((ours, expected), (current, theirs_current), strict=True)
        )
    )
    for key, value in statistics.items():
        assert float(value) / len(loss_N) == pytest.approx(metrics[f"actor/{key}"], abs=1e-6)


def test_the_gradient_of_dppo_agrees(batch):
    config = ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_c=1e9
    )
    theirs_current = batch.current.clone().requires_grad_()
    expected, _ = core_algos.get_policy_loss_fn("dppo_tv")(
        old_log_prob=batch.behaviour,
        log_prob=theirs_current,
        advantages=batch.advantages,
        response_mask=batch.mask,
        config=config,
    )
    current = batch.current.clone().requires_grad_()
    flat = batch.flat(current)
    behaviour_N, advantages_N = batch.flat(batch.behaviour), batch.flat(batch.advantages)
    inputs = LossInputs(flat, advantages_N, behaviour_N, behaviour_N, batch.seq_N, NUM_SEQS)
    loss_N, _ = compute_loss("dppo", inputs, kl_tau=0.0)
    expected.backward()
    loss_N.mean().backward()
    assert_same(current.grad, theirs_current.grad)


@pytest.mark.parametrize("name", ["k1", "k2", "k3", "k1+", "k3+"])
def test_kl_estimates_agree(batch, name):
    current = batch.current.clone().requires_grad_()
    ours = kl_per_token(name, batch.flat(current), batch.flat(batch.old))
    theirs_current = batch.current.clone().requires_grad_()
    theirs = batch.flat(core_algos.kl_penalty(theirs_current, batch.old, name))
    assert_same(ours, theirs)
    assert_same(
        torch.autograd.grad(ours.sum(), current)[0],
        torch.autograd.grad(theirs.sum(), theirs_current)[0],
    )


@pytest.mark.parametrize("spread", [0.01, 0.3, 2.0])
@pytest.mark.parametrize(
    ("name", "options", "level", "threshold"),
    [
        ("tis", {}, "token", 2.0),
        ("tis", {"level": "sequence"}, "sequence", 2.0),
        ("icepop", {}, "token", "0.5_5.0"),
    ],
)
def test_importance_weights_agree(name, options, level, threshold, spread):
    batch = Batch(0, spread)
    theirs, _ = compute_rollout_correction_weights(
        batch.old - batch.behaviour, batch.mask, level, threshold
    )
    ours = correct(name, batch.correction_inputs(), **options).weight_N
    assert_same(ours, batch.flat(theirs))


@pytest.mark.parametrize("spread", [0.01, 0.3, 2.0])
@pytest.mark.parametrize(
    ("name", "theirs", "threshold"),
    [
        # verl bounds −log w, so a bound c on w is 1/c there
        ("geometric", "seq_mean_k1", f"{1 / 1.01}_{1 / 0.99}"),
        ("mis", "seq_sum_k1", f"{1 / 3}_1e30"),
    ],
)
def test_dropped_sequences_agree(name, theirs, threshold, spread):
    batch = Batch(1, spread)
    kept, _ = compute_rollout_rejection_mask(
        batch.old - batch.behaviour, batch.mask, theirs, threshold
    )
    ours = correct(name, batch.correction_inputs()).weight_N
    assert_same(ours, batch.flat(kept))


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights_of_tokens_that_are_far_off_agree(level):
    batch = Batch(2, 0.3)
    batch.behaviour[::3, 0] -= 30.0
    batch.behaviour[::4, 0] += 45.0
    log_ratio = batch.old - batch.behaviour
    theirs, _ = compute_rollout_correction_weights(log_ratio, batch.mask, level, 2.0)
    ours = correct("tis", batch.correction_inputs(), level=level).weight_N
    assert_same(ours, batch.flat(theirs))
    for name, option, threshold in (
        ("geometric", "seq_mean_k1", f"{1 / 1.01}_{1 / 0.99}"),
        ("mis", "seq_sum_k1", f"{1 / 3}_1e30"),
    ):
        kept, _ = compute_rollout_rejection_mask(log_ratio, batch.mask, option, threshold)
        assert_same(correct(name, batch.correction_inputs()).weight_N, batch.flat(kept))


def test_the_decoupled_weight_is_the_one_without_a_cap(batch):
    theirs, _ = compute_rollout_correction_weights(
        batch.old - batch.behaviour, batch.mask, "token", 1e9
    )
    assert_same(correct("decoupled", batch.correction_inputs()).weight_N, batch.flat(theirs))


def _their_loss(name, batch, current, mask, **options):
    config = ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, loss_agg_mode="token-mean"
    )
    for key, value in options.items():
        object.__setattr__(config, key, value)
    return core_algos.get_policy_loss_fn(name)(
        old_log_prob=batch.old,
        log_prob=current,
        advantages=batch.advantages,
        response_mask=mask,
        loss_agg_mode="token-mean",
        config=config,
    )[0]


def _our_loss(name, batch, current, weight_N: Tensor | float = 1.0, **options):
    inputs = LossInputs(
        batch.flat(current),
        batch.flat(batch.advantages),
        batch.flat(batch.old),
        batch.flat(batch.behaviour),
        batch.seq_N,
        NUM_SEQS,
    )
    loss_N, _ = compute_loss(name, inputs, **options)
    denominators = Denominators.of(batch.seq_N)
    return aggregate("token-mean", weight_N * loss_N, batch.seq_N, NUM_SEQS, denominators)


def test_cispo_has_no_lower_clip_and_verl_has_one(batch):
    # said in docs/training.md: verl's default clips below at 0.8, the paper nowhere
    theirs, ours = (batch.current.clone().requires_grad_() for _ in range(2))
    _their_loss("cispo", batch, theirs, batch.mask, clip_ratio_high=0.3).backward()
    _our_loss("cispo", batch, ours, clip_high=1.3).backward()
    ratio = (batch.current - batch.old).exp()
    clipped = (ratio < 0.8) & (batch.mask == 1)
    assert clipped.any()
    assert_same(ours.grad[~clipped], theirs.grad[~clipped])
    assert_same(ours.grad[clipped], (theirs.grad * ratio / 0.8)[clipped])


@pytest.mark.parametrize(
    ("name", "theirs", "threshold", "spread"),
    [
        ("geometric", "seq_mean_k1", f"{1 / 1.01}_{1 / 0.99}", 0.05),
        ("mis", "seq_sum_k1", f"{1 / 3}_1e30", 0.6),
    ],
)
def test_dropped_tokens_stay_in_our_denominator_and_leave_verls(name, theirs, threshold, spread):
    # said in docs/training.md
    batch = Batch(1, spread)
    kept, _ = compute_rollout_rejection_mask(
        batch.old - batch.behaviour, batch.mask, theirs, threshold
    )
    assert 0 < kept.sum() < batch.mask.sum()
    weight_N = correct(name, batch.correction_inputs()).weight_N
    ours = _our_loss("ppo", batch, batch.current, weight_N)
    expected = _their_loss("vanilla", batch, batch.current, kept)
    assert_same(ours * batch.mask.sum(), expected * kept.sum())


def test_the_mismatch_agrees(batch):
    theirs = compute_offpolicy_metrics(batch.old, batch.behaviour, batch.mask)
    _, weights = compute_rollout_correction_weights(
        batch.old - batch.behaviour, batch.mask, "token", 1e9
    )
    lag_N = torch.zeros_like(batch.seq_N)
    ours = mismatch_statistics(batch.flat(batch.old), batch.flat(batch.behaviour), lag_N)
    assert ours["staleness/k3/lag_0"] == pytest.approx(theirs["k3_kl"], abs=1e-6)
    effective = ours["staleness/effective_sample_size/lag_0"]
    assert effective == pytest.approx(weights["rollout_is_eff_sample_size"], abs=1e-5)
    assert ours["staleness/max_ratio/lag_0"] == pytest.approx(weights["rollout_is_max"], rel=1e-5)
