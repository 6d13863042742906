"""All kinds of what is trained, in both dtypes, by one rank and by two: the whole product."""

from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from tinkermq.actors.training import parallel
from tinkermq.actors.training.batch import assemble
from tinkermq.actors.training.model import load_model
from tinkermq.actors.training.parallel import Meeting, Parallel
from tinkermq.actors.training.step import Trainer
from tinkermq.actors.weights.broadcast_group import ProcessGroupFailed
from tinkermq.schemas.config.sections import LearnerConfig
from tinkermq.schemas.rollout import Group
from torch import Tensor

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
from tests.support.models import make_tiny_model

torch.set_num_threads(1)

PARTS: dict[str, dict[str, Any]] = {
    "critic": {"algorithm": {"advantage": "gae"}, "critic": {"lr": 0.1}},
    "adapter": {"lora": {"rank": 4}},
    "images": {"env": {"game": "geo3k"}},
}
KINDS = [
    ", ".join(name for name, there in zip(PARTS, which, strict=True) if there) or "policy"
    for which in product((False, True), repeat=len(PARTS))
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model that reads, and one that sees."""
    made = tmp_path_factory.mktemp("models")
    return {
        "reading": make_tiny_model(made / "reading"),
        "seeing": make_vision_model(made / "seeing", "qwen2_5_vl"),
    }


def sections_of(kind: str) -> dict[str, Any]:
    """Put together what the parts of a kind ask for."""
    sections: dict[str, Any] = {}
    for part in kind.split(", "):
        sections |= PARTS.get(part, {})
    return sections


def distance(made: dict[str, Tensor], expected: dict[str, Tensor], begun: dict[str, Tensor]):
    """Return how far two models are from each other, as a share of how far training moved one."""

    def norm(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
        return float(torch.cat([(a[name] - b[name]).flatten() for name in expected]).norm())

    return norm(made, expected) / norm(expected, begun)


def check(folder: Path, kind: str, dtype: str) -> None:
    """Train two steps by one rank and by two, which must come to the same."""
    sections = {**sections_of(kind), "learner": {"dtype": dtype}}
    groups = partial(groups_of, kind)
    one, two = (
        trained(config_of(folder, ranks, **sections), range(1, 3), groups=groups)
        for ranks in (1, 2)
    )
    assert one[1].keys() == two[1].keys()
    assert all(report.numbers["actor/grad_norm"] > 0 for report in one[0])
    if dtype == "float32":
        assert_same_reports(two[0], one[0])
        assert_same_weights(two[1], one[1])
        return
    _, begun = trained(config_of(folder, 1, **sections), range(0), groups=groups)
    assert distance(two[1], one[1], begun) < 0.1
    for made, expected in zip(two[0], one[0], strict=True):
        for name in ("actor/grad_norm", "critic/grad_norm", "critic/returns/mean"):
            wanted = expected.numbers.get(name)
            assert wanted is None or made.numbers[name] == pytest.approx(wanted, rel=0.05), name


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_train_what_one_does(folders: dict[str, Path], kind: str, dtype: str) -> None:
    check(folders["seeing" if "images" in kind else "reading"], kind, dtype)


def masked(step: int) -> list[Group]:
    """Cut every third episode off; of the batch of one episode, all."""
    groups = batch(step)
    return [
        group.model_copy(
            update={
                "trajectories": [
                    item.model_copy(update={"finish": "done" if place % 3 else "length"})
                    for place, item in enumerate(group.trajectories)
                ]
            }
        )
        for group in groups
    ]


@pytest.mark.full
@pytest.mark.parametrize("advantage", ["grpo", "gae"])
def test_two_ranks_mask_episodes_as_one_does(folders: dict[str, Path], advantage: str) -> None:
    algorithm = {**HARD["algorithm"], "advantage": advantage, "overlong_filter": True}
    sections = {**HARD, "algorithm": algorithm}
    one, two = (
        trained(config_of(folders["reading"], ranks, **sections), range(1, 4), groups=masked)
        for ranks in (1, 2)
    )
    assert_same_reports(two[0], one[0])
    assert_same_weights(two[1], one[1])


def test_a_divided_critic_trains_in_bfloat16(folders: dict[str, Path]) -> None:
    config = config_of(
        folders["reading"],
        1,
        **PARTS["critic"],
        learner={"dtype": "bfloat16", "num_minibatches": 2},
    )
    divided = Parallel.join(0, config.learner, Meeting.open())
    try:
        reports = [
            Trainer(
                load_model(config.model, config.learner), config, total_steps=4, parallel=parallel
            ).step(assemble(batch(1)), 1)
            for parallel in (Parallel(), divided)
        ]
    finally:
        divided.leave()
    alone, made = (report.numbers for report in reports)
    for name in ("actor/grad_norm", "critic/grad_norm", "critic/vf_loss", "critic/values/max"):
        assert made[name] == pytest.approx(alone[name], rel=0.05, abs=1e-6), name
    assert made["critic/grad_norm"] > 0


def test_a_rank_that_no_other_reaches_says_from_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "COLLECTIVE_DEADLINE_S", 1.0)
    with pytest.raises(
        ProcessGroupFailed,
        match=r"rank 0 of the learner, at 127\.0\.0\.1 \(lo\), cannot connect to the others: ",
    ) as raised:
        Parallel.join(0, LearnerConfig(ranks=2, slots=2), Meeting.open())
    assert "NCCL_SOCKET_IFNAME" in raised.value.hint
