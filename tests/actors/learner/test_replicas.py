"""Ranks that hold several copies of the model train as one process does, whatever is trained."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tinkermq.actors.policy.policies import MAIN
from torch.distributed.tensor import DTensor

from tests.actors.learner.test_ranks import (
    HARD,
    KINDS,
    Trained,
    assert_same_reports,
    assert_same_weights,
    config_of,
    groups_of,
    trained,
)
from tests.support.images import make_vision_model
from tests.support.models import make_tiny_model

torch.set_num_threads(1)

TWO_COPIES = {"replicas": 2}


def sections_of(kind: str) -> dict[str, Any]:
    """Return what a kind of training asks for."""
    return HARD if kind == "policy" else KINDS[kind]


@pytest.mark.full
@pytest.mark.parametrize("kind", ["policy", "critic", "images, adapter"])
def test_two_copies_over_four_ranks_go_on_from_one_process_and_it_from_them(
    tmp_path: Path, kind: str
) -> None:
    made_of = partial(make_vision_model, kind="qwen2_5_vl") if "images" in kind else make_tiny_model
    folder = made_of(tmp_path / "model")
    sections = sections_of(kind)
    alone = config_of(folder, 1, **sections)
    copied = {**sections, "learner": {**sections.get("learner", {}), **TWO_COPIES}}
    four = config_of(folder, 4, **copied)
    groups = partial(groups_of, kind)
    trained(alone, range(1, 2), save_to=tmp_path / "one", groups=groups)
    begun = tmp_path / "one" / "checkpoints" / "step_000001"
    expected, weights = trained(alone, range(2, 5), begun, groups=groups)

    both = Trained(four, begun, groups)
    try:
        parts = [one for one in both.policies.models[MAIN].parameters() if isinstance(one, DTensor)]
        assert parts
        for part in parts:
            assert part.device_mesh.shape == (2, 2)
            assert part.to_local().shape[0] == (part.shape[0] + 1) // 2
        reports = both.train(range(2, 4))
        middle = both.save(tmp_path / "four", 3)
        reports += both.train(range(4, 5))
        made = both.weights
    finally:
        both.ranks.close()
    assert_same_reports(reports, expected)
    assert_same_weights(made, weights)

    _, resumed = trained(alone, range(4, 5), middle, groups=groups)
    assert_same_weights(resumed, weights)


@pytest.mark.full
def test_as_many_copies_as_ranks_hold_the_whole_model_and_come_to_the_same_bits_again(
    tmp_path: Path,
) -> None:
    folder = make_tiny_model(tmp_path)
    learner = {**HARD["learner"], "replicas": 2}
    two = config_of(folder, 2, **{**HARD, "learner": learner})
    reports, weights = trained(two, range(1, 4))
    expected, alone = trained(config_of(folder, 1, **HARD), range(1, 4))
    assert_same_reports(reports, expected)
    assert_same_weights(weights, alone)
    _, again = trained(two, range(1, 4))
    assert again.keys() == weights.keys()
    assert all(torch.equal(again[name], weights[name]) for name in weights)
