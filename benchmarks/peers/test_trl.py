"""The same tensors through TRL 1.16's GRPO loss, and its overlong penalty, give the same numbers.

Opt-in, as docs/training.md says: `pytest -m bench`, with the extra `bench`. The loss is a method of
its trainer; it is called here with an object that holds just what the method reads.
"""

# TRL is of the `bench` extra, which development does without.
# pyright: reportMissingImports=false

import warnings
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tinkermq.actors.training.advantages import overlong_penalty
from tinkermq.actors.training.losses import (
    Denominators,
    LossInputs,
    aggregate,
    compute_loss,
    kl_per_token,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # trl and accelerate warn while they are imported
    pytest.importorskip("trl", reason="compares with TRL 1.16: make bench", exc_type=ImportError)
    from trl.rewards.other_rewards import get_soft_overlong_punishment
    from trl.trainer.grpo_trainer import GRPOTrainer

pytestmark = [pytest.mark.bench, pytest.mark.filterwarnings("ignore")]

NUM_SEQS, LENGTH = 8, 6


def trl_loss(logprobs, old, reference, advantages_S, mask, **settings):
    """Run the trainer's loss on given log-probs: rows [S, L], `mask` says what counts."""
    args = SimpleNamespace(
        use_bias_correction_kl=False, delta=None, steps_per_generation=1, temperature=1.0
    )
    accelerator = SimpleNamespace(
        num_processes=1,
        gather=lambda value: value,
        gather_for_metrics=lambda value: value,
        reduce=lambda value, reduction: value,
    )
    trainer = SimpleNamespace(
        **{"epsilon_low": 0.2, "epsilon_high": 0.28, "importance_sampling_level": "token"}
        | {"beta": 0.0, "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None}
        | {"use_vllm": False, "_entropy_bonus_enabled": False, "aux_loss_enabled": False}
        | {"current_gradient_accumulation_steps": 1, "max_completion_length": 10}
        | {"args": args, "accelerator": accelerator, "model": torch.nn.Linear(1, 1)}
        | {"_metrics": defaultdict(lambda: defaultdict(list))}
        | {"_get_per_token_logps_and_entropies": lambda *_, **__: (logprobs, logprobs, None)}
        | settings
    )
    ids = torch.zeros_like(mask, dtype=torch.int64)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1] + 1,
        "completion_ids": ids,
        "completion_mask": torch.ones_like(mask),
        "tool_mask": mask,
        "advantages": advantages_S,
        "old_per_token_logps": old,
        "ref_per_token_logps": reference,
        "num_items_in_batch": mask.sum(),
    }
    its: Any = GRPOTrainer._compute_loss
    return its(trainer, trainer.model, inputs)


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
@pytest.mark.parametrize(
    ("loss", "options", "loss_agg", "settings"),
    [
        ("ppo", {"clip_high": 0.28, "dual_clip": 1e9}, "token-mean", {"loss_type": "dapo"}),
        ("ppo", {"clip_high": 0.28, "dual_clip": 1e9}, "token-mean", {"loss_type": "bnpo"}),
        (
            "ppo",
            {"clip_high": 0.28, "dual_clip": 1e9},
            "seq-mean-token-mean",
            {"loss_type": "grpo"},
        ),
        (
            "ppo",
            {"clip_high": 0.28, "dual_clip": 1e9},
            "seq-mean-token-sum-norm",
            {"loss_type": "dr_grpo"},
        ),
        ("cispo", {"clip_high": 1.5}, "token-mean", {"loss_type": "cispo", "epsilon_high": 1.5}),
        (
            "gspo",
            {"clip_low": 0.2, "clip_high": 0.28},
            "seq-mean-token-mean",
            {"loss_type": "grpo", "importance_sampling_level": "sequence"},
        ),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_losses_and_gradients_agree(seed, loss, options, loss_agg, settings, kl_coef):
    torch.manual_seed(seed)
    old = -torch.rand(NUM_SEQS, LENGTH) - 0.1
    reference, start = old + 0.3 * torch.randn(2, NUM_SEQS, LENGTH)
    advantages_S = torch.randn(NUM_SEQS)
    mask = (torch.rand(NUM_SEQS, LENGTH) < 0.7).long()
    mask[:, 0] = 1
    place = mask.nonzero(as_tuple=True)

    theirs = start.clone().requires_grad_()
    expected = trl_loss(theirs, old, reference, advantages_S, mask, beta=kl_coef, **settings)
    ours = start.clone().requires_grad_()
    seq_N = place[0]
    inputs = LossInputs(ours[place], advantages_S[seq_N], old[place], old[place], seq_N, NUM_SEQS)
    loss_N, _ = compute_loss(loss, inputs, **options)
    loss_N = loss_N + kl_coef * kl_per_token("k3", ours[place], reference[place])
    value = aggregate(loss_agg, loss_N, seq_N, NUM_SEQS, Denominators.of(seq_N, 10))
    torch.testing.assert_close(value, expected, atol=1e-6, rtol=1e-6)
    [gradient] = torch.autograd.grad(value, ours)
    [expected_gradient] = torch.autograd.grad(expected, theirs)
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-6, rtol=1e-6)


def test_the_overlong_penalty_agrees():
    lengths = list(range(1, 101))
    theirs = get_soft_overlong_punishment(max_completion_len=100, soft_punish_cache=20)
    expected = theirs(completions=[""] * 100, completion_ids=[[0] * n for n in lengths])
    ours = overlong_penalty(torch.tensor(lengths), 100, 20)
    torch.testing.assert_close(ours, torch.tensor(expected), atol=1e-6, rtol=1e-6)


def test_masked_completions_leave_the_loss_and_what_it_is_divided_by():
    # TRL's mask_truncated_completions and algorithm.overlong_filter
    torch.manual_seed(5)
    old = -torch.rand(NUM_SEQS, LENGTH) - 0.1
    current, advantages_S = old + 0.3 * torch.randn(NUM_SEQS, LENGTH), torch.randn(NUM_SEQS)
    kept_S = torch.tensor([True, False] * (NUM_SEQS // 2))
    mask = torch.ones(NUM_SEQS, LENGTH, dtype=torch.int64) * kept_S[:, None]
    expected = trl_loss(current, old, old, advantages_S, mask, loss_type="dapo")
    place = mask.nonzero(as_tuple=True)
    seq_N = place[0]
    inputs = LossInputs(
        current[place], advantages_S[seq_N], old[place], old[place], seq_N, NUM_SEQS
    )
    loss_N, _ = compute_loss("ppo", inputs, clip_high=0.28, dual_clip=1e9)
    ours = aggregate("token-mean", loss_N, seq_N, NUM_SEQS, Denominators.of(seq_N))
    torch.testing.assert_close(ours, expected, atol=1e-6, rtol=1e-6)
