"""A whole step with masks, normalised weights and either denominator, on a real model."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tinkermq.actors.training.batch import assemble
from tinkermq.actors.training.model import load_model
from tinkermq.actors.training.step import Trainer
from tinkermq.schemas.config.job import JobConfig

from tests.support.groups import random_group


def one_step(folder: Path, **algorithm: Any) -> tuple[dict[str, float], torch.Tensor]:
    """Return the numbers of one step, and the head's weights behind it."""
    torch.set_num_threads(1)
    config = JobConfig.model_validate(
        {
            "model": {"path": str(folder)},
            "env": {"game": "none"},
            "rollout": {"max_prompt_tokens": 32, "max_response_tokens": 32, "max_turn_tokens": 16},
            "learner": {
                "lr": 1e-3,
                "microbatch_tokens": 128,
                "max_row_tokens": 64,
                "grad_clip": 1e9,
            },
            "algorithm": algorithm,
        }
    )
    trainer = Trainer(load_model(config.model, config.learner, None), config, total_steps=20)
    rng = np.random.default_rng(4)
    report = trainer.step(assemble([random_group(rng, number) for number in range(4)]), 1)
    return report.numbers, trainer.model.get_parameter("lm_head.weight").detach().clone()


MASK = {"correction": "none", "correction_masks": [{"low": 0.3}]}


def test_tokens_that_a_mask_drops_count_in_the_denominator_or_do_not(folder: Path) -> None:
    everything, _ = one_step(folder, correction="none")
    counted, _ = one_step(folder, **MASK)
    left_out, _ = one_step(folder, **MASK, correction_denominator="kept")
    dropped = counted["actor/correction_dropped"]
    assert 0.1 < dropped < 0.9
    assert left_out["actor/correction_dropped"] == pytest.approx(dropped)
    assert left_out["actor/grad_norm"] * (1 - dropped) == pytest.approx(counted["actor/grad_norm"])
    assert everything["actor/grad_norm"] != pytest.approx(counted["actor/grad_norm"])
    for name in ("off_policy/kl", "off_policy/chi2_token", "staleness/num_tokens/lag_0"):
        values = [numbers[name] for numbers in (everything, counted, left_out)]
        assert values == pytest.approx([values[0]] * 3), name  # of all tokens, dropped or not


def test_a_step_of_which_masks_leave_nothing_is_made_and_moves_no_weight(folder: Path) -> None:
    everything = {"correction_masks": [{"high": 1e-9}], "correction_denominator": "kept"}
    numbers, _ = one_step(folder, **everything)
    assert numbers["actor/correction_dropped"] == 1
    assert numbers["actor/grad_norm"] == 0
    assert all(map(math.isfinite, numbers.values()))


def test_sequences_are_dropped_alike_whatever_the_micro_batches(folder: Path) -> None:
    mask = {"over": "sequence_mean", "low": 0.5}
    parts, _ = one_step(folder, correction="none", correction_masks=[mask])
    whole, _ = one_step(
        folder, correction="none", correction_masks=[mask], correction_normalise=True
    )
    assert parts["actor/correction_dropped"] == whole["actor/correction_dropped"] > 0
    assert parts["actor/grad_norm"] == pytest.approx(whole["actor/grad_norm"], rel=1e-5)


def test_normalised_weights_scale_the_step(folder: Path) -> None:
    plain, _ = one_step(folder, correction="tis")
    scaled, _ = one_step(folder, correction="tis", correction_normalise=True)
    assert scaled["actor/correction_weight"] == pytest.approx(1.0, rel=1e-4)
    ratio = scaled["actor/grad_norm"] / plain["actor/grad_norm"]
    assert ratio == pytest.approx(1 / plain["actor/correction_weight"], rel=1e-4)


def test_a_mask_that_drops_nothing_changes_no_bit(folder: Path) -> None:
    _, plain = one_step(folder)
    _, loose = one_step(folder, correction_masks=[{"low": 1e-9, "high": 1e12}])
    assert torch.equal(plain, loose)
