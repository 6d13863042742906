"""The same log-probs and scores through TRL 1.16's DPO and reward losses give the same numbers.

Opt-in, as docs/training.md says: `pytest -m bench`, with the extra `bench`. The losses are methods
of its trainers; they are called here with objects that hold just what the methods read.
"""

# TRL is of the `bench` extra, which development does without.
# pyright: reportMissingImports=false

import warnings
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tinkermq.actors.learner.preferences.pair_losses import Pairs, dpo_loss, reward_loss, weigh
from tinkermq.schemas.config.sft import SftConfig

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # trl and accelerate warn while they are imported
    pytest.importorskip("trl", reason="compares with TRL 1.16: make bench", exc_type=ImportError)
    from trl.trainer.dpo_trainer import DPOTrainer
    from trl.trainer.reward_trainer import RewardTrainer

pytestmark = [pytest.mark.bench, pytest.mark.filterwarnings("ignore")]

NUM_PAIRS, LENGTH = 5, 7
BETA = 0.3


def accelerator() -> Any:
    return SimpleNamespace(
        device=torch.device("cpu"),
        gather_for_metrics=lambda value: value,
        gather=lambda value: value,
        unwrap_model=lambda model: model,
    )


def model_of(logprobs: torch.Tensor) -> Any:
    """A model whose forward pass says these log-probs: [2P, L], the chosen answers first."""
    none = torch.zeros_like(logprobs)

    def forward(**_: Any) -> Any:
        more = {"entropy": none, "mean_logits": none, "is_top1": none.bool()}
        return SimpleNamespace(log_probs=logprobs, **more)

    return forward


def trl_dpo(now: torch.Tensor, before: torch.Tensor, mask: torch.Tensor, **settings: Any) -> Any:
    """Run the trainer's loss on given log-probs; `mask` [2P, L] says what answers are."""
    trainer = SimpleNamespace(
        **{"beta": BETA, "label_smoothing": 0.0, "loss_types": ["sigmoid"], "loss_weights": [1.0]}
        | {"f_divergence_type": "reverse_kl", "use_weighting": False, "aux_loss_enabled": False}
        | {"precompute_ref_logps": False, "ld_alpha": None, "ref_model": model_of(before)}
        | {"accelerator": accelerator(), "model": torch.nn.Linear(1, 1), "_total_train_tokens": 0}
        | {"args": SimpleNamespace(gradient_checkpointing_kwargs=None), "_tp_size": 1}
        | {"_metrics": defaultdict(lambda: defaultdict(list))}
        | settings
    )
    completion = torch.cat([torch.zeros_like(mask[:, :1]), mask], 1)
    inputs = {
        "input_ids": torch.zeros_like(completion),
        "attention_mask": torch.ones_like(completion),
        "completion_mask": completion,
    }
    model = model_of(now)
    its: Any = DPOTrainer._compute_loss
    trainer.model = SimpleNamespace(training=True)
    return its(trainer, model, inputs, False)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({}, {}),
        ({"dpo_loss": "ipo"}, {"loss_types": ["ipo"]}),
        ({"sft_coef": 0.7}, {"loss_types": ["sigmoid", "sft"], "loss_weights": [1.0, 0.7]}),
    ],
    ids=str,
)
def test_dpo_and_its_gradient_agree(
    seed: int, ours: dict[str, Any], theirs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trl.trainer.dpo_trainer.is_peft_model", lambda _: False, raising=False)
    monkeypatch.setattr(
        "trl.trainer.dpo_trainer.disable_gradient_checkpointing",
        lambda *_: warnings.catch_warnings(),
        raising=False,
    )
    torch.manual_seed(seed)
    now = -torch.rand(2 * NUM_PAIRS, LENGTH, dtype=torch.float64) - 0.1
    before = now + 0.3 * torch.randn_like(now)
    mask = (torch.rand(2 * NUM_PAIRS, LENGTH) < 0.7).long()
    mask[:, 0] = 1
    now, before = now * mask, before * mask
    read = now.clone().requires_grad_()
    expected = trl_dpo(read, before, mask, **theirs)
    [gradient] = torch.autograd.grad(expected, read)

    keys = {"data": ["p"], "objective": "dpo", "beta": BETA, **ours}
    config = SftConfig.model_validate(keys)

    def by_pair(values: torch.Tensor) -> torch.Tensor:
        return values.sum(1).view(2, NUM_PAIRS).T

    pairs = Pairs(by_pair(before), by_pair(mask.double()))
    found = weigh(lambda scores: dpo_loss(config, scores, pairs), by_pair(now))
    assert found.loss == pytest.approx(float(expected.detach()), abs=1e-9)
    weights = found.gradient_P2.T.reshape(-1)[:, None] * mask
    # Where no answer is, its model says log-probs of 0, of which there is no gradient.
    torch.testing.assert_close(weights, gradient * mask, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("center", [0.0, 0.1])
def test_the_loss_of_reward_models_and_its_gradient_agree(center: float) -> None:
    torch.manual_seed(0)
    scores = torch.randn(2 * NUM_PAIRS, 1, dtype=torch.float64).requires_grad_()
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(center_rewards_coefficient=center or None),
        accelerator=accelerator(),
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
    )
    inputs = {"attention_mask": torch.ones(2 * NUM_PAIRS, 1)}
    its: Any = RewardTrainer.compute_loss
    expected = its(trainer, lambda **_: SimpleNamespace(logits=scores), dict(inputs))
    [gradient] = torch.autograd.grad(expected, scores)
    config = SftConfig(data=["p"], objective="reward", center_coef=center)
    scores_P2 = scores.detach().view(2, NUM_PAIRS).T
    found = weigh(lambda read: reward_loss(config, read), scores_P2)
    assert found.loss == pytest.approx(float(expected.detach()), abs=1e-9)
    torch.testing.assert_close(found.gradient_P2.T.reshape(-1, 1), gradient, atol=1e-9, rtol=1e-9)
