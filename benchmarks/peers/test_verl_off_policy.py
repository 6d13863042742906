"""Masks, normalised weights, off-policy metrics and further losses: as verl 0.9.1 has them.

Opt-in as `test_verl.py` is.
"""

# verl: not installed for development.
# pyright: reportMissingImports=false

import math
import warnings
from types import SimpleNamespace

import pytest
import torch
from tinkermq.actors.training.advantages import AdvantageInputs, compute_advantages
from tinkermq.actors.training.losses import (
    Denominators,
    LossInputs,
    aggregate,
    compute_loss,
)
from tinkermq.actors.training.off_policy import (
    correct,
    masked,
    normalised,
    off_policy_statistics,
)
from tinkermq.schemas.config.algorithm import CorrectionMask

from benchmarks.peers.verl_batch import NUM_SEQS, Batch, assert_same, batch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # verl and ray warn while they are imported
    pytest.importorskip(
        "verl.trainer.ppo.core_algos",
        reason="compares with verl 0.9.1: see test_verl.py",
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


def _mask_of(option, threshold):
    """Return our mask for verl's option; its k1 is bounded by exponentials."""
    level, _, of = option.rpartition("_")
    over = {"token": "token", "seq_sum": "sequence_sum", "seq_mean": "sequence_mean"}
    over |= {"seq_max": "sequence_max"}
    if of == "k1":
        low, high = (math.log(float(bound)) for bound in threshold.split("_"))
        bounds = {"low": low, "high": high}
    else:
        bounds = {"high": float(threshold)}
    return CorrectionMask.model_validate({"over": over[level], "of": of, **bounds})


@pytest.mark.parametrize(
    ("option", "threshold"),
    [
        ("token_k1", "0.7_1.4"),
        ("token_k2", "0.05"),
        ("token_k3", "0.05"),
        ("seq_sum_k1", "0.5_2.0"),
        ("seq_sum_k2", "0.4"),
        ("seq_sum_k3", "0.4"),
        ("seq_mean_k1", "0.95_1.05"),
        ("seq_mean_k2", "0.04"),
        ("seq_mean_k3", "0.04"),
        ("seq_max_k2", "0.2"),
        ("seq_max_k3", "0.2"),
    ],
)
def test_masks_agree(batch, option, threshold):
    log_ratio = batch.old - batch.behaviour
    theirs, _ = compute_rollout_rejection_mask(
        log_ratio, batch.mask, rollout_rs=option, rollout_rs_threshold=threshold
    )
    inputs = batch.correction_inputs()
    ours = masked(
        correct("none", inputs), [_mask_of(option, threshold)], inputs, batch.flat(batch.advantages)
    )
    assert_same(ours.weight_N, batch.flat(theirs))


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_normalised_weights_agree(batch, level):
    theirs, _ = compute_rollout_correction_weights(
        batch.old - batch.behaviour,
        batch.mask,
        rollout_is=level,
        rollout_is_threshold=2.0,
        rollout_is_batch_normalize=True,
    )
    inputs = batch.correction_inputs()
    ours = normalised(correct("tis", inputs, level=level), inputs, level=level)
    assert_same(ours.weight_N, batch.flat(theirs))


def test_off_policy_metrics_agree(batch):
    theirs = compute_offpolicy_metrics(batch.old, batch.behaviour, batch.mask)
    ours = off_policy_statistics(
        batch.flat(batch.old), batch.flat(batch.behaviour), batch.seq_N, NUM_SEQS
    )
    for name, value in ours.items():
        assert value == pytest.approx(theirs[name.removeprefix("off_policy/")], abs=1e-5), name


def _policy_config(**options):
    config = ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_c=20.0
    )
    for key, value in options.items():
        object.__setattr__(config, key, value)
    return config


@pytest.mark.parametrize("spread", [0.3, 2.0])
@pytest.mark.parametrize(
    ("name", "theirs", "options", "theirs_options", "of_behaviour"),
    [
        ("sapo", "sapo", {}, {"tau_pos": 1.0, "tau_neg": 1.05}, False),
        ("gmpo", "geo_mean", {}, {"clip_ratio_low": 0.4, "clip_ratio_high": 0.4}, False),
        (
            "cispo",
            "cispo",
            {"clip_low": 0.8, "clip_high": 1.3},
            {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3},
            False,
        ),
        (
            "dppo_kl",
            "dppo_kl",
            {"clip_low": 0.02, "clip_high": 0.03},
            {"clip_ratio_low": 0.02, "clip_ratio_high": 0.03},
            True,
        ),
        ("kl_cov", "kl_cov", {"share": 0.2}, {"kl_cov_ratio": 0.2, "ppo_kl_coef": 1.0}, False),
        (
            "clip_cov",
            "clip_cov",
            {"share": 0.2, "cov_low": 0.1},
            {"clip_cov_ratio": 0.2, "clip_cov_lb": 0.1, "clip_cov_ub": 5.0},
            False,
        ),
    ],
)
def test_further_losses_agree(spread, name, theirs, options, theirs_options, of_behaviour):
    batch = Batch(7, spread)
    config = _policy_config(**theirs_options)
    object.__setattr__(config, "policy_loss", SimpleNamespace(**theirs_options))
    batch.current, batch.behaviour = (  # probabilities under 1, of which binary KLs are made
        rows.clamp(max=-0.02) for rows in (batch.current, batch.behaviour)
    )
    before = batch.behaviour if of_behaviour else batch.old
    theirs_current = batch.current.clone().requires_grad_()
    loss_agg = "seq-mean-token-mean" if name in ("gmpo", "sapo") else "token-mean"
    torch.manual_seed(3)
    expected, _ = core_algos.get_policy_loss_fn(theirs)(
        old_log_prob=before,
        log_prob=theirs_current,
        advantages=batch.advantages,
        response_mask=batch.mask,
        loss_agg_mode=loss_agg,
        config=config,
    )
    current = batch.current.clone().requires_grad_()
    behaviour_N, old_N = batch.flat(batch.behaviour), batch.flat(before)
    inputs = LossInputs(
        batch.flat(current), batch.flat(batch.advantages), old_N, behaviour_N, batch.seq_N, NUM_SEQS
    )
    torch.manual_seed(3)
    loss_N, _ = compute_loss(name, inputs, **options)
    denominators = Denominators.of(batch.seq_N)
    aggregate(loss_agg, loss_N, batch.seq_N, NUM_SEQS, denominators).backward()
    expected.backward()
    assert_same(current.grad, theirs_current.grad)


def test_the_advantage_of_the_best_of_a_group_agrees(batch):
    expected, _ = core_algos.get_adv_estimator_fn("grpo_passk")(
        token_level_rewards=batch.token_rewards.clone(),
        response_mask=batch.mask,
        index=batch.index,
        config={"norm_adv_by_std_in_grpo": True},
    )
    ours = compute_advantages(
        "passk",
        AdvantageInputs(rewards_S=batch.rewards_S, group_S=batch.group_S, seq_N=batch.seq_N),
    )
    assert_same(ours, batch.flat(expected))
