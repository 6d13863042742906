"""Muon by two ranks: what one process trains, and each reads the other."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tinkermq.schemas.config.job import JobConfig

from tests.actors.learner.test_ranks import config_of, trained
from tests.actors.learner.test_ranks_kinds import distance

torch.set_num_threads(1)

WAYS: dict[str, tuple[dict[str, Any], float]] = {
    "muon": ({"optimizer": "muon"}, 1e-5),
    "muon, bfloat16": ({"optimizer": "muon", "dtype": "bfloat16"}, 0.05),
    "muon, adapter": ({"optimizer": "muon"}, 1e-5),
    "muon, critic": ({"optimizer": "muon"}, 1e-5),
}
"""How the learner trains, and how far ranks may be from one process, as a share of how far training
moved that: Newton-Schulz in bfloat16 makes hundredths of a gradient's last bit."""


def _config(folder: Path, ranks: int, way: str, **learner: Any) -> JobConfig:
    sections: dict[str, Any] = {"learner": {"lr": 1e-3, "eps": 1e-3, **WAYS[way][0], **learner}}
    if "adapter" in way:
        sections["lora"] = {"rank": 4}
    if "critic" in way:
        sections |= {"algorithm": {"advantage": "gae"}, "critic": {"lr": 1e-3}}
    return config_of(folder, ranks, **sections)


@pytest.mark.full
@pytest.mark.parametrize("way", WAYS)
def test_one_process_goes_on_from_two_ranks_as_if_it_had_been_alone(
    folder: Path, tmp_path: Path, way: str
) -> None:
    one = _config(folder, 1, way)
    trained(_config(folder, 2, way), range(1, 3), save_to=tmp_path)
    _, made = trained(one, range(3, 5), tmp_path / "checkpoints" / "step_000002")
    _, begun = trained(one, range(0))
    _, expected = trained(one, range(1, 5))
    assert distance(made, expected, begun) < WAYS[way][1]


@pytest.mark.full
@pytest.mark.parametrize("way", WAYS)
def test_ranks_go_on_from_one_process_and_from_ranks(
    folder: Path, tmp_path: Path, way: str
) -> None:
    one, two = (_config(folder, ranks, way) for ranks in (1, 2))
    four = _config(folder, 4, way, replicas=2)
    trained(one, range(1, 3), save_to=tmp_path)
    _, begun = trained(one, range(0))
    _, expected = trained(one, range(1, 5))
    for config, step in ((two, 3), (four, 4)):
        checkpoint = tmp_path / "checkpoints" / f"step_{step - 1:06d}"
        _, made = trained(config, range(step, step + 1), checkpoint, save_to=tmp_path)
    assert distance(made, expected, begun) < WAYS[way][1]
