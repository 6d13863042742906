"""Ranks that divide each sequence train as one process does, in real processes."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tinkermq.schemas.wire.errors import ConfigError

from tests.actors.learner.test_ranks import (
    HARD,
    assert_same_reports,
    assert_same_weights,
    batch,
    config_of,
    groups_of,
    trained,
)
from tests.support.images import make_vision_model

pytestmark = pytest.mark.full

torch.set_num_threads(1)

DIVIDED = {"context_parallel": 2}
KINDS: dict[str, dict[str, Any]] = {
    "policy": {},
    "everything that scores": HARD,
    "critic": {"algorithm": {"advantage": "gae"}, "critic": {"lr": 0.1}},
    "adapter": {"lora": {"rank": 4}},
    "recomputed": {"learner": {"gradient_checkpointing": True}},
    "prompts apart": {"learner": {"share_prompts": False}},
    "bfloat16": {"learner": {"dtype": "bfloat16"}},
}


def check(folder: Path, ranks: int, sections: dict[str, Any], **more: Any) -> None:
    """Train with and without dividing sequences, three steps, and compare."""
    learner = sections.get("learner", {})
    alone_too = {key: value for key, value in learner.items() if key != "replicas"}
    apart = {**sections, "learner": {**learner, **DIVIDED}}
    (made, weights), (expected, alone) = (
        trained(config_of(folder, number, **what), range(1, 4), **more)
        for number, what in ((ranks, apart), (1, {**sections, "learner": alone_too}))
    )
    if learner.get("dtype") == "bfloat16":
        for name, value in alone.items():
            assert torch.allclose(weights[name], value, atol=0.02), name
        return
    assert_same_reports(made, expected)
    assert_same_weights(weights, alone)


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_that_divide_each_sequence_train_what_one_does(folder: Path, kind: str) -> None:
    check(folder, 2, KINDS[kind])


@pytest.mark.parametrize("replicas", [1, 2])
def test_two_pairs_of_ranks_that_divide_sequences_train_what_one_does(
    folder: Path, replicas: int
) -> None:
    check(folder, 4, {"learner": {"replicas": replicas, "num_minibatches": 2}})


def test_sequences_with_images_are_divided_like_others(tmp_path: Path) -> None:
    seeing = make_vision_model(tmp_path, "qwen2_5_vl")
    check(seeing, 2, {"env": {"game": "geo3k"}}, groups=partial(groups_of, "images"))


def test_heads_that_cannot_be_divided_are_refused_with_their_number(folder: Path) -> None:
    with pytest.raises(
        ConfigError, match="context_parallel=3 cannot divide a model with num_attention_heads=4"
    ):
        trained(config_of(folder, 3, learner={"context_parallel": 3}), range(1, 2), groups=batch)


def test_varlen_kernels_read_divided_sequences_whole(folder: Path) -> None:
    check(folder, 2, {"model": {"path": str(folder), "attn_implementation": "varlen"}})
